"""What this plugin offers: descriptors only."""

from rackmount_registry import hookimpl
from rackmount_registry.descriptors import Architecture, ModelSource


@hookimpl
def architectures() -> list[Architecture]:
    return [
        Architecture(
            name="llama",
            factory="rackmount_models.llama:LlamaForCausalLM",
            claims=("LlamaForCausalLM",),
            summary="Llama 2 and 3, SmolLM2 and their kin",
        ),
        Architecture(
            name="mistral",
            factory="rackmount_models.llama:MistralForCausalLM",
            claims=("MistralForCausalLM",),
            summary="Mistral 7B: Llama with a sliding window",
        ),
        Architecture(
            name="qwen2",
            factory="rackmount_models.llama:Qwen2ForCausalLM",
            claims=("Qwen2ForCausalLM",),
            summary="Qwen2 and Qwen2.5: Llama with biases on q, k and v",
        ),
        Architecture(
            name="qwen3",
            factory="rackmount_models.qwen3:Qwen3ForCausalLM",
            claims=("Qwen3ForCausalLM",),
            summary="Qwen3 dense: norms on query and key heads",
        ),
        Architecture(
            name="qwen3-moe",
            factory="rackmount_models.qwen3_moe:Qwen3MoeForCausalLM",
            claims=("Qwen3MoeForCausalLM",),
            summary="Qwen3 mixture of experts",
        ),
        Architecture(
            name="mixtral",
            factory="rackmount_models.mixtral:MixtralForCausalLM",
            claims=("MixtralForCausalLM",),
            summary="Mixtral: Mistral with experts on every layer",
        ),
    ]


@hookimpl
def model_sources() -> list[ModelSource]:
    return [
        ModelSource(
            name="aliases",
            summary="short names of well-known models on the hub",
            aliases={
                "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
                "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
                "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
                "qwen3-0.6b": "Qwen/Qwen3-0.6B",
                "qwen3-8b": "Qwen/Qwen3-8B",
                "qwen3-32b": "Qwen/Qwen3-32B",
                "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
                "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
                "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
                "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
                "deepseek-v3": "deepseek-ai/DeepSeek-V3",
                "deepseek-r1": "deepseek-ai/DeepSeek-R1",
            },
        )
    ]
