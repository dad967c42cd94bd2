"""Apply plausible bugs, one at a time, to a copy of the repository, and run the tests that should find them.

    python scripts/check/mutate.py --json scripts/results/mutants.json
    python scripts/check/mutate.py --only engine.scheduler    # the bugs of one module, or of a package's modules
    python scripts/check/mutate.py --check                    # only whether each bug can still be applied; in a second

A bug is found if a test fails. The exit status is 0 only if every bug is found. Each bug names the function, method,
class or constant whose source it changes, so that it does not matter where in the module this stands. Bugs that can no
longer be applied are listed with the reason, and nothing is run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SECONDS = 120  # time limit of a test; a bug may let it hang
ENGINE = "scheduler admission pages host_pages prefix_cache random_schedules"
SCHEDULES = " ".join(f"tests/engine/test_{name}.py" for name in ENGINE.split())
CALLS = "tests/test_generator.py tests/engine/test_outputs.py tests/engine/test_interrupts.py"
LOADING = "tests/model/test_loader.py tests/model/test_loader_slices.py"

# (module, files of the tests that should find its bugs): the bugs, each as (symbol, text within it, replacement). Where
# the text has a space, the source may have any white space, such as a line break.
MUTANTS: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("engine.options", "tests/engine/test_options.py"): [
        ("EngineConfig.prefill_tokens", "max(limit - decodes, min(limit, MIN_PREFILL_TOKENS))",
         "max(limit, min(limit, MIN_PREFILL_TOKENS))"),
        ("EngineConfig.prefill_tokens", "if decodes else room", "if room else room"),
    ],
    ("engine.uploads", "tests/engine/test_prefill_graphs.py"): [
        ("StepArrays.of", "len(slots) + padding, -1)", "len(slots) + padding, 0)"),
        ("StepMemory.send", "if len(arrays.rows) else", "if len(arrays.rows) > 1 else"),
        ("StepArrays.of", "kv_lens[: len(batch.decodes)]", "kv_lens"),
    ],
    ("engine.runner", "tests/engine/test_prefill_graphs.py tests/engine/test_halves.py"): [
        ("Runner._replay", "event.wait()", "event.query()"),
        ("Runner._parts", "(0, False) if parts", "(0, layout.shared) if parts"),
    ],
    ("kernels.work_tiles", "tests/kernels/test_kernels_attention.py"): [
        ("_twin", "np.count_nonzero(lens) <= most_split", "len(lens) <= most_split"),
    ],
    ("cli.serve.validation", "tests/cli/serve/test_serve_fields.py"): [
        ("is_neutral", "and isinstance(value, bool) == isinstance(neutral, bool)", ""),
        ("FieldPolicy.note", "self._named.add(field)", "self._named.add(reason)"),
        ("Strict._read_fields", "if unused and name in NOTED and not policy.strict:",
         "if unused and not policy.strict:"),
        ("MessagePart._refuse", "super()._refuse(name, FieldPolicy())", "super()._refuse(name, policy)"),
    ],
    ("cli.serve.routes", "tests/cli/serve/test_serve_routes.py"): [
        ("RouteTable._add_installed", "if path in (*self.posts, *self.gets):", "if path in self.posts:"),
        ("RouteTable._load", "if module not in self._loaded:", "if True:"),
        ("Post.read", "if name in fields", "if name not in fields"),
    ],
    ("cli.serve.openai_input", "tests/cli/serve/test_serve_fields.py"): [
        ("GenerationFields._sampling_params", 'if self.stop == "":', "if self.stop is None:"),
        ("ChatMessage._check_role", 'if self.content == [] and self.role != "assistant":', "if self.content == []:"),
    ],
    ("engine.outputs", CALLS): [
        ("ActiveSample.update_text", "end -= 1", "end -= 0"),
        ("ActiveSample.update_text", "upto = min(self.ids_read + 1, end) if params.stop_strings else end",
         "upto = end"),
        ("ActiveSample.update_text", "may_stop=upto > self.min_tokens", "may_stop=upto >= self.min_tokens"),
        ("ActiveSample.emit", "self.emitted = (sequence.output_len, len(text))",
         "self.emitted = (sequence.output_len, 0)"),
    ],
    ("engine.inputs", "tests/test_rollouts.py tests/test_robustness.py " + CALLS): [
        ("InputProcessor.process", "max_len=min(most, self.context),",
         "max_len=min(most, self.context) + (params.max_tokens is None),"),
        ("InputProcessor._check_prompt", "room = context if params.max_tokens == 0 else context - 1", "room = context"),
        ("InputProcessor._seed_of", "return resume.seed", "return 0"),
        ("InputProcessor.check_params", "if edited > MAX_BIASES:", "if edited > MAX_BIASES + 1:"),
    ],
    ("engine.interrupts", CALLS + " tests/test_robustness.py"): [
        ("DeferredInterrupt._deliver", "self._pending = False", "pass"),
        ("DeferredInterrupt.__exit__", "and not self._nested.pop()", "and self._nested.pop() is not None"),
        ("DeferredInterrupt.reading", "if deferred: self._deliver()", "pass"),
        ("OneCaller._take", "if self.forked:", "if False:"),
        ("OneCaller._take", "if not self._lock.acquire(blocking=False):", "if not self._lock.acquire():"),
    ],
    ("engine.features", "tests/engine/test_features.py"): [
        ("add_requested", "if not any(isinstance(feature, kind) for feature in features):", "if True:"),
        ("StepFeatures.__missing__", "self[kind] = feature", "pass"),
    ],
    ("engine.weight_changes", "tests/test_updating.py"): [
        ("WeightChanges.update", 'if in_flight == "recompute":', 'if in_flight == "keep":'),
    ],
    ("engine.weight_changes", "tests/test_sleeping.py"): [
        ("WeightChanges.sleep", 'if "weights" in new and not keep_weights:', "if not keep_weights:"),
        ("WeightChanges.sleep", "self.wake(new)", "pass"),
    ],
    ("engine.loop", CALLS + " tests/test_robustness.py"): [
        ("Loop.abort", "self.events = [event for event in self.events if event.id != active.id]", "pass"),
        ("Loop.update_output", 'sequence.finish_reason, sequence.stop_reason = "stop", stop', "pass"),
        ("Loop.reset", "self.scheduler.reset(self.owners)", "pass"),
        ("Loop._within_step", "finally: self.stepping = False", ""),
        ("Loop.advance", "self.abort(late)", "pass"),
        ("Loop.check_open", "if self.stepping: raise", "if False: raise"),
        ("Loop.begin", "self._interrupt.check()", "pass"),
        ("Loop.update_output", "self.weight_state.blame(self.runner.weights.find_not_finite)", '""'),
    ],
    ("prefill_only", "tests/test_prefill_only.py"): [
        ("PrefillOnly.classify", "for end in ends]", "for end in ends[:1] * len(ends)]"),
        ("PrefillOnly.embed", "if normalized else 1.0", "if states else 1.0"),
        ("_answer_ids", "ids[len(before) :] if", "ids if"),
        ("_weight", "[end, *(other for (other,) in others)]", "[end]"),
    ],
    ("engine.prompt_scorer", "tests/test_prefill_only.py"): [
        ("PromptScorer.after", "x[first + len(chunk.tokens) - 1]", "x[len(chunk.tokens) - 1]"),
    ],
    ("names", "tests/test_names.py"): [
        ("_explain", "ours is None or hasattr(self, ours[1])", "True"),
    ],
    ("text.detokenizer", "tests/text/test_tokenizer.py"): [
        ("overlap", "range(min(len(text), len(stop) - 1), 0, -1)", "range(1, min(len(text), len(stop) - 1) + 1)"),
        ("StopFinder.push", "+ stop * self._shown", ""),
        ("StopFinder._take", "{at - end for", "{at for"),
        ("StopFinder._views", "if self._hidden:", "if False:"),
        ("Detokenizer.push", "if text.endswith(BROKEN) and not last:", "if text.endswith(BROKEN):"),
        ("StopFinder.push", "at, stop = min(matches, key=lambda pair: pair[0])", "at, stop = matches[0]"),
    ],
    ("async_engine.grammars", "tests/async_engine/test_async_grammars.py"): [
        ("_Checker.compile", "poll(seconds + WAITING_SECONDS)", "poll(seconds)"),
        ("main", "signal.setitimer(signal.ITIMER_PROF, seconds)", "pass"),
    ],
    ("text.rendering", "tests/text/test_rendering.py"): [
        ("TEMPLATE_BYTES", "2**30", "2**32"),
        ("_Attempt.is_to_blame", "return self._grown - used_memory() > TEMPLATE_BYTES // 2", "return True"),
        ("_Attempt.check_time", "self.polls > MAX_POLLS", "False"),
    ],
    ("text.special_tokens", "tests/text/test_special_tokens.py"): [
        ("TextGuard._spells", "or (self._normalize and self._parts.search(self._normalize(text)))", ""),
        ("CUT", '|\\Z', ""),
    ],
    ("cli.serve.service", "tests/cli/serve/test_serve_work.py"): [
        ("WorkThreads.run", "block.stop()", "pass"),
        ("WorkThreads.run", "self._large if large else self._small", "self._large"),
    ],
    ("cli.serve.validation", "tests/cli/serve/test_serve_checking.py"): [
        ("check_counts", "limits.context, INNER)) > limits.context:", "limits.context, INNER)) > limits.context + 1:"),
        ("parse", "if len(match[0]) == 1", "if True"),
    ],
    ("processes.stopping", "tests/processes/test_stopping.py"): [
        ("Stoppable.__exit__", "if interrupted and kind is not StoppedError:", "if False:"),
        ("Stoppable.__exit__", "if self.interrupted: raise", "pass"),
        ("Stoppable.stop", "self._thread = True, 0", "self._outer = True, None"),
        ("Stoppable.__enter__", "raise StoppedError", "pass"),
    ],
    ("text.chat", "tests/text/test_tokenizer.py"): [
        ("ChatTemplate._reads_parts", "not as_text and", ""),
        ("ChatTemplate._reads_parts", "or as_user", ""),
        ("_probing", "[_text_part(\"a\")] if parts else \"a\"", "\"a\""),
    ],
    ("text.grammar", "tests/text/test_grammar.py"): [
        ("LaterEnd.fill", "self._left > 0 and (row & self._others).any()", "self._left > 0"),
        ("LaterEnd.fill", "self._left > 0 and", ""),
        ("_check_required", "not _ADDING.isdisjoint(part) or", ""),
    ],
    ("text.reasoning", "tests/text/test_reasoning.py"): [
        ("AnswerParser._read_reasoning", " - overlap(reasoning, self._syntax.closes)]", "]"),
        ("_state_after", "tokenizer.special_ids | ({opens, closes} - {None})", "{opens, closes}"),
        ("after_reasoning", 'if state == "closed" or', 'if'),
        ("after_reasoning", "tokenizer.special_ids, (*eos_ids, closes)", "frozenset(), (closes,)"),
        ("ReasoningCounter.push", "elif id == self._closes:", "elif id == -1:"),
    ],
    ("text.tools.parser", "tests/text/test_tool_calls.py tests/text/tools/test_parser.py"): [
        ("ToolParser._match", "self._due = min(at + HELD, len(self._text) + size // 8)", "pass"),
        ("ToolParser._match", "(last or size >= HELD)", "last"),
        ("ToolParser._is_first", "not self.calls and", ""),
        ("Scan.run", "end += 1", "end += 0"),
        ("Scan.run", "if self.depth == 1 else []", "if True else []"),
        ("Scan.run", "self.at = max(self.at, len(text) - start)", "self.at = len(text) - start"),
        ("ToolParser._say", "content.lstrip(BLANK) if self._after_call else content", "content"),
    ],
    ("text.tools.json_calls", "tests/text/test_tool_calls.py"): [
        ("DeepSeek.begins", "(?:{self.opens}{WS})?+", ""),
        ("JsonParser._match_call", "self._marked = match is not None", "pass"),
        ("JsonParser._read_arguments", "last and not self._cut", "last"),
        ("JsonParser._read_next", "ends is None or (self._separate and ends[\"mark\"] is not None)", "ends is None"),
    ],
    ("text.tools.call_reader", "tests/text/test_tool_calls.py"): [
        ("CallReader._read_field", "(self.name or self.has_arguments)", "False"),
        ("CallReader._read_field", "(match, stop)", "(match,)"),
        ("CallReader._read_field", "not self.begun and self._names is not None", "self._names is not None"),
        ("CallReader._end", "(seen and not self._odd and self._names is None)", "(seen and self._names is None)"),
        ("CallReader._end_value", "and not self.begun:", ":"),
    ],
    ("text.tools.loose_json", "tests/text/tools/test_loose_json.py"): [
        ("LooseJson._read_string", "ends.partial and not last", "False"),
        ("LooseJson._read_bracket", "if char not in self._open:", "if False:"),
        ("LooseJson._end_string", "if self._is_key:", "if False:"),
        ("LooseJson._emit", 'self._gap.replace(",", "")', "self._gap"),
        ("LooseJson._end_of_word", ", start, end + longest", ", start"),
        ("LooseJson.read", "blank[0] if self.kind else \"\"", "blank[0]"),
    ],
    ("text.tools.xml_calls", "tests/text/test_tool_calls.py"): [
        ("XmlParser._end_value", "self._types == _STRING", "False"),
        ("XmlParser.__init__", "{closes}|{call}|{bare}))", "{closes}|{bare}))"),
        ("XmlParser._ends_value", 'return match["tag"] in self._arguments', "return True"),
        ("XmlParser._ends_value", "key in self._arguments if self._arguments else", "True or"),
        ("XmlParser._close", "if self._state == self._read_value:", "if False:"),
        ("XmlParser._read_value", '(last and "</parameter>" in match[0])', "False"),
        ("XmlParser._read_end", "if match is not None and match.partial:", "if False:"),
    ],
    ("text.tools.python_calls", "tests/text/test_tool_calls.py"): [
        ("PythonParser._match_rest", "scan, self._scan = self._scan, Scan(_PLACES)", "scan = self._scan"),
    ],
    ("text.tools.values", "tests/text/tools/test_values.py tests/text/test_tool_calls.py"): [
        ("Schemas.resolved", "if reference not in self._named:", "if True:"),
        ("typed_json", '(types - {"string"})', "types"),
        ("Schemas.alternatives", "self._steps += 1", "pass"),
        ("Schemas.types", 'frozenset.intersection(*allowed) if word == "allOf" else', ""),
        ("json_text", "return json.dumps(value, allow_nan=False)", "return None"),
    ],
    ("text.tools.history", "tests/text/tools/test_history.py"): [
        ("_template_call", "read if isinstance(read, dict) else arguments", "read"),
        ("_find_form", "if syntax.shows(texts[-1]):", "if True:"),
    ],
    ("cli.serve.tool_grammars", "tests/cli/serve/test_serve_tools.py"): [
        ("_python_rules", "(not required and not others)", "False"),
        ("_Arguments.takes_others", "return bool(adding) or not listed", "return bool(adding)"),
        ("_Arguments.is_free", "each.keys() <= _FREE and", ""),
        ("_Arguments.rule", "return rule, rule == name", "return name, True"),
    ],
    ("model.sampler", "tests/model/test_sampler.py"): [
        ("_likeliest", "mass < mass[:, -1:] * rows.top_p", "mass <= mass[:, -1:] * rows.top_p"),
        ("_likeliest", "torch.minimum(short + 1, count)", "torch.minimum(short.clamp(min=1), count)"),
        ("_truncate", "best + rows.min_p.log() * temperature", "best + rows.min_p.log()"),
        ("_edit", "rows.prompt_len < rows.min_tokens", "rows.prompt_len <= rows.min_tokens"),
        ("_edit", "counts * rows.frequency - in_output * rows.presence",
         "counts * rows.presence - in_output * rows.frequency"),
        ("_edit", "torch.where(logits > 0, logits / rows.repetition, logits * rows.repetition)",
         "logits / rows.repetition"),
    ],
    ("model.config", "tests/model/test_model_config.py"): [
        ("_windows", "size if layer >= first else 0", "size if layer > first else 0"),
        ("_eos_ids", 'ids = generation.get("eos_token_id")', "ids = None"),
        ("sampling_defaults", 'if samples else ("repetition_penalty",)', "if samples else ()"),
        ("_rope", "low=1e-6, high=1e6", "high=1e6"),
        ("_text_config", 'inner.get("tie_word_embeddings") and', ""),
        ("_ropes", "if not window)", "if window)"),
        ("_refuse_foreign", 'config.get("hidden_act", "silu") != activation',
         'config.get("hidden_act") not in (None, "silu", activation)'),
    ],
    ("model.config", "tests/model/test_transformer.py"): [
        ("_ropes", 'config.get("sliding_window") is not None:', "any(windows):"),
        ("_ropes", 'family.absent["rope_theta"])', 'config["rope_theta"])'),
        ("_windows", 'size and "max_window_layers" in family.absent', "size"),
    ],
    ("model.tied", "tests/model/test_tied.py tests/test_updating.py"): [
        ("fingerprint", "part.detach() * factors", "part.detach()"),
        ("Tie._follow_one", "if has_embedding else tensor.detach().clone()", ""),
        ("Tie._follow_one", "if head is not None and partial:", "if head is not None:"),
        ("Tie._follow_two", "and not given and not partial", "and not given"),
    ],
    ("model.transformer", "tests/model/test_transformer.py"): [
        ("Transformer.add_mlp", "hidden.relu_().square_()", "hidden.square_()"),
    ],
    ("model.int4_layouts", "tests/model/test_int4.py"): [
        ("_gptq_zeros", "nibbles(words + GPTQ_ONES)", "(nibbles(words) + 1 & 15)"),
        ("check_skipped", "tensor.shape != (inputs,) or", ""),
    ],
    ("model.quantization_config", "tests/model/test_int4.py"): [
        ("_check_modules", 'if gated or each != "gate_proj"', 'if each != "gate_proj"'),
    ],
    ("engine.warm_up", "tests/engine/test_startup.py"): [
        ("products_of", "Fused(swiglu=model.config.gated)", "Fused(swiglu=True)"),
    ],
    ("model.rope", "tests/model/test_rope.py tests/model/test_model_config.py"): [
        ("_llama3", "rope.low_freq_factor, plain / rope.factor, unless_long",
         "rope.low_freq_factor, plain, unless_long"),
        ("query_scales", "context <= original", "context < original"),
        ("_yarn_factor", "if rope.mscale and rope.mscale_all_dim:", "if rope.mscale:"),
    ],
    ("model.loader", LOADING): [
        ("_find_pieces", "tensor = file.get_tensor(name)",
         "tensor = (t.half() if (t := file.get_tensor(name)).dtype == torch.bfloat16 else t)"),
    ],
    ("model.weights", "tests/model/test_weights.py tests/test_updating.py " + LOADING): [
        ("Shard.slice", "self.parts or ((self.start,", "self.parts or ((0,"),
        ("TensorMatcher.find", "or name.startswith(UNUSED)", ""),
        ("TensorMatcher.find", "if name in self._seen:", "if False:"),
    ],
    ("engine.weight_state", "tests/test_updating.py tests/test_adapters.py"): [
        ("WeightState.check_update", "version = self.version + 1", "version = self.version + 2"),
        ("WeightState.check_update", "if update.partial and self.has_adapter:", "if False:"),
    ],
    ("model.parameters", "tests/model/test_parameters.py"): [
        ("_together", "end - module.shape[0]", "0"),
        ("layer_table", 'Module(attention + "k_proj", "qkv"', 'Module(attention + "v_proj", "qkv"'),
        ("Module.part", "return rank * parts // ranks * shape[self.split]", "return rank % parts * shape[self.split]"),
    ],
    ("device.threads", "tests/device/test_threads.py"): [
        ("FreeCores.step", "self._measured = self._times()", "pass"),
        ("FreeCores.step", "pause > PAUSE and _is_only_one", "False and _is_only_one"),
        ("FreeCores.step", "self.count < cores or pause <= INTERVAL", "self.count < cores"),
        ("FreeCores.step", "self.count < cores or pause <= INTERVAL", "pause <= INTERVAL"),
        ("FreeCores.step", "pause > INTERVAL", "pause > PAUSE"),
    ],
    ("model.attention.cpu", "tests/model/test_attention_cpu.py"): [
        ("CpuAttention._lay_out", "kv_head, of_group = np.divmod(np.arange(self._heads), group)",
         "of_group, kv_head = np.divmod(np.arange(self._heads), heads)"),
        ("_Tiles.hidden", "hidden.logical_or_(ahead >= window)", "hidden.logical_or_(ahead > window)"),
        ("_InPlace.__init__", "groups, keys = counts[counts > 0]", "groups, keys = counts[counts > 0][::-1]"),
    ],
    ("kernels.allreduce", "tests/kernels/test_kernels_allreduce.py"): [
        ("_total", "tl.where(rank == other, part, 0.0)", "tl.where(rank == SIZE - other, part, 0.0)"),
        ("add_in_order", "for part in parts[1:]", "for part in parts[:0:-1]"),
    ],
    ("kernels.drafts", "tests/kernels/test_kernels_drafts.py tests/test_speculation.py"): [
        ("_follow_kernel", "kept = tl.min(tl.where(wrong, number, BLOCK_W)) + 1",
         "kept = tl.min(tl.where(wrong, number, BLOCK_W)) + 2"),
    ],
    ("async_engine.loop", "tests/async_engine/test_async_loop.py tests/async_engine/test_async_client.py"): [
        ("EngineLoop._handle", "self._gen.abort(message.numbers)", "pass"),
    ],
    ("model.adapter", "tests/test_adapters.py"): [
        ("AdapterUpdate._expect", 'rank**0.5 if config.get("use_rslora") else rank', "rank"),
        ("AdapterUpdate._expect", '"alpha_pattern"', '"rank_pattern"'),
        ("AdapterUpdate.check", "self.adapted |= self._scaling.keys()", "self.adapted = self._scaling.keys()"),
    ],
    ("model.host_tier", "tests/model/test_host_tier.py"): [
        ("HostTier.load", "order, pages[start : start + len(part)])", "order, pages[: len(part)])"),
    ],
    ("request", "tests/test_request.py tests/test_generator.py tests/test_updating.py"): [
        ("Sequence.start", "self.kv_version not in (None, version)", "self.kv_version is not None"),
        ("Sequence.start", "self.kv_version = version", "pass"),
        ("SamplingParams.validate", "self.min_tokens > self.max_tokens:", "self.min_tokens >= self.max_tokens:"),
        ("Sequence.begin_version", "self.versions[-1][0] != version:", "self.versions[-1][0] == version:"),
    ],
    ("request", SCHEDULES): [
        ("Sequence.rewind", "self.drawn.cut(self.output_len)", "pass"),
        ("Sequence.cacheable_len", "self.score.start) - 1)", "self.score.start))"),
    ],
    ("engine.prompt_scores", SCHEDULES + " tests/test_schedules.py"): [
        ("PromptScores.chunk", "max(chunk.start, score.start - 1)", "max(chunk.start, score.start)"),
        ("PromptScores.update", "end = scored.start + len(scored.logprobs)", "end = len(scored.logprobs)"),
        ("PromptScores.update", "score.top_logprobs[scored.start : end]", "score.top_logprobs[: len(scored.logprobs)]"),
    ],
    ("speculation.planning", SCHEDULES): [
        ("Speculator.update", "sequence.computed -= rows - kept", "sequence.computed -= rows - kept + 1"),
        ("Speculator.payload", "self._rows, self._texts = (), []", "self._rows = ()"),
        ("Speculator.payload", "self._lanes[lane].computed - 1)", "self._lanes[lane].computed)"),
    ],
    ("engine.masks", SCHEDULES): [
        ("Masks.fill_masks", "and sequence.status is Status.RUNNING", ""),
        ("Masks.fill_masks", "row[:] = 0", "pass"),
    ],
    ("engine.halves", "tests/engine/test_halves.py"): [
        ("cut", "np.where(left, 0, step.num_draws)", "step.num_draws"),
        ("cut", "-(-decodes // CUT_MULTIPLE)", "decodes // CUT_MULTIPLE"),
    ],
    ("engine.scheduler", SCHEDULES): [
        ("Scheduler._chunk", "sequence.pending += sample", "sequence.pending += 1"),
        ("Scheduler._set_limit", "self.config.page_size, sequence.max_len - 1)",
         "self.config.page_size, sequence.max_len)"),
        ("Scheduler._preempt", "self.waiting.move_to_end(sequence, last=False)", "self.waiting.move_to_end(sequence)"),
        ("Scheduler._pass_limit", "victim = self.running[-1]", "victim = self.running[0]"),
        ("Scheduler._end_at", "sequence.output_len > sequence.params.min_tokens:",
         "sequence.output_len >= sequence.params.min_tokens:"),
        ("Scheduler._chunk", "sequence.prefill_len == end < sequence.max_len", "sequence.prefill_len == end"),
        ("Scheduler.finish", "self._leave(sequence)", "pass"),
        ("Scheduler._admit_forks", "copy = length + 1 < sequence.max_len and", "copy = False and"),
        ("Scheduler.drop_prefixes", "sequence.indexed = NOT_INDEXED", "pass"),
        ("Scheduler._admit", "self._pause = RETRY_STEPS", "self._pause = 30"),
        ("Scheduler._admit_forks", "sequence.cacheable_len < length - 1 or", ""),
        ("Scheduler.finish", 'if reason in ("stop", "length") and sequence.output_len:', "if sequence.output_len:"),
        ("Scheduler.update", "if (masked or token < 0) and not self._accepts", "if masked and not self._accepts"),
        ("Scheduler._admit_forks", "self._start(sequence, expected, length - 1)",
         "self._start(sequence, expected, known)"),
        ("Scheduler._schedule_prefills", "budget -= count", "budget -= 1"),
        ("Scheduler.drop_prefixes", "while self.prefilling:", "if self.prefilling:"),
        ("Scheduler.preempt_all", "self._preempt(sequence)", "pass"),
        ("Scheduler.update", "if sequence.status is not alive:", "if False:"),
        ("Scheduler._admit", "cached = len(nodes) * self.config.page_size",
         "cached = (len(nodes) + bool(sequence.preemptions)) * self.config.page_size"),
    ],
    ("engine.pages", SCHEDULES): [
        ("PageAllocator.adopt", "self._refs[node.page] += 1", "self._refs[node.page] = 1"),
        ("PageAllocator.fork", "self._refs[page] += 1", "pass"),
        ("PageAllocator.grow", "if count > self.available:", "if count > self.available + 1:"),
        ("PageAllocator.release", "for page in reversed(pages):", "for page in pages:"),
        ("PageAllocator._drop_reference", "self._fresh.pop(page, None)", "pass"),
        ("PageAllocator.drop_index", "self.root = Node()", "pass"),
        ("PageAllocator.match", "range(size, limit + 1, size)", "range(size, limit, size)"),
        ("PageAllocator.index", "min(num_tokens, len(tokens))", "num_tokens"),
        ("PageAllocator.index", "if key in node.children: return NOT_INDEXED",
         "if key in node.children: node = node.children[key]; continue"),
        ("PageAllocator.fork", "self._copies.append((source[-1], page))", "self._copies.append((source[0], page))"),
        ("PageAllocator.take_fresh", "fresh = tuple(self._fresh)", "fresh = ()"),
    ],
    ("engine.host_pages", SCHEDULES): [
        ("TieredPageAllocator._take_host_page", "(node for node in self._host if node.host_page not in self._loads)",
         "iter(self._host)"),
        ("TieredPageAllocator._drop", "self._host.move_to_end(node)", "pass"),
        ("TieredPageAllocator.drop_index", "self._saves.clear()", "pass"),
        ("TieredPageAllocator.take_moves", "self._loads.clear()", "pass"),
        ("TieredPageAllocator.take_moves", "tuple((page, host_page) for host_page, page in self._saves.items())", "()"),
    ],
    ("engine.admission", SCHEDULES): [
        ("PageReservations.expected", "self.estimate.predict(sequence)), now + 1)",
         "self.estimate.predict(sequence)), now)"),
        ("PageReservations.expected", "count(sequence.max_len - 1)))", "count(sequence.max_len)))"),
        ("PageReservations.extend", "if len(sequence.pages) >= sequence.reserved:",
         "if len(sequence.pages) > sequence.reserved:"),
        ("LengthEstimate.learn", "self.weight * (tokens - self.average)", "self.weight * tokens"),
        ("LEAVING_STEPS", "LEAVING_STEPS = 4", "LEAVING_STEPS = 0"),
        ("PageReservations.growth", "return self.reserved_pages - self.pages.references", "return self.reserved_pages"),
        ("LaneTable.take", "counted = tuple(sequence.token_ids) if",
         "counted = tuple(sequence.token_ids[: sequence.prompt_len]) if"),
        ("LaneTable.take", "self._starts.append(start)", "sequence.preemptions or self._starts.append(start)"),
        ("LaneTable.send_pages", "tuple(sequence.pages[first:])", "tuple(sequence.pages)"),
        ("LaneTable.leave", "self.masked.discard(lane)", "pass"),
        ("LaneTable.leave", "self._page_updates = [update for update in self._page_updates if update[0] != lane]",
         "pass"),
        ("LaneTable.leave", "heapq.heappush(self.free, lane)", "self.free.append(lane)"),
        ("LaneTable.take_changes", "self._starts, self._page_updates = [], []", "self._page_updates = []"),
        ("LaneTable.take_changes", "self._starts, self._page_updates = [], []", "self._starts = []"),
        ("next_chunk", "spare = budget - min(oldest.prefill_left, reserve)", "spare = budget"),
        ("begins_like", "return tokens[at:end] == others[at:end] and", "return False and"),
    ],
    ("engine.seeds", "tests/engine/test_seeds.py"): [
        ("seed_of", "%b:%d", "%b-%d"),
        ("replica_seed", "rank == 0", "True"),
    ],
    ("rl.fleet", "tests/rl/test_fleet.py"): [
        ("Fleet.seeded", "seed_of(self._seed, number)", "seed_of(self._seed, 0)"),
        ("Fleet.seeded", 'body["resume"] is not None or', ""),
    ],
    ("rl.router", "tests/rl/test_router.py"): [
        ("SLACK", "16", "17"),
        ("Router.choose", "> 2 * self._load(least) + SLACK", "> 2 * self._load(least) + SLACK + 1"),
        ("Router.choose", "2 * self._load(least)", "self._load(least)"),
    ],
    ("cli.wrapping", "tests/cli/test_wrapping.py"): [
        ("Wrapper._place", "before + size > self._width()", "before + size >= self._width()"),
        ("Wrapper._end_line", "self._code.strip().startswith(self._fence)", "self._code.startswith('```')"),
    ],
    ("cli.chat_commands", "tests/cli/test_chat.py tests/cli/test_chat_backends.py"): [
        ("_regenerate", "chat.rounds.append(last)", "pass"),
        ("_changed", "if each != name", "if each == name"),
    ],
    ("cli.chat_console", "tests/cli/test_chat.py"): [
        ("Console._put", "self._thinking and not self._dumb", "not self._dumb"),
    ],
    ("cli.gen.server_backend", "tests/cli/gen/test_gen_server.py"): [
        ("_Server.advance", "len(waiting) < concurrency", "len(waiting) <= concurrency"),
        ("_Server._answer", "if await self._refuses_all(error.status_code, call):", "if False:"),
        ("_Server._refuses_all", "return error.status_code == status", "return False"),
        ("_Server._answer", "await self.check()", "raise"),
        ("work_on_server", "sorted(ended, key=lambda task: task.exception() is not None)", "ended"),
        ("RowCalls.call", "**self.fields, **own}", "**own, **self.fields}"),
        ("RowCalls.record", "if len(choices) == 1 else None", "* len(choices)"),
    ],
    ("cli.gen.outputs", "tests/cli/gen/test_gen_server.py"): [
        ("ParquetParts.write", "make([_encodable(record)]", "make([record]"),
    ],
    ("cli.gen.rows", "tests/cli/gen/test_gen_server.py"): [
        ("read_json", "if depth > NESTED:", "if False:"),
    ],
    ("cli.gen.main", "tests/cli/gen/test_gen.py"): [
        ("run", "done[total:] = bytes([1]) * (source.total - total)", "pass"),
    ],
}  # fmt: skip


class Mutant(NamedTuple):
    """A plausible bug: `text` within the source of `symbol` is replaced by `other`, and `tests` should find it.

    module: dotted name of the module, below fastgen. symbol: qualified name of a function, class or constant in it.
    """

    module: str
    tests: str
    symbol: str
    text: str
    other: str

    @property
    def path(self) -> Path:
        """The file of the module, relative to the root of the repository."""
        return Path("fastgen", *self.module.split(".")).with_suffix(".py")

    def apply(self, root: Path = ROOT) -> str:
        """Return the source of the module with this bug. Raises LookupError if it cannot be applied."""
        if not (root / self.path).exists():
            raise LookupError(f"there is no {self.path}")
        source = (root / self.path).read_text(encoding="utf-8")
        places = symbols(source).get(self.symbol)
        if places is None:
            name = self.symbol.rpartition(".")[2]
            others = [other for other in symbols(source) if other.rpartition(".")[2] == name]
            raise LookupError(f"there is no {self.symbol}" + f"; there is {', '.join(others)}" * bool(others))
        pattern = re.compile(r"\s+".join(map(re.escape, self.text.split())))
        found = [(place, match) for place in places for match in pattern.finditer(source, *place)]
        if len(found) != 1:
            raise LookupError(f"{self.symbol} has the text {len(found)} times, not once")
        [((start, end), match)] = found
        mutated = source[start : match.start()] + self.other + source[match.end() : end]
        try:
            ast.parse(textwrap.dedent(mutated))
        except SyntaxError as error:
            raise LookupError(f"with the bug there is a syntax error: {error}") from None
        return source[:start] + mutated + source[end:]


@cache
def symbols(source: str) -> dict[str, list[tuple[int, int]]]:
    """Return the functions, classes, methods and constants of a source: where in it the lines of each begin and end, as
    often as it is defined."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: dict[str, list[tuple[int, int]]] = {}
    for name, node in definitions(ast.parse(source)):
        assert node.end_lineno is not None
        found.setdefault(name, []).append((lines[node.lineno - 1], lines[node.end_lineno]))
    return found


def definitions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield (qualified name, node) of all definitions below a node, but for what is local to a function."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.ClassDef():
                yield outer + node.name, node
                yield from definitions(node, f"{outer}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield outer + node.name, node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield outer + name, node
            case ast.If() | ast.Try():
                yield from definitions(node, outer)


def mutants(only: str = "") -> list[Mutant]:
    """Return all mutants, or those of one module or package."""
    return [
        Mutant(module, tests, *bug)
        for (module, tests), bugs in MUTANTS.items()
        for bug in bugs
        if f"{module}.".startswith(f"{only}." if only else "")
    ]


def faults(wanted: list[Mutant], root: Path = ROOT) -> list[str]:
    """Return a line for each mutant that cannot be applied, and for each file of tests that does not exist."""
    found = [
        f"{module}: there is no {test}"
        for module, tests in dict.fromkeys((mutant.module, mutant.tests) for mutant in wanted)
        for test in tests.split()
        if not (root / test).exists()
    ]
    for mutant in wanted:
        try:
            mutant.apply(root)
        except LookupError as error:
            found.append(f"{mutant.module}: {mutant.symbol}: {mutant.text!r}: {error}")
    return found


def run(copy: Path, mutant: Mutant) -> dict[str, object]:
    """Run the tests with one bug; return which it is, whether they found it, and the seconds that they took."""
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.apply(copy), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--timeout={SECONDS}"]
    start, environment = time.perf_counter(), {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([*command, *mutant.tests.split()], cwd=copy, env=environment, stdout=subprocess.PIPE)
    path.write_text(text, encoding="utf-8")
    if done.returncode in (3, 4, 5):  # of pytest itself: no tests have run
        sys.exit(done.stdout.decode())
    found = {"module": mutant.module, "symbol": mutant.symbol, "from": mutant.text, "to": mutant.other}
    return {**found, "found": done.returncode != 0, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="MODULE", help="such as engine.scheduler, or engine")
    parser.add_argument("--check", action="store_true", help="run no tests, only check that each bug can be applied")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs at a time, each in a copy of its own")
    parser.add_argument("--json", type=Path, help="the file to write")
    args = parser.parse_args()
    wanted = mutants(args.only)
    if not wanted:
        parser.error(f"--only {args.only}: no bug is in this module; there are {', '.join(m for m, _ in MUTANTS)}")
    if wrong := faults(wanted):
        sys.exit("\n".join([*wrong, f"{len(wrong)} of {len(wanted)} entries of MUTANTS need another symbol or text"]))
    if args.check:
        print(f"{len(wanted)} bugs can be applied")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            copies.put(Path(folder) / str(number))
            prefix = f"--prefix={folder}/{number}/"
            subprocess.run(["git", "checkout-index", "-a", prefix], cwd=ROOT, check=True)

        def run_in_a_copy(mutant: Mutant) -> dict[str, object]:
            copy = copies.get()
            result = run(copy, mutant)
            copies.put(copy)
            print("found" if result["found"] else "LIVES", json.dumps(result), flush=True)
            return result

        results = list(pool.map(run_in_a_copy, wanted))
    alive = [result for result in results if not result["found"]]
    found = {
        "command": " ".join(["python scripts/check/mutate.py", *sys.argv[1:]]),
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
