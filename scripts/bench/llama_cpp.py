"""llama.cpp for bench_peers.py: its library by ctypes, and a GGUF file of a model's weights.

Only functions of llama.h are used. Of its structures, this module knows the first four fields of llama_context_params,
which have been the same for years, and llama_batch.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from bench_cpu import Run, Workload

CONTEXT = 2048
"""Tokens of a sequence for which a context has room."""

BATCH = 2048
"""Tokens of one call of llama_decode; llama.cpp's default."""

Entry = tuple[int, int, int, bool]
"""A token of a batch: (sequence, position, token id, whether its logits are needed)."""


class Opaque(ctypes.Structure):
    """A structure of parameters, of at most 1024 bytes, that only functions of the library read."""

    _fields_ = (("words", ctypes.c_uint32 * 256),)


class LlamaBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _no_log(level: int, text: bytes, data: int) -> None:
    """Print nothing."""


def load_library(folder: Path) -> Any:
    """Return llama.cpp's library in a folder, with the backend for this CPU."""
    libraries: list[Any] = []
    for name in ("ggml-base", "ggml", "llama"):
        (file,) = (*folder.glob(f"lib{name}.so"), *folder.glob(f"lib{name}.v*.so"))
        libraries.append(ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL))
    _, ggml, llama = libraries
    llama.llama_log_set(_no_log, None)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    types: dict[str, tuple[Any, list[Any]]] = {
        "llama_model_default_params": (Opaque, []),
        "llama_context_default_params": (Opaque, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, Opaque]),
        "llama_init_from_model": (pointer, [pointer, Opaque]),
        "llama_set_n_threads": (None, [pointer, number, number]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_memory_seq_cp": (None, [pointer, number, number, number, number]),
        "llama_batch_init": (LlamaBatch, [number, number, number]),
        "llama_decode": (number, [pointer, LlamaBatch]),
        "llama_sampler_init_greedy": (pointer, []),
        "llama_sampler_init_dist": (pointer, [ctypes.c_uint32]),
        "llama_sampler_sample": (number, [pointer, pointer, number]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    return llama


class Context:
    """A llama.cpp context of `sequences` sequences that decode in parallel."""

    def __init__(self, llama: Any, model: int, sequences: int) -> None:
        parameters = llama.llama_context_default_params()
        if list(parameters.words[1:4]) != [2048, 512, 1]:  # the defaults of n_batch, n_ubatch and n_seq_max
            raise RuntimeError(
                "llama_context_params begins with other fields; take llama.cpp 0.5.0, or adapt llama_cpp.py"
            )
        parameters.words[:4] = [sequences * CONTEXT, BATCH, 512, sequences]
        self._context = llama.llama_init_from_model(model, parameters)
        threads = len(os.sched_getaffinity(0))
        llama.llama_set_n_threads(self._context, threads, threads)
        self._llama, self._memory = llama, llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(BATCH, 0, 1)

    def generate(self, sampler: int, prompts: list[list[int]], lengths: list[int], samples: int) -> list[list[int]]:
        """Return `samples` answers to each prompt, each of its length."""
        self._llama.llama_memory_clear(self._memory, False)
        answers: list[list[int]] = [[] for _ in range(len(prompts) * samples)]
        pending: list[Entry] = []
        for number, prompt in enumerate(prompts):
            pending += [(number * samples, at, token, at == len(prompt) - 1) for at, token in enumerate(prompt)]
        for start in range(0, len(pending), BATCH):
            for sequence, index in self._decode(pending[start : start + BATCH]):
                for copy in range(sequence, sequence + samples):
                    if copy > sequence:
                        self._llama.llama_memory_seq_cp(self._memory, sequence, copy, -1, -1)
                    answers[copy].append(self._llama.llama_sampler_sample(sampler, self._context, index))
        while running := [n for n, answer in enumerate(answers) if len(answer) < lengths[n // samples]]:
            ends = {n: len(prompts[n // samples]) + len(answers[n]) - 1 for n in running}
            for sequence, index in self._decode((n, ends[n], answers[n][-1], True) for n in running):
                answers[sequence].append(self._llama.llama_sampler_sample(sampler, self._context, index))
        return answers

    def _decode(self, entries: Iterable[Entry]) -> list[tuple[int, int]]:
        """Compute tokens; return (sequence, index in the batch) of those whose logits are needed."""
        batch, outputs = self._batch, []
        batch.n_tokens = 0
        for index, (sequence, position, token, logits) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, logits
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.n_tokens += 1
            if logits:
                outputs.append((sequence, index))
        if error := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {error}")
        return outputs


def llama_runs(model: str, dtype: str, folder: str) -> Run:
    """Return the function that runs a workload in llama.cpp. model: a folder that has DTYPE.gguf, and config.json."""
    llama = load_library(Path(folder))
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    loaded = llama.llama_model_load_from_file(
        str(Path(model) / f"{dtype}.gguf").encode(), llama.llama_model_default_params()
    )
    if loaded is None:
        raise RuntimeError(f"llama.cpp cannot load {model}/{dtype}.gguf")
    greedy, random = llama.llama_sampler_init_greedy(), llama.llama_sampler_init_dist(0)
    context = cache(lambda sequences: Context(llama, loaded, sequences))

    def run(workload: Workload) -> None:
        sampler, lengths = random if workload.temperature else greedy, [length for _, length in workload.lengths()]
        prompts = workload.prompts(vocab_size)
        answers = context(len(prompts) * workload.samples).generate(sampler, prompts, lengths, workload.samples)
        assert sum(map(len, answers)) == workload.generated

    return run


def write_gguf(folder: Path, dtype: str) -> None:
    """Write the weights of a Llama or Qwen2 model in a folder as DTYPE.gguf there, without a tokenizer. Vectors are in
    float32, as llama.cpp's own conversion writes them."""
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[config["model_type"]]
    writer = gguf.GGUFWriter(folder / f"{dtype}.gguf", gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(arch, layers)
    kind = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}[dtype]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is not a dict
            tensor = weights.get_tensor(name).to(torch.float32).numpy()
            if arch == gguf.MODEL_ARCH.LLAMA and (
                "q_proj" in name or "k_proj" in name
            ):  # pairs for rope are neighbours
                count = heads if "q_proj" in name else config["num_key_value_heads"]
                tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
            chosen = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(target, gguf.quantize(tensor, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
