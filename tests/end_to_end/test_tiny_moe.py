"""A trained mixture of experts, whose routing is skewed as that of real models is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks.moe_perplexity import (
    CHECKPOINT,
    Windows,
    held_out,
    losses,
    oracle_losses,
    perplexity,
)
from tests.helpers.engines import greedy, tokens_of
from tests.helpers.mounting import plugins
from torch import Tensor
from transformers import AutoModelForCausalLM

from rackmount import Engine
from rackmount_registry.descriptors import ExpertKernel
from rackmount_registry.nn import Experts

NUM_TOKENS = 8192
TOLERANCE = 2e-3
"""Of perplexities in bfloat16: four times the standard error of the mean of so many tokens, since
rounding moves the loss of one by 0.05 (root of the mean square)."""
KERNELS = [
    offer.name
    for offer in plugins().offers(ExpertKernel)
    if any("cpu" in cell.devices for cell in offer.descriptor.cells)
]


def engine_of(dtype: str, **arguments: Any) -> Engine:
    return Engine(
        CHECKPOINT, manager=plugins(), dtype=dtype, device="cpu", num_kv_blocks=512, **arguments
    )


def oracle(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype).eval()


@pytest.fixture(scope="module")
def windows() -> Windows:
    return held_out(NUM_TOKENS)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of("float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(windows: Windows) -> Tensor:
    """Losses in bfloat16, of every token."""
    return oracle_losses(oracle(torch.bfloat16), windows)


@pytest.mark.parametrize("kernel", KERNELS)
def test_perplexity_in_bfloat16_equals_transformers(
    kernel: str, windows: Windows, expected: Tensor
) -> None:
    with engine_of("bfloat16", expert_kernel=kernel) as engine:
        ours = losses(engine, windows)
    assert len(ours) == NUM_TOKENS - len(windows)
    assert perplexity(ours) == pytest.approx(perplexity(expected), rel=TOLERANCE)


def test_it_has_learnt(expected: Tensor) -> None:
    assert perplexity(expected) < 20, "of 2048 tokens"


def test_in_float32_every_token_is_as_likely_as_with_transformers(
    engine: Engine, windows: Windows
) -> None:
    few = windows[:2]
    expected = oracle_losses(oracle(torch.float32), few)
    torch.testing.assert_close(losses(engine, few), expected, rtol=0, atol=1e-4)


def test_greedy_text_equals_transformers(engine: Engine, windows: Windows) -> None:
    prompts, length = [window.token_ids[:64] for window in windows[:4]], 32
    ids = torch.tensor(prompts)
    generated = oracle(torch.float32).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=length,
        max_new_tokens=length,
        pad_token_id=0,
    )
    assert tokens_of(engine, prompts, greedy(length)) == generated[:, 64:].tolist()


def test_routing_is_skewed_and_counted_as_transformers_routes(
    engine: Engine, windows: Windows
) -> None:
    layers = [socket for socket in engine.rack.draft.sockets if isinstance(socket, Experts)]
    before = torch.stack([layer.state.load for layer in layers])
    losses(engine, windows[2:4])
    load = torch.stack([layer.state.load for layer in layers]) - before

    model = oracle(torch.float32)
    num_experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    routed = torch.zeros_like(load)
    for window in windows[2:4]:
        with torch.inference_mode():
            logits = model(
                torch.tensor([window.token_ids]), output_router_logits=True
            ).router_logits
        chosen = [each.topk(top_k).indices.flatten() for each in logits]
        routed += torch.stack([ids.bincount(minlength=num_experts) for ids in chosen])
    assert load.sum(1).tolist() == routed.sum(1).tolist()
    assert (load - routed).abs().max() <= 2, "equal scores may be told apart otherwise"
    skew = load.amax(1) / load.double().mean(1)
    assert skew.max() > 1.5
    assert skew.max() < num_experts / top_k, "not the same experts for every token"
