"""Helpers for tests that run fgchat in a pseudo-terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pexpect

ROOT = Path(__file__).parents[1]
BANNER = """\
Ready to chat!
  Available commands:
    /r <N> -- reset conversation before round N
    /m     -- input a multiline message, end your input
              with a single line containing '.'
    /help  -- list all commands
    /q     -- quit

---
"""
STATS = r"--- \[(\d+) tokens, (\d+\.\d) tok/s\]"


def spawn(state: Path, *command: str, **environment: str) -> pexpect.spawn:
    """Run a Python command in a terminal. state: the folder for the history."""
    env = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    env |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment
    child = pexpect.spawn(sys.executable, [*command], env=env, encoding="utf-8", timeout=60, dimensions=(50, 200))
    child.delaybeforesend, child.delayafterclose, child.delayafterterminate = None, 0, 0
    return child


def said(child: pexpect.spawn) -> str:
    """Return the text before the match, without the escape sequences of line editing."""
    return re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>])", "", child.before).replace("\r", "")


def at_prompt(child: pexpect.spawn, number: int) -> str:
    """Wait until the editor accepts input for a round. Return the text before its prompt."""
    child.expect(rf"\x1b\[\?2004h[^\n]*?{number}> ")  # each prompt is drawn more than once: this begins a new one
    return said(child)


def ask(child: pexpect.spawn, line: str, number: int) -> str:
    """Type a line. Return the text before the prompt of the given round."""
    child.sendline(line)
    return at_prompt(child, number)


def leave(child: pexpect.spawn, line: str | None = None) -> int:
    """Type a line (None: Ctrl-D) that ends fgchat. Return the exit status."""
    child.sendline(line) if line else child.sendeof()
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus
