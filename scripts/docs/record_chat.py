"""Record a conversation with fgchat in a real terminal (tmux), and write it as an animated SVG for the README.

python scripts/docs/record_chat.py docs/images/fgchat.svg
"""

from __future__ import annotations

import argparse
import subprocess
import time
from html import escape
from pathlib import Path

SESSION, COLUMNS, ROWS = "record-chat", 64, 15
MESSAGES = ("what is 81 - 19?", "spell banana backwards", "name a colour")
TYPING, FRAME, END = 0.04, 0.08, 3.0  # seconds per letter, between two looks at the screen, and before it starts again
PROMPT = "$ "


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout


def screen() -> str:
    return tmux("capture-pane", "-p", "-t", SESSION).rstrip()


class Recording:
    """The screens that were seen, each with the second at which it appeared."""

    def __init__(self) -> None:
        self.frames: list[tuple[float, str]] = []
        self._start = time.monotonic()

    def watch(self, until: str, seconds: float = 60) -> None:
        """Record until the last line of the screen is `until`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            if screen().splitlines()[-1:] == [until.rstrip()]:
                return
            time.sleep(FRAME)
        raise SystemExit(f"the screen does not end with {until!r} after {seconds:g} s:\n{screen()}")

    def look(self) -> None:
        """Record the screen if it has changed."""
        if not self.frames or self.frames[-1][1] != screen():
            self.frames.append((time.monotonic() - self._start, screen()))

    def type(self, text: str) -> None:
        for letter in text:
            tmux("send-keys", "-t", SESSION, "-l", letter)
            time.sleep(TYPING)
            self.look()
        tmux("send-keys", "-t", SESSION, "Enter")


def svg(frames: list[tuple[float, str]]) -> str:
    """Return an SVG that shows the frames at their times, again and again; the last one without animations."""
    width, height, total = COLUMNS * 8.4 + 24, ROWS * 18 + 24, frames[-1][0] + END
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-size="14"',
        ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" fill="#d4d4d4">',
        '<title>A conversation with fgchat</title><rect width="100%" height="100%" rx="8" fill="#1e1e1e"/>',
    ]
    for at, (begin, text) in enumerate(frames):
        end = frames[at + 1][0] if at + 1 < len(frames) else total
        lines = "".join(
            f'<tspan x="12" y="{24 + 18 * row}">{escape(line)}</tspan>' for row, line in enumerate(text.splitlines())
        )
        shown = "visible" if at + 1 == len(frames) else "hidden"
        times = f"0;{begin / total:.4f};{min(end / total, 1):.4f}"
        parts.append(
            f'<text xml:space="preserve" visibility="{shown}">{lines}<animate attributeName="visibility" '
            f'values="hidden;visible;hidden" keyTimes="{times}" dur="{total:.1f}s" calcMode="discrete" '
            'repeatCount="indefinite"/></text>'
        )
    return "".join([*parts, "</svg>\n"])


def record() -> list[tuple[float, str]]:
    """Return the frames of a conversation, without the seconds in which fgchat loads."""
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    tmux("new-session", "-d", "-s", SESSION, *size, f"env PS1='{PROMPT}' bash --norc --noprofile")
    try:
        time.sleep(1)
        tmux("send-keys", "-t", SESSION, f"PS1='{PROMPT}'; clear", "Enter")
        time.sleep(1)
        recording = Recording()
        recording.type("fgchat")
        typed = recording.frames.copy()
        recording.watch("1>")
        start, loaded = typed[-1][0], recording.frames[-1]
        recording.frames = [(loaded[0], loaded[1])]
        for number, message in enumerate(MESSAGES, 2):
            recording.type(message)
            recording.watch(f"{number}>")
        shift = loaded[0] - start - 1  # a second instead of the time that loading takes
        return [*typed, *((begin - shift, text) for begin, text in recording.frames)]
    finally:
        tmux("kill-session", "-t", SESSION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the SVG to write")
    path = parser.parse_args().file
    frames = record()
    path.write_text(svg(frames), encoding="utf-8")
    print(f"{len(frames)} screens in {frames[-1][0]:.1f} s; {path.stat().st_size / 1e3:.0f} kB in {path}")


if __name__ == "__main__":
    main()
