"""Plugins as they are found on disk: each by itself, and none takes another along."""

import importlib.metadata
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackmount_registry import API_VERSION
from rackmount_registry.descriptors import LinearKernel
from rackmount_registry.errors import PluginError
from rackmount_registry.plugins import PluginManager

IN_RANGE = "rackmount-registry>=1.0,<2"

Site = Callable[..., list[importlib.metadata.Distribution]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Makes distributions on disk and on sys.path, each with one plugin module."""
    folders: list[str] = []

    def make(
        name: str, source: str, *, version: str = "1.0", requires: str | None = IN_RANGE
    ) -> list[importlib.metadata.Distribution]:
        folder = tmp_path / f"site{len(folders)}"
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        module = f"own_plugin_{len(folders)}"
        (folder / f"{module}.py").write_text(
            "from rackmount_registry import hookimpl\n"
            "from rackmount_registry.capabilities import Cell\n"
            "from rackmount_registry.descriptors import *\n" + textwrap.dedent(source)
        )
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
        lines += [f"Requires-Dist: {requires}\n"] * (requires is not None)
        (info / "METADATA").write_text("".join(lines))
        (info / "entry_points.txt").write_text(f"[rackmount]\nmain = {module}\n")
        monkeypatch.syspath_prepend(str(folder))
        folders.append(str(folder))
        return list(importlib.metadata.distributions(path=folders))

    before = set(sys.modules)
    yield make
    for module in set(sys.modules) - before:
        if module.startswith("own_plugin_"):
            del sys.modules[module]


def one_kernel(name: str) -> str:
    return f"""
        @hookimpl
        def linear_kernels():
            return [LinearKernel(name={name!r}, factory="m:f", band="portable", cells=(Cell(),))]
        """


def test_an_installed_plugin_is_found_with_its_distribution_and_version(site: Site) -> None:
    manager = PluginManager.discover(
        site("Rackmount_Plugins.Own", one_kernel("own"), version="2.1")
    )
    offer = manager.find(LinearKernel, "own")
    assert (offer.distribution, offer.version) == ("rackmount-plugins-own", "2.1")
    assert manager.broken == () and not offer.first_party


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("def (", "SyntaxError"),
        ("@hookimpl\ndef op_sets():\n    raise RuntimeError('late')", "RuntimeError: late"),
    ],
)
def test_a_plugin_that_raises_is_broken_and_takes_no_other_along(
    site: Site, source: str, error: str
) -> None:
    site("rackmount-bad", source)
    manager = PluginManager.discover(site("rackmount-good", one_kernel("good")))
    assert [offer.name for offer in manager.offers(LinearKernel)] == ["good"]
    (broken,) = manager.broken
    assert (broken.distribution, broken.entry_point) == ("rackmount-bad", "main")
    assert broken.error.startswith(error)
    with pytest.raises(PluginError, match=f"Broken plugins: rackmount-bad 1.0 .{error}"):
        manager.find(LinearKernel, "missing")


def test_a_keyboard_interrupt_passes(site: Site) -> None:
    distributions = site("rackmount-slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        PluginManager.discover(distributions)


@pytest.mark.parametrize("stated", [">=2", "<1.0", "==1.1"])
def test_a_plugin_for_another_version_of_the_contract_is_refused_unimported(
    site: Site, stated: str
) -> None:
    requires = f"Rackmount_Registry{stated}"
    manager = PluginManager.discover(
        site("rackmount-old", "raise AssertionError", requires=requires)
    )
    (broken,) = manager.broken
    assert broken.error == f"it needs rackmount-registry {stated}, this is {API_VERSION}"
    assert "own_plugin_0" not in sys.modules


@pytest.mark.parametrize("requires", [None, "torch>=2", 'rackmount-registry>=1; extra == "x"'])
def test_a_plugin_that_states_no_version_of_the_contract_is_refused(
    site: Site, requires: str | None
) -> None:
    manager = PluginManager.discover(site("rackmount-vague", one_kernel("x"), requires=requires))
    assert "names no range of rackmount-registry" in manager.broken[0].error


def test_a_distribution_that_is_there_twice_counts_once_and_the_first_wins(site: Site) -> None:
    site("rackmount-twice", one_kernel("first"), version="1.0")
    manager = PluginManager.discover(site("Rackmount.Twice", one_kernel("second"), version="2.0"))
    assert [(offer.name, offer.version) for offer in manager.offers()] == [("first", "1.0")]
    assert manager.broken == ()


@pytest.mark.parametrize(
    ("entry_points", "error"),
    [(b"[rackmount]\nmain\n", "TypeError: "), (b"[rackmount]\nm = \xff\n", "UnicodeDecodeError: ")],
)
def test_entry_points_that_cannot_be_read_break_their_own_distribution_alone(
    site: Site, entry_points: bytes, error: str
) -> None:
    (bad,) = site("Some_Library", one_kernel("bad"), version="3.0")
    bad.locate_file("Some_Library-3.0.dist-info/entry_points.txt").write_bytes(entry_points)
    manager = PluginManager.discover(site("rackmount-good", one_kernel("good")))
    assert [offer.name for offer in manager.offers()] == ["good"]
    (broken,) = manager.broken
    assert (broken.distribution, broken.version) == ("some-library", "3.0")
    assert broken.error.startswith(f"its entry points cannot be read: {error}")


@pytest.mark.parametrize("entry_points", [None, "[console_scripts]\nx = y:z\n", "[rackmount]\nm\n"])
def test_what_is_left_of_a_distribution_is_passed_over(
    site: Site, entry_points: str | None
) -> None:
    left = Path(str(site("gone", "")[0].locate_file("gone-1.0.dist-info")))
    (left / "METADATA").unlink()
    (left / "entry_points.txt").unlink()
    if entry_points is not None:
        (left / "entry_points.txt").write_text(entry_points)
    manager = PluginManager.discover(site("rackmount-good", one_kernel("good")))
    assert [offer.name for offer in manager.offers()] == ["good"] and manager.broken == ()


def test_plugins_that_are_left_without_their_metadata_are_broken(site: Site) -> None:
    site("one", one_kernel("one"))
    distributions = site("two", one_kernel("two"))
    for distribution in distributions:
        (info,) = Path(str(distribution.locate_file("."))).glob("*.dist-info")
        (info / "METADATA").unlink()
    broken = PluginManager.discover(distributions).broken
    assert [plugin.distribution for plugin in broken] == ["(no name)"] * 2
    assert "names no range of rackmount-registry" in broken[0].error


def test_a_name_offered_by_two_distributions_is_refused_until_one_is_chosen(site: Site) -> None:
    site("rackmount-one", one_kernel("same"))
    manager = PluginManager.discover(site("rackmount-two", one_kernel("same")))
    with pytest.raises(
        PluginError,
        match=r"'same' is offered by rackmount-one 1.0 and rackmount-two 1.0; "
        "choose with 'rackmount-one:same' or 'rackmount-two:same'",
    ):
        manager.find("linear_kernel", "same")
    assert manager.find("linear_kernel", "rackmount-two:same").distribution == "rackmount-two"
    assert manager.find("linear_kernel", "Rackmount_One:same").distribution == "rackmount-one"
