"""Plugins as third parties publish them: distributions of their own, installed with pip."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import (
    VOCAB,
    edit_config,
    oracle_logits,
    random_ids,
    tiny_checkpoint,
)

ROOT = Path(__file__).parents[2]
IN_RANGE = "rackmount-registry>=1.0,<2"

ARCHITECTURE = '''
"""Llama with scaled logits."""

from torch import nn

from rackmount_registry import hookimpl
from rackmount_registry.config import tied
from rackmount_registry.descriptors import Architecture
from rackmount_registry.nn import (
    Attention, Axis, Embedding, GatedMLP, Layers, Linear, MergedLinear, Norm, OutputHead, Rotary,
)


@hookimpl
def architectures():
    return [Architecture(name="acme", factory="acme_llama:Acme", claims=("AcmeForCausalLM",))]


class SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c.hidden_size // c.num_attention_heads
        heads = Axis("heads", c.num_attention_heads, width)
        kv_heads = Axis("kv_heads", c.num_key_value_heads, width, replicate=True)
        parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self.qkv = MergedLinear(c.hidden_size, parts)
        self.attn = Attention(heads, kv_heads, rope=Rotary.from_config(c, width))
        self.o_proj = Linear(heads, c.hidden_size)

    def forward(self, x):
        q, k, v = self.qkv(x)
        return self.o_proj(self.attn(q, k, v))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, Axis("ffn", c.intermediate_size))

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c, vocab):
        super().__init__()
        self.embed_tokens = Embedding(vocab, c.hidden_size)
        self.layers = Layers(c.num_hidden_layers, lambda index: Block(c))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Acme(nn.Module):
    harmless = frozenset({"attention_bias", "head_dim", "hidden_act", "mlp_bias"})

    def __init__(self, c):
        super().__init__()
        vocab = Axis("vocab", c.vocab_size)
        self.scale = c.acme_logit_scale
        self.model = Decoder(c, vocab)
        head = self.model.embed_tokens if tied(c) else None
        self.lm_head = OutputHead(c.hidden_size, vocab, tied=head)

    def forward(self, ids):
        return self.model(ids)

    def logits(self, rows):
        return self.lm_head(rows) * self.scale
'''

RIVAL = '''
"""The same names from somebody else."""

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import Architecture, AttentionBackend


@hookimpl
def architectures():
    return [Architecture(name="rival", factory="rival:Model", claims=("AcmeForCausalLM",))]


@hookimpl
def attention_backends():
    return [
        AttentionBackend(
            name="naive",
            factory="rival:Backend",
            band="reference",
            cells=(Cell(),),
            cache_layout="rival",
            preferred_block_sizes=(16,),
        )
    ]
'''

BROKEN = 'raise RuntimeError("its kernel library is too old")'
UNREACHED = 'raise RuntimeError("imported")'


def write_project(
    folder: Path, name: str, modules: dict[str, str], *, requires: str = IN_RANGE
) -> Path:
    """A project with an entry point for each of its modules."""
    project = folder / name
    project.mkdir()
    for module, source in modules.items():
        (project / f"{module}.py").write_text(source)
    files = [f"{module}.py" for module in modules]
    entries = "\n".join(f'{module} = "{module}"' for module in modules)
    (project / "pyproject.toml").write_text(
        f"""
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.3.0"
dependencies = ["{requires}"]

[project.entry-points.rackmount]
{entries}

[tool.hatch.build.targets.wheel]
only-include = {json.dumps(files)}
"""
    )
    return project


def install(target: Path, *projects: Path) -> Path:
    """As users install them, but for the target and the network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*command, *map(str, projects)], check=True)
    return target


def python(script: str, *sites: Path, arguments: list[Any]) -> Any:
    """What `script` prints, as JSON; it finds `arguments` under that name."""
    path = os.pathsep.join(map(str, sites))
    prelude = "import json, sys\narguments = json.loads(sys.argv[1])\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + script, json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=sites[0],  # not the repository
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with an architecture and, out of the examples, an attention backend."""
    folder = tmp_path_factory.mktemp("projects")
    backend = (ROOT / "examples" / "one_file_plugin.py").read_text()
    modules = {"acme_llama": ARCHITECTURE, "acme_naive": backend}
    site = tmp_path_factory.mktemp("site")
    return install(site, write_project(folder, "Acme_Rackmount", modules))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with one plugin of every fault."""
    folder = tmp_path_factory.mktemp("projects")
    projects = [
        write_project(folder, "acme-broken", {"acme_broken": BROKEN}),
        write_project(
            folder, "acme-next", {"acme_next": UNREACHED}, requires="rackmount-registry>=2"
        ),
        write_project(folder, "rival", {"rival": RIVAL}),
    ]
    return install(tmp_path_factory.mktemp("site"), *projects)


MOUNT = """
from rackmount import Engine, SamplingParams

folder, prompt = arguments
params = SamplingParams(temperature=0, max_tokens=8, logprobs=97, ignore_eos=True)
told = []
for given in ({"backend": "naive"}, {}, {"auto_plugins": ("acme_rackmount",)}):
    engine = Engine(folder, device="cpu", num_kv_blocks=8, max_num_batched_tokens=7, **given)
    (answer,) = engine.generate(prompt, params)[0].outputs
    told.append({
        "architecture": engine.rack.architecture.distribution,
        "backends": [engine.rack.attention.prefill.name, engine.rack.attention.decode.name],
        "refusals": list(map(str, engine.rack.attention.candidates)),
        "token_ids": answer.token_ids,
        "logprobs": [[entry.top[i] for i in range(97)] for entry in answer.logprobs],
    })
print(json.dumps(told))
"""


def test_an_outside_architecture_and_backend_work_beside_the_installed_ones(
    acme: Path, tmp_path: Path
) -> None:
    folder, model = tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    edit_config(folder, lambda c: c.update(architectures=["AcmeForCausalLM"], acme_logit_scale=0.5))
    prompt = random_ids(20).tolist()
    named, auto, opted_in = python(MOUNT, acme, arguments=[str(folder), prompt])
    assert [each["architecture"] for each in (named, auto, opted_in)] == ["acme-rackmount"] * 3
    assert named["backends"] == ["naive", "naive"]
    assert auto["backends"] == ["torch", "torch"]
    assert opted_in["backends"] == ["naive", "naive"]
    refusal = "naive (acme-rackmount 0.3.0): an outside plugin, not opted in: ask for it by name"
    assert any(refusal in line for line in auto["refusals"])
    for each in (named, auto, opted_in):
        ids = torch.tensor(prompt + each["token_ids"])
        expected = (oracle_logits(model, ids) * 0.5).log_softmax(-1)[len(prompt) - 1 : -1]
        ours = torch.tensor(each["logprobs"])
        assert ours.shape == (8, VOCAB)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


ERRORS = """
from rackmount import Engine
from rackmount_registry.plugins import PluginManager

manager = PluginManager.discover()
told = {plugin.distribution: plugin.error for plugin in manager.broken}
told["versions"] = sorted({plugin.version for plugin in manager.broken})

def refusal(name, folder, **given):
    try:
        engine = Engine(folder, manager=manager, device="cpu", num_kv_blocks=8, **given)
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
    else:
        told[name] = engine.rack.attention.prefill.distribution

llama, acme = arguments
refusal("auto", llama)
refusal("contested backend", llama, backend="naive")
refusal("chosen backend", llama, backend="acme-rackmount:naive")
refusal("unknown backend", llama, backend="next")
refusal("contested architecture", acme)
print(json.dumps(told))
"""


def test_what_is_wrong_with_a_plugin_is_said_and_takes_no_other_along(
    acme: Path, others: Path, tmp_path: Path
) -> None:
    folder, _ = tiny_checkpoint(tmp_path / "llama", "llama")
    claimed, _ = tiny_checkpoint(tmp_path / "acme", "llama")
    edit_config(claimed, lambda c: c.update(architectures=["AcmeForCausalLM"]))
    told = python(ERRORS, acme, others, arguments=[str(folder), str(claimed)])
    assert told["acme-broken"] == "RuntimeError: its kernel library is too old"
    assert told["acme-next"] == "it needs rackmount-registry >=2, this is 1.0"
    assert told["versions"] == ["0.3.0"]
    assert told["auto"] == "rackmount-plugins-backends"
    assert told["contested backend"] == (
        "SelectionError: attention_backend 'naive' is offered by acme-rackmount 0.3.0 and "
        "rival 0.3.0; choose with 'acme-rackmount:naive' or 'rival:naive'"
    )
    assert told["chosen backend"] == "acme-rackmount"
    unknown = told["unknown backend"]
    assert unknown.startswith("SelectionError: unknown attention_backend 'next'")
    assert (
        "mounted: acme-rackmount:naive, flash-attn, flashinfer, rival:naive, torch, triton"
        in unknown
    )
    assert "acme-broken 0.3.0 (RuntimeError: its kernel library is too old)" in unknown
    assert "acme-next 0.3.0 (it needs rackmount-registry >=2, this is 1.0)" in unknown
    assert told["contested architecture"] == (
        "PluginError: architecture 'AcmeForCausalLM' is offered by acme-rackmount 0.3.0 and "
        "rival 0.3.0; choose with 'acme-rackmount:AcmeForCausalLM' or 'rival:AcmeForCausalLM'"
    )
