"""generator.py: a Generator whose weights are replaced answers as one that began with them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, FEW, Checkpoint, Turns, check_idle, new_weights, random_ids
from handmade import let_pages_run_out
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastgen import Event, Generator, Request, SamplingParams
from fastgen.request import Completion

pytestmark = pytest.mark.timeout(60)
SHORT = SamplingParams(max_tokens=8, seed=7, ignore_eos=True)
SYSTEM = random_ids(40)
REQUESTS = [
    (SYSTEM + random_ids(9), replace(SHORT, temperature=0, logprobs=2)),
    (SYSTEM + random_ids(20), replace(SHORT, n=3, prompt_logprobs=0)),
    (SYSTEM, replace(SHORT, top_p=0.9, temperature=0.8, repetition_penalty=1.2)),
    (random_ids(33), replace(SHORT, mask=Turns())),
]
LONG = replace(SHORT, max_tokens=24)
OPTIONS: dict[str, Any] = {"page_size": 8, "max_seqs": 8, "max_step_tokens": 48, "seed": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, dict[str, Tensor]], Path]:
    """saved(folder, weights): writes these weights with the configuration of a checkpoint, and returns the folder."""

    def save(folder: Path, weights: dict[str, Tensor]) -> Path:
        made = tmp_path_factory.mktemp("saved")
        shutil.copy(folder / "config.json", made)
        save_file(weights, made / "model.safetensors")
        return made

    return save


Saved = Callable[[Path, dict[str, Tensor]], Path]


def old_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def answers(gen: Generator, requests: list[tuple[list[int], SamplingParams]] = REQUESTS) -> list[Any]:
    """Return all that the weights decide in the answers to these requests."""
    outputs = gen.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    check_idle(gen)
    for completion in (completion for output in outputs for completion in output.completions):
        assert completion.weight_versions == [(gen.weight_version, 0, len(completion.token_ids))]
        completion.weight_versions = []
    return [(output.error, output.completions, (output.prompt_logprobs or [])[1:]) for output in outputs]


def drain(gen: Generator) -> list[Event]:
    events = []
    while gen.unfinished:
        events += gen.step()
    check_idle(gen)
    return events


@pytest.mark.parametrize("family", FEW, indirect=True)
def test_answers_are_those_of_a_generator_that_began_with_the_weights(family: Path, saved: Saved) -> None:
    """Prefix cache and host tier are warm with pages of the old weights. Then the old weights come back."""
    weights = new_weights(family)
    with Generator(saved(family, weights), **OPTIONS) as other:
        new = answers(other)
    with Generator(family, **OPTIONS, num_pages=20, host_cache_gb=2e-3) as gen:
        old = answers(gen)
        assert answers(gen) == old
        stats = gen.stats
        assert min(stats.pages_saved, stats.pages_loaded, stats.cached_tokens) > 0
        assert gen.weight_version == 0
        assert gen.update_weights(weights.items()) == gen.weight_version == 1
        assert answers(gen) == new
        assert old != new
        assert answers(gen) == new
        assert gen.stats.pages_loaded > stats.pages_loaded
        assert gen.update_weights(old_weights(family), version=17) == 17
        assert answers(gen) == old
        assert gen.update_weights(reversed(weights.items())) == 18  # as they come, in any order
        assert answers(gen) == new
        assert gen.update_weights(str(family)) == 19
        assert answers(gen) == old
        assert gen.update_weights(saved(family, weights) / "model.safetensors") == 20
        assert answers(gen) == new


@pytest.mark.parametrize("given", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_float_becomes_the_models_own(given: torch.dtype, dtype: str, llama: Path, saved: Saved) -> None:
    weights = {name: tensor.to(given) for name, tensor in new_weights(llama).items()}
    with Generator(saved(llama, weights), dtype=dtype, **OPTIONS) as other:
        new = answers(other)
    with Generator(llama, dtype=dtype, **OPTIONS) as gen:
        gen.update_weights((name, tensor.requires_grad_()) for name, tensor in weights.items())
        assert answers(gen) == new


def test_the_head_of_a_tied_model_may_be_given_or_not(checkpoint: Checkpoint, saved: Saved) -> None:
    folder = checkpoint(*FAMILIES["qwen2"][:1], **FAMILIES["qwen2"][1])
    weights = new_weights(folder)
    assert "lm_head.weight" not in weights
    with Generator(saved(folder, weights), **OPTIONS) as other:
        new = answers(other)
    for head in ({}, {"lm_head.weight": weights["model.embed_tokens.weight"]}):
        with Generator(folder, **OPTIONS) as gen:
            gen.update_weights(weights | head)
            assert answers(gen) == new


def test_another_head_unties_a_tied_model(checkpoint: Checkpoint, saved: Saved) -> None:
    """Also of a model that drafts with a copy, whose head is the model's."""
    folder = checkpoint(*FAMILIES["qwen2"][:1], **FAMILIES["qwen2"][1])
    weights = new_weights(folder)
    other = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].flip(1)}
    with Generator(saved(folder, weights), **OPTIONS) as gen:
        one = answers(gen)
    with Generator(saved(folder, other), **OPTIONS) as gen:  # its config.json says that it is tied
        two = answers(gen)
        gen.update_weights(weights)
        assert answers(gen) == one
    for speculate in (False, "int4"):
        with Generator(folder, speculate=speculate, **OPTIONS) as gen:
            gen.update_weights(sorted(other.items()))
            assert answers(gen) == two != one
            gen.update_weights(weights.items())
            assert answers(gen) == one
            gen.update_weights({"lm_head.weight": other["lm_head.weight"]}, partial=True)
            assert answers(gen) == two


def test_a_trainers_model_as_it_is(llama: Path) -> None:
    """Names and tensors come from the state dict and the parameters of a model of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)
    options = OPTIONS | {"dtype": "bfloat16"}
    with Generator(llama, load="dummy", **options) as gen, Generator(llama, **options) as other:
        for named in (model.state_dict().items(), model.named_parameters()):
            gen.update_weights(named)
            assert answers(gen) == answers(other)


def test_what_is_not_given_of_a_part_stays(llama: Path, saved: Saved) -> None:
    weights = new_weights(llama)
    some = {name: tensor for name, tensor in weights.items() if "layers.1." in name or "embed" in name}
    with Generator(saved(llama, old_weights(llama) | some), **OPTIONS) as other:
        mixed = answers(other)
    with Generator(llama, **OPTIONS) as gen:
        gen.update_weights(some, partial=True)
        assert answers(gen) == mixed
        gen.update_weights(((n, t) for n, t in weights.items() if n not in some), partial=True)
        gen.update_weights(old_weights(llama).items())
        gen.update_weights(some.items(), partial=True)
        assert answers(gen) == mixed


# Errors.

WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], dict[str, Any], type[Exception], str]] = {
    "unknown": (lambda w: w | {"model.layers.9.x": torch.ones(1)}, {}, ValueError, "unexpected tensor 'model.layers.9"),
    "missing": (lambda w: dict(list(w.items())[2:]), {}, ValueError, "missing 2 of "),
    "kind": (lambda w: 5, {}, TypeError, "must be a mapping, or an iterable of"),
    "no folder": (lambda w: "/weights", {}, ValueError, "there is no folder /weights, nor a safetensors file"),
    "no names": (lambda w: [*w.values()], {}, ValueError, r"no \(name, tensor\)$"),
    "same version": (lambda w: w, {"version": 0}, ValueError, "version is 0, which is the current one"),
    "odd version": (lambda w: w, {"version": True}, TypeError, "version must be an integer, not True"),
    "odd mode": (lambda w: w, {"in_flight": "stop"}, ValueError, "in_flight is 'stop'; it must be one of 'error'"),
}  # fmt: skip


def test_what_is_wrong_with_a_mapping_leaves_the_old_weights(llama: Path) -> None:
    with Generator(llama, **OPTIONS) as gen:
        old = answers(gen)
        for change, options, kind, text in WRONG.values():
            with pytest.raises(kind, match=text):
                gen.update_weights(change(new_weights(llama)), **options)
            assert gen.weight_version == 0
        assert answers(gen) == old
    with pytest.raises(RuntimeError, match="closed"):
        gen.update_weights(new_weights(llama))


def refuses(gen: Generator, text: str = "call update_weights with all of them") -> None:
    calls: list[Callable[[], object]] = [
        lambda: gen.generate([5, 6], SHORT),
        lambda: gen.add([5, 6], SHORT),
        lambda: gen.score([[5, 6]]),
        lambda: list(gen.stream([Request([5, 6], SHORT)])),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=text):
            call()
    assert not gen.unfinished


def breaking(items: Iterable[tuple[str, Tensor]], error: BaseException) -> Iterator[tuple[str, Tensor]]:
    """Yield five items, then raise the error."""
    for number, item in enumerate(items):
        if number == 5:
            raise error
        yield item


def test_what_is_wrong_with_tensors_as_they_come_needs_a_complete_update(llama: Path, saved: Saved) -> None:
    weights = new_weights(llama)
    broken: list[tuple[Any, type[BaseException]]] = [
        (iter([*weights.items(), ("x", torch.ones(1))]), ValueError),
        (iter(list(weights.items())[1:]), ValueError),
        (breaking(weights.items(), LookupError("lost")), LookupError),
        (breaking(weights.items(), KeyboardInterrupt()), KeyboardInterrupt),
    ]
    with Generator(saved(llama, weights), **OPTIONS) as other:
        new = answers(other)
    with Generator(llama, **OPTIONS) as gen:
        old = answers(gen)
        for given, kind in broken:
            with pytest.raises(kind) as raised:
                gen.update_weights(given)
            assert "nothing can be generated" in raised.value.__notes__[0]
            refuses(gen)
            with pytest.raises(RuntimeError, match="torn"):
                gen.update_weights(weights, partial=True)
            assert gen.update_weights(old_weights(llama)) == gen.weight_version
            assert answers(gen) == old
            gen.update_weights(weights)
            assert answers(gen) == new
    assert gen.weight_version == 2 * len(broken)


# Requests in flight.


def test_keep_goes_on_without_a_prefill_and_is_never_reused(llama: Path) -> None:
    with Generator(llama, **OPTIONS) as gen:
        alone = gen.generate(SYSTEM, LONG)[0].completions[0]
        first = gen.add(SYSTEM, replace(LONG, n=2, speculate=False))
        while gen.stats.generated_tokens < 24 + 2 * 6:
            gen.step()
        prefilled = gen.stats.prefilled_tokens
        gen.update_weights(new_weights(llama), version=5, in_flight="keep")
        done = {event.index: event for event in drain(gen) if event.finish_reason}
        assert gen.stats.prefilled_tokens == prefilled
        known = done[0].weight_versions[0][2] if done[0].weight_versions else 0
        assert known >= 6
        assert [done[index].weight_versions for index in range(2)] == [[(0, 0, known), (5, known, 24)]] * 2
        assert done[0].id == first
        assert done[0].recomputed == []
        assert gen.generate(SYSTEM, SHORT)[0].cached_tokens == 0
        whole = SYSTEM + alone.token_ids
        assert gen.generate(whole, SHORT)[0].cached_tokens == 40, "what the new weights have computed, and no more"


def test_kept_sequences_that_are_preempted_later_are_marked(llama: Path) -> None:
    params = replace(LONG, max_tokens=40, speculate=False)
    with Generator(llama, **OPTIONS | {"num_pages": 16, "max_model_len": 100}) as gen:
        let_pages_run_out(gen)
        for number in range(4):
            gen.add(random_ids(8, seed=number), params, number)
        while gen.stats.generated_tokens < 12:
            gen.step()
        assert gen.stats.preemptions == 0
        gen.update_weights(new_weights(llama), in_flight="keep")
        done = {event.id: event for event in drain(gen) if event.finish_reason}
        preemptions = gen.stats.preemptions
        again = gen.generate([random_ids(8, seed=number) for number in range(4)], params)
        assert gen.stats.preemptions > preemptions
    assert not any(completion.recomputed for output in again for completion in output.completions)
    assert done[0].recomputed == []
    marked = [spans for event in done.values() if (spans := event.recomputed)]
    assert 0 < len(marked) <= preemptions
    assert all(version == 1 and 0 < end < 40 for ((version, end),) in marked)


def told_by(events: Iterable[Event]) -> dict[Any, dict[int, Completion]]:
    """Return the completions of each request that its events add up to: {request id: {index: completion}}."""
    told: dict[Any, dict[int, Completion]] = {}
    for event in events:
        so_far = told.setdefault(event.id, {}).setdefault(event.index, Completion(event.index, [], "", ""))
        so_far.token_ids += event.token_ids
        so_far.extend(event)
        so_far.weight_versions = event.weight_versions or []
    return told


def test_recompute_goes_on_as_if_the_weights_had_always_been_new(llama: Path, saved: Saved) -> None:
    """In random schedules, the rest of each answer is what the new weights say after the tokens of the old weights."""
    weights = [old_weights(llama), new_weights(llama)]
    folders = [llama, saved(llama, weights[1])]
    source = random.Random(0)
    with Generator(folders[0], **OPTIONS) as old, Generator(folders[1], **OPTIONS) as new:
        for trial in range(2):
            options = OPTIONS | {"max_step_tokens": source.choice((8, 20, 60)), "num_pages": source.choice((18, 60))}
            prompts = [SYSTEM[: source.randint(10, 40)] + random_ids(source.randint(1, 20), seed=i) for i in range(4)]
            params = replace(LONG, temperature=source.choice((0.0, 0.9)), n=source.choice((1, 2)), seed=trial)
            with Generator(folders[0], **options) as gen:
                ids = [gen.add(prompt, params) for prompt in prompts]
                events = [event for _ in range(source.randint(1, 30)) for event in gen.step()]
                gen.update_weights(weights[1].items(), in_flight="recompute")
                told = told_by(events + drain(gen))
            before = {id: output.completions for id, output in zip(ids, old.generate(prompts, params), strict=True)}
            found = [
                (prompt, before[id][i], told[id][i]) for id, prompt in zip(ids, prompts, strict=True) for i in told[id]
            ]
            check_rests(new, params, found)


def check_rests(new: Generator, params: SamplingParams, found: list[tuple[list[int], Completion, Completion]]) -> None:
    """Check that each answer goes on as the new weights continue its tokens of the old weights.

    found: prompts, completions by only the old weights, and completions by both.
    """
    known = [sum(end for version, _, end in got.weight_versions if version == 0) for _, _, got in found]
    rests = new.generate(
        [prompt + got.token_ids[:count] for (prompt, _, got), count in zip(found, known, strict=True)],
        [replace(params, max_tokens=max(24 - count, 1)) for count in known],
    )
    for (_, before, got), count, rest in zip(found, known, rests, strict=True):
        assert got.weight_versions == [s for s in ((0, 0, count), (1, count, 24)) if s[1] < s[2]]
        later = rest.completions[got.index]
        for name in ("token_ids", "logprobs", "raw_logprobs"):
            assert getattr(got, name) == getattr(before, name)[:count] + getattr(later, name)[: 24 - count]


def test_a_stream_goes_on_over_updates(llama: Path) -> None:
    """Weights are replaced between two outputs, with others in flight and to come."""
    with Generator(llama, **OPTIONS | {"max_seqs": 3}) as gen:
        requests = (Request(random_ids(9, seed=i), replace(SHORT, max_tokens=3 + i), i) for i in range(12))
        seen = []
        for number, output in enumerate(gen.stream(requests)):
            spans = output.completions[0].weight_versions
            assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans)][: len(spans)]
            assert spans[-1][2] == len(output.completions[0].token_ids) == 3 + output.id  # type: ignore[operator]
            seen += [version for version, _, _ in spans]
            given = (new_weights, old_weights)[number % 2](llama)
            gen.update_weights(given, in_flight=("keep", "recompute")[number // 2 % 2])
        assert len({*seen}) >= 6
        check_idle(gen)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_an_update_that_is_cut_short_keeps_its_requests(mode: str, llama: Path) -> None:
    weights = new_weights(llama)
    with Generator(llama, **OPTIONS) as gen:
        old = gen.generate(SYSTEM, LONG)[0].completions[0]
        gen.add(SYSTEM, LONG, "a")
        said = [token for _ in range(4) for event in gen.step() for token in event.token_ids]
        with pytest.raises(KeyboardInterrupt):
            gen.update_weights(breaking(weights.items(), KeyboardInterrupt()), in_flight=mode)
        with pytest.raises(RuntimeError, match="torn"):
            gen.step()
        assert gen.update_weights(old_weights(llama), in_flight=mode) == 1
        events = drain(gen)
        said += [token for event in events for token in event.token_ids]
        assert said == old.token_ids
        (spans,) = [event.weight_versions for event in events if event.weight_versions]
        assert [version for version, _, _ in spans] == [0, 1]
        gen.add(SYSTEM, LONG, "b")
        with pytest.raises(KeyboardInterrupt):
            gen.update_weights(breaking(weights.items(), KeyboardInterrupt()), in_flight=mode)
        assert [output.id for output in gen.abort("b")] == ["b"]
        gen.update_weights(old_weights(llama))


def test_requests_that_an_update_aborts_keep_their_tokens(llama: Path) -> None:
    """A refused update aborts nothing."""
    with Generator(llama, **OPTIONS) as gen:
        old = gen.generate(SYSTEM, LONG)[0].completions[0].token_ids
        gen.add(SYSTEM, LONG)
        events = [event for _ in range(4) for event in gen.step()]
        with pytest.raises(ValueError, match="do not fit"):
            gen.update_weights({"x": torch.ones(1)}, in_flight="abort")
        with pytest.raises(
            ValueError, match=r"requests are in flight \(1\); finish or abort them, or pass in_flight='kee"
        ):
            gen.update_weights(new_weights(llama))
        events += gen.step()
        assert gen.update_weights(new_weights(llama), in_flight="abort") == 1
        events += gen.step()
        assert (gen.unfinished, events[-1].finish_reason) == (0, "abort")
        drawn = [token for event in events for token in event.token_ids]
        assert [event.weight_versions for event in events] == [None] * (len(events) - 1) + [[(0, 0, len(drawn))]]
        assert 3 < len(drawn) < 24
        assert drawn == old[: len(drawn)]
        check_idle(gen)
