"""Kernels for the CPU in C++, compiled at first use if the machine has a compiler."""
