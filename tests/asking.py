"""Helpers for tests of fgserve's answers: requests of the openai client, and tokenizers with tool calls."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, TypeAdapter
from serving import Server

import fastgen
from fastgen import Generator, SamplingParams
from fastgen.model.generation_config import sampling_defaults
from fastgen.request import RequestOutput

TINY = Path(fastgen.__file__).parent / "tiny"
ENDS = (2, 6)  # ids that end the bundled model's answers
OURS = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
)  # fields that OpenAI's API does not have

BAR = "\uff5c"
DEEPSEEK = tuple(
    f"<{BAR}tool\u2581{each}{BAR}>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
TOLD = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
EACH = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
# Parts of published templates, shortened: {format: (tokens for calls, which are special in Mistral and Llama, and the
# parts of the chat template for tools and for calls)}. Bars are DeepSeek's in its marks.
CALLS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "hermes": (
        ("<tool_call>", "</tool_call>"),
        TOLD,
        EACH + "{{ '\n' if not loop.first }}<tool_call>\n"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}',
    ),
    "mistral": (
        ("[TOOL_CALLS]",),
        TOLD,
        EACH + "{{ '[TOOL_CALLS] [' if loop.first else ', ' }}"
        "{{ {'name': f.name, 'arguments': f.arguments, 'id': call.id} | tojson }}{{ ']' if loop.last }}{% endfor %}",
    ),
    "llama": (
        ("<|python_tag|>",),
        "{% if tools %}<|system|>Environment: ipython {{ tools | tojson }}<|end|>{% endif %}",
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        "{{ '{\"name\": \"' + f.name + '\", ' }}{{ '\"parameters\": ' }}{{ f.arguments | tojson }}}{% endif %}",
    ),
    "mistral_v11": (
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        TOLD,
        EACH + "{% if call.id | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}"
        "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + call.id + '[ARGS]' + f.arguments | tojson }}{% endfor %}",
    ),
    "mistral_v13": (
        ("[TOOL_CALLS]", "[ARGS]"),
        TOLD,
        EACH + "{% set said = f.arguments if f.arguments is string else f.arguments | tojson %}"
        "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + said }}{% endfor %}",
    ),
    "qwen3_coder": (
        ("<tool_call>", "</tool_call>"),
        TOLD,
        EACH + "{{ '\n' if not loop.first }}<tool_call>\n<function={{ f.name }}>\n"
        "{% for key, value in f.arguments | items %}<parameter={{ key }}>\n"
        "{{ value if value is string or value is not iterable else value | tojson }}"
        "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    ),
    "seed_oss": (
        ("<seed:tool_call>", "</seed:tool_call>"),
        TOLD,
        EACH + "{{ '\n' if not loop.first }}<seed:tool_call>\n<function={{ f.name }}>\n"
        "{% for key, value in f.arguments | items %}<parameter={{ key }}>"
        "{{ value if value is string or value is not iterable else value | tojson }}"
        "</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}",
    ),
    "granite": (
        ("<|tool_call|>",),
        TOLD,
        EACH + "{{ '<|tool_call|>[' if loop.first else ', ' }}"
        "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}{{ ']' if loop.last }}{% endfor %}",
    ),
    "olmo3": (
        ("<function_calls>", "</function_calls>"),
        TOLD,
        EACH + "{{ '<function_calls>' if loop.first }}\n{{ f.name }}({% for key in f.arguments %}"
        "{{ key + '=' + '%s' | format(f.arguments[key]) }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ '\n</function_calls>' if loop.last }}{% endfor %}",
    ),
    "pythonic": (
        ("<|python_tag|>",),
        "{% if tools %}<|system|>Environment: ipython [func_name1(a=b)] {{ tools | tojson }}<|end|>{% endif %}",
        EACH + "{{ '[' if loop.first else ', ' }}{{ f.name }}({% for key in f.arguments %}"
        "{{ key + '=' + '%s' | format(f.arguments[key]) }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ']' if loop.last }}{% endfor %}",
    ),
    "deepseek_v3": (
        DEEPSEEK,
        TOLD,
        "{% if m.tool_calls %}{% for tool in m.tool_calls %}{{ ('<|tool▁calls▁begin|>' if loop.first else '\n') + "
        "'<|tool▁call▁begin|>' + tool.type + '<|tool▁sep|>' + tool.function.name + '\n```json\n' + "
        "tool.function.arguments + '\n```<|tool▁call▁end|>' }}{% endfor %}<|tool▁calls▁end|>{% endif %}",
    ),
    "deepseek_v31": (
        DEEPSEEK,
        TOLD,
        "{% if m.tool_calls %}<|tool▁calls▁begin|>" + EACH + "<|tool▁call▁begin|>{{ f.name }}<|tool▁sep|>"
        "{{ f.arguments | tojson }}<|tool▁call▁end|>{% endfor %}<|tool▁calls▁end|>{% endif %}",
    ),
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}%s{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content }}%s<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{{ begun }}"
)


def template(syntax: str) -> str:
    """Return a chat template that writes tools and calls in this syntax."""
    _, tools, calls = CALLS[syntax]
    if syntax.startswith("deepseek"):
        calls = re.sub(r"<\|(tool.*?)\|>", f"<{BAR}\\1{BAR}>", calls)
    return TEMPLATE.replace("%s", tools, 1).replace("%s", calls)


def save_caller(syntax: str, folder: Path, *more: str) -> Path:
    """Save the bundled model's tokenizer with a template for tools. The marks of calls that it lacks, and more, replace
    its last entries."""
    folder.mkdir()
    shutil.copy(TINY / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(template(syntax))
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    marks = [mark for mark in (*CALLS[syntax][0], *more) if mark not in vocabulary]
    for mark, word in zip(marks, list(vocabulary)[::-1], strict=False):
        vocabulary[mark] = vocabulary.pop(word)
        merges.pop()
        special = {"content": mark, "id": vocabulary[mark], "special": "tool_call>" not in mark and BAR not in mark}
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], **special})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@dataclass
class Choice:
    text: str = ""
    reason: str | None = None
    stopped: int | str | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)  # name and arguments


@dataclass
class Answer:
    """A complete or streamed answer. usage: number of tokens of the prompt, of the answer, and of both."""

    choices: list[Choice]
    usage: tuple[int, int, int]
    prompts: list[list[int]]


def add_up(replies: Sequence[BaseModel]) -> Answer:
    """Merge one complete answer, or all chunks of a stream."""
    choices: dict[int, Choice] = {}
    usage, prompts = None, []
    for answer in replies:
        reply = answer.model_dump()
        if reply["object"] != "text_completion":  # its chunks have no reason at first, which the package's type forbids
            type(answer).model_validate(answer.to_dict(), strict=True)
        usage = reply.get("usage") or usage
        for choice in reply["choices"]:
            own = choices.setdefault(choice["index"], Choice())
            assert own.reason is None, "nothing comes after the reason"
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            own.text += said.get("content") or ""
            own.ids += choice.get("token_ids") or []
            own.reason = choice["finish_reason"]
            own.stopped = choice["stop_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                own.logprobs.setdefault(name, []).extend(values or [])
            for place, piece in enumerate(said.get("tool_calls") or ()):
                if piece.get("id"):
                    assert piece["type"] == "function"
                    assert piece.get("index", place) == len(own.calls)
                    own.calls.append(["", ""])
                call = own.calls[piece.get("index", place)]
                call[0] += piece["function"].get("name") or ""
                call[1] += piece["function"].get("arguments") or ""
            if choice.get("prompt_token_ids"):
                prompts.append(choice["prompt_token_ids"])
        if reply.get("prompt_token_ids"):
            prompts.append(reply["prompt_token_ids"])
    assert usage is not None
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
    return Answer([choices[index] for index in sorted(choices)], counts, prompts)


def to(prompt: Any) -> dict[str, Any]:
    return {"messages" if is_chat(prompt) else "prompt": prompt}


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def endpoint_of(client: OpenAI | AsyncOpenAI, prompt: Any) -> Any:
    """Return the endpoint for a prompt."""
    return client.chat.completions if is_chat(prompt) else client.completions


def sent(fields: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for the client, which takes only OpenAI's fields by name. Token ids are requested as well."""
    extra = {name: value for name, value in fields.items() if name in OURS}
    theirs = {name: value for name, value in fields.items() if name not in OURS}
    return {**theirs, "extra_body": {**extra, "return_token_ids": True}}


class Asker:
    """A client of one server, which sends each request twice: for a complete answer and for a stream."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = server.client()
        self._other = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="foo", max_retries=0)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self.client.close()
        self._runner.run(self._other.close())
        self._runner.close()

    def ask(self, **fields: Any) -> Answer:
        """Send a request; return the answer, which must be the same in both ways."""
        return self.ask_all([fields])[0]

    def ask_all(self, requests: Sequence[dict[str, Any]]) -> list[Answer]:
        """Send several requests at once; return their answers, each of which must be the same in both ways."""
        answers = []
        for replies in self._send(requests):
            for error in replies:
                if isinstance(error, Exception):
                    raise error
            whole, streamed = map(add_up, replies)
            streamed.prompts = streamed.prompts[: len(whole.prompts)]  # a stream of a chat has them in each choice
            assert streamed == whole
            answers.append(whole)
        return answers

    def error(self, **fields: Any) -> openai.APIStatusError:
        """Send a wrong request; return the error, which must be the same in both ways."""
        ((error, streamed),) = self._send([fields])
        assert isinstance(error, openai.APIStatusError)
        assert (error.status_code, error.body) == (streamed.status_code, streamed.body)
        return error

    def _send(self, requests: Sequence[dict[str, Any]]) -> list[list[Any]]:
        """Return, for each request, the replies or the error of each way."""

        async def whole(fields: dict[str, Any]) -> list[Any]:
            return [await self._endpoint(fields).create(**fields)]

        async def stream(fields: dict[str, Any]) -> list[Any]:
            fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
            return [chunk async for chunk in await self._endpoint(fields).create(**fields)]

        async def send() -> list[list[Any]]:
            asked = [{"model": "hermes", **fields} for fields in requests]
            both = [asyncio.gather(whole(fields), stream(fields), return_exceptions=True) for fields in asked]
            return await asyncio.gather(*both)

        return self._runner.run(send())

    def _endpoint(self, fields: dict[str, Any]) -> Any:
        return endpoint_of(self._other, fields.get("messages", fields.get("prompt")))


def expected(gen: Generator, prompt: Any, **params: Any) -> RequestOutput:
    """Return the Generator's output."""
    return gen.generate([prompt], params_of(**params))[0]


def params_of(**given: Any) -> SamplingParams:
    """Return parameters with the defaults of the model."""
    return SamplingParams(**{**sampling_defaults(TINY), **given})


def check(answer: Answer, outputs: Sequence[RequestOutput]) -> None:
    """Check that texts, ids, reasons and counts equal the Generator's."""
    completions = [completion for output in outputs for completion in output.completions]
    said = [(each.text, each.token_ids, each.finish_reason) for each in completions]
    assert [(choice.text, choice.ids, choice.reason) for choice in answer.choices] == said
    stopped = [None if each.stop_reason in ENDS else each.stop_reason for each in completions]
    assert [choice.stopped for choice in answer.choices] == stopped
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for completion in completions)
    assert answer.usage == (prompt_tokens, generated, prompt_tokens + generated)


def named_events(kind: TypeAdapter[Any], text: str) -> list[dict[str, Any]]:
    """Return the events of a stream of /messages or /responses, held to a package's type and to the names of lines."""
    lines = text.split("\n\n")
    assert lines.pop() == ""
    found = []
    for line in lines:
        name, _, data = line.removeprefix("event: ").partition("\ndata: ")
        event = json.loads(data)
        kind.validate_python(event)
        assert event["type"] == name
        found.append(event)
    return found
