"""The fused step does what the textbook code says, on one rank and on two."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import random_ids, tiny_checkpoint
from tests.helpers.counting import CountingKernel, CountingOps, RoundingKernel, dense_kernel
from tests.helpers.memory import MemoryCheckpoint, draft_module, random_tensors
from tests.helpers.mounting import Reference, chosen_parts, mount_draft, mount_reference
from tests.helpers.ranks import ThreadGroup
from torch import Tensor, nn

from rackmount_registry.axes import Mesh
from rackmount_registry.nn import Axis, Embedding, GatedMLP, Linear, Norm, Param

HIDDEN, FFN, VOCAB = 8, 12, 11
IDS = random_ids(9, VOCAB)


class Shape(nn.Module):
    """Sockets for the models below, whose forward is all that differs."""

    def __init__(self) -> None:
        super().__init__()
        ffn = Axis("ffn", FFN)
        self.embed = Embedding(Axis("vocab", VOCAB), HIDDEN)
        self.one, self.two = GatedMLP(HIDDEN, ffn), GatedMLP(HIDDEN, ffn)
        self.up, self.down = Linear(HIDDEN, ffn), Linear(ffn, HIDDEN, bias=True)
        self.norm, self.other_norm = Norm(HIDDEN, 1e-2), Norm(HIDDEN, 1e-2)
        self.shift = Param(HIDDEN)


class Textbook(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.one(self.norm(x))
        x = x + self.two(self.other_norm(x))
        return self.norm(x)


class SumReadByTwoNorms(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.one(x)
        return self.norm(x) - self.other_norm(x) * x


class ParallelBlocks(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.one(self.norm(x)) + self.two(self.norm(x))
        return self.other_norm(x)


class SharesOnBothSides(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.norm(self.one(x) + self.down(self.up(x)))


class ShareOnTheLeft(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.norm(self.one(x) + x)


class SumOfOneShareWithItself(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        half = self.one(self.embed(ids))
        return self.norm(half + half)


class SocketUsedTwice(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.norm(x + self.one(x)) * self.one(x)


class ShareReadTwice(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.one(x)
        return self.norm(x + y) * y


class AddedInPlace(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x += self.one(self.norm(x))
        return self.other_norm(x)


class AddedVector(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.embed(ids) + self.shift())


class AddedNumber(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.one(self.embed(ids)) + 1.5)


class NoNormBehindTheSum(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.down(self.up(self.norm(x)))


class ShiftedNorm(Norm):
    """A norm of another kind."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class NormOfAnotherKind(Shape):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ShiftedNorm(HIDDEN, 1e-2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.norm(x + self.one(x))


FUSED_SUMS = {
    Textbook: 2,
    SumReadByTwoNorms: 1,
    ParallelBlocks: 1,
    SharesOnBothSides: 1,
    ShareOnTheLeft: 1,
    SumOfOneShareWithItself: 1,
    SocketUsedTwice: 1,
    ShareReadTwice: 1,
    AddedInPlace: 1,
    AddedVector: 0,
    AddedNumber: 0,
    NoNormBehindTheSum: 0,
    NormOfAnotherKind: 0,
}
"""Model -> additions that become one operation with a norm."""


def mount_shape(make: type[Shape], ops: CountingOps, mesh: Mesh | None = None) -> Reference:
    drafted = draft_module(make, mesh=mesh)
    parts = replace(chosen_parts(drafted), ops=ops)
    whole = MemoryCheckpoint(random_tensors(draft_module(make)))
    return mount_draft(drafted, whole, parts=parts)


@pytest.mark.parametrize("make", FUSED_SUMS)
def test_the_fused_step_equals_the_model_as_written(make: type[Shape]) -> None:
    ops = CountingOps()
    one = mount_shape(make, ops)
    fused = one.hidden(IDS)
    assert ops.calls["add_rms_norm"] == FUSED_SUMS[make]
    with torch.inference_mode():
        torch.testing.assert_close(fused, one.mounted.draft.model(IDS), rtol=0, atol=1e-12)
    assert fused.std() > 0.1


@pytest.mark.parametrize("make", FUSED_SUMS)
def test_the_fused_step_of_two_ranks_equals_the_model_as_written(make: type[Shape]) -> None:
    with torch.inference_mode():
        expected = mount_shape(make, CountingOps()).mounted.draft.model(IDS)
    group = ThreadGroup(2)
    ranks = [
        mount_shape(make, CountingOps(), Mesh.tensor_parallel(member)) for member in group.members
    ]
    for hidden in group.run(lambda rank: ranks[rank].hidden(IDS)):
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)


def deferred(reference: Reference) -> set[str]:
    """Sockets whose sum over ranks has moved into a fused operation."""
    return {socket.path for socket in reference.mounted.draft.sockets if socket.deferred}


DEFERRED = {
    Textbook: {"one.down_proj", "two.down_proj"},
    SumReadByTwoNorms: {"one.down_proj"},
    ParallelBlocks: {"two.down_proj"},
    ShareOnTheLeft: {"one.down_proj"},
    SumOfOneShareWithItself: set(),
    SocketUsedTwice: set(),
    ShareReadTwice: set(),
    NoNormBehindTheSum: set(),
    NormOfAnotherKind: set(),
}


@pytest.mark.parametrize("make", DEFERRED)
def test_a_sum_over_ranks_moves_only_where_nobody_else_reads_the_share(make: type[Shape]) -> None:
    mesh = Mesh.tensor_parallel(ThreadGroup(2).members[0])
    assert deferred(mount_shape(make, CountingOps(), mesh)) == DEFERRED[make]


def test_of_two_shares_one_is_summed_in_the_fused_operation() -> None:
    mesh = Mesh.tensor_parallel(ThreadGroup(2).members[0])
    both = {"one.down_proj", "down"}
    assert len(deferred(mount_shape(SharesOnBothSides, CountingOps(), mesh)) & both) == 1


def test_a_single_rank_defers_nothing() -> None:
    assert deferred(mount_shape(Textbook, CountingOps())) == set()


class GateReadTwice(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        gate, up = self.one.gate_up(self.embed(ids))
        return self.one.act(gate, up) * gate


class UpBeforeGate(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        gate, up = self.one.gate_up(self.embed(ids))
        return self.one.act(up, gate)


class GateAlone(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        gate, _ = self.one.gate_up(self.embed(ids))
        return self.one.act(gate, gate)


EPILOGUES: dict[type[Shape], dict[str, int]] = {
    Textbook: {"silu_mul": 2, "add": 2},
    SumReadByTwoNorms: {"silu_mul": 1, "add": 1},
    ParallelBlocks: {"silu_mul": 2, "add": 1, "run": 1},
    SharesOnBothSides: {"silu_mul": 1, "add": 1, "run": 2},
    ShareOnTheLeft: {"silu_mul": 1, "add": 1},
    SumOfOneShareWithItself: {"silu_mul": 1, "run": 1},
    SocketUsedTwice: {"silu_mul": 2, "add": 1, "run": 1},
    ShareReadTwice: {"silu_mul": 1, "run": 1},
    AddedInPlace: {"silu_mul": 1, "add": 1},
    NoNormBehindTheSum: {"run": 2},
    NormOfAnotherKind: {"silu_mul": 1, "run": 1},
    GateReadTwice: {"run": 1},
    UpBeforeGate: {"run": 1},
    GateAlone: {"run": 1},
}
"""Model -> products by epilogue, "run" without one."""


@pytest.mark.parametrize("make", EPILOGUES)
def test_what_a_kernel_can_do_to_its_product_is_left_to_it(make: type[Shape]) -> None:
    kernel = CountingKernel()
    drafted = draft_module(make)
    parts = replace(
        chosen_parts(drafted), kernels=dense_kernel(kernel, epilogues=("silu_mul", "add"))
    )
    one = mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)), parts=parts)
    fused = one.hidden(IDS)
    assert kernel.calls == EPILOGUES[make]
    with torch.inference_mode():
        torch.testing.assert_close(fused, one.mounted.draft.model(IDS), rtol=0, atol=1e-12)


def test_a_kernel_adds_for_as_many_rows_as_it_says() -> None:
    kernel = CountingKernel(most_added=len(IDS) - 1)
    drafted = draft_module(Textbook)
    parts = replace(
        chosen_parts(drafted), kernels=dense_kernel(kernel, epilogues=("silu_mul", "add"))
    )
    one = mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)), parts=parts)
    whole, part = one.hidden(IDS), one.hidden(IDS[:-1])
    assert kernel.calls == {"silu_mul": 4, "run": 2, "add": 2}
    torch.testing.assert_close(part, whole[:-1], rtol=0, atol=1e-12)


def test_a_share_of_a_sum_over_ranks_is_added_after_the_sum() -> None:
    kernel = CountingKernel()
    drafted = draft_module(Textbook, mesh=Mesh.tensor_parallel(ThreadGroup(2).members[0]))
    parts = replace(
        chosen_parts(drafted), kernels=dense_kernel(kernel, epilogues=("silu_mul", "add"))
    )
    whole = MemoryCheckpoint(random_tensors(draft_module(Textbook)))
    assert deferred(mount_draft(drafted, whole, parts=parts)) == DEFERRED[Textbook]


class NormReadByThree(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        return self.one(x) + self.two(x) + x


class UngatedBlocks(Shape):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.up(self.norm(x)))
        return self.down(self.up(self.other_norm(x)))


ROUNDED: dict[type[Shape], dict[str, int]] = {
    Textbook: {"round_norm": 2, "round_silu_mul": 2, "rounded": 4, "run": 4},
    NormReadByThree: {"round_silu_mul": 2, "rounded": 2, "run": 4},
    UngatedBlocks: {"round_norm": 2, "rounded": 2, "run": 4},
    GateReadTwice: {"run": 1},
    NormOfAnotherKind: {"round_silu_mul": 1, "rounded": 1, "run": 2},
}
"""Model -> what is rounded on the way to a product, and products of such input among all."""


@pytest.mark.parametrize("epilogues", [(), ("silu_mul",), ("silu_mul", "add")])
@pytest.mark.parametrize("make", ROUNDED)
def test_what_one_product_alone_reads_is_made_rounded(
    make: type[Shape], epilogues: tuple[str, ...]
) -> None:
    kernel = RoundingKernel()
    drafted = draft_module(make)
    prologues = ("norm", "silu_mul")
    kernels = dense_kernel(kernel, epilogues=epilogues, prologues=prologues)
    parts = replace(chosen_parts(drafted), kernels=kernels)
    one = mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)), parts=parts)
    fused = one.hidden(IDS)
    assert kernel.calls == ROUNDED[make]
    plain = mount_shape(make, CountingOps()).hidden(IDS)
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-12)


def test_few_rows_are_not_rounded_where_the_kernel_says_so() -> None:
    kernel = RoundingKernel(least=len(IDS))
    drafted = draft_module(Textbook)
    kernels = dense_kernel(kernel, epilogues=("silu_mul",), prologues=("norm", "silu_mul"))
    parts = replace(chosen_parts(drafted), kernels=kernels)
    one = mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)), parts=parts)
    one.hidden(IDS[:-1])
    assert kernel.calls == {"silu_mul": 2, "run": 2}
    assert Counter(kernel.uses.values()) == {("run",): 4, ("run", "silu_mul"): 2}


def test_a_kernel_is_not_told_of_products_that_nobody_asks_for() -> None:
    kernel = RoundingKernel()
    drafted = draft_module(Textbook)
    kernels = dense_kernel(kernel, epilogues=("silu_mul",), prologues=("norm",))
    parts = replace(chosen_parts(drafted), kernels=kernels)
    mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)), parts=parts)
    assert Counter(kernel.uses.values()) == {("run",): 4, ("silu_mul",): 2}


def test_a_decoder_runs_two_fused_norms_a_layer_and_one_alone(tmp_path: Any) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    ops = CountingOps()
    reference = mount_reference(folder)
    parts = replace(chosen_parts(reference.mounted.draft), ops=ops)
    mount_reference(folder, parts=parts).hidden(random_ids(4))
    assert ops.calls["add_rms_norm"] == 6
    assert ops.calls["rms_norm"] == 1
