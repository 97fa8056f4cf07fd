import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rackmount.cli.app import build_app
from rackmount_registry import hookimpl
from rackmount_registry.descriptors import CliCommand
from rackmount_registry.errors import ConfigError, RequestError
from rackmount_registry.plugins import PluginManager

Result = Any


def greet(name: str, loud: bool = False) -> None:
    """Say hello."""
    typer.echo(f"hello {name}".upper() if loud else f"hello {name}")


def refuse() -> None:
    raise ConfigError("tp=3 must be 1, 2 or [4]")


def fail() -> None:
    raise RuntimeError("our own mistake")


def interrupt() -> None:
    raise KeyboardInterrupt


def several() -> typer.Typer:
    app = typer.Typer()
    app.command()(greet)
    app.command()(refuse)
    return app


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Calls the program with the plugins given as distribution -> its commands."""
    module = ModuleType("fake_commands")
    vars(module).update(
        greet=greet, refuse=refuse, fail=fail, interrupt=interrupt, several=several()
    )
    monkeypatch.setitem(sys.modules, "fake_commands", module)

    def call(plugins: dict[str, list[CliCommand]], *args: str) -> Result:
        modules = {
            name: SimpleNamespace(cli_commands=hookimpl(lambda value=value: value))
            for name, value in plugins.items()
        }
        return CliRunner().invoke(build_app(PluginManager.from_modules(modules)), args)

    return call


def command(name: str, attribute: str | None = None, **values: str) -> CliCommand:
    factory = f"fake_commands:{attribute or name}"
    return CliCommand(name=name, **{"factory": factory, "summary": f"does {name}"} | values)


def test_help_lists_every_command_with_its_summary_and_imports_none(invoke):
    absent = command("absent", factory="no.such.module:run")
    result = invoke({"one": [command("greet"), absent], "two": [command("fail", group="x")]}, "-h")
    assert result.exit_code == 2  # -h is no option
    result = invoke(
        {"one": [command("greet"), absent], "two": [command("fail", group="x")]}, "--help"
    )
    assert result.exit_code == 0
    assert "does greet" in result.stdout and "does absent" in result.stdout
    assert "no.such.module" not in result.output


def test_a_command_takes_its_own_arguments_and_help(invoke):
    plugins = {"one": [command("greet")]}
    assert invoke(plugins, "greet", "Ann", "--loud").stdout == "HELLO ANN\n"
    assert "Say hello." in invoke(plugins, "greet", "--help").stdout


def test_a_command_may_be_a_typer_app(invoke):
    assert invoke({"one": [command("several")]}, "several", "greet", "Bo").stdout == "hello Bo\n"


def test_a_grouped_command_stands_in_its_group(invoke):
    plugins = {"one": [command("greet", group="bench"), command("refuse", group="bench")]}
    assert invoke(plugins, "bench", "greet", "Cy").stdout == "hello Cy\n"
    assert "does refuse" in invoke(plugins, "bench", "--help").stdout
    result = invoke(plugins, "bench", "refuse")
    assert (result.exit_code, result.stderr) == (2, "error: tp=3 must be 1, 2 or [4]\n")


def test_a_command_that_cannot_be_imported_says_so_and_spares_the_others(invoke):
    plugins = {"one": [command("greet"), command("absent", factory="no.such.module:run")]}
    result = invoke(plugins, "absent")
    assert result.exit_code == 2 and result.stdout == ""
    assert "no.such.module:run failed: ModuleNotFoundError" in result.stderr
    assert invoke(plugins, "greet", "Di").stdout == "hello Di\n"


def test_an_unknown_command_is_answered_with_the_nearest(invoke):
    result = invoke({"one": [command("greet")]}, "gret")
    assert result.exit_code == 2
    assert "'gret' (did you mean 'greet'?)" in result.stderr


@pytest.mark.parametrize(
    ("args", "distribution"),
    [(["serve", "m"], "rackmount-plugins-server"), (["bench", "x"], "rackmount-plugins-tools")],
)
def test_a_command_of_a_plugin_that_is_not_installed_says_what_brings_it(
    invoke, args, distribution
):
    result = invoke({"one": [command("greet")]}, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"unknown cli_command {args[0]!r}" in result.stderr
    assert f"`pip install {distribution}` brings it" in result.stderr
    broken = invoke({distribution: [None]}, *args).stderr
    assert f"A newer {distribution}" in broken and f"Broken plugins: {distribution}" in broken


def test_a_contested_command_is_refused_and_can_be_chosen_by_distribution(invoke):
    plugins = {"one": [command("greet")], "two": [command("greet", "refuse")]}
    result = invoke(plugins, "greet", "Ed")
    assert result.exit_code == 2
    assert "offered by one 0 and two 0" in result.stderr
    assert invoke(plugins, "one:greet", "Ed").stdout == "hello Ed\n"


def test_an_error_of_the_user_is_one_line_and_exit_code_2(invoke, monkeypatch):
    result = invoke({"one": [command("refuse")]}, "refuse")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: tp=3 must be 1, 2 or [4]\n"

    def refuse() -> None:
        raise RequestError("no token")

    monkeypatch.setattr("fake_commands.refuse", refuse)
    result = invoke({"one": [command("refuse")]}, "refuse")
    assert (result.exit_code, result.stderr) == (2, "error: no token\n")


def test_traceback_shows_where_an_error_arose(invoke):
    result = invoke({"one": [command("refuse")]}, "--traceback", "refuse")
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError])
def test_a_mistake_of_our_own_is_not_dressed_up_as_the_users(invoke, kind, monkeypatch):
    def fail() -> None:
        raise kind("our own mistake")

    monkeypatch.setattr("fake_commands.fail", fail)
    result = invoke({"one": [command("fail")]}, "fail")
    assert (type(result.exception), result.exit_code, result.stderr) == (kind, 1, "")


def test_ctrl_c_ends_with_130(invoke):
    result = invoke({"one": [command("interrupt")]}, "interrupt")
    assert result.exit_code == 130
    assert result.stderr == ""


def test_broken_plugins_are_mentioned_in_the_help(invoke):
    assert "could not be loaded" not in invoke({"one": [command("greet")]}, "--help").stdout
    assert "could not be loaded: 1" in invoke({"one": [None]}, "--help").stdout


WITHOUT_TORCH = """
import sys
from rackmount.cli.app import build_app
from rackmount_registry.plugins import PluginManager
build_app(PluginManager.discover())(sys.argv[1:], standalone_mode=False)
heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--help"], "explain"),
        (["plugins"], "explain"),
        (["plugins", "--json"], "explain"),
        (["run", "--help"], "--expert-load"),
        (["serve", "--help"], "--host"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_plugins_load_without_torch(args, told):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *args], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "run" in done.stdout and told in done.stdout


ENDLESS = """
import sys, types
import typer
from rackmount.cli.app import build_app
from rackmount_registry import hookimpl
from rackmount_registry.descriptors import CliCommand
from rackmount_registry.plugins import PluginManager

def talk() -> None:
    while True:
        typer.echo("and so on")

sys.modules["fake"] = types.ModuleType("fake")
sys.modules["fake"].talk = talk
plugin = types.SimpleNamespace(
    cli_commands=hookimpl(lambda: [CliCommand(name="talk", factory="fake:talk")])
)
build_app(PluginManager.from_modules({"one": plugin}))(["talk"])
"""


def test_a_reader_that_goes_away_ends_the_program_quietly():
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "and so on\n"
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(30) == 1
