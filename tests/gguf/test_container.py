import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from rackmount_gguf.container import open_container
from rackmount_registry.errors import CheckpointError

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_every_kind_of_metadata_value_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in (
        ("uint8", 200),
        ("int8", -100),
        ("uint16", 60000),
        ("int16", -30000),
        ("uint32", 4_000_000_000),
        ("int32", -2_000_000_000),
        ("float32", 0.5),
        ("uint64", 2**63),
        ("int64", -(2**62)),
        ("float64", 0.1),
        ("bool", True),
        ("string", "ď 漢字"),
        ("array", ["a", "bc", ""]),
    ):
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.numbers", [3, -1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = open_container(path).metadata
    assert metadata["x.uint8"] == 200
    assert metadata["x.int8"] == -100
    assert metadata["x.uint16"] == 60000
    assert metadata["x.int16"] == -30000
    assert metadata["x.uint32"] == 4_000_000_000
    assert metadata["x.int32"] == -2_000_000_000
    assert metadata["x.float32"] == 0.5
    assert metadata["x.uint64"] == 2**63
    assert metadata["x.int64"] == -(2**62)
    assert metadata["x.float64"] == 0.1
    assert metadata["x.bool"] is True
    assert metadata["x.string"] == "ď 漢字"
    assert metadata["x.array"] == ["a", "bc", ""]
    assert metadata["x.numbers"] == [3, -1, 2]


def test_tensors_lie_where_the_gguf_package_finds_them(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file({"blk.0.attn_v.weight": ROWS, "output_norm.weight": ROWS[0]})
    container = open_container(path)
    for theirs in gguf.GGUFReader(path).tensors:
        ours = container.tensors[theirs.name]
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
        assert (ours.type, ours.start) == (theirs.tensor_type, theirs.data_offset)
        assert container.raw(ours).tobytes() == theirs.data.tobytes()


def test_an_unusual_alignment_is_respected(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file({"output_norm.weight": ROWS[0]}, {"general.alignment": 256})
    container = open_container(path)
    stored = container.tensors["output_norm.weight"]
    assert stored.start % 256 == 0
    assert container.raw(stored).tobytes() == ROWS[0].tobytes()


@pytest.mark.parametrize("size", [0, 3, 4, 7, 20, 24, 60, 200])
def test_a_file_cut_in_its_header_is_refused(gguf_file: Callable[..., Path], size: int) -> None:
    path = gguf_file()
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf.*(truncated|empty)"):
        open_container(path)


def test_a_file_cut_in_a_tensor_is_refused_with_the_tensors_name(
    gguf_file: Callable[..., Path],
) -> None:
    path = gguf_file({"blk.0.attn_v.weight": ROWS})
    size = open_container(path).tensors["blk.0.attn_v.weight"].start + ROWS.nbytes
    path.write_bytes(path.read_bytes()[:size])
    open_container(path)
    path.write_bytes(path.read_bytes()[: size - 1])
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf.*attn_v.*byte {size}.* {size - 1}"):
        open_container(path)


def test_a_damaged_length_does_not_ask_for_memory(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file(metadata={"tokenizer.ggml.tokens": ["a", "b"]})
    count = struct.pack("<IQ", 8, 2)
    damaged = path.read_bytes().replace(count, struct.pack("<IQ", 8, 2**60), 1)
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="truncated"):
        open_container(path)


def test_another_file_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"weights\.gguf is not a GGUF file.*PK"):
        open_container(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_another_version_or_byte_order_is_refused(
    gguf_file: Callable[..., Path], version: int
) -> None:
    path = gguf_file()
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    with pytest.raises(CheckpointError, match=f"GGUF version {version}; 2 and 3"):
        open_container(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read: No such file"):
        open_container(tmp_path / "none.gguf")


def test_a_tensor_named_twice_is_refused(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file({"blk.0.attn_v.weight": ROWS, "blk.0.attn_w.weight": ROWS})
    path.write_bytes(path.read_bytes().replace(b"attn_w", b"attn_v"))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf holds tensor 'blk\.0\.attn_v.*twice"):
        open_container(path)


def test_a_metadata_key_named_twice_is_refused(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file(metadata={"x.one": 1, "x.two": 2})
    path.write_bytes(path.read_bytes().replace(b"x.two", b"x.one"))
    with pytest.raises(CheckpointError, match=r"holds metadata key 'x\.one' twice"):
        open_container(path)


def test_a_tensor_type_that_is_not_read_is_named(gguf_file: Callable[..., Path]) -> None:
    blocks = np.zeros((2, 24), np.uint8)
    path = gguf_file({"blk.0.attn_v.weight": (blocks, gguf.GGMLQuantizationType.Q5_1)})
    with pytest.raises(CheckpointError, match=r"tiny\.gguf.*attn_v.*has type Q5_1; those.*Q4_K"):
        open_container(path)


def test_a_tensor_type_that_does_not_exist_is_named(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file({"output_norm.weight": ROWS[0]})
    entry = b"output_norm.weight" + struct.pack("<IQ", 1, 4)
    data = path.read_bytes()
    at = data.index(entry) + len(entry)
    path.write_bytes(data[:at] + struct.pack("<I", 4711) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"output_norm\.weight' has type 4711"):
        open_container(path)


def test_rows_that_are_not_whole_blocks_are_refused(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file(
        {"output_norm.weight": (np.zeros((1, 34), np.uint8), gguf.GGMLQuantizationType.Q8_0)}
    )
    entry = b"output_norm.weight" + struct.pack("<I", 2)
    data = path.read_bytes()
    at = data.index(entry) + len(entry)
    path.write_bytes(data[:at] + struct.pack("<Q", 33) + data[at + 8 :])
    with pytest.raises(CheckpointError, match=r"shape \(1, 33\), are not whole Q8_0 blocks of 32"):
        open_container(path)


def test_one_part_of_a_split_model_is_refused(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file(metadata={"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts; join them"):
        open_container(path)


def test_a_damaged_string_is_refused(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file(metadata={"x.name": "hello"})
    path.write_bytes(path.read_bytes().replace(b"hello", b"hel\xff\xff"))
    with pytest.raises(CheckpointError, match="damaged header"):
        open_container(path)
