"""The scheme compressed-tensors: every layout against the library and against packings of the
test's own."""

import re
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from tests.helpers.packings import compressed_tensors, random_grouped
from tests.helpers.schemes import load, load_bundle, read_scheme
from torch import Tensor

from rackmount_quant.compressed_tensors import CompressedTensorsScheme
from rackmount_registry.errors import CheckpointError, ConfigError
from rackmount_registry.formats import KVCacheScheme, StoredFormat

PACKED, INT, FLOAT, NAIVE = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
)
W4A16 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
FP8_BLOCK = FP8 | {"strategy": "block", "block_structure": [128, 128]}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
GROUP = TOKEN | {"strategy": "group", "group_size": 128}
UP = "model.layers.0.mlp.up_proj"


def config(weights: Any, inputs: Any = None, form: str = PACKED, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    } | changes


def scheme(*args: Any, **changes: Any) -> CompressedTensorsScheme:
    return read_scheme(CompressedTensorsScheme, config(*args, **changes))


def stored_as(size: int, *args: Any, rows: int = 8, **changes: Any) -> StoredFormat:
    stored = scheme(*args, **changes).format_for(UP, (rows, size), "linear")
    assert stored is not None
    return stored


@pytest.mark.parametrize("form", [PACKED, INT, NAIVE])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "size"), [(32, 96), (16, 16), (-1, 45)])
@pytest.mark.parametrize("actorder", [None, "group"])
def test_integers_are_unpacked(
    form: str, bits: int, symmetric: bool, group: int, size: int, actorder: str | None
) -> None:
    weights = {
        "num_bits": bits,
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
        "actorder": actorder,
    }
    stored = stored_as(size, weights, form=form, rows=5)
    ordered = actorder is not None and group != -1
    kind: dict[str, Any] = {"bits": bits, "group": group, "symmetric": symmetric}
    first = random_grouped(5, size, act_order=ordered, seed=1, **kind)
    second = random_grouped(11, size, groups=first.groups, seed=2, **kind)
    packed = [
        compressed_tensors(w, packed=form == PACKED, symmetric=symmetric, act_order=ordered)
        for w in (first, second)
    ]
    finished = load(stored, packed, (5, 11), size)
    assert finished.format == stored.yields and finished.activation == "plain"
    as_rows = bits == 8 and symmetric and group == -1 and form != PACKED
    assert stored.yields == ("int8_rows" if as_rows else f"int{bits}_groups")
    assert torch.equal(finished.dequantize(0), first.dense)
    assert torch.equal(finished.dequantize(1), second.dense)


def with_parameters(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """A weight with scales and zero points as min-max calibration gives them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    grouped = weight.unsqueeze(1)
    if args.strategy == "group":
        grouped = weight.unflatten(1, (-1, args.group_size))
    low, high = grouped.amin(-1), grouped.amax(-1)
    if args.strategy == "tensor":
        low, high = weight.amin(), weight.amax()
    if args.strategy == "block":
        blocks = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 128))
        blocks = blocks.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    scales, zeros = calculate_qparams(low, high, args)
    return {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}


@pytest.mark.parametrize(
    ("weights", "form", "shape"),
    [
        (W4A16, PACKED, (24, 64)),
        (W4A16 | {"symmetric": False}, PACKED, (20, 64)),
        (W4A16 | {"num_bits": 8, "symmetric": False}, PACKED, (6, 96)),
        (W4A16 | {"strategy": "channel", "group_size": None}, PACKED, (9, 43)),
        (
            W4A16 | {"strategy": "channel", "group_size": None, "symmetric": False},
            PACKED,
            (9, 43),
        ),
        (INT8 | {"strategy": "tensor"}, PACKED, (9, 43)),
        (INT8, INT, (9, 43)),
        (INT8 | {"strategy": "tensor"}, NAIVE, (9, 43)),
        (INT8 | {"strategy": "group", "group_size": 16}, INT, (9, 48)),
        (INT8 | {"symmetric": False}, INT, (9, 43)),
        (FP8, FLOAT, (9, 43)),
        (FP8 | {"strategy": "channel"}, NAIVE, (9, 43)),
        (FP8_BLOCK, FLOAT, (140, 256)),
    ],
)
def test_what_the_library_compresses_is_read_as_it_decompresses_it(
    weights: dict[str, Any], form: str, shape: tuple[int, int]
) -> None:
    compressor = PackedQuantizationCompressor if form == PACKED else NaiveQuantizationCompressor
    args = QuantizationArgs(**weights)
    how = QuantizationScheme(targets=["Linear"], weights=args)
    dense = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.03 + 0.005
    compressed = compressor.compress(with_parameters(dense, args), how)
    expected = compressor.decompress(dict(compressed), how)["weight"]
    stored = stored_as(shape[1], weights, form=form, rows=shape[0])
    finished = load(stored, [compressed], shape[:1], shape[1])
    assert torch.equal(finished.dequantize(), expected)
    assert stored.encode is not None
    encoded = load(stored, [stored.encode(dense)], shape[:1], shape[1])
    torch.testing.assert_close(encoded.dequantize(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", [PACKED, INT])
def test_one_scale_for_each_part_stays_exact(form: str, symmetric: bool) -> None:
    weights = {"num_bits": 4, "strategy": "tensor", "symmetric": symmetric}
    stored = stored_as(24, weights, form=form, rows=3)
    assert stored.encode is not None
    dense = [
        torch.randn(part, 24, generator=torch.Generator().manual_seed(part)) for part in (3, 8)
    ]
    packed = [stored.encode(each) for each in dense]
    assert packed[0]["weight_scale"] != packed[1]["weight_scale"]
    finished = load(stored, packed, (3, 8), 24)
    for index, each in enumerate(dense):
        own = stored_as(24, weights, form=form, rows=len(each))
        alone = load(own, packed[index : index + 1], (len(each),), 24)
        assert torch.equal(finished.dequantize(index), alone.dequantize())
        error = (finished.dequantize(index) - each).abs().max()
        assert error <= packed[index]["weight_scale"] * 1.001


@pytest.mark.parametrize("actorder", ["weight", "static", False])
def test_kinds_of_act_order_that_leave_columns_in_place_need_no_groups(actorder: Any) -> None:
    assert stored_as(64, W4A16 | {"actorder": actorder}) == stored_as(64, W4A16)


@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_other_kinds_of_act_order_do(actorder: Any) -> None:
    stored = stored_as(64, W4A16 | {"actorder": actorder})
    assert [slot.suffix for slot in stored.slots if slot.suffix == "weight_g_idx"]
    assert stored.encode is not None
    dense = torch.randn(8, 64)
    plain = stored_as(64, W4A16)
    assert plain.encode is not None
    assert torch.equal(
        load(stored, [stored.encode(dense)], (8,), 64).dequantize(),
        load(plain, [plain.encode(dense)], (8,), 64).dequantize(),
    )


def test_experts_are_unpacked_together() -> None:
    experts = [
        [random_grouped(8, 64, group=32, seed=2 * e + part) for part in range(2)] for e in range(3)
    ]
    stored = stored_as(64, W4A16 | {"symmetric": False})
    packed = [[compressed_tensors(part) for part in expert] for expert in experts]
    bundle = load_bundle(stored, packed, (8, 8), 64)
    for e, expert in enumerate(experts):
        dense = torch.cat([part.dense for part in expert])
        assert torch.equal(bundle.expert(e).dequantize(), dense)


@pytest.mark.parametrize(
    ("weights", "form", "inputs", "activation"),
    [
        (FP8, FLOAT, STATIC, "tensor"),
        (FP8, FLOAT, TOKEN, "token"),
        (FP8, FLOAT, STATIC | {"dynamic": True}, "token"),
        (FP8, FLOAT, None, "plain"),
        (FP8, FLOAT, TOKEN | {"type": "int"}, "plain"),
        (FP8, FLOAT, GROUP, "plain"),
        (FP8_BLOCK, FLOAT, GROUP, "group"),
        (FP8_BLOCK, FLOAT, GROUP | {"group_size": 64}, "plain"),
        (FP8_BLOCK, FLOAT, TOKEN, "plain"),
        (FP8_BLOCK, FLOAT, STATIC, "plain"),
        (INT8, INT, TOKEN | {"type": "int"}, "token"),
        (INT8, INT, STATIC | {"type": "int"}, "tensor"),
        (INT8, INT, STATIC | {"type": "int", "symmetric": False}, "plain"),
        (INT8, INT, TOKEN | {"type": "int", "symmetric": False}, "plain"),
        (W4A16, PACKED, TOKEN, "plain"),
        (W4A16, PACKED, STATIC | {"type": "int", "symmetric": False}, "plain"),
    ],
)
def test_inputs_are_rounded_where_they_are_of_the_weights_own_type(
    weights: dict[str, Any], form: str, inputs: Any, activation: str
) -> None:
    stored = stored_as(32, weights, inputs, form)
    assert stored.encode is not None
    dense = torch.randn(8, 32)
    packed = [dict(stored.encode(dense)), dict(stored.encode(dense))]
    static = inputs is not None and not inputs["dynamic"]
    assert ("input_scale" in packed[0]) == static
    assert ("input_zero_point" in packed[0]) == (static and not inputs.get("symmetric", True))
    if static:
        packed[0]["input_scale"], packed[1]["input_scale"] = torch.tensor(0.25), torch.tensor([0.5])
    finished = load(stored, packed, (8, 8), 32)
    assert finished.activation == activation
    if activation == "tensor":
        assert finished.tensors["input_scale"].tolist() == [0.5]
    else:
        assert "input_scale" not in finished.tensors
    assert (finished.dequantize(0) - dense).abs().max() < 0.4


def test_a_name_goes_before_a_pattern_and_that_before_the_class() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        weights = {"num_bits": bits, "strategy": "channel"}
        return {"targets": [*targets], "weights": weights, "format": PACKED}

    groups = {
        "a": group(4, "Linear"),
        "b": {"targets": ["re:.*self_attn.*"], "weights": FP8, "format": FLOAT},
        "c": {"targets": ["re:.*q_proj"], "weights": FP8_BLOCK, "format": FLOAT},
        "d": group(8, "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_up_proj"),
        "e": {"targets": ["re:.*layers.9.*"], "weights": None},
    }
    chosen = scheme(None, form="mixed-precision", config_groups=groups, ignore=["re:.*v_proj"])

    def yields(name: str, role: Any = "linear") -> str | None:
        stored = chosen.format_for(name, (8, 128), role)
        return None if stored is None else stored.yields

    assert yields("model.layers.0.self_attn.o_proj") == "int8_groups"
    assert yields("model.layers.1.self_attn.o_proj") == "fp8_rows"
    assert yields("model.layers.0.self_attn.q_proj") == "fp8_rows"
    assert yields("model.layers.0.mlp.up_proj") == "int8_groups"
    assert yields("model.layers.0.mlp.down_proj") == "int4_groups"
    assert yields("model.layers.0.self_attn.v_proj") is None
    assert yields("model.layers.9.mlp.up_proj") is None
    assert yields("model.layers.0.mlp.gate", "router") == "int4_groups"
    assert yields("lm_head", "head") == "int4_groups"


@pytest.mark.parametrize("target", ["Embedding", "LlamaMLP"])
def test_another_class_than_linear_is_told_and_means_nothing(target: str) -> None:
    """What it would quantize stays plain: tensors of anything else are refused at load."""
    group = {"targets": [target], "weights": W4A16}
    chosen = scheme(W4A16, config_groups={"a": group, "b": group | {"targets": ["Linear"]}})
    assert chosen.unmet([UP, "model.embed_tokens", "lm_head"]) == [target]
    alone = scheme(None, config_groups={"a": group})
    assert alone.format_for(UP, (8, 32), "linear") is None


def test_without_the_class_what_no_group_names_is_plain() -> None:
    groups = {"group_0": {"targets": ["re:.*mlp.*"], "weights": W4A16}}
    chosen = scheme(None, config_groups=groups)
    assert chosen.format_for("model.layers.0.self_attn.q_proj", (8, 32), "linear") is None


@pytest.mark.parametrize("ignore", ["model.layers.0.mlp.gate_up_proj", r"re:.*gate_up_proj", "mlp"])
def test_ignored_names_may_be_fused(ignore: str) -> None:
    chosen = scheme(W4A16, ignore=[ignore])
    for part in ("gate_proj", "up_proj"):
        assert chosen.format_for(f"model.layers.0.mlp.{part}", (8, 32), "linear") is None
    assert chosen.format_for("model.layers.0.self_attn.q_proj", (8, 32), "linear") is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, KVCacheScheme()),
        (
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "attn_head",
                "dynamic": False,
                "symmetric": True,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": None,
                "zp_dtype": "torch.float8_e4m3fn",
                "group_size": None,
                "block_structure": None,
                "actorder": None,
            },
            KVCacheScheme(per="head"),
        ),
    ],
)
def test_the_kv_cache_is_as_the_checkpoint_wants_it(given: Any, expected: Any) -> None:
    assert scheme(W4A16, kv_cache_scheme=given).kv_cache == expected


@pytest.mark.parametrize("groups", [{}, None])
def test_the_kv_cache_alone_may_be_quantized(groups: Any) -> None:
    kv_cache = {"num_bits": 8, "type": "float"}
    chosen = scheme(None, form="dense", config_groups=groups, kv_cache_scheme=kv_cache)
    assert chosen.kv_cache == KVCacheScheme()
    assert chosen.format_for(UP, (8, 32), "linear") is None
    with pytest.raises(ConfigError, match="must hold a group or more"):
        scheme(None, form="dense", config_groups=groups)
    with pytest.raises(ConfigError, match="group_0: format=None must be 'pack-quantized'"):
        scheme(W4A16, form="dense")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "marlin-24"}, "format='marlin-24' must be"),
        ({"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' must be"),
        ({"format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized' must be"),
        ({"format": None}, "format=None must be"),
        ({"format": "mixed-precision"}, "group_0: format=None must be 'pack-quantized'"),
        ({"config_groups": {}}, "config_groups={} must hold a group or more"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "W4A16=['Linear'] must be an object"),
        (
            {"config_groups": {key: {"targets": ["Linear"], "weights": W4A16} for key in "ab"}},
            "must target Linear in one group alone",
        ),
        ({"transform_config": {"config_groups": {"u": 1}}}, "u=1 must be an object"),
        ({"transform_config": {"config_groups": {}, "u": 1}}, "does not read u"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "must have the format 'dense'"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "num_bits=4 must be 8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "type='int' must be 'float'"),
        *(
            (
                {"kv_cache_scheme": {"num_bits": 8, "type": "float", key: value}},
                f"kv_cache_scheme: {key}={value} must be {legal}",
            )
            for key, value, legal in (
                ("dynamic", True, False),
                ("symmetric", False, True),
                ("group_size", 64, None),
                ("block_structure", [1, 64], None),
                ("actorder", True, None),
            )
        ),
        ({"ignore": "lm_head"}, "must be a list of names"),
        ({"ignore": ["re:["]}, "broken regular expression"),
        ({"permutation": [1, 0]}, "permutation"),
    ],
)
def test_a_config_that_is_not_read_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(W4A16, **changes)


@pytest.mark.parametrize(
    ("weights", "inputs", "form", "message"),
    [
        (W4A16 | {"num_bits": 3}, None, PACKED, "num_bits=3 must be 4 or 8"),
        (W4A16 | {"type": "float"}, None, PACKED, "type='float' must be 'int'"),
        (W4A16, None, FLOAT, "type='int' must be 'float'"),
        (FP8, None, INT, "type='float' must be 'int'"),
        (FP8 | {"num_bits": 4}, None, FLOAT, "num_bits=4 must be 8"),
        (FP8 | {"symmetric": False}, None, FLOAT, "symmetric=False must be True"),
        (FP8 | {"strategy": "group", "group_size": 32}, None, FLOAT, "strategy='group' must be"),
        (FP8 | {"strategy": "tensor_group"}, None, FLOAT, "strategy='tensor_group'"),
        (FP8_BLOCK | {"block_structure": [64, 64]}, None, FLOAT, "must be [128, 128]"),
        (W4A16 | {"strategy": "block"}, None, PACKED, "strategy='block' must be"),
        (W4A16 | {"group_size": None}, None, PACKED, "group_size=None must be a positive"),
        (W4A16 | {"actorder": "sideways"}, None, PACKED, "actorder='sideways'"),
        (W4A16 | {"dynamic": True}, None, PACKED, "dynamic=True must be False"),
        (W4A16 | {"codebook": 1}, None, PACKED, "codebook"),
        (FP8, TOKEN | {"num_bits": 4}, FLOAT, "num_bits=4 must be 8"),
        (FP8, TOKEN | {"dynamic": "local"}, FLOAT, "dynamic='local'"),
        (FP8, TOKEN | {"dynamic": False}, FLOAT, "strategy='token' must be 'tensor'"),
        (FP8, TOKEN | {"clip": 1}, FLOAT, "clip"),
        (FP8, TOKEN | {"group_size": 16}, FLOAT, "group_size=16 must be None"),
        (FP8, STATIC | {"group_size": 16}, FLOAT, "group_size=16 must be None"),
        (FP8, TOKEN | {"actorder": True}, FLOAT, "actorder=True must be None or False"),
        (None, TOKEN, FLOAT, "input_activations"),
    ],
)
def test_arguments_that_are_not_read_are_refused(
    weights: Any, inputs: Any, form: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(weights, inputs, form)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": None}, "targets=None must be a list of names"),
        ({"targets": ["re:("]}, "broken regular expression"),
        ({"output_activations": STATIC}, "output_activations="),
        ({"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' must be"),
        ({"smoothing": 0.5}, "smoothing"),
    ],
)
def test_a_group_that_is_not_read_is_refused(changes: dict[str, Any], message: str) -> None:
    group = {"targets": ["Linear"], "weights": W4A16} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        scheme(None, config_groups={"group_0": group})


def test_what_changes_no_numbers_is_harmless() -> None:
    scheme(
        W4A16 | {"observer": "minmax", "observer_kwargs": {}, "zp_dtype": None},
        global_compression_ratio=1.9,
        version="0.9.1",
        quantization_status="frozen",
        sparsity_config={"format": "dense", "global_sparsity": 0.1, "targets": []},
        transform_config={},
    )


@pytest.mark.parametrize("size", [16, 128])
def test_inputs_with_a_group_size_are_of_groups_though_nothing_says_so(size: int) -> None:
    """As the library reads them; of other sizes than blocks have they stay as they are."""
    inputs = {"num_bits": 8, "type": "float", "dynamic": True, "group_size": size}
    implied = stored_as(128, FP8_BLOCK, inputs, FLOAT)
    assert implied == stored_as(128, FP8_BLOCK, inputs | {"strategy": "group"}, FLOAT)
    assert implied.name.endswith("inputs group" if size == 128 else "inputs plain")


def test_groups_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"group_size=32 must divide the columns of .*up_proj, .* 48"
    ):
        scheme(W4A16).format_for(UP, (8, 48), "linear")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["weight_scale", "input_scale"])
def test_scales_that_say_nothing_are_refused(name: str, bad: float) -> None:
    stored = stored_as(32, FP8, STATIC, FLOAT)
    assert stored.encode is not None
    packed = dict(stored.encode(torch.randn(8, 32)))
    packed[name] = torch.tensor([bad])
    with pytest.raises(CheckpointError, match=f"{name} must be finite and above 0"):
        load(stored, [packed], (8,), 32)
