"""Tensor parallelism within a step: the part of each weight that a rank holds, and the sums across ranks."""
