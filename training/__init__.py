"""From ledgers to checkpoints: token-exact rows, one TRL trainer each, and proof that vLLM loads the result."""
