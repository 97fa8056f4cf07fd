"""Weights whose formats are not plain: optional tensors, other spellings, what is refused, and how
they are drawn at random."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.helpers.memory import MemoryCheckpoint, draft_module, random_tensors
from tests.helpers.mounting import mount_draft
from tests.registry.test_fill import Model, assembled, random_mounted
from torch import Tensor, nn

from rackmount_quant.eight_bits import FP8_ONLINE
from rackmount_quant.w8 import INT8_ROWS
from rackmount_registry.errors import CheckpointError, ConfigError
from rackmount_registry.formats import (
    DENSE,
    Dim,
    QuantizationScheme,
    Slot,
    StoredFormat,
    Weight,
)
from rackmount_registry.mount import fill, fill_randomly, random_weight
from rackmount_registry.nn import Linear, Norm
from rackmount_registry.nn.socket import Socket, Survey
from rackmount_registry.nn.storage import Piece, Source, Storage


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


class Tower(nn.Module):
    """Layers of one size, and a norm that is never quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(32, 32, bias=True) for _ in range(6))
        self.norm = Norm(32, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Online:
    """Rounds every linear weight to FP8 while it is loaded."""

    kv_cache = None

    def format_for(self, *rest: object) -> StoredFormat:
        return FP8_ONLINE


@pytest.mark.parametrize("drawn", [False, True], ids=["loaded", "drawn"])
def test_what_a_format_rounds_is_held_as_stored_for_one_socket_alone(
    drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = draft_module(Tower, dtype=torch.bfloat16, scheme=Online())  # type: ignore[arg-type]
    before, mounted = drafted.weight_bytes, assembled(drafted)
    weights = [weight for socket in drafted.sockets for weight in socket.weights()]
    held: list[int] = []
    allocate = Storage.allocate

    def counting(storage: Storage, *rest: Any) -> None:
        allocate(storage, *rest)
        storages = sum(each.tensor.nbytes for each in drafted.storages() if not each.tensor.is_meta)
        held.append(storages + sum(weight.finished_bytes for weight in weights))

    monkeypatch.setattr(Storage, "allocate", counting)
    if drawn:
        fill_randomly(mounted, 0)
    else:
        fill(mounted, MemoryCheckpoint(random_tensors(drafted)))
    vectors = 6 * 64 + 64
    assert drafted.weight_bytes == before == 6 * (32 * 32 + 32 * 4) + vectors
    assert max(held) <= before + 2 * 32 * 32


def test_a_bundle_of_rounded_weights_counts_as_held() -> None:
    drafted = draft_module(Model, dtype=torch.bfloat16, scheme=Online())  # type: ignore[arg-type]
    before = drafted.weight_bytes
    fill_randomly(assembled(drafted), 0)
    assert drafted.weight_bytes == before


def test_a_tensor_that_encode_leaves_out_must_be_optional() -> None:
    scheme: Any = Doubled()
    random_mounted(scheme=scheme)
    double, mark = scheme.stored.slots
    scheme.stored = replace(scheme.stored, slots=(double, replace(mark, optional=False)))
    with pytest.raises(AssertionError, match="doubled: encode gives no mark"):
        random_mounted(scheme=scheme)


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_scale_of_eight_bits_that_has_digits_is_refused(dtype: torch.dtype) -> None:
    """It is half of one: another scale belongs to it."""

    class Scaled:
        def format_for(self, name: str, *rest: object) -> StoredFormat | None:
            slots = (*DENSE.slots, Slot("weight_scale", (Dim("out"),), "float32"))
            return StoredFormat("scaled", slots, "dense", DENSE.finish)

    drafted = draft_module(Model, dtype=torch.float32, scheme=Scaled())  # type: ignore[arg-type]
    tensors = random_tensors(drafted)
    name = "mlp.down_proj.weight_scale"
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(CheckpointError, match=rf"{name} in .* is float8_\w+, .* needs float32"):
        mount_draft(drafted, MemoryCheckpoint(tensors))


def test_a_plain_weight_is_not_rounded_into_a_place_for_eight_bits() -> None:
    class Eight:
        def format_for(self, name: str, *rest: object) -> StoredFormat | None:
            slots = (Slot("weight", (Dim("out"), Dim("in")), "float8_e4m3fn"),)
            stored = StoredFormat("eight", slots, "dense", DENSE.finish)
            return stored if name == "mlp.down_proj" else None

    drafted = draft_module(Model, dtype=torch.float32, scheme=Eight())  # type: ignore[arg-type]
    refused = r"mlp.down_proj.weight in .* is float32, the model needs float8_e4m3fn"
    with pytest.raises(CheckpointError, match=refused):
        mount_draft(drafted, MemoryCheckpoint(random_tensors(drafted)))
