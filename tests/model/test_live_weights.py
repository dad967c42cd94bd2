"""live_weights.py: the weights of a running model are written, searched, and put to sleep in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import new_weights
from handmade import make_runner

from fastgen.model.parameters import checkpoint_shards
from fastgen.model.weights import Update


def test_a_checked_update_overwrites_the_weights_in_place(family: Path) -> None:
    runner, weights = make_runner(family, dtype="bfloat16"), new_weights(family)
    live, targets = runner.weights, runner.model.parameters.targets
    before = {name: shard.view.data_ptr() for name, shard in targets().items()}
    shards, began = checkpoint_shards(runner.model.parameters.config), []
    wrong = Update({**weights, "x": torch.ones(1)}, shards)
    with pytest.raises(ValueError, match="unexpected tensor 'x'"):
        live.update(wrong, lambda: began.append("wrong"))
    live.update(Update(weights, shards), lambda: began.append("right"))
    assert began == ["right"], "a wrong update begins nothing"
    found = targets()
    assert {name: shard.view.data_ptr() for name, shard in found.items()} == before
    assert all(torch.equal(shard.view, weights[name].bfloat16()) for name, shard in found.items())
