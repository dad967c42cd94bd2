"""Dialects of other APIs: Anthropic's messages and OpenAI's responses, by translation to chat completions."""
