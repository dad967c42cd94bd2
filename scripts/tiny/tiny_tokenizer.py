"""The bundled model's tokenizer: byte-fallback BPE with 4096 entries, and a chat template.

Spaces stay spaces (no "▁"), so every string survives encoding and decoding; what the vocabulary lacks is spelled in
bytes (<0x00> to <0xFF>). Digits are tokens of their own, which makes arithmetic learnable.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tiny_data import BOS, END, PAD, SPECIAL_TOKENS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
# A word or a run of symbols takes the space before it along; digits, and spaces before them, stand alone.
_PIECES = Regex(r" ?\p{L}+|\d| ?[^\s\p{L}\d]+|\s")

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('The roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; the result always has 4096 entries.

    Raises:
        ValueError: the texts are too few for so many merges.
    """
    first = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")
    printable = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(first), initial_alphabet=printable, show_progress=False, max_token_length=16
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    if len(first) + len(pieces) != VOCAB_SIZE:
        raise ValueError(f"the texts give {len(first) + len(pieces)} entries, not {VOCAB_SIZE}: generate more of them")

    vocab = {token: i for i, token in enumerate([*first, *pieces])}
    merges = [(merge[0], merge[1]) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as AutoTokenizer reads them.

    The configuration is written by hand, in the form that every transformers release since 4.43 reads.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": [name for i, name in enumerate(SPECIAL_TOKENS) if i not in (BOS, END, PAD)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "padding_side": "left",
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
