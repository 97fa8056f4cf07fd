"""Every tensor of a checkpoint is loaded, ignored by a rule, or an error; every storage is written
once."""

import importlib
import math
import weakref
from collections import defaultdict
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.memory import MemoryCheckpoint, draft_module, random_tensors
from tests.helpers.mounting import Reference, chosen_parts, mount_draft
from torch import Tensor, nn

from rackmount_registry.axes import Axis, Mesh, Solo
from rackmount_registry.errors import CheckpointError
from rackmount_registry.formats import QuantizationScheme
from rackmount_registry.mount import Draft, Mounted, assemble, fill, fill_randomly
from rackmount_registry.nn import (
    Embedding,
    Experts,
    GatedMLP,
    Linear,
    Norm,
    OutputHead,
    Routing,
    SparseMLP,
)
from rackmount_registry.nn.storage import Storage
from rackmount_registry.step import ReferenceStep

HIDDEN, VOCAB = 6, 11


class Model(nn.Module):
    """A socket of each kind that stores tensors in its own way."""

    ignored: ClassVar[dict[str, str]] = {r"mlp\.\d+\.inv_freq": "computed"}

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        vocab = Axis("vocab", VOCAB)
        self.embed = Embedding(vocab, HIDDEN)
        self.mlp = GatedMLP(HIDDEN, Axis("ffn", 8), bias=True)
        experts, expert_ffn = Axis("experts", 4), Axis("expert_ffn", 2)
        self.moe = SparseMLP(Experts(HIDDEN, experts, expert_ffn, Routing(top_k=2)))
        self.norm = Norm(HIDDEN, 1e-6)
        self.head = OutputHead(HIDDEN, vocab, tied=self.embed if tied else None)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mlp(x)
        return self.norm(x + self.moe(x))

    def logits(self, rows: Tensor) -> Tensor:
        return self.head(rows)


IDS = torch.arange(VOCAB)


def whole_tensors(tied: bool = False) -> dict[str, Tensor]:
    return random_tensors(draft_module(lambda: Model(tied), dtype=torch.float32))


def mount(
    checkpoint: MemoryCheckpoint,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh | None = None,
) -> Reference:
    drafted = draft_module(lambda: Model(tied), dtype=dtype, mesh=mesh)
    return mount_draft(drafted, checkpoint)


def assembled(drafted: Draft) -> Mounted:
    """Waits for its weights."""
    return assemble(
        drafted,
        chosen_parts(drafted),
        ReferenceStep(),
        device=torch.device("cpu"),
        max_positions=1,
    )


def assert_refused_unread(tensors: dict[str, Tensor], rule: str) -> None:
    """Refused with a message that matches `rule`, before anything is read."""
    checkpoint = MemoryCheckpoint(tensors)
    with pytest.raises(CheckpointError, match=rule):
        mount(checkpoint)
    assert not checkpoint.reads


def test_missing_tensors_are_named() -> None:
    tensors = whole_tensors()
    del tensors["norm.weight"], tensors["moe.experts.2.up_proj.weight"]
    rule = r"^2 tensors .*\(memory.safetensors\): moe.experts.2.up_proj.weight, norm.weight$"
    assert_refused_unread(tensors, rule)


def test_a_long_list_is_cut_short() -> None:
    tensors = {name: t for name, t in whole_tensors().items() if not name.startswith("moe.")}
    assert_refused_unread(tensors, r"^13 tensors .*: moe\S+(, moe\S+){7} and 5 more$")


def test_extra_tensors_are_named_with_their_file() -> None:
    tensors = whole_tensors() | {"mlp.down_proj.scale": torch.ones(1)}
    rule = r"^1 tensors .* used by Model nor ignored .*: mlp.down_proj.scale in memory.safetensors$"
    assert_refused_unread(tensors, rule)


def test_extra_tensors_may_be_ignored_by_a_rule_of_the_architecture_and_only_in_full() -> None:
    mount(MemoryCheckpoint(whole_tensors() | {"mlp.3.inv_freq": torch.ones(4)}))
    assert_refused_unread(
        whole_tensors() | {"mlp.3.inv_freq.copy": torch.ones(4)}, r"inv_freq\.copy in"
    )


def test_a_tensor_of_another_shape_is_refused_with_both_shapes() -> None:
    tensors = whole_tensors()
    tensors["mlp.gate_proj.weight"] = tensors["mlp.gate_proj.weight"].T
    rule = r"^mlp.gate_proj.weight in memory.safetensors has shape \[6, 8\], .* needs \[8, 6\]$"
    assert_refused_unread(tensors, rule)


def test_a_whole_model_of_one_shape_does_not_pass_for_its_share() -> None:
    tensors = whole_tensors()
    tensors["mlp.up_proj.bias"] = tensors["mlp.up_proj.bias"][:4]
    checkpoint = MemoryCheckpoint(tensors)
    with pytest.raises(CheckpointError, match=r"mlp.up_proj.bias .* \[4\], .* needs \[8\]"):
        mount(checkpoint, mesh=Mesh.tensor_parallel(Solo(0, 2)))


def test_integers_do_not_pass_for_floats() -> None:
    tensors = whole_tensors()
    tensors["mlp.up_proj.weight"] = tensors["mlp.up_proj.weight"].to(torch.int8)
    rule = r"^mlp.up_proj.weight in memory.safetensors is int8, .* a floating point type$"
    assert_refused_unread(tensors, rule)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_without_a_scheme_do_not_pass_for_plain_ones(dtype: torch.dtype) -> None:
    tensors = whole_tensors()
    tensors["mlp.up_proj.weight"] = tensors["mlp.up_proj.weight"].to(dtype)
    rule = r"^mlp.up_proj.weight in memory.safetensors is float8_\w+: values without their scale"
    assert_refused_unread(tensors, rule)


def test_two_sockets_of_one_name_are_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Embedding(Axis("vocab", VOCAB), HIDDEN)
            self.mlp = GatedMLP(HIDDEN, Axis("ffn", 8))
            self.mlp.gate_proj = Linear(HIDDEN, Axis("ffn", 8))

        def forward(self, ids: Tensor) -> Tensor:
            return self.mlp.gate_proj(self.mlp(self.embed(ids)))

    drafted = draft_module(Twice)
    with pytest.raises(CheckpointError, match=r"Twice stores mlp.gate_proj.weight in two sockets"):
        mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)))


def test_every_tensor_is_read_once_and_every_storage_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocate = Storage.allocate

    def poisoned(storage: Storage, device: torch.device, dtype: torch.dtype) -> None:
        allocate(storage, device, dtype)
        storage.tensor.fill_(math.nan)

    monkeypatch.setattr(Storage, "allocate", poisoned)
    tensors = whole_tensors()
    for mesh in (None, Mesh.tensor_parallel(Solo(1, 2))):
        checkpoint = MemoryCheckpoint(tensors)
        reference = mount(checkpoint, mesh=mesh)
        assert dict(checkpoint.reads) == dict.fromkeys(tensors, 1)
        written = 0
        for storage in reference.mounted.draft.storages():
            assert not storage.tensor.isnan().any()
            sizes = [math.prod(at.stop - at.start for at in p.where) for p in storage.pieces]
            assert sum(sizes) == storage.tensor.numel()  # with no hole, so none overlap
            written += storage.tensor.nbytes
        assert reference.bytes_read == written


def test_other_ranks_experts_are_accounted_for_but_not_read() -> None:
    tensors = whole_tensors()
    checkpoint = MemoryCheckpoint(tensors)
    mount(checkpoint, mesh=Mesh(groups={"experts": Solo(1, 2)}))
    unread = tensors.keys() - checkpoint.reads.keys()
    assert unread == {
        f"moe.experts.{e}.{name}_proj.weight" for e in (0, 1) for name in ("gate", "up", "down")
    }


def test_a_one_element_tensor_may_be_stored_as_a_scalar() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm(1, 1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    reference = mount_draft(
        draft_module(Scaled, dtype=torch.float32),
        MemoryCheckpoint({"norm.weight": torch.tensor(3.0)}),
    )
    (storage,) = reference.mounted.draft.storages()
    assert storage.tensor.tolist() == [3.0]


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_that_nothing_fills_is_refused(kind: str) -> None:
    class Leftover(Model):
        def __init__(self) -> None:
            super().__init__()
            if kind == "buffer":
                self.register_buffer("scale", torch.ones(3))
            else:
                self.scale = nn.Parameter(torch.ones(3))

    drafted = draft_module(Leftover, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"tensors that nothing fills: scale$"):
        mount_draft(drafted, MemoryCheckpoint(whole_tensors()))


class CountingCheckpoint(MemoryCheckpoint):
    """Reads are copies; it knows how many bytes of them are alive at most."""

    alive = peak = 0

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        copy = super().read(name, index).clone()
        self.alive += copy.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(copy, self._free, copy.nbytes)
        return copy

    def _free(self, size: int) -> None:
        self.alive -= size


def test_tensors_are_streamed_one_at_a_time() -> None:
    tensors = whole_tensors()
    checkpoint = CountingCheckpoint(tensors)
    mount(checkpoint)
    assert checkpoint.peak == max(tensor.nbytes for tensor in tensors.values())
    assert checkpoint.alive == 0


def test_progress_is_told_in_bytes_up_to_the_end() -> None:
    drafted = draft_module(Model, dtype=torch.bfloat16)
    mounted = assembled(drafted)
    told: list[tuple[str, int, int | None]] = []
    fill(mounted, MemoryCheckpoint(whole_tensors()), lambda *step: told.append(step))
    assert {(stage, total) for stage, _, total in told} == {("load", drafted.weight_bytes)}
    done = [at for _, at, _ in told]
    assert done == sorted(done)
    assert done[-1] == drafted.weight_bytes


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_models_dtype(stored: torch.dtype, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in whole_tensors().items()}
    reference = mount(MemoryCheckpoint(tensors), dtype=dtype)
    for storage in reference.mounted.draft.storages():
        assert storage.tensor.dtype == dtype
        for piece in storage.pieces:
            held = storage.tensor[piece.where].reshape(piece.shape)
            assert torch.equal(held, tensors[piece.name].to(dtype))


class SizedCheckpoint(MemoryCheckpoint):
    """Knows of how many rows each read was."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.rows: defaultdict[str, list[int]] = defaultdict(list)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Tensor:
        part = super().read(name, index)
        self.rows[name].append(len(part))
        return part


def head_of(reference: Reference) -> Tensor:
    return reference.mounted.draft.model.head.gemm.weight.storages["weight"].tensor


@pytest.mark.parametrize("mesh", [None, Mesh.tensor_parallel(Solo(1, 2))], ids=["one", "of two"])
def test_a_tied_head_shares_the_memory_of_the_embedding(mesh: Mesh | None) -> None:
    tensors = whole_tensors(tied=True)
    assert "head.weight" not in tensors
    for stored in (tensors, tensors | {"head.weight": tensors["embed.weight"].clone()}):
        reference = mount(MemoryCheckpoint(stored), tied=True, mesh=mesh)
        embedding = reference.mounted.draft.model.embed.table.storages["weight"].tensor
        assert head_of(reference).data_ptr() == embedding.data_ptr()


class HeadFirst(Model):
    """Its head is a module before the embedding whose table that reads."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self._modules = dict(reversed(self._modules.items()))


@pytest.mark.parametrize("drawn", [False, True], ids=["loaded", "drawn"])
def test_a_tied_head_may_stand_before_the_embedding(drawn: bool) -> None:
    drafted = draft_module(HeadFirst, dtype=torch.float32)
    mounted = assembled(drafted)
    kinds = [type(socket) for socket in drafted.sockets]
    assert kinds.index(OutputHead) < kinds.index(Embedding)
    tensors = whole_tensors(tied=True)
    if drawn:
        fill_randomly(mounted, 0)
    else:
        fill(mounted, MemoryCheckpoint(tensors))
    model: Any = drafted.model
    table = model.embed.table.storages["weight"].tensor
    assert model.head.gemm.prepared.data_ptr() == table.data_ptr()
    assert drafted.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_tied_head_with_values_of_its_own_is_loaded() -> None:
    tensors = whole_tensors(tied=True)
    own = tensors["embed.weight"] + 1
    reference = mount(MemoryCheckpoint(tensors | {"head.weight": own}), tied=True)
    assert torch.equal(head_of(reference), own)
    assert reference.bytes_read == sum(t.nbytes for t in tensors.values()) + own.nbytes


@pytest.mark.parametrize("row", [None, 0, VOCAB - 1])
def test_a_tied_head_is_held_against_the_embedding_a_few_rows_at_a_time(
    row: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("rackmount_registry.mount.fill")
    monkeypatch.setattr(module, "COMPARED_AT_ONCE", 2 * HIDDEN + 1)
    tensors = whole_tensors(tied=True)
    head = tensors["embed.weight"].clone()
    if row is not None:
        head[row, -1] += 1
    checkpoint = SizedCheckpoint(tensors | {"head.weight": head})
    reference = mount(checkpoint, tied=True)
    assert torch.equal(head_of(reference), head)
    loaded = {"embed.weight": 1, "head.weight": int(row is not None)}
    for name, num_whole in loaded.items():
        assert checkpoint.rows[name].count(VOCAB) == num_whole
        assert max(n for n in checkpoint.rows[name] if n < VOCAB) == 2


def test_a_tied_head_of_another_shape_is_refused() -> None:
    tensors = whole_tensors(tied=True) | {"head.weight": torch.ones(VOCAB + 1, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"head.weight .* \[12, 6\], .* needs \[11, 6\]"):
        mount(MemoryCheckpoint(tensors), tied=True)


def random_mounted(
    *,
    seed: int = 0,
    tied: bool = False,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float32,
    scheme: QuantizationScheme | None = None,
) -> Mounted:
    mounted = assembled(draft_module(lambda: Model(tied), dtype=dtype, mesh=mesh, scheme=scheme))
    fill_randomly(mounted, seed)
    return mounted


def tensors_of(mounted: Mounted) -> dict[str, Tensor]:
    """Of each checkpoint tensor, the share that this rank holds."""
    return {
        piece.name: storage.tensor[piece.where].squeeze(0)
        for storage in mounted.draft.storages()
        for piece in storage.pieces
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_normal_and_norms_are_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.HIDDEN", 128)
    tensors = tensors_of(random_mounted(dtype=dtype))
    assert torch.equal(tensors.pop("norm.weight"), torch.ones(128, dtype=dtype))
    for name, tensor in tensors.items():
        values = tensor.double()
        spread = 0.02 / math.sqrt(values.numel())
        assert values.mean().abs() < 5 * spread, name
        assert (values.std() - 0.02).abs() < 4 * spread, name
    assert "mlp.down_proj.bias" in tensors


def test_random_weights_follow_from_the_seed_and_the_name() -> None:
    once, again, other = (tensors_of(random_mounted(seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert not any(torch.equal(once[name], other[name]) for name in once.keys() - {"norm.weight"})
    assert len({tensor.flatten()[0].item() for tensor in once.values()}) == len(once)


@pytest.mark.parametrize("by", ["tp", "experts"])
def test_ranks_draw_their_shares_of_one_random_model(by: str) -> None:
    whole = tensors_of(random_mounted())
    for rank in range(2):
        half = Solo(rank, 2)
        mesh = Mesh.tensor_parallel(half) if by == "tp" else Mesh(groups={"experts": half})
        mounted = random_mounted(mesh=mesh)
        cut = 0
        for storage in mounted.draft.storages():
            for piece in storage.pieces:
                held = storage.tensor[piece.where].reshape(whole[piece.name][piece.index].shape)
                assert torch.equal(held, whole[piece.name][piece.index]), piece.name
                cut += held.shape != piece.shape
        assert cut == (0 if by == "experts" else 19)


def test_a_random_tied_head_is_the_embedding() -> None:
    model = random_mounted(tied=True).draft.model
    head = model.head.gemm.weight.storages["weight"].tensor
    assert head.data_ptr() == model.embed.table.storages["weight"].tensor.data_ptr()


def test_a_model_with_random_weights_runs() -> None:
    mounted = random_mounted()
    mounted.draft.model.moe.experts.step.begin([len(IDS)])
    logits = mounted.logits(mounted.forward(IDS))
    assert logits.isfinite().all() and logits.std() > 0
