"""Measures generated tokens per second, and writes JSON.

    python scripts/bench/bench.py cpu          # fastgen and transformers, on the bundled model
    python scripts/bench/bench.py cpu --peers  # true shapes, also in vLLM's CPU build and llama.cpp
    python scripts/bench/bench.py gpu          # true shapes on GPUs, with their limits, and other measurements of GPUs

All have more options (--help), and --smoke, which shows in seconds that they run.
"""

from __future__ import annotations

import argparse
from importlib import import_module

KINDS = {"cpu": "bench_cpu", "gpu": "bench_gpu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("options", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    peers = arguments.kind == "cpu" and any(option.partition("=")[0] == "--peers" for option in arguments.options)
    import_module("bench_peers" if peers else KINDS[arguments.kind]).main(arguments.options)


if __name__ == "__main__":
    main()
