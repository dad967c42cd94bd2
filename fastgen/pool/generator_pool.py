"""GeneratorPool: several Generators in processes of this machine, which share the prompts.

    with GeneratorPool("Qwen/Qwen3-8B", data_parallel=2) as pool:
        outputs = pool.generate(prompts, SamplingParams(max_tokens=100))

This module does not import torch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator as PyGenerator
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from fastgen.engine.options import OPTIONS, GeneratorOptions
from fastgen.engine.outputs import error_output
from fastgen.engine.prompts import params_list, prompt_list, request_source
from fastgen.engine.seeds import seed_of
from fastgen.engine.stats import with_progress
from fastgen.names import explains_names
from fastgen.option import option, takes_fields_of
from fastgen.pool.processes import Processes
from fastgen.request import Params, Prompt, Request, RequestOutput, SamplingParams, params_of
from fastgen.text.grammar import params_grammar


@dataclass(frozen=True, kw_only=True)
class GeneratorPoolOptions(GeneratorOptions):
    """The arguments of a GeneratorPool: those of a Generator and one more."""

    data_parallel: int = option(
        2, "number of Generators, each in a separate process, on `tensor_parallel` GPUs of its own", low=1
    )


@explains_names("generate", "stream")
class GeneratorPool:
    """Several Generators in processes of this machine, which share the prompts. Outputs do not depend on the Generator
    that draws them. If a process ends, the others do its requests again. Use a pool from one thread at a time.

    The arguments are the fields of `GeneratorPoolOptions`; `help(GeneratorPool)` describes them. Raises what a
    Generator raises, and EngineError if all processes have died. This process does not import torch.
    """

    @takes_fields_of(GeneratorPoolOptions)
    def __init__(self, options: GeneratorPoolOptions) -> None:
        options.check()
        if options.tp_group is not None:
            raise ValueError("tp_group belongs to the ranks of a program; a GeneratorPool starts its own processes")
        given = {name: getattr(options, name) for name in OPTIONS if name not in ("device", "tp_group")}
        arguments = {name: value for name, value in given.items() if value != OPTIONS[name].default}
        make, ranks = "fastgen.pool.child:serve_requests", options.tensor_parallel
        self._processes = Processes(make, arguments, options.data_parallel, ranks, options.device)
        self._seed = os.urandom(8) if options.seed is None else options.seed
        self._seeds, self._numbers = itertools.count(), itertools.count()
        self.max_model_len = self._processes.info.max_model_len
        self.default_params = self._processes.info.default_params

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params | Iterable[Params] = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Return the outputs in the order of the prompts; see `Generator.generate`."""
        many = prompt_list(prompts)
        each = params_list(params, len(many))
        for own in {id(own): own for own in each}.values():
            self._checked(own)  # raises before anything runs
        requests = [Request(prompt, own, number) for number, (prompt, own) in enumerate(zip(many, each, strict=True))]
        with closing(self._serve(iter(requests))) as outputs:
            by_number = {output.id: output for output in with_progress(outputs, len(many), progress)}
        return [by_number[number] for number in range(len(many))]

    def stream(
        self, requests: Prompt | Iterable[Request | Prompt | None], params: Params = None
    ) -> PyGenerator[RequestOutput, None, None]:
        """Yield the outputs of requests from an iterable, which may be endless, in the order of completion; see
        `Generator.stream`. Closing the stream early aborts its requests."""
        self._checked(params)
        return self._serve(request_source(requests, params))

    def _serve(self, source: Iterator[Request | None]) -> PyGenerator[RequestOutput, None, None]:
        ids: dict[int, str | int] = {}  # the caller's ids, by number
        failed: list[RequestOutput] = []  # outputs of requests that cannot be sent

        def requests() -> Iterator[tuple[int, Request] | None]:
            for request in source:
                if request is None:
                    yield None
                    continue
                number = next(self._numbers)
                id = number if request.id is None else request.id
                try:
                    params = self._params(request)
                except (ValueError, TypeError) as error:
                    failed.append(error_output(id, error))
                    yield None
                    continue
                ids[number] = id
                yield number, replace(request, params=params, id=number)

        with closing(self._processes.run(requests(), _tokens)) as outputs:
            for output in outputs:
                if isinstance(output, RequestOutput):
                    yield replace(output, id=ids.pop(int(output.id)))
                else:
                    number, error = output
                    yield error_output(ids.pop(number), error)
                yield from failed
                failed.clear()
        yield from failed

    def _params(self, request: Request) -> SamplingParams:
        """Return the parameters of a request as they are sent: with a seed, so that it does not matter which process
        draws. Raises ValueError or TypeError."""
        params = self._checked(request.params)
        if params.seed is None and request.resume is None:
            params = replace(params, seed=seed_of(self._seed, next(self._seeds)))
        if (grammar := params_grammar(params)) is not None:  # text, instead of a class that a process may not have
            params = replace(params, json_schema=None, regex=None, choice=None, grammar=grammar)
        return params

    def _checked(self, params: Params) -> SamplingParams:
        """Return valid parameters. Raises ValueError or TypeError."""
        checked = params_of(params, self.default_params)
        checked.validate(self._processes.info.vocab_size)
        if checked.mask is not None:
            raise ValueError("a mask cannot be sent to another process; use json_schema, regex, choice or grammar")
        return checked

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def __enter__(self) -> GeneratorPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _tokens(request: Request) -> int:
    """Return the number of tokens of a request's prompt, estimated for text, and its answers, at most."""
    params, prompt = request.params, request.prompt
    assert isinstance(params, SamplingParams)
    size = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else len(str(prompt)) // 4
    return size + params.n * (params.max_tokens or 0)
