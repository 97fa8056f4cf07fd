"""What the worker gives to graphs and takes from them, with stand-ins that run eagerly."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    BOS,
    EOS,
    NUM_BYTE_IDS,
    assert_idle,
    byte_tokenizer,
    greedy,
    rows,
    tiny_engine,
)
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from rackmount import GrammarSpec, RequestOutput, SamplingParams
from rackmount.execution import graphs as module
from rackmount.execution import worker as worker_module
from rackmount.execution.batch import FlatBatch
from rackmount.execution.graphs import DecodeGraphs
from rackmount.execution.worker import Worker
from rackmount.sampling.sampler import Sampler
from rackmount.sampling.table import SamplingTable
from rackmount_registry.ops import reference_ops


@dataclass
class EagerGraph:
    """Runs again what was recorded, and leaves the result at its place."""

    run: Callable[[], Tensor]
    out: Tensor
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.out.copy_(self.run())


class EagerRecorder:
    """In the place of `graphs.Recorder`."""

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, run: Callable[[], Tensor]) -> tuple[EagerGraph, Tensor]:
        out = run()
        graph = EagerGraph(run, out.fill_(77))  # what nobody replays has no result
        return graph, out


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
    ids = {"vocab_size": NUM_BYTE_IDS, "bos_token_id": BOS, "eos_token_id": EOS}
    folder, _ = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", **ids)
    byte_tokenizer().save_pretrained(folder)
    return folder


PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.1}
PARAMS = [
    greedy(3),
    greedy(8, logprobs=2),
    greedy(6, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, repetition_penalty=1.2, logprobs=0),
    greedy(5, logit_bias={7: 5.0}, min_tokens=2),
    greedy(12, **PENALTIES),
    SamplingParams(seed=1, max_tokens=11, min_tokens=7, allowed_token_ids=[5, 70, 71, EOS]),
    SamplingParams(seed=2, max_tokens=12, allowed_token_ids=[65, 66], bad_words=["AB", "BBB"]),
    SamplingParams(seed=5, max_tokens=20, grammar=GrammarSpec(regex="[A-F]{3,5}-[0-9]{2}")),
    SamplingParams(seed=4, max_tokens=14, ignore_eos=True),
]
PROMPTS = rows(12, 2, 9, 5, 7, 4, 11, 3, 6, 8)


def answers(folder: Path, graphs: bool, **limits: Any) -> list[RequestOutput]:
    with tiny_engine(folder, **limits) as engine:
        worker = engine.core.executor._program._worker
        if graphs:
            runner, padding_row = worker._runner, worker.batch.padding_row
            worker._decode_graphs = DecodeGraphs(runner, worker._sampler, padding_row)
            with torch.inference_mode():
                worker._decode_graphs.capture([4, 8])
            worker._mixed_graphs = EagerMixedGraphs(worker)
        outputs = engine.generate(PROMPTS, PARAMS)
        if graphs:
            graphs_of = worker._decode_graphs._graphs.values()
            assert any(each.plain.graph.num_replays for each in graphs_of)
            assert any(each.processed.graph.num_replays for each in graphs_of)
            assert worker._mixed_graphs.num_steps
        assert bool(engine.stats.total_preemptions) == ("num_kv_blocks" in limits)
        assert_idle(engine)
        return outputs


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "limits",
    [{}, {"long_prefill_token_threshold": 1}, {"max_num_batched_tokens": 6}, {"num_kv_blocks": 12}],
)
def test_graphs_change_nothing(
    folder: Path, limits: dict[str, int], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one token, that decode steps of graphs do not know, among them."""
    monkeypatch.setattr(module, "Recorder", EagerRecorder)
    monkeypatch.setattr(worker_module, "fetch", torch.clone)  # as the copy from a GPU
    expected = answers(folder, False, **limits)
    found = answers(folder, True, async_scheduling=ahead, **limits)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason != "error"
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


def test_processing_asks_nothing_of_the_host() -> None:
    """Under fake tensors, which have shapes but no values, whatever would read one raises."""
    size = NUM_BYTE_IDS
    table = SamplingTable(4, size, torch.device("cpu"))
    for row, params in enumerate(PARAMS[4:7]):
        table.admit(row, params, seed=0, prompt_token_ids=[0], bad_words_ids=[[5]], stop_ids=[1])
    sampler = Sampler(table, reference_ops())
    sampler.prepare(np.arange(3), np.ones(3, int), np.zeros((5, 9), int))
    with FakeTensorMode(allow_non_fake_inputs=True):
        row_ids = torch.zeros(6, dtype=torch.int32)
        processed = sampler.process(torch.zeros(6, size), row_ids)
        assert processed.shape == (6, size)
        table.penalties.observe(row_ids, torch.zeros(6, dtype=torch.int32))
        with pytest.raises(DynamicOutputShapeException):
            row_ids.nonzero()  # as it does
