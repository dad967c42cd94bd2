"""Triton kernels. Each has a checked launch, a torch twin that says what it computes, and falls back to the twin."""
