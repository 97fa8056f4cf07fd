"""Captured decode steps give what eager ones give, with every attention backend that is here."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    BOS,
    EOS,
    NUM_BYTE_IDS,
    assert_idle,
    byte_tokenizer,
    distributions,
    greedy,
    rows,
    tiny_engine,
    tokens_of,
)
from tests.helpers.mounting import plugins
from torch import Tensor

from rackmount import Engine, RequestOutput, SamplingParams
from rackmount.execution.batch import FlatBatch
from rackmount.execution.graphs import MixedGraphs, SamplingGraph
from rackmount.execution.pending import PendingStep
from rackmount.execution.worker import Worker
from rackmount.scheduling.plan import StepPlan

pytestmark = pytest.mark.gpu

SIZES = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
TIE = 0.07
"""Log-probabilities that lie so close may change places by rounding: each of two logits from 4 to 8
is off by 1/32 in bfloat16."""

BACKENDS = [
    offer.name
    for offer in plugins().offers("attention_backend")
    if offer.name != "torch" and not offer.missing()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", **SIZES)[0]


def engine_of(folder: Path, **arguments: Any) -> Engine:
    given = {"device": "cuda", "dtype": "bfloat16", "block_size": None, "num_kv_blocks": 64}
    return tiny_engine(folder, **(given | arguments))


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_give_the_tokens_of_eager_steps(folder: Path, backend: str) -> None:
    """All batch sizes from 1 to the limit, most of them between two captured ones: requests end one
    after another."""
    prompts = rows(*range(3, 24))
    params = [greedy(2 + index) for index in range(len(prompts))]
    found = []
    for eager in (False, True):
        with engine_of(folder, backend=backend, enforce_eager=eager, max_num_seqs=21) as engine:
            assert engine.rack.captures_graphs is not eager
            found.append(tokens_of(engine, prompts, params))
            assert_idle(engine)
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) > 15


def test_graphs_of_large_batches_give_the_tokens_of_eager_steps(folder: Path) -> None:
    """From 256 on, seven requests fewer in each step. In float32: padding changes the kernels of
    products, whose rounding in bfloat16 would change tokens."""
    prompts = rows(*(3 + index % 8 for index in range(256)))
    params = [greedy(2 + index // 7) for index in range(256)]
    given = {"dtype": "float32", "max_num_seqs": 256, "num_kv_blocks": 1200, "block_size": 16}
    found = []
    for eager in (False, True):
        with engine_of(folder, enforce_eager=eager, **given) as engine:
            found.append(tokens_of(engine, prompts, params))
            assert_idle(engine)
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) > 100


def test_larger_mixed_graphs_give_the_tokens_of_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more tokens than any one prompt has, in float32 as above."""
    replayed: list[int] = []
    replay = MixedGraphs.replay

    def watch(self: MixedGraphs, flat: FlatBatch) -> Any:
        replayed.append(flat.token_ids.size)
        return replay(self, flat)

    monkeypatch.setattr(MixedGraphs, "replay", watch)
    folder = tiny_checkpoint(tmp_path, "qwen3", **SIZES, max_position_embeddings=1024)[0]
    prompts = rows(*(30 + 7 * index for index in range(20)))
    given = {"dtype": "float32", "max_num_seqs": 20, "num_kv_blocks": 400, "block_size": 16}
    given |= {"max_graph_tokens": 700, "max_num_batched_tokens": 700, "enable_mixed_steps": True}
    found, num_replayed = [], []
    for eager in (False, True):
        with engine_of(folder, enforce_eager=eager, **given) as engine:
            assert engine.rack.mixed_sizes[-2:] == ([] if eager else [512, 700])
            found.append(tokens_of(engine, prompts, [greedy(12)] * len(prompts)))
            assert_idle(engine)
        num_replayed.append(len(replayed))
    assert num_replayed[0] == num_replayed[1] > 2 and max(replayed) > 512
    assert found[0] == found[1]
    assert len({tuple(each) for each in found[0]}) > 15


def errors_of(outputs: list[RequestOutput], expected: list[RequestOutput]) -> Tensor:
    """Relative errors of log-probabilities [requests, 2]: of the prompt, and of decode steps while
    the tokens before are those that were expected."""
    found = []
    for ours, theirs in zip(outputs, expected, strict=True):
        texts = zip(ours.outputs[0].token_ids, theirs.outputs[0].token_ids, strict=True)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], texts))
        for entries in (
            [each.prompt_logprobs[1:] for each in (ours, theirs)],
            [each.outputs[0].logprobs[: alike + 1] for each in (ours, theirs)],
        ):
            got, right = map(distributions, entries)
            found.append((got - right).norm() / right.norm())
    return torch.stack(found).view(-1, 2)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_logits_are_near_those_of_the_reference(
    folder: Path, backend: str, record_property: Callable[[str, object], None]
) -> None:
    """Of prompts in chunks, and of decode steps; the reference is PyTorch's in all parts. bfloat16
    alone takes some 1e-2, and none take a quarter more than the reference in bfloat16 does. `auto`
    may take two backends."""
    prompts = rows(40, 7, 21)
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, logprobs=97, prompt_logprobs=97
    )
    found = []
    for name, dtype, others in (
        ("torch", "float32", "torch"),
        ("torch", "bfloat16", "torch"),
        (backend, "bfloat16", "auto"),
    ):
        parts = {"backend": name, "op_set": others, "linear_kernel": others}
        with engine_of(folder, dtype=dtype, max_num_batched_tokens=16, **parts) as engine:
            found.append(engine.generate(prompts, params))
    exact, rounded, ours = found
    of_rounding, of_ours = (errors_of(each, exact).max().item() for each in (rounded, ours))
    between = errors_of(ours, rounded).max().item()
    told = {"bfloat16": of_rounding, backend: of_ours, "between": between}
    record_property("relative errors", told)
    bound = max(1e-2, 1.25 * of_rounding)
    assert bound < 2e-2
    assert of_ours < bound and between < 1e-2


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_row_s_text_does_not_depend_on_what_its_mates_ask_for(
    folder: Path, enforce_eager: bool
) -> None:
    """Penalties, rules and logprobs take a step's sampling from the one graph to the other."""
    prompts = rows(9, 12, 15, 8)
    plain = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True)
    special = [
        SamplingParams(temperature=0.7, seed=6, max_tokens=9, repetition_penalty=1.3),
        SamplingParams(temperature=0, max_tokens=12, logprobs=3, logit_bias={5: 4.0}),
        SamplingParams(temperature=0.9, seed=7, max_tokens=15, top_p=0.8, min_tokens=4),
    ]
    with engine_of(folder, dtype="float32", enforce_eager=enforce_eager) as engine:
        alone = tokens_of(engine, prompts[:1], [plain])
        together = tokens_of(engine, prompts, [plain, *special])
        assert together[0] == alone[0]
        again = tokens_of(engine, prompts, [plain, *special])
        assert again == together
        assert_idle(engine)


ASKING = [
    greedy(20, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, presence_penalty=1.5, logprobs=2),
    SamplingParams(temperature=0.9, seed=2, max_tokens=16, logit_bias={5: 4.0, 80: -20.0}),
    SamplingParams(seed=3, max_tokens=22, allowed_token_ids=[3, 65, 66, 67]),
    SamplingParams(seed=4, max_tokens=30, allowed_token_ids=[65, 66], bad_words=["AB", "BBB"]),
    SamplingParams(seed=5, max_tokens=18, min_tokens=9, stop_token_ids=list(range(200))),
    greedy(14, logprobs=3),
]


@pytest.mark.parametrize("arguments", [{}, {"max_num_batched_tokens": 16}, {"num_kv_blocks": 14}])
def test_whatever_requests_ask_for_graphs_give_the_tokens_of_eager_steps(
    tmp_path: Path, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step ahead, beside plain ones, which outlive them; and every decode step replays one."""
    ids = {"vocab_size": NUM_BYTE_IDS, "bos_token_id": BOS, "eos_token_id": EOS}
    folder, _ = tiny_checkpoint(tmp_path, "qwen3", **(SIZES | ids))
    byte_tokenizer().save_pretrained(folder)
    plain = [greedy(33), SamplingParams(seed=9, max_tokens=36, ignore_eos=True)]
    prompts = rows(*range(4, 4 + len(ASKING) + len(plain)))
    given = {"dtype": "float32", "block_size": 16, "max_num_seqs": 16} | arguments
    found, seen = [], []
    for eager in (True, False):
        with engine_of(folder, enforce_eager=eager, **given) as engine:
            worker = engine.core.executor._program._worker
            assert engine.rack.captures_graphs is not eager
            if not eager:
                seen = watch(worker, monkeypatch)
            outputs = engine.generate(prompts, [*ASKING, *plain])
            found.append([answer_of(output) for output in outputs])
            assert_idle(engine)
    assert found[0] == found[1]
    assert {"plain", "processed"} <= set(seen)
    assert seen.count("step") == seen.count("plain") + seen.count("processed")


def watch(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Its decode steps and the sampling graphs that are replayed, from here on."""
    seen: list[str] = []
    graphs, decode = worker._decode_graphs._graphs, worker._decode

    def named(name: str, graph: SamplingGraph) -> SamplingGraph:
        replay = graph.graph.replay
        return SamplingGraph(
            SimpleNamespace(replay=lambda: (seen.append(name), replay())), graph.token_ids
        )

    for size, graph in graphs.items():
        graphs[size] = replace(
            graph,
            plain=named("plain", graph.plain),
            processed=named("processed", graph.processed),
        )
    monkeypatch.setattr(worker, "_decode", lambda *args: (seen.append("step"), decode(*args))[1])
    return seen


def answer_of(output: RequestOutput) -> tuple[Any, ...]:
    """Its tokens, why it ended, and the tokens and ranks of its logprobs."""
    answer = output.outputs[0]
    listed = [(each.token_id, each.rank, list(each.top)) for each in answer.logprobs or []]
    assert answer.finish_reason != "error"
    return answer.token_ids, answer.finish_reason, listed


@pytest.mark.parametrize("backend", BACKENDS)
def test_preemption_and_steps_in_flight_change_nothing(folder: Path, backend: str) -> None:
    """Until two tokens are equal but for rounding: what a preempted request had decoded, a prefill
    computes anew, which backends leave to another kernel."""
    prompts = rows(20, 24, 22, 18, 25)
    found = []
    for blocks, ahead in ((64, False), (11, True)):
        with engine_of(
            folder, backend=backend, block_size=16, num_kv_blocks=blocks, async_scheduling=ahead
        ) as engine:
            outputs = engine.generate(prompts, greedy(30, logprobs=5))
            found.append([each.outputs[0] for each in outputs])
            preemptions = engine.stats.total_preemptions
            assert_idle(engine)
    assert preemptions > 0
    equal = [calm.token_ids == hurried.token_ids for calm, hurried in zip(*found, strict=True)]
    assert sum(equal) >= len(prompts) - 1
    for calm, hurried in zip(*found, strict=True):
        for token_id, entry in zip(hurried.token_ids, calm.logprobs, strict=True):
            if token_id != entry.token_id:
                assert entry.logprob - entry.top.get(token_id, -torch.inf) < TIE
                break


def test_memory_is_what_was_asked_for(folder: Path) -> None:
    """The pool takes what weights, activations and graphs leave of the share."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = 1 - (free - 4 * 2**30) / total
    with engine_of(
        folder,
        num_kv_blocks=None,
        max_num_seqs=4096,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=share,
    ) as engine:
        tokens_of(engine, rows(30, 40), greedy(8))
        left, _ = torch.cuda.mem_get_info()
        assert engine.core.kv_bytes > 2**28
    assert free - left < 4.2 * 2**30


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_step_waits_for_the_gpu(folder: Path, backend: str) -> None:
    """Chunks, mixed steps small and large, decoding, and all that requests may ask for."""
    arguments = {"max_num_batched_tokens": 320, "enable_prefix_caching": False}
    with engine_of(folder, backend=backend, **arguments) as engine:
        worker = engine.core.executor._program._worker
        execute, steps = worker.execute, []

        def strictly(plan: StepPlan) -> PendingStep:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return execute(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                steps.append(plan.total_num_tokens)

        asking = [
            greedy(9),
            greedy(12, logprobs=2, prompt_logprobs=1),
            SamplingParams(
                temperature=0.8, seed=3, max_tokens=15, repetition_penalty=1.2, ignore_eos=True
            ),
            greedy(7, logit_bias={7: 5.0}, min_tokens=2, allowed_token_ids=list(range(50))),
        ]
        lengths = (48, 40, 45, 36, 44, 38, 41, 30)
        for params in (asking * 2, [greedy(9)] * 8):
            worker.execute = execute
            engine.generate(rows(*lengths), params)  # what is taken once may take its time
            worker.execute = strictly
            steps.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that the mode is a prototype
                engine.generate(rows(*lengths, seed=1), params)
            assert steps[0] == 320 and 256 > steps[1] > len(lengths) == steps[2]
