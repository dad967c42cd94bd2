"""Measures a server in OpenAI's manner: throughput, and p50, p90, p99 and p99.9 of the time to the first token,
between two tokens, and to the end; against the requests in flight. Writes JSON and a plot to scripts/results/.

    python scripts/bench/bench_serve.py --smoke                             # the bundled model, to see that it runs
    python scripts/bench/bench_serve.py --serve bundled                     # 1 to 512 in flight, at a server of its own
    python scripts/bench/bench_serve.py --preset headline --serve mistral7  # random weights, as in bench.py gpu
    python scripts/bench/bench_serve.py --preset beside --clients 8 --serve mistral7       # long prompts among chats
    python scripts/bench/bench_serve.py --preset beside --name whole --serve mistral7 --max-prefill-tokens 99999
    python scripts/bench/bench_serve.py --clients 8 --serve Qwen/Qwen3-8B --max-seqs 256
    python scripts/bench/bench_serve.py --url http://localhost:8000/v1 --concurrency 1,8,64

Prompts are random ids, and every answer runs to its length (ignore_eos). --serve comes last: what follows its model are
flags of fgserve. Where a figure falls when --clients is raised, the clients were what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from plot import plot
from reports import RESULTS, processor, write_json
from serve_load import Clients, Load, figures
from serve_process import BUNDLED, Server, model_folder

PRESETS: dict[str, dict[str, Any]] = {
    "sweep": {"prompt_tokens": 128, "tokens": 128, "concurrency": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]},
    "headline": {"prompt_tokens": 1024, "tokens": 128, "concurrency": [512], "requests": 512},
    "beside": {"prompt_tokens": 512, "tokens": 128, "concurrency": [256], "requests": 240, "rate": [8, 0],
               "long_tokens": 8000, "every": 4},
    "crowd": {"prompt_tokens": 512, "tokens": 128, "concurrency": [4096], "requests": 1500, "rate": [70]},
    "smoke": {"prompt_tokens": 16, "tokens": 8, "concurrency": [1, 4], "requests": 8},
}  # fmt: skip


def numbers(text: str) -> list[int]:
    """Parse 1,2,4."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} holds numbers that are not above 0")
    return found


def loads(arguments: argparse.Namespace, url: str, model: str) -> Iterator[Load]:
    """Return the loads to measure, point by point."""
    for seed, (concurrency, rate) in enumerate(product(arguments.concurrency, arguments.rate or [0.0])):
        yield Load(
            url=url,
            model=model,
            requests=arguments.requests or max(16, 2 * concurrency),
            prompt=arguments.prompt_tokens,
            tokens=arguments.tokens,
            concurrency=concurrency,
            low=arguments.ids[0],
            high=arguments.ids[1],
            seed=seed,
            rate=rate,
            long=arguments.long_tokens or 0,
            every=arguments.every or 0,
        )


@contextmanager
def target(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of the server, which is started where none is given."""
    if arguments.url is not None:
        yield arguments.url.rstrip("/")
        return
    name, *more = arguments.serve
    with model_folder(name, arguments.smoke) as (model, flags), Server(model, [*flags, *more]) as server:
        yield f"{server.url}/v1"


def bench_load(arguments: argparse.Namespace) -> None:
    with target(arguments) as url, Clients(arguments.clients) as clients:
        model = str(httpx.get(f"{url}/models", timeout=60).raise_for_status().json()["data"][0]["id"])
        report: dict[str, Any] = {
            "server": arguments.url or " ".join(arguments.serve),
            "model": model,
            "machine": processor(),
            "prompt": arguments.prompt_tokens,
            "tokens": arguments.tokens,
            "long": arguments.long_tokens and [arguments.long_tokens, arguments.every],
            "clients": arguments.clients,
            "points": [],
        }
        warm = next(loads(arguments, url, model))
        each = arguments.clients  # of whose first requests some take 0.1 s
        warm = replace(warm, requests=each, concurrency=each, tokens=min(warm.tokens, 8), seed=-1, rate=0.0)
        clients.run(warm, False)
        for load in loads(arguments, url, model):
            found = figures(clients.run(load))
            report["points"].append({"concurrency": load.concurrency, "rate": load.rate, **found})
            print(line(report["points"][-1]), flush=True)
            write(arguments, report)  # each as it comes, or an error would lose those before it
    if (path := report_path(arguments)) and not arguments.rate:
        try:
            plot(report, path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"not plotted, as there is no {error.name}; see scripts/bench/plot.py")


def line(point: dict[str, Any]) -> str:
    def times(name: str) -> str:
        found = point[name]
        return "none" if found is None else "/".join(f"{1000 * found[of]:.1f}" for of in ("p50", "p90", "p99", "p99.9"))

    load = f"{point['rate']:g} requests/s" if point["rate"] else f"{point['concurrency']} in flight"
    errors = f", {point['errors']} errors, the first {point['first_error']}" if point["errors"] else ""
    return (
        f"{load:16} {point['tokens_per_second']:8.1f} tok/s, {point['requests_per_second']:.2f} requests/s; "
        f"p50/p90/p99/p99.9 in ms: first token {times('ttft')}, between tokens {times('inter_token')}, "
        f"whole answer {times('end_to_end')}{errors}"
    )


def report_path(arguments: argparse.Namespace) -> Path | None:
    """Return the path of the report; None: write nothing."""
    if arguments.smoke and arguments.out is None:
        return None
    folder: Path = arguments.out or RESULTS
    return folder / f"serve-{arguments.name or arguments.preset}.json"


def write(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if path := report_path(arguments):
        write_json(path, report)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), help="values of the options below (default: sweep)")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--tokens", type=int, help="number of tokens generated per request")
    parser.add_argument("--requests", type=int, help="requests per point (default: 2 per request in flight)")
    parser.add_argument("--concurrency", type=numbers, metavar="1,2,...", help="requests in flight, point by point")
    rate_help = "requests per second, at random times, point by point; 0 (default): as many in flight as can be"
    parser.add_argument("--rate", type=lambda text: [float(part) for part in text.split(",")], help=rate_help)
    parser.add_argument("--long-tokens", type=int, help="length of the prompts of some requests")
    parser.add_argument("--every", type=int, help="one request of so many has such a prompt")
    parser.add_argument("--clients", type=int, default=1, help="processes that send (default 1)")
    parser.add_argument("--url", help="URL of the server, with its /v1 if it has that")
    parser.add_argument("--smoke", action="store_true", help="a few tokens on the CPU; writes only with --out")
    parser.add_argument("--name", help="name of the files, serve-NAME.json and .png (default: the preset's)")
    parser.add_argument("--out", type=Path, help="folder for them (default: scripts/results)")
    serve_help = f"start a server: {BUNDLED}, a model of bench.py with random weights, a folder or a hub id"
    parser.add_argument("--serve", nargs=argparse.REMAINDER, metavar="MODEL [FLAGS]", help=serve_help)
    arguments = parser.parse_args(argv)
    if arguments.url and arguments.serve:
        parser.error("give one of --url and --serve")
    arguments.serve = arguments.serve or [BUNDLED]
    _fill_in(arguments)
    return arguments


def _fill_in(arguments: argparse.Namespace) -> None:
    """Take what the command line leaves open from the preset. The preset smoke is --smoke, which writes nothing."""
    arguments.smoke |= arguments.preset == "smoke"
    if arguments.preset is None:
        arguments.preset = "smoke" if arguments.smoke else "sweep"
    for name, value in PRESETS[arguments.preset].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    tiny = arguments.smoke and arguments.serve[0] != BUNDLED
    arguments.ids = (100, 300) if tiny else (1000, 4000)


if __name__ == "__main__":
    bench_load(parse())
