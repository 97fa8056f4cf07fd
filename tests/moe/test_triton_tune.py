"""The search for plans, on a clock that is made up."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tests.helpers.experts import expert_bundle, expert_tokens
from triton.errors import TritonError

from rackmount_moe.triton_experts import tune as tune_module
from rackmount_moe.triton_experts.candidates import block_sizes, neighbours, tilings
from rackmount_moe.triton_experts.experts import TritonExperts
from rackmount_moe.triton_experts.launches import Prepared
from rackmount_moe.triton_experts.packing import Packed
from rackmount_moe.triton_experts.table import BLOCK_SIZES, MAX_FEW, Plan, Table, Tiling
from rackmount_moe.triton_experts.timing import Which, tiling_of
from rackmount_moe.triton_experts.tune import Gpu, Key, Search, key_of, known_table
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import ExpertInput, TunableExperts

GPU = Gpu(shared_memory=227 << 10, tma=True)
BEST = Plan(Tiling(64, 128, 3, 4, programs=2), Tiling(128, 128, 3, 4, tma=True), block_m=16)


@dataclass
class MadeUp:
    """Layers that are the faster, the more of a plan is as in `best`; plans in `broken` fail."""

    layers: list[Prepared]
    inputs: dict[int, list[ExpertInput]]
    best: Plan = BEST
    broken: set[Tiling] = field(default_factory=set)
    error: Exception = field(default_factory=lambda: TritonError("out of resource"))
    breaks_context: bool = False
    lost: bool = False

    def product_us(self, num_tokens: int, which: Which, plan: Plan) -> float:
        mine, best = tiling_of(plan, which), tiling_of(self.best, which)
        if mine in self.broken:
            self.lost = self.breaks_context
            raise self.error
        names = ("block_n", "block_k", "stages", "warps", "tma")
        differ = sum(getattr(mine, name) != getattr(best, name) for name in names)
        return 10.0 + differ + 5 * (plan.block_m != self.best.block_m)

    def layer_us(self, num_tokens: int, plan: Plan) -> float:
        both = self.product_us(num_tokens, "gate_up", plan) + self.product_us(
            num_tokens, "down", plan
        )
        return both + (plan.gate_up.programs != 2) + (plan.down.programs != 0)

    def num_bytes(self, num_tokens: int, *packed: Packed) -> float:
        return 1e6

    def check_context(self) -> None:
        if self.lost:
            raise self.error


def layers_and_inputs(*tokens: int) -> tuple[list[Prepared], dict[int, list[ExpertInput]]]:
    layer = TritonExperts().prepare(expert_bundle("dense", 16, 1024, 512, torch.float16))
    return [layer], {each: [expert_tokens(each, 16, 1024, 4, torch.float16)] for each in tokens}


def built(wanted: Iterable[tuple[Which, Plan]]) -> set[Key]:
    """Nothing fails."""
    assert list(wanted)
    return set()


def test_the_search_ends_at_what_is_fastest() -> None:
    timed, told = MadeUp(*layers_and_inputs(16)), list[str]()
    found = Search(timed, built, GPU, told.append).run(seconds=60)
    (plan,) = found.values()
    assert found.keys() == {16}
    assert plan == BEST
    shown = "10.0 us 0.10 TB/s [128 128 s3 w4 tma]"
    assert any("down, blocks of 16" in line and shown in line for line in told)


@pytest.mark.parametrize("how", ["built", "run"])
def test_what_cannot_be_built_or_run_is_never_chosen(how: str) -> None:
    timed = MadeUp(*layers_and_inputs(16, 64))
    first = Search(timed, built, GPU, lambda _: None).run(seconds=60)
    unfit = {tiling for plan in first.values() for tiling in (plan.gate_up, plan.down)}
    unfit |= {Tiling(t.block_n, t.block_k, t.stages, t.warps, tma=t.tma) for t in unfit}

    def build(wanted: Iterable[tuple[Which, Plan]]) -> set[Key]:
        keys = {key_of(*pair) for pair in wanted}
        return {key for key in keys if how == "built" and key[-1] in unfit}

    timed.broken = unfit if how == "run" else set()
    found = Search(timed, build, GPU, lambda _: None).run(seconds=60)
    assert found.keys() == {16, 64}
    assert not unfit & {tiling for plan in found.values() for tiling in (plan.gate_up, plan.down)}


def test_numbers_of_tokens_of_which_nothing_runs_are_left_out() -> None:
    timed, told = MadeUp(*layers_and_inputs(16)), list[str]()

    def build(wanted: Iterable[tuple[Which, Plan]]) -> set[Key]:
        return {key_of(*pair) for pair in wanted}

    assert Search(timed, build, GPU, told.append).run(seconds=60) == {}
    assert "16 tokens: nothing runs" in told


ERRORS = [
    RuntimeError("CUDA error: misaligned address"),
    RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_an_error_that_breaks_the_gpu_s_context_ends_the_search(error: Exception) -> None:
    timed, told = MadeUp(*layers_and_inputs(16), error=error, breaks_context=True), list[str]()
    timed.broken = {BEST.down}
    with pytest.raises(RuntimeError, match=str(error).rpartition(": ")[2]):
        Search(timed, built, GPU, told.append).run(seconds=60)
    assert not any("cannot run" in line for line in told)


@pytest.mark.parametrize(
    "error", [*ERRORS, torch.cuda.OutOfMemoryError("CUDA out of memory")], ids=str
)
def test_one_that_it_survives_does_not_whatever_it_says(error: Exception) -> None:
    timed, told = MadeUp(*layers_and_inputs(16), error=error), list[str]()
    timed.broken = {BEST.down}
    assert Search(timed, built, GPU, told.append).run(seconds=60).keys() == {16}
    assert any("cannot run" in line and str(error) in line for line in told)


def test_compiling_takes_no_time_from_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, told, now = MadeUp(*layers_and_inputs(16)), list[str](), [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(tune_module, "time", clock)

    def build(wanted: Iterable[tuple[Which, Plan]]) -> set[Key]:
        now[0] += 1000
        return built(wanted)

    Search(timed, build, GPU, told.append).run(seconds=60)
    tried = [line.partition("(")[2].split() for line in told if "tried" in line]
    assert tried and all(some == every and int(every) > 1 for some, _, every, *_ in tried)


def test_however_little_time_there_is_something_is_found() -> None:
    timed = MadeUp(*layers_and_inputs(1, 16, 64, 512))
    assert Search(timed, built, GPU, lambda _: None).run(seconds=0).keys() == {1, 16, 64, 512}


@pytest.mark.parametrize("name", ["dense", "fp8_blocks", "int4_groups", "int8_groups"])
def test_every_candidate_is_a_legal_plan_that_fits_the_shared_memory(name: str) -> None:
    layer = TritonExperts().prepare(expert_bundle(name, 4, 512, 256, torch.float16))
    for block_m in BLOCK_SIZES:
        for packed, choices in ((layer.gate_up, 1), (layer.down, 2)):
            found = list(tilings(packed, block_m, choices, GPU.shared_memory, tma=GPU.tma))
            assert found and len(set(found)) == len(found)
            for tiling in found:
                plan = Plan(tiling, tiling, block_m)
                assert len(list(neighbours(plan))) > 2
                itemsize = {"dense": 2, "int4": 0.5}.get(packed.code, 1)
                weight = tiling.block_n * tiling.block_k * itemsize
                inputs = block_m * tiling.block_k * 2
                held = tiling.stages - (packed.code != "dense")
                assert not block_m or held * weight + tiling.stages * inputs <= 227 << 10
            plain = list(tilings(packed, block_m, choices, GPU.shared_memory, tma=False))
            assert not any(tiling.tma for tiling in plain)


def test_blocks_hold_about_what_an_expert_gets() -> None:
    assert block_sizes(1, 128, 8) == [0]
    for power in range(2, 16):
        sizes = block_sizes(1 << power, 128, 8)
        assert any(sizes) and (0 in sizes) == (1 << power <= MAX_FEW)
    assert block_sizes(8192, 128, 8) == [64, 128] and block_sizes(1 << 15, 128, 8) == [128]


class TestFile:
    """What `tune` adds to."""

    ABOUT: ClassVar = {"gpu": "NVIDIA Some", "torch": "1"}

    def test_it_may_be_new_and_is_written_before_the_search(self, tmp_path: Path) -> None:
        file = tmp_path / "new.json"
        assert known_table(file, self.ABOUT) == Table(about=self.ABOUT, shapes={})
        assert Table.read(file) == Table(about=self.ABOUT, shapes={})

    def test_what_it_holds_is_kept(self, tmp_path: Path) -> None:
        file, held = tmp_path / "known.json", {"dense 1x2x3": {1: BEST}}
        file.write_text(Table(about=self.ABOUT | {"note": "x"}, shapes=held).text())
        known = known_table(file, self.ABOUT)
        assert known == Table(about=self.ABOUT | {"note": "x"}, shapes=held)
        assert Table.read(file) == known

    @pytest.mark.parametrize("changed", [{"torch": "2"}, {"triton": "3"}])
    def test_of_other_versions_it_is_refused_by_name_and_left_alone(
        self, tmp_path: Path, changed: dict[str, str]
    ) -> None:
        file, (name, here) = tmp_path / "known.json", *changed.items()
        file.write_text(text := Table(about=self.ABOUT, shapes={"dense 1x2x3": {1: BEST}}).text())
        there = self.ABOUT.get(name)
        refusal = rf"known\.json was measured with {name}={there}, and here it is {here}; choose"
        with pytest.raises(ConfigError, match=refusal):
            known_table(file, self.ABOUT | changed)
        assert file.read_text() == text

    def test_of_another_gpu_or_of_something_else_it_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "known.json"
        file.write_text(Table(about={"gpu": "Other"}, shapes={}).text())
        with pytest.raises(ConfigError, match=r"known\.json was measured with gpu=Other"):
            known_table(file, self.ABOUT)
        file.write_text("{}")
        with pytest.raises(ConfigError, match=r"known\.json is no table"):
            known_table(file, self.ABOUT)
        assert file.read_text() == "{}"

    def test_where_it_cannot_be_written_that_is_said_first(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none/new\.json cannot be written: No such file"):
            known_table(tmp_path / "none" / "new.json", self.ABOUT)


def test_numbers_of_tokens_without_a_place_in_tables_are_refused(tmp_path: Path) -> None:
    kernel = TritonExperts()
    assert isinstance(kernel, TunableExperts)
    with pytest.raises(ConfigError, match="tokens=3 must be a power of two, 32768 at most"):
        kernel.tune([], {3: []}, tmp_path / "x", seconds=1, say=print)
    assert not (tmp_path / "x").exists()


def test_what_is_tuned_needs_no_plan_before(tmp_path: Path) -> None:
    """One's own table may be searched for a shape that it lacks, which is refused elsewhere."""

    def choose(*_: object) -> Plan:
        raise AssertionError("asked for a plan")

    layer = expert_bundle("dense", 4, 64, 32)
    with pytest.raises(ConfigError, match="tokens=3 must be"):
        TritonExperts(choose).tune([layer], {3: []}, tmp_path / "x", seconds=1, say=print)
