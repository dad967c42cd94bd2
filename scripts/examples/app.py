"""An app of your own: the answers to a question, asked many times, by how often they come."""

from collections import Counter
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from fastgen import AsyncGenerator, SamplingParams

engine = AsyncGenerator(seed=0)  # arguments are Generator's; this is the bundled model, in a process of its own


@asynccontextmanager
async def lifespan(app):
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/vote")
async def vote(question: str, samples: int = 16) -> dict[str, int]:
    answers = [""] * samples
    params = SamplingParams(n=samples, temperature=0.8, max_tokens=64)
    try:
        with engine.submit([[{"role": "user", "content": question}]], params) as stream:
            async for events in stream:  # those of a step; leaving the block early aborts the request
                for event in events:
                    if event.error:
                        raise HTTPException(500, event.error)
                    answers[event.index] += event.text
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    return dict(Counter(answers).most_common())
