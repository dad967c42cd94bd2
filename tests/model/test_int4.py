"""Models in int4 against transformers, which runs the weights that int4 represents: checkpoints of the published forms,
and weights that are rounded in an update."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitwise import alone, answers, random_options, random_requests
from conftest import Checkpoint, hf_model, random_ids
from int4_forms import Form, auto_round_form, awq_form, compressed_form, gptq_form, rounded
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastgen import Generator
from fastgen.async_engine.updates import WeightUpdates
from fastgen.kernels.batch_invariant import Fused
from fastgen.kernels.norm import RMSNorm
from fastgen.model.config import read_config
from fastgen.model.int4_linear import Int4Linear
from fastgen.model.linear import Linear
from fastgen.model.loader import load
from fastgen.model.parameters import Parameters
from fastgen.model.quantization import Int4
from fastgen.model.quantization_config import parse_quantization
from fastgen.model.weights import write
from fastgen.parallel.group import Group

CPU = {"device": "cpu", "seed": 0, "max_seqs": 8, "max_step_tokens": 64, "page_size": 16, "num_pages": 64}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "initializer_range": 0.06}  # fmt: skip
FORMS = {
    "awq": awq_form(128),
    "awq some": awq_form(64, ignored=("layers.0.", "self_attn.o_proj")),
    "awq symmetric": awq_form(32, symmetric=True),
    "gptq": gptq_form(128, symmetric=True),
    "gptq asymmetric": gptq_form(32, symmetric=False),
    "gptq row": gptq_form(-1, symmetric=False),
    "gptq v2": gptq_form(64, symmetric=False, version=2),
    "gptq v2 symmetric": gptq_form(128, symmetric=True, version=2),
    "packed": compressed_form(128, symmetric=True),
    "packed asymmetric": compressed_form(32, symmetric=False, ignored=("mlp.down_proj",)),
    "packed channel": compressed_form(-1, symmetric=True),
    "packed asymmetric channel": compressed_form(-1, symmetric=False),
    "AutoRound": auto_round_form(128, True, "auto_gptq"),
    "AutoRound AWQ": auto_round_form(32, False, "auto_awq"),
}
FAMILY = {"awq": "Qwen2", "gptq": "Mistral", "gptq asymmetric": "Qwen3", "packed": "Qwen3", "gptq v2": "Arcee",
          "packed asymmetric": "Arcee", "awq symmetric": "Gemma3"}  # fmt: skip  # others: Llama
SOME = ("awq", "gptq asymmetric", "packed asymmetric", "packed channel")


def source_of(checkpoint: Checkpoint, name: str) -> Path:
    return checkpoint(FAMILY.get(name, "Llama"), **SIZES)


def hf_scores(source: Path, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Return transformers' logprobs of ids[1:] with other weights, in float32."""
    model = hf_model(source)
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights, strict=False)
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
    finally:
        model.load_state_dict(old)
    return logits[:-1].log_softmax(1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def check_scores(gen: Generator, source: Path, weights: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    ids = random_ids(60)
    found = torch.tensor(gen.score([ids])[0][1:])
    assert (found - hf_scores(source, weights, ids)).abs().max() < tolerance
    plain = load_file(source / "model.safetensors")
    assert (found - hf_scores(source, plain, ids)).abs().max() > 10 * tolerance, "the form changes nothing"


@pytest.mark.parametrize("name", FORMS)
def test_published_checkpoints(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder, form = source_of(checkpoint, name), tmp_path / "int4", FORMS[name]
    meant = form.write(source, folder)
    assert 0 < len(form.modules(meant)) <= 21
    with Generator(folder, quantization=form.config["quant_method"], **CPU) as gen:
        assert "weights in int4" in gen.config.summary
        check_scores(gen, source, meant)


@pytest.mark.parametrize(("group", "symmetric"), [(128, True), (32, False), (-1, False)])
def test_files_of_compressed_tensors(group: int, symmetric: bool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The package packs a model, saves it, and unpacks it again; the unpacked model is the reference."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    form, source = compressed_form(group, symmetric), source_of(checkpoint, "")
    config = QuantizationConfig(**{**form.config, "quantization_status": "initialized"})
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    apply_quantization_config(model, config)
    for name in form.modules(model.state_dict()):
        module = model.get_submodule(name)
        arguments, rows = module.quantization_scheme.weights, len(module.weight)
        groups = module.weight.detach().view(rows, -1, module.weight.shape[1] if group == -1 else group)
        scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), arguments)
        module.weight_scale.data.copy_(scales)
        if not symmetric:
            module.weight_zero_point.data.copy_(zeros)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "packed")
    compressor.update_config(str(tmp_path / "packed"))
    compressor.decompress_model(model)
    assert "model.layers.0.mlp.up_proj.weight_packed" in load_file(tmp_path / "packed" / "model.safetensors")
    with Generator(tmp_path / "packed", **CPU) as gen:
        check_scores(gen, source, model.state_dict())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_once_to_the_dtype(dtype: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The answers have the bits of a checkpoint of the weights that int4 represents."""
    source, folder, plain = source_of(checkpoint, ""), tmp_path / "int4", tmp_path / "plain"
    meant, ids = FORMS["awq"].write(source, folder), [random_ids(30)]
    shutil.copytree(source, plain)
    save_file(meant, plain / "model.safetensors")
    with Generator(folder, dtype=dtype, **CPU) as gen, Generator(plain, dtype=dtype, **CPU) as expected:
        assert gen.score(ids)[0][1:] == expected.score(ids)[0][1:]


@pytest.mark.parametrize("name", ["gptq asymmetric"])
def test_the_schedule_never_shows(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "int4"
    FORMS[name].write(source_of(checkpoint, name), folder)
    requests = random_requests(320, 8, 60, 10)
    with Generator(folder, **CPU) as gen:
        assert gen.config.deterministic
        expected = alone(gen, requests)
    for seed in range(2):
        with Generator(folder, **{**CPU, **random_options(seed, 80)}) as gen:
            assert answers(gen, requests) == expected


def parameters_of(folder: Path, scale_dtype: str = "float16", group: Group | None = None) -> Parameters:
    config = read_config(folder)
    assert isinstance(config.quantization, Int4)
    config = replace(config, quantization=replace(config.quantization, scale_dtype=scale_dtype))
    return Parameters(config, torch.float32, torch.device("cpu"), group)


@pytest.mark.parametrize("name", SOME)
def test_tensors_are_kept_as_they_are(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The numbers, zeros and scales of a fused layer are those of the checkpoint, of the same dtype. There are all
    zeros, from 0 to 15: in GPTQ's words of zeros minus 1, a 0 borrows from the next zero."""
    source, folder, form = tmp_path / "source", tmp_path / "int4", FORMS[name]
    shutil.copytree(source_of(checkpoint, ""), source)
    tensors = load_file(source / "model.safetensors")
    names = [f"model.layers.1.mlp.{which}_proj.weight" for which in ("gate", "up")]
    for each in names:
        rows = torch.arange(len(tensors[each])) % 16
        tensors[each] += (rows / 7.5 - 1)[:, None] * tensors[each].abs().max()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    form.write(source, folder)
    parameters = parameters_of(folder, str(form.dtype).removeprefix("torch."))
    load(parameters.targets(stored=True), folder)
    held = parameters.layers[1].gate_up
    assert isinstance(held, Int4Linear)
    wanted = [rounded(tensors[each], form.group, form.symmetric, form.dtype) for each in names]
    assert torch.equal(held.scales, torch.cat([each.scale for each in wanted]))
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    numbers = ((held.weight[..., None] >> shifts) & 15).flatten(1)
    assert torch.equal(numbers.long(), torch.cat([each.q for each in wanted]))
    if form.symmetric:
        assert held.zeros is None
    else:
        assert held.zeros is not None
        assert torch.equal(held.zeros.long(), torch.cat([each.zero for each in wanted]))
        assert held.zeros.unique().tolist() == list(range(16))


@pytest.mark.parametrize("name", ["awq", "packed", "gptq row"])
def test_a_layer_in_the_order_of_kernels(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As on a GPU: the layer keeps int4, in another order, which can be undone."""
    folder, form = tmp_path / "int4", FORMS[name]
    meant = form.write(source_of(checkpoint, ""), folder)
    parameters = parameters_of(folder, str(form.dtype).removeprefix("torch."))
    load(parameters.targets(stored=True), folder)
    linear, x = parameters.layers[0].gate_up, torch.randn(5, 256)
    assert isinstance(linear, Int4Linear)
    before = linear.weight.clone(), linear.scales.clone()
    linear.prepare()
    assert not torch.equal(linear.weight, before[0])
    weight = torch.cat([meant[f"model.layers.0.mlp.{which}_proj.weight"] for which in ("gate", "up")])
    torch.testing.assert_close(linear.apply(x), x @ weight.t(), rtol=1e-4, atol=1e-4)
    norm = RMSNorm(torch.rand(256), 1e-5)
    fused = linear.apply(x.clone(), Fused(swiglu=True), norm)
    torch.testing.assert_close(fused, Linear(weight, None).apply(x, Fused(swiglu=True), norm), rtol=1e-4, atol=1e-4)
    linear.restore()
    assert torch.equal(linear.weight, before[0])
    assert torch.equal(linear.scales, before[1])


class Rank(Group):
    """One of two ranks, without the other."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.size = rank, 2


@pytest.mark.parametrize("name", SOME)
def test_the_parts_of_two_ranks_are_the_whole(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("Llama", **{**SIZES, "head_dim": 128, "intermediate_size": 512})
    folder, form = tmp_path / "int4", FORMS[name]
    meant = form.write(source, folder)
    for rank in range(2):
        parameters = parameters_of(folder, str(form.dtype).removeprefix("torch."), Rank(rank))
        load(parameters.targets(stored=True), folder)
        parameters.pack()
        parameters.unpack()
        for key, shard in parameters.targets().items():
            assert torch.allclose(shard.view, shard.slice(meant[key]), rtol=1e-6, atol=0), key


@pytest.mark.long
@pytest.mark.parametrize("name", ["awq"])
def test_ranks_answer_as_one_process(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder = checkpoint("Llama", **{**SIZES, "intermediate_size": 512}), tmp_path / "int4"
    meant = FORMS[name].write(source, folder)
    with Generator(folder, tensor_parallel=2, **CPU) as gen:
        check_scores(gen, source, meant)


# ------------------------------------------------------------------------------------ updates, adapters, sleep


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "gptq"), (1, "gptq asymmetric"), (1, "packed"), (2, "gptq asymmetric")]
)
def test_an_update_is_rounded_if_that_is_asked_for(
    name: str, ranks: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, folder, form = checkpoint("Llama", **{**SIZES, "intermediate_size": 512}), tmp_path / "int4", FORMS[name]
    meant = form.write(source, folder)
    new = {key: tensor * 1.5 for key, tensor in load_file(source / "model.safetensors").items()}
    wanted = dict(new)
    for key in form.modules(new):
        weight = rounded(new[f"{key}.weight"], form.group, form.symmetric, form.dtype)
        wanted[f"{key}.weight"] = weight.meant
    with Generator(folder, tensor_parallel=ranks, **CPU) as gen:
        with pytest.raises(ValueError, match=r"the model is in int4, .* pass requantize=True"):
            gen.update_weights(new)
        with pytest.raises(ValueError, match="the weights do not fit the model"):
            gen.update_weights({**new, "model.norm.weight": torch.zeros(3)}, requantize=True)
        assert (gen.weight_version, gen.needs_weights) == (0, False)
        check_scores(gen, source, meant)
        gen.update_weights(new, requantize=True)
        check_scores(gen, source, wanted)


def test_an_update_of_some_tensors_that_fails_midway(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder = source_of(checkpoint, ""), tmp_path / "int4"
    FORMS["awq"].write(source, folder)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    with Generator(folder, **CPU) as gen:
        before, sums = gen.score([random_ids(20)])[0][1:], gen.weight_checksums()
        with pytest.raises(RuntimeError, match="the trainer died"):
            gen.update_weights(dying(weights), requantize=True)
        assert gen.needs_weights
        gen.update_weights(weights, requantize=True)
        assert gen.score([random_ids(20)])[0][1:] == before, "rounding to the nearest is what the test's form does"
        assert gen.weight_checksums() == sums
        gen.update_weights({name: torch.full((256, 384), torch.nan)}, partial=True, requantize=True)
        assert f"nor are the weights {name};" in str(gen.generate([[5, 6]])[0].error)


def test_the_weights_can_be_set_to_0(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As vLLM's /weight_checker does; an update then restores the bits."""
    source, folder = source_of(checkpoint, "packed"), tmp_path / "int4"
    FORMS["packed"].write(source, folder)
    with Generator(folder, **CPU) as gen:
        weights = load_file(source / "model.safetensors")
        gen.update_weights(weights, requantize=True)
        sums = gen.weight_checksums()
        assert WeightUpdates(gen, check=lambda: None).reset_weights() == 2
        assert not sums[0].items() & gen.weight_checksums()[0].items()
        assert len(set(gen.score([random_ids(20)])[0][1:])) == 1, "all logits are 0"
        gen.update_weights(weights, requantize=True)
        assert gen.weight_checksums() == sums


def dying(weights: dict[str, Tensor]) -> Any:
    yield from list(weights.items())[:9]
    raise RuntimeError("the trainer died")


def test_the_memory_of_weights_is_planned(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """4.25 bits per weight of linear layers, and 2 bytes per other weight."""
    source, folder = source_of(checkpoint, ""), tmp_path / "int4"
    FORMS["packed"].write(source, folder)
    plain, config = read_config(source), read_config(folder)
    outside = 2 * plain.vocab_size * plain.hidden_size
    assert plain.weight_bytes(2) == 2 * plain.num_parameters
    assert config.weight_bytes(2) == 2 * outside + (plain.num_parameters - outside) * 4.25 / 8
    assert read_config(source, "fp8").weight_bytes(2) == 2 * outside + plain.num_parameters - outside


def test_requantizing_needs_a_quantized_model(checkpoint: Checkpoint) -> None:
    source = source_of(checkpoint, "")
    with (
        Generator(source, **CPU) as gen,
        pytest.raises(ValueError, match=r"requantize=True, and the model is not quantized"),
    ):
        gen.update_weights(load_file(source / "model.safetensors"), requantize=True)


def test_adapters_sleep_and_the_kv_cache(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder, ids = source_of(checkpoint, ""), tmp_path / "int4", [random_ids(20)]
    FORMS["packed"].write(source, folder)
    with Generator(folder, kv_cache_dtype="fp8", **CPU) as gen:
        with pytest.raises(ValueError, match="the model is in int4, into which adapters cannot be merged"):
            gen.update_adapter({}, {"r": 8, "lora_alpha": 8})
        before = gen.score(ids)[0][1:]
        gen.sleep()
        gen.wake()
        assert gen.score(ids)[0][1:] == before
    with Generator(folder, **CPU) as gen:
        assert (torch.tensor(gen.score(ids)[0][1:]) - torch.tensor(before)).abs().max() < 0.5
    with Generator(folder, load="dummy", **CPU) as gen:
        assert gen.generate([[5, 6]])[0].error is None


def test_dummy_weights_are_written_in_int4(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A layer that is written before it is ready has words, scales and zeros, which give the rounded weight."""
    source, folder = source_of(checkpoint, ""), tmp_path / "int4"
    FORMS["gptq asymmetric"].write(source, folder)
    weights, parameters = load_file(source / "model.safetensors"), parameters_of(folder)
    write(parameters.targets(), weights.items())
    assert isinstance(parameters.layers[0].o, Int4Linear)
    parameters.pack()
    name = "model.layers.2.self_attn.o_proj.weight"
    expected = rounded(weights[name], 32, False, torch.float16).meant
    parameters.unpack()
    assert torch.allclose(parameters.targets()[name].view, expected, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------ what is refused


def configured(folder: Path, form: Form, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    config = {**form.config, **changes}
    (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))


def test_errors_of_loading(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder = source_of(checkpoint, ""), tmp_path / "int4"
    form = FORMS["awq"]
    form.write(source, folder)
    with pytest.raises(
        ValueError, match="quantization='gptq' does not fit the checkpoint, which has quant_method='awq'; leave"
    ):
        Generator(folder, quantization="gptq", **CPU)
    with pytest.raises(
        ValueError, match="quantization='fp8' does not fit the checkpoint, which has quant_method='awq'; leave"
    ):
        Generator(folder, quantization="fp8", **CPU)
    with pytest.raises(
        ValueError, match="quantization='awq' does not fit the checkpoint, which is not quantized; leave"
    ):
        Generator(source, quantization="awq", **CPU)
    configured(folder, form, modules_to_not_convert=["k_proj"])
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj, .*k_proj, .* unquantized"):
        Generator(folder, **CPU)
    configured(folder, form, group_size=96)
    with pytest.raises(
        ValueError, match=r"of 256 inputs and .* are not whole groups of 96 inputs and 8 outputs; take an"
    ):
        Generator(folder, **CPU)
    configured(folder, form, group_size=64)
    with pytest.raises(ValueError, match=r"qzeros' has shape \[3, 32\]; the model needs \[6, 32\]"):
        Generator(folder, **CPU)
    configured(folder, form, zero_point=False)
    with pytest.raises(ValueError, match="has zeros other than 8, and the configuration says that there are none"):
        Generator(folder, **CPU)
    configured(folder, form)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.qweight"
    save_file({**tensors, name: tensors[name].float()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"qweight' is torch.float32; quantization_config says that it is in words"):
        Generator(folder, **CPU)


def test_tensors_that_do_not_matter_are_checked(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, folder, form = source_of(checkpoint, ""), tmp_path / "int4", FORMS["gptq"]
    meant = form.write(source, folder)
    tensors = load_file(folder / "model.safetensors")
    order, bias = "model.layers.1.mlp.up_proj.g_idx", "model.layers.1.mlp.up_proj.bias"
    tensors[bias] = torch.zeros(384)
    save_file(tensors, folder / "model.safetensors")
    with Generator(folder, **CPU) as gen:
        check_scores(gen, source, meant)
    right = tensors[order]
    disorder = right.flip(0), right * 0 - 1, right.abs() * 0
    nonsense = right[:0], right[0], right.to(torch.complex64), right.float(), right[None]
    for wrong, message in (*((each, "out of order") for each in disorder), *((each, "needs int") for each in nonsense)):
        save_file({**tensors, order: wrong.contiguous()}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=rf"int4/model\.safetensors: {order} (is|has) .*{message}"):
            Generator(folder, **CPU)
    save_file({**tensors, bias: torch.ones(384)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensor 'model.layers.1.mlp.up_proj.bias'"):
        Generator(folder, **CPU)


@pytest.mark.parametrize(
    ("name", "path", "value", "named"),
    [
        ("awq", "bits", 8, "bits=8"),
        ("awq", "version", "gemv", "version='gemv'"),
        ("awq", "format", "gemv_fast", "format='gemv_fast'"),
        ("awq", "backend", "llm-awq", "backend='llm-awq'"),
        ("awq", "group_size", 12, "group_size=12"),
        ("gptq", "bits", 8, "bits=8"),
        ("gptq", "desc_act", True, "desc_act=True"),
        ("gptq", "checkpoint_format", "marlin", "checkpoint_format='marlin'"),
        ("gptq", "lm_head", True, "lm_head=True"),
        ("gptq", "group_size", 0, "group_size=0"),
        ("gptq", "dynamic", {"+:.*down.*": {"bits": 8}}, "dynamic has"),
        ("gptq", "modules_in_block_to_quantize", [["q_proj"]], "modules_in_block_to_quantize="),
        ("packed", "quantization_status", "frozen", "quantization_status='frozen'"),
        ("packed", "config_groups.group_0.weights.num_bits", 8, "weights.num_bits=8"),
        ("packed", "config_groups.group_0.weights.actorder", "group", "weights.actorder='group'"),
        ("packed", "config_groups.group_0.weights.strategy", "tensor", "weights.strategy='tensor'"),
        ("packed", "config_groups.group_0.input_activations", {"num_bits": 8}, "input_activations="),
        ("packed", "ignore", [], r"ignore=\[\] lacks lm_head"),
        ("packed", "ignore", ["lm_head", "re:("], r"ignores 're:\(', which is not a pattern: missing \)"),
        ("gptq", "dynamic", {"-:[": {}}, r"ignores 're:\[', which is not a pattern: unterminated"),
        ("AutoRound", "packing_format", "auto_round:auto_gptq:marlin", "packing_format='auto_round:auto_gptq:marlin'"),
        ("AutoRound", "bits", 2, "bits=2"),
        ("AutoRound", "data_type", "mx_fp", "data_type='mx_fp'"),
        ("AutoRound", "block_name_to_quantize", ["model.layers", "model.visual"], "block_name_to_quantize="),
        ("AutoRound", "extra_config", {"model.layers.0.mlp.up_proj": {"bits": 8}}, "extra_config has"),
    ],
)
def test_other_fields_are_refused(name: str, path: str, value: Any, named: str) -> None:
    form = inner = json.loads(json.dumps(FORMS[name].config))
    *parts, last = path.split(".")
    for part in parts:
        inner = inner[part]
    inner[last] = value
    with pytest.raises(ValueError, match=named):
        parse_quantization({"quantization_config": form})


@pytest.mark.parametrize("name", ["gptq", "AutoRound"])
def test_the_modules_of_a_model_without_a_gate(name: str) -> None:
    """All linear layers must be named, and gate_proj only if there is one."""
    modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"]
    config = {"quantization_config": {**FORMS[name].config, "modules_in_block_to_quantize": modules}}
    with pytest.raises(ValueError, match="modules_in_block_to_quantize="):
        parse_quantization(config, gated=False)
    modules.append("mlp.down_proj")
    assert isinstance(parse_quantization(config, gated=False), Int4)
    with pytest.raises(ValueError, match="modules_in_block_to_quantize="):
        parse_quantization(config)
    modules.append("mlp.gate_proj")
    assert isinstance(parse_quantization(config), Int4)


def test_modules_that_are_left_out() -> None:
    dynamic = {"-:.*layers\\.0\\..*": {}, "-:.*down_proj": {}, "+:.*": {"bits": 4, "mse": 2.0}}
    extra = {"lm_head": {"bits": 16}, "model.layers.0.mlp.down_proj": {"bits": 16},
             "model.language_model.layers.1.*": {"bits": 16}}  # fmt: skip
    blocks = {"block_name_to_quantize": [["model.layers.0", "model.layers.1", "model.language_model.layers.2"]]}
    found = [
        parse_quantization({"quantization_config": {**FORMS["gptq"].config, "dynamic": dynamic}}),
        parse_quantization({"quantization_config": {**FORMS["AutoRound"].config, "extra_config": extra, **blocks}}),
    ]
    names = [f"model.layers.{layer}.mlp.{which}_proj" for layer in range(3) for which in ("up", "down")]
    covered = [[name for name in names if form is not None and form.covers(name)] for form in found]
    assert covered == [[names[2], names[4]], [names[0], *names[4:]]]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False, "sym": False}),
    ],
)
def test_files_of_older_programs(file: str, content: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(source_of(checkpoint, ""), folder)
    (folder / file).write_text(json.dumps(content))
    found = read_config(folder).quantization
    assert found == Int4("awq" if "w_bit" in content else "gptq", (), 128, zeros=True)
