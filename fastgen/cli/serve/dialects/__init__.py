"""Dialects of other APIs: Anthropic's messages and OpenAI's responses, and vLLM's and SGLang's routes for trainers."""
