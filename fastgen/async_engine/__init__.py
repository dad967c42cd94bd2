"""AsyncGenerator: a Generator whose steps run in a separate process, for asyncio programs."""
