"""The registration of the rollout, by the entry point of the group `verl.plugins`.

verl imports this module when it is imported itself, and drops errors. So this module only registers names; a wrong
version of verl is an error when a rollout is made.
"""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from fastgen.rl.verl import NAME, check_version


def load_replica() -> type[RolloutReplica]:
    """Return the class of replicas. Raises ImportError for a wrong version of verl."""
    check_version()
    from fastgen.rl.verl.replica import VerlReplica

    return VerlReplica


_ROLLOUT_REGISTRY[NAME, "async"] = "fastgen.rl.verl.rollout.VerlRollout"
RolloutReplicaRegistry.register(NAME, load_replica)
