"""fgserve: an OpenAI-style HTTP endpoint."""
