"""Kernels in Triton and Gluon. Each has a launch that checks its arguments, and a torch twin as its specification and
fallback."""
