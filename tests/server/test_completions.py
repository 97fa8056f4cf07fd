"""/v1/completions: what a stream's pieces make together is what comes whole."""

import json
from typing import Any

import pytest
from tests.helpers.engines import EOS
from tests.helpers.fake_engine import FakeEngine, ask, fake_app

PATH = "/v1/completions"


def said(text: str, end: int = EOS) -> Any:
    """A script that answers so."""
    return lambda prompt, index: [*text.encode(), end]


def completed(engine: Any, **body: Any) -> Any:
    reply = ask(fake_app(engine), PATH, {"prompt": "A"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(engine: Any, path: str = PATH, **body: Any) -> list[Any]:
    """The events of a stream that ended well."""
    sent = {k: v for k, v in ({"prompt": "A", "stream": True} | body).items() if v is not None}
    reply = ask(fake_app(engine), path, sent)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize(
    ("text", "fields", "expected", "reason"),
    [
        ("plain", {}, "plain", "stop"),
        ("plain", {"max_tokens": 3}, "pla", "length"),
        ("ABCDEFGHIJK", {"stop": "DEFGHIJ"}, "ABC", "stop"),
        ("ABCDEFGHIJK", {"stop": ["XY", "GH"], "include_stop_str_in_output": True}, None, "stop"),
        ("ABCDEFGHIJ", {"stop": "HIJK"}, "ABCDEFGHIJ", "stop"),
        ("ď😀é", {}, "ď😀é", "stop"),
        ("é😀", {"max_tokens": 4}, "é\ufffd", "length"),
        ("é😀x", {"stop": "😀"}, "é", "stop"),
        ("", {}, "", "stop"),
        ("x\n\ny", {"stop": "\n"}, "x", "stop"),
    ],
)
def test_a_stream_is_the_text(
    text: str, fields: dict[str, Any], expected: str | None, reason: str
) -> None:
    whole = completed(FakeEngine(said(text)), **fields)
    events = streamed(FakeEngine(said(text)), **fields)
    (choice,) = whole["choices"]
    assert choice["text"] == text_of(events) == ("ABCDEFGH" if expected is None else expected)
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == reason
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons.count(None) == len(reasons) - 1


def test_a_reply_has_its_fields() -> None:
    reply = completed(FakeEngine(), max_tokens=3)
    assert reply["id"].startswith("cmpl-")
    assert (reply["object"], reply["model"]) == ("text_completion", "m")
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "BCD",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert completed(FakeEngine())["id"] != completed(FakeEngine())["id"]


def test_sixteen_tokens_are_the_default() -> None:
    assert completed(FakeEngine())["usage"]["completion_tokens"] == 16


def test_prompts_come_in_four_forms() -> None:
    for prompt, texts in (
        ("A", ["BC"]),
        (["A", "K"], ["BC", "LM"]),
        ([65], ["BC"]),
        ([[65], [75], [65, 66]], ["BC", "LM", "CD"]),
    ):
        reply = completed(FakeEngine(), prompt=prompt, max_tokens=2)
        assert [choice["text"] for choice in reply["choices"]] == texts
        assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))


def test_choices_of_several_prompts_and_answers_are_told_apart() -> None:
    def script(prompt: Any, index: int) -> list[int]:
        return [*(f"{chr(prompt[-1])}{index}".encode()), EOS]

    body = {"prompt": ["A", "B"], "n": 2}
    whole = completed(FakeEngine(script), **body)
    assert [choice["text"] for choice in whole["choices"]] == ["A0", "A1", "B0", "B1"]
    events = streamed(FakeEngine(script), **body)
    assert [text_of(events, index) for index in range(4)] == ["A0", "A1", "B0", "B1"]
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["completion_tokens"] == 12


def test_usage_comes_last_when_asked_for_and_before_when_asked_always() -> None:
    assert all("usage" not in event for event in streamed(FakeEngine()))
    options: dict[str, Any] = {"include_usage": True}
    *events, last = streamed(FakeEngine(), max_tokens=3, stream_options=options)
    assert [event["usage"] for event in events] == [None] * len(events)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    options["continuous_usage_stats"] = True
    *events, last = streamed(FakeEngine(), max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 3


def test_echo_puts_the_prompt_before_the_answer() -> None:
    for prompt in ("A", [65]):
        assert completed(FakeEngine(), prompt=prompt, max_tokens=2, echo=True)["choices"][0][
            "text"
        ] == ("ABC")
        events = streamed(FakeEngine(), prompt=prompt, max_tokens=2, echo=True)
        assert text_of(events) == "ABC"


def test_echoed_logprobs_cover_prompt_and_answer() -> None:
    fields = {"prompt": "AB", "max_tokens": 2, "echo": True, "logprobs": 1}
    logprobs = completed(FakeEngine(), **fields)["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["A", "B", "C", "D"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"B": -0.5}, {"C": -0.5}, {"D": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    parts = [
        choice["logprobs"]
        for event in streamed(FakeEngine(), **fields)
        for choice in event["choices"]
    ]
    for key, values in logprobs.items():
        assert [value for part in parts for value in part[key]] == values


def test_half_a_character_is_shown_as_bytes() -> None:
    logprobs = completed(FakeEngine(said("é")), logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<eos>"]
    assert logprobs["top_logprobs"][0] == {"bytes:\\xc3": -0.5}


def test_prompt_logprobs_are_by_token_id() -> None:
    (choice,) = completed(FakeEngine(), prompt="AB", prompt_logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {
            "66": {"logprob": -0.5, "rank": 1, "decoded_token": "B"},
            "67": {"logprob": -1.5, "rank": 2, "decoded_token": "C"},
        },
    ]


def test_token_ids_come_when_asked_for() -> None:
    fields = {"max_tokens": 3, "return_token_ids": True}
    assert completed(FakeEngine(), **fields)["choices"][0]["token_ids"] == [66, 67, 68]
    events = streamed(FakeEngine(), **fields)
    assert [it for event in events for it in event["choices"][0]["token_ids"]] == [66, 67, 68]


def test_a_model_without_tokenizer_answers_ids() -> None:
    engine = FakeEngine(tokenizer=False)
    fields = {"prompt": [65], "max_tokens": 2, "return_token_ids": True, "logprobs": 0}
    (choice,) = completed(engine, **fields)["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [66, 67])
    assert choice["logprobs"]["tokens"] == ["token_id:66", "token_id:67"]
    for path, body in ((PATH, {"prompt": "A"}), ("/tokenize", {"prompt": "A"})):
        reply = ask(fake_app(engine), path, body)
        assert reply.status_code == 400
        assert "no tokenizer" in reply.json()["error"]["message"]


def test_minus_infinity_is_a_number_in_json() -> None:
    from rackmount.sampling.request import TokenLogprobs

    engine = FakeEngine()
    entry = TokenLogprobs(token_id=66, logprob=float("-inf"), rank=9, top={65: float("-inf")})
    engine._logprobs = lambda wanted, token_id: entry  # type: ignore[method-assign]
    (choice,) = completed(engine, max_tokens=1, logprobs=1)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]
