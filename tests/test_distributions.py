"""What the distributions say of themselves."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rackmount_registry import API_VERSION
from rackmount_registry.offers import BROUGHT_BY, FIRST_PARTY

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = sorted(
    file.parent.relative_to(ROOT).as_posix()
    for pattern in ("*/pyproject.toml", "plugins/*/pyproject.toml")
    for file in ROOT.glob(pattern)
)


def project(folder: str) -> dict[str, Any]:
    """The table "project" of a distribution."""
    content = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    table: dict[str, Any] = content["project"]
    return table


VERSIONS = {table["name"]: table["version"] for table in map(project, DISTRIBUTIONS)}


def test_the_version_of_the_contract_is_that_of_its_distribution() -> None:
    major, minor, _ = VERSIONS["rackmount-registry"].split(".")
    assert f"{major}.{minor}" == API_VERSION


def test_every_distribution_but_the_contract_is_first_party() -> None:
    assert VERSIONS.keys() - {"rackmount-registry"} == FIRST_PARTY


def test_the_core_brings_executors_of_several_ranks() -> None:
    needs = map(Requirement, project("core")["dependencies"])
    assert "rackmount-plugins-executors" in {need.name for need in needs}


def test_all_that_is_said_to_bring_a_part_is_a_distribution_here() -> None:
    assert set(BROUGHT_BY.values()) <= FIRST_PARTY


def test_the_experts_and_the_extra_serve_of_the_core_bring_the_server() -> None:
    needs = {need.name for need in map(Requirement, project("moe")["dependencies"])}
    assert "rackmount-plugins-server" in needs
    (extra,) = project("core")["optional-dependencies"]["serve"]
    assert Requirement(extra).name == "rackmount-plugins-server"


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_every_distribution_carries_the_licence(folder: str) -> None:
    assert project(folder)["license-files"] == ["LICENSE"]
    assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_siblings_are_required_in_the_version_that_is_here_and_not_in_the_next_major(
    folder: str,
) -> None:
    for need in map(Requirement, project(folder)["dependencies"]):
        if need.name in VERSIONS:
            assert need.specifier.contains(VERSIONS[need.name])
            version = Version(VERSIONS[need.name])
            breaking = f"{version.major + 1}.0" if version.major else f"0.{version.minor + 1}"
            assert not need.specifier.contains(breaking), f"{folder}: {need}"
