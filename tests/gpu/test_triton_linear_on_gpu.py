"""The Triton linear kernel, compiled: against float64, in every way to cut a weight."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rackmount_backends.triton_linear import linear
from rackmount_backends.triton_linear.linear import Prepared, TritonLinear
from rackmount_backends.triton_linear.tuning import Tiling
from rackmount_registry.formats import Weight

pytestmark = pytest.mark.gpu

EPILOGUES = ("none", "silu_mul", "add")
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
FLAT = Tiling(block_n=64, block_k=128, share=6, stages=4, warps=4, prefetch=2, tma=False)
TILINGS = {
    "programs with blocks of several tiles": FLAT,
    "whole tiles": replace(FLAT, share=8),
    "split tiles": replace(FLAT, share=2, prefetch=1),
    "one program for all": replace(FLAT, share=1000),
    "narrow tiles": replace(FLAT, block_n=16, share=3),
    "eight warps": replace(FLAT, block_n=128, block_k=64, share=5, warps=8, prefetch=0),
}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cuda").to(dtype)


def prepare(n: int, k: int, dtype: torch.dtype, tiling: Tiling | None = None) -> Prepared:
    """With a tiling for all products, or as `choose` says."""
    kernel = TritonLinear(lambda *_: tiling) if tiling else TritonLinear()
    weight = draw(n, k, dtype=dtype) / k**0.5
    return kernel.prepare(Weight("dense", {"weight": weight}, (n,), k))


def product(epilogue: str, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    kernel, n = TritonLinear(), len(prepared.weight)
    if epilogue == "none":
        return kernel.run(x, prepared, bias)
    if epilogue == "silu_mul":
        return kernel.run_silu_mul(x, prepared, bias)
    return kernel.run_add(x, prepared, bias, x.new_ones(len(x), n + 8)[:, 8:])


def expected(epilogue: str, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    wide = x.double() @ prepared.weight.double().T
    wide = wide if bias is None else wide + bias.double()
    if epilogue == "silu_mul":
        gate, up = wide.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    return wide + (epilogue == "add")


def check(epilogue: str, rows: int, prepared: Prepared, biased: bool) -> None:
    n, k = prepared.weight.shape
    dtype = prepared.weight.dtype
    x = draw(rows, k + 64, dtype=dtype)[:, 64:]
    bias = draw(n, dtype=dtype) if biased else None
    out = product(epilogue, x, prepared, bias)
    wide, tolerance = expected(epilogue, x, prepared, bias), TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), wide, rtol=tolerance, atol=tolerance * 2)
    assert not prepared.arrivals.any()


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.torch, "empty", lambda *a, **k: torch.full(*a, torch.nan, **k))


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_every_tiling_gives_the_product(
    dtype: torch.dtype, epilogue: str, tma: bool, tiling: Tiling
) -> None:
    if tma and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor memory accelerator")
    tiling = replace(tiling, tma=tma)
    prepared = prepare(1000, 1024, dtype, tiling)
    for rows in (1, 3, 16, 33, 100):
        check(epilogue, rows, prepared, biased=rows % 2 == 1)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("n", "k"), [(14, 24), (130, 1000), (1000, 72)])
def test_sizes_need_not_fill_tiles(epilogue: str, n: int, k: int) -> None:
    prepared = prepare(n, k, torch.bfloat16, replace(FLAT, share=1))
    for rows in (1, 5, 64, 255):
        check(epilogue, rows, prepared, biased=True)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    ("n", "k"),
    [(28672, 4096), (4096, 14336), (6144, 4096), (1024, 3072), (256, 12160), (14336, 4096)],
)
def test_the_chosen_tilings_give_the_product(
    dtype: torch.dtype, epilogue: str, n: int, k: int
) -> None:
    prepared = prepare(n, k, dtype)
    for rows in (1, 2, 5, 8, 16, 17, 64, 100, 256, 257, 1000):
        check(epilogue, rows, prepared, biased=False)


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_a_chain_in_a_graph_gives_the_same_bits_each_time(tiling: Tiling) -> None:
    """Each product reads the one before, which may still be running as its kernel starts."""
    chain = [prepare(1024, 1024, torch.bfloat16, tiling) for _ in range(12)]
    kernel, x = TritonLinear(), draw(16, 1024, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        outs = [x]
        for prepared in chain:
            outs.append(kernel.run(outs[-1], prepared, None))
        return outs

    wanted = run()
    for out, x_, prepared in zip(wanted[1:], wanted, chain, strict=False):
        wide = x_.double() @ prepared.weight.double().T
        torch.testing.assert_close(out.double(), wide, rtol=1e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(200):
        graph.replay()
        assert all(map(torch.equal, outs, wanted))
    assert not any(prepared.arrivals.any() for prepared in chain)


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_a_row_does_not_depend_on_the_other_rows(tiling: Tiling) -> None:
    prepared, kernel = prepare(1000, 1024, torch.bfloat16, tiling), TritonLinear()
    x = draw(9, 1024, dtype=torch.bfloat16)
    out = kernel.run(x, prepared, None)
    x[:4], x[5:] = torch.nan, torch.inf
    assert torch.equal(kernel.run(x, prepared, None)[4], out[4])
