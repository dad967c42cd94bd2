"""A trainer's policy whose logprobs have the bits of the Generator that draws: see docs/rl.md, "Exactly on policy"."""

from __future__ import annotations

from fastgen.rl.policy.padding import Padded, pad
from fastgen.rl.policy.policy import Policy, PolicyOutput

__all__ = ["Padded", "Policy", "PolicyOutput", "pad"]
