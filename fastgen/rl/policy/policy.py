"""Policy: a torch module whose forward pass is a Generator's, and whose backward pass is transformers'."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fastgen.engine.prompts import pair_scores
from fastgen.engine.runner import Runner
from fastgen.engine.weight_state import InFlight
from fastgen.generator import Generator
from fastgen.model.adapter import LINEARS, Factors, factors_of
from fastgen.model.weights import EMBEDDING, HEAD
from fastgen.rl.policy.engine_forward import EngineForward, score_rows
from fastgen.rl.policy.gradients import (
    AdaptedWeights,
    Head,
    SameWeights,
    Weights,
    check_in_backward,
    head_results,
    recomputed,
)
from fastgen.rl.policy.layers import PackTensors, RecomputedModel
from fastgen.rl.policy.packs import Pack, make_packs

log = logging.getLogger(__name__)

NORM = "model.norm.weight"
NOT_EXACT = (
    "this Generator is not deterministic, so a Policy's logprobs agree with its draws to rounding only; pass "
    "deterministic=True"
)


@dataclass
class PolicyOutput:
    """The results of a Policy for the tokens of all sequences, one sequence after the other, each from its start.

    logprobs: float32 [N], differentiable. offsets: int64 [sequences + 1]; those of sequence i are
    logprobs[offsets[i] : offsets[i + 1]]. entropy: float32 [N], of the distribution at this temperature, or None.
    logits: float32 [K, V], of the tokens that were asked for, before the temperature, or None.
    """

    logprobs: Tensor
    offsets: Tensor
    entropy: Tensor | None = None
    logits: Tensor | None = None

    def split(self) -> list[Tensor]:
        """Return the logprobs of each sequence."""
        return list(torch.split(self.logprobs, self.offsets.diff().tolist()))


class Policy(nn.Module):
    """The model of a Generator as a module that can be trained: its logprobs have the bits of the Generator's draws.

    gen: a Generator of one GPU or of the CPU, of a model that is not quantized. Its prefix cache and requests are not
        touched by the forward pass, which takes pages of its own for a short time.
    dtype: of the parameters; None: the dtype of the Generator's weights. On a GPU, parameters of that dtype are the
        Generator's weights, not copies: an optimizer step changes them, and the Generator draws again after `commit`.
        With torch.float32 and a Generator in bfloat16, the parameters are master weights, which `commit` rounds once.
    adapter: PEFT's LoraConfig, or a dict of its fields: only the factors A and B are trained, in float32, and the
        Generator computes with the merged weights. A begins with the same random numbers each time, B with zeros.
    pack_tokens: number of tokens that go through a layer at a time; a longer sequence does alone.

    `parameters()` have Hugging Face's names, or PEFT's with an adapter. The values of the logprobs are the Generator's.
    The gradients are those of transformers' layers, computed one at a time from the Generator's residual stream, so
    they agree with those of the ordinary backward pass to rounding. Memory is that of gradient checkpointing.

    A forward pass raises RuntimeError while another thread is using the Generator. After an optimizer step it commits
    by itself, under the next version; a backward pass after one raises RuntimeError.

    For data-parallel training, make a Generator and a Policy on each rank. The parameters stay whole: FSDP cannot shard
    them, and ZeroRedundancyOptimizer can shard an optimizer's states.

    Raises ValueError for a Generator that cannot be trained: with quantized weights, several ranks, or a head that
    drafts.
    """

    @torch.inference_mode(False)
    def __init__(
        self, gen: Generator, dtype: torch.dtype | None = None, adapter: Any = None, pack_tokens: int = 8192
    ) -> None:
        super().__init__()
        self._runner, self._gen = _runner_of(gen), gen
        if not gen.config.deterministic:
            log.warning("%s", NOT_EXACT)
        if pack_tokens < 1:
            raise ValueError(f"pack_tokens is {pack_tokens}; it must be at least 1")
        if adapter is not None and gen._loop.weight_state.has_adapter:
            raise ValueError(
                "the Generator has an adapter, which a new one would replace; call its update_adapter(None) first, and "
                "to continue with that adapter, give its factors to the Policy's load_state_dict"
            )
        own = getattr(torch, gen.config.dtype)
        if dtype not in (None, own, torch.float32):
            raise ValueError(f"dtype is {dtype}; give torch.float32, or leave it out for the Generator's {own}")
        self._pack_tokens = pack_tokens
        self._model = RecomputedModel(gen.folder, self._runner.model.config, self._runner.weights.tensors())
        self._adapter = adapter
        trained = self._make_factors() if adapter is not None else self._make_masters(own if dtype is None else dtype)
        for name, parameter in trained.items():
            _register(self, name, parameter)
        self._trained = trained
        self._memory = {name: (parameter.dtype, parameter.data_ptr()) for name, parameter in trained.items()}
        self._bits = [_bits(parameter) for parameter in trained.values()]
        self._version = gen.weight_version
        self._seen = self._mark()
        if self._in_place:
            gen._loop.weight_state.written = functools.partial(_has_written, weakref.ref(self))
        if adapter is not None:
            self.commit()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Policy cannot be copied or pickled; copy or save its state_dict()")

    # ---------------------------------------------------------------------------------------- parameters

    def _make_masters(self, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        """Return the trainer's parameters by name, and set `_stages`: the weights of each stage by its prefix."""
        computed = self._model.parameters
        shared = {name: p.dtype == dtype for name, p in computed.items()}
        trained = {name: p if shared[name] else nn.Parameter(p.detach().to(dtype)) for name, p in computed.items()}
        self._stages: dict[str, Weights] = {
            stage: SameWeights([computed[name] for name in names], [trained[name] for name in names])
            for stage, names in self._names_of_stages().items()
        }
        return trained

    def _make_factors(self) -> dict[str, nn.Parameter]:
        """Return the factors of an adapter by PEFT's names, and set `_stages`."""
        computed = self._model.parameters
        sizes = {n.removesuffix(".weight"): tuple(p.shape) for n, p in computed.items() if n.endswith(LINEARS)}
        self._factors: dict[str, Factors] = factors_of(self._adapter, sizes)
        trained: dict[str, nn.Parameter] = {}
        random = torch.Generator(self._runner.device).manual_seed(0)  # torch's own is not advanced
        for parameter in computed.values():
            parameter.requires_grad_(False)
        for layer, factors in self._factors.items():
            weight = computed[f"{layer}.weight"].requires_grad_()
            outputs, inputs = weight.shape
            a = torch.empty(factors.rank, inputs, dtype=torch.float32, device=weight.device)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=random)  # as PEFT begins
            b = torch.zeros(outputs, factors.rank, dtype=torch.float32, device=weight.device)
            trained |= {_factor(layer, "A"): nn.Parameter(a), _factor(layer, "B"): nn.Parameter(b)}
        self._stages = {}
        for stage, names in self._names_of_stages().items():
            layers = [name.removesuffix(".weight") for name in names if name.removesuffix(".weight") in self._factors]
            self._stages[stage] = AdaptedWeights(
                [computed[f"{layer}.weight"] for layer in layers],
                [trained[_factor(layer, which)] for layer in layers for which in "AB"],
                [self._factors[layer].scaling for layer in layers],
            )
        return trained

    def _names_of_stages(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each stage: "embed", "head", and each layer's number."""
        names = self._model.parameters
        stages = {
            str(number): [name for name in names if name.startswith(f"model.layers.{number}.")]
            for number in range(len(self._model.layers))
        }
        head = HEAD if HEAD in names else EMBEDDING
        return stages | {"embed": [EMBEDDING], "head": [NORM, head]}

    def _mark(self) -> Tensor:
        """Return numbers that change with the parameters, int64 [parameters]: the sum of the bits of each, since torch
        does not count what fused optimizers, and ranks that broadcast their share of the parameters, write."""
        return torch.stack([bits.sum() for bits in self._bits])

    def _has_changed(self) -> bool:
        """Return whether the parameters have changed since the last commit."""
        return not torch.equal(self._mark(), self._seen)

    def _check_parameters(self) -> None:
        """Raise RuntimeError if the parameters are not the tensors that this Policy was made with."""
        present = dict(self.named_parameters())
        for name, parameter in self._trained.items():
            if present.get(name) is not parameter or self._memory[name] != (parameter.dtype, parameter.data_ptr()):
                raise RuntimeError(
                    f"{name} was replaced or converted, as by half(), to() or load_state_dict(assign=True): make the "
                    "Policy with another dtype, and copy values into its parameters; or it was sharded, as by "
                    "fully_shard: use DistributedDataParallel, and ZeroRedundancyOptimizer to shard Adam's states"
                )

    def _check_backward(self, mark: Tensor, version: int) -> None:
        """Raise RuntimeError if a backward pass cannot have the weights of its forward pass. mark, version: the `_mark`
        of the parameters and the version of the Generator's weights at the forward pass."""
        self._check_usable()
        self._check_parameters()
        if version != self._gen.weight_version or not torch.equal(mark, self._mark()):
            raise RuntimeError("the weights have changed since the forward pass; call backward before optimizer.step()")

    def _check_usable(self) -> None:
        """Raise RuntimeError if the Generator is closed, or its weights are asleep or torn."""
        loop = self._gen._loop
        loop.check_open()
        loop.weight_state.check_awake()
        loop.weight_state.check_whole()

    @functools.cached_property
    def _in_place(self) -> bool:
        """True if the parameters are the Generator's weights."""
        weights = self._runner.weights.in_place
        return weights and all(p is self._trained.get(name) for name, p in self._model.parameters.items())

    @torch.no_grad()
    def commit(self, version: int | None = None, in_flight: InFlight = "error") -> int:
        """Let the Generator draw with the parameters as they are now, and return the version of its weights.

        version, in_flight: see `Generator.update_weights`. Cached prefixes of the old weights are dropped. If the
        parameters are the Generator's weights, nothing is copied, and without it the Generator refuses to draw with
        what an optimizer step has changed. A forward pass calls it if the parameters have changed.
        """
        self._check_parameters()
        if self._adapter is not None:
            following = self._gen.update_adapter(dict(self._trained), self._adapter, version, in_flight)
        elif self._in_place:
            if self._gen._loop.weight_state.has_adapter and self._gen.weight_version != self._version:
                raise RuntimeError(
                    "an adapter was merged into the Generator's weights, which are this Policy's parameters; call the "
                    "Generator's update_adapter(None) first"
                )
            following = self._gen.weights_changed(version, in_flight)
        else:
            following = self._gen.update_weights(dict(self._trained), version, in_flight=in_flight)
        if not self._runner.weights.in_place:
            self._refresh()
        self._seen, self._version = self._mark(), following
        return following

    def _refresh(self) -> None:
        """Bring the weights that the backward pass computes with up to date, on the CPU."""
        computed = self._model.parameters
        if self._adapter is None:
            for name, parameter in self._trained.items():
                if parameter is not computed[name]:
                    computed[name].copy_(parameter)
            return
        for name, tensor in self._runner.weights.tensors([f"{layer}.weight" for layer in self._factors]).items():
            computed[name].copy_(tensor)

    # ------------------------------------------------------------------------------------------- values

    def logprobs(
        self, sequences: Iterable[Sequence[int]], start: int | Sequence[int] = 1, temperature: float = 1.0
    ) -> Tensor:
        """Return the logprobs of given tokens, differentiable: float32 [N], one sequence after the other.

        sequences: lists of ids. start: the first position whose logprob is wanted, at least 1, for all sequences or a
        list with one for each: mostly the length of the prompt. They have the bits of `Completion.raw_logprobs`, and at
        another temperature of `untruncated_logprobs`. Sequences that are equal before their start share its
        computation. Raises ValueError for what `Generator.score` refuses.
        """
        output: PolicyOutput = self(sequences, start, temperature)
        return output.logprobs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        sequences: Iterable[Sequence[int]],
        start: int | Sequence[int] = 1,
        temperature: float = 1.0,
        entropy: bool = False,
        logits: Sequence[int] | None = None,
    ) -> PolicyOutput:
        """Return what `logprobs` does, with offsets, and on request more, differentiable as well.

        entropy: also return the entropy of each token's distribution. logits: also return the logits of these tokens,
        by their indices in the flat logprobs.
        """
        no_autocast = torch.autocast(self._runner.device.type, enabled=False)  # its products would have other bits
        with self._gen._interrupt.alone(), no_autocast:
            return self._compute(sequences, start, temperature, entropy, logits)

    def _compute(
        self,
        sequences: Iterable[Sequence[int]],
        start: int | Sequence[int],
        temperature: float,
        entropy: bool,
        logits: Sequence[int] | None,
    ) -> PolicyOutput:
        """See `forward`."""
        many, starts = self._checked(sequences, start, temperature)
        self._bring_up_to_date()
        offsets = [0, *itertools.accumulate(len(ids) - at for ids, at in zip(many, starts, strict=True))]
        wanted = _checked_indices([] if logits is None else logits, offsets[-1])
        packs = list(make_packs(many, starts, self._gen.config.page_size, self._pack_tokens))
        kept = [np.flatnonzero(np.isin(pack.places, wanted)) for pack in packs]
        results = list(self._run(packs, kept, float(temperature), entropy))
        places = np.concatenate([pack.places for pack in packs]) if packs else np.zeros(0, dtype=np.int64)
        order = np.argsort(places)
        kept_places = [pack.places[of_pack] for pack, of_pack in zip(packs, kept, strict=True)]
        orders = order, order if entropy else order[:0], _indices(kept_places, wanted)
        logprobs, entropies, chosen = self._joined(results or [self._empty()], orders)
        return PolicyOutput(
            logprobs,
            torch.tensor(offsets, device="cpu"),
            entropies if entropy else None,
            None if logits is None else chosen,
        )

    def _bring_up_to_date(self) -> None:
        """Commit the parameters if they have changed. Raises RuntimeError if they were replaced, or if others have
        updated the Generator's weights."""
        self._check_parameters()
        if not self._in_place and self._gen.weight_version != self._version:
            raise RuntimeError(
                "the Generator's weights were updated after this Policy's last commit; call commit() to have the "
                "Policy's again, or make another Policy"
            )
        if self._has_changed():
            self.commit()
        elif not self._gen._loop.weight_state.has_adapter:
            self._version = self._gen.weight_version  # others may have written these weights again

    def _checked(
        self, sequences: Iterable[Sequence[int]], start: int | Sequence[int], temperature: float
    ) -> tuple[list[list[int]], list[int]]:
        """Return the sequences as lists of ids, and the start of each. Raises ValueError or TypeError."""
        self._check_usable()
        prompts, starts = pair_scores(sequences, start, temperature)
        inputs = self._gen._inputs
        return [inputs.ids_to_score(*pair) for pair in zip(prompts, starts, strict=True)], starts

    def _run(
        self, packs: list[Pack], kept: list[NDArray[np.int64]], temperature: float, entropy: bool
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield the results of each pack: logprobs, entropies and logits; see `head_results`. kept: the indices of the
        targets of each pack whose logits are wanted."""
        if not packs:
            return
        engine = EngineForward(self._runner, max(pack.num_pages for pack in packs))
        for pack, of_pack in zip(packs, kept, strict=True):
            config = self._runner.model.config
            tensors = PackTensors.of(pack, config.windows, self._runner.device)
            head = Head(
                self._model,
                config.logits_divisor,
                config.logits_cap,
                temperature,
                *(torch.from_numpy(array).to(self._runner.device) for array in (pack.rows, pack.targets, of_pack)),
            )
            differentiable = torch.is_grad_enabled()
            streams = engine.streams(pack, all_layers=differentiable)
            last = streams[-1]
            values = score_rows(self._runner.model, last, head.rows, head.targets, temperature, entropy, head.kept)
            if not differentiable:
                yield values
                continue
            yield head_results(self._through_layers(tensors, streams), values, head, self._stages["head"])

    def _through_layers(self, pack: PackTensors, streams: list[Tensor]) -> Tensor:
        """Return the engine's residual stream after the last layer, [T, hidden], as a function of the parameters."""
        embed = functools.partial(self._model.embed, pack)
        with torch.no_grad():
            embedded = embed()
        x = recomputed(None, embedded, embed, self._stages["embed"])
        calls = self._model.layer_calls(pack, embedded)
        for number, (call, stream) in enumerate(zip(calls, streams, strict=True)):
            x = recomputed(x, stream, call, self._stages[str(number)])
        return x

    def _joined(self, results: list[tuple[Tensor, ...]], orders: Iterable[NDArray[np.int64]]) -> list[Tensor]:
        """Return the logprobs, entropies and logits of all packs, each in its order."""
        check = functools.partial(self._check_backward, self._seen, self._gen.weight_version)
        joined = check_in_backward([torch.cat(parts) for parts in zip(*results, strict=True)], check)
        indices = [torch.from_numpy(order).to(self._runner.device) for order in orders]
        return [of_packs[order] for of_packs, order in zip(joined, indices, strict=True)]

    def _empty(self) -> tuple[Tensor, ...]:
        """Return no logprobs, entropies and logits as functions of all parameters, whose gradients are zeros: a rank
        that has only empty answers takes part in the backward pass of the others."""
        nothing = torch.cat([parameter.flatten()[:0].float() for parameter in self._trained.values()])
        return nothing, nothing, nothing.view(0, self._runner.model.config.vocab_size)


def _bits(parameter: Tensor) -> Tensor:
    """Return the memory of a parameter as integers, the widest that fit: int64, int32 or int16 [numbers]."""
    flat = parameter.detach().view(-1)
    in_words = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0
    return flat.view(torch.int64 if in_words else torch.int32 if flat.itemsize == 4 else torch.int16)


def _checked_indices(logits: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return indices of `count` logprobs as an array. Raises TypeError or ValueError."""
    indices = logits.tolist() if isinstance(logits, Tensor | np.ndarray) else logits
    if not isinstance(indices, Sequence) or not all(map(_is_index, indices)):
        raise TypeError(f"logits must be the indices of logprobs, such as [0, 7], not {logits!r}")
    for index in indices:
        if not 0 <= index < count:
            raise ValueError(f"logits has the index {index}; there are {count} logprobs")
    return np.array(indices, dtype=np.int64)


def _is_index(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _indices(kept_places: list[NDArray[np.int64]], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each of `wanted` in the concatenated places."""
    places = np.concatenate(kept_places) if kept_places else np.zeros(0, dtype=np.int64)
    order = np.argsort(places)
    indices: NDArray[np.int64] = order[np.searchsorted(places[order], wanted)]
    return indices


def _factor(layer: str, which: str) -> str:
    """Return PEFT's name of a factor of a layer. which: "A" or "B"."""
    return f"base_model.model.{layer}.lora_{which}.weight"


def _has_written(policy: weakref.ref[Policy]) -> bool:
    """Return whether a Policy has written the weights of its Generator since it gave them the present version."""
    writer = policy()
    return writer is not None and writer._version == writer._gen.weight_version and writer._has_changed()


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a name with dots, in modules that are made on the way."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


def _runner_of(gen: Generator) -> Runner:
    """Return the Runner of a Generator. Raises ValueError for one that cannot be trained, and TypeError for anything
    else."""
    if not isinstance(gen, Generator):
        raise TypeError(f"a Policy needs a Generator of this process, not {gen!r}; make one for it")
    if gen.model_config.quantization is not None:
        raise ValueError("the Generator's weights are quantized, which has no gradients; leave quantization out")
    if gen.model_config.recurrent is not None:
        raise ValueError(
            "a Policy cannot train models with recurrent layers; train this model in another way, and call the "
            "Generator's update_weights"
        )
    rope = gen.model_config.rope
    if rope.is_long_in(gen.max_model_len):
        raise ValueError(
            f"the Generator stretches rope for its context of {gen.max_model_len} tokens, and transformers, which "
            f"differentiates it, only for longer sequences; give max_model_len={rope.original_max_position}"
        )
    runner = gen._runner
    if not isinstance(runner, Runner) or runner.group.size > 1:
        raise ValueError(
            "the Generator has several ranks; a Policy needs one: leave tensor_parallel and tp_group out, and for "
            "data-parallel training make a Generator and a Policy on each rank"
        )
    if runner.model.observer is not None:
        raise ValueError(
            "a head or an int4 copy drafts for this Generator, which training would leave behind; leave speculate out, "
            "or use 'ngram'"
        )
    return runner
