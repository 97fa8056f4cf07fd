import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import rackmount.plugin
from rackmount.cli.app import build_app
from rackmount_registry import API_VERSION, hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import Architecture, LinearKernel
from rackmount_registry.plugins import PluginManager


def architecture(claim: str) -> Architecture:
    return Architecture(name=claim.lower(), factory="some.module:Model", claims=(claim,))


KERNEL = LinearKernel(
    name="quick", factory="some.module:Kernel", band="vendor", cells=(Cell(),), summary="[fast]"
)


@pytest.fixture
def manager() -> PluginManager:
    """Core, two plugins that claim the same architecture, and a broken one."""
    return PluginManager.from_modules(
        {
            "rackmount-core": rackmount.plugin,
            "one": SimpleNamespace(
                architectures=hookimpl(lambda: [architecture("Shared"), architecture("Own")]),
                linear_kernels=hookimpl(lambda: [KERNEL]),
            ),
            "two": SimpleNamespace(architectures=hookimpl(lambda: [architecture("Shared")])),
            "bad": SimpleNamespace(architectures=hookimpl(lambda: None)),
        },
        versions={"one": "1.2"},
    )


def test_json_lists_parts_broken_plugins_and_contested_names(manager):
    result = CliRunner().invoke(build_app(manager), ["plugins", "--json"])
    content = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    assert content["api_version"] == API_VERSION
    assert {
        "kind": "linear_kernel",
        "name": "quick",
        "band": "vendor",
        "distribution": "one",
        "version": "1.2",
        "claims": [],
        "summary": "[fast]",
    } in content["parts"]
    assert len(content["parts"]) == len(manager.offers())
    (broken,) = content["broken"]
    assert broken["distribution"] == "bad" and "None" in broken["error"]
    assert content["contested"] == [
        {"kind": "architecture", "name": name}
        for name in ("one:shared", "two:shared", "one:Shared", "two:Shared")
    ]


def test_the_table_has_a_line_for_each_part(manager):
    runner = CliRunner(env={"FORCE_COLOR": None})
    lines = runner.invoke(build_app(manager), ["plugins"]).stdout.splitlines()
    rows = [line.split() for line in lines]
    assert ["one", "1.2", "linear_kernel", "quick", "vendor"] in rows
    assert ["one", "1.2", "architecture", "own", "Own"] in rows
    (broken,) = (line for line in lines if line.startswith("broken: bad 0: "))
    assert "a list of Architecture is expected" in broken
    assert "contested: architecture two:Shared" in lines
