"""LoRA adapters (arXiv 2106.09685) with PEFT's names, merged into the weights.

Each weight that an adapter changes becomes base + scaling * B A, computed on the weight's device in float32 and rounded
once to its dtype. The base weights are kept, so that another adapter can be merged or the base restored. The factors A
and B are sent to other ranks like the tensors of a weight update, and each rank merges its slice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fastgen.device.memory import Memory
from fastgen.device.pinned_memory import Pinned
from fastgen.kernels.merge import merge
from fastgen.model.loader import load
from fastgen.model.weight_updates import WeightUpdate
from fastgen.model.weights import Shard, text_name, write

_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])(?:\.[^.]+)?\.weight")  # adapters in memory have a name
LINEARS = "_proj.weight", "_linear.weight", *(f".in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
"""Ends of the names of the weights that an adapter can change. The last ones are of recurrent layers."""
_FILES = "adapter_config.json", "adapter_model.safetensors"

_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Fields of PEFT's LoraConfig that are read, or do not change the merged weights. Others must be empty or as in
_PLAIN."""

_PLAIN = {
    "bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"), "peft_type": ("LORA",)
}  # fmt: skip
"""Supported values of other fields. These inits do not change the base weights."""

_UNSUPPORTED = "is not supported: only plain LoRA of linear layers between embedding and head can be merged"


def read_adapter(folder: str | Path) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors and the config of an adapter in a folder that PEFT has saved. Raises ValueError."""
    config, weights = (Path(folder).expanduser() / name for name in _FILES)
    for path in (config, weights):
        if not path.is_file():
            raise ValueError(
                f"adapter is {str(folder)!r}, in which {path.name} is missing; give a folder that PEFT has saved"
            )
    try:
        return load_file(weights), json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"adapter {folder}: {error}") from error


class AdapterUpdate(WeightUpdate):
    """A weight update that merges an adapter, or restores the base weights.

    given: the adapter's tensors, as a mapping or an iterable of (name, tensor); None restores the base. config: PEFT's
    LoraConfig, or a dict of its fields. shards: the whole tensors of the model. adapted: names of the layers that
    earlier adapters have changed, such as "model.layers.0.self_attn.q_proj". After `check`, it also has the layers of
    this adapter; the update writes all of them, and layers without factors become the base again.
    """

    merges = True
    unexpected = "the model has no such linear layer, or the config does not target it"

    def __init__(
        self, given: Any, config: Any, shards: Mapping[str, Shard], adapted: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(given, {})
        if quantized := [shard.form for shard in shards.values() if shard.scales is not None]:
            raise ValueError(
                f"the model is in {quantized[0]}, into which adapters cannot be merged; leave quantization out, or use "
                "a checkpoint that is not quantized"
            )
        self.adapted = adapted
        self._config = config
        self._sizes = {n.removesuffix(".weight"): s.shape for n, s in shards.items() if n.endswith(LINEARS)}
        self._scaling: dict[str, float] = {}  # of each layer that the adapter changes

    @classmethod
    def read(cls, folder: str | Path, shards: Mapping[str, Shard]) -> AdapterUpdate:
        """Return the checked update for an adapter in a folder that PEFT has saved. Raises ValueError."""
        named, config = read_adapter(folder)
        try:
            update = cls(named, config, shards)
            update.check()
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"adapter {folder}: {error}") from error
        return update

    def check(self) -> None:
        """Check the config and all tensors. Raises ValueError as `WeightUpdate.tensors` does and for an unsupported
        config, and TypeError for objects of the wrong kind."""
        if self._given is None:
            self._given = ()
        elif isinstance(self._given, Iterable):
            items = self._given.items() if isinstance(self._given, Mapping) else self._given
            self._given = [_renamed(item) for item in items]
            self._expect(_fields(self._config))
        super().check()
        self.adapted |= self._scaling.keys()

    def _expect(self, config: Mapping[str, Any]) -> None:
        """Set the expected factors, and the scaling of each layer."""
        given = set[str]()
        if "target_modules" not in config:
            names = [item[0] for item in self._given if isinstance(item, tuple) and len(item) == 2]
            given = {layer for layer in self._sizes if f"{layer}.lora_A.weight" in names}
        factors = factors_of(config, self._sizes, given)
        self._scaling = {layer: each.scaling for layer, each in factors.items()}
        shapes = {}
        for layer, each in factors.items():
            outputs, inputs = self._sizes[layer]
            shapes[f"{layer}.lora_A.weight"] = each.rank, inputs
            shapes[f"{layer}.lora_B.weight"] = outputs, each.rank
        self._shards = {name: Shard.whole(torch.empty(shape, device="meta")) for name, shape in shapes.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the factors of each layer in float32 [rank, inputs + outputs]: A, then the transposed and scaled B. The
        rank is 0 for a layer that becomes the base again."""
        factors = dict(self._given)  # `check` has matched them with the model
        for layer in sorted(self.adapted):
            if layer not in self._scaling:
                yield layer, torch.empty(0, sum(self._sizes[layer]), dtype=torch.float32, device="cpu")
                continue
            a, b = (factors[f"{layer}.lora_{name}.weight"].detach().float() for name in "AB")
            yield layer, torch.cat((a, self._scaling[layer] * b.t().to(a.device)), 1)


class Factors(NamedTuple):
    """The factors of a layer: A [rank, inputs] and B [outputs, rank]; scaling * B A is added to its weight."""

    rank: int
    scaling: float


def factors_of(config: Any, sizes: Mapping[str, Sequence[int]], given: Collection[str] = ()) -> dict[str, Factors]:
    """Return the factors of each layer that an adapter changes, by the layer's name.

    config: PEFT's LoraConfig, or a dict of its fields. sizes: the shapes of the model's linear layers, by name. given:
    the layers that have factors, if the config does not say which. Raises ValueError for an unsupported config, and
    TypeError for objects of the wrong kind.
    """
    fields = _fields(config)
    layers = _targeted(fields, [*sizes, "lm_head", "model.embed_tokens"]) or set(given)
    if others := layers - sizes.keys():
        raise ValueError(f"target_modules has {', '.join(sorted(others))}, which {_UNSUPPORTED}")
    if not layers:
        raise ValueError("the adapter has no linear layer of this model; update_adapter(None) gives the base back")
    factors = {}
    for layer in sorted(layers):
        rank = _number(fields, "r", "rank_pattern", layer)
        alpha = _number(fields, "lora_alpha", "alpha_pattern", layer)
        factors[layer] = Factors(rank, alpha / (rank**0.5 if fields.get("use_rslora") else rank))
    return factors


def _renamed(item: Any) -> Any:
    """Return an item named after its layer in the model, such as "model.layers.0.mlp.up_proj.lora_A.weight"."""
    named = isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)
    match = _FACTOR.fullmatch(item[0]) if named else None
    return (f"{text_name(match[1] + '.')}{match[2]}.weight", item[1]) if match else item


def _fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config that are set. Raises TypeError for an object of another kind, and ValueError for an
    unsupported field."""
    given = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(given, Mapping):
        raise TypeError(f"config must be PEFT's LoraConfig, or a dict of its fields, not {type(config).__name__}")
    for name, value in given.items():
        value = getattr(value, "value", value)  # of an enum
        if value and name not in _HARMLESS and value not in _PLAIN.get(name, ()):
            raise ValueError(f"the adapter's {name} is {value!r}, which {_UNSUPPORTED}")
    return {name: value for name, value in given.items() if value is not None}


def _targeted(config: Mapping[str, Any], layers: Iterable[str]) -> set[str]:
    """Return the layers that the config targets, by the rules of PEFT."""
    targets, unwanted = config.get("target_modules", ()), config.get("exclude_modules", ())
    numbers = config.get("layers_to_transform", [])
    numbers = [numbers] if isinstance(numbers, int) else numbers
    matches = set()
    for layer in layers:
        number = re.search(r"\.(\d+)\.", layer)
        names = layer, layer.replace("model.", "model.language_model.", 1)  # as inside a model with vision
        targeted = number is not None if targets == "all-linear" else any(_names(targets, name) for name in names)
        if numbers and not isinstance(targets, str):
            targeted = targeted and number is not None and int(number[1]) in numbers
        if targeted and not any(_names(unwanted, name) for name in names):
            matches.add(layer)
    return matches


def _names(patterns: str | Collection[str], layer: str) -> bool:
    """Return whether a regular expression matches the name of a layer, or one of several names is a suffix of it."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, layer) is not None
    return any(f".{layer}".endswith(f".{name}") for name in patterns)


def _number(config: Mapping[str, Any], name: str, patterns: str, layer: str) -> Any:
    """Return a field's value for a layer: the value of the first pattern that matches the layer, else the field's
    own."""
    matches = (value for key, value in config.get(patterns, {}).items() if re.fullmatch(rf"(.*\.)?({key})", layer))
    value = next(matches, config.get(name))
    if not isinstance(value, int if name == "r" else int | float) or value <= 0:
        raise ValueError(f"the adapter's {name} is {value!r} for {layer}; it must be a number above 0")
    return value


# ------------------------------------------------------------------------------------------- the weights of a rank


@dataclass(frozen=True, kw_only=True)
class _Adapted(Shard):
    """A weight that an adapter changes. base: the rank's slice of the base weight, with the shape of `view`."""

    base: Tensor

    def write(self, factors: Tensor) -> None:
        """Write base + B A. factors: factors of the whole weight, as `AdapterUpdate.tensors` yields them."""
        base = self.base
        if base.device != self.view.device or not len(factors):
            base = self.view.copy_(base, non_blocking=True)
        if len(factors):
            a, b = factors.to(self.view.device).tensor_split([self.shape[1]], dim=1)
            a, b = (self.slice(a), b) if self.dim else (a, self.slice(b.t()).t().contiguous())
            merge(self.view, base, a, b)


class AdapterBases:
    """Copies of a rank's base weights, by layer, of the layers that adapters change.

    A copy is made when an adapter first changes a weight, and its memory is kept. For an adapter that was merged at the
    start, no copies were made; the base is then read from the checkpoint.
    """

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._copies: dict[str, Tensor] = {}
        self._pinned: list[Pinned] = []
        self.valid: set[str] = set()  # layers whose copies are the base of the current weights
        self._merged: frozenset[str] = frozenset()  # layers of the adapter that was merged at the start
        self._folder = Path()

    def merge(self, update: AdapterUpdate, shards: Mapping[str, Shard], folder: Path) -> None:
        """Merge a checked adapter into the weights of the checkpoint in `folder`."""
        self._merged, self._folder = update.adapted, folder
        views = {layer: shards[f"{layer}.weight"].view for layer in update.adapted}
        write(_adapted(views, shards), update.tensors())

    @property
    def layers(self) -> frozenset[str]:
        """The layers that adapters have changed."""
        return self._merged.union(self.valid)

    def keep(self, layers: Iterable[str], shards: Mapping[str, Shard], place: str) -> None:
        """Copy the weights of layers without a valid copy. place: where new copies are kept, "device" or "host".

        Raises torch.OutOfMemoryError, or ValueError if the host has too little memory.
        """
        missing = {layer: shards[f"{layer}.weight"] for layer in layers if layer not in self.valid}
        self._allocate({layer: shard.view for layer, shard in missing.items() if layer not in self._copies}, place)
        lost = {}
        for layer, shard in missing.items():
            if layer in self._merged:
                lost[f"{layer}.weight"] = replace(shard, view=self._copies[layer])
            else:
                self._copies[layer].copy_(shard.view)
        if lost:
            load(lost, self._folder, whole=False)
        self.valid.update(missing)

    def _allocate(self, views: Mapping[str, Tensor], place: str) -> None:
        if place == "device":
            for layer, view in views.items():
                self._copies[layer] = self._memory.zeros(view.shape, view.dtype)
        elif views:
            sizes = [view.nbytes for view in views.values()]
            pinned = Pinned(sum(sizes), self._device, "the base of the adapters", "free some, or adapt fewer layers")
            self._pinned.append(pinned)
            for (layer, view), piece in zip(views.items(), torch.split(pinned.bytes, sizes), strict=True):
                self._copies[layer] = piece.view(view.dtype).view(view.shape)

    def targets(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Return the shards to which factors are written, by layer."""
        return _adapted({layer: self._copies[layer] for layer in self.valid}, shards)

    def forget(self) -> None:
        """Mark all copies as invalid, because other base weights replace them."""
        self.valid, self._merged = set(), frozenset()


def _adapted(bases: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Shard]:
    return {layer: _Adapted(**vars(shards[f"{layer}.weight"]), base=base) for layer, base in bases.items()}
