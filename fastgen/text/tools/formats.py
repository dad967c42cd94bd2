"""The formats of tool calls by name, and the one that a chat template asks for."""

from __future__ import annotations

from fastgen.text.tools.json_calls import DeepSeek, Hermes, Llama, Mistral, MistralHeads, ObjectList
from fastgen.text.tools.parser import Syntax
from fastgen.text.tools.python_calls import Pythonic
from fastgen.text.tools.xml_calls import QwenCoder

HERMES = Hermes("<tool_call>", "</tool_call>")
LLAMA = Llama("<|python_tag|>", bare="start", arguments="parameters")
MISTRAL = Mistral("[TOOL_CALLS]", bare="anywhere")
MISTRAL_V11 = MistralHeads("[TOOL_CALLS]", ids=True)
MISTRAL_V13 = MistralHeads("[TOOL_CALLS]")
DEEPSEEK_V3 = DeepSeek("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")
DEEPSEEK_V31 = DeepSeek("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>", fenced=False)
QWEN_CODER = QwenCoder("<tool_call>", "</tool_call>", bare="anywhere")
SEED_OSS = QwenCoder("<seed:tool_call>", "</seed:tool_call>", bare="anywhere", lines=False)
PYTHONIC = Pythonic("<|python_tag|>", bare="start")
OLMO_3 = Pythonic("<function_calls>", "</function_calls>")
GRANITE = ObjectList("<|tool_call|>")
PHI_4_MINI = ObjectList("functools")

FORMATS: dict[str, Syntax | None] = {
    "hermes": HERMES,
    "granite4": HERMES,
    "granite": GRANITE,
    "phi4_mini_json": PHI_4_MINI,
    "llama3_json": LLAMA,
    "mistral": None,
    "mistral_v3": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "mistral_v13": MISTRAL_V13,
    "qwen3_coder": QWEN_CODER,
    "qwen3_xml": QWEN_CODER,
    "seed_oss": SEED_OSS,
    "pythonic": PYTHONIC,
    "olmo3": OLMO_3,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
}
"""The formats by the values of the option `tool_call_parser`; None: the template tells which of Mistral's three."""


def find_format(template: str | None, name: str | None = None) -> Syntax | None:
    """Return the format with this name or, by default, the one that a chat template asks for; None if it is unknown."""
    template = template or ""
    syntax = None if name is None else FORMATS[name]
    return syntax or _format_of(template if name is None else "[TOOL_CALLS]" + template)


def _format_of(template: str) -> Syntax | None:
    if "[TOOL_CALLS]" in template:
        return MISTRAL_V11 if "[CALL_ID]" in template else MISTRAL_V13 if "[ARGS]" in template else MISTRAL
    for syntax in (SEED_OSS, OLMO_3, GRANITE):
        if syntax.opens in template:
            return syntax
    if "functools[" in template:
        return PHI_4_MINI
    if "<tool_call>" in template:
        return QWEN_CODER if "<function=" in template else HERMES
    if DEEPSEEK_V3.opens in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "[func_name1(" in template:
        return PYTHONIC
    if "ipython" in template and '"parameters": ' in template:
        return LLAMA
    return None
