"""Every benchmark, on a model that takes no time."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rackmount import Engine
from rackmount_backends.torch_linear import DenseLinear
from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import LinearKernel
from rackmount_registry.errors import ConfigError, RackmountError
from rackmount_registry.formats import Weight
from rackmount_registry.plugins import PluginManager
from rackmount_tools.bench_kernels import against
from rackmount_tools.bench_kernels import measure as measure_kernels
from rackmount_tools.bench_startup import PHASES, measure
from rackmount_tools.ceilings import Ceilings
from rackmount_tools.plugin import cli_commands

RecordOf = Callable[..., dict[str, Any]]


def test_throughput_is_output_over_time(record_of: RecordOf) -> None:
    record = record_of("throughput --num-prompts 5 --input-len 6 --output-len 4")
    assert (record["prompt_tokens"], record["output_tokens"]) == (30, 20)
    assert record["output_tokens_per_s"] == 20 / record["seconds"]
    assert record["total_tokens_per_s"] == 50 / record["seconds"]
    assert record["share"] == record["floor_seconds"] / record["seconds"]


def test_interference_is_measured_with_and_without_long_prompts(record_of: RecordOf) -> None:
    record = record_of(
        "interference --num-requests 2 --input-len 4 --output-len 6 --long-len 40 "
        "--max-num-batched-tokens 16 --block-size 4"
    )
    alone, beside = record["loads"]
    assert (alone["load"], beside["load"]) == ("alone", "with long prompts")
    for row in record["loads"]:
        assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"]
        assert row["share"] == pytest.approx(row["floor_ms"] / row["itl_p50_ms"])
        assert row["tokens_per_s"] > row["output_tokens_per_s"] > 0
    assert record["preemptions"] == 0


def test_every_matrix_of_the_model_is_timed_with_every_kernel(record_of: RecordOf) -> None:
    record = record_of("kernels --tokens 1,3")
    timed = {(row["shape"], row["role"]): row["count"] for row in record["kernels"]}
    assert timed == {
        ("32 x 16", "linear"): 2,  # q, k and v
        ("16 x 16", "linear"): 2,
        ("48 x 16", "linear"): 1,  # gate and up of the dense layer
        ("16 x 24", "linear"): 1,
        ("4 x 16", "router"): 1,
        ("97 x 16", "head"): 1,
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


def able(*epilogues: str) -> PluginManager:
    @hookimpl
    def linear_kernels() -> list[LinearKernel]:
        cells = (Cell(devices=("cpu",), dtypes=("float32",), weight_formats=("dense",)),)
        return [
            LinearKernel(
                name="able",
                factory=f"{__name__}:Able",
                band="vendor",
                cells=cells,
                epilogues=epilogues,
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
    found = {(row["kernel"], row["shape"], row["tokens"]): row["epilogue"] for row in rows}
    fused = {("48 x 16", 1): "silu_mul", ("48 x 16", 3): "silu_mul"}
    fused |= {("16 x 16", 1): "add", ("16 x 24", 1): "add"}  # of 3 tokens the norm takes the sum
    assert len(found) == 2 * 6 * 2
    for (kernel, *product), epilogue in found.items():
        assert epilogue == (fused.get(tuple(product)) if kernel == "able" else None)
    assert {"silu_mul", "add", "prepare for silu_mul", "prepare for run, add"} <= set(Able.calls)


def test_an_epilogue_that_the_kernel_lacks_is_not_asked_for(record_of: RecordOf) -> None:
    record = record_of("kernels --tokens 1 --linear-kernel torch --kernel able", able("add"))
    found = {row["shape"]: row["epilogue"] for row in record["kernels"]}
    assert {shape for shape, epilogue in found.items() if epilogue} == {"16 x 16", "16 x 24"}


def test_a_kernel_that_fits_nothing_is_refused_with_those_that_do(tiny: Path) -> None:
    ceilings = Ceilings(read=1.0, copy=1.0, matmul=1.0)
    with (
        Engine(tiny, load_format="dummy", device="cpu", max_model_len=16) as engine,
        pytest.raises(ConfigError, match=r"kernel='dequantize' fits no product .* among torch$"),
    ):
        measure_kernels(engine, ceilings, [1], ["dequantize"])


def test_a_kernel_that_adds_reads_as_much_again_as_it_writes() -> None:
    weight = Weight("dense", {"weight": torch.zeros(6, 4)}, (6,), 4)
    ceilings = Ceilings(read=1.0, copy=1.0, matmul=1e9)  # a second for each byte
    x, read = torch.zeros(5, 4), 4 * (6 * 4 + 5 * 4)
    for epilogue, size in ((None, 5 * 6), ("add", 2 * 5 * 6), ("silu_mul", 5 * 3)):
        floor = against(1.0, weight, x, epilogue, ceilings)["floor_us"] / 1e6
        assert floor == pytest.approx(read + 4 * size)


def test_a_start_is_told_phase_by_phase(tiny: Path) -> None:
    # As JSON leaves it: tuples are lists.
    arguments = {"load_format": "dummy", "device": "cpu", "max_model_len": None, "auto_plugins": []}
    phases = measure(str(tiny), json.loads(json.dumps(arguments)), 5)
    assert set(phases) == {*PHASES, "total"}
    assert min(phases.values()) > 0
    assert phases["total"] == pytest.approx(sum(phases[name] for name in PHASES))


def test_a_start_that_fails_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RackmountError, match="the process that was timed ended with 1"):
        measure(str(tmp_path), {"load_format": "dummy", "max_model_len": None}, 5)
    assert "CheckpointError" in capfd.readouterr().err


def test_commands_are_offered_by_name_without_being_imported() -> None:
    names = {command.name for command in cli_commands()}
    assert names == {
        "latency",
        "throughput",
        "interference",
        "startup",
        "kernels",
        "scheduler",
        "serve",
    }
    for command in cli_commands():
        assert command.group == "bench"
        assert command.factory == f"rackmount_tools.bench_{command.name}:bench"
