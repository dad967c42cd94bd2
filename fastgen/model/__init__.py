"""The model: the transformer, its weights, its KV pool, and the sampler."""
