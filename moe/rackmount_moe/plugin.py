"""What this distribution offers: the reference expert kernel and the dispatcher without
communication."""

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import ExpertKernel, TokenDispatcher

DTYPES = ("float32", "bfloat16", "float16", "float64")


@hookimpl
def expert_kernels() -> list[ExpertKernel]:
    return [
        ExpertKernel(
            name="torch",
            factory="rackmount_moe.torch_experts:TorchExperts",
            summary="one expert after another in plain torch, any weight format",
            band="reference",
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES, layouts=("contiguous",)),),
        )
    ]


@hookimpl
def token_dispatchers() -> list[TokenDispatcher]:
    return [
        TokenDispatcher(
            name="local",
            factory="rackmount_moe.local:LocalDispatcher",
            summary="every rank computes its own experts for all tokens; outputs are summed",
            band="reference",
            layout="contiguous",
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES),),
        )
    ]
