"""Models in fp8 against transformers: checkpoints of the published forms, quantized here with their publishers'
arithmetic, and bf16 checkpoints that are quantized as they are loaded or updated."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import alone, answers, random_options, random_requests
from conftest import Checkpoint, hf_model, random_ids
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastgen import Generator
from fastgen.kernels import fp8
from fastgen.model.config import read_config
from fastgen.model.loader import load
from fastgen.model.parameters import Parameters
from fastgen.model.quantization import Quantization, explaining_sizes
from fastgen.model.quantization_config import parse_quantization
from fastgen.model.quantized import Fp8Linear, WeightOnlyFp8
from fastgen.model.weights import write
from fastgen.parallel.group import Group

E4M3 = torch.float8_e4m3fn
CPU = {"device": "cpu", "seed": 0, "max_seqs": 8, "max_step_tokens": 64, "page_size": 16, "num_pages": 64}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "initializer_range": 0.06}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """A published form of fp8. config: quantization_config. strategy: the granularity of its scales. scale, other: the
    suffixes of the names of a module's scales, and of a tensor that is not read."""

    config: dict[str, Any]
    strategy: str
    scale: str = "weight_scale"
    other: str = "input_scale"

    @property
    def parsed(self) -> Quantization:
        found = parse_quantization({"quantization_config": self.config})
        assert found is not None
        return found

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a weight in fp8, its scales, and the weight that they represent, as all publishers compute them."""
        sizes = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "block": (128, 128)}
        rows, columns = sizes[self.strategy]
        tiles = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = tiles.abs().amax(dim=(1, 3), keepdim=True) / 448
        if self.strategy == "channel":
            scales = scales.bfloat16().float()  # compressed-tensors' have the checkpoint's dtype
        values = (tiles / scales).clamp(-448, 448).to(E4M3)
        meant = (values.float() * scales).reshape(weight.shape)
        stored = scales[0, 0, 0, 0] if self.strategy == "tensor" else scales[:, 0, :, 0].contiguous()
        return values.reshape(weight.shape), stored, meant


def compressed(strategy: str, ignore: list[str]) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**numbers, "strategy": strategy, "dynamic": False, "block_structure": [128, 128]}
    inputs = {**numbers, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None}  # fmt: skip


QWEN = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}  # fmt: skip
MISTRAL = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
           "modules_to_not_convert": ["lm_head", "model.vision_tower"]}  # fmt: skip
AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
           "kv_cache_scheme": "static"}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.2*"]}
FORMS = {
    "Qwen3": Form(QWEN, "block", "weight_scale_inv"),
    "Mistral": Form(MISTRAL, "tensor", "weight_scale_inv", "activation_scale"),
    "AutoFP8": Form(AUTOFP8, "tensor"),
    "ModelOpt": Form(MODELOPT, "tensor"),
    "channel": Form(compressed("channel", ["lm_head", r"re:.*\.down_proj$"]), "channel"),
    "tensor": Form(compressed("tensor", ["lm_head"]), "tensor"),
    "block": Form(compressed("block", ["lm_head"]), "block"),
}
BLOCKS = FORMS["block"].config
FAMILY = {"Qwen3": "Qwen3", "Mistral": "Mistral", "tensor": "Arcee", "block": "Arcee",
          "AutoFP8": "Gemma3"}  # fmt: skip  # others: Llama


def modules(form: Quantization, tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of the modules that are in fp8 in a checkpoint."""
    names = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    return [name for name in names if form.covers(name)]


def make(folder: Path, source: Path, form: Form) -> dict[str, Tensor]:
    """Write the fp8 form of a checkpoint; return the weights that it represents."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    meant = dict(tensors)
    for name in modules(form.parsed, tensors):
        weight, scale, meant[name + ".weight"] = form.quantized(tensors[name + ".weight"])
        tensors |= {f"{name}.weight": weight, f"{name}.{form.scale}": scale, f"{name}.{form.other}": torch.tensor(0.5)}
    tensors |= {f"model.layers.0.self_attn.{name}_scale": torch.tensor(0.02) for name in ("k", "v", "kv")}
    save_file(tensors, folder / "model.safetensors")
    configure(folder, form.config)
    return meant


def configure(folder: Path, config: dict[str, Any]) -> None:
    """Replace the quantization_config of a checkpoint."""
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))


def round_inputs(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round the input of a linear layer to E4M3 with one scale per token; a hook before the layer."""
    (x,) = given
    scale = (x.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return ((x / scale).clamp(-448, 448).to(E4M3).float() * scale,)


def hf_logprobs(
    source: Path, weights: dict[str, Tensor], names: list[str], ids: list[list[int]], rounded: bool
) -> Tensor:
    """Return transformers' logprobs of ids[..., 1:] with other weights. rounded: the inputs of `names` are in fp8."""
    model = hf_model(source)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights, strict=False)
    hooks = [model.get_submodule(name).register_forward_pre_hook(round_inputs) for name in names if rounded]
    try:
        with torch.inference_mode():
            logits = model(torch.tensor(ids)).logits.float()
    finally:
        model.load_state_dict(old)
        for hook in hooks:
            hook.remove()
    return logits[:, :-1].log_softmax(2).gather(2, torch.tensor(ids)[:, 1:, None])[..., 0]


def check_scores(gen: Generator, source: Path, weights: dict[str, Tensor], names: list[str]) -> None:
    """Compare scores with those of transformers, where the inputs of the modules `names` are in fp8, too.

    Sums in another order round a few inputs to the neighbouring fp8 number, which changes all later tokens. So the
    scores of most pairs of tokens are equal, and the scores of a long sequence are close.
    """
    pairs, long = [random_ids(2, seed=seed) for seed in range(40)], [random_ids(40)]
    for ids, quantile, tolerance in ((pairs, 0.5, 1e-4), (long, 0.5, 0.06)):
        found = torch.tensor(gen.score(ids))[:, 1:]
        exact = hf_logprobs(source, weights, names, ids, rounded=True)
        assert (found - exact).abs().quantile(quantile) < tolerance
        plain = hf_logprobs(source, weights, names, ids, rounded=False)
        assert (found - plain).abs().mean() < 0.15
        assert (found - plain).abs().mean() > (found - exact).abs().mean()


def source_of(checkpoint: Checkpoint, name: str) -> Path:
    family = FAMILY.get(name, "Llama")
    return checkpoint(family, **SIZES)


@pytest.mark.parametrize("name", FORMS)
def test_published_checkpoints(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder = source_of(checkpoint, name), tmp_path / "fp8"
    meant = make(folder, source, FORMS[name])
    names = modules(FORMS[name].parsed, meant)
    assert names
    with Generator(folder, **CPU) as gen:
        check_scores(gen, source, meant, names)


def quantized(source: Path, form: Quantization | None = None, factor: float = 1) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights that fastgen's own fp8 form of a checkpoint represents, and the modules in fp8.

    form: the model's form; None if the checkpoint is not quantized. factor: all weights are multiplied by it first.
    """
    form = form or Quantization()
    weights = {name: tensor * factor for name, tensor in load_file(source / "model.safetensors").items()}
    names = modules(form, weights)
    rounded = {
        f"{name}.weight": fp8.quantize_weight(weights[f"{name}.weight"], form.blocks).dequantized() for name in names
    }
    return {**weights, **rounded}, names


def test_a_checkpoint_is_quantized_as_it_is_loaded(checkpoint: Checkpoint) -> None:
    source = checkpoint("Llama", **SIZES)
    with Generator(source, quantization="fp8", **CPU) as gen:
        check_scores(gen, source, *quantized(source))
        with pytest.raises(ValueError, match="the model is in fp8"):
            gen.update_adapter({}, {"r": 8, "lora_alpha": 8})
        name = "model.layers.1.mlp.down_proj.weight"
        gen.update_weights({name: torch.full((256, 384), torch.nan)}, partial=True)
        assert f"nor are the weights {name};" in str(gen.generate([[5, 6]])[0].error)
    parameters = Parameters(read_config(source, quantization="fp8"), torch.float32, torch.device("cpu"))
    assert parameters.layers[0].gate_up.weight.dtype == E4M3
    assert parameters.lm_head.weight.dtype == torch.float32


@pytest.fixture
def weight_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers multiply as on a GPU without products in fp8, by the kernels' twins."""
    zeros = Fp8Linear.zeros

    def without_inputs(*given: Any) -> WeightOnlyFp8:
        found = zeros(*given)
        return WeightOnlyFp8(found.weight, found.bias, scales=found.scales)

    monkeypatch.setattr(Fp8Linear, "zeros", without_inputs)


@pytest.mark.usefixtures("weight_only")
@pytest.mark.parametrize("name", ["", *FORMS])
def test_only_the_weights_in_fp8(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Scores are those of the weights that fp8 represents, whatever the checkpoint says of the inputs."""
    source, folder = source_of(checkpoint, name), tmp_path / "fp8"
    meant = make(folder, source, FORMS[name]) if name else quantized(source)[0]
    ids = [random_ids(2), random_ids(100)]
    with Generator(folder if name else source, quantization="fp8", **{**CPU, "max_step_tokens": 200}) as gen:
        for each in ids:
            found = torch.tensor(gen.score([each]))[:, 1:]
            exact = hf_logprobs(source, meant, [], [each], rounded=False)
            assert (found - exact).abs().max() < 1e-4
        gen.update_weights({key: tensor * 1.5 for key, tensor in load_file(source / "model.safetensors").items()})
        meant, _ = quantized(source, FORMS[name].parsed if name else None, 1.5)
        found = torch.tensor(gen.score([ids[1]]))[:, 1:]
        assert (found - hf_logprobs(source, meant, [], [ids[1]], rounded=False)).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["Qwen3"])
def test_the_schedule_never_shows(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder = source_of(checkpoint, name), tmp_path / "fp8"
    make(folder, source, FORMS[name])
    requests = random_requests(320, 8, 60, 10)
    with Generator(folder, **CPU) as gen:
        expected = alone(gen, requests)
    for seed in range(2):
        with Generator(folder, **{**CPU, **random_options(seed, 80)}) as gen:
            assert answers(gen, requests) == expected


@pytest.mark.parametrize("name", ["", "Qwen3", "Mistral"])
def test_an_update_is_quantized_as_a_checkpoint_is(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The scores equal those of a checkpoint of the new weights that is quantized in the same way."""
    source, folder, ids = source_of(checkpoint, name), tmp_path / "fp8", random_ids(30)
    changed, options = tmp_path / "changed", {**CPU, "quantization": "fp8"}
    weights = {key: (tensor * 1.5).bfloat16() for key, tensor in load_file(source / "model.safetensors").items()}
    shutil.copytree(source, changed)
    save_file({key: tensor.float() for key, tensor in weights.items()}, changed / "model.safetensors")
    if name:
        make(folder, source, FORMS[name])
    if name == "Qwen3":
        make(tmp_path / "again", changed, FORMS[name])
        changed = tmp_path / "again"
    with Generator(folder if name else source, **options) as gen, Generator(changed, **options) as expected:
        gen.update_weights(weights)
        assert gen.score([ids])[0][1:] == expected.score([ids])[0][1:]


class Rank(Group):
    """One of two ranks, without the other."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.size = rank, 2


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
@pytest.mark.parametrize("name", ["", "Qwen3", "Mistral", "channel"])
def test_the_parts_of_two_ranks_are_the_whole(name: str, family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Parts of a checkpoint in fp8 are exact. Weights that are quantized here have scales of the rank's own rows. The
    tensors of Phi3 are several modules, of each of which a rank has a part."""
    sizes = {**SIZES, "head_dim": 128, "intermediate_size": 512, "pad_token_id": 0}
    source, folder = checkpoint(family, **sizes), tmp_path / "fp8"
    weights = load_file(source / "model.safetensors")
    if name:
        weights = make(folder, source, FORMS[name])
    new = {key: tensor * 1.5 for key, tensor in weights.items()}
    config = read_config(folder if name else source, quantization="fp8")
    for rank in range(2):
        parameters = Parameters(config, torch.float32, torch.device("cpu"), Rank(rank))
        load(parameters.targets(stored=True), folder if name else source)
        check_parts(parameters, weights, 1e-6 if name else 0.04)
        write(parameters.targets(), new.items())
        check_parts(parameters, new, 0.04)


def check_parts(parameters: Parameters, weights: dict[str, Tensor], tolerance: float) -> None:
    """Compare a rank's weights in fp8 with its slices of the whole. tolerance: relative to the largest number."""
    for name, shard in parameters.targets().items():
        if shard.scales is not None:
            found, wanted = fp8.Quantized(shard.view, shard.scales).dequantized(), shard.slice(weights[name])
            assert (found - wanted).abs().max() <= tolerance * wanted.abs().max(), name


def test_errors_of_loading(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, small = tmp_path / "fp8", tmp_path / "small"
    partly = {**QWEN, "modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]}
    make(folder, checkpoint("Llama", **SIZES), Form(partly, "block", "weight_scale_inv"))
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj, .*k_proj, .* unquantized"):
        Generator(folder, **CPU)
    configure(folder, {**QWEN, "modules_to_not_convert": []})
    with pytest.raises(ValueError, match=r"k_proj.weight' is torch.float32; quantization_config says that it is in"):
        Generator(folder, **CPU)
    shutil.copytree(checkpoint("Llama"), small)
    configure(small, QWEN)
    with pytest.raises(ValueError, match=r"are not whole blocks of 128 x 128; take another checkpoint$"):
        Generator(small, **CPU)
    fused = tmp_path / "fused"  # a part of one module and a part of the other make a whole block, but each does not
    shutil.copytree(checkpoint("Phi3", **SIZES, pad_token_id=0), fused)
    configure(fused, QWEN)
    message = r"qkv_proj of 256 inputs and 128, 64, 64 outputs are not .* on each rank; take fewer ranks, or another ch"
    with pytest.raises(ValueError, match=message), explaining_sizes(2):
        Parameters(read_config(fused), torch.float32, torch.device("meta"), Rank(0))


# Forms that are refused, and modules that are left out.


@pytest.mark.parametrize(
    ("form", "path", "value", "named"),
    [
        (QWEN, "quant_method", "bitsandbytes", "quant_method='bitsandbytes'"),
        (QWEN, "quant_method", "fbgemm_fp8", "quant_method='fbgemm_fp8'"),
        (QWEN, "weight_block_size", [64, 128], r"weight_block_size=\[64, 128\]"),
        (QWEN, "activation_scheme", None, "activation_scheme=None"),
        (QWEN, "fmt", "e5m2", "fmt='e5m2'"),
        (QWEN, "scale_fmt", "ue8m0", "scale_fmt='ue8m0'"),
        (MODELOPT, "quant_algo", "NVFP4", "quant_algo='NVFP4'"),
        (BLOCKS, "format", "int-quantized", "format='int-quantized'"),
        (BLOCKS, "quantization_status", "frozen", "quantization_status='frozen'"),
        (BLOCKS, "ignore", ["lm_head", None], "ignores None, which is not a pattern"),
        (BLOCKS, "config_groups", {}, "config_groups has 0 groups"),
        (BLOCKS, "config_groups.group_0.targets", ["re:.*mlp.*"], "targets="),
        (BLOCKS, "config_groups.group_0.weights.num_bits", 4, "weights.num_bits=4"),
        (BLOCKS, "config_groups.group_0.weights.strategy", "group", "weights.strategy='group'"),
        (BLOCKS, "config_groups.group_0.input_activations", None, "input_activations.num_bits=None"),
        (BLOCKS, "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format='sparse-24-bitmask'"),
    ],
)
def test_other_fields_are_refused(form: dict[str, Any], path: str, value: Any, named: str) -> None:
    form = inner = json.loads(json.dumps(form))
    *parts, last = path.split(".")
    for part in parts:
        inner = inner[part]
    inner[last] = value
    with pytest.raises(ValueError, match=named):
        parse_quantization({"quantization_config": form})


def test_modelopts_own_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("Llama", **SIZES), folder)
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.layers.0.*"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    found = read_config(folder).quantization
    assert found == Quantization("tensor", ("lm_head", "*.layers.0.*"))


def test_modules_that_are_left_out() -> None:
    form = Quantization("channel", ("lm_head", "re:.*layers\\.0\\..*", "model.layers.1", "down_proj", "*.layers.3.*"))
    covered = ["model.layers.2.mlp.up_proj", "model.layers.10.mlp.up_proj", "model.layers.2.self_attn.o_proj"]
    assert all(map(form.covers, covered))
    left_out = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj",
                "model.layers.3.self_attn.q_proj"]  # fmt: skip
    assert not any(map(form.covers, left_out))
