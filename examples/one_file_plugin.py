"""A whole plugin in one file: an attention backend by its definition, then a model that runs on it.

As a distribution of its own, this file would be `acme_naive.py`, beside this pyproject.toml:

    [build-system]
    requires = ["hatchling"]
    build-backend = "hatchling.build"
    [project]
    name = "acme-naive"
    version = "0.1"
    dependencies = ["rackmount-registry>=1.0,<2"]
    [project.entry-points.rackmount]
    naive = "acme_naive"
    [tool.hatch.build.targets.wheel]
    include = ["acme_naive.py"]

Once installed, `--attention-backend naive` asks for it; "auto" looks at parts from outside the
project only with `--auto-plugin acme-naive`.

Usage: python examples/one_file_plugin.py [MODEL]
"""

import sys

import torch
from torch import Tensor

from rackmount_registry import hookimpl
from rackmount_registry.attention import AttentionBatch, AttentionContext, AttentionParams, KVScales
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import AttentionBackend
from rackmount_registry.plugins import PluginManager
from rackmount_registry.step import attend_causally


@hookimpl
def attention_backends() -> list[AttentionBackend]:
    """What the plugin offers. A real one names its factory in a module that is imported only when
    chosen."""
    return [
        AttentionBackend(
            name="naive",
            factory=f"{__name__}:NaiveAttention",
            band="reference",
            cells=(
                Cell(devices=("cpu",), dtypes=("float32",), kv_dtypes=("float32",)),
                Cell(devices=("cpu",), dtypes=("float64",), kv_dtypes=("float64",)),
            ),
            cache_layout="slots",
            preferred_block_sizes=(16,),
        )
    ]


class NaiveAttention:
    """One request at a time: gather its slots, attend."""

    def __init__(self, context: AttentionContext) -> None:
        self.block_size = context.block_size

    def plan(self, batch: AttentionBatch) -> tuple[AttentionBatch, list[Tensor]]:
        slots = []
        for row, length in zip(batch.rows, batch.seq_lens, strict=True):
            blocks = torch.from_numpy(
                batch.block_table[row, : -(-length // self.block_size)]
            ).long()
            offsets = torch.arange(self.block_size)
            slots.append((blocks[:, None] * self.block_size + offsets).flatten()[:length])
        return batch, slots

    def run(
        self,
        q: Tensor,
        cache: Tensor,
        plan: tuple,
        params: AttentionParams,
        scales: KVScales | None,
    ) -> Tensor:
        batch, slots = plan
        starts = batch.query_start_loc
        return torch.cat(
            [
                attend_causally(q[starts[i] : starts[i + 1]], *cache[:, slots[i]], params)
                for i in range(len(slots))
            ]
        )


def main(model: str) -> None:
    """Mounts this very file beside the installed plugins and asks the model."""
    from rackmount import Engine, SamplingParams  # the plugin itself needs the registry alone

    manager = PluginManager.discover() + PluginManager.from_modules(
        {"acme-naive": sys.modules[__name__]}
    )
    with Engine(model, backend="naive", device="cpu", manager=manager) as engine:
        print(engine.rack.attention.why)
        params = SamplingParams(temperature=0, max_tokens=8)
        print(repr(engine.generate("The capital of France is", params)[0].text))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
