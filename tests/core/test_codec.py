"""Messages as bytes: everything comes back as it was, and a delta is small."""

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers.engines import greedy

from rackmount import Request, SamplingParams, Scheduler, SchedulerConfig
from rackmount.config import EngineConfig
from rackmount.execution.codec import MessageCodec
from rackmount.execution.expert_load import ExpertLoad
from rackmount.execution.messages import (
    Carve,
    Carved,
    ExpertLoads,
    Load,
    Loaded,
    RankSetup,
    ReadExpertLoad,
    StepResult,
)
from rackmount.sampling.request import SamplingRequest, TokenLogprobs
from rackmount.scheduling.plan import StepPlan
from rackmount_registry.errors import ConfigError
from rackmount_registry.manifest import ManifestEntry

CODEC = MessageCodec()
EVERYTHING = SamplingParams(
    n=2,
    temperature=0.5,
    logit_bias={3: -1.5},
    allowed_token_ids=[1, 2, 3],
    bad_words=["bad"],
    stop=["a", "b"],
    stop_token_ids=[5],
    seed=2**64 - 1,
    logprobs=2,
    min_tokens=1,
)


def crossed(message: Any) -> Any:
    return CODEC.decode(CODEC.encode(message))


def plain(value: Any) -> Any:
    """A message as nested lists, arrays with their type."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, msgspec.Struct):
        return [type(value), *(plain(getattr(value, name)) for name in value.__struct_fields__)]
    return [plain(item) for item in value] if isinstance(value, list) else value


def scheduler(length: int, **changes: Any) -> Scheduler:
    """256 requests of prompts of `length`, each with a step ahead of it."""
    config = SchedulerConfig(
        num_blocks=256 * (length // 16 + 4),
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=256 * length,
        max_model_len=length + 64,
        vocab_size=1000,
        **changes,
    )
    made = Scheduler(config)
    for index in range(256):
        made.add(
            Request(
                request_id=str(index),
                prompt_token_ids=np.arange(index, index + length, dtype=np.int32) % 1000,
                max_tokens=60,
                stop_ids=frozenset(),
                sampling=SamplingRequest(
                    params=EVERYTHING if index % 2 else greedy(),
                    seed=index,
                    bad_words_ids=[[1, 2]],
                    stop_ids=frozenset({7, 9}),
                ),
            )
        )
    return made


def plans(made: Scheduler, count: int) -> list[StepPlan]:
    found = []
    for _ in range(count):
        plan = made.schedule()
        assert plan is not None
        found.append(plan)
        made.update(plan, np.ones(int(plan.samples.sum()), np.int64))
    return found


@pytest.mark.parametrize(
    "message",
    [
        RankSetup(
            config=EngineConfig(model="m", tp=2, auto_plugins=("a", "b"), max_model_len=9),
            path="/somewhere",
            manifest=(ManifestEntry("d", "1", "ab"), ManifestEntry("e", "2", "cd")),
        ),
        Load(),
        Loaded(num_kv_blocks=3, weight_bytes_read=2**40),
        Carve(num_kv_blocks=3),
        Carved(kv_bytes=5),
        ReadExpertLoad(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_of_the_start_comes_back_equal(message: Any) -> None:
    assert crossed(message) == message


def test_the_load_of_experts_comes_back_equal() -> None:
    tokens = np.array([3, 0, 2**40], np.int64)
    loads = ExpertLoads([ExpertLoad("model.layers.0.mlp.experts", tokens)])
    assert plain(crossed(loads)) == plain(loads)


def test_plans_come_back_equal_and_their_arrays_can_be_written() -> None:
    for plan in plans(scheduler(40), 20):
        again = crossed(plan)
        assert plain(again) == plain(plan)
        assert again.rows.flags.writeable and again.samples.flags.writeable


def test_a_result_comes_back_equal_with_everything_that_it_may_hold() -> None:
    entry = TokenLogprobs(token_id=3, logprob=float("-inf"), rank=1, top={3: -0.5, 4: -1e-300})
    result = StepResult(
        token_ids=np.array([1, 2], np.int32),
        failed=["x"],
        logprobs={"a": entry},
        prompt_logprobs={"b": (1, [entry, entry])},
    )
    assert plain(crossed(result)) == plain(result)
    empty = StepResult(token_ids=np.empty(0, np.int32))
    assert plain(crossed(empty)) == plain(empty)


def test_sampling_options_come_back_as_what_they_were() -> None:
    request = plans(scheduler(40), 1)[0].admitted[1]
    again = crossed(StepPlan([], [request], [], *[np.empty(0, np.int32)] * 3, 0)).admitted[0]
    assert isinstance(again.sampling, SamplingRequest)
    assert again.sampling == request.sampling
    assert {type(getattr(again.sampling.params, f.name)) for f in fields(SamplingParams)} == {
        type(getattr(EVERYTHING, f.name)) for f in fields(SamplingParams)
    }


def test_what_breaks_a_rule_is_refused_on_arrival() -> None:
    data = CODEC.encode(RankSetup(config=EngineConfig(model="m"), path="p", manifest=()))
    with pytest.raises((msgspec.ValidationError, ConfigError)):
        CODEC.decode(data.replace(b"fcfs", b"fcfX"))
    with pytest.raises(msgspec.ValidationError):
        CODEC.decode(msgspec.msgpack.encode(["Unknown", 1]))


def test_a_delta_of_256_decodes_is_small_whatever_the_context() -> None:
    sizes = {}
    for length in (32, 4096):
        decodes = plans(scheduler(length), 34)[1:]
        assert all(plan.total_num_tokens == 256 for plan in decodes)
        sizes[length] = [len(CODEC.encode(plan)) for plan in decodes]
        assert max(sizes[length]) < 20_000
        assert min(sizes[length]) < 4_000
    assert sizes[32] == pytest.approx(sizes[4096], rel=0.02)
