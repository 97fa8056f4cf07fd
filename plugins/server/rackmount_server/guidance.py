"""What an answer is held to, under OpenAI's name and vLLM's."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from rackmount_registry.grammar import GrammarSpec
from rackmount_server.body import Fields
from rackmount_server.errors import ApiError


class JsonSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] | bool = Field(alias="schema")
    strict: bool | None = None
    """Answers keep to the schema in any case."""


class PlainFormat(Fields):
    type: Literal["text", "json_object"]


class SchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Guided(Fields):
    """At most one of these says what an answer may be."""

    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    guided_json: str | dict[str, JsonValue] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def grammar(self) -> tuple[str | None, GrammarSpec | None]:
        """The field that was given, and what it asks for.

        Raises:
            ApiError: more than one, or one that cannot be.
        """
        schema, choices = self.guided_json, self.guided_choice
        schema = json.dumps(schema) if isinstance(schema, dict) else schema
        asked: dict[str, dict[str, Any]] = {
            "response_format": _of_format(self.response_format),
            "guided_json": {"json_schema": schema},
            "guided_regex": {"regex": self.guided_regex},
            "guided_choice": {"choice": None if choices is None else tuple(choices)},
            "guided_grammar": {"ebnf": self.guided_grammar},
        }
        given = [(name, spec) for name, spec in asked.items() if [*spec.values()] != [None]]
        if not given:
            return None, None
        if len(given) > 1:
            names = [name for name, _ in given]
            raise ApiError(400, f"{' and '.join(names)}: give one of them", param=names[1])
        ((name, spec),) = given
        try:
            return name, GrammarSpec(**spec)
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"{name}: {error}", param=name) from error


def _of_format(form: PlainFormat | SchemaFormat | None) -> dict[str, Any]:
    if isinstance(form, SchemaFormat):
        return {"json_schema": json.dumps(form.json_schema.schema_)}
    return {"json_object": True if form is not None and form.type == "json_object" else None}
