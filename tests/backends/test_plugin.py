"""The plugins that hold no more than descriptors: backends, experts and quantization."""

import importlib.util
import subprocess
import sys

import pytest

from rackmount_registry.descriptors import AttentionBackend
from rackmount_registry.offers import import_attribute
from rackmount_registry.plugins import PluginManager

PLUGINS = ("rackmount_backends", "rackmount_moe", "rackmount_quant")


@pytest.mark.parametrize("package", PLUGINS)
def test_a_plugin_is_described_without_torch(package: str) -> None:
    code = (
        "import sys, importlib\n"
        f"from rackmount_registry.plugins import PluginManager as M\n"
        f"module = importlib.import_module('{package}.plugin')\n"
        f"manager = M.from_modules({{'{package}': module}})\n"
        "assert manager.offers() and not manager.broken, manager.broken\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", PLUGINS)
def test_every_part_of_a_plugin_can_be_loaded(package: str) -> None:
    manager = PluginManager.from_modules({package: importlib.import_module(f"{package}.plugin")})
    assert manager.broken == ()
    for offer in manager.offers():
        if offer.missing():  # a vendor's module is not here; ours is
            assert importlib.util.find_spec(offer.descriptor.factory.partition(":")[0])
        else:
            assert callable(offer.load()) or {*vars(offer.load())} == {*offer.descriptor.ops}


def test_what_auto_never_takes_is_not_asked_for_compiled_kernels() -> None:
    module = importlib.import_module("rackmount_backends.plugin")
    for offer in PluginManager.from_modules({"rackmount_backends": module}).offers():
        part = offer.descriptor
        if isinstance(part, AttentionBackend) and part.jit:
            assert (part.order, part.decode_order) != (None, None)
            assert callable(import_attribute(part.jit, part.name))
