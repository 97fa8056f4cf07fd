"""`rackmount bench kernels`: the linear kernels at the shapes of a model.

Each distinct matrix of the model, with each kernel that fits it, at several numbers of tokens. The
weight is copied until the copies outgrow a GPU's L2 cache several times, and the copies take turns;
on a GPU all of it is one CUDA graph, so that launches cost what they cost in the engine.
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
from rackmount_registry.formats import Weight
from rackmount_registry.mount import Draft
from rackmount_registry.nn import Experts, Linear, MergedLinear, OutputHead
from rackmount_registry.nn.linear import Gemm
from rackmount_registry.options import instantiate
from rackmount_tools.bench_latency import batch_sizes
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
    """The products by role, shape and format."""
    found: dict[tuple[object, ...], list[Gemm]] = {}
    for gemm in gemms(draft):
        weight = gemm.weight
        key = weight.role, weight.parts, weight.in_features, weight.stored.yields
        found.setdefault(key, []).append(gemm)
    return found


def measure(
    engine: Engine, ceilings: Ceilings, tokens: list[int], kernels: list[str]
) -> list[dict[str, Any]]:
    """A row for each product, kernel and number of tokens."""
    rack, rows = engine.rack, []
    for alike in distinct(rack.draft).values():
        weight = alike[0].weight.finish()
        choice = rack.parts.linear[weight.format]
        fitting = {each.name for each in choice.candidates if each.accepted}
        for name in sorted(fitting.intersection(kernels) if kernels else fitting):
            kernel = instantiate(engine.manager.find(LinearKernel, name), rack.options)
            copies = [kernel.prepare(each) for each in _copies(weight, rack.device)]
            for num in tokens:
                x = torch.randn(num, weight.in_features, device=rack.device).to(rack.dtype)
                took = _seconds_each(partial(_run, kernel, copies, x), x.device)
                rows.append(
                    {
                        "shape": f"{weight.out_features} x {weight.in_features}",
                        "role": alike[0].weight.role,
                        "format": weight.format,
                        "count": len(alike),
                        "kernel": name,
                        "tokens": num,
                        **_against(took / len(copies), weight, x, ceilings),
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


def _run(kernel: Any, prepared: list[Any], x: torch.Tensor) -> None:
    for each in prepared:
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


def _against(took: float, weight: Weight, x: torch.Tensor, ceilings: Ceilings) -> dict[str, float]:
    num_bytes = sum(tensor.nbytes for tensor in weight.tensors.values()) + x.nbytes
    num_bytes += x.shape[0] * weight.out_features * x.itemsize
    flops = 2 * x.shape[0] * weight.out_features * weight.in_features
    floor = max(num_bytes / ceilings.bandwidth, flops / ceilings.matmul)
    return {
        "us": took * 1e6,
        "tb_per_s": num_bytes / took / 1e12,
        "floor_us": floor * 1e6,
        "share": floor / took,
    }


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
            rows = measure(mounted, ceilings, batch_sizes(tokens), kernel or [])
        record = {
            "engine": describe_engine(mounted),
            "ceilings": describe_ceilings(ceilings),
            "kernels": rows,
        }
    print_table(f"{model}: linear kernels", COLUMNS, rows)
    typer.echo(f"ceilings: {describe_ceilings(ceilings)}")
    write_record(json_file, record)
