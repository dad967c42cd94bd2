"""Run random schedules of the scheduler, its pages, prefix cache and host tier over the hash model, in all processes.

    python scripts/check/simulate.py --schedules 60000 --json found.json

`pytest -m long tests/engine/test_random_schedules.py` runs 1,000,000 of the same schedules. A schedule that fails is
named with the call that replays it. The JSON is written after each part.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "engine")]

AT_ONCE = 500


def run(seeds: range) -> tuple[range, Counter[str], str]:
    """Run some seeds; return those that were run, the events that they saw, and the first failure, which ends the
    run."""
    from test_random_schedules import run_seeds

    try:
        return seeds, run_seeds(seeds), ""
    except AssertionError as error:
        return seeds[:0], Counter(), str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=10**6, help="first seed (default: after the seeds of the tests)")
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which no more parts are waited for")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    end = args.first + args.schedules
    parts = [range(first, min(first + AT_ONCE, end)) for first in range(args.first, end, AT_ONCE)]
    command = f"python scripts/check/simulate.py --first {args.first} --schedules {args.schedules}"
    found: dict[str, Any] = {"command": command, "python": platform.python_version(), "processes": args.processes}
    found |= {"schedules": 0, "failures": [], "seconds": 0.0}
    start, seen = time.perf_counter(), Counter[str]()
    with multiprocessing.Pool(args.processes) as pool:
        for seeds, part, failure in pool.imap_unordered(run, parts):
            seen += part
            found["schedules"] += len(seeds)
            if failure:
                found["failures"].append(failure)
                print(failure, flush=True)
            found |= {"seconds": round(time.perf_counter() - start, 1), "seen": dict(sorted(seen.items()))}
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
            if found["seconds"] > args.seconds:
                break
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
