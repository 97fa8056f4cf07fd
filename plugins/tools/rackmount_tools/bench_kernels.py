"""`rackmount bench kernels`: linear and expert kernels at the shapes of a model.

Each distinct matrix of the model, and each distinct layer of experts, with random numbers and with
each kernel that fits it, at several numbers of tokens, as a mount with that kernel would ask for
it: with the epilogue that is fused there, if the kernel has it, and with its input rounded, if that
is done where it is made. What is read in turn outgrows a GPU's L2 cache several times: copies of
a weight, other experts in each call. On a GPU all of it is one CUDA graph, so that launches cost
what they cost in the engine.

With `--tune` an expert kernel first searches for its fastest tilings, and what is timed then is
what it wrote down.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from rackmount import EngineConfig, EngineOptions, Rack, draft_rack, locate, read_config, unfold
from rackmount import progress as shown
from rackmount_registry.errors import ConfigError, did_you_mean
from rackmount_registry.selection import Candidate, PairCandidate
from rackmount_tools.bench_latency import numbers_of
from rackmount_tools.ceilings import measure_ceilings
from rackmount_tools.expert_timing import time_experts
from rackmount_tools.linear_timing import time_linear
from rackmount_tools.machine import require_device
from rackmount_tools.record import (
    JsonFile,
    describe_ceilings,
    describe_rack,
    print_ceilings,
    print_table,
    writable,
    write_record,
)
from rackmount_tools.shapes import ModelOrShape, resolved
from rackmount_tools.tune import require_gpu, tune_experts

COLUMNS = {
    "shape": "out x in",
    "role": "role",
    "format": "format",
    "count": "in the model",
    "kernel": "kernel",
    "epilogue": "epilogue",
    "input": "input",
    "tokens": "tokens",
    "distinct_experts": "experts",
    "us": "us",
    "tb_per_s": "TB/s",
    "floor_us": "floor us",
    "share": "reached",
}


def candidates_of(rack: Rack) -> list[tuple[str, Candidate | PairCandidate]]:
    """Every kernel by name, as it was held against each product of the model."""
    linear = [each for choice in rack.parts.linear.values() for each in choice.candidates]
    pairs = [pair for choice in rack.parts.experts.values() for pair in choice.candidates]
    # A dispatcher matters to those expert kernels alone that would fit by themselves.
    experts = [(pair.first.name, pair if pair.first.accepted else pair.first) for pair in pairs]
    return [*((each.name, each) for each in linear), *experts]


def require_fitting(rack: Rack, kernels: list[str]) -> None:
    """ConfigError for a kernel that is unknown, or that fits nothing, with what refuses it."""
    held = candidates_of(rack)
    known = sorted({name for name, _ in held})
    fitting = sorted({name for name, each in held if each.accepted})
    for asked in kernels:
        if asked not in known:
            raise ConfigError(
                f"kernel={asked!r}{did_you_mean(asked, known)} must be one of {', '.join(known)}"
            )
        if asked not in fitting:
            refused = dict.fromkeys(str(each) for name, each in held if name == asked)
            raise ConfigError(
                f"kernel={asked!r} fits no product of this model here: {'; '.join(refused)}; "
                f"choose among {', '.join(fitting)}"
            )


@unfold
def bench(
    ctx: typer.Context,
    model: ModelOrShape,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens, with commas.")] = "1,16,64,256",
    kernel: Annotated[
        list[str] | None, typer.Option(help="Only this one; repeatable. All that fit else.")
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            callback=writable,
            help="Search for the fastest tilings of the model's experts on this GPU, and add them "
            "to this file, which `--plugin-config expert_kernel.NAME.tuned=FILE` reads.",
        ),
    ] = None,
    tune_seconds: Annotated[
        float, typer.Option(min=1, help="To measure for, about; compiling comes before.")
    ] = 200,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Linear and expert kernels at the shapes of MODEL, beside the least time that this device
    could take. Weights are random: none is read."""
    if engine.tp != 1:
        raise ConfigError(f"tp={engine.tp}: kernels are timed in this process; choose tp=1")
    with resolved(model, engine.arguments()) as (name, arguments), shown() as report:
        config = EngineConfig.create(model=name, **arguments)
        path = locate(name, ctx.obj, report, weights=False)
        rack = draft_rack(config, read_config(path, ctx.obj), ctx.obj)
    require_device(rack)
    only = kernel or []
    if tune is not None:
        require_gpu(rack)
    require_fitting(rack, only)
    formats = frozenset[str]().union(*rack.draft.formats().values())
    counts, timed = numbers_of(tokens, "tokens"), [time_linear, time_experts]
    with torch.inference_mode():
        if tune is not None:
            rack, name = tune_experts(
                rack, ctx.obj, tune, counts, only, tune_seconds, say=typer.echo
            )
            only, timed = [name], [time_experts]
        ceilings = measure_ceilings(rack.device, rack.dtype, formats)
        rows = [row for time in timed for row in time(rack, ctx.obj, ceilings, counts, only)]
    record = {
        "engine": describe_rack(rack),
        "ceilings": describe_ceilings(ceilings),
        "kernels": rows,
    }
    print_table(f"{model}: kernels", COLUMNS, rows)
    print_ceilings(ceilings)
    write_record(json_file, record)
