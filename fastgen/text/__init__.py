"""Text beside token ids: the tokenizer, grammars of structured output, and tool calls in answers."""
