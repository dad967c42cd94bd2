"""Compare policies for kept states by how many prompt tokens they save, with the workloads of bench_requests.py.

    python scripts/hybrid/simulate_states.py [--output scripts/results/hybrid-states.json]

Sizes are those of Qwen3.5-9B in bfloat16 with states in float32. hit: tokens that need no prefill, of those of all
prompts; dense: the same for a model of attention alone, with as many bytes for its pages. "used_gb" is at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from states import PAGE, StateCache

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from bench_requests import REQUESTS, Draw, Round

HEADS, KEY_HEADS, SIZE, RECURRENT, ATTENTION = 32, 16, 128, 24, 8
INPUTS = 3 * (2 * KEY_HEADS + HEADS) * SIZE * 2  # of the convolution
STATE = RECURRENT * (HEADS * SIZE * SIZE * 4 + INPUTS)
PAGE_BYTES = PAGE * ATTENTION * 2 * 4 * 256 * 2
ROWS = PAGE * SIZE * 2 * (KEY_HEADS + 2 * HEADS) + HEADS * PAGE * (PAGE * 4 + 8)  # of keys, residuals, writes, T, gates
LANE = RECURRENT * (HEADS * SIZE * SIZE * 6 + INPUTS + ROWS)
POLICIES = ("every page", "every 1,024 tokens", "ends", "ends and branches")
BUDGETS = (4, 16, 64)  # GB


def borders(policy: str, cache: StateCache, length: int, match: tuple[int, int]) -> list[int]:
    """Return where a prefill keeps states."""
    if policy.startswith("every"):
        step = PAGE if policy == "every page" else 1024
        return list(range(step, length + 1, step))
    if policy == "ends":
        return [(length - 1) // PAGE * PAGE]
    return cache.borders_of_prompt(length, *match)


def simulate(rounds: list[Round], budget: int, policy: str) -> dict[str, float]:
    """Serve requests one after the other; answers are other ids than those of prompts."""
    cache = StateCache(budget, PAGE_BYTES, 0 if policy == "dense" else STATE)
    conversations: defaultdict[int, list[int]] = defaultdict(list)
    total = hit = 0
    for number, asked in enumerate(one for each in rounds for one in each):
        tokens = conversations[asked.conversation]
        tokens += asked.ids
        pages, state = cache.match(tokens)
        total, hit = total + len(tokens), hit + (pages if policy == "dense" else state)
        kept = [] if policy == "dense" else borders(policy, cache, len(tokens), (pages, state))
        cache.add(tokens, kept)
        before = len(tokens)
        tokens += [-1 - number * 4096 - place for place in range(asked.generated)]
        if policy.startswith("every"):
            kept = [border for border in borders(policy, cache, len(tokens), (0, 0)) if border > before]
        elif policy != "dense":
            kept = [len(tokens) // PAGE * PAGE]
        cache.add(tokens, kept)
        if number % 64 == 0:
            cache.check()
    return {"hit": hit / total, "used_gb": cache.used / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    results: dict[str, Any] = {"bytes": {"state": STATE, "lane": LANE, "page": PAGE_BYTES}}
    for name, rounds in REQUESTS.items():
        for budget in BUDGETS:
            for policy in ("dense", *POLICIES):
                row = simulate(rounds(Draw(1, 248_320), False), budget * 10**9, policy)
                results.setdefault(name, {}).setdefault(f"{budget} GB", {})[policy] = row
                print(name, budget, policy, {key: round(value, 3) for key, value in row.items()}, flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
