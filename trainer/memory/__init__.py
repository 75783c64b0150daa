"""Fits a run into its GPUs: estimates its memory without running it, and chooses a plan that fits."""
