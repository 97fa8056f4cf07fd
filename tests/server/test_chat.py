"""/v1/chat/completions, /tokenize and /detokenize."""

import json
from typing import Any

import pytest
from tests.helpers.engines import EOS, byte_tokenizer
from tests.helpers.fake_engine import FakeEngine, ask, fake_app
from tests.server.test_completions import said, streamed

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.a }}]"
    "{% endfor %};{% endfor %}{% if tools %}tools:{{ tools[0].function.name }};{% endif %}"
    "{% if add_generation_prompt %}A{% endif %}{{ mood }}"
)


def chatted(engine: Any, messages: Any = "x", **body: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    reply = ask(fake_app(engine), PATH, {"messages": messages} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def prompt_of(messages: Any, **body: Any) -> str:
    """What the chat template made."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    engine = FakeEngine(tokenizer=tokenizer)
    chatted(engine, messages, max_tokens=1, **body)
    return bytes(engine.submitted[0][0]).decode()


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that the deltas of a stream make."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return {"content": "".join(d.get("content") or "" for d in deltas), "calls": calls}


def test_a_reply_has_its_fields() -> None:
    reply = chatted(FakeEngine(said("hé")))
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hé"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)


def test_a_stream_names_the_role_once() -> None:
    events = streamed(FakeEngine(said("hé")), PATH, prompt=None, **_hello())
    assert events[0]["object"] == "chat.completion.chunk"
    assert [event["choices"][0]["delta"].get("role") for event in events][:2] == ["assistant", None]
    assert joined(events) == {"content": "hé", "calls": []}


def test_logprobs_have_bytes() -> None:
    (choice,) = chatted(FakeEngine(said("é")), logprobs=True, top_logprobs=1)["choices"]
    first = choice["logprobs"]["content"][0]
    entry = {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]}
    assert first == entry | {"top_logprobs": [entry]}
    assert len(choice["logprobs"]["content"]) == 3


def test_messages_go_through_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 5}'}}
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "6"},
    ]
    assert prompt_of(messages) == "system:be;user:a\nb;assistant:[f 5];tool:6;A"


def test_a_reply_that_is_handed_back_goes_through_the_template() -> None:
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    reply = {"role": "assistant", "content": "a", "reasoning_content": "b", "name": "c"}
    assert prompt_of([reply | nulls]) == "assistant:a;A"


def test_a_template_reads_options_and_tools() -> None:
    hello = [{"role": "user", "content": "x"}]
    assert prompt_of(hello, chat_template_kwargs={"mood": "!"}) == "user:x;A!"
    assert prompt_of(hello, tools=[TOOL]) == "user:x;tools:add;A"
    assert prompt_of(hello, tools=[TOOL], tool_choice="none") == "user:x;A"
    assert prompt_of(hello, add_generation_prompt=False) == "user:x;"


def test_a_template_of_the_operator_goes_before_the_models() -> None:
    engine = FakeEngine()
    app = fake_app(engine, chat_template="{{ messages[0].content }}!")
    assert ask(app, PATH, {"messages": [{"role": "user", "content": "x"}]}).status_code == 200
    assert bytes(engine.submitted[0][0]) == b"x!"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_parsed(stream: bool) -> None:
    engine = FakeEngine(said(f"sure {CALL}\n{CALL}"))
    fields: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200}
    if stream:
        events = streamed(engine, PATH, prompt=None, **_hello(), **fields)
        message = joined(events)
        reason = events[-1]["choices"][0]["finish_reason"]
        assert [call.pop("index") for call in message["calls"]] == [0, 1]
    else:
        (choice,) = chatted(engine, **fields)["choices"]
        message = choice["message"] | {"calls": choice["message"]["tool_calls"]}
        reason = choice["finish_reason"]
    assert (message["content"], reason) == ("sure ", "tool_calls")
    for call in message["calls"]:
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}
    assert len({call["id"] for call in message["calls"]}) == 2


def test_a_call_alone_has_no_content() -> None:
    (choice,) = chatted(FakeEngine(said(CALL)), tools=[TOOL], max_tokens=200)["choices"]
    assert choice["message"]["content"] is None


def test_without_tools_a_call_is_text() -> None:
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        (choice,) = chatted(FakeEngine(said(CALL)), max_tokens=200, **fields)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, '{"a": NaN}'])
def test_arguments_that_are_no_json_are_refused(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    reply = ask(fake_app(FakeEngine()), PATH, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


def test_text_becomes_ids_and_back() -> None:
    app = fake_app(FakeEngine())
    reply = ask(app, "/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert reply["tokens"] == list("hé".encode())
    assert (reply["count"], reply["max_model_len"]) == (3, 256)
    assert reply["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert ask(app, "/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "hé"}
    assert ask(app, "/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert ask(app, "/tokenize", {"prompt": "A" * 999}).json()["count"] == 999
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert bytes(ask(app, "/tokenize", chat).json()["tokens"]) == b"u:xA"
    for path, body, param in (
        ("/detokenize", {"tokens": [EOS + 99]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo"),
        ("/tokenize", chat | {"foo": 1}, "foo"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", b'{"prompt": "\\ud800"}', "prompt"),
        ("/detokenize", {"tokens": [65] * 257}, "tokens"),
    ):
        reply = ask(app, path, body, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def _hello() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}]}
