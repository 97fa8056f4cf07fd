"""Options of parts: `--plugin-config kind.name.key=value`, checked by the part's dataclass."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from rackmount_registry.errors import ConfigError, PluginError, did_you_mean
from rackmount_registry.offers import KINDS, Offer, import_attribute
from rackmount_registry.plain import parse, spell

GivenOptions = Mapping[tuple[str, str], Mapping[str, str]]
"""(kind, name) -> key -> text."""


def parse_options(
    strings: Iterable[str], offers: Iterable[Offer[Any]]
) -> dict[tuple[str, str], dict[str, str]]:
    """`kind.name.key=value` strings by (kind, name). A name may hold dots, a kind and a key may
    not.

    Args:
        offers: of all kinds: the parts that may be configured.

    Raises:
        ConfigError: a string of another form, an unknown kind or name, or a key given twice.
    """
    names: dict[str, set[str]] = {}
    for offer in offers:
        names.setdefault(offer.descriptor.kind, set()).add(offer.name)
    parsed: dict[tuple[str, str], dict[str, str]] = {}
    for string in strings:
        left, equals, value = string.partition("=")
        kind, _, rest = left.partition(".")
        name, _, key = rest.rpartition(".")
        if not (kind and name and key and equals):
            raise ConfigError(f"option {string!r} is not of the form kind.name.key=value")
        for word, what, legal in ((kind, "kind", KINDS), (name, kind, names.get(kind, ()))):
            if word not in legal:
                raise ConfigError(
                    f"option {string!r}: unknown {what} {word!r}{did_you_mean(word, legal)}; "
                    f"legal: {', '.join(sorted(legal)) or 'none'}"
                )
        given = parsed.setdefault((kind, name), {})
        if key in given:
            raise ConfigError(f"option {kind}.{name}.{key} is given twice")
        given[key] = value
    return parsed


def build_options(offer: Offer[Any], given: Mapping[str, str]) -> object | None:
    """The instance of the part's options dataclass for `given`, key -> text; None where the part
    has no options.

    Raises:
        ConfigError: an unknown key, a text that does not spell a value of the field's type, a field
            without a default that is not given, or a value that the dataclass itself refuses with a
            ValueError.
        PluginError: the descriptor's `options` cannot be imported, or is no frozen dataclass of
            plain values.
    """
    part = f"{offer.descriptor.kind}.{offer.name}"
    if offer.descriptor.options is None:
        if given:
            raise ConfigError(f"{part} takes no options, got {', '.join(sorted(given))}")
        return None
    cls = import_attribute(offer.descriptor.options, part)
    params = getattr(cls, "__dataclass_params__", None)
    if not (isinstance(cls, type) and params and params.frozen):
        raise PluginError(f"options of {part}: {cls!r} is not a frozen dataclass")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    values = {}
    for key, text in given.items():
        if key not in fields:
            legal = ", ".join(fields) or "none"
            raise ConfigError(
                f"unknown option {part}.{key}{did_you_mean(key, fields)}; legal: {legal}"
            )
        values[key] = _parse(f"{part}.{key}", text, hints[key])
    for key, field in fields.items():
        default = (field.default, field.default_factory)
        if key not in values and default == (dataclasses.MISSING, dataclasses.MISSING):
            raise ConfigError(f"option {part}.{key} ({spell(hints[key])}) must be given")
    try:
        options: object = cls(**values)
    except ValueError as error:
        raise ConfigError(f"options of {part}: {error}") from error
    return options


def instantiate(offer: Offer[Any], given: GivenOptions, *arguments: Any) -> Any:
    """The part itself: its factory called with `arguments`, and with `options=` where it has any.

    Args:
        given: options of all parts, as `parse_options` gives them.

    Raises:
        ConfigError, PluginError: see `build_options` and `Offer.load`.
    """
    options = build_options(offer, given.get((offer.descriptor.kind, offer.name), {}))
    factory = offer.load()
    return factory(*arguments) if options is None else factory(*arguments, options=options)


def check_options(given: GivenOptions, chosen: Iterable[Offer[Any]]) -> None:
    """Holds options against the parts that were chosen, before any of them is made.

    Raises:
        ConfigError: options that a part does not take, or for a part that was not chosen.
    """
    parts = {(offer.descriptor.kind, offer.name): offer for offer in chosen}
    for (kind, name), values in given.items():
        if (kind, name) not in parts:
            names = ", ".join(sorted(f"{kind}.{name}" for kind, name in parts))
            raise ConfigError(f"options for {kind}.{name}, which is not chosen; chosen: {names}")
        build_options(parts[kind, name], values)


def _parse(name: str, text: str, annotation: object) -> object:
    try:
        return parse(text, annotation)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"option {name}={text!r} is not {spell(annotation)}") from error
    except TypeError as error:
        raise PluginError(f"option {name} has the type {spell(annotation)}, not plain") from error
