"""Plain values, of which descriptors and options are made, checked by their annotations.

Plain are int, float, bool, str, None, and Literals, unions, tuples, frozensets, dicts and
dataclasses of these.
"""

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

TRUTH = {"true": True, "false": False, "1": True, "0": False}
"""Spellings of a bool on a command line."""


def as_plain(value: object) -> Any:
    """`value` as JSON-ready values: dataclasses become dicts, tuples lists, sets sorted lists.

    An object with a method `as_plain` converts itself.
    """
    own = getattr(value, "as_plain", None)
    if own is not None:
        return own()
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(as_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


def spell(annotation: object) -> str:
    """An annotation as error texts show it."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def misfits(value: object, annotation: object, path: str) -> Iterator[str]:
    """A line for each place inside `value` whose type is not what the annotation says."""
    items = get_args(annotation)
    if is_dataclass(annotation) and isinstance(annotation, type) and isinstance(value, annotation):
        hints = get_type_hints(type(value))
        for field in fields(value):
            inner = getattr(value, field.name)
            yield from misfits(inner, hints[field.name], f"{path}.{field.name}")
    elif isinstance(value, tuple) and get_origin(annotation) is tuple and items[-1] is Ellipsis:
        for index, item in enumerate(value):
            yield from misfits(item, items[0], f"{path}[{index}]")
    elif not _fits(value, annotation):
        yield f"{path}={value!r} is not {spell(annotation)}"


def _fits(value: object, annotation: Any) -> bool:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is dict:
        return isinstance(value, dict) and all(
            _fits(key, args[0]) and _fits(item, args[1]) for key, item in value.items()
        )
    if origin is frozenset:
        return isinstance(value, frozenset) and all(_fits(item, args[0]) for item in value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if annotation in (int, float):  # a bool is an int to Python, and an int may stand for a float
        number = int if annotation is int else int | float
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, annotation)


def parse(text: str, annotation: Any) -> Any:
    """The plain value that `text` spells: "none" for None, commas between the items of a tuple.

    Raises:
        ValueError: `text` does not spell a value of this type.
        TypeError: values of this type cannot be written on a command line.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        if NoneType in args and text.lower() == "none":
            return None
        arms = [arg for arg in args if arg is not NoneType]
        if len(arms) > 1:
            raise TypeError
        return parse(text, arms[0])
    if origin is Literal:
        return {str(arg): arg for arg in args}[text]
    if origin is tuple and args[1:] == (Ellipsis,):
        return tuple(parse(item, args[0]) for item in text.split(",")) if text else ()
    if annotation is bool:
        return TRUTH[text.lower()]
    if annotation is float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    if annotation in (int, str):
        return annotation(text)
    raise TypeError
