"""The rollout `fastgen` of verl: `actor_rollout_ref.rollout.name=fastgen`.

verl imports this module itself, by the entry point of the group `verl.plugins`, and drops its errors. So this only
registers names; a wrong version of verl is an error when a rollout is made.
"""

from __future__ import annotations

from importlib.metadata import version

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

NAME = "fastgen"
VERSION = "0.9."  # how the versions of verl begin whose classes these modules are made for


def check_version() -> None:
    """Raise ImportError if the rollout does not work with the installed version of verl."""
    found = version("verl")
    if not found.startswith(VERSION):
        raise ImportError(f"verl {found} is installed; the rollout {NAME!r} works with verl {VERSION}*")


def _replica() -> type[RolloutReplica]:
    check_version()
    from fastgen.rl.verl.replica import Replica

    return Replica


_ROLLOUT_REGISTRY[NAME, "async"] = "fastgen.rl.verl.rollout.Rollout"
RolloutReplicaRegistry.register(NAME, _replica)
