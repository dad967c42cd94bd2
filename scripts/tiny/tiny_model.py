"""The bundled model for training: a Llama, its optimizer, its tokenizer, and its Hugging Face folder."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_data import BOS, END, EOS, MARKS, PAD, SPECIAL_TOKENS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE = 4096, 256, 8, 4, 2, 64, 704
CONTEXT, ROPE_THETA, NORM_EPS = 2048, 10000.0, 1e-5
MATRIX_LR = 0.02


def new_model() -> LlamaForCausalLM:
    """Return the model to train, in float32; the output projection is the embedding."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=[END, EOS],
        pad_token_id=PAD,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
    for name, weight in model.model.layers.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)  # every layer starts as the identity
        elif weight.dim() == 2:
            nn.init.normal_(weight, std=0.7 / math.sqrt(weight.shape[1]))
    return model


def orthogonalize(updates: Tensor) -> Tensor:
    """Return the nearest (semi-)orthogonal matrix of each of updates [N, rows, columns], by five Newton-Schulz steps.

    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    x = updates.bfloat16() if updates.is_cuda else updates
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    out: Tensor = (x.mT if tall else x).to(updates.dtype)
    return out


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal; matrices of one shape are handled together."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.02
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr})
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all matrices once."""
        assert closure is None
        for group in self.param_groups:
            matrices: list[Tensor] = group["params"]
            gradients = torch.stack([m.grad for m in matrices if m.grad is not None]).float()
            state = self.state[matrices[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradients)
            state["momentum"].lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp_(state["momentum"], self.momentum))
            rows, columns = matrices[0].shape
            step_size = -group["lr"] * math.sqrt(max(1.0, rows / columns))
            torch._foreach_mul_(matrices, 1 - group["lr"] * self.decay)
            torch._foreach_add_(matrices, list(update.unbind()), alpha=step_size)


class Optimizers:
    """Muon for matrices, and AdamW for all other parameters, such as the embedding and the norms."""

    def __init__(self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], others_lr: float) -> None:
        adam = torch.optim.AdamW(others, lr=others_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers = ((Muon(matrices, lr=MATRIX_LR), MATRIX_LR), (adam, others_lr))

    def step(self, share: float) -> None:
        """Update all parameters once, at this share of the full learning rates."""
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


# The tokenizer is a byte-fallback BPE. Spaces stay spaces (no "▁"), so every string survives encoding and decoding;
# what the vocabulary lacks is spelled in bytes (<0x00> to <0xFF>). Digits are tokens of their own, for arithmetic.
# A word or a run of symbols takes the space before it along; digits, and spaces before them, are tokens of their own.
_PIECES = Regex(r" ?\p{L}+|\d| ?[^\s\p{L}\d]+|\s")

CHAT_TEMPLATE = Path(__file__).with_name("data").joinpath("chat_template.jinja").read_text()


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; the result always has 4096 entries.

    Raises:
        ValueError: the texts are too few for so many merges.
    """
    first = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *MARKS]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(_PIECES, "isolated")
    printable = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(first), initial_alphabet=printable, show_progress=False, max_token_length=16
    )
    learner.train_from_iterator(texts, trainer)
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    if len(first) + len(pieces) != VOCAB:
        raise ValueError(f"the texts give {len(first) + len(pieces)} entries, not {VOCAB}: generate more of them")

    vocab = {token: i for i, token in enumerate([*first, *pieces])}
    merges = [(merge[0], merge[1]) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = learner.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
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
        "model_max_length": CONTEXT,
        "padding_side": "left",
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def save_folder(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights in bfloat16, config.json and generation_config.json, as transformers reads them."""
    config = LlamaConfig(**model.config.to_dict())
    config.update({"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], "use_cache": True})
    config.save_pretrained(folder)
    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=0.2, bos_token_id=BOS, eos_token_id=[END, EOS], pad_token_id=PAD
    )
    generation.save_pretrained(folder)
    save_weights(model, folder / "model.safetensors")


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the parameters in bfloat16."""
    weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private
