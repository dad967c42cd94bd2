"""Several Generators in processes of one machine that share a stream of work. The parent does not import torch."""
