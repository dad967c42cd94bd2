"""Conversion between text and token ids, grammars for structured output, and tool calls in answers."""
