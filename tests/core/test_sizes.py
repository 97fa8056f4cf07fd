"""Which steps are captured."""

from contextlib import closing
from pathlib import Path

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.mounting import draft_of

from rackmount.execution.sizes import decode_sizes, mixed_sizes, multiplications
from rackmount.loading.safetensors_reader import open_checkpoint


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 12, 20, 33, 64, 100, 256, 300, 512, 1000, 4096])
def test_every_batch_size_has_a_graph_and_little_padding(limit: int) -> None:
    sizes = decode_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit
    for batch in range(1, limit + 1):
        graph = next(size for size in sizes if size >= batch)
        assert graph - batch < 8 if batch <= 32 else graph - batch <= graph / 5


@pytest.mark.parametrize("limit", [1, 16, 100, 256, 512, 1000, 2048])
def test_every_number_of_tokens_has_a_graph(limit: int) -> None:
    sizes = mixed_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[-1] == limit
    for count in range(1, limit + 1):
        graph = next(size for size in sizes if size >= count)
        assert graph - count < max(16, graph / 2)
    assert len(sizes) <= 12


def test_a_token_goes_through_some_of_the_experts(tmp_path: Path) -> None:
    """And through all of a router, but through neither embedding nor head."""
    folder, _ = tiny_checkpoint(tmp_path, "qwen3-moe", head_dim=24)
    with closing(open_checkpoint(folder)) as checkpoint:
        config, drafted = checkpoint.config, draft_of(checkpoint)
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    experts = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"]
    layer = attention + hidden * config["num_local_experts"] + experts
    assert multiplications(drafted) == layer * config["num_hidden_layers"]
