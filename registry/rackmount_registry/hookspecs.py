"""Every hook of the contract. One hook per kind; each returns a list of that kind's descriptors.

Hooks are called once, when plugins are loaded, in the process that builds the engine. They must not
import anything
heavy: a descriptor names its part as "package.module:attribute", which is imported when the part is
    chosen.
"""

from rackmount_registry import hookspec
from rackmount_registry.descriptors import (
    Architecture,
    AttentionBackend,
    CheckpointReader,
    CliCommand,
    Executor,
    ExpertKernel,
    GrammarBackend,
    LinearKernel,
    ModelSource,
    OpSet,
    QuantizationScheme,
    TokenDispatcher,
)


@hookspec
def architectures() -> list[Architecture]:  # type: ignore[empty-body]  # a specification has no body
    """Model architectures, found by config.json's `architectures`."""


@hookspec
def attention_backends() -> list[AttentionBackend]:  # type: ignore[empty-body]
    """Paged attention over the layouts they name."""


@hookspec
def op_sets() -> list[OpSet]:  # type: ignore[empty-body]
    """Norms, rotary, activations, routing, ...: each operation is resolved by itself."""


@hookspec
def linear_kernels() -> list[LinearKernel]:  # type: ignore[empty-body]
    """GEMMs over named weight formats."""


@hookspec
def quantization_schemes() -> list[QuantizationScheme]:  # type: ignore[empty-body]
    """Readers of `quantization_config`."""


@hookspec
def expert_kernels() -> list[ExpertKernel]:  # type: ignore[empty-body]
    """Fused mixture-of-experts MLPs."""


@hookspec
def token_dispatchers() -> list[TokenDispatcher]:  # type: ignore[empty-body]
    """Dispatch and combine of tokens around the experts."""


@hookspec
def checkpoint_readers() -> list[CheckpointReader]:  # type: ignore[empty-body]
    """File formats of checkpoints."""


@hookspec
def model_sources() -> list[ModelSource]:  # type: ignore[empty-body]
    """Aliases, and ways to fetch a model."""


@hookspec
def executors() -> list[Executor]:  # type: ignore[empty-body]
    """Ways to run ranks."""


@hookspec
def grammar_backends() -> list[GrammarBackend]:  # type: ignore[empty-body]
    """Compilers of grammars that answers keep to."""


@hookspec
def cli_commands() -> list[CliCommand]:  # type: ignore[empty-body]
    """Commands of the `rackmount` program."""
