"""What the worker gives to graphs and takes from them, with stand-ins that run eagerly."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import greedy, rows, tiny_engine

from rackmount import RequestOutput, SamplingParams
from rackmount.execution.batch import FlatBatch
from rackmount.execution.worker import Worker


@dataclass
class EagerDecodeGraphs:
    """Pads to multiples of 4, as graphs of these sizes would."""

    worker: Worker
    num_steps: int = 0

    def replay(self, flat: FlatBatch) -> tuple[FlatBatch, Any, Any]:
        worker, runner = self.worker, self.worker._runner
        self.num_steps += 1
        padded = flat.padded(-(-flat.rows.size // 4) * 4, worker.batch.padding_row)
        tensors, hidden = runner.hidden(padded, of_all=True)
        graph = SimpleNamespace(hidden=hidden, sampling=SimpleNamespace())

        def sampling() -> None:
            graph.token_ids = worker._draw(runner.logits(hidden), tensors)
            runner.remember(tensors, graph.token_ids)

        graph.sampling.replay = sampling
        return padded, tensors, graph


@dataclass
class EagerMixedGraphs:
    """Pads to multiples of 8 tokens, and keeps the padding from attention."""

    worker: Worker
    num_steps: int = 0

    def fits(self, flat: FlatBatch) -> bool:
        return flat.token_ids.size <= 64

    def replay(self, flat: FlatBatch) -> tuple[Any, Any]:
        runner, num_tokens = self.worker._runner, flat.token_ids.size
        self.num_steps += 1
        tensors = runner.buffers.load(flat.with_tokens(-(-num_tokens // 8) * 8))
        runner.plan(flat, tensors, is_static=False)
        runner.build(tensors)

        def attend(layer: Any, q: Any) -> Any:
            out = q.new_full(q.shape, 1e4)
            out[:num_tokens] = runner.step.run(layer, q[:num_tokens])
            return out

        runner.step.interrupt = attend
        try:
            return tensors, runner.forward(tensors)[:num_tokens]
        finally:
            runner.step.interrupt = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")[0]


PARAMS = [
    greedy(3),
    greedy(8, logprobs=2),
    greedy(6, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, repetition_penalty=1.2, logprobs=0),
    greedy(5, logit_bias={7: 5.0}, min_tokens=2),
]


def answers(folder: Path, graphs: bool, **limits: Any) -> list[RequestOutput]:
    with tiny_engine(folder, **limits) as engine:
        worker = engine.core.executor._program._worker
        if graphs:
            worker._decode_graphs = EagerDecodeGraphs(worker)
            worker._mixed_graphs = EagerMixedGraphs(worker)
        outputs = engine.generate(rows(12, 2, 9, 5, 7), PARAMS)
        if graphs:
            assert worker._decode_graphs.num_steps and worker._mixed_graphs.num_steps
        return outputs


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "limits",
    [{}, {"long_prefill_token_threshold": 1}, {"max_num_batched_tokens": 6}, {"num_kv_blocks": 12}],
)
def test_graphs_change_nothing(folder: Path, limits: dict[str, int], ahead: bool) -> None:
    """Chunks of one token, that decode steps of graphs do not know, among them."""
    expected = answers(folder, False, **limits)
    found = answers(folder, True, async_scheduling=ahead, **limits)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for one, other in (
            (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (ours.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert (one is None) == (other is None)
            for a, b in zip(one or [], other or [], strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert (a.token_id, a.rank) == (b.token_id, b.rank)
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
