"""Which JSON Schemas xgrammar keeps to.

It passes over what it does not know, or not together with something else; an answer would look
valid and not be. Such schemas are refused here, by keyword and place. As found in xgrammar 0.2.9.
Keywords that no draft of JSON Schema knows, and `format`, assert nothing.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from rackmount_registry.errors import RequestError

MAX_DEPTH = 64
"""Of schemas in schemas: compile time grows much faster than it."""

MAX_MULTIPLE = 1024
"""A larger `multipleOf` is passed over."""

PASSED_OVER = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "additionalItems",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxProperties",
        "minProperties",
        "not",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Asserting keywords that are refused, unless their value is False."""

OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Asserting keywords by the type that they speak of; "number" counts integers in."""

WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords beside which xgrammar looks at no other."""

UNSAFE_PATTERN = re.compile(r"""["\x00-\x1f]|\\([^dDsSwW\W]|\\|$)""")
"""What may bring a quote, a backslash or a control character into a string unescaped."""


def check_schema(text: str) -> None:
    """RequestError for a schema that xgrammar would keep to in part alone."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is no JSON: {error}") from error
    if not isinstance(root, dict | bool):
        raise RequestError(f"json_schema is {text[:80]!r}; it must be an object, true or false")
    for place, problem in _problems(root, root, "#", 0):
        raise RequestError(f"json_schema at {place}: {problem}")


def _problems(schema: Any, root: Any, place: str, depth: int) -> Iterator[tuple[str, str]]:
    """Place and problem, for this schema and those in it. Malformed values are xgrammar's to
    tell."""
    if not isinstance(schema, dict):
        return
    if depth > MAX_DEPTH:
        yield place, f"more than {MAX_DEPTH} schemas in one another"
        return
    for keyword in sorted(PASSED_OVER.intersection(schema)):
        if schema[keyword] is not False:
            yield place, f"{keyword!r} is not supported"
    whole = [keyword for keyword in WHOLE if keyword in schema]
    rules = [key for keys in OF_TYPE.values() for key in keys if key in schema]
    if whole:
        beside = whole[1:] + rules
        if "type" in schema and whole[0] not in ("const", "enum"):
            beside.append("type")
        if beside:
            yield place, f"{beside[0]!r} beside {whole[0]!r} is not supported"
        yield from ((place, problem) for problem in _whole_problems(schema, root, whole[0]))
    else:
        yield from ((place, problem) for problem in _type_problems(schema, rules))
    for name, inner in _inner(schema):
        yield from _problems(inner, root, f"{place}/{name}", depth + 1)


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas right inside of one, by their place in it."""
    for name in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(name), dict):
            yield from ((f"{name}/{key}", value) for key, value in schema[name].items())
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{index}", each) for index, each in enumerate(schema[name]))
    for name in ("additionalProperties", "items"):
        if name in schema:
            yield name, schema[name]


def _whole_problems(schema: dict[str, Any], root: Any, keyword: str) -> Iterator[str]:
    value = schema[keyword]
    if keyword == "$ref" and not re.fullmatch("#(/.*)?", str(value), re.DOTALL):
        yield f"$ref {value!r} is not supported; it must begin with '#/'"
    if keyword == "allOf" and isinstance(value, list) and len(value) > 1:
        yield "'allOf' of several schemas is not supported"
    if keyword == "oneOf" and isinstance(value, list):
        branches = [_resolved(each, root) for each in value]
        for index, one in enumerate(branches):
            if not all(_are_apart(one, other) for other in branches[:index]):
                yield (
                    "'oneOf' is supported for schemas of different types, or of objects with a "
                    "required property of different 'const'; use 'anyOf'"
                )
                return


def _type_problems(schema: dict[str, Any], rules: list[str]) -> Iterator[str]:
    types = _types(schema)
    if not types:
        if rules or "type" in schema:
            yield f"{(rules or ['type'])[0]!r} needs a 'type' of one name or more"
        return
    properties = schema.get("properties")
    if "object" in types and isinstance(schema.get("required"), list):
        for name in schema["required"]:
            if not isinstance(properties, dict) or name not in properties:
                yield f"required {name!r} is not among the properties"
    if "string" in types:
        strict = [key for key in ("format", "pattern") if key in schema]
        lengths = [key for key in ("minLength", "maxLength") if key in schema]
        if strict and len(strict + lengths) > 1:
            yield f"{(strict + lengths)[1]!r} beside {strict[0]!r} is not supported"
        if UNSAFE_PATTERN.search(str(schema.get("pattern", ""))):
            yield (
                "a 'pattern' with quotes, backslashes or control characters, or with other escapes "
                r"than \d, \w, \s and punctuation, is not supported"
            )
    if "multipleOf" in schema and types.intersection(("integer", "number")):
        ranges = [key for key in OF_TYPE["number"][:-1] if key in schema]
        if "number" in types or ranges:
            yield "'multipleOf' is supported for integers without a range alone"
        elif schema["multipleOf"] not in range(1, MAX_MULTIPLE + 1):
            yield f"'multipleOf' is supported from 1 to {MAX_MULTIPLE}"


def _types(schema: Any) -> frozenset[str]:
    """The types that xgrammar makes; empty where it makes any."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(map(str, named))
    if "properties" in schema or "additionalProperties" in schema:
        return frozenset(("object",))
    if "items" in schema or "prefixItems" in schema:
        return frozenset(("array",))
    return frozenset()


def _resolved(schema: Any, root: Any) -> Any:
    """The schema behind a reference, as far as the first one leads."""
    ref = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(ref, str):
        return schema
    found = root
    for name in ref.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _are_apart(one: Any, other: Any) -> bool:
    """Whether no value is of both schemas."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    mine, theirs = _values(one), _values(other)
    if mine and theirs:
        return mine.isdisjoint(theirs)
    kinds = [{"number" if it == "integer" else it for it in _types(each)} for each in (one, other)]
    if kinds[0] and kinds[1] and kinds[0].isdisjoint(kinds[1]):
        return True
    if kinds[0] == kinds[1] == {"object"}:
        both = set(one.get("required", ())).intersection(other.get("required", ()))
        for name in both:
            mine, theirs = (_values(each.get("properties", {}).get(name)) for each in (one, other))
            if mine and theirs and mine.isdisjoint(theirs):
                return True
    return False


def _values(schema: Any) -> set[str]:
    """The values of a schema that lists them, each as JSON; empty for another schema."""
    if not isinstance(schema, dict):
        return set()
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return {json.dumps(value, sort_keys=True) for value in listed}
