"""scripts/bench/bench_serve.py asks what it says it asks, of a server that is started for it, and its figures add
up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "bench"))

import bench_serve  # noqa: E402
import serve_cost  # noqa: E402
import serve_load  # noqa: E402
import serve_process  # noqa: E402
from serve_load import Answer, Load  # noqa: E402

from fastgen.text.tokenizer import Tokenizer  # noqa: E402

GAP = 0.02
FRAMES = [
    b'{"choices":[{"text":"a"}]}',
    b'{"choices":[{"text":"b"}]}',
    b'{"choices":[],"usage":{"completion_tokens":9}}',
]


class FakeServer:
    """Answers all requests alike, and remembers what they were and how many ran at a time."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most = self.running = 0
        self.frames = [*FRAMES, b"[DONE]"]
        self.status = b"200 OK"
        self._loop = asyncio.new_event_loop()
        listening = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if head.startswith(b"get"):
            writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{"data": [{"id": "m"}]}')
            writer.close()
            return
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        self.running += 1
        self.most = max(self.most, self.running)
        writer.write(b"HTTP/1.1 " + self.status + b"\r\nconnection: close\r\n\r\n")
        for frame in self.frames:
            await asyncio.sleep(GAP)
            self.running -= frame is self.frames[-1]  # where the client sees its end
            writer.write(b"data: " + frame + b"\n\n")
        writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def ask(load: Load) -> list[Answer]:
    return asyncio.run(serve_load._ask_all(load, lambda: None))


# ------------------------------------------------------------------------------------------------- the load


def test_so_many_requests_are_kept_in_flight(fake: FakeServer) -> None:
    answers = ask(Load(fake.url, "m", requests=12, prompt=7, tokens=9, concurrency=4))
    assert fake.most == 4
    assert [(answer.tokens, answer.error) for answer in answers] == 12 * [(9, None)]
    assert {len(answer.chunks) for answer in answers} == {2}
    assert all(answer.sent < answer.chunks[0] <= answer.chunks[-1] for answer in answers)
    assert [len(body["prompt"]) for body in fake.bodies] == 12 * [7]
    assert len({str(body["prompt"]) for body in fake.bodies}) == 12, "or a prefix cache would know them"
    assert all(body["ignore_eos"] and body["max_tokens"] == 9 for body in fake.bodies)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([FRAMES[0]], "without [DONE]"),
        ([FRAMES[0], b'{"error": {"message": "lost"}}'], "lost"),
    ],
)
def test_a_stream_that_breaks_is_an_error(fake: FakeServer, frames: list[bytes], message: str) -> None:
    fake.frames = frames
    (answer,) = ask(Load(fake.url, "m", requests=1, prompt=1, tokens=9, concurrency=1))
    assert message in str(answer.error)


def test_a_refusal_is_an_error_and_a_load_of_them_raises(fake: FakeServer) -> None:
    fake.status = b"503 Service Unavailable"
    answers = ask(Load(fake.url, "m", requests=2, prompt=1, tokens=9, concurrency=2))
    assert all(str(answer.error).startswith("503") for answer in answers)
    with pytest.raises(RuntimeError, match="all 2 requests failed, the first with 503"):
        serve_load.figures(answers)


def test_a_rate_spreads_requests_and_some_have_long_prompts(fake: FakeServer) -> None:
    answers = ask(Load(fake.url, "m", requests=8, prompt=2, tokens=9, concurrency=99, rate=40.0, long=5, every=4))
    assert sorted(len(body["prompt"]) for body in fake.bodies) == [2] * 6 + [5] * 2
    sent = sorted(answer.sent for answer in answers)
    assert 0.05 < sent[-1] - sent[0] < 1.0, "8 requests at 40 a second"


def test_several_clients_share_a_load() -> None:
    load = Load("u", "m", requests=10, prompt=1, tokens=1, concurrency=5)
    shares = load.shares(3)
    assert [share.requests for share in shares] == [3, 3, 4]
    assert [share.concurrency for share in shares] == [1, 2, 2]
    assert len({share.body(random.Random(share.seed), 1) for share in shares}) == 3
    assert len(load.shares(64)) == 5
    assert {share.rate for share in Load("u", "m", 10, 1, 1, 5, rate=6.0).shares(3)} == {2.0}


def test_the_figures() -> None:
    answers = [Answer(1.0, [2.0, 2.5, 4.5], 30), Answer(1.5, [3.5, 4.0, 5.0], 20), Answer(0.0, [], 0, "lost")]
    found = serve_load.figures(answers)
    assert (found["requests"], found["errors"], found["first_error"]) == (2, 1, "lost")
    assert (found["seconds"], found["tokens_per_second"], found["requests_per_second"]) == (5, 10, 0.4)
    assert found["ttft"] == pytest.approx({"p50": 1.5, "p90": 1.9, "p99": 1.99, "p99.9": 1.999, "mean": 1.5})
    assert found["inter_token"]["p50"] == 0.75
    assert found["end_to_end"]["mean"] == 3.5
    assert serve_load.figures([Answer(1.0, [2.0], 5)])["inter_token"] is None


def test_presets_give_way_to_what_is_given() -> None:
    given = bench_serve.parse(["--concurrency", "3,40", "--tokens", "5", "--serve", "mistral7", "--max-seqs", "9"])
    loads = list(bench_serve.loads(given, "u", "m"))
    assert [(load.prompt, load.tokens, load.concurrency, load.requests) for load in loads] == [
        (128, 5, 3, 16),
        (128, 5, 40, 80),
    ]
    assert given.serve == ["mistral7", "--max-seqs", "9"]
    (headline,) = bench_serve.loads(bench_serve.parse(["--preset", "headline"]), "u", "m")
    assert (headline.requests, headline.prompt, headline.tokens, headline.concurrency) == (512, 1024, 128, 512)
    assert bench_serve.report_path(bench_serve.parse(["--preset", "smoke"])) is None, "nothing is written"
    sweep = list(bench_serve.loads(bench_serve.parse([]), "u", "m"))
    assert [load.concurrency for load in sweep] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    beside = list(bench_serve.loads(bench_serve.parse(["--preset", "beside", "--rate", "2.5,0"]), "u", "m"))
    assert [(load.rate, load.long, load.every) for load in beside] == [(2.5, 8000, 4), (0, 8000, 4)]
    with pytest.raises(SystemExit):
        bench_serve.parse(["--cost", "--url", "http://localhost"])


# ------------------------------------------------------------------------------------------------- the cost


def test_a_burst_reads_all_answers(fake: FakeServer) -> None:
    body = json.dumps({"stream": True}).encode()
    assert serve_cost.send_burst(fake.url, 5 * [body]) == 5 * 9
    assert fake.most == 5
    fake.status = b"503 Service Unavailable"
    with pytest.raises(RuntimeError, match="503 Service Unavailable"):
        serve_cost.send_burst(fake.url, [body])


def test_the_cost_is_beside_that_of_the_generator_alone() -> None:
    kinds = {
        "direct": [serve_cost.Cost(1000, 1.0, 0.5)],
        "streamed": [serve_cost.Cost(1000, 2.0, 0.6, 0.1), serve_cost.Cost(1000, 4.0, 0.6, 0.3)],
        "whole": [serve_cost.Cost(1000, 1.25, 0.5, 0.05)],
    }
    found = serve_cost.report(kinds)
    assert found["direct"]["tokens_per_second"] == 1000
    assert found["whole"]["speed_of_direct"] == pytest.approx(0.8)
    assert found["streamed"]["engine_of_direct"] == pytest.approx(1.2)
    assert found["streamed"]["http_us_per_token"] == pytest.approx(200)
    assert found["streamed"]["spread"] == [250, 500]
    assert len(serve_cost.lines(found)) == 3


def test_cpu_time_is_that_of_the_process() -> None:
    if not Path("/proc").exists():
        pytest.skip("the clock of another process is Linux's")
    before, own = serve_process.cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < own + 0.05:
        pass
    assert serve_process.cpu_seconds(os.getpid()) - before == pytest.approx(time.process_time() - own, abs=0.01)


def test_random_weights_have_a_tokenizer_of_all_ids(tmp_path: Path) -> None:
    serve_process.write_tokenizer(tmp_path, 50)
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer(tmp_path)
    assert len(tokenizer.hf) == 50
    assert tokenizer.decode([3, 49]) == "w3 w49"
    assert tokenizer.encode("w3 w49") == [3, 49]


# ------------------------------------------------------------------------------------------------- both


def test_it_measures_a_server(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_soak.py has servers that scripts start themselves."""
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", "--smoke", "--url", fake.url, "--out", str(tmp_path)])
    plotted: list[Path] = []
    monkeypatch.setattr(bench_serve, "plot", lambda report, path: plotted.append(path))
    bench_serve.main()
    report = json.loads((tmp_path / "serve-smoke.json").read_text())
    assert (report["server"], report["model"]) == (fake.url, "m")
    assert [(point["concurrency"], point["requests"], point["errors"]) for point in report["points"]] == [
        (1, 8, 0),
        (4, 8, 0),
    ]
    for point in report["points"]:
        assert point["tokens_per_second"] == pytest.approx(9 * 8 / point["seconds"])
        assert 0 < point["ttft"]["p50"] <= point["end_to_end"]["p50"] <= point["seconds"]
    assert plotted == [tmp_path / "serve-smoke.png"]
