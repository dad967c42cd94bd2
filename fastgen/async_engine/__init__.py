"""AsyncGenerator: a Generator whose steps run in a process of its own, for asyncio programs."""
