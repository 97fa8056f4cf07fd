"""Shared memory of the decode kernel, as the compiler gives it out: as much as is counted with when
programs are shared out, and no more than a multiprocessor has."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# In a process of its own: the tests' own interprets kernels.
PROGRAM = """
import sys
import torch
from tests.helpers.compiling import compiled
from rackmount_backends.triton_attention import tiles
from rackmount_backends.triton_attention.decode import Workspace, decode_launch
from rackmount_registry.attention import AttentionParams, DeviceTables, KVScales

torch.set_default_device("meta")
capability, kind = int(sys.argv[1]), sys.argv[2]
head_size, group, contexts = map(int, sys.argv[3:])
dtype = torch.float32 if kind == "float32" else torch.bfloat16
kv_dtype = torch.float8_e4m3fn if kind == "fp8" else dtype
params = AttentionParams(num_heads=2 * group, num_kv_heads=2, head_size=head_size, scale=0.1)
shape = head_size, group, kv_dtype.itemsize
chosen = tiles.decode_tiles(*shape, divmod(capability, 10), contexts)
resident = tiles.resident_programs(chosen, *shape, divmod(capability, 10))
ints = torch.empty(3, dtype=torch.int32)
q = torch.empty(2, 2 * group, head_size, dtype=dtype)
scale = torch.empty(2)
kernel, _, arguments = decode_launch(
    torch.empty_like(q),
    q,
    torch.empty(2, 64, 2, head_size, dtype=kv_dtype),
    DeviceTables(query_start_loc=ints, seq_lens=ints, block_table=ints.expand(2, 3)),
    ints[:2],
    params,
    KVScales(k=scale, v=scale) if kind == "fp8" else None,
    max_requests=256,
    block_size=16,
    workspace=Workspace(1, 1, 1, torch.device("meta")),
    programs=4,
    tiles=chosen,
    registers=tiles.registers(chosen, resident),
)
made = compiled(kernel, arguments, capability)
room = tiles.SHARED_BYTES.get(divmod(capability, 10), tiles.LEAST_SHARED_BYTES)
print(made.metadata.shared, tiles.shared_bytes(chosen, *shape), resident, room)
"""


@pytest.mark.parametrize(
    ("kind", "head_size", "group"),
    [
        ("bfloat16", 128, 4),
        ("bfloat16", 64, 32),
        ("bfloat16", 256, 2),
        ("float32", 128, 1),
        ("float32", 256, 1),
        ("fp8", 128, 4),
        ("fp8", 256, 8),
    ],
)
@pytest.mark.parametrize("contexts", [1, 4])
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_programs_take_what_is_counted_with(
    capability: int, contexts: int, kind: str, head_size: int, group: int
) -> None:
    if kind == "fp8" and capability < 89:
        pytest.skip("has no FP8")
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, (capability, kind, head_size, group, contexts))],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    taken, counted, resident, room = map(int, process.stdout.split())
    assert taken + 1024 <= counted
    assert resident * counted <= room
