"""scripts/bench: each benchmark runs small, and the limits, shares and quantiles that it reports are right."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "bench"))

import bench_cpu  # noqa: E402
import bench_engine  # noqa: E402
import bench_gpu  # noqa: E402
import bench_limits  # noqa: E402
import bench_parts  # noqa: E402
import bench_serve  # noqa: E402
import bench_turns  # noqa: E402
import plot  # noqa: E402
import serve_cost  # noqa: E402
import serve_load  # noqa: E402
from bench_limits import Costs, Rates  # noqa: E402

from fastgen.engine.options import EngineConfig, GeneratorOptions  # noqa: E402
from fastgen.model.config import parse_config  # noqa: E402

INFINITE = float("inf")

# ------------------------------------------------------------------------------------------------- programs


def smoke(out: Path, *options: str) -> dict[str, Any]:
    """Return the JSON of the one file that a small run of bench.py gpu writes, and its name."""
    bench_gpu.main(["--smoke", "--out", str(out), *options])
    (path,) = out.iterdir()
    return {"file": path.stem, **json.loads(path.read_text())}


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ("--max-seqs 3 --page-size 16", "mistral7-cpu"),
        ("--model qwen14 --only chat1 --skip-ceilings --no-prefix-cache", "qwen14-cpu-nocache"),
        ("--only group,tree --page-size 16", "mistral7-cpu"),
        ("--tensor-parallel 2 --only group", "mistral7-cpu-tp2"),
    ],
)
def test_workloads_run_small(options: str, file: str, tmp_path: Path) -> None:
    report = smoke(tmp_path, *options.split())
    assert report["file"] == file
    assert (report["rates"] is None) == ("--skip-ceilings" in options)
    names = options.partition("--only ")[2].split(" ")[0].split(",") if "--only" in options else bench_limits.PLAIN
    assert list(report["workloads"]) == list(names)
    for found in report["workloads"].values():
        assert 0 < found["spread"][0] <= found["tokens_per_second"] <= found["spread"][1]
        assert found["engine"]["prefix_cache"] == ("--no-prefix-cache" not in options)
        if "unshared" in found:
            assert found["times_unshared"] == found["tokens_per_second"] / found["unshared"]["tokens_per_second"]
    assert all(("unshared" in found) == ("group,tree" in options) for found in report["workloads"].values())


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("--sleep", {"update_weights", "sleep"}),
        ("--adapter", {"host", "device"}),
        ("--turns", {"engines", "alone"}),
        ("--telling --tensor-parallel 2", {"decode of 512 lanes", "prefill of 8192 tokens"}),
        pytest.param("--start", {"cold_seconds", "warm_seconds"}, marks=pytest.mark.long),
        pytest.param("--chat", {"cold_seconds", "warm_seconds"}, marks=pytest.mark.long),
        pytest.param("--load", {"gb_per_second", "spread"}, marks=pytest.mark.long),
        pytest.param("--busy", {"decode"}, marks=pytest.mark.long),
        pytest.param("--perf", {"points"}, marks=pytest.mark.long),
        pytest.param("--speculate", {"streams"}, marks=pytest.mark.long),
        pytest.param("--wire", {"gloo"}, marks=pytest.mark.long),
        pytest.param("--scaling", {"workloads"}, marks=pytest.mark.long),
    ],
)
def test_what_else_is_measured_runs_small(options: str, keys: set[str], tmp_path: Path) -> None:
    report = smoke(tmp_path, *options.split())
    assert keys <= set(report)
    if "points" in report:
        lengths, speeds, limits = plot.perf_series(report)
        assert lengths == [16, 32, 64]
        assert all(speed < limit for speed, limit in zip(speeds, limits, strict=True))
    for by_gpus in report["workloads"].values() if options == "--scaling" else ():
        one, two = by_gpus["1"], by_gpus["2"]
        assert two["efficiency"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"] / 2)
        assert two["limit"]["h200"] == pytest.approx(2 * one["limit"]["h200"])


@pytest.mark.parametrize(
    "options",
    ["--load --tensor-parallel 2", "--telling", "--turns --no-prefix-cache", "--only headline,chat2", "--sleep --perf"],
)
def test_what_makes_no_sense_is_refused(options: str) -> None:
    with pytest.raises(SystemExit):
        bench_gpu.parse(options.split())


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    ["bench.py cpu", "bench_host.py", "bench_newcomer.py", "bench_gen.py", "bench_serve.py", "bench_serve.py --cost"],
)
def test_the_other_programs_run_small(command: str, tmp_path: Path) -> None:
    script, *options = command.split()
    out = {"bench.py": ["--out", str(tmp_path / "cpu.json")], "bench_serve.py": ["--out", str(tmp_path)]}
    subprocess.run(
        [sys.executable, SCRIPTS / "bench" / script, *options, "--smoke", *out.get(script, ())], check=True, timeout=250
    )
    for path in tmp_path.glob("*.json"):
        report = json.loads(path.read_text())
        if "quiet" in report:
            for found in (*report["quiet"].values(), *report["beside_busy_processes"].values()):
                ours, others = (found[engine]["median"] for engine in ("fastgen", "transformers"))
                assert found["ratio"]["median"] == pytest.approx(ours / others)
        for point in report.get("points", ()):
            assert point["errors"] == 0
            assert point["tokens_per_second"] == pytest.approx(8 * 8 / point["seconds"])
            assert 0 < point["ttft"]["p50"] <= point["end_to_end"]["p50"] <= point["seconds"]
    assert len(list(tmp_path.glob("*.json"))) == (script in out)


@pytest.mark.parametrize("name", ["mistral7-h200.json", "mistral7-h200-perf.json", "serve-mistral7-h200.json"])
def test_the_plot_of_a_result_is_a_picture(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which fastgen does not")
    plot.plot(json.loads((SCRIPTS / "results" / name).read_text()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("model", "gpus", "name", "known"),
    [
        ("mistral7", 1, "headline", 4424), ("mistral7", 1, "chat1", 301), ("mistral7", 1, "tree", 33801),
        ("llama1", 1, "chat8", 13286), ("qwen14", 1, "headline", 2401), ("llama70", 4, "headline", 2044),
        ("llama70", 4, "chat1", 123.3),
    ],
)  # fmt: skip
def test_the_limit_is_what_was_worked_out_by_hand(model: str, gpus: int, name: str, known: float) -> None:
    workload = bench_limits.WORKLOADS[name]
    costs = Costs.of(parse_config(bench_limits.MODELS[model]))
    limit = bench_limits.limit(costs, workload, bench_limits.H200.times(gpus), lanes=workload.sequences)
    assert limit == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize("name", ["headline", "group", "tree"])
@pytest.mark.parametrize("waves", [1, 2])
def test_the_limit_reads_each_key_once_per_step(name: str, waves: int) -> None:
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
    seconds = workload.tokens / bench_limits.limit(Costs(0, 0, 0, kv=1), workload, Rates(1.0, INFINITE), lanes)
    own = workload.tokens / 2  # half a token each: whether the step's own token counts
    assert seconds == pytest.approx(read + own)


# ------------------------------------------------------------------------------------------------- parts


def test_prompts_share_what_the_workload_says_and_nothing_with_another_run() -> None:
    begins: set[tuple[int, ...]] = set()
    for workload in (bench_limits.WORKLOADS[name] for name in ("headline", "short", "group", "tree")):
        for seed in (1, 2):
            prompts = bench_engine.random_prompts(workload, 32768, seed)
            assert [len(prompt) for prompt in prompts] == [workload.prompt] * (workload.sequences // workload.samples)
            assert len({tuple(prompt[workload.common : workload.common + 8]) for prompt in prompts}) == len(prompts)
            assert len({tuple(prompt[: workload.common]) for prompt in prompts}) == 1
            new = {tuple(prompt[:8]) for prompt in prompts}
            assert not new & begins
            begins |= new
    cpu = bench_cpu.Workload()
    assert [len(prompt) for prompt in cpu.prompts(100)] == [prompt for prompt, _ in bench_cpu.Workload().lengths()]


def test_busy_time_counts_what_overlaps_once() -> None:
    assert bench_parts.covered([(0, 2), (1, 3), (1, 2), (5, 6), (6, 7)]) == 5
    assert bench_parts.covered([]) == 0


def test_a_file_keeps_the_workloads_that_were_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "data" / "x.json"
    bench_engine.merge(path, {"rates": None, "workloads": {"a": 1, "b": 1}})
    bench_engine.merge(path, {"rates": 5, "workloads": {"b": 2}})
    assert json.loads(path.read_text()) == {"rates": 5, "workloads": {"a": 1, "b": 2}}
    arguments = bench_gpu.parse(["--model", "llama70", "--tensor-parallel", "4", "--out", str(tmp_path)])
    assert bench_engine.report_path(arguments, "4 x NVIDIA H200", "perf") == tmp_path / "llama70-h200-tp4-perf.json"
    assert bench_engine.slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


@pytest.mark.parametrize("turns", [bench_turns.Turns(), bench_turns.SMALL, bench_turns.Turns(page_size=16)])
def test_the_host_tier_holds_all_conversations(turns: bench_turns.Turns) -> None:
    for name, dtype in (("mistral7", "bfloat16"), ("qwen14", "bfloat16"), ("mistral7", "float32")):
        model = parse_config(bench_limits.MODELS[name])
        options = GeneratorOptions(device="cpu", dtype=dtype, page_size=turns.page_size)
        page_bytes = EngineConfig.make(model, options).page_bytes(model)
        assert int(turns.host_gb(model, dtype) * 1e9 / page_bytes) == turns.pages


@pytest.mark.parametrize(
    ("name", "saved", "loaded", "share"),
    [("host", 9, 0, 0.99), ("host", 0, 9, 0.99), ("host", 9, 9, 0.5), ("cache", 9, 0, 0.3), ("recompute", 0, 0, 0.1)],
)
def test_an_engine_that_did_something_else_is_noticed(name: str, saved: int, loaded: int, share: float) -> None:
    bench_turns.confirm("host", {"pages_saved": 9, "pages_loaded": 9, "cached_share": 0.99})
    with pytest.raises(RuntimeError, match=rf"{name}: {saved} pages were saved and {loaded} loaded"):
        bench_turns.confirm(name, {"pages_saved": saved, "pages_loaded": loaded, "cached_share": share})


def test_the_figures_of_a_server() -> None:
    answers = [serve_load.Answer(1.0, [2.0, 2.5, 4.5], 30), serve_load.Answer(1.5, [3.5, 4.0, 5.0], 20)]
    found = serve_load.figures([*answers, serve_load.Answer(0.0, [], 0, "lost")])
    assert (found["requests"], found["errors"], found["first_error"]) == (2, 1, "lost")
    assert (found["seconds"], found["tokens_per_second"], found["requests_per_second"]) == (5, 10, 0.4)
    assert found["ttft"] == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99, "p99.9": 1.999, "mean": 1.5})
    assert (found["inter_token"]["p50"], found["end_to_end"]["mean"]) == (0.75, 3.5)
    shares = serve_load.Load("u", "m", requests=10, prompt=1, tokens=1, concurrency=5, rate=6.0).shares(3)
    assert [(share.requests, share.concurrency, share.rate) for share in shares] == [(3, 1, 2), (3, 2, 2), (4, 2, 2)]
    assert len({share.seed for share in shares}) == 3
    given = bench_serve.parse(["--concurrency", "3,40", "--tokens", "5", "--serve", "mistral7", "--max-seqs", "9"])
    loads = [(load.prompt, load.tokens, load.requests) for load in bench_serve.loads(given, "u", "m")]
    assert (loads, given.serve) == ([(128, 5, 16), (128, 5, 80)], ["mistral7", "--max-seqs", "9"])


def test_the_cost_is_compared_with_that_of_the_generator() -> None:
    cost = serve_cost.Cost
    streamed = [cost(1000, 2.0, 0.6, 0.1), cost(1000, 4.0, 0.6, 0.3)]
    kinds = {"direct": [cost(1000, 1.0, 0.5)], "streamed": streamed, "whole": [cost(1000, 1.25, 0.5, 0.05)]}
    found = serve_cost.report(kinds)
    assert (found["whole"]["speed_of_direct"], found["streamed"]["spread"]) == (pytest.approx(0.8), [250, 500])
    assert found["streamed"]["engine_of_direct"] == pytest.approx(1.2)
    assert found["streamed"]["http_us_per_token"] == pytest.approx(200)
