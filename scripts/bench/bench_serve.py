"""Measures a server in OpenAI's manner: throughput, and p50, p90, p99 and p99.9 of the time to the first token,
between two tokens, and to the end; against the requests in flight.

    python scripts/bench/bench_serve.py --smoke                             # the bundled model, to see that it runs
    python scripts/bench/bench_serve.py --serve bundled                     # 1 to 512 in flight, at its own server
    python scripts/bench/bench_serve.py --prompt-tokens 1024 --concurrency 512 --serve mistral7  # random weights
    python scripts/bench/bench_serve.py --clients 8 --serve Qwen/Qwen3-8B --max-seqs 256
    python scripts/bench/bench_serve.py --url http://localhost:8000/v1 --concurrency 1,8,64
    python scripts/bench/bench_serve.py --beside 400 --rate 2 --requests 60 --tokens 32 # chats beside a batch

Prompts are random ids, and every answer runs to its length (ignore_eos). --serve comes last: what follows its model are
flags of fgserve. Where a figure falls when --clients is raised, the clients were what was measured.

--beside sends a batch of so many requests at once, beside the load: without priorities, and then with priority 1 of the
batch. Figures are of the requests of the load that were sent after the first token of the batch, and before its end.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from reports import processor, write_json
from serve_load import Clients, Load, figures
from serve_process import BUNDLED, Server, model_folder

IN_FLIGHT = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
BATCH_TOKENS = 128  # of each prompt and each answer of the batch of --beside
SMOKE = {"prompt_tokens": 16, "tokens": 8, "concurrency": [1, 4], "requests": 8}


def numbers(text: str) -> list[int]:
    """Parse 1,2,4."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} holds numbers that are not above 0")
    return found


def loads(arguments: argparse.Namespace, url: str, model: str) -> Iterator[Load]:
    """Return the loads to measure, point by point."""
    low, high = (100, 300) if arguments.smoke else (1000, 4000)
    for seed, (concurrency, rate) in enumerate(product(arguments.concurrency, arguments.rate)):
        yield Load(
            url=url,
            model=model,
            requests=arguments.requests or max(16, 2 * concurrency),
            prompt=arguments.prompt_tokens,
            tokens=arguments.tokens,
            concurrency=concurrency,
            low=low,
            high=high,
            seed=seed,
            rate=rate,
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
            "clients": arguments.clients,
            "points": [],
        }
        warm = next(loads(arguments, url, model))
        each = arguments.clients  # of whose first requests some take 0.1 s
        warm = replace(warm, requests=each, concurrency=each, tokens=min(warm.tokens, 8), seed=-1, rate=0.0)
        clients.run(warm, False)
        for load, batch in product(loads(arguments, url, model), batches(arguments, url, model)):
            found = figures(clients.run(load)) if batch is None else beside(batch, load, clients)
            report["points"].append({"concurrency": load.concurrency, "rate": load.rate, **found})
            print(line(report["points"][-1]), flush=True)
            if arguments.out:  # each as it comes, or an error would lose those before it
                write_json(arguments.out, report)


def batches(arguments: argparse.Namespace, url: str, model: str) -> list[Load | None]:
    """Return the batches beside which each load is measured; None: without one."""
    size, count = (8 if arguments.smoke else BATCH_TOKENS), arguments.beside
    if not count:
        return [None]
    low, high = (100, 300) if arguments.smoke else (1000, 4000)
    batch = Load(url, model, count, size, size, count, low, high, seed=1000)
    return [None, batch, replace(batch, priority=1)]


def beside(batch: Load, load: Load, clients: Clients) -> dict[str, Any]:
    """Return the figures of the requests that were sent while a batch ran, and the batch's tokens per second."""
    with Clients(1) as others, ThreadPoolExecutor(1) as thread:
        running = thread.submit(others.run, batch, False)
        answers = clients.run(load)
        done = [answer for answer in running.result() if answer.chunks]
    begin, end = min(answer.chunks[0] for answer in done), max(answer.chunks[-1] for answer in done)
    meanwhile = [answer for answer in answers if begin < answer.sent < end]
    if not meanwhile:
        raise SystemExit("no request of the load was sent while the batch ran; raise --beside, --requests or --rate")
    speed = figures(done)["tokens_per_second"]
    about = {"beside": batch.requests, "batch_priority": batch.priority, "batch_tokens_per_second": speed}
    return {**about, **figures(meanwhile)}


def line(point: dict[str, Any]) -> str:
    def times(name: str) -> str:
        found = point[name]
        return "none" if found is None else "/".join(f"{1000 * found[of]:.1f}" for of in ("p50", "p90", "p99", "p99.9"))

    load = f"{point['rate']:g} requests/s" if point["rate"] else f"{point['concurrency']} in flight"
    if "beside" in point:
        load += f" beside {point['beside']} of priority {point['batch_priority']}"
    errors = f", {point['errors']} errors, the first {point['first_error']}" if point["errors"] else ""
    return (
        f"{load:16} {point['tokens_per_second']:8.1f} tok/s, {point['requests_per_second']:.2f} requests/s; "
        f"p50/p90/p99/p99.9 in ms: first token {times('ttft')}, between tokens {times('inter_token')}, "
        f"whole answer {times('end_to_end')}{errors}"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated per request (default 128)")
    parser.add_argument("--requests", type=int, help="requests per point (default: 2 per request in flight)")
    parser.add_argument(
        "--concurrency", type=numbers, default=IN_FLIGHT, metavar="1,2,...", help="requests in flight, point by point"
    )
    rate_help = "requests per second, at random times, point by point; 0 (default): as many in flight as can be"
    parser.add_argument(
        "--rate", type=lambda text: [float(part) for part in text.split(",")], default=[0.0], help=rate_help
    )
    beside_help = "requests of a batch beside which each point is measured too (default 0)"
    parser.add_argument("--beside", type=int, default=0, help=beside_help)
    parser.add_argument("--clients", type=int, default=1, help="processes that send (default 1)")
    parser.add_argument("--url", help="URL of the server, with its /v1 if it has that")
    parser.add_argument("--smoke", action="store_true", help="a few tokens on the CPU")
    parser.add_argument("--out", type=Path, help="the JSON file to write; without it none is written")
    serve_help = f"start a server: {BUNDLED}, a model of bench.py with random weights, a folder or a hub id"
    parser.add_argument("--serve", nargs=argparse.REMAINDER, metavar="MODEL [FLAGS]", help=serve_help)
    arguments = parser.parse_args(argv)
    if arguments.url and arguments.serve:
        parser.error("give one of --url and --serve")
    arguments.serve = arguments.serve or [BUNDLED]
    if arguments.smoke:
        vars(arguments).update(SMOKE)
    return arguments


if __name__ == "__main__":
    bench_load(parse())
