"""scripts/bench/bench.py runs, its engines do the work they are timed for, and its limit is the one that it says it
is."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "bench"))
sys.path.insert(0, str(SCRIPTS / "tune"))

import bench  # noqa: E402
import bench_cpu  # noqa: E402
import bench_engine  # noqa: E402
import bench_gpu  # noqa: E402
import bench_limits  # noqa: E402
import bench_parallel  # noqa: E402
import bench_parts  # noqa: E402
import plot  # noqa: E402
import tune_allreduce  # noqa: E402

from fastgen import Generator  # noqa: E402
from fastgen.model.config import parse_config  # noqa: E402

SHARED = bench_limits.SHARED.values()


def test_the_workload_is_the_same_each_time_and_within_its_bounds() -> None:
    workload = bench_cpu.Workload()
    assert workload.lengths() == bench_cpu.Workload().lengths()
    assert workload.prompts(100) == bench_cpu.Workload().prompts(100)
    assert [len(prompt) for prompt in workload.prompts(100)] == [prompt for prompt, _ in workload.lengths()]
    assert len(workload.lengths()) == 64
    assert all(16 <= length <= 256 for pair in workload.lengths() for length in pair)


@pytest.mark.long
def test_pairs_of_both_engines_quiet_and_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "cpu", "--smoke", "--out", str(tmp_path / "out.json")])
    bench.main()
    report = json.loads((tmp_path / "out.json").read_text())
    assert set(report["quiet"]) == {"ragged", "batch 1"}
    assert set(report["beside_busy_processes"]) == {"batch 1"}
    assert all(megabytes > 100 for megabytes in report["peak_memory_mb"].values())
    for found in (*report["quiet"].values(), *report["beside_busy_processes"].values()):
        ours, others = (found[engine]["median"] for engine in ("fastgen", "transformers"))
        assert found["ratio"]["median"] == pytest.approx(ours / others)


# On a GPU, where there is none


def test_the_models_have_their_true_sizes() -> None:
    sizes = {name: bench_limits.Costs.of(parse_config(config)) for name, config in bench_limits.MODELS.items()}
    assert sizes["mistral7"] == bench_limits.Costs(32 * 218_103_808, 32768 * 4096, 4 * 32 * 4096, 131_072)
    assert sizes["llama1"] == bench_limits.Costs(16 * 60_817_408, 128256 * 2048, 4 * 16 * 2048, 32_768)
    assert sizes["qwen14"] == bench_limits.Costs(48 * 275_251_200, 152064 * 5120, 4 * 48 * 5120, 196_608)
    assert sizes["llama70"] == bench_limits.Costs(80 * 855_638_016, 128256 * 8192, 4 * 80 * 8192, 327_680)


@pytest.mark.parametrize(
    ("model", "gpus", "name", "known"),
    [
        ("mistral7", 1, "headline", 4424),
        ("mistral7", 1, "decode", 11154),
        ("mistral7", 1, "short", 26068),
        ("mistral7", 1, "group", 29561),
        ("mistral7", 1, "chat1", 301),
        ("mistral7", 1, "chat8", 2315),
        ("mistral7", 1, "chat32", 8216),
        ("mistral7", 1, "tree", 33801),
        ("mistral7", 1, "chat64", 14281),
        ("mistral7", 1, "batch128", 17049),
        ("mistral7", 1, "long", 939),
        ("mistral7", 1, "longchat", 180),
        ("llama1", 1, "chat1", 1730),
        ("llama1", 1, "chat8", 13286),
        ("llama1", 1, "chat32", 46767),
        ("llama1", 1, "batch128", 96421),
        ("qwen14", 1, "headline", 2401),
        ("llama70", 4, "headline", 2044),
    ],
)
def test_the_limit_is_what_was_worked_out_before(model: str, gpus: int, name: str, known: float) -> None:
    workload = bench_limits.WORKLOADS[name]
    costs = bench_limits.Costs.of(parse_config(bench_limits.MODELS[model]))
    limit = bench_limits.limit(costs, workload, bench_limits.H200.times(gpus), lanes=workload.sequences)
    assert limit == pytest.approx(known, rel=2e-3)


def test_a_chat_on_four_gpus_reads_the_weights_at_four_times_the_rate() -> None:
    """By hand, from the sizes."""
    read = 2 * (80 * 855_638_016 + 128256 * 8192) + (128 + 256 / 2) * 327_680
    prefill = 2 * (128 * 80 * 855_638_016 + 128256 * 8192) + 4 * 80 * 8192 * (128 * 129 / 2) * 665 / 600
    costs = bench_limits.Costs.of(parse_config(bench_limits.MODELS["llama70"]))
    limit = bench_limits.limit(costs, bench_limits.WORKLOADS["chat1"], bench_limits.H200.times(4), lanes=1)
    assert limit == pytest.approx(256 / (prefill / (4 * 665e12) + 256 * read / (4 * 4.30e12)))
    assert limit == pytest.approx(123.3, abs=0.1)


def test_the_limit_of_a_step_is_the_weights_or_the_products() -> None:
    costs, workload = bench_limits.Costs(layers=900, head=100, attention=0, kv=0), bench_limits.Workload(64, 1, 10)
    prompts = 64 * 2 * (900 + 100) / 1e6
    for lanes, step in ((1, 2000 / 1e5), (16, 16 * 2000 / 1e6), (64, 64 * 2000 / 1e6)):
        seconds = prompts + 640 / lanes * step
        assert bench_limits.limit(costs, workload, bench_limits.Rates(1e5, 1e6), lanes) == pytest.approx(640 / seconds)


@pytest.mark.parametrize("name", ["headline", "group", "tree"])
@pytest.mark.parametrize("waves", [1, 2])
def test_the_limit_reads_each_key_once_a_step(name: str, waves: int) -> None:
    """Against the (prefix, position) pairs that the lanes of each step hold, one by one."""
    full = bench_limits.WORKLOADS[name]
    workload = replace(full, prompt=full.prompt // 64, generated=full.generated // 8, common=full.common // 64)
    lanes, read = workload.sequences // waves, 0
    for wave in range(waves):
        sequences = range(wave * lanes, (wave + 1) * lanes)
        prompts = {sequence // workload.samples for sequence in sequences}
        held = {(-1, position) for position in range(workload.common)}
        held |= {(prompt, position) for prompt in prompts for position in range(workload.common, workload.prompt)}
        read += sum(len(held) + lanes * answered for answered in range(workload.generated))
    rates = bench_limits.Rates(memory=1.0, products=float("inf"))
    seconds = workload.tokens / bench_limits.limit(bench_limits.Costs(0, 0, 0, kv=1), workload, rates, lanes)
    own = workload.tokens / 2  # half a token each: whether the step's own token counts
    assert seconds == pytest.approx(read + own)


def test_the_limit_computes_a_shared_prefix_once() -> None:
    costs = bench_limits.Costs(layers=50, head=7, attention=3, kv=0)
    workload = bench_limits.Workload(12, prompt=10, generated=1, samples=3, common=6)
    pairs = [position + 1 for position in range(10)]
    attention = 3 * 665 / 600
    flops = 6 * 2 * 50 + attention * sum(pairs[:6]) + 4 * (4 * 2 * 50 + attention * sum(pairs[6:]) + 2 * 7)
    flops += 12 * 2 * (50 + 7)  # and the step
    rates = bench_limits.Rates(float("inf"), 1.0)
    assert bench_limits.limit(costs, workload, rates, 12) == pytest.approx(12 / flops)


def test_prompts_share_what_the_workload_says_and_nothing_with_another_run() -> None:
    begins: set[tuple[int, ...]] = set()
    workloads = [*(bench_limits.WORKLOADS[name] for name in ("headline", "decode", "short")), *SHARED]
    for workload in workloads:
        for seed in (1, 2):
            prompts = bench_engine.random_prompts(workload, 32768, seed)
            assert [len(prompt) for prompt in prompts] == [workload.prompt] * (workload.sequences // workload.samples)
            own = {tuple(prompt[workload.common : workload.common + 8]) for prompt in prompts}
            assert len(own) == len(prompts)
            assert len({tuple(prompt[: workload.common]) for prompt in prompts}) == 1
            new = {tuple(prompt[:8]) for prompt in prompts}
            assert not new & begins
            begins |= new


def test_busy_time_counts_what_overlaps_once() -> None:
    assert bench_parts.covered([(0, 2), (1, 3), (1, 2), (5, 6), (6, 7)]) == 5
    assert bench_parts.covered([]) == 0


def test_a_file_keeps_the_workloads_that_were_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "data" / "x.json"
    bench_engine.merge(path, {"rates": None, "workloads": {"a": 1, "b": 1}})
    bench_engine.merge(path, {"rates": 5, "workloads": {"b": 2}})
    assert json.loads(path.read_text()) == {"rates": 5, "workloads": {"a": 1, "b": 2}}


def test_names_of_gpus_make_file_names() -> None:
    assert [bench_engine.slug(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")] == ["h200", "a100-sxm4-80gb"]
    assert bench_engine.slug("4 x NVIDIA H200") == "h200"


def test_the_machine_says_how_many_gpus_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=15e10, multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    assert [bench_engine.machine("cuda", gpus)["gpu"] for gpus in (1, 4)] == ["NVIDIA H200", "4 x NVIDIA H200"]


def test_several_gpus_have_a_file_of_their_own(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path), "--model", "llama70")
    several = bench_gpu.parse([*out, "--tensor-parallel", "4"])
    assert bench_engine.report_path(several, "4 x NVIDIA H200") == tmp_path / "llama70-h200-tp4.json"
    assert bench_engine.report_path(several, "4 x NVIDIA H200", "perf") == tmp_path / "llama70-h200-tp4-perf.json"
    assert bench_engine.report_path(bench_gpu.parse([*out]), "NVIDIA H200") == tmp_path / "llama70-h200.json"
    assert bench_engine.engine_options(several)["tensor_parallel"] == 4


@pytest.mark.parametrize(
    "options",
    ["--busy --tensor-parallel 2", "--load --tensor-parallel 2", "--scaling --tensor-parallel 2"],
)
def test_what_can_not_be_measured_on_so_many_gpus_is_refused(options: str) -> None:
    with pytest.raises(SystemExit):
        bench_gpu.parse(options.split())


def smoke(out: Path, *options: str) -> dict[str, Any]:
    bench_gpu.main(["--smoke", "--out", str(out), *options])
    return {path.name: json.loads(path.read_text()) for path in out.iterdir()}


def test_every_workload_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = smoke(tmp_path, "--max-seqs", "3", "--page-size", "16")["mistral7-cpu.json"]
    workloads = report["workloads"]
    assert list(workloads) == list(bench_limits.PLAIN)
    for found in workloads.values():
        assert found["tokens_per_second"] > 0
        assert found["spread"][0] <= found["tokens_per_second"] <= found["spread"][1]
        assert found["engine"]["max_seqs"] == 3
        assert set(found["of_limit"]) == {"h200", "measured"}
        assert 1 <= found["lanes"] <= 3
    assert "vLLM's 3992" in bench_engine.line("headline", workloads["headline"])
    assert not re.search(r"vLLM|h200|measured|per_second", capsys.readouterr().out), "ratios of a tiny model on a CPU"
    assert report["versions"]["torch"]


def test_prefixes_in_common_run_small_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workloads = smoke(tmp_path, "--only", "group,tree", "--page-size", "16")["mistral7-cpu.json"]["workloads"]
    assert list(workloads) == ["group", "tree"]
    for found in workloads.values():
        assert found["workload"]["samples"] > 1
        assert found["times_unshared"] == found["tokens_per_second"] / found["unshared"]["tokens_per_second"]
        assert (len(found["seconds"]), len(found["unshared"]["seconds"])) == (3, 1)
    assert "with prefixes read once a lane" in capsys.readouterr().out


def test_sharing_is_off_only_where_it_is_to_be() -> None:
    prefixes = SimpleNamespace(wanted=True)
    runner = SimpleNamespace(attention=SimpleNamespace(prefixes=prefixes))
    generator: Any = SimpleNamespace(_runner=runner)
    with bench_engine.unshared(generator):
        assert not prefixes.wanted
    assert prefixes.wanted
    with pytest.raises(KeyboardInterrupt), bench_engine.unshared(generator):
        raise KeyboardInterrupt
    assert prefixes.wanted


def test_without_the_prefix_cache_the_file_has_another_name(tmp_path: Path) -> None:
    reports = smoke(tmp_path, "--no-prefix-cache", "--only", "chat1", "--skip-ceilings")
    assert list(reports) == ["mistral7-cpu-nocache.json"]
    assert reports["mistral7-cpu-nocache.json"]["workloads"]["chat1"]["engine"]["prefix_cache"] is False
    arguments = bench_gpu.parse(["--no-prefix-cache", "--perf", "--out", str(tmp_path)])
    assert bench_engine.report_path(arguments, "NVIDIA H200", "perf") == tmp_path / "mistral7-h200-perf-nocache.json"


def test_only_some_of_another_model(tmp_path: Path) -> None:
    options = ("--model", "qwen14", "--only", "headline,chat1", "--skip-ceilings")
    report = smoke(tmp_path, *options)["qwen14-cpu.json"]
    assert list(report["workloads"]) == ["headline", "chat1"]
    assert report["rates"] is None
    with pytest.raises(SystemExit):
        bench_gpu.parse(["--only", "headline,chat2"])


def test_two_ranks_run_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = smoke(tmp_path, "--tensor-parallel", "2", "--only", "chat1,group")
    assert list(reports) == ["mistral7-cpu-tp2.json"]
    workloads = reports["mistral7-cpu-tp2.json"]["workloads"]
    assert list(workloads) == ["chat1", "group"]
    for found in workloads.values():
        assert found["engine"]["tensor_parallel"] == 2
        assert "unshared" not in found
    assert "vLLM" not in capsys.readouterr().out, "its figures are of one GPU"


def test_telling_the_ranks_runs_small(tmp_path: Path) -> None:
    report = smoke(tmp_path, "--tensor-parallel", "2", "--telling")["mistral7-cpu-tp2-telling.json"]
    for step in bench_parallel.STEPS:
        assert 0 < report[step]["send_us"]["median"] < report[step]["reply_us"]["median"]
    with pytest.raises(SystemExit):
        bench_gpu.parse(["--telling"])


def test_scaling_runs_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one process for each engine, of which it is noted how many ranks it was to have."""
    asked: list[int] = []

    def make(*model: Any, tensor_parallel: int = 1, **options: Any) -> Generator:
        asked.append(tensor_parallel)
        return Generator(*model, **options)

    monkeypatch.setattr(bench_engine, "Generator", make)
    report = smoke(tmp_path, "--scaling", "--model", "qwen14", "--skip-ceilings")["qwen14-cpu-scaling.json"]
    assert asked == [1, 2]
    assert list(report["workloads"]) == ["headline", "chat1"]
    for by_gpus in report["workloads"].values():
        one, two = by_gpus["1"], by_gpus["2"]
        assert one["efficiency"] == 1
        assert two["efficiency"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"] / 2)
        assert two["limit"]["h200"] == pytest.approx(2 * one["limit"]["h200"])


def test_sleep_runs_small(tmp_path: Path) -> None:
    report = smoke(tmp_path, "--sleep")["mistral7-cpu-sleep.json"]
    assert report["update_weights"]["median"] > 0
    assert list(report["sleep"]) == ["both", "kv_cache", "weights", "dropped"]
    for found in report["sleep"].values():
        assert found["freed_gb"] >= 0
        for name in ("sleep", "wake"):
            low, high = found[name]["spread"]
            assert 0 <= low <= found[name]["median"] <= high


@pytest.mark.long
def test_updates_of_a_server_run_small(tmp_path: Path) -> None:
    report = smoke(tmp_path, "--wire")["mistral7-cpu-wire.json"]
    assert report["gloo"]["update"]["median"] > 0


def test_adapter_runs_small(tmp_path: Path) -> None:
    report = smoke(tmp_path, "--adapter")["mistral7-cpu-adapter.json"]
    for place in ("host", "device"):
        assert report[place]["first"] > 0
        for name in ("update", "base"):
            low, high = report[place][name]["spread"]
            assert 0 < low <= report[place][name]["median"] <= high


def test_scaling_takes_the_gpus_that_there_are() -> None:
    assert [bench_parallel.gpu_counts(there) for there in (1, 2, 3, 4, 8)] == [
        [1],
        [1, 2],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4],
    ]


@pytest.mark.long
def test_ways_to_add_up_run_small(tmp_path: Path) -> None:
    """By gloo; what is written looks as what was measured on GPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / "tune" / "tune_allreduce.py"), "--smoke", "--out", str(tmp_path)]
    path = os.pathsep.join(filter(None, [str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "allreduce-cpu.json").read_text())
    measured = json.loads((SCRIPTS / "results" / "allreduce-h200.json").read_text().replace('"nccl', '"gloo'))
    assert set(report) < set(measured), "which also has trials of what products may hide"
    assert [(found["tokens"], found["gloo"] > 0) for found in report["all_reduce_us"]] == [
        (1, True),
        (4, True),
        (16, True),
    ]


def test_a_sum_that_is_wrong_is_noticed() -> None:
    exact = torch.ones(4, 8)
    tune_allreduce.confirm("right", exact.bfloat16(), exact)
    for wrong in (exact * 1.02, exact.clone().fill_(math.nan), exact.clone().index_fill_(0, torch.tensor([3]), 0)):
        with pytest.raises(RuntimeError, match="some way: the error"):
            tune_allreduce.confirm("some way", wrong, exact)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("start", {"cold_seconds", "warm_seconds"}),
        ("chat", {"cold_seconds", "warm_seconds"}),
        ("load", {"gb_per_second", "spread"}),
        ("busy", {"decode"}),
        ("perf", {"points"}),
        ("speculate", {"streams", "steps"}),
    ],
)
def test_what_else_is_measured_runs_small(kind: str, fields: set[str], tmp_path: Path) -> None:
    report = smoke(tmp_path, f"--{kind}")[f"{'bundled' if kind == 'chat' else 'mistral7'}-cpu-{kind}.json"]
    assert fields <= set(report)
    if kind == "busy":
        assert 0.2 < report["decode"]["busy"] <= 1
    if kind == "perf":
        lengths, speeds, limits = plot.perf_series(report)
        assert lengths == [16, 32, 64]
        assert all(speed < limit for speed, limit in zip(speeds, limits, strict=True))


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which fastgen does not")
    workload = {"sequences": 512, "prompt": 1024}
    points = [
        {
            "workload": {**workload, "generated": length},
            "tokens_per_second": 30.0 * length,
            "limit": {"h200": 32 * length},
        }
        for length in (16, 64, 32)
    ]
    plot.plot({"model": "mistral7", "gpu": "NVIDIA H200", "points": points}, tmp_path / "perf.png")
    assert (tmp_path / "perf.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_line_leads_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, status in (("gpu --help", 0), ("cpu --skip-ceilings", 2)):
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        assert ended.value.code == status
    out, err = capsys.readouterr()
    assert "--skip-ceilings" in out
    assert "unrecognized arguments: --skip-ceilings" in err


@pytest.mark.parametrize("part", ["parallel", "parts", "sleep", "speculate", "start", "turns", "wire"])
def test_a_part_that_is_run_by_itself_says_how_to_run_it(part: str) -> None:
    with pytest.raises(SystemExit, match=r"`bench\.py gpu"):
        runpy.run_path(str(SCRIPTS / "bench" / f"bench_{part}.py"), run_name="__main__")
