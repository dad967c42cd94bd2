"""Dialogues for the bundled model: tasks joined to conversations, and conversations packed into rows of token ids.

    python scripts/tiny/tiny_data.py 12        # print a few conversations

Everything is made up by the generator; a (seed, shard) pair always gives the same rows. A row is one conversation of
unrelated tasks, as in fgchat, filled up to the length of its bucket and padded.
"""

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tiny_facts
import tiny_json
import tiny_numbers
import tiny_skills
import tiny_talk
import tiny_thinking
import tiny_tools
from tiny_questions import HELD_OUT_WORDINGS, plain
from tiny_task import Skills, Task, Turn, is_held_out, phrase
from tiny_words import CAPITALS, DAYS, MONTHS, NAMES, WORDS, read

_TEXTS = read("data")

SKILLS: Skills = {
    **tiny_skills.SKILLS,
    **tiny_numbers.SKILLS,
    **tiny_facts.SKILLS,
    **tiny_talk.SKILLS,
    **tiny_thinking.SKILLS,
    **tiny_tools.SKILLS,
    **tiny_json.SKILLS,
}
_NAMES = tuple(SKILLS)
_CUMULATIVE = [sum(weight for weight, _ in list(SKILLS.values())[: i + 1]) for i in range(len(SKILLS))]

SPECIAL_TOKENS: tuple[str, ...] = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END = range(len(SPECIAL_TOKENS))
# Tokens that stay visible in texts.
MARKS = (
    *("<think>", "</think>", "<tools>", "</tools>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)

# Row lengths, and the share of all tokens in each. Long rows teach positions up to the model's context.
BUCKETS: dict[int, float] = {192: 0.55, 640: 0.3, 2048: 0.15}
# Of the rows of a length, the share that has tools, and the maximum number of tools.
TOOL_ROWS = {192: (0.06, 1), 640: (0.4, 4), 2048: (0.45, 6)}
# The share of the rows without tools that have plain texts: questions and replies without the marks of a chat.
PLAIN_ROWS = 0.03
# Of the other rows of a length, the share whose prompts ask for JSON.
JSON_ROWS = {192: 0.12, 640: 0.3, 2048: 0.1}
# Ids are below 4096; this bit marks the ones that the model learns to produce.
TARGET = 1 << 13
# Keys of JSON, with the brace of an object before them; the brackets of a list of objects are not a part of its keys.
_KEYS = re.compile(r'((?<=\[\{")[^"]*":| ?(?<!\[)\{"[^"]*":| ?(?<![\\{])"[^"]*":)')


@dataclass
class Conversation:
    """The state of one conversation: its system prompt, how that changes replies, its tools or the form of its JSON,
    and what the user told."""

    system: str | None
    restyle: Callable[[Turn], str]
    tools: tuple[tiny_tools.Tool, ...] = ()
    form: tiny_json.Form | None = None
    memory: dict[str, str] = field(default_factory=dict)


def new_conversation(rng: random.Random) -> Conversation:
    """Begin a conversation, mostly without a system prompt; some prompts change nothing, a few change the replies."""
    kind = rng.random()
    if kind < 0.82:
        return Conversation(None, lambda turn: turn.reply)
    if kind < 0.90:
        return Conversation(phrase(rng, _TEXTS["neutral"]), lambda turn: turn.reply)
    if kind < 0.94:
        return Conversation(phrase(rng, _TEXTS["short"]), lambda turn: turn.short or turn.reply)
    if kind < 0.97:
        return Conversation(phrase(rng, _TEXTS["capitals"]), lambda turn: turn.reply.upper())
    return Conversation(phrase(rng, _TEXTS["pirate"]), lambda turn: f"Arr! {turn.reply}")


def new_tool_conversation(rng: random.Random, most_tools: int) -> Conversation:
    """Begin a conversation with up to `most_tools` tools."""
    tools = tiny_tools.toolbox(rng, most_tools)
    told = tiny_tools.system_prompt(rng)
    system = f"{told}\n\n" if told else ""
    return Conversation(system + tiny_tools.tools_text(tools), lambda turn: turn.reply, tools)


def new_json_conversation(rng: random.Random) -> Conversation:
    """Begin a conversation that asks for JSON of one form."""
    form = tiny_json.told_form(rng)
    tools = tiny_tools.tools_text((form.tool,)) if form.tool else ""
    return Conversation("\n\n".join(filter(None, (form.told, tools))) or None, lambda turn: turn.reply, form=form)


def draw(rng: random.Random, make: Callable[[random.Random], Task], held_out: bool = False) -> Task:
    """Draw a task none of whose facts are held out; or one whose graded fact (the last key) is.

    No task has the wording of one of the first questions.

    Raises:
        ValueError: the skill has no such task in a thousand draws.
    """
    for _ in range(1000):
        drawn = make(rng)
        if any(plain(turn.user) in HELD_OUT_WORDINGS for turn in drawn.turns):
            continue
        if is_held_out(drawn.keys[-1]) if held_out else not any(map(is_held_out, drawn.keys)):
            return drawn
    raise ValueError(f"{make.__name__} makes no task with held_out={held_out}")


def next_task(rng: random.Random, conversation: Conversation) -> Task:
    """Draw the next task of a conversation: mostly any skill, sometimes something told or asked about the user."""
    if conversation.tools:
        weights = [weight for weight, _ in tiny_tools.TOOL_SKILLS.values()]
        ((_, make),) = rng.choices(tuple(tiny_tools.TOOL_SKILLS.values()), weights)
        return draw(rng, lambda r: make(r, conversation.tools))
    form = conversation.form
    if form:
        return draw(rng, lambda r: tiny_json.fill(r, form))
    what = rng.random()
    if what < 0.03:
        told: dict[str, str] = {}

        def tell(r: random.Random) -> Task:
            told.clear()  # of an earlier draw that was held out
            return tiny_facts.tell(r, told)

        drawn = draw(rng, tell)
        conversation.memory.update(told)
        return drawn
    if what < 0.03 + (0.04 if conversation.memory else 0.005):
        return draw(rng, lambda r: tiny_facts.ask(r, conversation.memory))
    name = rng.choices(_NAMES, cum_weights=_CUMULATIVE)[0]
    drawn = draw(rng, SKILLS[name][1])
    if name == "recall":  # its first turn tells something: what was told of that kind before is outdated
        conversation.memory.clear()
    return drawn


Encode = Callable[[str], list[int]]


def turn_ids(encode: Encode, turn: Turn, reply: str) -> list[int]:
    """Return one turn as ids, exactly as the chat template writes it; the reply and its end are marked as targets.

    The template opens the thinking, so the mark is no target, nor is what a grammar gives.
    """
    opened = encode("<think>\n") if turn.thought else []
    said = f"{turn.thought}\n</think>\n\n{reply}" if turn.thought else reply
    parts = {"": [said], "keys": _KEYS.split(said), "start": ["", said[:2], said[2:]]}[turn.given]
    replied = [i | TARGET * (place % 2 == 0) for place, part in enumerate(parts) for i in encode(part)]
    return [USER, *encode(turn.user), END, ASSISTANT, *opened, *replied, END | TARGET]


def plain_row(rng: random.Random, encode: Encode, length: int) -> list[int]:
    """Return texts, each with its beginning and end, that fill `length` ids: a question goes on with its reply, and a
    reply with itself."""
    conversation, ids = Conversation(None, lambda turn: turn.reply), list[int]()
    while True:
        turn = next_task(rng, conversation).turns[0]
        asked, said = (encode(turn.user), encode(f" {turn.reply}")) if rng.random() < 0.7 else ([], encode(turn.reply))
        added = [BOS, *asked, *(i | TARGET for i in (*said, END))]
        if ids and len(ids) + len(added) > length:
            return ids + [PAD] * (length - len(ids))
        ids += added if len(added) <= length and not (turn.thought or turn.given) else []


def row(rng: random.Random, encode: Encode, length: int) -> list[int]:
    """Return one conversation that fills `length` ids as far as whole tasks fit; at least one task."""
    while True:
        with_tools, most = TOOL_ROWS[length]
        if rng.random() < with_tools:
            conversation = new_tool_conversation(rng, most)
        elif rng.random() < PLAIN_ROWS:
            return plain_row(rng, encode, length)
        else:
            conversation = (new_json_conversation if rng.random() < JSON_ROWS[length] else new_conversation)(rng)
        ids = [BOS]
        if conversation.system is not None:
            ids += [SYSTEM, *encode(conversation.system), END]
        start = len(ids)
        while True:
            turns = next_task(rng, conversation).turns
            replies = [turn.reply if turn.given else conversation.restyle(turn) for turn in turns]
            added = [i for turn, reply in zip(turns, replies, strict=True) for i in turn_ids(encode, turn, reply)]
            if len(ids) + len(added) > length:
                break
            ids += added
        if len(ids) > start:
            return ids + [PAD] * (length - len(ids))


def shard(tokenizer: Any, seed: int, index: int, tokens: int) -> dict[int, npt.NDArray[np.int16]]:
    """Return rows of every bucket, together about `tokens` ids: bucket length -> int16 [rows, length]."""
    rng = random.Random(f"{seed}-{index}")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    rows = {length: max(1, round(tokens * share / length)) for length, share in BUCKETS.items()}
    return {n: np.array([row(rng, encode, n) for _ in range(count)], dtype=np.int16) for n, count in rows.items()}


def evaluation_tasks(name: str, count: int, seed: int) -> list[Task]:
    """Return up to `count` different held-out tasks of a skill (fewer if the skill has fewer)."""
    rng = random.Random(f"evaluation-{name}-{seed}")
    found: dict[tuple[str, ...], Task] = {}
    for _ in range(3 * count):
        if len(found) == count:
            break
        drawn = draw(rng, SKILLS[name][1], held_out=True)
        found.setdefault(tuple(turn.user for turn in drawn.turns), drawn)
    return list(found.values())


def messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Return turns as chat messages."""
    chat: list[dict[str, str]] = []
    for turn in turns:
        chat += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
    return chat


def prompt(task: Task, before: Sequence[dict[str, str]] = ()) -> dict[str, Any]:
    """Return the prompt of a task, up to the question that is graded, as `Generator.generate` takes it."""
    system = [{"role": "system", "content": task.system}] if task.system else []
    asked: dict[str, Any] = {"messages": [*system, *before, *messages(task.turns)[:-1]]}
    if task.tools:
        asked["tools"] = list(task.tools)
    if task.turns[-1].thought:
        asked["chat_template_kwargs"] = {"enable_thinking": True}
    return asked


def long_conversation(rng: random.Random, turns: int) -> list[dict[str, str]]:
    """Return messages of a trained conversation of at least that many turns, to put in front of a question."""
    conversation, chat = Conversation(None, lambda turn: turn.reply), list[dict[str, str]]()
    while len(chat) < 2 * turns:
        chat += messages(next_task(rng, conversation).turns)
    return chat


def corpus(seed: int, turns: int) -> Sequence[str]:
    """Return texts to train the tokenizer on: dialogue without marks, and every listed word so that each gets its
    chance."""
    rng = random.Random(f"corpus-{seed}")
    conversation = Conversation(None, lambda turn: turn.reply)
    texts: list[str] = []
    while len(texts) < 2 * turns:
        for turn in next_task(rng, conversation).turns:
            texts += [turn.user, turn.reply]
        if rng.random() < 0.1:
            with_tools = new_tool_conversation(rng, 3)
            task = next_task(rng, with_tools)
            said = [str(with_tools.system), *(text for turn in task.turns for text in (turn.user, turn.reply))]
            texts += [part for text in said for part in re.split("|".join(MARKS), text)]
    listed = [*WORDS, *NAMES, *CAPITALS, *CAPITALS.values(), *DAYS, *MONTHS]
    return texts + [
        form for word in listed for form in (word, f" {word}", word.capitalize(), f" {word}s") for _ in range(3)
    ]


def main() -> None:
    """Print conversations, to be read by eye."""
    rng = random.Random(0)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        begin = rng.choice((new_conversation, new_json_conversation, lambda r: new_tool_conversation(r, 4)))
        conversation = begin(rng)
        print(f"--- system: {conversation.system}")
        for _ in range(6):
            for turn in next_task(rng, conversation).turns:
                thought = f"<think>{turn.thought}</think> " if turn.thought else ""
                print(f"  > {turn.user}\n    {thought}{conversation.restyle(turn)}")


if __name__ == "__main__":
    main()
