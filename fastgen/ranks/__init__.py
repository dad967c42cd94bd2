"""The processes of tensor parallelism: how they start, what they send each other, and how they end together."""
