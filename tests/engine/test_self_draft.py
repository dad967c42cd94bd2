"""An int4 copy of the model that drafts: its drafts are those of the rounded weights, and they change no bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import CONFIG, adapter
from conftest import check_idle
from handmade import let_pages_run_out
from heads import (
    PARAMS,
    PROMPTS,
    SCHEDULES,
    Draft,
    call_graphs,
    check_same,
    head_of,
    opposed,
    record,
    save_eagle,
    without_drafts,
)
from safetensors.torch import load_file
from test_adapters import held
from torch import Tensor

from fastgen import Generator, RequestOutput, SamplingParams, Speculation
from fastgen.kernels.noise import gumbel
from fastgen.model.int4_layouts import dequantize, quantize
from fastgen.model.quantization import Int4
from fastgen.model.sampler import SampleOutput
from fastgen.speculation.self_draft import SelfDraft

EAGER = Speculation(row_cost=0.0, history_tokens=0, head="int4")
GROUP = 32  # of the small models, whose sizes are no multiples of 64


class Twin:
    """The target of transformers with rounded weights. It reads the keys and values of the target itself."""

    def __init__(self, target: Path, tensors: dict[str, Tensor] | None = None) -> None:
        import transformers

        self._target, self._rounded = (
            transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval() for _ in range(2)
        )
        if tensors is not None:
            self._target.load_state_dict(tensors, strict=False)
            self._rounded.load_state_dict(tensors, strict=False)
        for name, weight in self._rounded.named_parameters():
            if name.endswith("_proj.weight"):
                group = GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]
                weight.data = dequantize(*quantize(weight.data, group, False, torch.float32))

    @torch.no_grad()
    def check(self, drafts: list[Draft], outputs: list[RequestOutput], most: int) -> int:
        """Compare drafts, and return how many tokens there were."""
        count = 0
        for draft in drafts:
            output = outputs[draft.seed]
            ids = output.prompt_token_ids + output.completions[draft.index].token_ids
            if draft.start >= len(ids) or not draft.tokens:  # a token too many, which is dropped
                continue
            assert draft.last == ids[draft.start]
            assert len(draft.tokens) <= most
            cache = self._target(torch.tensor([ids[: draft.start]]), use_cache=True).past_key_values
            token, expected = draft.last, list[int]()
            for number in range(len(draft.tokens)):
                found = self._rounded(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                logits = found.logits[0, -1]
                if draft.temperature:
                    at = torch.tensor([[draft.start + 1 + number]], dtype=torch.int32)
                    noise = gumbel(torch.tensor([[draft.seed]]), torch.tensor([[draft.index]]), at, len(logits))
                    logits = logits / draft.temperature + noise[0]
                token = int(logits.argmax())
                expected.append(token)
            assert draft.tokens == expected, (draft, expected)
            count += len(expected)
        return count


@pytest.mark.parametrize("schedule", SCHEDULES[1::2])
def test_drafts_are_those_of_rounded_weights(
    schedule: dict[str, Any], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are the plain ones, also the second time, when prompts are in the prefix cache or in the host tier, and
    after pages ran out."""
    params = [replace(each, logprobs=1) for each in PARAMS]
    expected = opposed(monkeypatch, llama, PROMPTS, params)
    twin = Twin(llama)
    with Generator(llama, speculate=EAGER, **schedule) as gen:
        if "num_pages" in schedule:
            let_pages_run_out(gen)
        for _ in range(2):
            recorded = record(gen, monkeypatch)
            check_same(gen.generate(PROMPTS, params), expected)
            assert twin.check(recorded.drafts[::6], expected, 3) > 20
            check_idle(gen)
        assert gen.stats.head_drafted > gen.stats.head_accepted > 0


def test_drafts_write_only_to_their_own_places(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host sees the end of the pages that a lane has, drafts end. Nothing else in the pool changes."""
    with Generator(llama, speculate=EAGER, page_size=16, max_seqs=4) as gen:
        runner, head = gen._runner, head_of(gen)
        body = head.body
        seen = 0

        def checked(size: int) -> None:
            nonlocal seen
            before = runner.pool.keys.clone()
            body(size)
            changed = (runner.pool.keys != before).any(4).any(2).any(0)  # [pages, positions]
            for lane in head._draw_lanes[:size].tolist():
                start, limit = int(runner.lanes.kv_lens[lane]), int(head._limits[lane])
                for position in range(start, min(start + 3, limit)):
                    changed[runner.lanes.page_table[lane, position // 16], position % 16] = False
                    seen += 1
            assert not changed[: runner.pool.spare].any()  # rows of padding may go to the spare page

        monkeypatch.setattr(head, "body", checked)
        gen.generate(PROMPTS, PARAMS)
        assert seen > 100


def test_graphs_draft_the_same(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = opposed(monkeypatch, llama, PROMPTS[:3], PARAMS[:3])
    with Generator(llama, max_seqs=8, page_size=16, speculate=replace(EAGER, max_rows=128)) as gen:
        graphs = call_graphs(gen, monkeypatch)
        recorded = record(gen, monkeypatch)
        check_same(gen.generate(PROMPTS[:3], PARAMS[:3]), expected)
        assert Twin(llama).check(recorded.drafts[::2], expected, 3) > 50
        assert {2, 4} <= set(graphs.ran)
        check_idle(gen)


def test_the_copy_follows_the_weights(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a sleep that has kept or dropped them, and with an adapter."""
    changed = {name: x * 1.01 for name, x in load_file(llama / "model.safetensors").items()}
    with Generator(llama, speculate=EAGER, page_size=16) as gen:
        gen.generate(PROMPTS[:2], PARAMS[:2])
        for change in ("update", "drop", "sleep", "adapter"):
            if change in ("drop", "sleep"):
                gen.sleep(keep_weights=change == "sleep")
                gen.wake()
            if change in ("update", "drop"):
                gen.update_weights({name: x * (1.02 if change == "drop" else 1.0) for name, x in changed.items()})
            if change == "adapter":
                gen.update_adapter(adapter(llama), CONFIG)
            tensors = held(gen)
            recorded = record(gen, monkeypatch)
            found = gen.generate(PROMPTS[:2], PARAMS[:2])
            assert Twin(llama, tensors).check(recorded.drafts[::3], found, 3) > 15, change
        with pytest.raises(ValueError, match="which update_weights changes too"):
            gen.update_drafter(changed)


def test_the_bundled_model_draws_what_its_copy_drafts() -> None:
    prompts = [[{"role": "user", "content": text}] for text in ("Count from 3 to 9.", "Spell the word house.")]
    params = SamplingParams(seed=0, max_tokens=60)
    with Generator(device="cpu", speculate=False) as gen:
        expected = gen.generate(prompts, params)
    with Generator(device="cpu", speculate=EAGER) as gen:
        check_same(gen.generate(prompts, params), expected)
        assert gen.stats.head_accepted > 0.85 * gen.stats.head_drafted > 20


@pytest.mark.parametrize("kind", ["int4", "eagle"])
def test_a_draft_is_a_token_of_the_vocabulary(
    kind: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While kernels are only compiled, draws are what was in the memory before, and torch's operations run on them."""
    head = kind if kind == "int4" else save_eagle(tmp_path, llama)
    with Generator(llama, speculate=replace(EAGER, head=head), page_size=16) as gen:
        expected = gen.generate(PROMPTS[:2], PARAMS[:2])

        def garbage(logits: Tensor, *_: Any) -> SampleOutput:
            return SampleOutput(torch.full((4, len(logits)), 2**30, dtype=torch.int32))

        monkeypatch.setattr("fastgen.speculation.head.draw", garbage)
        check_same(gen.generate(PROMPTS[:2], PARAMS[:2]), expected)


def test_few_lanes_draft(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many lanes, a step of the copy takes as long as one of the model."""
    monkeypatch.setattr("fastgen.speculation.heads.SelfDraftConfig.most_lanes", 2)
    # The draws are random, so a draft may be right or wrong, and a step adds one or two tokens to an answer. Each of
    # the last three answers is more than twice as long as the one before it. So they end one after the other in any
    # case, and there are steps with two lanes and with one.
    lengths = 3, 6, 9, 12, 28, 60
    with Generator(llama, speculate=replace(EAGER, max_draft=1), page_size=16, max_seqs=8) as gen:
        sizes, body = list[int](), head_of(gen).body
        monkeypatch.setattr(head_of(gen), "body", lambda size: sizes.append(size) or body(size))
        gen.generate(PROMPTS, [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths])
        assert set(sizes) == {1, 2}


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}])
def test_it_runs_with_other_options(options: dict[str, Any], llama: Path) -> None:
    params = [replace(each, max_tokens=12) for each in PARAMS]
    expected = without_drafts(llama, PROMPTS, params, page_size=64, **options)
    with Generator(llama, speculate=EAGER, page_size=64, **options) as gen:
        found = gen.generate(PROMPTS, params)
        assert gen.stats.head_drafted > 0
        form = head_of(gen).model.parameters.config.quantization
        assert isinstance(form, Int4)
        assert form.scale_dtype == gen.config.dtype
        check_same(found, expected)


@pytest.mark.parametrize("family", ["ministral3", "phi3", "arcee"], indirect=True)  # of any form of the linear layers
def test_every_family_drafts_with_its_own_layers(family: Path) -> None:
    params = [replace(each, max_tokens=20) for each in PARAMS]
    expected = without_drafts(family, PROMPTS, params)
    with Generator(family, speculate=EAGER, page_size=16, max_seqs=8, max_step_tokens=40) as gen:
        assert isinstance(head_of(gen), SelfDraft)
        check_same(gen.generate(PROMPTS, params), expected)
        assert gen.stats.head_accepted > 0
        check_idle(gen)


def test_what_it_cannot_be_is_an_error(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="speculate='int4' needs tensor_parallel=1"):
        Generator(llama, speculate="int4", tensor_parallel=2)
    with pytest.raises(ValueError, match="speculate='int4' needs a model that is not quantized"):
        Generator(llama, speculate="int4", quantization="fp8")
    config = json.loads((llama / "config.json").read_text(encoding="utf-8")) | {"intermediate_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    message = (
        r"^speculate='int4' cannot copy this model; .* 'auto' \(.* and 100, 100 outputs are not .* and 8 outputs\)$"
    )
    with pytest.raises(ValueError, match=message):
        Generator(tmp_path, speculate="int4", load="dummy")
