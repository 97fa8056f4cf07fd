"""Experts in boxes: the reference kernel, and a dispatcher from outside in a whole model."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.batched import Boxes, Fp8Boxes, batched_plugin, round_columns
from tests.helpers.checkpoints import random_ids, tiny_checkpoint
from tests.helpers.experts import FORMATS, defined_experts, expert_bundle, expert_tokens
from tests.helpers.memory import draft_module
from tests.helpers.mounting import Reference, draft_of, mount_draft, plugins
from torch import Tensor, nn

from rackmount.loading.safetensors_reader import open_checkpoint
from rackmount_moe import torch_experts
from rackmount_moe.local import LocalDispatcher
from rackmount_moe.torch_experts import TorchExperts
from rackmount_registry.axes import Axis, Cut, Solo
from rackmount_registry.capabilities import Demand
from rackmount_registry.descriptors import ExpertKernel, TokenDispatcher
from rackmount_registry.errors import SelectionError
from rackmount_registry.experts import (
    BatchedExpertInput,
    DispatchContext,
    ExpertBundle,
    ExpertInput,
)
from rackmount_registry.formats import BLOCK, Weight
from rackmount_registry.mount import select_parts
from rackmount_registry.nn import Experts, Routing
from rackmount_registry.selection import choose_experts

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K = 5, 144, 40, 2
ALL = Cut(0, NUM_EXPERTS)
IDLE = 3
"""The expert that no token of `expert_tokens` chooses."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def context(experts: Cut = ALL, ranks: int = 1) -> DispatchContext:
    return DispatchContext(
        num_experts=NUM_EXPERTS,
        local_experts=experts,
        group=Solo(0, ranks),
        top_k=TOP_K,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def through(dispatcher: Boxes, given: ExpertInput, layer: ExpertBundle) -> Tensor:
    """What the tokens get of a layer in boxes."""
    sent = dispatcher.dispatch(given.x, given.expert_ids, given.weights)
    return dispatcher.combine(TorchExperts().run(sent, layer), sent)


def as_rounded(given: ExpertInput) -> ExpertInput:
    """The tokens as FP8 leaves them."""
    values, scales = round_columns(given.x)
    x = values.float() * scales.repeat_interleave(BLOCK, -1)[:, : values.shape[1]]
    return replace(given, x=x)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_boxes_of_any_weight_format_give_the_sum_of_each_tokens_experts(
    name: str, count: int
) -> None:
    layer = expert_bundle(name, NUM_EXPERTS, HIDDEN, WIDTH)
    given = expert_tokens(count, NUM_EXPERTS, HIDDEN, TOP_K)
    out = through(Boxes(context()), given, layer)
    assert out.shape == given.x.shape
    torch.testing.assert_close(out.double(), defined_experts(given, layer), rtol=1e-5, atol=1e-5)
    out, rounded = through(Fp8Boxes(context()), given, layer), as_rounded(given)
    torch.testing.assert_close(out.double(), defined_experts(rounded, layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dispatcher", [Boxes, Fp8Boxes])
def test_rows_that_no_token_takes_are_not_computed_and_idle_experts_not_read(
    dispatcher: type[Boxes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of numbers, so that a result of them would be one."""
    layer = expert_bundle("dense", NUM_EXPERTS, HIDDEN, WIDTH)
    given = expert_tokens(7, NUM_EXPERTS, HIDDEN, TOP_K)
    sent = dispatcher(context()).dispatch(given.x, given.expert_ids, given.weights)
    counts = sent.num_valid.tolist()
    assert counts[IDLE] == 0 and len(set(counts)) > 2
    product, read = torch_experts._product, list[int]()

    def spied(x: Tensor, weight: Weight) -> Tensor:
        read.append(len(x))
        return product(x, weight)

    monkeypatch.setattr(torch_experts, "_product", spied)
    expected = TorchExperts().run(sent, layer)
    assert read == [count for count in counts if count for _ in range(2)]
    for expert, count in enumerate(counts):
        sent.x[expert, count:] = torch.ones(HIDDEN).to(sent.x.dtype)
        if sent.scales is not None:
            sent.scales[expert, count:] = 1
    out = TorchExperts().run(sent, layer)
    for expert, count in enumerate(counts):
        assert out[expert, :count].isfinite().all() and out[expert, count:].isnan().all()
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_boxes_without_rows_and_boxes_that_no_token_takes_are_ordinary() -> None:
    layer = expert_bundle("dense", NUM_EXPERTS, HIDDEN, WIDTH)
    for rows in (0, 4):
        given = BatchedExpertInput(
            x=torch.full((NUM_EXPERTS, rows, HIDDEN), torch.nan, dtype=torch.bfloat16),
            num_valid=torch.zeros(NUM_EXPERTS, dtype=torch.int32),
            dtype=torch.bfloat16,
        )
        out = TorchExperts().run(given, layer)
        assert (out.shape, out.dtype) == ((NUM_EXPERTS, rows, HIDDEN), torch.bfloat16)


def test_ranks_give_shares_of_the_sum() -> None:
    layer = expert_bundle("dense", NUM_EXPERTS, HIDDEN, WIDTH)
    given = expert_tokens(6, NUM_EXPERTS, HIDDEN, TOP_K)
    shares = []
    for start, stop in ((0, 2), (2, 3), (3, NUM_EXPERTS)):
        dispatcher = Boxes(context(Cut(start, stop), ranks=3))
        assert not dispatcher.reduces
        shares.append(through(dispatcher, given, cut(layer, start, stop)))
    whole = through(Boxes(context()), given, layer)
    torch.testing.assert_close(sum(shares), whole, rtol=1e-6, atol=1e-6)


def cut(layer: ExpertBundle, start: int, stop: int) -> ExpertBundle:
    """Experts start to stop of a dense layer."""

    def of(weight: Weight) -> Weight:
        return replace(weight, tensors={"weight": weight.tensors["weight"][start:stop]})

    return ExpertBundle(gate_up=of(layer.gate_up), down=of(layer.down))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-MoE."""
    return tiny_checkpoint(tmp_path_factory.mktemp("qwen3-moe"), "qwen3-moe")[0]


def mounted(folder: Path, dispatcher: str) -> Reference:
    """The model in float32 with the dispatcher that is asked for."""
    checkpoint = open_checkpoint(folder)
    try:
        drafted = draft_of(checkpoint)
        choice = select_parts(
            plugins() + batched_plugin(),
            drafted,
            Demand(device="cpu", dtype="float32"),
            requested={"token_dispatcher": dispatcher},
        )
        assert choice.experts["dense"].kernel.name == "torch"
        return mount_draft(drafted, checkpoint, parts=choice.load())
    finally:
        checkpoint.close()


SEQUENCES = (random_ids(9), random_ids(1, seed=1), random_ids(5, seed=2))


def test_a_model_has_the_logits_that_it_has_with_local(folder: Path) -> None:
    local, boxes = mounted(folder, "local"), mounted(folder, "boxes")
    for sequences in (SEQUENCES, SEQUENCES[1:2]):  # one token leaves five of eight experts idle
        expected = local.logits(*sequences)
        torch.testing.assert_close(boxes.logits(*sequences), expected, rtol=0, atol=1e-5)
    assert boxes.logits(random_ids(0)).shape == (0, expected.shape[1])
    assert all(isinstance(each.dispatcher, Boxes) for each in boxes.mounted.draft.experts)


def test_a_model_has_the_logits_of_tokens_in_fp8(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, boxes = mounted(folder, "local").logits(*SEQUENCES), mounted(folder, "fp8-boxes")

    def dispatch(self: LocalDispatcher, *given: Tensor) -> ExpertInput:
        return as_rounded(ExpertInput(x=given[0], expert_ids=given[1], weights=given[2]))

    monkeypatch.setattr(LocalDispatcher, "dispatch", dispatch)
    rounded, out = mounted(folder, "local").logits(*SEQUENCES), boxes.logits(*SEQUENCES)
    torch.testing.assert_close(out, rounded, rtol=0, atol=1e-4)
    assert (out - exact).abs().max() > 1e-2


def test_a_kernel_and_a_dispatcher_are_paired_by_layout_or_refused_with_the_reason() -> None:
    manager = plugins() + batched_plugin()
    offers = manager.offers(ExpertKernel), manager.offers(TokenDispatcher)
    gpu = Demand(
        device="cuda", compute_capability=(9, 0), dtype="bfloat16", weight_format="fp8_blocks"
    )
    for name, layout in (("boxes", "batched"), ("fp8-boxes", "batched_fp8")):
        choice = choose_experts(*offers, gpu, requested_dispatcher=name)
        assert (choice.kernel.name, choice.dispatcher.name) == ("torch", name)
        assert choice.layout == layout
        told = {(pair.first.name, pair.second.name): str(pair) for pair in choice.candidates}
        assert told["torch", name] == f"torch + {name}: fits"
        reason = f"triton + {name}: no row of triton that fits takes the layout {layout}"
        assert told["triton", name] == reason
        with pytest.raises(SelectionError, match=re.escape(f"fit: {reason}")):
            choose_experts(*offers, gpu, "triton", name)


def test_auto_keeps_to_local_until_the_plugin_is_opted_in() -> None:
    def layer() -> nn.Module:
        experts, ffn = Axis("experts", 6), Axis("expert_ffn", 8)
        return nn.Sequential(Experts(4, experts, ffn, Routing(top_k=2)))

    demand = Demand(device="cpu", dtype="float32")
    manager, drafted = plugins() + batched_plugin(), draft_module(layer, dtype=torch.float32)
    choice = select_parts(manager, drafted, demand).experts["dense"]
    assert choice.layout == "contiguous"
    assert any("not opted in" in str(p) for p in choice.candidates if p.second.name == "boxes")
    opted_in = frozenset({"acme-boxes"})
    choice = select_parts(manager, drafted, demand, opted_in=opted_in).experts["dense"]
    assert (choice.dispatcher.name, choice.layout) == ("boxes", "batched")
