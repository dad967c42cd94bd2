"""Tensor parallelism: the processes that hold a model together, and what they send each other."""
