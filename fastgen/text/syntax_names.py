"""The names of the formats of tool calls and reasoning, without their parsers, which load when an answer is parsed."""

from __future__ import annotations

from typing import Literal

ToolCallParser = Literal[
    "hermes", "granite4", "granite", "phi4_mini_json", "llama3_json", "mistral", "mistral_v3", "mistral_v11",
    "mistral_v13", "qwen3_coder", "qwen3_xml", "seed_oss", "pythonic", "olmo3", "deepseek_v3", "deepseek_v31",
]  # fmt: skip
"""The values of the option `tool_call_parser`, the keys of FORMATS in tools/formats.py. vLLM has them too, except the
three versions of Mistral's."""

CALL_MARKS = frozenset((
    "<tool_call>", "</tool_call>", "<|tool_call|>", "functools", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]",
    "[ARGS]", "<seed:tool_call>", "</seed:tool_call>", "<function_calls>", "</function_calls>",
    "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>", "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>",
))  # fmt: skip
"""The marks of calls in all of these formats, which are special tokens in some models."""

ReasoningParser = Literal[
    "off", "think", "mistral",
    "deepseek_r1", "deepseek-r1", "deepseek_v3", "qwen3", "qwen3-thinking", "olmo3", "glm45",
]  # fmt: skip
"""The values of the option `reasoning_parser`: names of our own, then those that vLLM and SGLang use."""
