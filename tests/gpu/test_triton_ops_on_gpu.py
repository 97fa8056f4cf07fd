"""The op set "triton", compiled: each operation against its definition, and chains of them."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.helpers.ops import Checker, angles
from torch import Tensor

from rackmount_backends.triton_ops.op_set import TRITON_OPS

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_TOKENS = [0, 1, 5, 600]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, so that what a kernel leaves out is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=DTYPES, ids=str)
def check(request: pytest.FixtureRequest) -> Checker:
    return Checker(op_set=TRITON_OPS, device="cuda", dtype=request.param)


@pytest.mark.parametrize("size", [1, 100, 896, 4096, 5120, 16384])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_norms_equal_their_definition(check: Checker, num_tokens: int, size: int) -> None:
    check.norms(num_tokens, size)


def test_a_norm_takes_the_heads_of_a_view(check: Checker) -> None:
    check.head_norm()


@pytest.mark.parametrize("size", [1, 100, 768, 14336])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_the_gate_equals_its_definition(check: Checker, num_tokens: int, size: int) -> None:
    check.silu_mul(num_tokens, size)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "rotated"),
    [
        ((32, 8, 128), 128),
        ((16, 8, 128), 64),
        ((14, 2, 64), 64),
        ((32, 32, 80), 32),
        ((71, 1, 64), 64),
        ((8, 4, 256), 0),
        ((7, 1, 20), 12),
    ],
)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rotary_write_equals_its_definition(
    check: Checker,
    heads: tuple[int, int, int],
    rotated: int,
    normed: bool,
    interleaved: bool,
    num_tokens: int,
) -> None:
    check.rotary_write(
        heads,
        rotated,
        normed=normed,
        interleaved=interleaved,
        num_tokens=num_tokens,
        integers=torch.int32,
    )


@pytest.mark.parametrize("scales", [None, (0.37, 0.01)])
@pytest.mark.parametrize(
    ("heads", "rotated", "interleaved"),
    [
        ((32, 8, 128), 128, False),
        ((16, 8, 128), 64, True),
        ((9, 3, 64), 64, False),
        ((32, 32, 80), 32, False),
        ((71, 1, 64), 64, False),
        ((64, 8, 256), 0, False),
        ((7, 1, 20), 12, True),
    ],
)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_queries_and_keys_are_mapped_once_they_are_turned(
    check: Checker,
    heads: tuple[int, int, int],
    rotated: int,
    interleaved: bool,
    num_tokens: int,
    scales: tuple[float, float] | None,
) -> None:
    check.rotary_write(
        heads,
        rotated,
        normed=rotated > 0,
        interleaved=interleaved,
        num_tokens=num_tokens,
        scales=scales,
        are_mapped=True,
    )


@pytest.mark.parametrize("scales", [(0.37, 0.01), (1e-3, 30.0)])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_an_fp8_cache_gets_quotients_that_end_at_448(
    check: Checker, num_tokens: int, scales: tuple[float, float]
) -> None:
    check.rotary_write((32, 8, 128), 128, normed=True, num_tokens=num_tokens, scales=scales)


@pytest.mark.parametrize("size", [1, 100, 4096, 5120])
def test_embedding_equals_its_definition(check: Checker, size: int) -> None:
    check.embedding(size)


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "width"),
    [([], 3, 4), ([1], 1, 1), ([33, 16, 17, 1] * 16, 70, 2048), ([131072, 1], 8192, 8192)],
)
def test_a_batch_is_built_by_its_definition(
    lengths: list[int], num_tokens: int, width: int
) -> None:
    Checker(op_set=TRITON_OPS, device="cuda", dtype=torch.float32).build_batch(
        lengths, num_tokens, width
    )


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    num_tokens, size = 2**31 // 16384 + 2, 8192
    joined = torch.zeros(num_tokens, 2 * size, dtype=torch.bfloat16, device="cuda")
    joined[-1] = 1.0
    out = TRITON_OPS.silu_mul(*joined.chunk(2, -1))
    expected = torch.sigmoid(torch.ones((), device="cuda")).bfloat16()
    assert bool((out[-1] == expected).all())
    assert not bool(out[:-1].any())


HEADS, GROUPS, SIZE, LAYERS, ROWS = 8, 2, 64, 12, 70
WIDTH = (HEADS + 2 * GROUPS) * SIZE


class Chain:
    """All operations after one another, as a model has them: each reads what the one before has
    just written."""

    def __init__(self, num_tokens: int) -> None:
        check = Checker(op_set=TRITON_OPS, device="cuda", dtype=torch.bfloat16)
        self.num_tokens = num_tokens
        self.weight = check.randn(ROWS, WIDTH)
        self.norms = check.randn(LAYERS, WIDTH, seed=1)
        self.cache = torch.zeros(LAYERS, 2, ROWS, GROUPS, SIZE, dtype=torch.bfloat16, device="cuda")
        self.table = angles(SIZE).cuda()
        self.last_ids = torch.arange(ROWS, dtype=torch.int32, device="cuda").flip(0)
        self.block_tables = torch.arange(ROWS * 8, dtype=torch.int32, device="cuda").view(ROWS, 8)
        self.block_table = torch.zeros(num_tokens, 8, dtype=torch.int32, device="cuda")
        self.ids, self.rows, self.seq_lens, self.positions, self.slots = torch.zeros(
            5, num_tokens, dtype=torch.int32, device="cuda"
        )

    def load(self, seed: int) -> None:
        """Another step's inputs."""
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(-ROWS, ROWS, (self.num_tokens,), generator=random)
        self.ids.copy_(ids)
        self.rows.copy_(torch.randperm(ROWS, generator=random)[: self.num_tokens])
        self.seq_lens.copy_(torch.randint(1, 129, (self.num_tokens,), generator=random))
        self.positions.copy_(torch.randint(0, 50, (self.num_tokens,), generator=random))
        self.slots.copy_(torch.randperm(ROWS, generator=random)[: self.num_tokens])
        self.block_table.zero_()
        self.cache.zero_()

    def run(self, after_each: Callable[[], None] = lambda: None) -> Tensor:
        """[layers, T, heads * size]: what each layer's rotary gave."""
        ops, outs = TRITON_OPS, []
        ops.build_batch(
            self.ids,
            self.rows,
            self.seq_lens,
            self.last_ids,
            self.block_tables,
            self.block_table,
            16,
        )
        after_each()
        residual = ops.embedding(self.ids, self.weight, 0)
        after_each()
        x = ops.rms_norm(residual, self.norms[0], 1e-5)
        for norm, cache in zip(self.norms, self.cache, strict=True):
            after_each()
            x, residual = ops.add_rms_norm(x, residual, norm, 1e-5)
            after_each()
            widths = (HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)
            q, k, v = (t.unflatten(1, (-1, SIZE)) for t in x.split(widths, 1))
            given = (self.positions, self.table, None, None, 0.0, False)
            outs.append(ops.rotary_write(q, k, v, *given, cache, self.slots))
            after_each()
            x = ops.silu_mul(x, x)
        after_each()
        return torch.stack((*outs, x[:, : HEADS * SIZE].unflatten(1, (HEADS, SIZE))))


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_a_captured_chain_gives_what_its_operations_give_one_by_one(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fill between two kernels would keep them apart, which may overlap otherwise.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    chain = Chain(num_tokens)
    chain.load(0)
    chain.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain.run()
    for seed in range(1, 6):
        chain.load(seed)
        expected = chain.run(torch.cuda.synchronize)
        state = chain.ids, chain.block_table, chain.cache
        kept = [t.clone() for t in state]
        chain.load(seed)
        graph.replay()
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))
