"""What is refused, and how: OpenAI's shape, the right status and the field's name."""

import json
from typing import Any

import pytest
from tests.helpers.engines import byte_tokenizer
from tests.helpers.fake_engine import FakeEngine, ask, fake_app

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "A"}]


def refused(body: Any, path: str = COMPLETION) -> Any:
    """The error of a reply; nothing was submitted."""
    engine = FakeEngine()
    reply = ask(fake_app(engine), path, body)
    assert reply.status_code == 400, reply.text
    assert not engine.submitted
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"suffix": "x"}, "suffix"),
        ({"request_id": "mine"}, "request_id"),
        ({"best_of": 2}, "best_of"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"allowed_token_ids": [260]}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"n": 1024, "prompt": ["A", "B"]}, "n"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused({"prompt": "A"} | fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.split(".")[-1] in error["message"] or param == "n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [HELLO[0] | {"contents": "x"}]}, "messages.0.contents"),
        ({"messages": [HELLO[0] | {"refusal": "no"}]}, "messages.0.refusal"),
        ({"messages": [HELLO[0] | {"content": "A" * 9999}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"functions": []}, "functions"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(fields: dict[str, Any], param: str | None) -> None:
    error = refused({"messages": HELLO} | fields, CHAT)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_chat_without_a_template_is_told_what_a_server_has_instead(path: str) -> None:
    bare = byte_tokenizer()
    bare.chat_template = None
    reply = ask(fake_app(FakeEngine(tokenizer=bare)), path, {"messages": HELLO})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages")
    assert "/v1/completions" in error["message"] and "--chat-template FILE" in error["message"]
    assert "chat_template_kwargs" not in error["message"]


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(name: str, value: str) -> None:
    body = f'{{"prompt": "A", "{name}": {value}}}'.encode()
    engine = FakeEngine()
    reply = ask(fake_app(engine), COMPLETION, body, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_a_bias_that_is_not_finite_is_refused(value: str) -> None:
    body = f'{{"prompt": "A", "logit_bias": {{"66": {value}}}}}'.encode()
    reply = ask(fake_app(FakeEngine()), COMPLETION, body, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [[65], []], ["A", ""], [260], [-1], [True], ["A", [65]], 5, None, "A" * 256],
)
def test_a_prompt_that_cannot_be_is_refused(prompt: Any) -> None:
    assert refused({"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{", JSON),
        (b"[]", JSON),
        (b"[" * 10_000, JSON),
        (b"1" * 10_000, JSON),
        (b"\xff\xfe", JSON),
        (b'{"prompt": "A"}', {"content-type": "text/plain"}),
        (b'{"prompt": "A"}', {}),
        (b"", JSON),
        (b'{"prompt": "\\ud800"}', JSON),
        (b'{"prompt": "A", "\\ud800": 1}', JSON),
        (b'{"prompt": "A", "cache_salt": "\\ud800"}', JSON),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, headers: dict[str, str]) -> None:
    reply = ask(fake_app(FakeEngine()), COMPLETION, body, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_another_model_is_not_found() -> None:
    for name, shown in (("gpt-4", "gpt-4"), ("\ud800", "ud800")):
        body = json.dumps({"prompt": "A", "model": name}).encode()
        reply = ask(fake_app(FakeEngine()), COMPLETION, body, headers=JSON)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (404, "model")
        assert error["code"] == "model_not_found"
        assert shown in error["message"]


def test_an_unknown_route_and_a_wrong_method_have_the_shape_too() -> None:
    app = fake_app(FakeEngine())
    for path, method, status in (("/v2", "GET", 404), (COMPLETION, "GET", 405)):
        reply = ask(app, path, method=method)
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert ask(app, COMPLETION, method="GET").headers["allow"] == "POST"


def test_a_mistake_of_the_program_tells_nothing_but_its_kind() -> None:
    engine = FakeEngine()
    del engine.description
    reply = ask(fake_app(engine), "/server_info")
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "internal error: AttributeError"


def test_fields_that_cannot_change_the_answer_are_taken() -> None:
    engine = FakeEngine()
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    reply = ask(fake_app(engine), CHAT, {"messages": HELLO, "max_tokens": 2} | harmless)
    assert reply.status_code == 200
    nulls = {"suffix": None, "best_of": None, "stop": None, "n": None, "logit_bias": None}
    reply = ask(fake_app(engine), COMPLETION, {"prompt": "A"} | nulls)
    assert reply.status_code == 200


def test_every_sampling_field_reaches_the_engine() -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.0,
        "top_k": -1,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "allowed_token_ids": [66, 67, 68],
        "bad_words": ["x"],
        "min_tokens": 1,
        "max_tokens": 4,
        "seed": 7,
        "stop": ["z"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "skip_special_tokens": False,
    }
    own = {"logit_bias": {"66": 5}, "priority": 3, "cache_salt": "s"}
    engine = FakeEngine()
    reply = ask(fake_app(engine), COMPLETION, {"prompt": [65]} | given | own)
    assert reply.status_code == 200, reply.text
    ((prompt, params, priority, salt),) = engine.submitted
    assert {name: getattr(params, name) for name in given} == given
    assert (prompt, params.logit_bias, priority, salt) == ([65], {66: 5}, 3, "s")


def test_what_is_not_asked_for_is_what_the_model_recommends() -> None:
    engine = FakeEngine(temperature=0.6, top_k=20)
    ask(fake_app(engine), CHAT, {"messages": HELLO, "top_k": 5, "max_completion_tokens": 3})
    params = engine.submitted[0][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 3)


def test_errors_stay_json_where_the_document_says_so() -> None:
    document = ask(fake_app(FakeEngine()), "/openapi.json").json()
    assert {COMPLETION, CHAT, "/v1/models", "/tokenize", "/health"} <= set(document["paths"])
    assert json.dumps(document)
