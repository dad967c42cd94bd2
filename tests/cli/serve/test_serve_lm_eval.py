"""lm-evaluation-harness as a client of fgserve: its results are those of transformers.

It needs `pip install 'lm_eval[api]==0.4.13'`, which brings some forty packages and is in no extra for that reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import hf_logits, hf_model
from serving import FGSERVE, ROOT, Server

pytestmark = pytest.mark.long

TINY = ROOT / "fastgen" / "tiny"
CONTEXT = 40  # as the harness assumes, so that a rolling task takes several windows

TASKS = """
task: choose
output_type: multiple_choice
doc_to_text: "<s><|user|>{{question}}<|end|><|assistant|>"
doc_to_choice: "{{[answer, wrong]}}"
doc_to_target: 0
target_delimiter: ""
---
task: say
output_type: generate_until
doc_to_text: "<s><|user|>{{question}}<|end|><|assistant|>"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
---
task: chat
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
---
task: roll
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{answer}}. {{answer}}. {{wrong}}? No: {{question}} {{answer}}! d\u00e9j\u00e0 vu"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""


class Harness:
    """lm_eval with tasks over a local file, offline."""

    def __init__(self, folder: Path) -> None:
        import lm_eval
        from lm_eval.tasks import TaskManager

        docs = [(f"what is {a} + {b}?", f"{a} + {b} = {a + b}", f"{a} + {b} = {a + b + 10}")
                for a, b in ((12, 30), (7, 8), (21, 45), (33, 9), (50, 50), (64, 17), (5, 90), (48, 48))]  # fmt: skip
        rows = [dict(zip(("question", "answer", "wrong"), doc, strict=True)) for doc in docs]
        (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"data_files": {"test": str(folder / "docs.jsonl")}}
        data = f"dataset_path: json\ndataset_kwargs: {json.dumps(source)}\ntest_split: test\n"
        for number, task in enumerate(TASKS.split("---")):
            (folder / f"{number}.yaml").write_text(task + data)
        self._tasks = TaskManager(include_path=str(folder), include_defaults=False)
        self._evaluate = lm_eval.simple_evaluate

    def run(self, *tasks: str, model: Any, **options: Any) -> tuple[dict[str, dict[str, float]], dict[str, list[Any]]]:
        """Return the metrics of tasks, and the model's answers to their requests, in order."""
        seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
        out = self._evaluate(
            model=model, tasks=list(tasks), task_manager=self._tasks, bootstrap_iters=0, log_samples=True, **seeds,
            **options,
        )  # fmt: skip
        metrics = {
            task: {name: value for name, value in found.items() if name.endswith(",none") and "stderr" not in name}
            for task, found in out["results"].items()
        }
        answers = {task: [sample["resps"] for sample in found] for task, found in out["samples"].items()}
        return metrics, answers


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        patch.setenv("OPENAI_API_KEY", "secret")
        pytest.importorskip("lm_eval", reason="pip install 'lm_eval[api]==0.4.13'")
        yield Harness(folder)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Server(FGSERVE, "--api-key", "secret").await_ready() as server:
        yield server.url


@pytest.fixture(scope="module")
def expected(harness: Harness) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of transformers."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)

    class Reference(TemplateLM):
        eot_token_id = tokenizer.eos_token_id
        prefix_token_id = tokenizer.bos_token_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer(string, add_special_tokens=False)["input_ids"]

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            found = []
            for _, context, continuation in requests:
                rows = hf_logits(TINY, [*context, *continuation])[len(context) - 1 : -1].log_softmax(-1)
                wanted = torch.tensor(continuation)
                greedy = bool((rows.argmax(-1) == wanted).all())
                found.append((rows.gather(1, wanted[:, None]).sum().item(), greedy))
            return found

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            found = []
            for request in requests:
                windows = utils.get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, CONTEXT - 2, 1
                )  # the API's client takes off one token to be generated, and one of context
                pairs = [(None, *utils.make_disjoint_window(window)) for window in windows]
                assert len(pairs) > 1
                found.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
            return found

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            found = []
            for prompt, options in (request.args for request in requests):
                ids = torch.tensor([self.tok_encode(prompt)])
                limit = options["max_gen_toks"]
                said = hf_model(TINY).generate(ids, max_new_tokens=limit, do_sample=False, temperature=None)
                text = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
                found.append(min((text.split(stop)[0] for stop in options["until"]), key=len))
            return found

    return harness.run("choose", "say", "roll", model=Reference())


BACKENDS: dict[str, dict[str, Any]] = {
    "a local tokenizer": {"tokenizer_backend": "huggingface", "tokenizer": str(TINY)},
    "the server's tokenizer": {"tokenizer_backend": "remote", "num_concurrent": 4},
    "batches": {"tokenizer_backend": "remote", "batch_size": 4},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_completions_come_to_what_transformers_computes(
    backend: str, harness: Harness, url: str, expected: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    arguments = {"model": "tiny", "base_url": f"{url}/v1/completions", "max_length": CONTEXT, "max_retries": 1}
    arguments["auth_token"] = "secret"
    arguments |= BACKENDS[backend]
    metrics, answers = harness.run("choose", "say", "roll", model="local-completions", model_args=arguments)
    wanted_metrics, wanted = expected
    for task, values in wanted_metrics.items():
        assert metrics[task] == pytest.approx(values, rel=1e-3), task
    assert answers["say"] == wanted["say"]
    for task in ("choose", "roll"):
        for own, others in zip(numbers(answers[task]), numbers(wanted[task]), strict=True):
            assert own == pytest.approx(others, abs=1e-3)
    assert wanted_metrics["say"]["exact_match,none"] > 0.8, "the model can do these sums"
    assert [True] in [[greedy for _, greedy in sample[0]] for sample in wanted["choose"]]


def numbers(answers: Any) -> list[float]:
    """Return all numbers of nested lists and tuples; booleans are numbers."""
    if isinstance(answers, list | tuple):
        return [number for part in answers for number in numbers(part)]
    return [float(answers)]


def test_chat_completions_run(harness: Harness, url: str) -> None:
    arguments = {"model": "tiny", "base_url": f"{url}/v1/chat/completions", "max_retries": 1}
    metrics, answers = harness.run(
        "chat", model="local-chat-completions", model_args=arguments, apply_chat_template=True
    )
    assert len(answers["chat"]) == 8
    assert metrics["chat"]["exact_match,none"] > 0.8
