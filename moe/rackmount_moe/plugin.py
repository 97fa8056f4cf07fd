"""What this distribution offers: the reference expert kernel, fused ones in Triton, a router in
Triton, and the dispatcher without communication."""

from rackmount_registry import hookimpl
from rackmount_registry.capabilities import Cell
from rackmount_registry.descriptors import ExpertKernel, OpSet, Requirement, TokenDispatcher

DTYPES = ("float32", "bfloat16", "float16", "float64")
TRITON = (Requirement(module="triton", install="pip install 'triton>=3.6'"),)


@hookimpl
def expert_kernels() -> list[ExpertKernel]:
    return [
        ExpertKernel(
            name="torch",
            factory="rackmount_moe.torch_experts:TorchExperts",
            summary="one expert after another in plain torch, any weight format",
            band="reference",
            cells=(
                Cell(
                    devices=("cpu", "cuda"),
                    dtypes=DTYPES,
                    layouts=("contiguous", "batched", "batched_fp8"),
                ),
            ),
        ),
        ExpertKernel(
            name="triton",
            factory="rackmount_moe.triton_experts.experts:TritonExperts",
            summary="both products fused with what is around them; weights stay packed",
            requires=TRITON,
            options="rackmount_moe.options:TritonExpertsOptions",
            band="portable",
            graph_safe=True,
            cells=(
                Cell(
                    devices=("cuda",),
                    compute_capability=(8, 0),
                    dtypes=("bfloat16", "float16"),
                    weight_formats=(
                        "dense",
                        "fp8_rows",
                        "fp8_blocks",
                        "int4_groups",
                        "int8_groups",
                    ),
                    layouts=("contiguous",),
                ),
            ),
        ),
    ]


@hookimpl
def op_sets() -> list[OpSet]:
    return [
        OpSet(
            name="triton-router",
            factory="rackmount_moe.triton_router.router:TRITON_ROUTER",
            summary="logits and choice of experts in one kernel for few tokens, in two for many; "
            "with the norm before them for very few",
            requires=TRITON,
            band="portable",
            graph_safe=True,
            ops=("gate", "norm_gate"),
            cells=(
                Cell(
                    devices=("cuda",),
                    compute_capability=(8, 0),
                    dtypes=("float32", "bfloat16", "float16"),
                ),
            ),
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
            graph_safe=True,
            layout="contiguous",
            cells=(Cell(devices=("cpu", "cuda"), dtypes=DTYPES),),
        )
    ]
