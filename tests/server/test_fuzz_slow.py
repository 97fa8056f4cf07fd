"""Requests with any value in any field, beside neighbours that decode: no failure of the server,
and no other token for a neighbour."""

import asyncio
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tests.helpers.served import SMALL, Served, byte_checkpoint, served
from tests.helpers.streams import stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REFUSALS = {400, 404, 413, 429}
NEIGHBOURS = [
    {"prompt": [n * 7 % 256 for n in range(length)], "max_tokens": 24, "temperature": 0}
    for length in (1, 5, 11, 30)
]
for each in NEIGHBOURS:
    each |= {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = byte_checkpoint(tmp_path_factory.mktemp("bytes"))
    with served(model, *SMALL, "--dtype", "float64") as server:
        yield server


class Crowd:
    """Neighbours who ask the same again and again."""

    def __init__(self, server: Served) -> None:
        self.rounds = 0
        self.wrong: list[Any] = []
        self._server, self._end = server, threading.Event()
        self._expected = [self._ask(body) for body in NEIGHBOURS]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _ask(self, body: dict[str, Any]) -> list[int]:
        return self._streamed([body])[0]

    def _streamed(self, bodies: list[dict[str, Any]]) -> list[list[int]]:
        async def together() -> list[list[int]]:
            asked = (stream(self._server.port, "/v1/completions", body) for body in bodies)
            return [got.token_ids for got in await asyncio.gather(*asked)]

        return asyncio.run(together())

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                got = self._streamed(NEIGHBOURS)
            except Exception as error:
                self.wrong.append(error)
                return
            if got != self._expected:
                self.wrong.append((got, self._expected))
            self.rounds += 1

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def crowd(server: Served) -> Iterator[Crowd]:
    crowd = Crowd(server)
    assert all(len(each) == 24 for each in crowd._expected)
    yield crowd
    crowd.close()


ids = st.integers(0, 259)
WHOLE = [0, -1, 1, 2, 260, 2**31, -(2**31), 2**63, 2**64, 10**30]
BROKEN = [0.5, -0.0, 5e-324, 1e-300, 1e300, math.nan, math.inf, -math.inf]
odd_numbers = st.sampled_from([*WHOLE, *BROKEN])
odd = st.one_of(
    odd_numbers,
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.one_of(odd_numbers, st.text(max_size=2), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=3), odd_numbers, max_size=2),
    st.sampled_from([[[]], [[], [1]], {"type": "json_object"}, "\ud800", "\x00", [{}]]),
)
"""What no field, or hardly one, is meant to hold."""

words = st.text(max_size=40) | st.lists(ids, min_size=1, max_size=60)
small_words = st.text(min_size=1, max_size=3)
meant: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(ids.map(str), st.floats(-100, 100), max_size=4),
    "allowed_token_ids": st.lists(ids, min_size=20, max_size=40),
    "bad_words": st.lists(small_words, max_size=3),
    "min_tokens": st.integers(0, 3),
    "max_tokens": st.integers(3, 12),
    "seed": st.integers(0, 2**64 - 1),
    "stop": small_words | st.lists(small_words, max_size=4),
    "stop_token_ids": st.lists(ids, max_size=3),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "prompt_logprobs": st.integers(0, 20),
    "priority": st.integers(-5, 5),
    "cache_salt": st.text(min_size=1, max_size=4),
    "stream": st.booleans(),
    "return_token_ids": st.booleans(),
    "user": st.text(max_size=3),
    "model": st.just("tiny"),
}
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=9)}
)
ROUTES: dict[str, tuple[str, st.SearchStrategy[Any], dict[str, st.SearchStrategy[Any]]]] = {
    "/v1/completions": (
        "prompt",
        words | st.lists(words, min_size=1, max_size=3),
        {"echo": st.booleans(), "logprobs": st.integers(0, 20)},
    ),
    "/v1/chat/completions": (
        "messages",
        st.lists(turns, min_size=1, max_size=3),
        {"logprobs": st.booleans(), "tool_choice": st.sampled_from(["none", "auto"])},
    ),
}
"""Path -> the field that it needs, and those that are its own."""
amiss: dict[str, st.SearchStrategy[Any]] = {
    "allowed_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "bad_words": st.lists(st.text(max_size=1), max_size=3),
    "best_of": st.just(2),
    "cache_salt": st.just(""),
    "logprobs": st.integers(-1, 300),
    "max_completion_tokens": st.integers(0, 300),
    "max_tokens": st.integers(-1, 300),
    "messages": st.lists(st.fixed_dictionaries({"role": st.just("nobody")}), max_size=1),
    "min_tokens": st.integers(-1, 300),
    "model": st.just("other"),
    "n": st.integers(-1, 300),
    "nonsense": st.just(1),
    "prompt": st.lists(ids, min_size=200, max_size=300) | st.just([[1, 2], []]),
    "guided_choice": st.lists(st.text(max_size=3), max_size=3),
    "guided_grammar": st.sampled_from(['root ::= "a"', "root ::= root", "root", ""]),
    "guided_json": st.sampled_from(
        [{"type": "integer"}, {"type": 1}, {"$ref": "#"}, {}, "{", "true"]
    ),
    "guided_regex": st.sampled_from(["[0-9]+", "a|b", "(", "(?=a)", "\\d{3}", "", "é*"]),
    "response_format": st.sampled_from(
        [
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}},
            {"type": "text"},
        ]
    ),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3),
    "stream_options": st.just({"include_usage": True}),
    "suffix": st.just("a"),
    "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
    "top_logprobs": st.integers(-1, 300),
}
"""What is refused, or may be."""


@st.composite
def asks(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body: half of them as they are meant, half with a field or two amiss."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    name, needed, own = ROUTES[path]
    optional = meant | own
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=8, unique=True))
    body = {name: draw(needed), "max_tokens": 12} | {name: draw(optional[name]) for name in names}
    if draw(st.booleans()):
        for name in draw(st.lists(st.sampled_from(sorted(amiss | body)), min_size=1, max_size=2)):
            body[name] = draw(amiss[name] | odd if name in amiss else odd)
    return path, body


def check_reply(status: int, headers: dict[str, str], data: bytes) -> None:
    """An answer, or a refusal in the one shape."""
    if status in REFUSALS:
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return
    assert status == 200, (status, data)
    if headers["content-type"].startswith("text/event-stream"):
        events = data.decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]", events[-1]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert not any("error" in chunk for chunk in chunks), chunks
    else:
        reply = json.loads(data)
        assert all(choice["finish_reason"] for choice in reply["choices"])
        usage = reply["usage"]
        counts = usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["total_tokens"] == counts


def test_no_field_fails_the_server_or_changes_a_neighbours_tokens(
    server: Served, crowd: Crowd
) -> None:
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=600,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(asks())
    def fuzz(ask: tuple[str, dict[str, Any]]) -> None:
        path, body = ask
        note(f"{path} {json.dumps(body)}")
        status, headers, data = server.request(path, json.dumps(body).encode())
        check_reply(status, headers, data)
        statuses[status] += 1
        assert not crowd.wrong, crowd.wrong[0]

    fuzz()
    assert statuses[200] > 150 and statuses[400] > 100, statuses
    rounds = crowd.rounds
    deadline = time.monotonic() + 60
    while crowd.rounds < rounds + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    crowd.close()
    assert crowd.rounds > rounds and not crowd.wrong, crowd.wrong[:1]
    assert server.status("/health") == 200
    server.await_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [65], "bad_words": ["A"]},
        {"allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 2},
        {"allowed_token_ids": [65], "logit_bias": {"65": -100}},
        {"allowed_token_ids": [65], "temperature": 5e-324},
        {"temperature": 1e300, "top_p": 1e-300, "min_p": 1e-300},
        {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": 2},
        {"logit_bias": {str(n): -100 for n in range(260)}},
        {"logit_bias": {str(n): 100 for n in range(260)}, "temperature": 1e-5},
    ],
)
def test_fields_that_leave_next_to_no_token_fail_no_server(
    server: Served, crowd: Crowd, fields: dict[str, Any]
) -> None:
    for more in ({}, {"stream": True}, {"n": 2, "logprobs": 3}):
        body = {"prompt": [66, 67], "max_tokens": 4} | fields | more
        check_reply(*server.request("/v1/completions", body))
    assert not crowd.wrong, crowd.wrong[0]


COSTLY: list[dict[str, Any]] = [
    {"guided_regex": "(a{1000}){1000}"},
    {"guided_regex": "(a*)*b"},
    {"guided_regex": "(" * 5000 + ")" * 5000},
    {"guided_grammar": 'root ::= "a" root | root "b" | root root'},
    {"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    {"guided_json": '{"type":"array","items":' * 2000 + "{}" + "}" * 2000},
    {"guided_json": {"type": "string", "pattern": "(x+x+)+y", "maxLength": 10**9}},
    {"guided_json": {"type": "array", "minItems": 10**9}},
    {"guided_json": {"$ref": "#"}},
    {"guided_choice": [str(n) for n in range(20_000)]},
]


@pytest.mark.parametrize("fields", COSTLY, ids=range(len(COSTLY)))
def test_a_costly_grammar_is_answered_in_time_and_stalls_no_neighbour(
    server: Served, crowd: Crowd, fields: dict[str, Any]
) -> None:
    rounds, body = crowd.rounds, {"prompt": [66, 67], "max_tokens": 4} | fields
    began = time.monotonic()
    status, headers, data = server.request("/v1/completions", body)
    check_reply(status, headers, data)
    assert time.monotonic() - began < 30
    assert server.status("/health") == 200
    deadline = time.monotonic() + 30
    while crowd.rounds < rounds + 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not crowd.wrong, crowd.wrong[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_bodies_that_are_no_request_are_refused(server: Served, path: str) -> None:
    deep = b"[" * 100_000
    for data in (b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"{}", deep, b'{"prompt":' + deep):
        check_reply(*server.request(path, data))
    assert server.status("/health") == 200
