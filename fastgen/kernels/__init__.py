"""Kernels, each with a torch twin as its specification and fallback. The twins are here. The kernels in Triton and in
Gluon, with launch functions that check their arguments, are in `triton` and `hopper`, which only GPUs load."""
