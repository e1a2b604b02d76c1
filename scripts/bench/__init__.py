"""What the benchmarks under scripts/ are made of."""
