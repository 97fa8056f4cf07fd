"""Each operation of the op set "triton" against its definition, in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from tests.helpers.interpreter import mend_casts
from tests.helpers.ops import Checker

from rackmount_backends.triton_ops import activation, norm, rotary
from rackmount_backends.triton_ops.op_set import TRITON_OPS
from rackmount_registry.ops import OPS

# The interpreter cuts bfloat16 off instead of rounding it; the GPU's tests have it.
DTYPES = (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=DTYPES, ids=str)
def check(request: pytest.FixtureRequest) -> Checker:
    return Checker(op_set=TRITON_OPS, device="cpu", dtype=request.param)


@pytest.fixture(params=[False, True], ids=["few", "many"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of the ways that the number of tokens chooses."""
    if request.param:
        for module, name in (
            (norm, "MANY_ROWS"),
            (activation, "MANY_ROWS"),
            (rotary, "MANY_TOKENS"),
        ):
            monkeypatch.setattr(module, name, 0)


def test_every_operation_offered_is_defined() -> None:
    assert set(vars(TRITON_OPS)) <= set(OPS)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("size", [1, 24, 100])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_norms_equal_their_definition(check: Checker, num_tokens: int, size: int) -> None:
    check.norms(num_tokens, size)


def test_a_norm_takes_the_heads_of_a_view(check: Checker) -> None:
    check.head_norm()


@pytest.mark.usefixtures("many")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # and 1 / inf is 0, as is meant
@pytest.mark.parametrize("size", [1, 100, 2500])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_the_gate_equals_its_definition(check: Checker, num_tokens: int, size: int) -> None:
    check.silu_mul(num_tokens, size)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "rotated"), [((4, 2, 16), 16), ((7, 1, 20), 12), ((6, 3, 10), 0), ((4, 4, 20), 20)]
)
def test_rotary_write_equals_its_definition(
    check: Checker, heads: tuple[int, int, int], rotated: int, normed: bool, interleaved: bool
) -> None:
    check.rotary_write(heads, rotated, normed=normed, interleaved=interleaved)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("scales", [(0.37, 0.01), (1e-3, 30.0)])
@pytest.mark.parametrize(
    ("heads", "rotated"), [((4, 2, 16), 16), ((7, 1, 20), 12), ((6, 3, 10), 0)]
)
def test_an_fp8_cache_gets_quotients_that_end_at_448(
    check: Checker,
    heads: tuple[int, int, int],
    rotated: int,
    scales: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mend_casts(monkeypatch)
    check.rotary_write(heads, rotated, normed=rotated > 0, scales=scales)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("scales", [None, (0.37, 0.01)])
@pytest.mark.parametrize(
    ("heads", "rotated", "interleaved"),
    [((4, 2, 16), 16, False), ((7, 1, 20), 12, True), ((6, 3, 10), 0, False)],
)
def test_queries_and_keys_are_mapped_once_they_are_turned(
    check: Checker,
    heads: tuple[int, int, int],
    rotated: int,
    interleaved: bool,
    scales: tuple[float, float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mend_casts(monkeypatch)
    check.rotary_write(
        heads,
        rotated,
        normed=rotated > 0,
        interleaved=interleaved,
        scales=scales,
        are_mapped=True,
    )


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_rotary_write_takes_any_integers_and_no_tokens(
    check: Checker, num_tokens: int, integers: torch.dtype
) -> None:
    check.rotary_write((4, 2, 8), 8, num_tokens=num_tokens, integers=integers)


def test_a_cache_may_be_narrower_than_the_keys() -> None:
    wide = Checker(op_set=TRITON_OPS, device="cpu", dtype=torch.float32)
    wide.rotary_write((4, 2, 8), 8, cache_dtype=torch.float16)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "parts"),
    [
        (1, (32, 8, 128), 8),
        (16384, (32, 8, 128), 1),
        (16384, (64, 8, 256), 2),
        (16384, (40, 10, 512), 5),
        (16384, (71, 1, 256), 1),
        (16384, (128, 2, 512), 2),
        (1, (7, 1, 64), 1),
    ],
)
def test_a_token_has_more_programs_where_tokens_are_few(
    num_tokens: int, heads: tuple[int, int, int], parts: int
) -> None:
    assert rotary.parts_of(num_tokens, *heads) == parts


@pytest.mark.parametrize("size", [1, 100, 2500])
def test_embedding_equals_its_definition(check: Checker, size: int) -> None:
    check.embedding(size)


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "width"),
    [([], 0, 4), ([], 3, 4), ([1], 1, 1), ([33, 16, 17, 1], 9, 5), ([20000, 1], 2, 1300)],
)
def test_a_batch_is_built_by_its_definition(
    lengths: list[int], num_tokens: int, width: int
) -> None:
    Checker(op_set=TRITON_OPS, device="cpu", dtype=torch.float32).build_batch(
        lengths, num_tokens, width
    )
