"""Every tensor of a checkpoint is loaded, ignored by a rule, or an error; every storage is written
once."""

import importlib
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.memory import MemoryCheckpoint, draft_module, random_tensors
from tests.helpers.mounting import Reference, chosen_parts, mount_draft
from torch import Tensor, nn

from rackmount_quant.w8 import INT8_ROWS
from rackmount_registry.axes import Axis, Mesh, Solo
from rackmount_registry.errors import CheckpointError, ConfigError
from rackmount_registry.formats import Dim, QuantizationScheme, Slot, StoredFormat, Weight
from rackmount_registry.mount import Mounted, assemble, fill, fill_randomly, random_weight
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
from rackmount_registry.nn.socket import Socket, Survey
from rackmount_registry.nn.storage import Piece, Source, Storage
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
    mounted = assemble(
        drafted,
        chosen_parts(drafted),
        ReferenceStep(),
        device=torch.device("cpu"),
        max_positions=1,
    )
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
    drafted = draft_module(lambda: Model(tied), dtype=dtype, mesh=mesh, scheme=scheme)
    mounted = assemble(
        drafted,
        chosen_parts(drafted),
        ReferenceStep(),
        device=torch.device("cpu"),
        max_positions=1,
    )
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


class Doubled:
    """Stores every linear weight as its double, beside a mark that a checkpoint may lack."""

    kv_cache = None

    def __init__(self, *, encodes: bool = True) -> None:
        self.seen: list[set[str]] = []
        slots = (
            Slot("double", (Dim("out"), Dim("in"))),
            Slot("mark", (Dim("part"), Dim("fixed", 2)), optional=True),
        )
        encode = (lambda weight: {"double": 2 * weight}) if encodes else None
        self.stored = StoredFormat("doubled", slots, "dense", self.finish, encode)

    def format_for(self, name: str, *rest: object) -> StoredFormat | None:
        return self.stored if name.startswith("mlp.") else None

    def finish(
        self, tensors: Mapping[str, Tensor], parts: tuple[int, ...], in_features: int
    ) -> Weight:
        self.seen.append(set(tensors))
        if tensors["double"].isnan().any():
            raise CheckpointError("double must be a number")
        return Weight("dense", {"weight": tensors["double"] / 2}, parts, in_features)


def test_a_format_that_encodes_is_drawn_as_the_dense_weight_would_be() -> None:
    def gate(scheme: QuantizationScheme | None) -> Tensor:
        model: Any = random_mounted(scheme=scheme).draft.model
        prepared: Tensor = model.mlp.gate_up.gemms[0].prepared
        return prepared

    assert torch.equal(gate(Doubled()), gate(None))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: None, Doubled], ids=["plain", "encoded"])
def test_a_weight_without_a_model_is_drawn_as_in_one(make: Any) -> None:
    filled: Any = random_mounted(scheme=make(), seed=3).draft.model
    drafted: Any = draft_module(Model, dtype=torch.float32, scheme=make()).model
    weight = drafted.mlp.gate_up.gemms[0].weight
    assert weight.finished_bytes == 0
    drawn = random_weight(weight, device=torch.device("cpu"), dtype=torch.float32, seed=3)
    assert torch.equal(drawn.dequantize(), filled.mlp.gate_up.gemms[0].prepared)
    assert weight.finished_bytes == drawn.tensors["weight"].nbytes > 0
    if make is Doubled:
        assert all(storage.tensor.is_meta for storage in weight.storages.values())


def doubled_tensors(scheme: Doubled) -> dict[str, Tensor]:
    drafted = draft_module(Model, dtype=torch.float32, scheme=scheme)  # type: ignore[arg-type]
    return random_tensors(drafted)


def mount_doubled(scheme: Doubled, tensors: dict[str, Tensor]) -> Any:
    drafted = draft_module(Model, dtype=torch.float32, scheme=scheme)  # type: ignore[arg-type]
    mount_draft(drafted, MemoryCheckpoint(tensors))
    return drafted.model


def test_an_optional_tensor_is_there_for_all_parts_or_for_none() -> None:
    scheme = Doubled()
    tensors = doubled_tensors(scheme)
    mount_doubled(scheme, tensors)
    assert scheme.seen == [{"double", "mark"}] * 2
    scheme.seen.clear()
    without = {name: t for name, t in tensors.items() if not name.endswith(".mark")}
    mount_doubled(scheme, without)
    assert scheme.seen == [{"double"}] * 2
    half = without | {"mlp.up_proj.mark": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"1 tensors .* are not in .*: mlp.gate_proj.mark$"):
        mount_doubled(scheme, half)


def test_dimensions_of_size_one_make_no_other_shape() -> None:
    scheme = Doubled()
    tensors = doubled_tensors(scheme)
    tensors["mlp.gate_proj.mark"] = tensors["mlp.gate_proj.mark"].reshape(2)
    tensors["mlp.up_proj.mark"] = tensors["mlp.up_proj.mark"].reshape(2, 1)
    storage = mount_doubled(scheme, tensors).mlp.gate_up.gemms[0].weight.storages["mark"]
    assert storage.shape == (2, 2)
    tensors["mlp.up_proj.mark"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"up_proj.mark .* has shape \[3\], .* \[1, 2\]"):
        mount_doubled(scheme, tensors)


def test_what_a_format_refuses_names_the_layer_and_the_file() -> None:
    scheme = Doubled()
    tensors = doubled_tensors(scheme)
    tensors["mlp.up_proj.double"][0, 0] = torch.nan
    named = r"^mlp.gate_proj, mlp.up_proj \(memory.safetensors\): double must be a number$"
    with pytest.raises(CheckpointError, match=named):
        mount_doubled(scheme, tensors)


def test_a_quantized_weight_gives_back_what_it_was_made_from() -> None:
    scheme = Doubled()
    model = mount_doubled(scheme, doubled_tensors(scheme))
    storages = [*model.mlp.gate_up.storages(), *model.mlp.down_proj.storages()]
    released = [s for s in storages if s.pieces[0].name.endswith((".double", ".mark"))]
    assert len(released) == 4
    assert all(storage.tensor.is_meta for storage in released)
    assert not model.head.gemm.weight.storages["weight"].tensor.is_meta


class Elsewhere(Socket):
    """A vector that some checkpoints store as a row of a table."""

    def survey(self, survey: Survey) -> None:
        row = Source("table", (3, 4), (slice(1, 2), slice(0, 4)))
        whole = (slice(0, 4),)
        self.storage = Storage((4,), None, [Piece("vector", (4,), whole, whole, (row,))])

    def storages(self) -> Iterator[Storage]:
        yield self.storage

    def forward(self, x: Tensor) -> Tensor:
        return x * self.storage.tensor


def test_a_piece_is_read_from_the_spelling_that_is_there() -> None:
    table = torch.arange(12.0).view(3, 4)
    for tensors in ({"vector": table[1]}, {"table": table}):
        drafted = draft_module(lambda: nn.Sequential(Elsewhere()), dtype=torch.float32)
        mount_draft(drafted, MemoryCheckpoint(tensors))
        (storage,) = drafted.storages()
        assert storage.tensor.tolist() == [4, 5, 6, 7]
    drafted = draft_module(lambda: nn.Sequential(Elsewhere()), dtype=torch.float32)
    twice = {"vector": table[1], "table": table}
    with pytest.raises(CheckpointError, match=r"stores vector as vector in .* and as table in"):
        mount_draft(drafted, MemoryCheckpoint(twice))


def test_quantized_weights_are_not_drawn() -> None:
    class EightBits:
        def format_for(self, name: str, *rest: object) -> object:
            return replace(INT8_ROWS, encode=None) if name.startswith("mlp.") else None

    with pytest.raises(ConfigError, match=r"these are quantized: mlp.gate_proj.weight, mlp.down"):
        random_mounted(scheme=EightBits())  # type: ignore[arg-type]
