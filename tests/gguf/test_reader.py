from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM

from rackmount_gguf.reader import open_checkpoint
from rackmount_registry.errors import CheckpointError

GgufFile = Callable[..., Path]
Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K

V_IN_FILE, V = "blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"
Q_IN_FILE, Q = "blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def nibbles(raw: bytes) -> list[int]:
    """Low nibbles of all bytes, then high ones."""
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def decode_q8_0(block: bytes) -> list[float]:
    """Scale d, then 32 signed bytes."""
    return [half(block, 0) * int(q) for q in np.frombuffer(block[2:], np.int8)]


def decode_q4_0(block: bytes) -> list[float]:
    """Scale d, then 32 nibbles around 8."""
    return [half(block, 0) * (q - 8) for q in nibbles(block[2:])]


def decode_q4_1(block: bytes) -> list[float]:
    """Scale d, minimum m, then 32 nibbles."""
    return [half(block, 0) * q + half(block, 2) for q in nibbles(block[4:])]


def decode_q4_k(block: bytes) -> list[float]:
    """d, dmin, 8 pairs of 6-bit scale and minimum in 12 bytes, then 256 nibbles, 64 to a chunk."""
    d, dmin, packed, quants = half(block, 0), half(block, 2), block[4:16], block[16:]
    values = []
    for part in range(8):
        if part < 4:
            scale, minimum = packed[part] & 63, packed[part + 4] & 63
        else:
            scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4
            minimum = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4
        chunk = nibbles(quants[part // 2 * 32 : part // 2 * 32 + 32])
        for q in chunk[part % 2 * 32 : part % 2 * 32 + 32]:
            values.append(d * scale * q - dmin * minimum)
    return values


def decode_q6_k(block: bytes) -> list[float]:
    """256 times 4 low bits, 256 times 2 high bits, 16 signed scales, d."""
    low, high, d = block[:128], block[128:192], half(block, 208)
    scales = np.frombuffer(block[192:208], np.int8)
    values = []
    for i in range(256):
        part, j = divmod(i, 128)
        row, lane = divmod(j, 32)
        four = low[part * 64 + (row % 2) * 32 + lane] >> (4 * (row // 2)) & 15
        two = high[part * 32 + lane] >> (2 * row) & 3
        values.append(d * int(scales[i // 16]) * ((four | two << 4) - 32))
    return values


DECODERS = {
    Q8_0: (decode_q8_0, (0,)),
    Q4_0: (decode_q4_0, (0,)),
    Q4_1: (decode_q4_1, (0, 2)),
    Q4_K: (decode_q4_k, (0, 2)),
    Q6_K: (decode_q6_k, (208,)),
}
"""Type -> its definition block by block, and where half-precision numbers stand in a block."""


def random_blocks(kind: GGMLQuantizationType, rows: int, blocks: int) -> np.ndarray:
    """uint8 [rows, bytes]: random bits, but finite scales."""
    generator = np.random.default_rng(int(kind))
    data = generator.integers(0, 256, (rows, blocks, GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in DECODERS[kind][1]:
        scales = generator.normal(size=(rows, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_blocks_are_decoded_as_their_format_says(
    gguf_file: GgufFile, kind: GGMLQuantizationType
) -> None:
    decode = DECODERS[kind][0]
    raw = random_blocks(kind, rows=5, blocks=3)
    checkpoint = open_checkpoint(gguf_file({V_IN_FILE: (raw, kind)}))
    expected = [
        [value for block in row.reshape(3, -1) for value in decode(block.tobytes())] for row in raw
    ]
    assert checkpoint.tensors[V].dtype == kind.name
    assert checkpoint.tensors[V].shape == (5, 3 * GGML_QUANT_SIZES[kind][0])
    read = checkpoint.read(V)
    assert read.dtype == torch.float32
    torch.testing.assert_close(read, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_plain_tensors_come_as_they_are_stored(gguf_file: GgufFile, dtype: torch.dtype) -> None:
    values = torch.randn(3, 64).to(dtype)
    raw: Any = values.numpy() if dtype != torch.bfloat16 else None
    if raw is None:
        raw = (values.view(torch.uint8).numpy(), GGMLQuantizationType.BF16)
    checkpoint = open_checkpoint(gguf_file({V_IN_FILE: raw}))
    assert checkpoint.tensors[V].dtype == str(dtype).removeprefix("torch.")
    assert checkpoint.tensors[V].file.endswith("tiny.gguf")
    assert torch.equal(checkpoint.read(V), values)
    assert torch.equal(checkpoint.read(V, (slice(1, 3), slice(5, 9))), values[1:3, 5:9])


@pytest.mark.parametrize(
    "index",
    [
        (slice(2, 5),),
        (slice(0, 0),),
        (slice(None), slice(7, 70)),
        (slice(1, 4), slice(32, 64)),
        (slice(None, None, 2),),
    ],
    ids=str,
)
def test_a_part_is_the_same_as_that_part_of_the_whole(
    gguf_file: GgufFile, index: tuple[slice, ...]
) -> None:
    raw = random_blocks(Q4_1, rows=6, blocks=3)
    checkpoint = open_checkpoint(gguf_file({V_IN_FILE: (raw, Q4_1)}))
    part = checkpoint.read(V, index)
    assert torch.equal(part, checkpoint.read(V)[index])
    assert part.is_contiguous()


def test_only_the_rows_asked_for_are_dequantized(
    gguf_file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = random_blocks(Q8_0, rows=64, blocks=2)
    checkpoint = open_checkpoint(gguf_file({Q_IN_FILE: (raw, Q8_0), V_IN_FILE: (raw, Q8_0)}))
    given = []

    def dequantize(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        given.append(data.shape)
        return np.zeros((data.shape[0], 64), np.float32)

    monkeypatch.setattr("rackmount_gguf.reader.dequantize", dequantize)
    for name in (Q, V):
        checkpoint.read(name, (slice(3, 8),))
    assert given == [(5, 68), (5, 68)]


def test_what_was_read_stays_after_the_file_is_closed(gguf_file: GgufFile) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    path = gguf_file({V_IN_FILE: values})
    checkpoint = open_checkpoint(path)
    read = checkpoint.read(V)
    checkpoint.close()
    path.write_bytes(b"")
    assert torch.equal(read, torch.from_numpy(values))
    with pytest.raises(ValueError, match=r"tiny\.gguf is closed"):
        checkpoint.read(V)


def test_a_tensor_without_a_place_is_refused(gguf_file: GgufFile) -> None:
    path = gguf_file({"blk.0.ssm_in.weight": np.zeros((2, 4), np.float32)})
    with pytest.raises(
        CheckpointError, match=r"tiny\.gguf: tensor 'blk\.0\.ssm_in.*no place.*llama"
    ):
        open_checkpoint(path)


def test_query_rows_that_do_not_pair_up_in_heads_are_refused(gguf_file: GgufFile) -> None:
    path = gguf_file({Q_IN_FILE: np.zeros((12, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"12 rows of tensor 'blk\.0\.attn_q.*not 4 heads"):
        open_checkpoint(path)


PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def as_converted(state: dict[str, torch.Tensor], architecture: str, tied: bool) -> dict[str, Any]:
    """A model's weights as llama.cpp's converter names and orders them."""
    converted = {}
    for name, tensor in state.items():
        stem, leaf = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            given = f"blk.{layer}.{PARTS[part]}.{leaf}"
        else:
            given = {
                "model.embed_tokens": "token_embd.weight",
                "model.norm": "output_norm.weight",
                "lm_head": "output.weight",
            }[stem]
        if given == "output.weight" and tied:
            continue
        heads = {"attn_q": 4, "attn_k": 2}.get(given.split(".")[-2])
        if architecture == "llama" and heads:
            pairs = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        converted[given] = tensor.contiguous().numpy()
    return converted


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
        ("llama", {"tie_word_embeddings": False, "head_dim": 16, "attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
        ("qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    ],
)
def test_a_converted_model_computes_what_the_original_does(
    gguf_file: GgufFile, architecture: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "initializer_range": 0.3,
    }
    config = AutoConfig.for_model(architecture, **sizes, **options)
    original = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in original.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    tensors = as_converted(original.state_dict(), architecture, options["tie_word_embeddings"])
    lengths = dict.fromkeys(("key_length", "value_length"), options["head_dim"])
    metadata = {f"{architecture}.attention.{key}": value for key, value in lengths.items()}
    checkpoint = open_checkpoint(gguf_file(tensors, metadata, architecture=architecture))

    plain = {k: v for k, v in checkpoint.config.items() if k not in ("model_type", "torch_dtype")}
    copy = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **plain)).eval()
    state = {name: checkpoint.read(name) for name in checkpoint.tensors}
    if options["tie_word_embeddings"]:
        assert "lm_head.weight" not in state
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    copy.load_state_dict(state, strict=True)
    ids = torch.arange(8).repeat(5).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, original(ids).logits, rtol=0, atol=0)

    for name in (Q, Q.replace("q_proj", "k_proj")):
        whole = original.state_dict()[name]
        for rows in (slice(0, 16), slice(5, 21), slice(None, None, 3)):
            assert torch.equal(checkpoint.read(name, (rows, slice(2, 40))), whole[rows, 2:40])
