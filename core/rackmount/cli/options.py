"""Options that several commands share, each declared once."""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any

import typer

Model = Annotated[
    str,
    typer.Argument(
        help="An alias, a hub id (owner/name), or a path to a folder or file.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def _engine(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text)


def _sampling(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Arguments of `rackmount.Engine`; `EngineConfig` says what they mean."""

    backend: Annotated[str, _engine("Attention backend.", "--attention-backend")] = "auto"
    dtype: Annotated[str, _engine("Of weights and activations.")] = "auto"
    device: Annotated[str, _engine("cpu, cuda or cuda:N.")] = "auto"
    max_model_len: Annotated[int | None, _engine("Longest prompt and output together.")] = None
    num_kv_blocks: Annotated[int | None, _engine("Blocks of the KV pool.")] = None
    kv_cache_memory_bytes: Annotated[int | None, _engine("Memory of the KV pool.")] = None
    gpu_memory_utilization: Annotated[float, _engine("Share of a GPU's memory to take.")] = 0.9
    kv_cache_dtype: Annotated[str, _engine("auto, model or fp8.")] = "auto"
    kv_scale: Annotated[float | None, _engine("Of an FP8 KV cache without scales.")] = None
    block_size: Annotated[int | None, _engine("Tokens per KV block.")] = None
    max_num_seqs: Annotated[int, _engine("Most requests in one step.")] = 256
    max_num_batched_tokens: Annotated[int, _engine("Token budget of one step.")] = 2048
    long_prefill_token_threshold: Annotated[
        int, _engine("Most tokens of one prompt in a step; 0 leaves that to the budget.")
    ] = 0
    scheduling_policy: Annotated[str, _engine("fcfs or priority.")] = "fcfs"
    enable_prefix_caching: Annotated[bool, _engine("Reuse the KV of shared prefixes.")] = True
    enable_mixed_steps: Annotated[
        bool | None,
        _engine("Compute prompts beside tokens that are decoded; by default in servers alone."),
    ] = None
    enforce_eager: Annotated[bool, _engine("Capture no CUDA graphs.", "--enforce-eager")] = False
    max_graph_tokens: Annotated[
        int | None,
        _engine(
            "Most tokens of a step with prompts that is a CUDA graph; by the model if not given."
        ),
    ] = None
    async_scheduling: Annotated[
        bool | None, _engine("Schedule a step ahead; on GPUs by default.")
    ] = None
    load_format: Annotated[str, _engine("auto, or dummy for random weights.")] = "auto"
    quantization: Annotated[str | None, _engine("Scheme; fp8 rounds a plain checkpoint.")] = None
    linear_kernel: Annotated[str, _engine("Kernel of linear layers.")] = "auto"
    expert_kernel: Annotated[str, _engine("Kernel of experts.")] = "auto"
    token_dispatcher: Annotated[str, _engine("Dispatch of tokens to experts.")] = "auto"
    op_set: Annotated[str, _engine("Norms, rotary, activations, ...")] = "auto"
    auto_plugins: Annotated[
        list[str] | None,
        _engine("Distribution outside the project that auto may choose from.", "--auto-plugin"),
    ] = None
    plugin_config: Annotated[
        list[str] | None, _engine("Option of a part, kind.name.key=value; repeatable.")
    ] = None
    trust_remote_code: Annotated[
        bool, _engine("Run code that comes with the model.", "--trust-remote-code")
    ] = False
    tp: Annotated[int, _engine("Tensor-parallel ranks.", "--tp", "--tensor-parallel-size")] = 1
    dp: Annotated[int, _engine("Data-parallel ranks; only 1.", "--dp", "--data-parallel-size")] = 1
    ep: Annotated[int, _engine("Expert-parallel ranks; only 1 at present.")] = 1
    grammar_backend: Annotated[str, _engine("Structured output.")] = "auto"
    executor: Annotated[str, _engine("How ranks run.")] = "auto"

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments."""
        listed = {
            name: tuple(getattr(self, name) or ()) for name in ("auto_plugins", "plugin_config")
        }
        return asdict(self) | listed


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Fields of `rackmount.SamplingParams`; None leaves a field to the model's recommendation."""

    temperature: Annotated[float | None, _sampling("0 is greedy.")] = None
    top_p: Annotated[float | None, _sampling("Least mass of the likeliest tokens.")] = None
    top_k: Annotated[int | None, _sampling("Number of the likeliest tokens.")] = None
    min_p: Annotated[float | None, _sampling("Least share of the likeliest token's.")] = None
    max_tokens: Annotated[int | None, _sampling("Longest answer.")] = None
    seed: Annotated[int | None, _sampling("Of the random numbers.")] = None
    stop: Annotated[list[str] | None, _sampling("Text that ends the answer; repeatable.")] = None

    def given(self) -> dict[str, Any]:
        """What was asked for."""
        return {name: value for name, value in asdict(self).items() if value not in (None, [])}


def unfold(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer can read it: a parameter whose type is a dataclass becomes its fields."""
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {
        it.name: it.annotation for it in parameters if is_dataclass(it.annotation)
    }

    @wraps(command)
    def unfolded(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    plain: list[inspect.Parameter] = []
    for it in parameters:
        inner = groups.get(it.name)
        plain += inspect.signature(inner).parameters.values() if inner else [it]
    plain = [it.replace(kind=inspect.Parameter.KEYWORD_ONLY) for it in plain]
    unfolded.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]  # PEP 362
    return unfolded
