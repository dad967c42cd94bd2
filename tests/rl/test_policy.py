"""A Policy: values with the bits of the draws, and the gradients of transformers."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import policy_ranks
import pytest
import torch
from conftest import Checkpoint, hf_model, random_ids
from families import FAMILIES, VOCAB, save_random_with_vision
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from fastgen import Generator, RequestOutput, SamplingParams
from fastgen.model import parameters
from fastgen.model.live_weights import LiveWeights
from fastgen.model.packed import packing
from fastgen.model.weights import UNUSED, text_name
from fastgen.rl.policy import Policy, pad
from fastgen.rl.policy.packs import make_packs

OPTIONS: dict[str, Any] = {"page_size": 16, "max_seqs": 6, "max_step_tokens": 48, "seed": 0}
DRAWN = SamplingParams(n=3, temperature=0.8, max_tokens=12, ignore_eos=True)
PROMPTS = [random_ids(length) for length in (37, 5, 48, 33)]


def flat(outputs: list[RequestOutput], name: str = "raw_logprobs") -> Tensor:
    """A field of all completions, one after the other."""
    return torch.tensor([x for output in outputs for each in output.completions for x in getattr(each, name)])


def sequences_of(outputs: list[RequestOutput]) -> tuple[list[list[int]], list[int]]:
    """The ids of all samples, and where their answers start."""
    pairs = [(output.prompt_token_ids, each.token_ids) for output in outputs for each in output.completions]
    return [prompt + answer for prompt, answer in pairs], [len(prompt) for prompt, _ in pairs]


def scores(gen: Generator, sequences: list[list[int]], start: int | list[int] = 1) -> Tensor:
    return torch.tensor([x for row in gen.score(sequences, start) for x in row])


def reference(
    model: Any, sequences: list[list[int]], starts: list[int], temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """Logprobs, entropies and logits by transformers, a sequence at a time."""
    found: list[tuple[Tensor, ...]] = []
    for ids, start in zip(sequences, starts, strict=True):
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].float()
        logprobs = (logits / temperature).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        found.append((logprobs.gather(1, torch.tensor(ids[start:])[:, None])[:, 0], entropies, logits))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def worst(policy: Policy, model: Any) -> float:
    """The largest distance of a gradient from that of transformers, relative to its length."""
    ours = dict(policy.named_parameters())
    theirs = {text_name(name): x for name, x in model.named_parameters() if not name.startswith(UNUSED)}
    assert ours.keys() == theirs.keys()
    found = []
    for name, parameter in theirs.items():
        gradient = ours[name].grad
        assert gradient is not None
        found.append(float((gradient - parameter.grad).norm() / (parameter.grad.norm() + 1e-6)))
    return max(found)


@pytest.fixture
def llama_gen(llama: Path) -> Iterator[Generator]:
    with Generator(llama, **OPTIONS) as gen:
        yield gen


@pytest.fixture
def unpacked_gen(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Generator]:
    """A Generator that reads its weights where a Policy trains them, as on a GPU."""
    monkeypatch.setattr(parameters, "packing", lambda dtype, deterministic: None)
    monkeypatch.setattr(LiveWeights, "in_place", True)
    with Generator(llama, dtype="bfloat16", **OPTIONS) as gen:
        yield gen


@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_the_bits_of_the_draws_and_gradients_those_of_transformers(
    name: str, checkpoint: Checkpoint
) -> None:
    kind, config = FAMILIES[name]
    folder = checkpoint(kind, **config)
    with Generator(folder, **OPTIONS) as gen:
        outputs = gen.generate(PROMPTS, DRAWN)
        sequences, starts = sequences_of(outputs)
        policy = Policy(gen, pack_tokens=150)
        output = policy(sequences, starts, entropy=True, logits=[40, 3, 17])
        assert torch.equal(output.logprobs.detach(), flat(outputs))
        assert torch.equal(policy.logprobs(sequences, starts, 0.8).detach(), flat(outputs, "untruncated_logprobs"))
        model = hf_model(folder).requires_grad_()
        model.zero_grad()
        expected = reference(model, sequences, starts)
        results = output.logprobs, output.entropy, output.logits
        wanted = expected[0], expected[1], expected[2][[40, 3, 17]]
        weights = [torch.randn(t.shape) for t in wanted]
        for ours, theirs in zip(results, wanted, strict=True):
            assert ours is not None
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        sum((x * w).sum() for x, w in zip(results, weights, strict=True)).backward()
        sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)).backward()
        assert worst(policy, model) < 1e-4
        model.requires_grad_(False)


def test_bits_in_bfloat16_also_of_draws_from_cached_prefixes_with_drafts(talker: Path) -> None:
    if packing(torch.bfloat16, deterministic=True) is None:
        pytest.skip("bfloat16 is not deterministic on this CPU")
    with Generator(talker, dtype="bfloat16", speculate="ngram", deterministic=True, **OPTIONS) as gen:
        for _ in range(2):
            outputs = gen.generate(PROMPTS, DRAWN)
        assert gen.stats.cached_tokens
        assert gen.stats.drafted
        sequences, starts = sequences_of(outputs)
        assert torch.equal(Policy(gen).logprobs(sequences, starts).detach(), flat(outputs))


def test_samples_of_a_prompt_share_its_full_pages() -> None:
    prompt = random_ids(40)
    sequences = [prompt + random_ids(10, seed) for seed in range(4)] + [random_ids(40, 9)]
    (pack,) = make_packs(sequences, [40] * 5, 16, 1000)
    assert pack.tokens == 32 + 4 * (50 - 32 - 1)  # the last sequence has nothing after its start
    assert pack.num_pages == 2 + 4 * 2
    packs = list(make_packs(sequences, [40] * 5, 16, 70))
    assert [each.tokens for each in packs] == [32 + 2 * 17, 32 + 2 * 17]
    assert sorted(place for each in packs for place in each.places) == list(range(40))


def test_a_commit_lets_the_next_draws_have_the_new_weights(llama_gen: Generator, llama: Path) -> None:
    policy = Policy(llama_gen)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for step in range(1, 4):
        outputs = llama_gen.generate(PROMPTS, DRAWN)
        sequences, starts = sequences_of(outputs)
        logprobs = policy.logprobs(sequences, starts)
        assert torch.equal(logprobs.detach(), flat(outputs))
        logprobs.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert policy.commit(version=10 * step) == llama_gen.weight_version == 10 * step
    last = llama_gen.generate(PROMPTS, DRAWN)
    with Generator(llama, **OPTIONS) as fresh:
        fresh.update_weights(policy.state_dict())
        assert torch.equal(flat(last), scores(fresh, *sequences_of(last)))


def test_a_forward_pass_after_an_optimizer_step_has_the_new_weights(llama_gen: Generator) -> None:
    """Also after the step of a fused optimizer, which torch's count of writes does not show."""
    policy, ids = Policy(llama_gen), [random_ids(30)]
    before = policy.logprobs(ids)
    before.sum().backward()
    torch.optim.AdamW([policy.get_parameter("model.norm.weight")], lr=1e-4, fused=True).step()
    after = policy.logprobs(ids)
    assert not torch.equal(before, after)
    assert llama_gen.score(ids, 1) == [after.tolist()]


def test_a_forward_pass_sees_writes_that_torch_does_not_count(llama_gen: Generator) -> None:
    policy, ids = Policy(llama_gen), [random_ids(30)]
    before = policy.logprobs(ids)
    policy.get_parameter("model.embed_tokens.weight").data.mul_(2)
    assert not torch.equal(policy.logprobs(ids), before)
    assert llama_gen.score(ids, 1) == [policy.logprobs(ids).tolist()]


def test_torchs_default_dtype_changes_no_dtype(llama_gen: Generator) -> None:
    outputs = llama_gen.generate(PROMPTS[:1], DRAWN)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal((padded := pad(outputs)).raw_logprobs[padded.mask], flat(outputs).float())
        assert Policy(llama_gen).logprobs([]).dtype == torch.float32
        policy = Policy(llama_gen, adapter={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_changes_no_bit(llama_gen: Generator) -> None:
    policy, ids, found = Policy(llama_gen), [random_ids(30)], []
    for enabled in (False, True):
        policy.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled):
            logprobs = policy.logprobs(ids)
            logprobs.sum().backward()
        found.append([logprobs.detach(), *(parameter.grad for parameter in policy.parameters())])
    assert all(map(torch.equal, *found))


def test_a_backward_pass_that_cannot_be_right_is_an_error(llama_gen: Generator) -> None:
    policy, ids = Policy(llama_gen), [random_ids(30)]
    first = policy.get_parameter("model.embed_tokens.weight")
    loss = policy.logprobs(ids).sum()
    with pytest.raises(RuntimeError, match="leave create_graph out"):
        torch.autograd.grad(loss, first, create_graph=True)
    loss = policy.logprobs(ids).sum()
    llama_gen.sleep("weights")
    with pytest.raises(RuntimeError, match="asleep"):
        loss.backward(retain_graph=True)
    llama_gen.wake()
    loss.backward(retain_graph=True)
    torch.optim.SGD([first], 0.1).step()
    with pytest.raises(RuntimeError, match="call backward before"):
        loss.backward()
    loss = policy.logprobs(ids).sum()
    llama_gen.update_weights(policy.state_dict())
    with pytest.raises(RuntimeError, match="call backward before"):
        loss.backward()
    policy.commit()
    loss = policy.logprobs(ids).sum()
    torch.optim.AdamW([first], lr=1e-4, fused=True).step()  # torch does not count these writes
    with pytest.raises(RuntimeError, match="call backward before"):
        loss.backward()
    loss = policy.logprobs(ids).sum()
    llama_gen.close()
    with pytest.raises(RuntimeError, match="closed"):
        loss.backward()


def test_weights_that_others_have_updated_are_not_a_policys(llama_gen: Generator) -> None:
    policy, ids = Policy(llama_gen), [random_ids(30)]
    before = policy.logprobs(ids)
    llama_gen.update_weights({name: 2 * tensor for name, tensor in policy.state_dict().items()})
    with pytest.raises(RuntimeError, match="updated after"):
        policy.logprobs(ids)
    policy.commit()
    assert torch.equal(policy.logprobs(ids), before)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    Policy(llama_gen, adapter=config)
    with pytest.raises(ValueError, match="has an adapter"):
        Policy(llama_gen, adapter=config)


def test_parameters_stay_where_the_policy_has_made_them(llama_gen: Generator) -> None:
    policy, ids = Policy(llama_gen), [random_ids(30)]
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            copied(policy)
    state = {name: 2 * tensor for name, tensor in policy.to("cpu").float().state_dict().items()}
    policy.load_state_dict(state)
    assert torch.equal(policy.logprobs(ids).detach(), scores(llama_gen, ids))
    policy.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="was replaced"):
        policy.commit()
    with pytest.raises(RuntimeError, match="was replaced"):
        Policy(llama_gen).half().logprobs(ids)


@pytest.mark.parametrize("share", [True, False])
def test_float32_parameters_over_a_bfloat16_engine_are_rounded_once(talker: Path, share: bool) -> None:
    with Generator(talker, dtype="bfloat16", **OPTIONS) as gen:
        policy = Policy(gen, dtype=None if share else torch.float32)
        own = torch.bfloat16 if share else torch.float32
        assert {p.dtype for p in policy.parameters()} == {own}
        sequences = [random_ids(30), random_ids(21)]
        policy.logprobs(sequences).sum().backward()
        assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {own}
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
        policy.commit()
        assert torch.equal(policy.logprobs(sequences).detach(), scores(gen, sequences))
        rounded = {name: p.detach().bfloat16() for name, p in policy.named_parameters()}
        before = gen.score(sequences, 1)
        gen.update_weights(rounded)
        assert gen.score(sequences, 1) == before


def test_trained_weights_are_saved_in_a_folder_that_transformers_and_a_generator_load(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    kind, config = FAMILIES["qwen2"]
    assert config["tie_word_embeddings"]
    folder, ids = checkpoint(kind, **config), [random_ids(30)]
    with Generator(folder, dtype="bfloat16", **OPTIONS) as gen:
        policy = Policy(gen, dtype=torch.float32)
        for parameter in policy.parameters():
            parameter.data.add_(1e-2)
        logprobs = policy.logprobs(ids).tolist()
        AutoModelForCausalLM.from_pretrained(gen.folder).save_pretrained(tmp_path, state_dict=policy.state_dict())
        model = hf_model(tmp_path)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in policy.state_dict().items())
    with Generator(tmp_path, dtype="bfloat16", **OPTIONS) as gen:
        assert gen.score(ids, 1) == [logprobs]


def test_an_adapter_is_trained_and_merged(llama_gen: Generator, llama: Path) -> None:
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    policy = Policy(llama_gen, adapter=config)
    names = dict(policy.named_parameters())
    assert len(names) == 2 * 2 * 3
    sequences, optimizer = [random_ids(30), random_ids(21)], torch.optim.SGD(policy.parameters(), lr=1.0)
    base = llama_gen.score(sequences, 1)
    for _ in range(2):  # B is 0 at first, and with it the gradient of A
        optimizer.zero_grad()
        policy.logprobs(sequences).mean().backward()
        optimizer.step()
    policy.commit()
    assert llama_gen.score(sequences, 1) != base
    assert torch.equal(policy.logprobs(sequences).detach(), scores(llama_gen, sequences))
    optimizer.zero_grad()
    policy.logprobs(sequences).mean().backward()
    # The same by transformers, with weights that autograd merges.
    model, factors = hf_model(llama), {n: p.detach().clone().requires_grad_() for n, p in names.items()}
    merged = {}
    for name, weight in model.named_parameters():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in factors:
            merged[name] = weight.detach() + 2 * factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]
    calls = [torch.func.functional_call(model, merged, torch.tensor([ids])).logits[0, :-1] for ids in sequences]
    targets = torch.tensor([token for ids in sequences for token in ids[1:]])
    torch.cat(calls).log_softmax(-1).gather(1, targets[:, None]).mean().backward()
    for name, parameter in names.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, factors[name].grad, atol=1e-6, rtol=1e-3)
    llama_gen.update_adapter(None)
    assert llama_gen.score(sequences, 1) == base


def test_frozen_parameters_get_no_gradient(llama_gen: Generator) -> None:
    policy = Policy(llama_gen)
    frozen = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    for name in frozen:
        policy.get_parameter(name).requires_grad_(False)
    policy.logprobs([random_ids(20)]).sum().backward()
    assert {name for name, p in policy.named_parameters() if p.grad is None} == set(frozen)


def test_empty_answers_have_gradients_of_zero(llama_gen: Generator) -> None:
    policy = Policy(llama_gen)
    for sequences, start in (([], 1), ([[5, 6], [7]], [2, 1])):
        policy.zero_grad()
        output = policy(sequences, start, entropy=True, logits=[])
        assert output.logits.shape == (0, VOCAB)
        (output.logprobs.sum() + output.entropy.sum() + output.logits.sum()).backward()
        assert not any(parameter.grad.any() for parameter in policy.parameters())


def test_results_can_be_changed_in_place(llama_gen: Generator) -> None:
    policy, ids, gradients = Policy(llama_gen), [random_ids(20)], []
    for change in (lambda t: t / 2, lambda t: t.div_(2)):
        policy.zero_grad()
        output = policy(ids, logits=[3])
        (change(output.logprobs).sum() + change(output.logits).log_softmax(-1)[0, 5]).backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    assert all(map(torch.equal, *gradients))


def test_compilers_leave_a_policy_as_it_is(llama_gen: Generator) -> None:
    policy, ids, graphs = Policy(llama_gen), [random_ids(20)], CompileCounter()
    compiled = torch.compile(policy, backend=graphs)
    assert torch.equal(compiled(ids).logprobs, policy.logprobs(ids))
    assert graphs.frame_count == 0


def test_a_policy_made_in_inference_mode_can_be_trained(llama_gen: Generator) -> None:
    with torch.inference_mode():
        policies = [
            Policy(llama_gen),
            Policy(llama_gen, adapter={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}),
        ]
    policies[1].logprobs([random_ids(20)]).sum().backward()
    policies[0].commit()
    policies[0].logprobs([random_ids(20)]).sum().backward()
    assert all(parameter.grad is not None for policy in policies for parameter in policy.parameters())


def test_weights_that_were_trained_in_place_draw_nothing_until_they_are_committed(unpacked_gen: Generator) -> None:
    policy = Policy(unpacked_gen)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=True)
    commits = policy.commit, lambda: policy.logprobs([[5, 6]]), lambda: unpacked_gen.update_weights(policy.state_dict())
    for step, note_changes in enumerate(commits, 1):
        outputs = unpacked_gen.generate(PROMPTS, DRAWN)
        logprobs = policy.logprobs(*sequences_of(outputs))
        assert torch.equal(logprobs.detach(), flat(outputs))  # also of prompts whose pages were cached
        logprobs.mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="call commit"):
            unpacked_gen.generate(PROMPTS, DRAWN)
        note_changes()
        assert unpacked_gen.weight_version == step


def test_trained_weights_draw_nothing_also_after_a_change_to_a_reference_and_back(unpacked_gen: Generator) -> None:
    policy = Policy(unpacked_gen)
    own = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    unpacked_gen.update_weights({name: tensor / 2 for name, tensor in own.items()})
    unpacked_gen.update_weights(own)
    policy.logprobs([[5, 6, 7]]).mean().backward()
    torch.optim.AdamW(policy.parameters(), lr=1e-2).step()
    with pytest.raises(RuntimeError, match="call commit"):
        unpacked_gen.generate(PROMPTS, DRAWN)


def test_an_adapter_merged_by_others_does_not_become_a_policys(unpacked_gen: Generator) -> None:
    base, ids = Policy(unpacked_gen), [random_ids(30)]
    before = base.logprobs(ids)
    adapted = Policy(unpacked_gen, adapter={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
    for parameter in adapted.parameters():
        parameter.data.add_(0.1)
    after = adapted.logprobs(ids)
    for use in (lambda: base.logprobs(ids), base.commit):
        with pytest.raises(RuntimeError, match=r"call the Generator's update_adapter\(None\)"):
            use()
    unpacked_gen.update_adapter(None)
    assert torch.equal(base.logprobs(ids), before)
    adapted.commit()
    assert torch.equal(adapted.logprobs(ids), after)
    assert not torch.equal(before, after)


def test_requests_in_flight_go_on_beside_a_policy(llama_gen: Generator) -> None:
    expected = llama_gen.generate(PROMPTS[0], SamplingParams(max_tokens=20, seed=1))[0].completions[0].token_ids
    policy = Policy(llama_gen)
    llama_gen.add(PROMPTS[0], SamplingParams(max_tokens=20, seed=1))
    events = [*llama_gen.step(), *llama_gen.step(), *llama_gen.step()]
    policy.logprobs(PROMPTS).sum().backward()
    while llama_gen.unfinished:
        events += llama_gen.step()
    assert [token for event in events for token in event.token_ids] == expected


def test_a_forward_pass_beside_another_threads_call_is_an_error(llama_gen: Generator) -> None:
    policy, ids, errors = Policy(llama_gen), [random_ids(20)], list[RuntimeError]()

    def use() -> None:
        try:
            policy.logprobs(ids)
        except RuntimeError as error:
            errors.append(error)

    def prompts() -> Iterator[list[int]]:
        other = threading.Thread(target=use)
        other.start()
        other.join()
        yield from ids

    assert len([*llama_gen.stream(prompts(), SamplingParams(max_tokens=2))]) == 1
    assert "another thread is using this Generator" in str(errors[0])
    use()
    assert len(errors) == 1


def test_what_cannot_be_scored_or_trained_is_an_error(llama_gen: Generator, llama: Path) -> None:
    policy = Policy(llama_gen)
    for sequences, start, words in (
        ([[5] * 600], 1, "context"),
        ([[5, VOCAB]], 1, "outside the vocabulary"),
        ([[5, 6]], 0, "from 1 to"),
        ([[5, 6]], 3, "from 1 to"),
        ([[5, 6]], [1, 1], "1 sequences and 2 starts"),
        ([[]], 1, "empty"),
    ):
        with pytest.raises(ValueError, match=words):
            policy.logprobs(sequences, start)
    with pytest.raises(ValueError, match="temperature"):
        policy.logprobs([[5, 6]], temperature=0)
    with pytest.raises(ValueError, match="index 1; there are 1 logprobs"):
        policy([[5, 6]], logits=[1])
    for logits in ([0.5], torch.tensor([True]), 0, "0"):
        with pytest.raises(TypeError, match="must be the indices"):
            policy([[5, 6]], logits=logits)
    starts = torch.tensor([2, 1])
    assert torch.equal(policy.logprobs([[5, 6, 7], [5, 6]], starts), policy.logprobs([[5, 6, 7], [5, 6]], [2, 1]))
    with pytest.raises(TypeError, match="needs a Generator"):
        Policy(llama)  # type: ignore[arg-type]
    assert policy.logprobs([[5, 6]], 2).shape == policy.logprobs([]).shape == (0,)
    with pytest.raises(ValueError, match="dtype"):
        Policy(llama_gen, dtype=torch.float16)
    with pytest.raises(ValueError, match="pack_tokens"):
        Policy(llama_gen, pack_tokens=0)
    llama_gen.sleep("weights")
    with pytest.raises(RuntimeError, match="asleep"):
        policy.logprobs([[5, 6]])
    llama_gen.wake()
    llama_gen.close()
    with pytest.raises(RuntimeError, match="closed"):
        policy.logprobs([[5, 6]])


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_the_text_of_a_vision_model_is_trained(name: str, tmp_path: Path) -> None:
    """transformers has no causal model of these texts, so a head is put on its text model."""
    model = save_random_with_vision(name, tmp_path)
    ids = random_ids(40)
    with Generator(tmp_path, **OPTIONS) as gen:
        policy = Policy(gen)
        logprobs = policy.logprobs([ids], [1])
        assert logprobs.tolist() == gen.score([ids])[0][1:]
        logprobs.sum().backward()
        theirs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(1)
        theirs.gather(1, torch.tensor(ids)[1:, None]).sum().backward()
        expected = {text_name(each): parameter.grad for each, parameter in model.named_parameters()}
        for each, parameter in policy.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[each], atol=2e-3, rtol=1e-3)


def test_rope_that_the_context_stretches_is_an_error(checkpoint: Checkpoint) -> None:
    """transformers stretches it by the length of a sequence, so its gradients would be those of another model."""
    kind, config = FAMILIES["phi4_mini"]
    folder = checkpoint(kind, **config | {"original_max_position_embeddings": 64})
    message = "stretches rope for its context of 512 tokens, .*give max_model_len=64"
    with Generator(folder, **OPTIONS) as gen, pytest.raises(ValueError, match=message):
        Policy(gen)


def test_samples_become_padded_tensors(llama_gen: Generator) -> None:
    outputs = llama_gen.generate(PROMPTS[:2], DRAWN)
    padded = pad(outputs, pad_id=7, length=64)
    sequences, starts = sequences_of(outputs)
    for row, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
        assert padded.ids[row].tolist() == ids + [7] * (64 - len(ids))
        assert padded.mask[row].nonzero().flatten().tolist() == list(range(start, len(ids)))
    assert torch.equal(padded.raw_logprobs[padded.mask], flat(outputs))
    assert torch.equal(padded.logprobs[padded.mask], flat(outputs, "logprobs"))
    assert padded.versions[padded.mask].tolist() == [0] * len(flat(outputs))
    assert set(padded.versions[~padded.mask].tolist()) == {-1}
    with pytest.raises(ValueError, match="at least 49"):
        pad(outputs, length=48)
    assert math.prod(pad([]).ids.shape) == 0


@pytest.mark.long
def test_ranks_of_data_parallel_training_take_one_step_together(llama: Path, tmp_path: Path) -> None:
    """Gradients are the mean over two ranks, whose weights have the same bits after each step. Each rank has a part of
    the optimizer's states."""
    out, store, program = tmp_path / "state", tmp_path / "store", Path(policy_ranks.__file__)
    ranks = [subprocess.Popen([sys.executable, program, store, str(rank), "2", llama, out, "cpu"]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    (state, count), (other, others) = (torch.load(f"{out}{rank}") for rank in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())
    with Generator(llama, page_size=16) as gen:
        policy = Policy(gen)
        assert count + others == sum(parameter.numel() for parameter in policy.parameters())
        assert max(count, others) < 0.6 * (count + others)
        optimizer = torch.optim.AdamW(policy.parameters(), **policy_ranks.ADAM)
        for sequences in policy_ranks.STEPS:
            (policy.logprobs(sequences).sum() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, tensor in policy.state_dict().items():
            torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)
