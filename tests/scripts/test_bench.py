"""scripts/bench: each benchmark runs small, and the limits, shares and quantiles that it reports are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from known_models import KNOWN

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "bench"))

import bench_engine  # noqa: E402
import bench_gpu  # noqa: E402
import bench_limits  # noqa: E402
import bench_step  # noqa: E402
import bench_windows  # noqa: E402
import serve_load  # noqa: E402

from fastgen.model.config import parse_config, read_config  # noqa: E402


def smoke(out: Path, options: str) -> dict[str, Any]:
    """Return the JSON of the one file that a small run of bench.py gpu writes, and its name."""
    bench_gpu.main(["--smoke", "--out", str(out), *options.split()])
    (path,) = out.iterdir()
    return {"file": path.stem, **json.loads(path.read_text())}


@pytest.mark.parametrize(
    ("options", "file"),
    [
        ("--only headline,group,tree,rl,tools,turns --page-size 16", "mistral7-cpu"),
        ("--model qwen14 --only chat1 --skip-ceilings --tensor-parallel 2", "qwen14-cpu-tp2"),
    ],
)
def test_workloads_run_small(options: str, file: str, tmp_path: Path) -> None:
    report = smoke(tmp_path, options)
    assert report["file"] == file
    assert (report["rates"] is None) == ("--skip-ceilings" in options)
    for name, found in report["workloads"].items():
        assert name in options
        assert 0 < found["spread"][0] <= found["tokens_per_second"] <= found["spread"][1]
        assert ("unshared" in found) == (name in ("group", "tree"))


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("--data --max-seqs 4", {"plain", "drafts", "missed"}),
        ("--data --max-seqs 4 --only plain --seconds 0", {"plain"}),
        pytest.param("--step --only chat8 --quantization fp8", {"chat8"}, marks=pytest.mark.long),
        pytest.param("--arriving", {"steps", "masked", "refilled", "served"}, marks=pytest.mark.long),
    ],
)
def test_what_else_is_measured_runs_small(options: str, keys: set[str], tmp_path: Path) -> None:
    report = smoke(tmp_path, options)
    assert keys <= set(report)


def test_more_lanes_fit_where_windows_are_freed(tmp_path: Path) -> None:
    """EXAONE 4 with 16 of its layers, 4 of them without a window, in a quarter of an H200's memory."""
    (tmp_path / "config.json").write_text(json.dumps({**bench_windows._SHARED, **bench_windows.MODELS["exaone"]}))
    config = read_config(tmp_path)
    lanes = {freed: bench_windows.room(config, 16000, 15.75e9, freed, 256) for freed in (False, True)}
    assert lanes == {False: (14, 156), True: (32, 192)}
    assert bench_windows.room(config, 16000, 15.75e9, False, 8) == (8, 144)


@pytest.mark.long
def test_windows_run_small(tmp_path: Path) -> None:
    bench_windows.main(["--smoke", "--out", str(tmp_path / "windows.json")])
    kept, freed = json.loads((tmp_path / "windows.json").read_text())["modes"]
    assert (kept["free_windows"], freed["free_windows"]) == (False, True)
    assert 0 < kept["lanes"] < freed["lanes"]


@pytest.mark.long
@pytest.mark.parametrize("command", ["bench.py cpu", "bench_serve.py", "bench_busy.py"])
def test_the_other_programs_run_small(command: str, tmp_path: Path) -> None:
    script, *options = command.split()
    path = tmp_path / "report.json"
    subprocess.run(
        [sys.executable, SCRIPTS / "bench" / script, *options, "--smoke", "--out", path], check=True, timeout=250
    )
    assert all(point["errors"] == 0 for point in json.loads(path.read_text()).get("points", ()))


@pytest.mark.long
def test_peers_run_small_and_are_a_table(tmp_path: Path) -> None:
    command = [SCRIPTS / "bench" / "bench.py", "cpu", "--peers", "transformers", "--smoke", "--out", tmp_path]
    subprocess.run([sys.executable, *command], check=True, timeout=250)
    (file,) = tmp_path.iterdir()
    table = subprocess.check_output([sys.executable, SCRIPTS / "bench" / "reports.py", file], text=True)
    assert table.startswith("| | fastgen | transformers | fastgen / best peer |")
    assert table.count("\n") == 2 + len(json.loads(file.read_text())["rates"]) + 1


@pytest.mark.parametrize(
    ("model", "gpus", "name", "known"),
    [
        ("mistral7", 1, "headline", 4424), ("mistral7", 1, "chat1", 301), ("mistral7", 1, "tree", 33801),
        ("llama70", 4, "headline", 2044),
    ],
)  # fmt: skip
def test_the_limit_is_what_was_worked_out_by_hand(model: str, gpus: int, name: str, known: float) -> None:
    workload = bench_limits.WORKLOADS[name]
    costs = bench_limits.Costs.of(parse_config(bench_limits.MODELS[model]))
    limit = bench_limits.limit(costs, workload, bench_limits.CARDS["h200"].times(gpus), lanes=workload.sequences)
    assert limit == pytest.approx(known, rel=2e-3)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "arcee-ai/AFM-4.5B"])
def test_the_limit_counts_each_weight_once(name: str) -> None:
    """Without a gate, a layer has six matrices."""
    model = parse_config(KNOWN[name][0])
    costs = bench_limits.Costs.of(model)
    assert costs.layers + 2 * costs.head == model.num_parameters  # the embedding, too


def test_prompts_share_what_the_workload_says_and_nothing_with_another_run() -> None:
    workload = bench_limits.WORKLOADS["tree"]
    first, second = (bench_engine.random_prompts(workload, 32768, seed) for seed in (1, 2))
    assert [len(prompt) for prompt in first] == [workload.prompt] * (workload.sequences // workload.samples)
    assert len({tuple(prompt[: workload.common]) for prompt in first}) == 1
    assert len({tuple(prompt[workload.common : workload.common + 8]) for prompt in first}) == len(first)
    assert first[0][:8] != second[0][:8]


def test_the_products_of_a_step_are_told_apart() -> None:
    product = "_product_kernel"
    names = ["_advance_kernel", *[product] * 4, "void gather<int>", *[product] * 4, "_draw_kernel", product]
    rows = bench_step.table([(float(end), name) for end, name in enumerate(["before", *names, *names])], layers=2)
    assert {row["name"]: row["per_step"] for row in rows} == {
        "_advance_kernel": 1, "void gather": 1, "_draw_kernel": 1, "product head": 1,
        **{f"product {each}": 2 for each in bench_step.PRODUCTS},
    }  # fmt: skip
    assert sum(row["us_per_step"] for row in rows) == len(names)


def test_a_file_keeps_the_workloads_that_were_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "data" / "x.json"
    bench_engine.merge(path, {"rates": None, "workloads": {"a": 1, "b": 1}})
    bench_engine.merge(path, {"rates": 5, "workloads": {"b": 2}})
    assert json.loads(path.read_text()) == {"rates": 5, "workloads": {"a": 1, "b": 2}}


def test_the_figures_of_a_server() -> None:
    answers = [serve_load.Answer(1.0, [2.0, 2.5, 4.5], 30), serve_load.Answer(1.5, [3.5, 4.0, 5.0], 20)]
    found = serve_load.figures([*answers, serve_load.Answer(0.0, [], 0, "lost")])
    assert (found["requests"], found["errors"], found["first_error"]) == (2, 1, "lost")
    assert (found["seconds"], found["tokens_per_second"], found["requests_per_second"]) == (5, 10, 0.4)
    assert found["ttft"] == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99, "p99.9": 1.999, "mean": 1.5})
    assert (found["inter_token"]["p50"], found["end_to_end"]["mean"]) == (0.75, 3.5)
    shares = serve_load.Load("u", "m", requests=10, prompt=1, tokens=1, concurrency=5, rate=6.0).shares(3)
    assert [(share.requests, share.concurrency, share.rate) for share in shares] == [(3, 1, 2), (3, 2, 2), (4, 2, 2)]


def test_parts_of_work_that_arrives_are_kept_in_one_file(tmp_path: Path) -> None:
    smoke(tmp_path, "--arriving --only refilled")
    report = smoke(tmp_path, "--arriving --only masked")
    assert {"refilled", "masked"} <= set(report)
    assert [row["lanes"] for row in report["masked"]] == [2]


@pytest.mark.parametrize("options", ["--only steps", "--arriving --only chat1", "--step --only rl"])
def test_names_that_only_cannot_find(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_gpu.main(["--smoke", *options.split()])
    assert f"--only: no {options.split()[-1]}; there are " in capsys.readouterr().err
