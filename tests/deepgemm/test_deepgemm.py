"""DeepGEMM behind the contract, with a stand-in for the package that takes the same arguments and
computes by the definition."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tests.helpers.interpreter import mend_casts, mend_loops
from torch import Tensor

from rackmount_deepgemm import experts
from rackmount_deepgemm.experts import DeepGemmExperts
from rackmount_deepgemm.linear import DeepGemmLinear
from rackmount_deepgemm.rounding import round_groups
from rackmount_moe.torch_experts import TorchExperts
from rackmount_registry.errors import ConfigError
from rackmount_registry.experts import BatchedExpertInput, ExpertBundle, ExpertInput
from rackmount_registry.formats import Weight
from rackmount_registry.ops import silu_mul

HIDDEN, WIDTH, EXPERTS = 256, 128, 4
ALIGNMENT = 16

Values = tuple[Tensor, Tensor]


def widened(x: Values, block_rows: int) -> Tensor:
    """Values times the scales of their blocks of so many rows and 128 columns."""
    values, scales = x
    rows = torch.arange(values.shape[-2]) // block_rows
    columns = torch.arange(values.shape[-1]) // 128
    return values.float() * scales.index_select(-2, rows).index_select(-1, columns)


class FakeDeepGemm(ModuleType):
    """The functions of sgl-deep-gemm 0.1.4 that are used, for CPU tensors."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.calls: list[str] = []

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return ALIGNMENT

    def fp8_gemm_nt(self, a: Values, b: Values, d: Tensor) -> None:
        d.copy_(widened(a, 1) @ widened(b, 128).T)

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Values, b: Values, d: Tensor, grouped_layout: Tensor
    ) -> None:
        self.calls.append("contiguous")
        assert grouped_layout.dtype == torch.int32 and len(d) % ALIGNMENT == 0
        d.fill_(torch.nan)  # rows of nobody may hold anything
        x, weight = widened(a, 1), widened(b, 128)
        for start in range(0, len(d), ALIGNMENT):
            owners = set(grouped_layout[start : start + ALIGNMENT].tolist()) - {-1}
            assert len(owners) <= 1, "one expert a block of rows"
        for row, expert in enumerate(grouped_layout.tolist()):
            if expert >= 0:
                d[row] = x[row] @ weight[expert].T

    def fp8_m_grouped_gemm_nt_masked(
        self, a: Values, b: Values, d: Tensor, masked_m: Tensor, expected_m: int
    ) -> None:
        self.calls.append("masked")
        assert masked_m.dtype == torch.int32 and expected_m >= 1
        d.fill_(torch.nan)
        rows, box = d.view(-1, d.shape[2]), d.shape[1]
        for expert, count in reversed(list(enumerate(masked_m.tolist()))):
            # Whole tiles are written, over what follows.
            rows[expert * box :][: -(-count // ALIGNMENT) * ALIGNMENT] = torch.nan
            x = widened((a[0][expert], a[1][expert]), 1)[:count]
            d[expert, :count] = x @ widened((b[0][expert], b[1][expert]), 128).T


@pytest.fixture(autouse=True)
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDeepGemm]:
    mend_loops(monkeypatch)
    mend_casts(monkeypatch)
    fake = FakeDeepGemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    yield fake


def weight_of(shape: tuple[int, ...], parts: tuple[int, ...], random: torch.Generator) -> Weight:
    values = torch.randn(shape, generator=random).clamp(-3, 3).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    scales = torch.rand(blocks, generator=random) * 0.1 + 0.01
    tensors = {"values": values, "scales": scales}
    return Weight("fp8_blocks", tensors, parts, shape[-1], activation="group")


def rounded(x: Tensor) -> Tensor:
    """What rounding to e4m3 by groups of 128 leaves of x."""
    groups = x.float().unflatten(-1, (-1, 128))
    largest = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / 448, 1)
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def test_groups_are_rounded_by_their_largest() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(7, 384, generator=random).bfloat16()
    x[3, 128:256] = 0
    values, scales = round_groups(x)
    torch.testing.assert_close(widened((values, scales), 1), rounded(x), rtol=1e-6, atol=0)
    assert scales[3, 1] == 1
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    values, scales = round_groups(x, rows)
    expected = torch.stack((rounded(x)[2], torch.zeros(384), rounded(x)[0]))
    torch.testing.assert_close(widened((values, scales), 1), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("silu_mul", [False, True])
def test_what_is_no_number_stays_none(silu_mul: bool) -> None:
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[1, 200] = torch.nan
    values, scales = round_groups(x, silu_mul=silu_mul)
    assert scales[1, 1].isnan()
    scales[1, 1] = 1
    wrong = widened((values, scales), 1).isfinite().logical_not().nonzero()
    assert all(row == 1 and 128 <= column < 256 for row, column in wrong.tolist())
    assert scales.isfinite().all()


def test_the_activation_is_rounded_in_the_same_pass() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = round_groups(x, silu_mul=True)
    expected = rounded(silu_mul(*x.chunk(2, -1)))
    torch.testing.assert_close(widened((values, scales), 1), expected, rtol=2e-2, atol=1e-4)


def test_the_linear_kernel_multiplies_the_rounded_input() -> None:
    random = torch.Generator().manual_seed(2)
    weight = weight_of((384, HIDDEN), (256, 128), random)
    kernel = DeepGemmLinear()
    prepared = kernel.prepare(weight)
    for count in (0, 1, 5):
        x = torch.randn(count, HIDDEN, generator=random).bfloat16()
        bias = torch.randn(384, generator=random).bfloat16()
        expected = rounded(x) @ weight.dequantize().T + bias
        torch.testing.assert_close(
            kernel.run(x, prepared, bias).float(), expected, rtol=2e-2, atol=2e-2
        )


def inputs(count: int, top_k: int, ids: Tensor | None, random: torch.Generator) -> ExpertInput:
    x = torch.randn(count, HIDDEN, generator=random).bfloat16()
    if ids is None:
        chosen = [torch.randperm(EXPERTS, generator=random)[:top_k] for _ in range(count)]
        ids = torch.stack(chosen) if chosen else torch.empty(0, top_k)
        ids = ids.to(torch.int32)
    return ExpertInput(x=x, expert_ids=ids, weights=torch.rand(ids.shape, generator=random))


@pytest.mark.parametrize(
    ("most_tokens", "most_rows"),
    [(6, ALIGNMENT * EXPERTS), (0, 1000), (1000, ALIGNMENT * EXPERTS - 1)],
    ids=["boxed", "too many tokens", "too many rows"],
)
@pytest.mark.parametrize("count", [0, 1, 6])
def test_experts_equal_the_definition_on_rounded_inputs(
    deep_gemm: FakeDeepGemm,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    most_tokens: int,
    most_rows: int,
) -> None:
    monkeypatch.setattr(experts, "MAX_BOXED_TOKENS", most_tokens)
    monkeypatch.setattr(experts, "MAX_BOXED_ROWS", most_rows)
    random = torch.Generator().manual_seed(count)
    bundle = ExpertBundle(
        gate_up=weight_of((EXPERTS, 2 * WIDTH, HIDDEN), (WIDTH, WIDTH), random),
        down=weight_of((EXPERTS, HIDDEN, WIDTH), (HIDDEN,), random),
    )
    kernel = DeepGemmExperts()
    prepared = kernel.prepare(bundle)
    given = inputs(count, 3, None, random)
    some_away = given.expert_ids.clone()
    some_away[::2, 1] = -1
    same = torch.full_like(given.expert_ids, -1)
    same[:, 0] = 2
    for ids in (some_away, same):
        case = ExpertInput(x=given.x, expert_ids=ids, weights=given.weights)
        out = kernel.run(case, prepared)
        expected = TorchExperts().run(case, bundle)
        assert out.shape == expected.shape and out.dtype == expected.dtype
        scale = expected.float().abs().amax().item() if count else 1
        torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=0.06 * scale + 1e-6)
    used = set(deep_gemm.calls)
    boxed = most_tokens == 6
    assert used == (set() if not count else {"masked" if boxed else "contiguous"})


@pytest.mark.parametrize("capacity", [0, 6, ALIGNMENT, 2 * ALIGNMENT])
def test_filled_boxes_equal_the_definition_on_rounded_inputs(
    deep_gemm: FakeDeepGemm, capacity: int
) -> None:
    """Whether they begin whole tiles or not; the same bits from tokens that come rounded."""
    random = torch.Generator().manual_seed(capacity)
    bundle = ExpertBundle(
        gate_up=weight_of((EXPERTS, 2 * WIDTH, HIDDEN), (WIDTH, WIDTH), random),
        down=weight_of((EXPERTS, HIDDEN, WIDTH), (HIDDEN,), random),
    )
    kernel, counts = DeepGemmExperts(), [capacity, 0, capacity // 2, min(capacity, 1)]
    assert len(counts) == EXPERTS
    x = torch.randn(EXPERTS, capacity, HIDDEN, generator=random).bfloat16()
    for box, count in zip(x, counts, strict=True):
        box[count:] = torch.nan
    num_valid = torch.tensor(counts, dtype=torch.int32)
    plain = BatchedExpertInput(x=x, num_valid=num_valid, dtype=x.dtype)
    values, scales = round_groups(x.flatten(0, 1))
    scales = scales.view(EXPERTS, capacity, HIDDEN // 128)
    fp8 = replace(plain, x=values.view(x.shape), scales=scales.mT.contiguous().mT)
    out, same = (kernel.run(given, kernel.prepare(bundle)) for given in (plain, fp8))
    expected = TorchExperts().run(fp8, bundle)
    assert out.shape == same.shape == x.shape and out.dtype == same.dtype == torch.bfloat16
    assert out.is_contiguous() and same.is_contiguous()
    for expert, count in enumerate(counts):
        torch.testing.assert_close(
            out[expert, :count].float(), expected[expert, :count].float(), rtol=0.06, atol=0.3
        )
        assert torch.equal(out[expert, :count], same[expert, :count])
    assert set(deep_gemm.calls) == ({"masked"} if capacity else set())


def test_other_shapes_and_exact_inputs_are_refused_with_their_numbers() -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.zeros(130, 256).to(torch.float8_e4m3fn)
    odd = Weight("fp8_blocks", {"values": values, "scales": torch.ones(2, 2)}, (130,), 256)
    kernel = DeepGemmLinear()
    with pytest.raises(ConfigError, match="whole blocks of 128 x 128, not of 130 x 256"):
        kernel.prepare(odd)
    plain = weight_of((128, 128), (128,), random)
    exact = Weight("fp8_blocks", plain.tensors, plain.parts, 128)
    with pytest.raises(ConfigError, match=r"rounds its input .* says 'plain'"):
        kernel.prepare(exact)
