"""A task of datatrove that asks questions: datatrove_program.py URL_OR_EMPTY FOLDER DOCUMENTS. Without a URL it starts
fgserve itself. One document is too long for the context."""

from __future__ import annotations

import sys
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.inference.types import InferenceError
from datatrove.pipeline.writers import JsonlWriter

from fastgen.data.datatrove import FastgenRunner

LONG, CONTEXT = 3, 128


def text_of(number: int) -> str:
    return "word " * CONTEXT if number == LONG else f"what is {number} + 7?"


async def rollout(document: Document, generate: Any) -> Any:
    messages = [{"role": "user", "content": document.text}]
    try:
        return await generate({"messages": messages, "max_tokens": 20, "temperature": 0.0})
    except InferenceError as error:
        return {"error": str(error.error)}


def main(url: str, folder: str, documents: str) -> None:
    options: dict[str, Any] = {"model_max_context": CONTEXT, "max_concurrent_generations": 8}
    if url:
        config = InferenceConfig("endpoint", "fastgen-tiny", endpoint_url=url, api_key="none", **options)
    else:
        kwargs = {"page_size": 16, "num_pages": 300, "prefix_cache": False}
        config = InferenceConfig("custom", "fastgen-tiny", model_kwargs=kwargs, **options)
    writer = JsonlWriter(f"{folder}/out", "${rank}_${chunk_index}.jsonl", compression=None)
    checkpoints = {"checkpoints_local_dir": f"{folder}/checkpoints", "records_per_chunk": 10}
    runner = (InferenceRunner if url else FastgenRunner)(rollout, config, writer, **checkpoints)
    runner.run(Document(text=text_of(number), id=str(number)) for number in range(int(documents)))


if __name__ == "__main__":
    main(*sys.argv[1:])
