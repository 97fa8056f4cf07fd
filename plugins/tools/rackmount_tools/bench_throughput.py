"""`rackmount bench throughput`: output tokens per second of many requests at once.

Two runs, the second of which counts, with other ids of the same lengths, after a short warm-up. The
time is from handing over all prompts to the last token.
"""

from typing import Annotated, Any

import typer

from rackmount import Engine, EngineOptions, SamplingParams, unfold
from rackmount_registry.errors import ConfigError
from rackmount_tools.loads import NANO_LONGEST, Workload, nano, uniform
from rackmount_tools.record import (
    JsonFile,
    describe_ceilings,
    describe_engine,
    print_ceilings,
    print_table,
    write_record,
)
from rackmount_tools.runs import greedy, measured_floors, open_engine, timed
from rackmount_tools.shapes import ModelOrShape

COLUMNS = {
    "num_prompts": "prompts",
    "prompt_tokens": "tokens in",
    "output_tokens": "tokens out",
    "seconds": "s",
    "output_tokens_per_s": "out tok/s",
    "total_tokens_per_s": "in + out tok/s",
    "floor_tokens_per_s": "at most",
    "share": "reached",
}
WORKLOADS = ("nano", "uniform")
UNIFORM = {"num_prompts": 256, "input_len": 512, "output_len": 256}
"""Of that workload, where nobody says otherwise."""


def _uniform(name: str) -> Any:
    return typer.Option(min=1, help="Of the uniform workload.", show_default=str(UNIFORM[name]))


def uniform_sizes(workload: str, **asked: int | None) -> dict[str, int]:
    """`asked` as `UNIFORM` has it.

    Raises:
        ConfigError: some are asked for, and the workload has its own.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if given and workload != "uniform":
        options = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"{options}: workload={workload!r} has its own prompts and lengths; leave them to it, "
            "or choose workload='uniform'"
        )
    return UNIFORM | given


def measure(engine: Engine, load: Workload, temperature: float) -> float:
    """Seconds of the second run."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in load.output_lens
    ]
    timed(engine, [load.prompts[0][:16]], greedy(min(16, load.output_lens[0])))
    timed(engine, load.prompts, params)
    return timed(engine, load.fresh(seed=1).prompts, params)


def figures_of(load: Workload, seconds: float, floor: float) -> dict[str, Any]:
    return {
        "num_prompts": len(load.prompts),
        "prompt_tokens": load.num_prompt_tokens,
        "output_tokens": load.num_output_tokens,
        "seconds": seconds,
        "output_tokens_per_s": load.num_output_tokens / seconds,
        "total_tokens_per_s": (load.num_prompt_tokens + load.num_output_tokens) / seconds,
        "floor_seconds": floor,
        "floor_tokens_per_s": load.num_output_tokens / floor,
        "share": floor / seconds,
    }


@unfold
def bench(
    ctx: typer.Context,
    model: ModelOrShape,
    workload: Annotated[
        str, typer.Option(help="nano (as in nano-vllm's README), or uniform.")
    ] = "uniform",
    num_prompts: Annotated[int | None, _uniform("num_prompts")] = None,
    input_len: Annotated[int | None, _uniform("input_len")] = None,
    output_len: Annotated[int | None, _uniform("output_len")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.6,
    json_file: JsonFile = None,
    *,
    engine: EngineOptions,
) -> None:
    """Output tokens per second of MODEL, beside the most that this device could give."""
    if workload not in WORKLOADS:
        raise ConfigError(f"workload={workload!r} must be one of {', '.join(WORKLOADS)}")
    sizes = uniform_sizes(
        workload, num_prompts=num_prompts, input_len=input_len, output_len=output_len
    )
    because: dict[str, object] = {"workload": workload}
    if workload == "nano":
        longest = NANO_LONGEST
    else:
        longest = sizes["input_len"] + sizes["output_len"]
        because |= sizes
    with open_engine(
        model, engine.arguments(), ctx.obj, longest=longest, because=because
    ) as mounted:
        vocab_size = mounted.rack.draft.vocab_size
        load = nano(vocab_size) if workload == "nano" else uniform(**sizes, vocab_size=vocab_size)
        floors = measured_floors(mounted)
        seconds = measure(mounted, load, temperature)
        floor = floors.workload(load, mounted.config.max_num_seqs)
        figures = figures_of(load, seconds, floor)
        record = {
            "engine": describe_engine(mounted),
            "ceilings": describe_ceilings(floors.ceilings),
            "workload": workload,
            "temperature": temperature,
            "preemptions": mounted.stats.total_preemptions,
            **figures,
        }
    print_table(f"{model}: {workload}, temperature {temperature}", COLUMNS, [figures])
    print_ceilings(floors.ceilings)
    write_record(json_file, record)
