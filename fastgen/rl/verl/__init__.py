"""The rollout `fastgen` of verl: `actor_rollout_ref.rollout.name=fastgen`. verl finds it by itself (`plugin.py`)."""

from __future__ import annotations

from importlib.metadata import version

NAME = "fastgen"
VERSION = "0.9."  # how the versions of verl begin whose classes these modules are made for


def check_version() -> None:
    """Raise ImportError if the rollout does not work with the installed version of verl."""
    installed = version("verl")
    if not installed.startswith(VERSION):
        raise ImportError(f"verl {installed} is installed; the rollout {NAME!r} works with verl {VERSION}*")
