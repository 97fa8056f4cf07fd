"""Tool calls in text that comes in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackmount_server.tool_calls import ToolCallParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "<tool"]}}</tool_call>'


def parsed(pieces: list[str]) -> tuple[str, list[Any]]:
    """Text and (name, arguments) of all that came of pieces."""
    parser = ToolCallParser()
    results = [*map(parser.push, pieces), parser.finish()]
    calls = [call["function"] for _, made in results for call in made]
    return "".join(text for text, _ in results), [
        (call["name"], json.loads(call["arguments"])) for call in calls
    ]


@pytest.mark.parametrize(
    ("text", "said", "num_calls"),
    [
        ("no call", "no call", 0),
        (f"one: {CALL}", "one: ", 1),
        (f"{CALL}\n{CALL}", "", 2),
        (f"{CALL} and more", "and more", 1),
        ('<tool_call>{"name": "f", "arguments": {}}', "", 1),
        ("<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", 0),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None, 0),
        ("<tool_call>[]</tool_call>x", "<tool_call>[]</tool_call>x", 0),
        ("<tool_call>" + "[" * 5000, None, 0),
        ("a < b <tool", "a < b <tool", 0),
        (r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', None, 0),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, 0),
        ('<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', None, 0),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None, 0),
        ("<tool_call>never", "<tool_call>never", 0),
        ("</tool_call>", "</tool_call>", 0),
        ("<<tool_call>", "<<tool_call>", 0),
    ],
)
def test_calls_are_told_from_text(text: str, said: str | None, num_calls: int) -> None:
    got, calls = parsed([text])
    assert got == (text if said is None else said)
    assert calls == [("f", calls[0][1])] * num_calls if calls else not num_calls


@given(
    parts=st.lists(st.sampled_from(["x", "\n", "<", "<tool_call>", "</tool_call>", "{", CALL])),
    data=st.data(),
)
def test_the_pieces_do_not_matter(parts: list[str], data: Any) -> None:
    text = "".join(parts)
    places = st.integers(0, len(text))
    cuts = sorted(data.draw(st.lists(places, max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == parsed([text])


def test_text_that_is_no_beginning_of_a_call_is_not_held() -> None:
    parser = ToolCallParser()
    assert parser.push("a <b") == ("a <b", [])
    assert parser.push(" <tool") == (" ", [])
    assert parser.push("s>") == ("<tools>", [])


def test_half_a_surrogate_in_arguments_can_be_sent() -> None:
    _, ((name, arguments),) = parsed(
        [r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>']
    )
    assert (name, arguments) == ("f", {"a": "\ud800"})
    parser = ToolCallParser()
    _, calls = parser.push(r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>')
    assert json.dumps(calls, ensure_ascii=False).encode()
