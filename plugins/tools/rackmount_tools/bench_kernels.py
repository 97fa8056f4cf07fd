"""`rackmount bench kernels`: the linear kernels at the shapes of a model.

Each distinct matrix of the model, with each kernel that fits it, at several numbers of tokens, as a
mount with that kernel would ask for it: with the epilogue that is fused there, if the kernel has
it. The weight is copied until the copies outgrow a GPU's L2 cache several times, and the copies
take turns; on a GPU all of it is one CUDA graph, so that launches cost what they cost in the
engine.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from rackmount import Engine, EngineOptions, unfold
from rackmount_registry.descriptors import LinearKernel
from rackmount_registry.errors import ConfigError
from rackmount_registry.formats import EPILOGUES, Weight
from rackmount_registry.mount import Draft
from rackmount_registry.mount.fuse import fuse
from rackmount_registry.mount.trace import trace
from rackmount_registry.nn import Experts, Linear, MergedLinear, OutputHead
from rackmount_registry.nn.linear import Gemm
from rackmount_registry.options import instantiate
from rackmount_tools.bench_latency import numbers_of
from rackmount_tools.ceilings import Ceilings, measure_ceilings, seconds
from rackmount_tools.record import (
    JsonFile,
    describe_ceilings,
    describe_engine,
    print_table,
    write_record,
)
from rackmount_tools.runs import open_engine
from rackmount_tools.shapes import ModelOrShape

L2_TIMES = 4
"""How often the copies of a weight fill the L2 cache."""
COLUMNS = {
    "shape": "out x in",
    "role": "role",
    "count": "in the model",
    "kernel": "kernel",
    "epilogue": "epilogue",
    "tokens": "tokens",
    "us": "us",
    "tb_per_s": "TB/s",
    "floor_us": "floor us",
    "share": "reached",
}


def gemms(draft: Draft) -> Iterator[Gemm]:
    """Every matrix product of a model but those of its experts."""
    for socket in draft.sockets:
        match socket:
            case Linear() | OutputHead():
                yield socket.gemm
            case MergedLinear():
                yield from socket.gemms
            case Experts():
                yield socket.gate


def distinct(draft: Draft) -> dict[tuple[object, ...], list[Gemm]]:
    """The products by role, shape, format, and what a kernel with every epilogue is asked for:
    `uses` of the mount say so only as far as its own kernel goes."""
    found: dict[tuple[object, ...], list[Gemm]] = {}
    for gemm in gemms(draft):
        gemm.epilogues = EPILOGUES
    fuse(trace(draft.model))
    for gemm in gemms(draft):
        weight = gemm.weight
        key = weight.role, weight.parts, weight.in_features, weight.stored.yields, gemm.uses
        found.setdefault(key, []).append(gemm)
    return found


def measure(
    engine: Engine, ceilings: Ceilings, tokens: list[int], kernels: list[str]
) -> list[dict[str, Any]]:
    """A row for each product, kernel and number of tokens.

    Raises:
        ConfigError: a kernel that was asked for fits no product.
    """
    rack, rows = engine.rack, []
    _require_fitting(engine, kernels)
    for alike in distinct(rack.draft).values():
        weight = alike[0].weight.finish()
        choice = rack.parts.linear[weight.format]
        fitting = {each.name for each in choice.candidates if each.accepted}
        for name in sorted(fitting.intersection(kernels) if kernels else fitting):
            offer = engine.manager.find(LinearKernel, name)
            kernel = instantiate(offer, rack.options)
            uses, epilogues = alike[0].uses, offer.descriptor.epilogues
            epilogue = next((each for each in epilogues if each in uses), None)
            uses = uses if epilogue else ("run",)
            copies = [kernel.prepare(each, uses) for each in _copies(weight, rack.device)]
            for num in tokens:
                fused = epilogue if epilogue != "add" or kernel.adds(copies[0], num) else None
                x = torch.randn(num, weight.in_features, device=rack.device).to(rack.dtype)
                residual = x.new_ones(num, weight.out_features) if fused == "add" else None
                run = partial(_run, kernel, copies, x, fused, residual)
                took = _seconds_each(run, x.device)
                rows.append(
                    {
                        "shape": f"{weight.out_features} x {weight.in_features}",
                        "role": alike[0].weight.role,
                        "format": weight.format,
                        "count": len(alike),
                        "kernel": name,
                        "epilogue": fused,
                        "tokens": num,
                        **against(took / len(copies), weight, x, fused, ceilings),
                    }
                )
    return rows


def _copies(weight: Weight, device: torch.device) -> list[Weight]:
    """Copies that together outgrow the cache."""
    size = sum(tensor.nbytes for tensor in weight.tensors.values())
    cache = (
        torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else size
    )
    return [
        replace(weight, tensors={name: each.clone() for name, each in weight.tensors.items()})
        for _ in range(max(2, -(-L2_TIMES * cache // size)))
    ]


def _run(
    kernel: Any,
    prepared: list[Any],
    x: torch.Tensor,
    epilogue: str | None,
    residual: torch.Tensor | None,
) -> None:
    for each in prepared:
        match epilogue:
            case "silu_mul":
                kernel.run_silu_mul(x, each, None)
            case "add":
                kernel.run_add(x, each, None, residual)
            case _:
                kernel.run(x, each, None)


def _seconds_each(run: Callable[[], None], device: torch.device) -> float:
    """Of one call of `run`: as a graph where there are such."""
    if device.type != "cuda":
        return seconds(run, device, repeats=5)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, and takes the workspaces that a graph may not take
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return seconds(graph.replay, device)


def against(
    took: float, weight: Weight, x: torch.Tensor, epilogue: str | None, ceilings: Ceilings
) -> dict[str, float]:
    """A time in seconds beside its floor."""
    num_bytes = sum(tensor.nbytes for tensor in weight.tensors.values()) + x.nbytes
    # The output; half of it behind silu_mul, and a residual of its size before add.
    sizes = {None: 1, "silu_mul": 0.5, "add": 2}
    num_bytes += int(x.shape[0] * weight.out_features * x.itemsize * sizes[epilogue])
    flops = 2 * x.shape[0] * weight.out_features * weight.in_features
    floor = max(num_bytes / ceilings.bandwidth, flops / ceilings.matmul)
    return {
        "us": took * 1e6,
        "tb_per_s": num_bytes / took / 1e12,
        "floor_us": floor * 1e6,
        "share": floor / took,
    }


def _require_fitting(engine: Engine, kernels: list[str]) -> None:
    choices = engine.rack.parts.linear.values()
    fitting = {each.name for choice in choices for each in choice.candidates if each.accepted}
    for name in kernels:
        if name not in fitting:
            raise ConfigError(
                f"kernel={name!r} fits no product of this model here; choose among "
                f"{', '.join(sorted(fitting))}"
            )


@unfold
def bench(
    ctx: typer.Context,
    model: ModelOrShape,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens, with commas.")] = "1,16,64,256",
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only this one; repeatable. All that fit else.")
    ] = None,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Linear kernels at the shapes of MODEL, beside the least time that this device could take."""
    if engine.tp != 1:
        raise ConfigError(f"tp={engine.tp}: kernels are timed in this process; choose tp=1")
    arguments = engine.arguments() | {"num_kv_blocks": 1, "enforce_eager": True}
    with open_engine(model, arguments, ctx.obj, max_model_len=16) as mounted:
        ceilings = measure_ceilings(mounted.rack.device, mounted.rack.dtype)
        with torch.inference_mode():
            rows = measure(mounted, ceilings, numbers_of(tokens, "tokens"), kernel or [])
        record = {
            "engine": describe_engine(mounted),
            "ceilings": describe_ceilings(ceilings),
            "kernels": rows,
        }
    print_table(f"{model}: linear kernels", COLUMNS, rows)
    typer.echo(f"ceilings: {describe_ceilings(ceilings)}")
    write_record(json_file, record)
