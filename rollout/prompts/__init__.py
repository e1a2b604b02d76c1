"""Prompt templates, one a file, and the function that renders and hashes them."""
