import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rackmount.loading.safetensors_reader import INDEX, SafetensorsCheckpoint, open_checkpoint
from rackmount_registry.errors import CheckpointError

TENSORS = {
    "a.weight": torch.arange(30.0).view(6, 5),
    "b.weight": torch.arange(24, dtype=torch.int8).view(2, 3, 4),
    "c.scale": torch.tensor(2.5, dtype=torch.bfloat16),
}
CONFIG = {"architectures": ["Tiny"], "hidden_size": 5}
KV = {"kv_cache_quant_algo": "FP8"}


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


@pytest.fixture
def single(folder: Path) -> Path:
    """A checkpoint of one file."""
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(folder: Path) -> Path:
    """A checkpoint of two shards and an index."""
    weight_map = {}
    for number, names in enumerate((("a.weight",), ("b.weight", "c.scale")), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    return folder


def assert_holds_all(checkpoint: SafetensorsCheckpoint) -> None:
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        found = checkpoint.read(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_single_file_is_read_from_its_folder_or_by_its_path(single: Path) -> None:
    assert_holds_all(open_checkpoint(single))
    assert_holds_all(open_checkpoint(single / "model.safetensors"))


def test_a_file_of_any_name_is_found_in_its_folder(single: Path) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert_holds_all(open_checkpoint(single))


def test_shards_are_read_by_their_index(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert_holds_all(checkpoint)
    assert checkpoint.tensors["c.scale"].file == "model-00002-of-00002.safetensors"


def test_a_file_that_the_index_does_not_name_is_left_alone(sharded: Path) -> None:
    save_file({"a.weight": torch.zeros(1)}, sharded / "consolidated.safetensors")
    assert_holds_all(open_checkpoint(sharded))


def test_tensors_are_described_before_they_are_read(single: Path) -> None:
    infos = open_checkpoint(single).tensors
    assert {name: (info.shape, info.dtype, info.file) for name, info in infos.items()} == {
        "a.weight": ((6, 5), "float32", "model.safetensors"),
        "b.weight": ((2, 3, 4), "int8", "model.safetensors"),
        "c.scale": ((), "bfloat16", "model.safetensors"),
    }


@pytest.mark.parametrize(
    "index",
    [
        (slice(0, 6), slice(0, 5)),
        (slice(2, 4), slice(0, 5)),
        (slice(0, 6), slice(3, 5)),
        (slice(5, 6), slice(4, 5)),
        (slice(6, 6), slice(0, 5)),
        (slice(1, 3),),
    ],
)
def test_a_slice_equals_that_slice_of_the_whole(index: tuple[slice, ...], single: Path) -> None:
    assert torch.equal(open_checkpoint(single).read("a.weight", index), TENSORS["a.weight"][index])


def test_both_configurations_are_read_and_the_second_may_be_missing(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    assert (checkpoint.config, checkpoint.generation_config) == (CONFIG, {})
    write_json(single / "generation_config.json", {"eos_token_id": [1, 2]})
    assert open_checkpoint(single).generation_config == {"eos_token_id": [1, 2]}


def test_without_tokenizer_files_there_is_no_tokenizer(single: Path) -> None:
    assert open_checkpoint(single).tokenizer() is None


def test_what_was_read_outlives_the_checkpoint(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    tensor: Tensor = checkpoint.read("a.weight")
    checkpoint.close()
    assert torch.equal(tensor, TENSORS["a.weight"])


def test_a_missing_shard_is_named_with_the_folder(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    rule = rf"{INDEX} names model-00002-of-00002.safetensors, which {sharded} lacks"
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_refused_with_both(sharded: Path) -> None:
    both = {name: TENSORS[name] for name in ("a.weight", "b.weight")}
    save_file(both | {"c.scale": TENSORS["c.scale"]}, sharded / "model-00002-of-00002.safetensors")
    rule = r"tensor a.weight is in both model-00001-\S* and model-00002-\S*"
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(sharded)


def test_a_tensor_that_its_shard_lacks_is_refused(sharded: Path) -> None:
    save_file({"b.weight": TENSORS["b.weight"]}, sharded / "model-00002-of-00002.safetensors")
    rule = r"says that tensor c.scale is in model-00002-\S*, but no shard holds it"
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["c.scale"] = "model-00001-of-00002.safetensors"
    write_json(sharded / INDEX, index)
    rule = r"tensor c.scale is in model-00001-\S*, but it is in model-00002-\S*"
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(sharded)


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {"a.weight": 1}}])
def test_an_index_without_a_map_of_names_is_refused(content: Any, sharded: Path) -> None:
    write_json(sharded / INDEX, content)
    with pytest.raises(CheckpointError, match=rf"{INDEX} needs a weight_map"):
        open_checkpoint(sharded)


def test_tokenizers_may_be_read_at_a_time_by_threads_of_a_fresh_process() -> None:
    """As of two engines; in this process the library is imported already."""
    folder = Path(__file__).parents[1] / "assets" / "tiny-moe"
    program = (
        "import sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pathlib import Path\n"
        "from rackmount.loading.safetensors_reader import open_checkpoint\n"
        "def read(_):\n"
        "    return open_checkpoint(Path(sys.argv[1])).tokenizer().encode('hello')\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    ids = list(pool.map(read, range(4)))\n"
        "assert ids[0] and ids == ids[:1] * 4, ids\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_pointer_of_git_lfs_is_told_from_a_file(single: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (single / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"cannot be read, it is what git-lfs has .*lfs pull"):
        open_checkpoint(single)


@pytest.mark.parametrize("size", [0, 4, 40, -1])
def test_a_truncated_file_is_refused_by_name(size: int, single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read, .* truncated"):
        open_checkpoint(single)


def test_a_folder_without_tensors_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{folder} holds no .*\.safetensors"):
        open_checkpoint(folder)


def test_a_file_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"other\.safetensors"):
        open_checkpoint(folder / "other.safetensors")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"{'hidden_size': 5}", "config.json is not valid JSON"),
        (b"", "config.json is not valid JSON"),
        (b"\xff\xfe{}", "config.json is not valid JSON"),
        (b"[1]", "config.json must hold a JSON object, not a list"),
    ],
)
def test_a_configuration_that_is_no_json_object_is_refused(
    content: bytes, rule: str, single: Path
) -> None:
    (single / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(single)


def test_a_missing_configuration_is_refused(single: Path) -> None:
    (single / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        open_checkpoint(single)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("hf_quant_config.json", "modelopt"),
        ("quant_config.json", "awq"),
        ("quantize_config.json", "gptq"),
    ],
)
def test_a_file_beside_the_configuration_may_say_how_weights_are_quantized(
    single: Path, name: str, method: str
) -> None:
    write_json(single / name, {"bits": 4})
    section = {"quantization_config": {"quant_method": method, "bits": 4}}
    expected = CONFIG | section | {"quantization_file": name}
    assert open_checkpoint(single).config == expected
    write_json(single / "config.json", CONFIG | {"quantization_config": None})
    assert open_checkpoint(single).config == expected
    write_json(single / "config.json", CONFIG | {"quantization_config": {"quant_method": "w8"}})
    assert open_checkpoint(single).config["quantization_config"] == {"quant_method": "w8"}


@pytest.mark.parametrize(
    ("stored", "own", "expected"),
    [
        # ModelOpt's own file once had more to say.
        ({"quant_algo": "FP8"}, KV, {"quant_algo": "FP8"} | KV),
        ({"quant_algo": "FP8"}, {"quant_algo": "NVFP4"} | KV, {"quant_algo": "FP8"} | KV),
        ({"quant_algo": "FP8"}, {}, {"quant_algo": "FP8"}),
        ({"quantization": {"quant_algo": "FP8"}}, KV, {"quantization": {"quant_algo": "FP8"} | KV}),
        # Versions 0.31 to 0.33 did not name it in config.json.
        ({"quant_method": None, "quant_algo": "FP8"}, KV, {"quant_algo": "FP8"} | KV),
    ],
)
def test_what_modelopt_says_in_its_own_file_alone_is_added(
    single: Path, stored: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]
) -> None:
    stored = {"quant_method": "modelopt"} | stored
    if stored["quant_method"] is None:
        del stored["quant_method"]
    write_json(single / "config.json", CONFIG | {"quantization_config": stored})
    write_json(single / "hf_quant_config.json", {"producer": {}, "quantization": own})
    config = open_checkpoint(single).config
    its = {"quant_method": "modelopt", "producer": {}}
    assert config["quantization_config"] == its | expected
    assert config["quantization_file"] == "config.json and hf_quant_config.json"
    other = {"quantization_config": {"quant_method": "w8"}}
    write_json(single / "config.json", CONFIG | other)
    assert open_checkpoint(single).config == CONFIG | other


def test_a_file_of_modelopt_that_holds_no_settings_is_refused(single: Path) -> None:
    stored = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    write_json(single / "config.json", CONFIG | stored)
    write_json(single / "hf_quant_config.json", {"quantization": ["FP8"]})
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization must be an obj"):
        open_checkpoint(single)


def test_a_file_that_names_its_method_is_of_that(single: Path) -> None:
    """GPTQModel gives all methods' files one name."""
    write_json(single / "quantize_config.json", {"bits": 4, "quant_method": "awq"})
    found = open_checkpoint(single).config["quantization_config"]
    assert found == {"quant_method": "awq", "bits": 4}


def test_two_such_files_are_refused(single: Path) -> None:
    for name in ("quant_config.json", "quantize_config.json"):
        write_json(single / name, {"bits": 4})
    with pytest.raises(CheckpointError, match=r"quant_config.json and quantize_config.json in"):
        open_checkpoint(single)


def test_a_broken_tokenizer_is_told_with_its_folder(single: Path) -> None:
    (single / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(CheckpointError, match=f"the tokenizer in {single} cannot be read"):
        open_checkpoint(single).tokenizer()
