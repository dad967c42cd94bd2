"""The engine: from requests to batches, and from the tokens of a batch to outputs."""
