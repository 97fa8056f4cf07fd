import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_type_hints

import pytest

from rackmount_registry import discovery, hookimpl, hookspecs
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import (
    Architecture,
    AttentionBackend,
    CheckpointReader,
    CliCommand,
    Descriptor,
    Executor,
    ExpertKernel,
    GrammarBackend,
    LinearKernel,
    ModelSource,
    OpSet,
    QuantizationScheme,
    Requirement,
    TokenDispatcher,
)
from rackmount_registry.errors import PluginError
from rackmount_registry.offers import HOOKS, KINDS, Offer, is_installed
from rackmount_registry.plugins import PluginManager

KERNEL = {"factory": "some.module:make", "band": "reference", "cells": (Cell(),)}


def kernel(name: str, **values: object) -> LinearKernel:
    return LinearKernel(name=name, **{**KERNEL, **values})


def plugin(**lists: object) -> SimpleNamespace:
    """A plugin with a hookimpl of each name that returns the given value."""
    return SimpleNamespace(
        **{name: hookimpl(lambda value=value: value) for name, value in lists.items()}
    )


def mount(**plugins: object) -> PluginManager:
    """A manager of plugins by the name of their distribution, `_` for `-`."""
    return PluginManager.from_modules(plugins)


def error_of(hooks: object) -> str:
    """Why a plugin is broken."""
    manager = mount(sound=plugin(linear_kernels=[kernel("sound")]), bad=hooks)
    assert [offer.name for offer in manager.offers()] == ["sound"]
    (broken,) = manager.broken
    assert broken.distribution == "bad"
    return broken.error


def test_one_name_in_two_kinds_is_no_contest() -> None:
    manager = mount(
        a=plugin(linear_kernels=[kernel("torch")]),
        b=plugin(op_sets=[OpSet(name="torch", ops=("norm",), **KERNEL)]),
    )
    assert manager.find("linear_kernel", "torch").distribution == "a"
    assert manager.find("op_set", "torch").distribution == "b"


CLAIMS: list[tuple[str, Descriptor, str]] = [
    ("architectures", Architecture(name="a", factory="m:f", claims=("ForLM",)), "ForLM"),
    ("quantization_schemes", QuantizationScheme(name="a", factory="m:f", claims=("w8",)), "w8"),
    (
        "model_sources",
        ModelSource(name="a", aliases={"qwen3-0.6b": "Qwen/Qwen3-0.6B"}),
        "qwen3-0.6b",
    ),
]


@pytest.mark.parametrize(("hook", "part", "claim"), CLAIMS)
def test_a_claim_finds_its_part_and_a_contested_one_names_both(
    hook: str, part: Descriptor, claim: str
) -> None:
    alone = mount(one=plugin(**{hook: [part]}))
    assert alone.claimed(type(part), claim).descriptor is part
    assert alone.claims(part.kind) == [claim]
    both = mount(one=plugin(**{hook: [part]}), two=plugin(**{hook: [part]}))
    with pytest.raises(PluginError, match=f"'{claim}' is offered by one 0 and two 0"):
        both.claimed(part.kind, claim)
    assert both.claimed(part.kind, f"two:{claim}").distribution == "two"
    assert both.claims(part.kind) == [f"one:{claim}", f"two:{claim}"]


def test_an_unknown_architecture_lists_those_mounted_and_what_may_bring_it() -> None:
    llama = Architecture(name="llama", factory="m:f", claims=("LlamaForCausalLM",))
    with pytest.raises(PluginError) as caught:
        mount(other=plugin(architectures=[llama])).claimed(Architecture, "LamaForCausalLM")
    for part in (
        "unknown architecture 'LamaForCausalLM' (did you mean 'LlamaForCausalLM'?)",
        "mounted: LlamaForCausalLM",
        "`pip install rackmount-plugins-models`",
    ):
        assert part in str(caught.value)
    manager = PluginManager.from_modules(
        {"rackmount-plugins-models": plugin(architectures=[llama])}
    )
    with pytest.raises(
        PluginError,
        match=r"\. A newer rackmount-plugins-models, or a plugin of another distribution",
    ):
        manager.claimed(Architecture, "GptForCausalLM")
    with pytest.raises(PluginError, match="come with a plugin that is not installed"):
        manager.find(CliCommand, "paint")


def test_commands_are_named_with_their_group() -> None:
    commands = [CliCommand(name="scheduler", factory="m:f", group=g) for g in (None, "bench")]
    manager = mount(tools=plugin(cli_commands=commands))
    assert manager.find(CliCommand, "bench scheduler").descriptor.group == "bench"
    assert manager.find(CliCommand, "scheduler").descriptor.group is None


def test_offers_come_by_band_then_name() -> None:
    manager = mount(
        z=plugin(linear_kernels=[kernel("a"), kernel("b", band="vendor"), kernel("c")]),
        y=plugin(linear_kernels=[kernel("a2", band="portable"), kernel("a1", band="portable")]),
    )
    assert [offer.name for offer in manager.offers("linear_kernel")] == ["b", "a1", "a2", "a", "c"]


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"unknown kind 'op_sets' .did you mean 'op_set'"):
        mount().offers("op_sets")


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (None, "None"),
        (iter(()), "tuple_iterator"),
        ((part for part in ()), "generator"),
        ({}, "dict"),
        (kernel("x"), "LinearKernel"),
        ([OpSet(name="x", ops=("norm",), **KERNEL)], "a list with OpSet("),
        (["x"], "a list with 'x'"),
    ],
)
def test_a_hook_that_returns_no_list_of_its_kind_breaks_the_plugin(
    result: object, got: str
) -> None:
    error = error_of(plugin(linear_kernels=result))
    assert error.startswith(f"hook linear_kernels returned {got}")
    assert error.endswith("; a list of LinearKernel is expected")


def test_a_hook_that_yields_breaks_the_plugin() -> None:
    def linear_kernels() -> Iterator[LinearKernel]:
        yield kernel("x")

    error = error_of(SimpleNamespace(linear_kernels=hookimpl(linear_kernels)))
    assert error == "hook linear_kernels returned generator; a list of LinearKernel is expected"


def test_a_function_with_a_hooks_name_but_no_decorator_breaks_the_plugin() -> None:
    error = error_of(SimpleNamespace(op_sets=lambda: []))
    assert error == "op_sets has the name of a hook but no @hookimpl decorator"
    assert "op_sets" in error_of(SimpleNamespace(op_sets=[]))


def test_a_submodule_with_a_hooks_name_is_no_mistake() -> None:
    hooks = plugin(linear_kernels=[kernel("x")])
    hooks.op_sets = ModuleType("op_sets")
    assert mount(fine=hooks).broken == ()


def test_an_implementation_of_an_unknown_hook_breaks_the_plugin_unless_optional() -> None:
    error = error_of(plugin(linear_kernel=[]))
    assert "unknown hook 'linear_kernel' (did you mean 'linear_kernels'?); legal: " in error
    assert all(name in error for name in HOOKS)
    later = SimpleNamespace(of_a_later_version=hookimpl(optionalhook=True)(lambda: []))
    assert mount(early=later).broken == ()


def test_an_argument_that_a_hook_does_not_pass_breaks_the_plugin() -> None:
    assert "PluginValidationError" in error_of(SimpleNamespace(op_sets=hookimpl(lambda config: [])))


ATTENTION = {**KERNEL, "cache_layout": "paged", "preferred_block_sizes": (16,)}


@pytest.mark.parametrize(
    ("hook", "part", "error"),
    [
        ("linear_kernels", kernel("Torch"), "name 'Torch' has characters other than a-z"),
        ("linear_kernels", kernel("a:b"), "name 'a:b' has characters"),
        ("linear_kernels", kernel(""), "name '' has characters"),
        ("linear_kernels", kernel("x", factory="module"), "factory='module' is not of the form"),
        ("linear_kernels", kernel("x", factory=""), "factory='' is not of the form"),
        ("linear_kernels", kernel("x", options="a.B"), "options='a.B' is not of the form"),
        (
            "linear_kernels",
            kernel("x", band="fast"),
            "band='fast' is not Literal['reference', 'por",
        ),
        ("linear_kernels", kernel("x", cells=()), "cells is empty"),
        ("linear_kernels", kernel("x", cells=[Cell()]), "cells=[Cell("),
        ("linear_kernels", kernel("x", cells=(Cell(), Cell())), "cells[1] repeats cells[0]"),
        (
            "linear_kernels",
            kernel("x", cells=(Cell(devices="cpu"),)),
            "LinearKernel.cells[0].devices='cpu' is not tuple[str, ...] | None",
        ),
        ("linear_kernels", kernel("x", order=True), "order=True is not int"),
        ("linear_kernels", kernel("x", requires=("triton",)), "requires[0]='triton' is not Requ"),
        (
            "architectures",
            Architecture(name="x", factory="m:f", claims=("A", "A")),
            "holds a claim twice",
        ),
        (
            "architectures",
            Architecture(name="x", factory="m:f", claims="LlamaForCausalLM"),
            "claims='LlamaForCausalLM' is not tuple[str, ...]",
        ),
        (
            "attention_backends",
            AttentionBackend(name="x", **{**ATTENTION, "preferred_block_sizes": ()}),
            "preferred_block_sizes=() must hold positive sizes",
        ),
        ("op_sets", OpSet(name="x", ops=(), **KERNEL), "ops is empty"),
        (
            "expert_kernels",
            ExpertKernel(name="x", **KERNEL | {"cells": (Cell(layouts=("boxed",)),)}),
            "layouts=('boxed',) is not tuple[Literal['contiguous', 'batched', 'batched_fp8'], ...]",
        ),
        (
            "token_dispatchers",
            TokenDispatcher(name="x", layout="boxed", **KERNEL),
            "layout='boxed' is not Literal['contiguous', 'batched', 'batched_fp8']",
        ),
        ("model_sources", ModelSource(name="x", serves="("), "is no regular expression"),
        ("model_sources", ModelSource(name="x", aliases={"A": "b"}), "name 'A' has characters"),
        ("model_sources", ModelSource(name="x", aliases={"a": 1}), "aliases={'a': 1} is not dict"),
    ],
)
def test_a_malformed_descriptor_breaks_its_plugin(hook: str, part: Descriptor, error: str) -> None:
    found = error_of(plugin(**{hook: [part]}))
    assert error in found and found.startswith(f"hook {hook}: {part.kind} {part.name!r}: ")


def test_a_distribution_may_use_a_name_or_claim_once() -> None:
    twice = [kernel("x"), kernel("x", factory="other:f")]
    error = error_of(plugin(linear_kernels=twice))
    assert error == "linear_kernel 'x' is offered twice by this distribution"
    claims = [Architecture(name=name, factory="m:f", claims=("A",)) for name in ("a", "b")]
    error = error_of(plugin(architectures=claims))
    assert error == "architecture claim 'A' is offered twice by this distribution"


def load(**values: object) -> object:
    part = kernel("x", **values)
    return Offer(descriptor=part, distribution="own", version="1").load()


def test_loading_gives_the_factory() -> None:
    assert load(factory="rackmount_registry.offers:Offer.load") is Offer.load


def test_loading_without_a_required_module_prints_the_command_that_brings_it() -> None:
    needs = (Requirement(module="no_such_module", install="pip install such"),)
    with pytest.raises(PluginError, match="no_such_module is not installed: pip install such"):
        load(factory="rackmount_registry.offers:Offer", requires=needs)


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        ("rackmount_registry.offers:Missing", "AttributeError"),
        ("rackmount_registry.missing:x", "ModuleNotFoundError"),
    ],
)
def test_a_factory_that_cannot_be_imported_is_an_error_of_the_plugin(
    factory: str, error: str
) -> None:
    with pytest.raises(PluginError, match=f"linear_kernel 'x' of own 1: .*{factory} .*{error}"):
        load(factory=factory)


def test_managers_add_up_but_hold_a_distribution_once() -> None:
    one, two = (mount(**{name: plugin(linear_kernels=[kernel(name)])}) for name in ("b", "a"))
    broken = mount(bad=SimpleNamespace(op_sets=[]))
    assert [offer.name for offer in (one + two).offers()] == ["a", "b"]
    assert (one + broken).broken == broken.broken
    with pytest.raises(PluginError, match="two managers hold parts of one distribution: b"):
        one + mount(b=plugin(linear_kernels=[kernel("other")]))


def test_a_source_that_only_names_models_has_nothing_to_load() -> None:
    names = Offer(descriptor=ModelSource(name="names"), distribution="own", version="1")
    with pytest.raises(PluginError, match="has no factory"):
        names.load()


def test_looking_for_a_module_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "loud_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    (package / "inner.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("loud_package") and is_installed("loud_package.inner")
    assert not is_installed("loud_package.other") and not is_installed("no_such_package.inner")
    assert "loud_package" not in sys.modules


def test_equal_plugins_have_equal_manifests_whatever_the_order_of_hooks_and_distributions() -> None:
    one, two = (plugin(linear_kernels=[kernel("a"), kernel("b")]), plugin(op_sets=[]))
    three = plugin(linear_kernels=[kernel("b"), kernel("a")])
    here, there = mount(k=one, empty=two), mount(k=three)
    assert here.manifest() == there.manifest()
    (entry,) = here.manifest()
    assert (entry.distribution, entry.version, len(entry.sha256)) == ("k", "0", 64)
    there.prove(here.manifest())


def test_a_manifest_that_differs_names_the_distribution_and_both_sides() -> None:
    driver = PluginManager.from_modules({"k": plugin(linear_kernels=[kernel("a")])}, {"k": "1"})
    changed = plugin(linear_kernels=[kernel("a", cells=(Cell(devices=("cpu",)),))])
    worker = PluginManager.from_modules({"k": changed}, {"k": "1"})
    with pytest.raises(
        PluginError, match=r"k: the driver has version 1 sha256 .*, this process ver"
    ):
        worker.prove(driver.manifest())
    with pytest.raises(
        PluginError, match=r"k: the driver has version 1 sha256 .*, this process no"
    ):
        mount().prove(driver.manifest())
    with pytest.raises(PluginError, match="k: the driver has none, this process version 1"):
        worker.prove(())


def test_no_hook_is_called_after_discovery() -> None:
    calls = []
    hooks = plugin(linear_kernels=[kernel("a")])
    hooks.op_sets = hookimpl(lambda: calls.append(1) or [])
    manager = mount(k=hooks)
    manager.find("linear_kernel", "a")
    manager.manifest()
    assert calls == [1]


PARTS: dict[str, Descriptor] = {
    "architectures": Architecture(name="x", factory="m:f", claims=("X",)),
    "attention_backends": AttentionBackend(name="x", **ATTENTION),
    "op_sets": OpSet(name="x", ops=("norm",), **KERNEL),
    "linear_kernels": kernel("x"),
    "quantization_schemes": QuantizationScheme(name="x", factory="m:f", claims=("x",)),
    "expert_kernels": ExpertKernel(name="x", **KERNEL),
    "token_dispatchers": TokenDispatcher(name="x", layout="contiguous", **KERNEL),
    "checkpoint_readers": CheckpointReader(name="x", factory="m:f", patterns=("*.x",)),
    "model_sources": ModelSource(name="x", factory="m:f", serves="x/.*"),
    "executors": Executor(name="x", factory="m:f", max_ranks=1),
    "grammar_backends": GrammarBackend(name="x", factory="m:f", forms=("regex",)),
    "cli_commands": CliCommand(name="x", factory="m:f"),
}


def test_every_hook_is_documented_with_its_exact_type_and_works() -> None:
    assert PARTS.keys() == HOOKS.keys()
    for name, part in PARTS.items():
        hook = getattr(hookspecs, name)
        assert inspect.getdoc(hook)
        assert get_type_hints(hook) == {"return": list[type(part)]}
        manager = mount(own=plugin(**{name: [part]}))
        assert manager.broken == ()
        assert manager.find(type(part), "x").descriptor is part
        assert KINDS[part.kind] is type(part)


def test_every_function_of_hookspecs_is_a_hook() -> None:
    tree = ast.parse(Path(hookspecs.__file__).read_text())
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == list(HOOKS)


def test_the_light_half_imports_no_torch_and_is_quick() -> None:
    modules = ("plugins", "selection", "options", "config", "hookspecs", "capabilities")
    imports = "\n".join(f"import rackmount_registry.{module}" for module in modules)
    code = (
        f"import sys, time\nstart = time.process_time()\n{imports}\n"
        "print(time.process_time() - start, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    path = str(Path(discovery.__file__).parents[1])
    runs = []
    for _ in range(3):
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}"]
        seconds, *heavy = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()
        assert heavy == ["False", "False"]
        runs.append(float(seconds))
    assert min(runs) < 0.3, f"importing took {runs} s of CPU; 0.12 s on a quiet machine"
