"""A norm and the router of the experts that read it are one operation where tokens are few."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.helpers.checkpoints import random_ids
from tests.helpers.counting import CountingKernel, CountingOps, RoundingKernel, dense_kernel
from tests.helpers.memory import MemoryCheckpoint, draft_module, random_tensors
from tests.helpers.mounting import Reference, chosen_parts, mount_draft
from tests.helpers.ranks import ThreadGroup
from torch import Tensor, nn

from rackmount_registry.axes import Mesh
from rackmount_registry.nn import (
    Axis,
    Embedding,
    Experts,
    GatedMLP,
    Linear,
    Norm,
    Routing,
    SparseMLP,
)
from rackmount_registry.ops import NORM_GATE_TOKENS

HIDDEN, VOCAB = 8, 11
MANY = NORM_GATE_TOKENS + 1
IDS = random_ids(MANY, VOCAB)


class Layer(nn.Module):
    """Experts, with a shared one, behind the sum of a product."""

    def __init__(self) -> None:
        super().__init__()
        ffn, count, width = Axis("ffn", 12), Axis("experts", 4), Axis("expert_ffn", 6)
        self.embed = Embedding(Axis("vocab", VOCAB), HIDDEN)
        self.up, self.down = Linear(HIDDEN, ffn), Linear(ffn, HIDDEN)
        self.norm, self.other_norm = Norm(HIDDEN, 1e-2), Norm(HIDDEN, 1e-2)
        experts = Experts(HIDDEN, count, width, Routing(top_k=2))
        self.mlp = SparseMLP(experts, GatedMLP(HIDDEN, ffn))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(x))
        x = x + self.mlp(self.norm(x))
        return self.other_norm(x)


class CalledTwice(Layer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(x))
        return self.mlp.experts(self.norm(x)) + self.mlp.experts(x)


class ReadsTheSum(Layer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(x))
        return self.norm(x) + self.mlp(x)


class NormOfNoSum(Layer):
    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.norm(self.embed(ids)))


def mount(
    make: Callable[[], Layer],
    ops: CountingOps,
    mesh: Mesh | None = None,
    most_added: int = 100,
    whole: dict[str, Tensor] | None = None,
) -> Reference:
    drafted = draft_module(make, mesh=mesh)
    kernel = CountingKernel(most_added)
    parts = replace(
        chosen_parts(drafted),
        ops=ops,
        kernels=dense_kernel(kernel, epilogues=("silu_mul", "add")),
    )
    return mount_draft(drafted, MemoryCheckpoint(whole or random_tensors(drafted)), parts=parts)


@pytest.mark.parametrize("num_tokens", [0, 1, NORM_GATE_TOKENS, MANY])
def test_the_fused_step_equals_the_model_as_written(num_tokens: int) -> None:
    ops = CountingOps()
    one, ids = mount(Layer, ops), IDS[:num_tokens]
    fused = one.hidden(ids)
    few = num_tokens <= NORM_GATE_TOKENS
    assert ops.calls["norm_gate"] == few and ops.calls["gate"] == (not few)
    assert ops.calls["rms_norm"] == (not few)
    with torch.inference_mode():
        torch.testing.assert_close(fused, one.mounted.draft.model(ids), rtol=0, atol=1e-12)
    (experts,) = one.mounted.draft.experts
    assert int(experts.state.load.sum()) == 2 * 2 * num_tokens  # once as it was written


def test_a_product_that_does_not_add_leaves_the_sum_to_the_norm() -> None:
    ops = CountingOps()
    one = mount(Layer, ops, most_added=0)
    fused = one.hidden(IDS[:1])
    assert ops.calls["gate"] == 1 and not ops.calls["norm_gate"]
    with torch.inference_mode():
        torch.testing.assert_close(fused, one.mounted.draft.model(IDS[:1]), rtol=0, atol=1e-12)


class CalledByKeyword(Layer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(x))
        return self.mlp.experts(x=self.norm(x))


@pytest.mark.parametrize("make", [CalledTwice, ReadsTheSum, NormOfNoSum, CalledByKeyword])
def test_other_experts_choose_by_themselves(make: type[Layer]) -> None:
    ops = CountingOps()
    one = mount(make, ops)
    fused = one.hidden(IDS[:3])
    assert not ops.calls["norm_gate"]
    with torch.inference_mode():
        torch.testing.assert_close(fused, one.mounted.draft.model(IDS[:3]), rtol=0, atol=1e-12)


class WholeDown(Layer):
    """Of which the product before the experts is whole on every rank."""

    def __init__(self, *, shared: bool = True) -> None:
        super().__init__()
        self.up, self.down = Linear(HIDDEN, HIDDEN), Linear(HIDDEN, HIDDEN)
        if not shared:
            self.mlp.shared_experts = None


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_tokens", [3, MANY])
def test_two_ranks_give_the_same(num_tokens: int, shared: bool) -> None:
    def make() -> WholeDown:
        return WholeDown(shared=shared)

    whole, ids = random_tensors(draft_module(make)), IDS[:num_tokens]
    expected = mount(make, CountingOps(), whole=whole).hidden(ids)
    group, counts = ThreadGroup(2), [CountingOps(), CountingOps()]
    ranks = [
        mount(make, ops, Mesh.tensor_parallel(member), whole=whole)
        for ops, member in zip(counts, group.members, strict=True)
    ]
    assert ranks[0].mounted.draft.experts[0].deferred is not shared
    for hidden in group.run(lambda rank: ranks[rank].hidden(ids)):
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)
    assert [ops.calls["norm_gate"] for ops in counts] == [num_tokens == 3] * 2


def test_only_rows_that_are_wanted_reach_the_experts() -> None:
    one = mount(Layer, CountingOps())
    whole = one.hidden(IDS[:6])
    (experts,) = one.mounted.draft.experts
    experts.state.load.zero_()
    one.step.wanted = torch.tensor([4, 1])
    torch.testing.assert_close(one.hidden(IDS[:6]), whole[[4, 1]], rtol=0, atol=1e-12)
    assert int(experts.state.load.sum()) == 2 * 2


class NormOfTwo(Layer):
    """A norm that a product takes rounded, and experts as it is."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(self.norm(x)))
        return self.mlp.experts(self.norm(x))


def test_a_norm_that_another_product_rounds_is_whole_for_the_experts() -> None:
    ops, kernel = CountingOps(), RoundingKernel(most_added=100)
    drafted = draft_module(NormOfTwo)
    kernels = dense_kernel(kernel, epilogues=("add",), prologues=("norm",))
    parts = replace(chosen_parts(drafted), ops=ops, kernels=kernels)
    one = mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)), parts=parts)
    many = one.hidden(IDS)
    torch.testing.assert_close(one.hidden(IDS[:2]), many[:2], rtol=0, atol=1e-12)
    assert kernel.calls["rounded"] == 2 and ops.calls["norm_gate"] == ops.calls["gate"] == 1
