"""Draws docs/images/ratios.svg: importance ratios before an optimizer step, by transformers and by a Policy.

python scripts/docs/ratios.py docs/images/ratios.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "scripts" / "results" / "h200-policy.json"
MODEL, WORDS = "qwen8", "Qwen3 8B shape, bfloat16, H200"
LOW, HIGH = 0.795, 1.205  # range of the histogram, RATIOS of policy_step.py
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 170, 30, 34  # of one histogram, in pixels, with room for its axis
KINDS = {"transformers": ("trainer: transformers", "#d62728"), "policy": ("trainer: Policy", "#2a7ab9")}


def histogram(words: str, color: str, counts: list[int], top: int) -> list[str]:
    """Return a histogram whose upper edge is at pixel `top`: the share of tokens with each ratio."""
    floor, width = top + HEIGHT - BOTTOM, WIDTH - LEFT - 12
    step = width / len(counts)
    parts = [f'<text x="{LEFT}" y="{top + 14}">{words}</text>']
    for at, count in enumerate(counts):
        if count:
            length = max((HEIGHT - BOTTOM - 24) * count / max(counts), 1)
            parts.append(
                f'<rect x="{LEFT + at * step:.1f}" y="{floor - length:.1f}" width="{step - 1:.1f}" '
                f'height="{length:.1f}" fill="{color}"/>'
            )
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{floor}" y2="{floor}" stroke="#333"/>')
    for ratio in (0.8, 0.9, 1.0, 1.1, 1.2):
        x = LEFT + (ratio - LOW) / (HIGH - LOW) * width
        parts.append(f'<text x="{x:.0f}" y="{floor + 16}" text-anchor="middle">{ratio:g}</text>')
    return parts


def picture() -> str:
    """Return the histograms of both trainers, one above the other."""
    (report,) = [each for each in json.loads(REPORT.read_text(encoding="utf-8")) if each["model"] == MODEL]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * HEIGHT + 36}" font-family="sans-serif" '
        'font-size="12" fill="#333"><title>Importance ratios before an optimizer step</title>'
        '<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="12" y="20" font-size="13">Importance ratios of tokens before an optimizer step ({WORDS})</text>'
    ]
    for number, (kind, (words, color)) in enumerate(KINDS.items()):
        parts += histogram(words, color, report[kind]["ratios"], 30 + number * HEIGHT)
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg", type=Path, help="the picture to write")
    parser.parse_args().svg.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
