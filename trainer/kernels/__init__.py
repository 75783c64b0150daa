"""Triton kernels, each beside the plain torch code that computes the same where Triton is not."""
