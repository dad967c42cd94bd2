"""Compile a Generator's Triton kernels without access to the GPU: does each fit into shared memory and registers?

    python scripts/tune/compile_kernels.py            # all chips and models; writes kernels-compiled-VERSION.json
    python scripts/tune/compile_kernels.py --smoke    # one of each, to see that it runs; writes nothing

A Generator of random weights runs on the CPU, in a process for each chip and model. Where a GPU would launch a kernel,
with the arguments and the configuration that it would have on that chip, the kernel is compiled for it (ptxas
included), and its torch twin computes the result (of products and attention it is zeros, which are quicker). So what is
compiled is what one GPU would run, with cuBLAS for products of many rows and then without it, but for flash-attn. Needs
Triton, and no GPU.

The exit status is 1 if a kernel takes more shared memory than a block may have, spills more registers than ACCEPTED
says, or is late: not among those that the start of a Generator compiles ahead of all launches.

VERSION is Triton's. The file has a row for each kernel: variants, its compiled configurations, and the largest
of their figures. shared: bytes of shared memory, of those that a block may have on that chip; spilled: bytes of a
thread's numbers that have no register, and are in memory instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fastgen.device.chip import Chip
from fastgen.engine.options import EngineConfig
from fastgen.kernels.launch import Kernel
from fastgen.kernels.triton import jit
from fastgen.kernels.triton.compile_ahead import compile_ahead

if TYPE_CHECKING:
    from fastgen.kernels.batch_invariant import Fused

RESULTS = Path(__file__).parent.parent / "results"

CHIPS = {
    "A100": Chip((8, 0), 108, 166_912),
    "RTX A5000": Chip((8, 6), 64, 101_376),
    "RTX 4090": Chip((8, 9), 128, 101_376),
    "H200": Chip((9, 0), 132, 232_448),
    "B200": Chip((10, 0), 148, 232_448),
    "RTX 5090": Chip((12, 0), 170, 101_376),
}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 4096,
         "rms_norm_eps": 1e-5, "hidden_act": "silu"}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mistral 7B": {"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "sliding_window": None},
    "head size 64": {"architectures": ["LlamaForCausalLM"], "head_dim": 64},
    "head size 96, window": {"architectures": ["MistralForCausalLM"], "head_dim": 96, "sliding_window": 100},
    "8 heads a KV head": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1},
    "5 heads a KV head, biases": {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 10},
    "a KV head each, norms": {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8},
    "norms after rope": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
    "head size 256, centered norms, GeGLU": {
        "architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "num_attention_heads": 4, "sliding_window": 100},
    "output gate, norms without weights": {
        "architectures": ["MuseGlimmerForConditionalGeneration"], "text_config": {
            "model_type": "muse_glimmer_text", "sliding_window": 100}},
    "partial rope": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75},
    "recurrent layers": {  # of Qwen3.5 9B; in the next one, of 27B
        "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 16,
        "num_key_value_heads": 4, "full_attention_interval": 2, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32},
    "recurrent layers, 3 value heads a key head": {
        "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 256, "num_hidden_layers": 2, "full_attention_interval": 2,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48},
}  # fmt: skip
ACCEPTED: dict[str, dict[str, int]] = {
    # A tile's queries, sums and scores fill all 255 registers; 5 query heads per KV head spill most, also in the loop
    # over keys. On an H200, whose figures include it, only shapes without a kernel in Gluon and shared prefixes come
    # here. Smaller tiles would read keys more often. No other chip was measured.
    "triton.attention._attention_kernel": {
        "A100": 280, "RTX A5000": 712, "RTX 4090": 712, "H200": 64, "B200": 208, "RTX 5090": 256,
    },
    # On Ampere and Ada at most 56, in the tiles for many tokens; more in results of earlier states, whose products read
    # by descriptors there. On B200 a few numbers, although there are registers left.
    "triton.batch_invariant._product_kernel": {
        "A100": 4200, "RTX A5000": 3960, "RTX 4090": 3960, "B200": 64, "RTX 5090": 8,
    },
    # A number of the warp that loads, which has 40 registers, before its loop: the place of the first tile.
    "hopper.products._product_kernel": {"H200": 8},
    "triton.int4._product_kernel": {"B200": 32},
    # Limited to 168 registers, so that 12 warps fit. Compiled with Triton 3.8.0 and later versions it spills nothing.
    "hopper.prefill._prefill_kernel": {"H200": 112},
    # Limited to 128 and 80 registers, so that two and three programs share a processor: a read of the logits costs more
    # than the few bytes that stay in the L1 cache.
    "triton.truncation.cut_kernel": {
        "A100": 88, "RTX A5000": 80, "RTX 4090": 80, "H200": 80, "B200": 72, "RTX 5090": 88,
    },
    "triton.sampling._edit_kernel": {"A100": 24},
    # A few numbers per program, outside of loops; with Triton 3.8.0 and later versions nothing.
    "triton.norm._rms_norm_kernel": dict.fromkeys(CHIPS, 8),
    "triton.rope._rope_kernel": {"RTX A5000": 24, "RTX 4090": 24, "RTX 5090": 8},
    # Tiles of 64 tokens and states of 128 x 128, tuned on an H200.
    "fastgen.recurrent.prefill_kernels.scan_kernel": {
        "A100": 776, "RTX A5000": 696, "RTX 4090": 696, "RTX 5090": 784,
    },
    "fastgen.recurrent.prefill_kernels.outputs_kernel": {
        "A100": 504, "RTX A5000": 560, "RTX 4090": 560, "RTX 5090": 544,
    },
    "fastgen.recurrent.decode_kernels.decode_kernel": {
        "A100": 16, "RTX A5000": 24, "RTX 4090": 24, "H200": 24, "B200": 80, "RTX 5090": 56,
    },
    "drafts._follow_kernel": {"RTX 5090": 16},  # in results of earlier states
    "drafts._recall_kernel": {"RTX 5090": 16},
}  # fmt: skip
"""Maximum number of bytes that a thread of a kernel may spill on a chip: the largest in the results
of Triton 3.6.0 to 3.9.0, and for products also in runs of this state, whose results are not kept. All other kernels
must spill nothing."""
MOST_PROCESSES = 32  # each takes about 1 GB
DTYPES = ("bfloat16", "float16", "float32")
KERNEL = itemgetter("kernel")
ENGINE = {"load": "dummy", "device": "cpu", "num_pages": 128, "max_seqs": 32, "max_step_tokens": 512, "seed": 0,
          "speculate": "auto"}  # fmt: skip
QUANTIZED = "quantized weights"  # stands for products of Mistral 7B with weights of 4 and 8 bits
WITHOUT_DRAFTS = ("recurrent layers", "recurrent layers, 3 value heads a key head")  # nor quantization


class Target:
    """The driver that Triton asks for the chip to compile for; it knows nothing else."""

    def __init__(self, chip: Chip) -> None:
        major, minor = chip.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


class Compiled:
    """Kernels that are compiled instead of launched. what: the name of the current compilation; rows: one row per
    kernel."""

    def __init__(self, chip: Chip) -> None:
        self.what = ""
        self.rows: list[dict[str, Any]] = []
        self.late: set[str] = set()  # hashes of kernels that were compiled at a launch, and not ahead of it
        self.loading = False  # weights are quantized as they are loaded, before kernels are compiled ahead
        self._seen: set[str] = set()
        driver.set_active(Target(chip))
        compiled, quick = self, jit.quick

        def compiling(base: Any) -> Any:
            class Compile(quick(base)):  # type: ignore[misc]
                def run(self, *args: Any, warmup: bool, **options: Any) -> Any:
                    kernel = super().run(*args, warmup=True, **options)
                    if kernel is not None:  # not only noted
                        compiled.add(f"{self.fn.__module__}.{self.fn.__name__}", kernel)
                    return kernel

                def _do_compile(self, *what: Any) -> Any:
                    kernel = super()._do_compile(*what)
                    if kernel is not None and not compiled.loading:
                        compiled.late.add(kernel.hash)
                    return kernel

            return Compile

        jit.quick = compiling  # type: ignore[assignment]  # before a module with kernels is imported
        jit.launcher = lambda kernel: None  # there is nothing to load it onto
        torch.cuda.current_device = lambda: 0

    def add(self, name: str, kernel: Any) -> None:
        if kernel.hash in self._seen:
            return
        self._seen.add(kernel.hash)
        registers, spilled = resources(kernel.asm["cubin"])
        meta = kernel.metadata
        row = {"kernel": name, "first_in": self.what, "warps": meta.num_warps, "stages": meta.num_stages}
        row |= {"shared": meta.shared, "registers": registers, "spilled": spilled, "hash": kernel.hash}
        self.rows.append(row | {"late": kernel.hash in self.late})


def resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, spilled bytes) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    registers, stack, local = map(int, found)
    return registers, max(stack, local)


@contextmanager
def as_on(chip: Chip) -> Iterator[Compiled]:
    """Make Generators on the CPU decide as on a GPU of this kind."""
    compiled = Compiled(chip)
    Chip.of = staticmethod(lambda device: chip)  # type: ignore[method-assign, assignment]

    from fastgen.engine import options, startup
    from fastgen.kernels import attention, batch_invariant, fp8
    from fastgen.model import linear, parameters
    from fastgen.model.attention.paged import PagedAttention
    from fastgen.recurrent import hybrid, on_gpu

    def call(self: Kernel, *args: Any, **options: Any) -> Any:
        result = self.launch(*args, **options)
        return result if self.launch is self.twin else self.twin(*args, **options)

    def zeros(kernel: Kernel, out: int | None = None) -> None:
        """Replace the results of a kernel whose twin takes the CPU longer than compiling takes. out: the number of the
        argument that it writes, where it returns nothing."""
        launch = kernel.launch

        def compile_alone(*args: Any) -> Any:
            result = launch(*args)
            return (result if out is None else args[out]).zero_()

        kernel.launch = kernel.twin = compile_alone

    zeros(batch_invariant.product)
    zeros(fp8.product)
    zeros(attention.attention, out=1)
    linear.Linear._by_blas = lambda self, x, dtype: x.new_zeros(*x.shape[:-1], len(self.weight), dtype=dtype)  # type: ignore[method-assign]
    Kernel.__call__, Kernel.runs_on = call, lambda self, device: True  # type: ignore[method-assign]
    parameters.Parameters.pack = lambda self: None  # type: ignore[method-assign]  # a GPU's weights are as they are
    startup.make_attention = lambda name, *arguments: PagedAttention(*arguments)
    make_runner = startup.make_runner

    def with_kv_of_a_gpu(model: Any, config: EngineConfig, features: Any) -> Any:
        if config.kv_cache_dtype != "fp8":  # on the CPU it would be float32
            config = replace(config, kv_cache_dtype=config.dtype)
        return make_runner(model, config, features)

    fill_random = startup.fill_random

    def loading(targets: Any) -> None:
        compiled.loading = True
        fill_random(targets)
        compiled.loading = False

    class Mixer(on_gpu.GpuMixer):
        def mix(self, *what: Any) -> torch.Tensor:
            return super().mix(*what).zero_()

    options.has_amx = lambda: False  # or this CPU's products decide what is deterministic
    startup.make_runner, startup.fill_random = with_kv_of_a_gpu, loading
    hybrid.make_mixer = lambda runner, shape, lanes: Mixer(shape, lanes, runner.config.max_seqs, 1e-6)
    yield compiled


def run_part(name: str, dtypes: tuple[str, ...], chip: Chip) -> list[dict[str, Any]]:
    """Compile everything that a model needs in these dtypes, or what QUANTIZED stands for."""
    with as_on(chip) as compiled:
        if name == QUANTIZED:
            run_quantized(compiled, dtypes[:2], chip)
            return compiled.rows
        for dtype in dtypes if name == "Mistral 7B" else dtypes[:2]:
            for deterministic in (False, True) if name == "Mistral 7B" or dtype == "bfloat16" else (False,):
                compiled.what = f"{name}, {dtype}{', deterministic' * deterministic}"
                run(name, dtype, deterministic)
        if chip.capability == (9, 0) and name not in WITHOUT_DRAFTS:
            compiled.what = f"{name}, bfloat16, fp8"
            run(name, "bfloat16", True, quantization="fp8")
    return compiled.rows


def run_quantized(compiled: Compiled, dtypes: tuple[str, ...], chip: Chip) -> None:
    """Compile products with quantized weights, ahead of all launches, as the start of a Generator does."""
    for dtype in dtypes:
        compiled.what = f"weights of 4 bits, {dtype}"
        compile_ahead(partial(products_of_4_bits, getattr(torch, dtype)), torch.device("cpu"))
        products_of_4_bits(getattr(torch, dtype))
        if chip.capability != (9, 0):
            compiled.what = f"weights in fp8, {dtype}"
            compile_ahead(partial(products_of_8_bits, getattr(torch, dtype)), torch.device("cpu"))
            products_of_8_bits(getattr(torch, dtype))


def products_of_4_bits(dtype: torch.dtype) -> None:
    """Launch products of Mistral 7B with weights of 4 bits, with each padded number of tokens and each size of
    groups."""
    from fastgen.kernels import int4

    for outputs, inputs, group in ((6144, 4096, 128), (28672, 4096, 32), (4096, 14336, 64), (4096, 4096, 4096)):
        words = torch.zeros(outputs, inputs // 8, dtype=torch.int32)
        scales = torch.zeros(outputs, inputs // group, dtype=torch.float16)
        zeros = None if group == 32 else scales.to(torch.uint8)
        for tokens in (1, 9, 17, 33, 65, 300):
            x, fused = torch.zeros(tokens, inputs, dtype=dtype), epilogue(tokens, outputs, dtype)
            int4.int4_product.launch(x, words, scales, zeros, None, fused)


def products_of_8_bits(dtype: torch.dtype) -> None:
    """Launch products of Mistral 7B with only the weight in fp8, with each padded number of tokens and both kinds of
    scales, and the kernel that dequantizes a weight."""
    from fastgen.kernels import fp8

    for outputs, inputs, blocks in ((6144, 4096, False), (28672, 4096, True), (4096, 14336, True), (4096, 4112, False)):
        shape = (outputs // 128, inputs // 128) if blocks else (outputs,)
        weight = fp8.Quantized(torch.zeros(outputs, inputs, dtype=fp8.E4M3), torch.zeros(shape))
        fp8.dequantize.launch(weight.values, weight.scales, dtype)
        for tokens in fp8.TOKENS:
            x, fused = torch.zeros(tokens, inputs, dtype=dtype), epilogue(tokens, outputs, dtype)
            fp8.weight_product.launch(x, weight, None, fused)


def epilogue(tokens: int, outputs: int, dtype: torch.dtype) -> Fused:
    """Return the epilogue of Mistral 7B's product with this number of outputs."""
    from fastgen.kernels.batch_invariant import Fused, RopeWrite
    from fastgen.kernels.rope import SlotMapping

    if outputs != 6144:
        add = torch.zeros(tokens, outputs, dtype=dtype) if outputs == 4096 else None
        return Fused(add, swiglu=outputs == 28672)
    where, turns = torch.zeros(tokens, dtype=torch.int64), torch.zeros(9, 64)
    mapping = SlotMapping(where, where, turns, turns, tokens, 8, 64)
    return Fused(rope=RopeWrite(mapping, *torch.zeros(2, 2, 8, 64, 128, dtype=dtype)))


def run(name: str, dtype: str, deterministic: bool, **options: Any) -> None:
    """Run steps of all kinds: prefills long and short, decodes of few and many lanes, samples that share a prompt,
    scores; and those that CUDA graphs of decodes hold, with shared keys too."""
    from fastgen import Generator, SamplingParams
    from fastgen.engine import warm_up

    plain = SamplingParams(max_tokens=3, ignore_eos=True)
    full = SamplingParams(
        n=16, max_tokens=3, ignore_eos=True, temperature=0.5, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.1, min_tokens=1, logit_bias={7: 1.0}, logprobs=5, return_sampling_mask=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**SIZES, **MODELS[name]}))
        options = {**ENGINE, "dtype": dtype, "deterministic": deterministic, **options}
        if name in WITHOUT_DRAFTS:
            del options["speculate"]
        with Generator(folder, **options) as gen:
            model: Any = gen._runner.model
            for linear in (model.parameters.lm_head, *(linear for layer in model.layers for linear in layer.linears)):
                linear.batch_invariant |= deterministic  # as on a GPU
            warm_up.compile_kernels(gen._runner)
            for params in (plain, full):
                for lengths in ([400], [9] * 6, [9] * 12, [70] * 20):
                    outputs = gen.generate([[5] * length for length in lengths], params)
                    assert all(output.error is None for output in outputs)
            gen.score([[5] * 100])  # more rows than go through our own products by default
            warm_up.rehearse_decodes(gen._runner, [1, 8, 32])  # what graphs hold; without a GPU there are none


def faults(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of kernels that are not as they should be on this chip."""
    return [
        row for row in rows
        if row["shared"] > CHIPS[name].shared_memory
        or row["spilled"] > ACCEPTED.get(KERNEL(row).removeprefix("fastgen.kernels."), {}).get(name, 0)
        or row.get("late", False)
    ]  # fmt: skip


def merged(parts: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of the parts of a chip, one for each kernel. It is late if it is late in one of them."""
    found: dict[str, dict[str, Any]] = {}
    for row in chain.from_iterable(parts):
        kept = found.setdefault(row["hash"], row)
        kept["late"] |= row["late"]
    return [*found.values()]


def largest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a kernel: the largest figures of its variants."""
    most = {what: max(row[what] for row in rows) for what in ("shared", "registers", "spilled")}
    return {"kernel": KERNEL(rows[0]), "variants": len(rows), **most}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs=2, metavar=("CHIP", "MODEL"), help="print what becomes of these, as JSON")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.part:
        chip_name, model = arguments.part
        dtypes = DTYPES[:1] if arguments.smoke else DTYPES
        json.dump(run_part(model, dtypes, CHIPS[chip_name]), sys.stdout)
        return 0
    report, bad = {"triton": triton.__version__, "chips": {}}, 0
    chips = dict([*CHIPS.items()][1:2]) if arguments.smoke else CHIPS
    models = [*MODELS][1:2] if arguments.smoke else [*MODELS]

    def compiled(part: tuple[str, str]) -> list[dict[str, Any]]:
        command = [sys.executable, __file__, "--part", *part, *["--smoke"] * arguments.smoke]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        return json.loads(found)  # type: ignore[no-any-return]

    parts = [(name, model) for model in (*models, QUANTIZED) for name in chips]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_PROCESSES)) as pool:
        found = dict(zip(parts, pool.map(compiled, parts), strict=True))
    for name, chip in chips.items():
        rows = merged(found[name, model] for model in (*models, QUANTIZED))
        kernels = [largest(list(some)) for _, some in groupby(sorted(rows, key=KERNEL), KERNEL)]
        report["chips"][name] = {"capability": chip.capability, "shared_memory": chip.shared_memory, "kernels": kernels}
        wrong = faults(name, rows)
        bad += len(wrong)
        modules = " ".join(sorted({row["kernel"].split(".")[-2] for row in rows}))
        most = f"at most {max(row['shared'] for row in rows)} of {chip.shared_memory} bytes of shared memory"
        print(f"{name}: {len(rows)} kernels of {modules}, {most}", flush=True)
        for row in wrong:
            print(f"  {row}")
    if not arguments.smoke:
        (RESULTS / f"kernels-compiled-{triton.__version__}.json").write_text(json.dumps(report, indent=1) + "\n")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
