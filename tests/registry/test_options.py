import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import pytest

from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import AttentionBackend, LinearKernel
from rackmount_registry.errors import ConfigError, PluginError
from rackmount_registry.offers import Offer
from rackmount_registry.options import build_options, parse_options


@dataclass(frozen=True, kw_only=True)
class Options:
    num_splits: int
    scale: float = 1.0
    fast: bool = False
    order: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1,)
    limit: int | None = 4
    mode: Literal["even", "odd"] = "even"

    def __post_init__(self) -> None:
        if self.num_splits < 1:
            raise ValueError(f"num_splits={self.num_splits} must be at least 1")


@dataclass(frozen=True)
class NotPlain:
    table: dict[str, str]


def number() -> int:
    """Not a dataclass."""
    return 4


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which this module can be imported."""
    module = ModuleType("own_options")
    vars(module).update({"Options": Options, "NotPlain": NotPlain, "number": number})
    monkeypatch.setitem(sys.modules, "own_options", module)
    return "own_options"


def offer(name: str = "qwen2.5", options: str | None = None) -> Offer[Any]:
    part = LinearKernel(
        name=name, factory="m:f", band="reference", cells=(Cell(),), options=options
    )
    return Offer(descriptor=part, distribution="own", version="1")


def test_strings_are_grouped_by_part_and_a_name_may_hold_dots() -> None:
    other = AttentionBackend(
        name="torch",
        factory="m:f",
        band="reference",
        cells=(Cell(),),
        cache_layout="paged",
        preferred_block_sizes=(16,),
    )
    offers = [offer(), Offer(descriptor=other, distribution="own", version="1")]
    strings = [
        "linear_kernel.qwen2.5.num_splits=4",
        "linear_kernel.qwen2.5.order=a=b,c",
        "attention_backend.torch.fast=",
    ]
    assert parse_options(strings, offers) == {
        ("linear_kernel", "qwen2.5"): {"num_splits": "4", "order": "a=b,c"},
        ("attention_backend", "torch"): {"fast": ""},
    }
    assert parse_options([], offers) == {}


@pytest.mark.parametrize(
    ("string", "message"),
    [
        ("linear_kernel.qwen2.5.fast", "is not of the form kind.name.key=value"),
        ("fast=1", "is not of the form"),
        ("linear_kernel.fast=1", "is not of the form"),
        ("linear_kernl.x.fast=1", r"unknown kind 'linear_kernl' \(did you mean 'linear_kernel'"),
        ("linear_kernel.qwen2.fast=1", r"unknown linear_kernel 'qwen2' \(did you mean 'qwen2.5'"),
        ("op_set.torch.fast=1", "unknown op_set 'torch'; legal: none"),
    ],
)
def test_a_string_for_no_known_part_is_refused(string: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_options([string], [offer()])


def test_a_key_given_twice_is_refused() -> None:
    twice = ["linear_kernel.qwen2.5.fast=1", "linear_kernel.qwen2.5.fast=0"]
    with pytest.raises(ConfigError, match=r"linear_kernel.qwen2.5.fast is given twice"):
        parse_options(twice, [offer()])


def test_texts_become_values_of_the_fields_types(here: str) -> None:
    part = offer(options=f"{here}:Options")
    given = {
        "num_splits": "8",
        "scale": "1e-3",
        "fast": "True",
        "order": "b,a",
        "sizes": "2,3",
        "limit": "none",
        "mode": "odd",
    }
    assert build_options(part, given) == Options(
        num_splits=8,
        scale=1e-3,
        fast=True,
        order=("b", "a"),
        sizes=(2, 3),
        limit=None,
        mode="odd",
    )
    assert build_options(part, {"num_splits": "8"}) == Options(num_splits=8)
    assert build_options(part, {"num_splits": "8", "order": ""}) == Options(num_splits=8)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("num_splits", "4.5", "num_splits='4.5' is not int"),
        ("num_splits", "0", "num_splits=0 must be at least 1"),
        ("scale", "nan", "scale='nan' is not float"),
        ("scale", "inf", "scale='inf' is not float"),
        ("fast", "maybe", "fast='maybe' is not bool"),
        ("sizes", "1,,2", r"sizes='1,,2' is not tuple\[int, ...\]"),
        ("limit", "few", r"limit='few' is not int \| None"),
        ("mode", "evn", r"mode='evn' is not Literal\['even', 'odd'\]"),
        (
            "num_split",
            "4",
            r"num_split \(did you mean 'num_splits'\?\); legal: num",
        ),
    ],
)
def test_a_wrong_value_or_key_is_named(here: str, key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"linear_kernel.qwen2.5.*{message}"):
        build_options(offer(options=f"{here}:Options"), {"num_splits": "1", key: text})


def test_a_field_without_default_must_be_given(here: str) -> None:
    with pytest.raises(ConfigError, match=r"linear_kernel.qwen2.5.num_splits .int. must be given"):
        build_options(offer(options=f"{here}:Options"), {})


def test_a_part_without_options_takes_none() -> None:
    assert build_options(offer(), {}) is None
    with pytest.raises(ConfigError, match=r"linear_kernel.qwen2.5 takes no options, got fast"):
        build_options(offer(), {"fast": "1"})


def test_options_that_a_plugin_got_wrong_are_its_error(here: str) -> None:
    with pytest.raises(PluginError, match="is not a frozen dataclass"):
        build_options(offer(options=f"{here}:number"), {})
    with pytest.raises(PluginError, match=r"has the type dict\[str, str\], not plain"):
        build_options(offer(options=f"{here}:NotPlain"), {"table": "a"})
    with pytest.raises(PluginError, match="importing own_options:Missing failed"):
        build_options(offer(options=f"{here}:Missing"), {})
