"""What plugins offer: frozen descriptors of plain values, one class per kind.

A descriptor is cheap to build and to read: dtypes are strings, the part itself is named by
`factory` as "package.module:attribute" and imported only once it is chosen.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rackmount_registry.capabilities import Cell, ExpertLayout

Band = Literal["reference", "portable", "vendor"]
"""How `auto` ranks parts before measured order: vendor before portable before reference."""

GrammarForm = Literal["json_schema", "json_object", "regex", "choice", "ebnf"]
"""How a grammar is given; see `rackmount_registry.grammar.GrammarSpec`."""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A module that a part needs beyond its plugin's hard dependencies."""

    module: str
    install: str
    """The command that brings it, printed when it is missing."""


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """Fields that every kind shares."""

    kind: ClassVar[str]
    """Singular noun: the flag, the config key and the word in error texts."""

    name: str
    factory: str
    summary: str = ""
    requires: tuple[Requirement, ...] = ()
    options: str | None = None
    """"package.module:Dataclass" of the part's options, a frozen dataclass of plain values."""


@dataclass(frozen=True, kw_only=True)
class ComputeDescriptor(Descriptor):
    """A part that `auto` may choose among others by capability."""

    band: Band
    order: int | None = 0
    """Measured order inside a band, lower first; None: only when asked for."""
    graph_safe: bool = False
    """Whether a decode step with it may be captured in a CUDA graph: it enqueues work alone, of a
    shape that follows from the shapes given, and never waits for the device."""
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class Architecture(Descriptor):
    """A model architecture. `factory` is the model class, built as `Model(config:
    ConfigReader)`."""

    kind: ClassVar[str] = "architecture"
    claims: tuple[str, ...]
    """Entries of config.json's `architectures` that this class implements."""


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(ComputeDescriptor):
    """Paged attention. `factory(context: rackmount_registry.attention.AttentionContext)` gives the
    backend."""

    kind: ClassVar[str] = "attention_backend"
    cache_layout: str
    """Name of the KV layout, one of `attention.CACHE_LAYOUTS`. Prefill and decode may be served by
    two backends that name the same one."""
    preferred_block_sizes: tuple[int, ...]
    """Best first; used where the engine leaves the block size open."""
    decode_order: int | None = 0
    """The same at decode, as `order` is for prefill."""
    metadata: Literal["host", "device"] = "host"
    """Where `plan` looks: at the host's arrays, or at the tables on the device."""
    jit: str = ""
    """"package.module:function" of what says why its kernels would have to be compiled first:
    `function(demand: Demand) -> str`, empty when those of all `demand.layers` are cached. It
    imports nothing heavy. `auto` waits for no compiler; who asks by name does."""


@dataclass(frozen=True, kw_only=True)
class OpSet(ComputeDescriptor):
    """Elementwise and sampling operations. `factory` is a namespace with a callable per name in
    `ops`."""

    kind: ClassVar[str] = "op_set"
    ops: tuple[str, ...]
    """The operations offered, a subset of `rackmount_registry.ops.OPS`; an op set may be
    partial."""


@dataclass(frozen=True, kw_only=True)
class LinearKernel(ComputeDescriptor):
    """A GEMM for named weight formats. `factory()` gives a
    `rackmount_registry.formats.LinearKernel`."""

    kind: ClassVar[str] = "linear_kernel"
    epilogues: tuple[str, ...] = ()
    """What it can do to the product before it is written, of `formats.EPILOGUES`."""
    prologues: tuple[str, ...] = ()
    """After which operations it can round its input in one pass, of `formats.PROLOGUES`."""


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme(Descriptor):
    """A checkpoint's quantization. `factory(config: ConfigReader | None)` gives a
    `formats.QuantizationScheme`."""

    kind: ClassVar[str] = "quantization_scheme"
    claims: tuple[str, ...]
    """Values of `quantization_config.quant_method` that this scheme reads."""
    online: bool = False
    """Whether it also rounds a plain checkpoint while it is loaded: its config is None then."""


@dataclass(frozen=True, kw_only=True)
class ExpertKernel(ComputeDescriptor):
    """A fused expert MLP. `factory()` gives a `rackmount_registry.experts.ExpertKernel`."""

    kind: ClassVar[str] = "expert_kernel"


@dataclass(frozen=True, kw_only=True)
class TokenDispatcher(ComputeDescriptor):
    """Moves tokens to their experts and back. `factory(context)` gives an
    `experts.TokenDispatcher`."""

    kind: ClassVar[str] = "token_dispatcher"
    layout: ExpertLayout
    """Of what it hands to the expert kernel."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReader(Descriptor):
    """Reads one file format. `factory(path: Path)` gives a
    `rackmount_registry.checkpoint.Checkpoint`."""

    kind: ClassVar[str] = "checkpoint_reader"
    patterns: tuple[str, ...]
    """File name patterns (fnmatch) by which a model path is recognized, e.g. ("*.safetensors",)."""


@dataclass(frozen=True, kw_only=True)
class ModelSource(Descriptor):
    """Turns a model's name into a local path by `factory`: `fetch(target: str, report: Report, *,
    weights: bool = True) -> Path`.

    Without `weights` the configuration is enough, and a source that can fetch it alone does. With
    an empty `factory` the source only names: its targets are looked up again among the other
    sources. `Report` is `rackmount_registry.checkpoint.Report`.
    """

    kind: ClassVar[str] = "model_source"
    factory: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    """Short name -> target, handed to `factory`."""
    serves: str | None = None
    """Regular expression (fullmatch) of names that it serves without an alias."""


@dataclass(frozen=True, kw_only=True)
class Executor(Descriptor):
    """A way to run ranks. `factory(launch: rackmount_registry.executor.Launch)` gives an
    `executor.Executor`."""

    kind: ClassVar[str] = "executor"
    max_ranks: int | None = None
    """None: as many as the devices allow."""
    order: int | None = None
    """Place among those that `auto` tries, lower first; None: only when asked for."""


@dataclass(frozen=True, kw_only=True)
class GrammarBackend(Descriptor):
    """Keeps answers to a grammar. `factory(context: rackmount_registry.grammar.GrammarContext)`
    gives a `grammar.GrammarBackend`."""

    kind: ClassVar[str] = "grammar_backend"
    forms: tuple[GrammarForm, ...]
    """Those that it compiles."""
    order: int | None = None
    """Place among those that `auto` tries, lower first; None: only when asked for."""


@dataclass(frozen=True, kw_only=True)
class CliCommand(Descriptor):
    """A command of the `rackmount` program. `factory` is a typer app or a function that typer can
    register."""

    kind: ClassVar[str] = "cli_command"
    group: str | None = None
    """Command group it stands in, e.g. "bench" for `rackmount bench NAME`."""
