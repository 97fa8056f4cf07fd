"""The bodies of requests: unknown fields are refused, and values of another type not converted."""

import json
from typing import Annotated, Any, NoReturn, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Unsupported: TypeAlias = None
"""Type of a field of OpenAI's that is refused, by its name, unless it is null."""

# In long lists the first mistake is enough.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Rows = Annotated[list[Ids], Field(fail_fast=True)]


class Fields(BaseModel):
    """Base of all: strict, and no field beyond the known ones."""

    model_config = ConfigDict(extra="forbid", strict=True)


def read_json(text: str) -> Any:
    """JSON inside a string. ValueError for what is none, or too deep."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
