"""Kernels in Triton with their launch functions, and how they are compiled. Loaded by the first launch on a GPU."""
