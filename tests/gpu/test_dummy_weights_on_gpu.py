"""Random weights on a GPU: the same in every run, and of one model on every rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.mounting import draft_of, plugins
from typer.testing import CliRunner

from rackmount.cli.app import build_app
from rackmount.loading.dummy import DummyCheckpoint
from rackmount_registry.axes import Mesh, Solo
from rackmount_registry.capabilities import Demand
from rackmount_registry.mount import Draft, assemble, fill_randomly, select_parts
from rackmount_registry.step import ReferenceStep

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 1023,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1031,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def filled(mesh: Mesh | None = None, **changes: Any) -> Draft:
    drafted = draft_of(DummyCheckpoint(CONFIG | changes), dtype=torch.bfloat16, mesh=mesh)
    demand = Demand(device="cuda", dtype="bfloat16", compute_capability=(8, 0))
    parts = select_parts(plugins(), drafted, demand).load()
    mounted = assemble(drafted, parts, ReferenceStep(), device=CUDA, max_positions=16)
    fill_randomly(mounted, 0)
    return drafted


def pieces(drafted: Draft) -> dict[str, torch.Tensor]:
    return {
        piece.name: storage.tensor[piece.where]
        for storage in drafted.storages()
        for piece in storage.pieces
    }


def test_every_run_draws_the_same_normal_numbers() -> None:
    once, again = pieces(filled()), pieces(filled())
    for name, tensor in once.items():
        assert tensor.is_cuda and torch.equal(tensor, again[name])
        if "norm" in name:
            assert tensor.eq(1).all()
        else:
            assert abs(tensor.float().std().item() - 0.02) < 1e-3
            assert abs(tensor.float().mean().item()) < 1e-3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_draws_its_share_of_the_model(rank: int) -> None:
    even = {"intermediate_size": 1022}
    whole = pieces(filled(**even))
    for storage in filled(Mesh.tensor_parallel(Solo(rank, 2)), **even).storages():
        for piece in storage.pieces:
            assert torch.equal(storage.tensor[piece.where], whole[piece.name][piece.index])


@pytest.mark.parametrize(
    "command",
    [
        "latency --batch-sizes 1,5 --input-len 300 --output-len 20 --repeats 1",
        "throughput --num-prompts 20 --input-len 64 --output-len 16",
        "interference --num-requests 4 --input-len 64 --output-len 32 --long-len 1500",
        "kernels --tokens 1,16",
    ],
)
def test_benchmarks_run(command: str, tmp_path: Path) -> None:
    model, record = tmp_path / "config.json", tmp_path / "record.json"
    model.write_text(json.dumps(CONFIG | {"intermediate_size": 1024}))
    name, *options = command.split()
    asked = ["bench", name, str(model), *options, "--load-format", "dummy", "--json", str(record)]
    outcome = CliRunner().invoke(build_app(plugins()), asked, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    figures = json.loads(record.read_text())
    assert figures["engine"]["device"].startswith("cuda")
    assert figures["machine"]["gpu"]
