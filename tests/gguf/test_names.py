import numpy as np
import pytest

from rackmount_gguf.names import hugging_face_name, num_paired_heads, rope_order

CONFIG = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.attn_k.bias", "model.layers.0.self_attn.k_proj.bias"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
        ("blk.3.token_embd.weight", None),
        ("attn_q.weight", None),
        ("blk.0.ffn_gate_exps.weight", None),
        ("blk.0.attn_q.scale", None),
    ],
)
def test_names_become_those_of_hugging_face(given: str, name: str | None) -> None:
    assert hugging_face_name(given) == name


def test_the_rows_of_a_head_come_apart_into_first_and_second_of_each_pair() -> None:
    assert rope_order(8, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert rope_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_row_order_undoes_that_of_the_converter() -> None:
    rows = np.arange(24).reshape(24, 1)
    stored = rows.reshape(3, 2, 4, 1).swapaxes(1, 2).reshape(24, 1)
    assert (stored[rope_order(24, 3)] == rows).all()


def test_only_query_and_key_of_llama_files_are_in_pairs() -> None:
    assert num_paired_heads("model.layers.0.self_attn.q_proj.weight", CONFIG) == 4
    assert num_paired_heads("model.layers.0.self_attn.k_proj.bias", CONFIG) == 2
    assert num_paired_heads("model.layers.0.self_attn.v_proj.weight", CONFIG) is None
    qwen = {**CONFIG, "model_type": "qwen3"}
    assert num_paired_heads("model.layers.0.self_attn.q_proj.weight", qwen) is None
