"""AsyncGenerator: a Generator whose steps run in a process or a thread of its own, for asyncio programs."""
