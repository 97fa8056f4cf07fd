"""What an answer is held to: the fields, and the grammars that they ask for."""

import json
from typing import Any

import pytest
from tests.helpers.fake_engine import FakeEngine, ask, fake_app

from rackmount_registry.grammar import GrammarSpec
from rackmount_server.requests import CompletionRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def grammar_of(**fields: Any) -> GrammarSpec | None:
    return CompletionRequest(prompt="x", **fields).grammar()[1]


@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            GrammarSpec(json_schema=json.dumps(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, GrammarSpec(json_schema=json.dumps(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarSpec(json_schema=json.dumps(SCHEMA))),
        ({"guided_regex": "a+"}, GrammarSpec(regex="a+")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec(choice=("a", "b"))),
        ({"guided_grammar": 'root ::= "a"'}, GrammarSpec(ebnf='root ::= "a"')),
    ],
)
def test_each_field_asks_for_its_grammar(fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert grammar_of(**fields) == spec


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    reply = ask(fake_app(FakeEngine()), "/v1/completions", {"prompt": "A"} | fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
