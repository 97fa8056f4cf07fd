"""Floors, against figures worked out by hand."""

from pathlib import Path

import pytest
import torch
from tests.helpers.mounting import plugins

from rackmount.loading.safetensors_reader import read_json
from rackmount_registry.axes import Mesh, Solo
from rackmount_registry.config import ConfigReader
from rackmount_registry.descriptors import Architecture, QuantizationScheme
from rackmount_registry.errors import ConfigError
from rackmount_registry.mount import Draft, draft
from rackmount_tools.ceilings import Ceilings
from rackmount_tools.costs import AttentionLayer, ExpertLayer, ModelCosts, costs_of
from rackmount_tools.floors import Floors
from rackmount_tools.loads import Workload, nano
from rackmount_tools.shapes import QUANTIZATIONS, SHAPES, config_of, resolved

H200 = Ceilings(read=4.3e12, copy=4.2e12, matmul=791e12)


def drafted(shape: str, mesh: Mesh | None = None) -> Draft:
    """Of a shape, perhaps quantized."""
    name, plus, how = shape.partition("+")
    reader = ConfigReader(config_of(name, how) if plus else read_json(SHAPES[name]))
    architecture = plugins().claimed(Architecture, reader.architectures[0])
    stored = reader.sub("quantization_config")
    scheme = (
        plugins().claimed(QuantizationScheme, stored.quant_method).load()(stored)
        if stored is not None
        else None
    )
    return draft(architecture.load(), reader, dtype=torch.bfloat16, mesh=mesh, scheme=scheme)


def floors(shape: str) -> Floors:
    return Floors(costs_of(drafted(shape)), H200)


LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
NORMS = (2 * 32 + 1) * 4096


def test_llama_8b_reads_15_gigabytes_a_step_and_128_kibibytes_a_token() -> None:
    costs = costs_of(drafted("llama-8b"))
    head = 128256 * 4096
    assert costs.dense_params == {"dense": 32 * LAYER}
    assert costs.head_params == {"dense": head}
    assert costs.dense_bytes == 2 * (32 * LAYER + NORMS + head) == 15_009_849_344
    assert costs.weight_bytes(1) == costs.weight_bytes(256) == costs.dense_bytes
    assert costs.kv_bytes([1]) == 128 * 1024
    assert costs.kv_bytes([1000, 24]) == 1024 * 128 * 1024
    assert costs.flops(10, 3) == {"dense": 2 * (10 * 32 * LAYER + 3 * head)}
    assert costs.attention_flops(3) == 32 * 4 * 4096 * (1 + 2 + 3)


def test_a_tied_head_is_read_and_the_embedding_is_not() -> None:
    costs = costs_of(drafted("qwen3-0.6b"))
    layer = 1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    assert costs.dense_bytes == 2 * (28 * layer + norms + 151936 * 1024)


def test_of_experts_those_are_read_that_are_routed_to() -> None:
    costs = costs_of(drafted("qwen3-30b-a3b-16l"))
    expert = 3 * 2048 * 768
    assert len(costs.experts) == 16
    assert costs.experts[0] == ExpertLayer(
        count=128, top_k=8, bytes=128 * 2 * expert, params=128 * expert, format="dense"
    )
    assert costs.weight_bytes(1) - costs.dense_bytes == pytest.approx(16 * 8 * 2 * expert)
    assert costs.weight_bytes(10**6) == pytest.approx(costs.dense_bytes + 16 * 128 * 2 * expert)
    two = 128 * (1 - (15 / 16) ** 2)
    assert costs.experts[0].distinct(2) == pytest.approx(two)
    assert costs.experts[0].bytes_read(two) == pytest.approx(two * 2 * expert)
    assert costs.experts[0].params_per_token == 8 * expert


def test_a_rank_of_two_reads_half_of_what_is_split() -> None:
    whole = costs_of(drafted("llama-8b"))
    half = costs_of(drafted("llama-8b", Mesh.tensor_parallel(Solo(1, 2))))
    assert half.dense_bytes == (whole.dense_bytes - 2 * NORMS) / 2 + 2 * NORMS
    assert half.kv_bytes([7]) == whole.kv_bytes([7]) / 2


def test_a_window_bounds_what_a_token_sees() -> None:
    layers = (AttentionLayer(kv_bytes_per_token=10, query_size=3, window=4),)
    costs = ModelCosts(dense_bytes=0, dense_params={}, head_params={}, experts=(), attention=layers)
    assert costs.kv_bytes([2, 9]) == 10 * (2 + 4)
    assert costs.attention_flops(6) == 4 * 3 * (1 + 2 + 3 + 4 + 4 + 4)


@pytest.mark.parametrize(
    ("shape", "batch", "milliseconds"),
    [
        ("llama-8b", 1, 3.5),
        ("llama-8b", 16, 4.0),
        ("llama-8b", 64, 5.6),
        ("llama-8b", 256, 13.3),  # 4.9 of arithmetic, which is above the 3.5 of weights
        ("qwen3-30b-a3b-16l", 1, 0.57),
        ("qwen3-30b-a3b-16l", 16, 3.3),
        ("qwen3-30b-a3b-16l", 64, 5.2),
        ("qwen3-30b-a3b-16l", 256, 6.9),
    ],
)
def test_decode_floors_of_an_h200(shape: str, batch: int, milliseconds: float) -> None:
    context = 1024 + 64
    assert floors(shape).decode([context] * batch) * 1e3 == pytest.approx(milliseconds, rel=0.02)


def test_the_prefill_floor_is_arithmetic_for_many_tokens_and_weights_for_one() -> None:
    long, costs = floors("llama-8b"), costs_of(drafted("llama-8b"))
    flops = costs.flops(16 * 1024, 16)["dense"] + 16 * costs.attention_flops(1024)
    assert long.prefill([1024] * 16) == pytest.approx(flops / 791e12)
    assert long.prefill([1]) == pytest.approx(costs.dense_bytes / 4.3e12)


def test_a_workload_decodes_as_full_as_it_may() -> None:
    costs = ModelCosts(dense_bytes=10, dense_params={}, head_params={}, experts=(), attention=())
    rates = Ceilings(read=10.0, copy=1.0, matmul=1.0)  # a second for each step
    load = Workload(prompts=[[0]] * 3, output_lens=[3, 5, 2], vocab_size=1)
    for max_num_seqs, steps in ((3, 4), (2, 4), (1, 2 + 4 + 1)):
        assert Floors(costs, rates).workload(load, max_num_seqs) == 1 + steps


def test_the_nano_workload_is_that_of_nano_vllm() -> None:
    load = nano(10_001)
    assert (len(load.prompts), load.num_output_tokens) == (256, 133_966)
    assert load.num_prompt_tokens == 142_827
    assert {min(map(min, load.prompts)), max(map(max, load.prompts))} <= set(range(10_001))
    fresh = load.fresh(seed=1)
    assert list(map(len, fresh.prompts)) == list(map(len, load.prompts))
    assert fresh.prompts != load.prompts and fresh.output_lens == load.output_lens
    assert max(map(max, fresh.prompts)) <= 10_000


def test_the_floor_of_the_nano_workload_on_an_h200() -> None:
    load = nano(10_001)
    seconds = floors("qwen3-0.6b").workload(load, 256)
    assert load.num_output_tokens / seconds == pytest.approx(36_000, rel=0.03)


def test_a_step_with_part_of_a_prompt_computes_what_the_prompt_would_in_all() -> None:
    floor = Floors(costs_of(drafted("llama-8b")), H200)
    alone, contexts = floor.decode([1200] * 64), [1200] * 64
    assert floor.decode(contexts, chunk=0, prompt_len=8192) == alone
    # Four chunks are a prompt, but for the head of its last token.
    mixed = floor.decode(contexts, chunk=2048, prompt_len=8192)
    kept = floor.costs.kv_bytes(contexts) / H200.bandwidth
    assert 4 * (mixed - kept) == pytest.approx(floor.prefill([8192]), rel=0.05)
    assert mixed > 5 * alone


def test_a_step_reads_the_experts_that_it_was_seen_to_touch() -> None:
    costs = costs_of(drafted("qwen3-30b-a3b-16l"))
    expert, seen = 2 * 3 * 2048 * 768, [8.0, *[20.0] * 14, 128.0]
    assert costs.weight_bytes(4, seen) == pytest.approx(costs.dense_bytes + expert * sum(seen))
    floor = Floors(costs, H200)
    assert floor.decode([1, 1], seen) - floor.decode([1, 1], [0.0] * 16) == pytest.approx(
        expert * sum(seen) / 4.3e12
    )


def test_eight_bits_are_multiplied_at_their_own_rate_where_it_is_known() -> None:
    rates = Ceilings(read=1.0, copy=1.0, matmul=10.0, fp8=20.0, int8=30.0)
    forms = {"dense": 10.0, "fp8_rows": 20.0, "fp8_blocks": 20.0, "int8_rows": 30.0}
    forms |= {"int4_groups": 10.0, "int8_groups": 10.0}  # tokens stay as they are
    assert {form: rates.rate(form) for form in forms} == forms
    assert Ceilings(read=1.0, copy=1.0, matmul=10.0).rate("fp8_rows") == 10.0
    layer = ExpertLayer(count=4, top_k=2, bytes=0, params=400, format="fp8_blocks")
    costs = ModelCosts(
        dense_bytes=0,
        dense_params={"dense": 5, "fp8_rows": 100},
        head_params={"dense": 7},
        experts=(layer,),
        attention=(),
    )
    assert costs.flops(3, 2) == {"dense": 2 * (15 + 14), "fp8_rows": 600, "fp8_blocks": 1200}
    assert Floors(costs, rates).decode([0, 0]) == (2 * 24 / 10) + (400 + 800) / 20


def test_a_shape_has_random_weights_and_a_path_has_its_own() -> None:
    given = {"load_format": "auto", "tp": 2}
    with resolved("llama-8b", given) as (model, arguments):
        assert model == str(SHAPES["llama-8b"])
    assert arguments == {"load_format": "dummy", "tp": 2}
    with resolved("owner/llama-8b", given) as unchanged:
        assert unchanged == ("owner/llama-8b", given)


@pytest.mark.parametrize("how", QUANTIZATIONS)
def test_a_shape_may_be_quantized(how: str) -> None:
    with resolved(f"llama-8b+{how}", {}) as (model, arguments):
        config = dict(read_json(Path(model)))
    assert arguments == {"load_format": "dummy"}
    assert config.pop("quantization_config") == read_json(QUANTIZATIONS[how])
    assert config == read_json(SHAPES["llama-8b"])
    assert not Path(model).exists()
    with pytest.raises(ConfigError, match=rf"'llama-8b\+{how}x' \(did you mean '{how}'\?\)"):
        resolved(f"llama-8b+{how}x", {}).__enter__()


@pytest.mark.parametrize(
    ("shape", "batch", "milliseconds"),
    [
        ("llama-8b+gptq", 1, 1.1),
        ("llama-8b+gptq", 16, 1.6),
        ("llama-8b+gptq", 64, 3.2),
        ("llama-8b+fp8", 1, 1.9),
        ("llama-8b+fp8-block", 64, 4.0),
        ("qwen3-30b-a3b-16l+gptq", 1, 0.27),
        ("qwen3-30b-a3b-16l+gptq", 64, 1.9),
        ("qwen3-30b-a3b-16l+fp8-block", 1, 0.36),
        ("qwen3-30b-a3b-16l+fp8-block", 256, 4.6),
        ("qwen3-30b-a3b", 1, 1.4),
    ],
)
def test_decode_floors_of_quantized_shapes(shape: str, batch: int, milliseconds: float) -> None:
    found = Floors(costs_of(drafted(shape)), H200).decode([1024 + 64] * batch) * 1e3
    assert found == pytest.approx(milliseconds, rel=0.06)


@pytest.mark.parametrize("how", ["", "+gptq", "+fp8", "+fp8-block"])
def test_of_mixtral_routers_and_heads_stay_plain(how: str) -> None:
    costs = costs_of(drafted(f"mixtral-8x7b{how}"))
    form = {"": "dense", "+gptq": "int4_groups", "+fp8": "fp8_rows"}.get(how, "fp8_blocks")
    attention, router = 2 * 4096 * (4096 + 1024), 8 * 4096
    assert {each.format for each in costs.experts} == {form}
    assert {each.params for each in costs.experts} == {8 * 3 * 4096 * 14336}
    plain = 32 * router if how else 32 * (router + attention)
    assert costs.dense_params["dense"] == plain
    assert costs.dense_params[form] == (32 * attention if how else plain)
    assert costs.head_params == {"dense": 32000 * 4096}
