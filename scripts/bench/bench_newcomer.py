"""Measures how long a short prompt waits for its first token on its own, and after long prompts that are in their
prefill, and writes JSON to scripts/results/newcomer-cpu.json.

    python scripts/bench/bench_newcomer.py            # the bundled model on the CPU, 20 tokens after 9,000
    python scripts/bench/bench_newcomer.py --smoke    # the same after 400; writes nothing
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

from reports import RESULTS, processor, write_json

from fastgen import AsyncGenerator, SamplingParams

SHORT, LONG = 20, 1800  # tokens of a prompt; the bundled model has a context of 2048
HEAD_START = 0.1  # seconds from the long prompts to the short one


async def first_token(engine: AsyncGenerator, length: int) -> float:
    """Return the seconds to the first token of a random prompt, whose answer has one token."""
    start = time.perf_counter()
    prompt = [random.randrange(5, 1000) for _ in range(length)]
    await engine.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1))
    return time.perf_counter() - start


async def measure(long_prompts: int, length: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to the first token: of a short prompt on its own and after the long ones, and of the last of
    these."""
    found: dict[str, list[float]] = {"alone": [], "after_long": [], "last_long": []}
    async with AsyncGenerator(device="cpu") as engine:
        await first_token(engine, SHORT)
        for _ in range(rounds):
            found["alone"].append(await first_token(engine, SHORT))
            others = [asyncio.create_task(first_token(engine, length)) for _ in range(long_prompts)]
            await asyncio.sleep(HEAD_START)
            found["after_long"].append(await first_token(engine, SHORT))
            found["last_long"].append(max(await asyncio.gather(*others)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one short round, nothing written")
    smoke = parser.parse_args().smoke
    found = asyncio.run(measure(2, 200, 1) if smoke else measure(5, LONG, 5))
    for name, seconds in found.items():
        print(f"{name:>10}  median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s")
    if not smoke:
        report = {"processor": processor(), "short": SHORT, "long": [LONG] * 5, "seconds": found}
        write_json(RESULTS / "newcomer-cpu.json", report)


if __name__ == "__main__":
    main()
