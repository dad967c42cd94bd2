"""Apply plausible bugs, one at a time, to a copy of the repository, and run the tests that should find them.

    python scripts/check/mutate.py --json scripts/results/mutants.json

A bug is found if a test fails. The status is 0 only if every bug is found; a bug whose text is no longer in its file is
an error, so that the table stays true.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 120  # of a test; a bug may let it hang
ENGINE = "scheduler random_schedules admission pages prefix_cache"
SCHEDULES = " ".join(f"tests/engine/test_{name}.py" for name in ENGINE.split())
CALLS = "tests/test_generator.py tests/engine/test_outputs.py tests/engine/test_interrupts.py"
LOADING = "tests/model/test_loader.py tests/model/test_loader_slices.py"

# (file, tests): the bugs, each as (text, other text).
MUTANTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    ("engine/options.py", "tests/engine/test_options.py"): [
        ("max(limit - decodes, min(limit, MIN_PREFILL_TOKENS))", "max(limit, min(limit, MIN_PREFILL_TOKENS))"),
        ("if decodes else room", "if room else room"),
    ],
    ("engine/outputs.py", CALLS): [
        ("            end -= 1  # a stop id", "            end -= 0  # a stop id"),
        ("upto = min(self.ids_read + 1, end) if params.stop_strings else end", "upto = end"),
        ("may_stop=upto > params.min_tokens", "may_stop=upto >= params.min_tokens"),
        ("self.emitted = (sequence.output_len, len(text))", "self.emitted = (sequence.output_len, 0)"),
    ],
    ("engine/inputs.py", CALLS + " tests/test_rollouts.py"): [
        ("max_len=min(most, self.context),", "max_len=min(most, self.context) + (params.max_tokens is None),"),
        ("room = context if params.max_tokens == 0 else context - 1", "room = context"),
        ("return resume.seed", "return 0"),
    ],
    ("engine/interrupts.py", CALLS): [
        ("            self._pending = False\n", ""),
        ("return max(at for", "return min(at for"),
        ("signal.signal(signal.SIGINT, self._found[self._outer()])", "pass"),
    ],
    ("generator.py", "tests/test_updating.py"): [
        ('if in_flight == "recompute":', 'if in_flight == "keep":'),
    ],
    ("engine/loop.py", CALLS + " tests/test_robustness.py"): [
        ("self.events = [event for event in self.events if event.id != active.id]", "pass"),
        ('sequence.finish_reason, sequence.stop_reason = "stop", stop', "pass"),
        ("            self.scheduler.reset(self.owners)\n", "            pass\n"),
        ("        finally:\n            self.stepping = False\n", ""),
        ("        self.abort(late)\n", ""),
        ("        if self.stepping:\n            raise", "        if False:\n            raise"),
    ],
    ("text/tokenizer.py", "tests/text/test_tokenizer.py"): [
        ("range(min(len(text), len(stop) - 1), 0, -1)", "range(1, min(len(text), len(stop) - 1) + 1)"),
        ("text[: at + len(stop) * self._shown], stop", "text[:at], stop"),
        ("if text.endswith(BROKEN) and not last:", "if text.endswith(BROKEN):"),
        ("at, stop = min(found, key=lambda pair: pair[0])", "at, stop = found[0]"),
    ],
    ("model/sampler.py", "tests/model/test_sampler.py"): [
        ("held < held[:, -1:] * rows.top_p", "held <= held[:, -1:] * rows.top_p"),
        ("torch.minimum(short + 1, count)", "torch.minimum(short.clamp(min=1), count)"),
        ("best + rows.min_p.log() * temperature", "best + rows.min_p.log()"),
        ("rows.prompt_len < rows.min_tokens", "rows.prompt_len <= rows.min_tokens"),
        ("counts * rows.frequency - in_output * rows.presence", "counts * rows.presence - in_output * rows.frequency"),
        ("torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)", "logits / rows.repetition"),
    ],
    ("model/config.py", "tests/model/test_model_config.py"): [
        ("size if layer >= first else 0", "size if layer > first else 0"),
        ('ids = generation.get("eos_token_id")', "ids = None"),
        ("low=1e-6, high=1e6", "high=1e6"),
    ],
    ("model/rope.py", "tests/model/test_rope.py tests/model/test_model_config.py"): [
        ("rope.low_freq_factor, plain / rope.factor, unless_long", "rope.low_freq_factor, plain, unless_long"),
    ],
    ("model/loader.py", LOADING): [
        ("(file.get_tensor(name))", "((t := file.get_tensor(name)).half() if t.dtype == torch.bfloat16 else t)"),
    ],
    ("model/weights.py", LOADING + " tests/model/test_weights.py"): [
        ("tensor.narrow(self.dim, self.start,", "tensor.narrow(self.dim, 0,"),
        ("if name in self._seen:", "if False:"),
    ],
    ("model/parameters.py", "tests/model/test_parameters.py"): [
        ('Module(attention + "k_proj", "qkv"', 'Module(attention + "v_proj", "qkv"'),
        ("return rank * parts // ranks * shape[self.split]", "return rank % parts * shape[self.split]"),
    ],
    ("model/attention/reference.py", "tests/model/test_attention_reference.py"): [
        ("(ahead >= (window or math.inf))", "(ahead > (window or math.inf))"),
    ],
    ("model/attention/cpu.py", "tests/model/test_attention_cpu.py"): [
        ("kv_head, of_group = np.divmod(np.arange(self._heads), group)",
         "of_group, kv_head = np.divmod(np.arange(self._heads), heads)"),
        ("hidden.logical_or_(ahead >= window)", "hidden.logical_or_(ahead > window)"),
    ],
    ("kernels/drafts.py", "tests/kernels/test_kernels_drafts.py tests/test_speculation.py"): [
        ("kept = tl.min(tl.where(wrong, number, BLOCK_W)) + 1", "kept = tl.min(tl.where(wrong, number, BLOCK_W)) + 2"),
    ],
    ("async_engine/loop.py", "tests/async_engine/test_async_loop.py tests/async_engine/test_async_client.py"): [
        ("                self._gen.abort(message.numbers)", "                pass"),
    ],
    ("model/host_tier.py", "tests/model/test_host_tier.py"): [
        ("order, pages[start : start + len(part)])", "order, pages[: len(part)])"),
    ],
    ("request.py", "tests/test_request.py tests/test_generator.py tests/test_updating.py"): [
        ("self.min_tokens > self.max_tokens:", "self.min_tokens >= self.max_tokens:"),
        ("self.versions[-1][0] != version:", "self.versions[-1][0] == version:"),
    ],
    ("engine/prompt_scores.py", SCHEDULES): [
        ("first = max(start, sequence.score_start - 1)", "first = max(start, sequence.score_start)"),
    ],
    ("engine/scheduler.py", SCHEDULES): [
        ("sequence.computed -= rows - kept", "sequence.computed -= rows - kept + 1"),
        ("sequence.pending += sample\n", "sequence.pending += 1\n"),
        ("self.config.page_size, sequence.max_len - 1)", "self.config.page_size, sequence.max_len)"),
        ("self.waiting.move_to_end(sequence, last=False)", "self.waiting.move_to_end(sequence)"),
        ("victim = self.running[-1]", "victim = self.running[0]"),
        ("sequence.output_len > sequence.params.min_tokens:", "sequence.output_len >= sequence.params.min_tokens:"),
        ("sequence.prefill_len == end < sequence.max_len", "sequence.prefill_len == end"),
        ("            self._leave(sequence)\n        elif sequence in", "            pass\n        elif sequence in"),
        ("min(len(sequence.token_ids), sequence.computed))", "sequence.computed)"),
        ("sequence.drawn.cut(sequence.output_len)", "pass"),
        ("copy = known + 1 < sequence.max_len and", "copy = False and"),
        ("self._page_updates = [update for update in self._page_updates if update[0] != lane]", "pass"),
        ("sequence.score_start) - 1)", "sequence.score_start))"),
        ("            sequence.tip = None\n        self.pages", "            pass\n        self.pages"),
        ("self._pause = RETRY_STEPS", "self._pause = 30"),
        ("self._masked.discard(lane)", "pass"),
        ("counted = tuple(sequence.token_ids) if", "counted = tuple(sequence.token_ids[: sequence.prompt_len]) if"),
        ("sequence.score_start is not None or sequence.max_len <= known or", "sequence.max_len <= known or"),
        ('if reason in ("stop", "length") and sequence.output_len:', "if sequence.output_len:"),
        ("if (masked or token < 0) and not accepts", "if masked and not accepts"),
        ("self._count_cached(sequence, known - 1)", "self._count_cached(sequence, known)"),
        ("            budget -= count\n", "            budget -= 1\n"),
        ("        while self.prefilling:\n", "        if self.prefilling:\n"),
        ("spare = budget - min(oldest.prefill_left, reserve)", "spare = budget"),
        ("return tokens[at:end] == others[at:end] and", "return False and"),
    ],
    ("engine/pages.py", SCHEDULES): [
        ("self._refs[node.page] += 1", "self._refs[node.page] = 1"),
        ("            self._refs[page] += 1\n", "            pass\n"),
        ("if count > self.available:", "if count > self.available + 1:"),
        ("for page in reversed(pages):", "for page in pages:"),
        ("        self._fresh.pop(page, None)\n", ""),
        ("(node for node in self._host if node.host_page not in self._loads)", "iter(self._host)"),
        ("self._host.move_to_end(node)  # behind", "pass  # behind"),
        ("        self.root = Node()\n        for node", "        for node"),
        ("        self._saves.clear()\n        self._free_host_pages", "        self._free_host_pages"),
        ("range(size, limit + 1, size)", "range(size, limit, size)"),
        ("                return None\n            node = Node", "                return tip\n            node = Node"),
        ("self._copies.append((source[-1], page))", "self._copies.append((source[0], page))"),
    ],
    ("engine/admission.py", SCHEDULES): [
        ("self.estimate.predict(sequence)), now + 1)", "self.estimate.predict(sequence)), now)"),
        ("count(sequence.max_len - 1)))", "count(sequence.max_len)))"),
        ("if len(sequence.pages) >= sequence.reserved:", "if len(sequence.pages) > sequence.reserved:"),
        ("self.weight * (tokens - self.average)", "self.weight * tokens"),
        ("LEAVING_STEPS = 4", "LEAVING_STEPS = 0"),
        ("return self.reserved_pages - self.pages.references", "return self.reserved_pages"),
    ],
}  # fmt: skip


def run(copy: Path, file: str, tests: str, old: str, new: str) -> dict[str, object]:
    """Run the tests with one bug: which it is, whether they found it, and the seconds that they took."""
    path = copy / "fastgen" / file
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        sys.exit(f"{file} has {text.count(old)} times {old!r}; the table needs another text")
    path.write_text(text.replace(old, new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--timeout={SECONDS}"]
    start = time.perf_counter()
    done = subprocess.run([*command, *tests.split()], cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, stdout=-1)
    path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):
        sys.exit(done.stdout.decode())
    found = {"file": file, "from": old, "to": new, "found": done.returncode == 1}
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "checkout-index", "-a", f"--prefix={folder}/"], cwd=ROOT, check=True)
        results = []
        for (file, tests), bugs in MUTANTS.items():
            for old, new in bugs if args.only in file else ():
                results.append(run(Path(folder), file, tests, old, new))
                print("found" if results[-1]["found"] else "LIVES", json.dumps(results[-1]), flush=True)
    alive = [result for result in results if not result["found"]]
    found = {
        "command": "python scripts/check/mutate.py",
        "mutants": len(results),
        "found": len(results) - len(alive),
        "alive": alive,
        "seconds": round(sum(float(str(result["seconds"])) for result in results)),
    }
    print(json.dumps(found, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
