"""Kernels in Gluon for Hopper with their launch functions. The launches in Triton load them."""
