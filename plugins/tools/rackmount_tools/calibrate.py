"""`rackmount calibrate`: a checkpoint with scales for an FP8 KV cache, found on data, and rounded
weights, as compressed-tensors spells them, so that other engines load it too; with `key_maps` those
alone that map keys as `transform_config` says.

`kv_scales` has how scales of the cache are found; static scales of inputs are the largest magnitude
seen / 448, the largest number of float8_e4m3fn, or / 127 of int8. Weights are rounded to nearest,
each by itself.
"""

from pathlib import Path
from typing import Annotated

import typer

from rackmount import EngineConfig, Model, progress
from rackmount_tools.calibration import (
    DEFAULT_GROUP_SIZE,
    Calibrated,
    Calibration,
    write_calibrated,
)
from rackmount_tools.compressed_config import GROUPED, ROUNDINGS
from rackmount_tools.eval_perplexity import Context, MaxTokens, read_text
from rackmount_tools.observed import Observed

FEW_TOKENS = 1000
"""Half of SmolLM2's layers reach 93 % of the largest value of 5990 tokens in 1024 of them, 82 % in
128, 46 % in 3."""
KV_OWNERS = {"tensor": "layer", "head": "KV head"}


def calibrate(
    ctx: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder to write; new or empty.", show_default=False)],
    data: Annotated[Path | None, typer.Option(help="File of text in UTF-8.")] = None,
    kv_scales: Annotated[
        str, typer.Option(help="A scale for each layer (tensor), KV head (head), or none.")
    ] = "tensor",
    key_maps: Annotated[
        bool, typer.Option("--key-maps", help="Map keys so that rounding them costs less.")
    ] = False,
    weights: Annotated[str, typer.Option(help=f"{', '.join(ROUNDINGS)}, or none.")] = "none",
    activations: Annotated[
        str, typer.Option(help="With rounded weights: dynamic, or static scales of inputs.")
    ] = "dynamic",
    group_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Columns with one scale, of {' and '.join(GROUPED)}.",
            show_default=str(DEFAULT_GROUP_SIZE),
        ),
    ] = None,
    context: Context = None,
    max_tokens: MaxTokens = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the model while it runs.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
) -> None:
    """Write MODEL with scales of its KV cache, found on a text, and weights rounded on demand."""
    asked = Calibration(
        kv_scales=kv_scales,
        key_maps=key_maps,
        weights=weights,
        activations=activations,
        group_size=group_size,
    )
    config = EngineConfig.create(
        model=model,
        max_model_len=context,
        device=device,
        dtype=dtype,
        kv_cache_dtype="model",
        trust_remote_code=trust_remote_code,
    )
    with progress() as report:
        done = write_calibrated(
            config,
            out,
            asked,
            ctx.obj,
            text=read_text(data) if data else None,
            max_tokens=max_tokens,
            report=report,
        )
    for line in (*sight(done.seen), *summary(asked, done, out)):
        typer.echo(line, err=line.startswith("WARNING"))


def sight(seen: Observed) -> list[str]:
    """What scales are of, and where the largest keys and values were."""
    lines = []
    if seen.num_tokens:
        windows = "window" if seen.num_sequences == 1 else "windows"
        lines.append(f"scales are of {seen.num_tokens} tokens in {seen.num_sequences} {windows}")
        if seen.num_tokens < FEW_TOKENS:
            lines.append(
                "WARNING: these are few, and other text may reach further and be cut off; give "
                f"{FEW_TOKENS} tokens or more"
            )
    keys = "mapped keys" if seen.maps else "keys"
    for what, table in ((keys, seen.keys), ("values", seen.values)):
        if table:
            reached = {index: each.largest.amax().item() for index, each in table.items()}
            layer = max(reached, key=lambda index: reached[index])
            lines.append(
                f"{what} reach {min(reached.values()):.4g} to {reached[layer]:.4g} "
                f"(in layer {layer} of {len(reached)})"
            )
    return lines


def summary(asked: Calibration, done: Calibrated, out: Path) -> list[str]:
    """What was written, and where."""
    lines = []
    if done.seen.maps_left_out:
        lines.append("the model's maps of keys are left out; --key-maps finds new ones")
    if asked.kv_scales != "none":
        mapped = ", of mapped keys" if asked.key_maps else ""
        lines.append(f"KV scales: one for each {KV_OWNERS[asked.kv_scales]}{mapped}")
    rounded = "none rounded"
    if asked.weights != "none":
        groups = f" in groups of {asked.num_columns}" if asked.weights in GROUPED else ""
        inputs = ", inputs with static scales" if asked.static else ""
        rounded = f"{done.num_rounded} rounded to {asked.weights}{groups}{inputs}"
    lines.append(f"weights: {rounded}")
    num_tensors, mib = done.written.num_tensors, done.written.num_bytes / 2**20
    kinds = [f"{n} {str(dtype).removeprefix('torch.')}" for dtype, n in num_tensors.most_common()]
    held = f"{num_tensors.total()} tensors, {mib:,.1f} MiB ({', '.join(kinds)})"
    return [*lines, f"written to {out}: {held}"]
