"""Where and with what a figure was taken."""

import subprocess
from pathlib import Path

import pytest

from rackmount_tools import machine
from rackmount_tools.machine import SELF, commit_of, describe_machine, driver_version


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with nothing but the file that tells this project."""
    file = tmp_path / SELF.removeprefix(":/")
    file.parent.mkdir(parents=True)
    file.write_text("first")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_the_commit_says_whether_tracked_files_differ_from_it(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "record.json").write_text("{}")
    assert commit_of(checkout) == commit_of(checkout / "plugins") == head
    (checkout / SELF.removeprefix(":/")).write_text("second")
    assert commit_of(checkout) == f"{head}+changes"


def test_the_commit_of_another_project_is_none_of_ours(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    assert commit_of(tmp_path) is None


def test_a_checkout_tells_its_commit_before_the_environment_does(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKMOUNT_COMMIT", "abc")
    monkeypatch.chdir(checkout)
    assert describe_machine()["commit"] == git(checkout, "rev-parse", "HEAD")


def test_without_a_checkout_the_commit_is_that_of_the_environment_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RACKMOUNT_COMMIT", "abc")
    assert describe_machine()["commit"] == "abc"
    monkeypatch.delenv("RACKMOUNT_COMMIT")
    assert "commit" not in describe_machine()


def test_versions_are_told_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIBRARIES", ("torch", "no-such-distribution"))
    told = describe_machine("numpy")
    assert {"torch", "numpy"} <= set(told) and "no-such-distribution" not in told


def test_the_driver_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] && echo 1.2 && echo 1.2\n')
    program.chmod(0o755)
    assert driver_version() == "1.2"
