"""scripts/bench.py runs, its engines do the work they are timed for, and its limit is the one that it says it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench  # noqa: E402
import bench_gpu  # noqa: E402
import bench_parts  # noqa: E402
import plot_perf  # noqa: E402

from fastgen.arch import parse_config  # noqa: E402


def test_the_workload_is_the_same_each_time_and_within_its_bounds() -> None:
    workload = bench.Workload()
    assert workload.lengths() == bench.Workload().lengths()
    assert workload.prompts(100) == bench.Workload().prompts(100)
    assert [len(prompt) for prompt in workload.prompts(100)] == [prompt for prompt, _ in workload.lengths()]
    assert len(workload.lengths()) == 64
    assert all(16 <= length <= 256 for pair in workload.lengths() for length in pair)


@pytest.mark.parametrize("engine", ["fastgen", "transformers"])
def test_an_engine_generates_what_the_workload_asks_for(engine: str) -> None:
    workload = bench.Workload(sequences=3, longest=20)
    found = bench.measure(engine, None, workload, "float32", repeats=1)
    assert found["generated_tokens"] == sum(tokens for _, tokens in workload.lengths())
    assert found["tokens_per_second"] > 0
    assert found["peak_memory_mb"] > 100


# On a GPU, where there is none


def test_the_models_have_their_true_sizes() -> None:
    sizes = {name: bench_gpu.Costs.of(parse_config(config)) for name, config in bench_gpu.MODELS.items()}
    assert sizes["mistral7"] == bench_gpu.Costs(32 * 218_103_808, 32768 * 4096, 4 * 32 * 4096, 131_072)
    assert sizes["qwen14"] == bench_gpu.Costs(48 * 275_251_200, 152064 * 5120, 4 * 48 * 5120, 196_608)


@pytest.mark.parametrize(
    ("model", "name", "known"),
    [
        ("mistral7", "headline", 4424),
        ("mistral7", "decode", 11154),
        ("mistral7", "short", 26068),
        ("mistral7", "chat1", 301),
        ("mistral7", "chat8", 2315),
        ("mistral7", "chat32", 8216),
        ("qwen14", "headline", 2401),
    ],
)
def test_the_limit_is_what_was_worked_out_before(model: str, name: str, known: float) -> None:
    """Those figures took attention's FLOPs at a slightly lower rate."""
    workload = bench_gpu.WORKLOADS[name]
    costs = bench_gpu.Costs.of(parse_config(bench_gpu.MODELS[model]))
    assert bench_gpu.limit(costs, workload, bench_gpu.H200, workload.sequences) == pytest.approx(known, rel=2.5e-3)


def test_the_limit_of_a_step_is_the_weights_or_the_products() -> None:
    costs, workload = bench_gpu.Costs(layers=900, head=100, attention=0, kv=0), bench_gpu.Workload(64, 1, 10)
    prompts = 64 * 2 * (900 + 100) / 1e6
    for lanes, step in ((1, 2000 / 1e5), (16, 16 * 2000 / 1e6), (64, 64 * 2000 / 1e6)):
        seconds = prompts + 640 / lanes * step
        assert bench_gpu.limit(costs, workload, bench_gpu.Rates(1e5, 1e6), lanes) == pytest.approx(640 / seconds)


def test_busy_time_counts_what_overlaps_once() -> None:
    assert bench_parts.covered([(0, 2), (1, 3), (1, 2), (5, 6), (6, 7)]) == 5
    assert bench_parts.covered([]) == 0


def test_a_file_keeps_the_workloads_that_were_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "data" / "x.json"
    bench_gpu.merge(path, {"rates": None, "workloads": {"a": 1, "b": 1}})
    bench_gpu.merge(path, {"rates": 5, "workloads": {"b": 2}})
    assert json.loads(path.read_text()) == {"rates": 5, "workloads": {"a": 1, "b": 2}}


def test_names_of_gpus_make_file_names() -> None:
    assert [bench_gpu.slug(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")] == ["h200", "a100-sxm4-80gb"]


def smoke(out: Path, *options: str) -> dict[str, Any]:
    bench_gpu.main(["--smoke", "--out", str(out), *options])
    return {path.name: json.loads(path.read_text()) for path in out.iterdir()}


def test_every_workload_runs_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = smoke(tmp_path, "--max-seqs", "3", "--page-size", "16")["mistral7-cpu.json"]
    workloads = report["workloads"]
    assert list(workloads) == list(bench_gpu.WORKLOADS)
    for found in workloads.values():
        assert found["tokens_per_second"] > 0
        assert found["spread"][0] <= found["tokens_per_second"] <= found["spread"][1]
        assert found["engine"]["max_seqs"] == 3
        assert set(found["of_limit"]) == {"h200", "measured"}
        assert 1 <= found["lanes"] <= 3
    assert "vLLM's 3992" in capsys.readouterr().out
    assert report["versions"]["torch"]


def test_only_some_of_another_model(tmp_path: Path) -> None:
    options = ("--model", "qwen14", "--only", "headline,chat1", "--skip-ceilings")
    report = smoke(tmp_path, *options)["qwen14-cpu.json"]
    assert list(report["workloads"]) == ["headline", "chat1"]
    assert report["rates"] is None
    with pytest.raises(SystemExit):
        bench_gpu.parse(["--only", "headline,chat2"])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("start", {"cold_seconds", "warm_seconds"}),
        ("load", {"gb_per_second", "others"}),
        ("busy", {"decode"}),
        ("perf", {"points"}),
    ],
)
def test_what_else_is_measured_runs_small(kind: str, fields: set[str], tmp_path: Path) -> None:
    report = smoke(tmp_path, f"--{kind}")[f"mistral7-cpu-{kind}.json"]
    assert fields <= set(report)
    if kind == "busy":
        assert 0.2 < report["decode"]["busy"] <= 1
    if kind == "perf":
        lengths, speeds, limits = plot_perf.series(report)
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
    plot_perf.plot({"model": "mistral7", "gpu": "NVIDIA H200", "points": points}, tmp_path / "perf.png")
    assert (tmp_path / "perf.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_line_leads_there() -> None:
    command = [sys.executable, str(SCRIPTS / "bench.py"), "gpu", "--help"]
    assert "--skip-ceilings" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wrong = subprocess.run([*command[:-2], "cpu", "--skip-ceilings"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "unrecognized arguments: --skip-ceilings" in wrong.stderr
