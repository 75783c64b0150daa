"""Triton kernels, each with plain torch code that computes the same if Triton is not installed."""
