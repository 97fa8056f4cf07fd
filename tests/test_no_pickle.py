"""No distribution unpickles anything: a pickle may run whatever code its writer likes."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("registry", "core", "backends", "quant", "moe", "models", "plugins")
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {"recv_pyobj", "send_pyobj", "all_gather_object", "broadcast_object_list", "gather_object"}


def breaches(source: str) -> list[str]:
    """What of a module may read or write pickles."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [it.name for it in names if it.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                found.append(module)
            case ast.Attribute(attr=name) if name in CALLS:
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
                found.append("torch.load")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_pickles(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {str(file): breaches(file.read_text(encoding="utf-8")) for file in files}
    assert not {name: what for name, what in found.items() if what}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "s.recv_pyobj()",
        "torch.load(f)",
        "import dill.x",
    ],
)
def test_the_scan_sees_what_it_looks_for(source: str) -> None:
    assert breaches(source)
