"""Schemas that would be kept to in part alone are refused, and the others are kept to."""

import json
from typing import Any

import pytest
from tests.helpers.grammars import accepts, byte_backend

from rackmount_registry.errors import RequestError
from rackmount_registry.grammar import GrammarSpec


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


A_OR_B = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in ("a", "b")
]


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (True, ["1", '{"a": [null]}'], ["x", "01"]),
        ({}, ['"a"'], ["a"]),
        ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "3.5"]),
        ({"type": "integer", "multipleOf": 3}, ["0", "6"], ["4"]),
        ({"type": "number", "exclusiveMinimum": 3}, ["3.5"], ["3", "2"]),
        ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"éé"'], ['""', '"aaa"']),
        ({"type": "string", "pattern": r"^[^\d]{2}\.$"}, ['"ab."'], ['"a1."', '"ab"', '"a"."']),
        ({"type": ["integer", "null"], "minimum": 3}, ["3", "null"], ["2", '"a"']),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1}, ["[null]"], ["[]", "[1]"]),
        ({"prefixItems": [{"type": "null"}], "items": False}, ["[null]"], ["[null,1]"]),
        ({"properties": {"a": {}}, "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}', "1"]),
        ({"type": "object", "additionalProperties": {"type": "null"}}, ['{"a":null}'], ['{"a":1}']),
        ({"enum": [1, "a", {"b": None}]}, ["1", '"a"', '{"b":null}'], ["2"]),
        ({"type": "string", "enum": ["é", 'q"']}, ['"é"', r'"q\""'], ['"e"']),
        ({"anyOf": [{"type": "null"}, {"const": 1}]}, ["null", "1"], ["2"]),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, ["null", '"a"'], ["1"]),
        ({"oneOf": A_OR_B, "discriminator": {}}, ['{"kind":"a"}', '{"kind":"b"}'], ['{"kind":1}']),
        ({"allOf": [{"type": "integer", "minimum": 3}]}, ["3"], ["2"]),
        (
            {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"t": {"$ref": "#/$defs/t"}}}}},
            ["{}", '{"t":{"t":{}}}'],
            ['{"u":{}}'],
        ),
        (nested(60), ["[" * 60 + "null" + "]" * 60], ["[null]"]),
        ({"type": "string", "format": "anything", "uniqueItems": False}, ['"b"'], ["1"]),
    ],
)
def test_what_is_taken_is_kept_to(schema: Any, yes: list[str], no: list[str]) -> None:
    grammar = byte_backend().compile(GrammarSpec(json_schema=json.dumps(schema)))
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array", "uniqueItems": True}, "#: 'uniqueItems' is not supported"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a: 'not' is not supported"),
        ({"$defs": {"a": {"items": {"if": {}}}}}, "#/$defs/a/items: 'if' is not supported"),
        ({"minimum": 3}, "#: 'minimum' needs a 'type'"),
        ({"required": ["a"]}, "'required' needs a 'type'"),
        ({"type": []}, "'type' needs a 'type'"),
        ({"type": "object", "required": ["a"]}, "required 'a' is not among the properties"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "'multipleOf' is supported for"),
        ({"type": "integer", "multipleOf": 1025}, "'multipleOf' is supported from 1 to 1024"),
        ({"type": "integer", "multipleOf": 1.5}, "'multipleOf' is supported from 1 to 1024"),
        ({"type": "number", "multipleOf": 3}, "'multipleOf' is supported for"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'maxLength' beside 'pattern'"),
        ({"type": "string", "format": "date", "minLength": 3}, "'minLength' beside 'format'"),
        ({"type": "string", "pattern": 'a"'}, "a 'pattern' with quotes"),
        ({"type": "string", "pattern": "a\\\\"}, "a 'pattern' with quotes"),
        ({"type": "string", "pattern": "\\x22"}, "a 'pattern' with quotes"),
        ({"$ref": "http://example.org"}, "must begin with '#/'"),
        ({"$ref": "#/a", "a": {}, "type": "object"}, "'type' beside '$ref'"),
        ({"anyOf": [{}], "properties": {}}, "'properties' beside 'anyOf'"),
        ({"enum": [1], "const": 1}, "'enum' beside 'const'"),
        ({"allOf": [{"type": "integer"}, {"type": "integer"}]}, "'allOf' of several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use 'anyOf'"),
        ({"oneOf": [{"type": "null"}, A_OR_B[0], A_OR_B[0]]}, "use 'anyOf'"),
        (nested(65), "more than 64 schemas in one another"),
        ({"type": "foo"}, 'Unsupported type "foo"'),
        ({"enum": []}, "enum array must not be empty"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength 5 is greater than"),
        ({"$ref": "#/$defs/x"}, "Cannot find field"),
        ({"$ref": "#"}, "Circular"),
        (False, "cannot accept any value"),
        (3, "must be an object, true or false"),
        ({"properties": 3, "required": 3, "oneOf": 3}, "json_schema"),
    ],
)
def test_what_would_be_passed_over_is_refused_with_its_place(schema: Any, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        byte_backend().check(GrammarSpec(json_schema=json.dumps(schema)))
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["{", "{'a': 1}", "[" * 30_000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="json_schema is no JSON"):
        byte_backend().check(GrammarSpec(json_schema=text))
