"""The README's comparison with vLLM: its table, and its picture as an SVG.

    python scripts/docs/compare.py                      # print the table
    python scripts/docs/compare.py docs/images/speed.svg

Both engines ran on one host with two H200s, each on one of them, in the same minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
OURS, THEIRS = RESULTS / "fastgen-h200.jsonl", RESULTS / "vllm-0.33-h200.jsonl"

# The words of the README, and the (tag, workload) of the files.
ROWS = {
    "one chat": ("", "chat1"),
    "32 chats": ("", "chat32"),
    "128 sequences, 256 -> 256 tokens each": ("", "batch128"),
    "512 prompts, 1024 -> 128": ("", "headline"),
    "64 prompts x 16 samples, 1024 -> 512": ("", "group"),
    "RL rollouts, 64 prompts x 16 requests": ("", "rl"),
    "agents sharing tool descriptions": ("", "tools"),
    "six-turn conversations": ("", "turns"),
    "fp8, one chat": ("fp8", "chat1"),
    "fp8, 32 chats": ("fp8", "chat32"),
    "int4 (an AWQ file), one chat": ("awq", "chat1"),
    "int4, 32 chats": ("awq", "chat32"),
}
BAR, GAP, LEFT, SCALE = 13, 8, 260, 190  # of the picture, in pixels; SCALE is the length of vLLM's bar


def speeds(path: Path) -> dict[tuple[str, str], float]:
    """Return generated tokens per second of Mistral 7B by (tag, workload)."""
    reports = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(each["tag"], each["w"]): each["best"] for each in reports if each["model"].startswith("mistral7b")}


def compared() -> list[tuple[str, float, float]]:
    """Return (words, fastgen's tokens per second, vLLM's) of each row."""
    ours, theirs = speeds(OURS), speeds(THEIRS)
    return [(words, ours[key], theirs[key]) for words, key in ROWS.items()]


def table() -> str:
    lines = ["| generated tokens per second | fastgen | vLLM 0.33 |", "|---|---|---|"]
    lines += [f"| {words} | {ours:.0f} | {theirs:.0f} |" for words, ours, theirs in compared()]
    return "\n".join(lines)


def picture() -> str:
    """Return bars of fastgen's speed with vLLM's as 1."""
    rows = compared()
    height, width = len(rows) * (BAR + GAP) + 46, LEFT + round(2.4 * SCALE)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12" fill="#333"><title>Speed of fastgen relative to vLLM 0.33</title>'
        '<rect width="100%" height="100%" fill="#fff"/>'
        '<text x="12" y="20" font-size="13">Generated tokens per second, relative to vLLM 0.33 '
        "(Mistral 7B, one H200)</text>",
    ]
    for at, (words, ours, theirs) in enumerate(rows):
        y, length = 34 + at * (BAR + GAP), SCALE * ours / theirs
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + BAR - 2}" text-anchor="end">{words.replace(">", "&gt;")}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR}" fill="#2a7ab9"/>'
            f'<text x="{LEFT + length + 5:.0f}" y="{y + BAR - 2}">{ours / theirs:.2f}</text>'
        )
    end = 34 + len(rows) * (BAR + GAP)
    parts.append(
        f'<line x1="{LEFT + SCALE}" x2="{LEFT + SCALE}" y1="30" y2="{end}" stroke="#d62728" stroke-dasharray="4 3"/>'
    )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, nargs="?", help="the picture to write")
    path: Path | None = parser.parse_args().svg
    if path is None:
        print(table())
    else:
        path.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
