"""Tensor parallelism within a step: the collectives that the model calls, and the residual stream across ranks."""
