"""From foreign bytes to articles."""
