"""From a model's name to its files, and to the reader that takes them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rackmount.plugin
from rackmount.loading.locate import locate, open_checkpoint, read_config
from rackmount_registry import hookimpl
from rackmount_registry.checkpoint import silent
from rackmount_registry.descriptors import CheckpointReader, Descriptor, ModelSource
from rackmount_registry.errors import CheckpointError, ConfigError, PluginError
from rackmount_registry.plugins import PluginManager

FETCHED: list[tuple[str, bool]] = []


def fetch(target: str, report: Any, *, weights: bool = True) -> Path:
    """A source that remembers what it was asked for."""
    FETCHED.append((target, weights))
    return Path("fetched") / target


def open_as(kind: str) -> Any:
    return lambda path: SimpleNamespace(kind=kind, path=path, config={"a": 1}, close=lambda: None)


open_gguf, open_npz = open_as("gguf"), open_as("npz")

HUB = ModelSource(name="hub", factory=f"{__name__}:fetch", serves=r"\w+/\w+(@\w+)?")
GGUF = CheckpointReader(name="gguf", factory=f"{__name__}:open_gguf", patterns=("*.gguf", "*.bin"))
NPZ = CheckpointReader(name="npz", factory=f"{__name__}:open_npz", patterns=("*.npz",))


def names(**aliases: str) -> ModelSource:
    """A source that only names; `_` for `-`."""
    return ModelSource(name="names", aliases={k.replace("_", "-"): v for k, v in aliases.items()})


def mount(*sources: ModelSource, readers: tuple[CheckpointReader, ...] = (), **others: Any) -> Any:
    """A manager of these parts, all of the distribution "own", and of other plugins."""
    return PluginManager.from_modules({"own": plugin(sources, readers), **others})


def plugin(sources: Any, readers: Any = ()) -> SimpleNamespace:
    def listed(parts: tuple[Descriptor, ...]) -> Any:
        return hookimpl(lambda: parts)

    return SimpleNamespace(model_sources=listed(sources), checkpoint_readers=listed(readers))


BROKEN = SimpleNamespace(model_sources=hookimpl(lambda: None))


@pytest.fixture(autouse=True)
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What is fetched, by targets; and an empty current folder."""
    monkeypatch.chdir(tmp_path)
    FETCHED.clear()
    return FETCHED


def test_a_path_that_exists_is_itself_whatever_else_has_its_name(
    tmp_path: Path, fetched: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = mount(HUB, names(own="acme/llm"))
    (tmp_path / "own").mkdir()
    (tmp_path / "acme" / "llm").mkdir(parents=True)
    assert locate("own", manager, silent) == Path("own")
    assert locate("acme/llm", manager, silent) == Path("acme/llm")
    assert locate(tmp_path / "own", manager, silent) == tmp_path / "own"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/own", manager, silent) == tmp_path / "own"
    assert fetched == []


def test_a_name_that_a_pattern_takes_whole_is_fetched(fetched: list[tuple[str, bool]]) -> None:
    manager = mount(HUB)
    assert locate("acme/llm@v2", manager, silent) == Path("fetched/acme/llm@v2")
    locate("acme/llm", manager, silent, weights=False)
    assert fetched == [("acme/llm@v2", True), ("acme/llm", False)]
    with pytest.raises(ConfigError, match="neither a path that exists, nor a hub id"):
        locate("acme/llm/more", manager, silent)


def test_an_alias_leads_to_its_target_and_a_chain_of_them_to_the_last(
    tmp_path: Path, fetched: list[tuple[str, bool]]
) -> None:
    manager = mount(HUB, names(llm="acme/llm", best="newest", newest="llm", here="folder"))
    for name in ("llm", "newest", "best"):
        assert locate(name, manager, silent) == Path("fetched/acme/llm")
    assert fetched == [("acme/llm", True)] * 3
    (tmp_path / "folder").mkdir()
    assert locate("here", manager, silent) == Path("folder")


def test_a_source_of_its_own_aliases_gets_their_target(fetched: list[tuple[str, bool]]) -> None:
    wheel = ModelSource(name="wheel", factory=f"{__name__}:fetch", aliases={"tiny": "tiny==1.0"})
    assert locate("tiny", mount(HUB, wheel), silent) == Path("fetched/tiny==1.0")
    assert fetched == [("tiny==1.0", True)]


def test_an_alias_to_a_name_that_nobody_knows_is_refused_by_that_name() -> None:
    with pytest.raises(ConfigError, match=r"model='nowhere' is neither .*; aliases: lost$"):
        locate("lost", mount(HUB, names(lost="nowhere")), silent)


def test_aliases_in_a_circle_are_refused() -> None:
    with pytest.raises(ConfigError, match="model='a' leads from alias to alias without an end"):
        locate("a", mount(names(a="b", b="a")), silent)


def test_an_unknown_name_is_answered_with_the_nearest_alias_and_the_broken_plugins() -> None:
    with pytest.raises(ConfigError) as caught:
        locate("qwen3-0.7b", mount(names(**{"qwen3-0.6b": "a/b"}), bad=BROKEN), silent)
    assert "(did you mean 'qwen3-0.6b'?); aliases: qwen3-0.6b. Broken plugins: bad 0" in str(
        caught.value
    )


def test_an_alias_of_two_distributions_is_refused_until_one_is_chosen(
    fetched: list[tuple[str, bool]],
) -> None:
    manager = mount(HUB, names(llm="acme/one"), other=plugin([names(llm="acme/two")]))
    with pytest.raises(PluginError, match=r"'llm' is offered by .*choose with 'o\w+:llm' or 'o"):
        locate("llm", manager, silent)
    locate("other:llm", manager, silent)
    locate("own:llm", manager, silent)
    assert fetched == [("acme/two", True), ("acme/one", True)]
    with pytest.raises(PluginError, match="unknown model_source 'third:llm'"):
        locate("third:llm", manager, silent)


def test_a_folder_with_one_model_file_needs_no_config(tmp_path: Path) -> None:
    manager = mount(readers=(GGUF, NPZ))
    (tmp_path / "model.gguf").touch()
    (tmp_path / "README.md").touch()
    opened: Any = open_checkpoint(tmp_path, manager)
    assert (opened.kind, opened.path) == ("gguf", tmp_path / "model.gguf")
    opened = open_checkpoint(tmp_path / "model.gguf", manager)
    assert (opened.kind, opened.path) == ("gguf", tmp_path / "model.gguf")


def test_a_folder_with_a_config_is_opened_whole(tmp_path: Path) -> None:
    for name in ("config.json", "a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    opened: Any = open_checkpoint(tmp_path, mount(readers=(GGUF, NPZ)))
    assert (opened.kind, opened.path) == ("gguf", tmp_path)


def test_several_model_files_without_a_config_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.bin"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 model files \(a.bin, b.gguf\); name one file$"):
        open_checkpoint(tmp_path, mount(readers=(GGUF,)))


def test_files_of_several_formats_are_refused_until_one_is_named(tmp_path: Path) -> None:
    manager = mount(readers=(GGUF, NPZ))
    for name in ("config.json", "a.gguf", "b.npz"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"of several formats \(gguf, npz\); name one file$"):
        open_checkpoint(tmp_path, manager)
    opened: Any = open_checkpoint(tmp_path / "b.npz", manager)
    assert opened.kind == "npz"


def test_a_folder_that_no_reader_takes_lists_the_patterns_and_the_broken_plugins(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.onnx").touch()
    for readers, patterns in (((GGUF, NPZ), r"\*.gguf, \*.bin, \*.npz"), ((), "none is mounted")):
        with pytest.raises(CheckpointError, match=rf"takes \({patterns}\). Broken plugins: bad 0"):
            open_checkpoint(tmp_path, mount(readers=readers, bad=BROKEN))


def test_the_configuration_is_a_file_or_inside_the_model(tmp_path: Path) -> None:
    manager = mount(readers=(GGUF,))
    (tmp_path / "model.gguf").touch()
    assert read_config(tmp_path, manager) == {"a": 1}
    (tmp_path / "config.json").write_text(json.dumps({"b": 2}))
    assert read_config(tmp_path, manager) == {"b": 2}
    assert read_config(tmp_path / "config.json", manager) == {"b": 2}
    assert read_config(tmp_path / "model.gguf", manager) == {"a": 1}


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B@main", True),
        ("qwen3", False),
        ("a/b/c", False),
    ],
)
def test_the_hub_serves_an_owner_a_name_and_maybe_a_revision(
    name: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **_: f"got {repo}")
    manager = PluginManager.from_modules({"rackmount-core": rackmount.plugin})
    if served:
        assert locate(name, manager, silent) == Path("got Qwen/Qwen3-0.6B")
    else:
        with pytest.raises(ConfigError, match="nor an alias; aliases: none"):
            locate(name, manager, silent)
