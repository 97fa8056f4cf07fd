"""One backend for prompts and another for decoding: in steps of both, each gets its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import assert_idle, greedy, rows, tiny_engine, tokens_of
from tests.helpers.mounting import plugins

from rackmount.execution.batch import padding_step
from rackmount_backends.torch_attention import TorchAttention
from rackmount_registry import hookimpl
from rackmount_registry.attention import AttentionBatch
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import AttentionBackend
from rackmount_registry.plugins import PluginManager

PROMPTS = rows(3, 21, 1, 30, 9, 17)


class Watched(TorchAttention):
    """Torch's, and what it was given: numbers of query tokens."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.seen: list[list[int]] = []

    def plan(self, batch: AttentionBatch) -> Any:
        starts = batch.query_start_loc
        assert starts[0] == 0 and len(batch.rows) == len(batch.seq_lens) == len(starts) - 1
        self.seen.append((starts[1:] - starts[:-1]).tolist())
        return super().plan(batch)


def backend(name: str, order: int | None, decode_order: int | None) -> AttentionBackend:
    return AttentionBackend(
        name=name,
        factory=f"{__name__}:Watched",
        band="vendor",
        order=order,
        decode_order=decode_order,
        cache_layout="slots",
        preferred_block_sizes=(4,),
        cells=(Cell(devices=("cpu",), dtypes=("float32",), kv_dtypes=("float32",)),),
    )


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "async_scheduling": True},
        {"long_prefill_token_threshold": 5},
        {"num_kv_blocks": 14},
    ],
    ids=str,
)
def test_each_backend_gets_its_kind_of_request_and_the_text_is_the_same(
    tmp_path: Path, schedule: dict[str, Any]
) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "qwen3")
    expected = tokens_of(tiny_engine(folder), PROMPTS, greedy(12))
    both = [backend("for-prompts", 0, None), backend("for-decoding", None, 0)]
    own = SimpleNamespace(attention_backends=hookimpl(lambda: both))
    manager = plugins() + PluginManager.from_modules({"own": own})
    engine = tiny_engine(folder, manager=manager, auto_plugins=("own",), **schedule)
    chosen = engine.rack.attention
    assert (chosen.prefill.name, chosen.decode.name) == ("for-prompts", "for-decoding")
    assert tokens_of(engine, PROMPTS, greedy(12)) == expected
    assert_idle(engine)
    runner = engine.core.executor._program._worker._runner
    assert {n for step in runner._decode.seen for n in step} == {1}
    assert all(min(step) > 1 for step in runner._prefill.seen)
    assert any(len(step) > 1 for step in runner._decode.seen)


@pytest.mark.parametrize("query_lens", [[9, 1, 1], [2, 1, 2, 1], [1, 1], [5]])
def test_padding_has_requests_of_one_token_first(query_lens: list[int]) -> None:
    flat = padding_step(np.array(query_lens), row=0)
    found = np.diff(flat.query_start_loc)
    assert sorted(query_lens) == found.tolist() == flat.seq_lens.tolist()
    assert flat.num_single == query_lens.count(1)
    assert flat.positions.tolist() == [place for n in found for place in range(n)]
