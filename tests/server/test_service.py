"""Overload, clients that hang up, and an engine that fails."""

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from tests.helpers.engines import EOS
from tests.helpers.fake_engine import FakeEngine, ask, asked, fake_app

from rackmount.serving.errors import EngineDead

PATH = "/v1/completions"


class Client:
    """A request over bare ASGI: it may hang up, and read as slowly as it likes."""

    def __init__(self, app: Any, body: dict[str, Any]) -> None:
        self._body = json.dumps(body).encode()
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def until(self, num_messages: int) -> None:
        while len(self.messages) < num_messages:
            await asyncio.sleep(0)

    @property
    def events(self) -> list[str]:
        data = b"".join(message.get("body", b"") for message in self.messages).decode()
        return [event.removeprefix("data: ") for event in data.split("\n\n") if event]

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.may_read.wait()
        self.messages.append(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["A", "B"]}])
def test_a_client_that_hangs_up_leaves_nothing(stream: bool, fields: dict[str, Any]) -> None:
    async def run() -> None:
        engine = FakeEngine()
        app = fake_app(engine)
        body = {"prompt": "A", "max_tokens": 200, "stream": stream} | fields
        client = Client(app, body)
        if stream:
            await client.until(3)
        else:
            while engine.num_unfinished != (2 if fields else 1):
                await asyncio.sleep(0)
        engine.go.clear()
        client.gone.set()
        await client.task
        assert engine.num_unfinished == 0
        text = (await asked(app, "/metrics")).text
        assert f'finished_reason="abort",model_name="m"}} {2.0 if fields else 1.0}' in text

    asyncio.run(run())


def test_a_client_that_hangs_up_while_it_waits_leaves_nothing() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.go.clear()
        client = Client(fake_app(engine), {"prompt": "A", "stream": True})
        while not engine.num_unfinished:
            await asyncio.sleep(0)
        client.gone.set()
        await client.task
        assert engine.num_unfinished == 0
        assert not [each for each in client.messages if each.get("body")]

    asyncio.run(run())


def test_a_slow_reader_gets_long_chunks() -> None:
    async def run() -> None:
        engine = FakeEngine()
        client = Client(fake_app(engine), {"prompt": "A", "stream": True, "max_tokens": 100})
        await client.until(2)
        client.may_read.clear()
        while engine.num_unfinished:
            await asyncio.sleep(0)
        client.may_read.set()
        await client.task
        *events, done = client.events
        assert done == "[DONE]"
        assert len(events) < 10
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        assert len(text.encode()) >= 100

    asyncio.run(run())


def test_a_full_queue_is_429_and_says_when_to_come_again() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.go.clear()
        app = fake_app(engine, max_queued_requests=2)
        waiting = Client(app, {"prompt": "A", "n": 2})
        while engine.num_waiting < 2:
            await asyncio.sleep(0)
        reply = await asked(app, PATH, {"prompt": "A", "stream": True})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["type"] == "rate_limit_error"
        assert (await asked(app, "/ready")).status_code == 503
        assert (await asked(app, "/health")).status_code == 200
        engine.go.set()
        await waiting.task
        assert (await asked(app, PATH, {"prompt": "A"})).status_code == 200

    asyncio.run(run())


def test_waiting_tokens_are_bounded_but_one_prompt_is_always_taken() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.go.clear()
        app = fake_app(engine, max_waiting_tokens=10)
        waiting = Client(app, {"prompt": "A" * 20})
        while not engine.num_waiting:
            await asyncio.sleep(0)
        assert (await asked(app, PATH, {"prompt": "A"})).status_code == 429
        engine.go.set()
        await waiting.task
        assert (await asked(app, PATH, {"prompt": "A"})).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["A" * 6, "A" * 6]}])
def test_more_prompt_tokens_than_may_wait_are_refused_for_good(fields: dict[str, Any]) -> None:
    app = fake_app(FakeEngine(), max_waiting_tokens=10)
    reply = ask(app, PATH, {"prompt": "A" * 6} | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")


class SlowTokenizing(FakeEngine):
    """Its texts are encoded once `may_encode` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_encode = threading.Event()
        self.encoded: list[Any] = []

    def encode(self, prompt: Any, *given: Any, **more: Any) -> Any:
        self.encoded.append(prompt)
        assert self.may_encode.wait(20)
        return super().encode(prompt, *given, **more)


@pytest.mark.parametrize("stream", [False, True])
def test_what_waits_to_be_encoded_waits(stream: bool) -> None:
    async def run() -> None:
        engine = SlowTokenizing()
        app = fake_app(engine, max_queued_requests=2)
        clients = [Client(app, {"prompt": "A", "stream": stream}) for _ in range(2)]
        while not engine.encoded:
            await asyncio.sleep(0.01)
        for path, body in ((PATH, {"prompt": "B"}), ("/tokenize", {"prompt": "B"})):
            assert (await asked(app, path, body)).status_code == 429
        assert (await asked(app, "/detokenize", {"tokens": [65]})).status_code == 429
        assert (await asked(app, "/ready")).status_code == 503
        clients[1].gone.set()
        await clients[1].task
        assert (await asked(app, "/ready")).status_code == 200
        engine.may_encode.set()
        await clients[0].task
        assert clients[0].messages[0]["status"] == 200
        assert engine.encoded == ["A"], "who hung up is not encoded"

    asyncio.run(run())


def test_the_text_that_waits_to_be_encoded_is_bounded() -> None:
    async def run() -> None:
        engine = SlowTokenizing()
        app = fake_app(engine, max_body_bytes=200)
        client = Client(app, {"prompt": "A" * 120})
        while not engine.encoded:
            await asyncio.sleep(0.01)
        reply = await asked(app, PATH, {"prompt": "A" * 120})
        assert (reply.status_code, "120 bytes" in reply.text) == (429, True)
        engine.may_encode.set()
        assert (await asked(app, PATH, {"prompt": "A" * 50})).status_code == 200
        await client.task

    asyncio.run(run())


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_text_that_cannot_fit_is_refused_before_it_is_encoded(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SlowTokenizing()

    def encode(*given: Any, **more: Any) -> None:
        raise AssertionError("the text is encoded")

    monkeypatch.setattr(engine.tokenizer, "encode", encode)
    reply = ask(fake_app(engine), path, {"prompt": "A" * 100_000})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], engine.encoded) == (400, "prompt", [])
    assert re.search("100000 characters is too long: max_model_len=256", error["message"])


def test_a_server_that_stops_is_not_ready_and_lets_in_no_more() -> None:
    async def run() -> None:
        app = fake_app(FakeEngine())
        app.state.admission.close()
        for path, body in (
            ("/ready", None),
            (PATH, {"prompt": "A"}),
            ("/tokenize", {"prompt": "A"}),
        ):
            reply = await asked(app, path, body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert (await asked(app, "/health")).status_code == 200

    asyncio.run(run())


def test_ready_follows_the_tokens_that_wait() -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.go.clear()
        app = fake_app(engine, max_waiting_tokens=10)
        waiting = Client(app, {"prompt": "A" * 20})
        while not engine.num_waiting:
            await asyncio.sleep(0.01)
        assert (await asked(app, "/ready")).status_code == 503
        engine.go.set()
        await waiting.task
        assert (await asked(app, "/ready")).status_code == 200

    asyncio.run(run())


def test_more_answers_than_the_queue_holds_are_refused_for_good() -> None:
    reply = ask(fake_app(FakeEngine(), max_queued_requests=3), PATH, {"prompt": "A", "n": 4})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")


def test_a_dead_engine_ends_streams_with_an_error_and_turns_health_red() -> None:
    async def run() -> None:
        engine = FakeEngine()
        app = fake_app(engine)
        client = Client(app, {"prompt": "A", "max_tokens": 200, "stream": True})
        await client.until(2)
        engine.die("the core died")
        await asyncio.wait_for(client.task, 5)
        assert json.loads(client.events[-1])["error"]["message"] == "the core died"
        for path, body in ((PATH, {"prompt": "A"}), ("/health", None), ("/ready", None)):
            reply = await asked(app, path, body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the core died")
        assert (await asked(app, "/server_info")).json()["failure"] == "the core died"
        assert "rackmount:engine_up" in (await asked(app, "/metrics")).text

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_before_the_first_token_is_503(stream: bool) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.go.clear()
        client = Client(fake_app(engine), {"prompt": ["A", "B"], "stream": stream})
        while engine.num_unfinished < 2:
            await asyncio.sleep(0)
        engine.die()
        await client.task
        assert client.messages[0]["status"] == 503

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "status"), [({}, 500), ({"allowed_token_ids": [65], "bad_words": ["A"]}, 400)]
)
def test_logits_without_a_token_are_an_error_of_that_request(
    fields: dict[str, Any], status: int
) -> None:
    async def run() -> None:
        engine = FakeEngine()
        engine.go.clear()
        app = fake_app(engine)
        client = Client(app, {"prompt": "A"} | fields)
        while not engine.open:
            await asyncio.sleep(0)
        ((sequence, _),) = engine.open.values()
        sequence.end("error")
        await client.task
        assert client.messages[0]["status"] == status
        engine.go.set()
        assert (await asked(app, PATH, {"prompt": "A"})).status_code == 200

    asyncio.run(run())


def test_one_refused_prompt_of_a_list_takes_back_the_others() -> None:
    engine = FakeEngine()

    def submit(ids: list[int], *given: Any, **more: Any) -> Any:
        if len(engine.submitted) == 1:
            raise EngineDead("just now")
        return FakeEngine.submit(engine, ids, *given, **more)

    engine.submit = submit  # type: ignore[method-assign]
    reply = ask(fake_app(engine), PATH, {"prompt": ["A", "B"]})
    assert reply.status_code == 503
    assert engine.num_unfinished == 0


def test_an_answer_of_no_text_ends() -> None:
    engine = FakeEngine(lambda prompt, index: [EOS])
    reply = ask(fake_app(engine), PATH, {"prompt": "A"}).json()
    assert reply["choices"][0]["text"] == ""
    assert reply["usage"]["completion_tokens"] == 1
