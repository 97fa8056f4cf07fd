"""Kernels at the shapes of a model that takes no time."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.helpers.batched import batched_plugin
from torch import Tensor

from rackmount_backends.torch_linear import DenseLinear
from rackmount_moe.torch_experts import TorchExperts
from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import ExpertKernel, LinearKernel
from rackmount_registry.experts import ExpertBundle, ExpertInput
from rackmount_registry.formats import Rounded, Weight
from rackmount_registry.plugins import PluginManager
from rackmount_tools import bench_kernels
from rackmount_tools.ceilings import Ceilings
from rackmount_tools.linear_timing import against

RecordOf = Callable[..., dict[str, Any]]
RefusalOf = Callable[..., str]


def test_every_matrix_of_the_model_is_timed_with_every_kernel(record_of: RecordOf) -> None:
    record = record_of("kernels --tokens 1,3")
    timed = {(row["shape"], row["role"]): row["count"] for row in record["kernels"]}
    assert timed == {
        ("32 x 16", "linear"): 2,  # q, k and v
        ("16 x 16", "linear"): 2,
        ("48 x 16", "linear"): 1,  # gate and up of the dense layer
        ("16 x 24", "linear"): 1,
        ("97 x 16", "head"): 1,
        ("4 x (16 x 16 + 16 x 8)", "experts"): 1,
    }
    assert len(record["kernels"]) >= 2 * len(timed)
    for row in record["kernels"]:
        assert row["share"] == pytest.approx(row["floor_us"] / row["us"])


class Able(DenseLinear):
    """A kernel with every epilogue that adds for two rows at most."""

    calls: ClassVar[Counter[str]] = Counter()

    def prepare(self, weight: Any, uses: Any = ()) -> Tensor:
        self.calls[f"prepare for {', '.join(uses)}"] += 1
        return super().prepare(weight, uses)

    def run_silu_mul(self, x: Tensor, prepared: Tensor, bias: Tensor | None) -> Tensor:
        self.calls["silu_mul"] += 1
        gate, up = self.run(x, prepared, bias).chunk(2, -1)
        return gate.sigmoid() * gate * up

    def adds(self, prepared: Tensor, num_rows: int) -> bool:
        return num_rows <= 2

    def run_add(self, x: Tensor, prepared: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        self.calls["add"] += 1
        return self.run(x, prepared, bias) + residual


def able(*epilogues: str, factory: str = "Able", prologues: tuple[str, ...] = ()) -> PluginManager:
    @hookimpl
    def linear_kernels() -> list[LinearKernel]:
        cells = (Cell(devices=("cpu",), dtypes=("float32",), weight_formats=("dense",)),)
        return [
            LinearKernel(
                name="able",
                factory=f"{__name__}:{factory}",
                band="vendor",
                cells=cells,
                epilogues=epilogues,
                prologues=prologues,
            )
        ]

    return PluginManager.from_modules({"acme": SimpleNamespace(linear_kernels=linear_kernels)})


@pytest.mark.parametrize("mounted", ["torch", "able"])
def test_a_product_is_timed_with_the_epilogue_that_the_mount_fuses(
    record_of: RecordOf, monkeypatch: pytest.MonkeyPatch, mounted: str
) -> None:
    monkeypatch.setattr(Able, "calls", Counter())
    asked = f"kernels --tokens 1,3 --linear-kernel {mounted} --kernel able --kernel torch"
    rows = record_of(asked, able("silu_mul", "add"))["kernels"]
    rows = [row for row in rows if row["role"] != "experts"]
    found = {(row["kernel"], row["shape"], row["tokens"]): row["epilogue"] for row in rows}
    fused = {("48 x 16", 1): "silu_mul", ("48 x 16", 3): "silu_mul"}
    fused |= {("16 x 16", 1): "add", ("16 x 24", 1): "add"}  # of 3 tokens the norm takes the sum
    assert len(found) == 2 * 5 * 2
    for (kernel, *product), epilogue in found.items():
        assert epilogue == (fused.get(tuple(product)) if kernel == "able" else None)
    prepared = {"prepare for run, silu_mul", "prepare for run, add"}
    assert {"silu_mul", "add"} | prepared <= set(Able.calls)


def test_an_epilogue_that_the_kernel_lacks_is_not_asked_for(record_of: RecordOf) -> None:
    record = record_of("kernels --tokens 1 --linear-kernel torch --kernel able", able("add"))
    found = {row["shape"]: row["epilogue"] for row in record["kernels"]}
    assert {shape for shape, epilogue in found.items() if epilogue} == {"16 x 16", "16 x 24"}


class Rounding(Able):
    """Takes its input rounded, for two rows or more."""

    def run(self, x: Tensor | Rounded, prepared: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(x, Rounded):
            self.calls["rounded"] += 1
            x = x.values * x.scales
        return super().run(x, prepared, bias)

    def rounds(self, prepared: Tensor, num_rows: int) -> bool:
        return num_rows > 1

    def round_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, prepared: Tensor
    ) -> tuple[Rounded, Tensor]:
        return Rounded(x.to(torch.float16), x.new_ones(len(x), 1)), x

    def round_silu_mul(self, gate: Tensor, up: Tensor, prepared: Tensor) -> Rounded:
        return Rounded(gate.to(torch.float16), gate.new_ones(len(gate), 1))


def test_an_input_is_rounded_where_the_mount_would_make_it_so(
    record_of: RecordOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Able, "calls", Counter())
    mounted = able("silu_mul", factory="Rounding", prologues=("norm", "silu_mul"))
    asked = "kernels --tokens 1,3 --linear-kernel torch --kernel able"
    rows = record_of(asked, mounted)["kernels"]
    found = {(row["shape"], row["tokens"]): (row["input"], row["epilogue"]) for row in rows}
    assert found == {
        ("32 x 16", 1): (None, None),
        ("32 x 16", 3): ("rounded", None),  # q, k and v, behind a norm
        ("16 x 16", 1): (None, None),
        ("16 x 16", 3): (None, None),  # behind attention
        ("48 x 16", 1): (None, "silu_mul"),
        ("48 x 16", 3): ("rounded", None),  # the activation rounds for the product behind it
        ("16 x 24", 1): (None, None),
        ("16 x 24", 3): ("rounded", None),
        ("97 x 16", 1): (None, None),
        ("97 x 16", 3): (None, None),  # of the sampled tokens alone
    }
    assert Able.calls["rounded"]


class RoundingWide(Rounding):
    """Rounds for weights of more than 16 rows."""

    def rounds(self, prepared: Tensor, num_rows: int) -> bool:
        return num_rows > 1 and len(prepared) > 16


def test_an_activation_is_fused_where_the_product_behind_it_rounds_nothing(
    record_of: RecordOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Able, "calls", Counter())
    mounted = able("silu_mul", factory="RoundingWide", prologues=("norm", "silu_mul"))
    rows = record_of("kernels --tokens 3 --linear-kernel torch --kernel able", mounted)["kernels"]
    found = {row["shape"]: (row["input"], row["epilogue"]) for row in rows}
    assert found["48 x 16"] == ("rounded", "silu_mul") and found["16 x 24"] == (None, None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("dequantize", "weight_format"), ("triton", "device")],
)
def test_a_kernel_that_fits_nothing_is_refused_with_why_and_with_those_that_do(
    refusal_of: RefusalOf, name: str, reason: str
) -> None:
    text = refusal_of(f"bench kernels {{model}} --device cpu --kernel {name}")
    why, _, fitting = text.partition("; choose among ")
    assert f"kernel={name!r} fits no product of this model here: {name} (rackmount-" in why
    assert reason in why and "torch" in fitting


def test_a_gpu_that_is_not_there_is_refused(
    refusal_of: RefusalOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = refusal_of("bench kernels {model} --device cuda")
    assert "device=cuda: no GPU is there; choose device='cpu'" in text


def test_an_unknown_kernel_is_refused_with_all_there_are(refusal_of: RefusalOf) -> None:
    text = refusal_of("bench kernels {model} --device cpu --kernel tritn")
    assert "kernel='tritn' (did you mean 'triton'?) must be one of " in text
    assert "dequantize" in text and "torch" in text


def test_a_kernel_that_adds_reads_as_much_again_as_it_writes() -> None:
    weight = Weight("dense", {"weight": torch.zeros(6, 4)}, (6,), 4)
    ceilings = Ceilings(read=1.0, copy=1.0, matmul=1e9)  # a second for each byte
    x, read = torch.zeros(5, 4), 4 * 6 * 4
    for epilogue, size in ((None, 5 * 6), ("add", 2 * 5 * 6), ("silu_mul", 5 * 3)):
        floor = against(1.0, weight, x, x, epilogue, ceilings)["floor_us"] / 1e6
        assert floor == pytest.approx(read + x.nbytes + 4 * size)
        rounded = against(1.0, weight, x.to(torch.int8), x, epilogue, ceilings)
        assert rounded["floor_us"] / 1e6 == pytest.approx(read + x.numel() + 4 * size)


def test_experts_are_timed_with_those_that_tokens_chose(record_of: RecordOf) -> None:
    rows = record_of("kernels --tokens 1,3,64")["kernels"]
    touched = {row["tokens"]: row["distinct_experts"] for row in rows if row["role"] == "experts"}
    assert touched[1] == 2  # of 4, as many as each token chooses
    assert 2 <= touched[3] <= 4 == touched[64]


def test_tuning_without_a_gpu_is_refused(record_of: RecordOf, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    with pytest.raises(AssertionError, match=r"--tune measures kernels on a GPU, and device='cpu'"):
        record_of(f"kernels --tune {file}")
    assert not file.exists()


@dataclass(frozen=True, kw_only=True)
class TunedOptions:
    tuned: str | None = None


class Tunable(TorchExperts):
    """Writes down what it was to measure."""

    def __init__(self, *, options: TunedOptions) -> None:
        self.options = options

    def tune(
        self,
        bundles: Sequence[ExpertBundle],
        inputs: Mapping[int, Sequence[ExpertInput]],
        file: Path,
        *,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        assert len(bundles) == 1 and seconds == 7
        assert all(len(each.x) == num for num, several in inputs.items() for each in several)
        say("measured")
        file.write_text(json.dumps({num: len(several) for num, several in inputs.items()}))


def tunable(*names: str) -> PluginManager:
    @hookimpl
    def expert_kernels() -> list[ExpertKernel]:
        cells = (Cell(devices=("cpu",), dtypes=("float32",), layouts=("contiguous",)),)
        return [
            ExpertKernel(
                name=name,
                factory=f"{__name__}:Tunable",
                options=f"{__name__}:TunedOptions",
                band="vendor",
                cells=cells,
            )
            for name in names
        ]

    return PluginManager.from_modules({"acme": SimpleNamespace(expert_kernels=expert_kernels)})


def test_kernels_of_other_layouts_are_left_out(record_of: RecordOf) -> None:
    @hookimpl
    def expert_kernels() -> list[ExpertKernel]:
        cells = (Cell(devices=("cpu",), dtypes=("float32",), layouts=("batched",)),)
        return [ExpertKernel(name="x", factory=f"{__name__}:None", band="vendor", cells=cells)]

    acme = PluginManager.from_modules({"acme": SimpleNamespace(expert_kernels=expert_kernels)})
    asked = "kernels --tokens 1 --auto-plugin acme --auto-plugin acme-boxes"
    rows = record_of(asked, acme + batched_plugin())["kernels"]
    assert {row["kernel"] for row in rows if row["role"] == "experts"} == {"torch"}


def test_what_a_kernel_wrote_down_is_what_is_timed_after_it(
    record_of: RecordOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []

    def prepare(self: Tunable, bundle: ExpertBundle) -> ExpertBundle:
        told.append(self.options.tuned)
        return bundle

    monkeypatch.setattr(Tunable, "prepare", prepare)
    monkeypatch.setattr(bench_kernels, "require_gpu", lambda rack: None)
    file = tmp_path / "own.json"
    asked = f"kernels --tokens 1,4 --tune {file} --tune-seconds 7 --auto-plugin acme"
    record = record_of(asked, tunable("acme"))
    assert {(row["kernel"], row["role"]) for row in record["kernels"]} == {("acme", "experts")}
    assert [row["tokens"] for row in record["kernels"]] == [1, 4]
    assert json.loads(file.read_text()) == {"1": 4, "4": 4}
    assert told == [str(file)]


@pytest.mark.parametrize(
    ("names", "asked", "refusal"),
    [
        (("one", "two"), "", "--kernel names none; here, .* can be tuned: one, two"),
        (("one",), "--kernel torch", "--kernel names torch; here, .* can be tuned: one"),
    ],
)
def test_one_kernel_is_tuned_at_a_time(
    record_of: RecordOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    asked: str,
    refusal: str,
) -> None:
    monkeypatch.setattr(bench_kernels, "require_gpu", lambda rack: None)
    with pytest.raises(AssertionError, match=f"--tune is for one expert kernel.*{refusal}"):
        record_of(f"kernels --tune {tmp_path}/x --auto-plugin acme {asked}", tunable(*names))
