"""Engines whose ranks are processes: equal to one process, and clean when they end."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import (
    assert_idle,
    chain_checkpoint,
    distributions,
    greedy,
    rows,
    tiny_engine,
    tokens_of,
)
from tests.helpers.executors import await_end, belongings, pids, threads
from tests.helpers.loads import VOCAB, Load, check, loads, watched

from rackmount import Engine, SamplingParams
from rackmount_registry.errors import ConfigError
from rackmount_registry.executor import RankError

ROOT = Path(__file__).parents[2]
EVERYTHING = greedy(10, logprobs=97, prompt_logprobs=97)
SMALL_ROOM = {
    "block_size": 3,
    "max_model_len": 30,
    "num_kv_blocks": 14,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 20,
    "long_prefill_token_threshold": 5,
}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama on 2": ("llama", {}, 2),
    "llama with one KV head on 4": ("llama", {"num_key_value_heads": 1}, 4),
    "qwen3 on 4": ("qwen3", {}, 4),
    "llama on 8": ("llama", {"num_attention_heads": 8}, 8),
    "qwen3 on 8": ("qwen3", {"num_attention_heads": 8}, 8),
    "qwen3-moe on 2": ("qwen3-moe", {}, 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), "qwen3", vocab_size=VOCAB, hidden_size=32
    )[0]


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Engine]:
    with tiny_engine(folder, tp=2, dtype="float64", **SMALL_ROOM) as engine:
        yield watched(engine)


def check_loads(two: Engine, folder: Path, max_examples: int) -> None:
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=max_examples < 100,
        suppress_health_check=[HealthCheck.nested_given],
    )
    @given(load=loads(st.just(SMALL_ROOM)))
    def every(load: Load) -> None:
        two.reset_prefix_cache()
        check(load, folder, two)

    every()


def test_every_load_gives_every_request_the_answer_of_its_run_alone(
    two: Engine, folder: Path
) -> None:
    check_loads(two, folder, 12)
    assert two.stats.total_preemptions > 0


@pytest.mark.slow
def test_every_one_of_many_loads_gives_every_request_the_answer_of_its_run_alone(
    two: Engine, folder: Path
) -> None:
    check_loads(two, folder, 300)


def check_equals_one(case: str, folder: Path) -> None:
    family, overrides, tp = CASES[case]
    made, _ = tiny_checkpoint(folder, family, **overrides)
    outputs = []
    for arguments in ({}, {"tp": tp}):
        with tiny_engine(made, **arguments) as engine:
            outputs.append(engine.generate(rows(17, 5), EVERYTHING))
            assert_idle(engine)
            # The last rank's share of the vocabulary may be smaller.
            share = engine.core.weight_bytes_read / engine.config.tp
            assert 0.98 < share / engine.rack.draft.weight_bytes <= 1
    for one, many in zip(*outputs, strict=True):
        assert many.token_ids == one.token_ids
        for mine, other in (
            (many.outputs[0].logprobs, one.outputs[0].logprobs),
            (many.prompt_logprobs[1:], one.prompt_logprobs[1:]),
        ):
            assert (distributions(mine) - distributions(other)).abs().max() < 1e-5


def test_two_processes_equal_one(tmp_path: Path) -> None:
    check_equals_one("llama on 2", tmp_path)


def test_two_processes_with_an_fp8_cache_equal_one(tmp_path: Path) -> None:
    folder, _ = tiny_checkpoint(tmp_path, "llama")
    fp8 = {"kv_cache_dtype": "fp8", "kv_scale": 0.01, "dtype": "float64"}
    outputs = []
    for arguments in ({}, {"tp": 2}):
        with tiny_engine(folder, **fp8, **arguments) as engine:
            outputs.append(tokens_of(engine, rows(17, 5), greedy(10)))
            saturation = engine.core.saturation
            outputs.append([[value for pair in saturation for value in pair]])
    assert outputs[0] == outputs[2]
    for one, worst in zip(*outputs[1], *outputs[3], strict=True):
        assert one <= worst + 1e-12 and worst <= 2 * one + 1e-12  # of heads on two ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_equals_one(case: str, tmp_path: Path) -> None:
    check_equals_one(case, tmp_path)


def test_processes_of_other_plugins_are_refused_with_rank_and_distribution(folder: Path) -> None:
    before = belongings()
    message = r"^rank \d: PluginError: .*threads: the driver has version 0 .*, this process none"
    with pytest.raises(RankError, match=message):
        tiny_engine(folder, manager=threads(), tp=2)
    assert belongings() == before


@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)], ids=str
)
def test_requests_in_flight_end_in_an_error_when_a_rank_is_lost(
    sign: signal.Signals, folder: Path
) -> None:
    before = belongings()
    silence = ("executor.multiprocess.silence_timeout_s=4",)
    with tiny_engine(folder, tp=2, plugin_config=silence) as engine:
        streams = [engine.stream(prompt, greedy(30)) for prompt in rows(5, 6, vocab=VOCAB)]
        next(streams[0])
        os.kill(pids(engine.core.executor)[1], sign)
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"^rank 1 ") as caught:
            list(streams[0])
        assert time.monotonic() - begin < 10
        assert caught.value.rank == 1
        assert [chunk.finish_reason for chunk in streams[1]][-1] == "error"
        assert_idle(engine)
        with pytest.raises(RankError, match="the engine is down: rank 1 "):
            engine.generate(rows(5, vocab=VOCAB)[0], greedy(2))
    assert belongings() == before


def test_a_weight_that_is_missing_is_told_by_the_rank_that_misses_it(tmp_path: Path) -> None:
    before = belongings()
    made, _ = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(RankError, match=r"^rank \d: CheckpointError: .* are not in the checkpoint"):
        tiny_engine(made, tp=2)
    assert belongings() == before


def test_a_model_whose_tokenizer_cannot_be_read_leaves_no_rank(tmp_path: Path) -> None:
    before = belongings()
    made, _ = tiny_checkpoint(tmp_path, "llama")
    (made / "tokenizer.json").write_text("{")
    with pytest.raises(Exception) as caught:  # of the library
        tiny_engine(made, tp=2)
    assert belongings() == before
    assert caught.value


def test_an_engine_that_is_garbage_leaves_nothing(folder: Path) -> None:
    before = belongings()
    engine = tiny_engine(folder, tp=2)
    started = pids(engine.core.executor)
    del engine
    gc.collect()
    assert all(map(await_end, started))
    assert belongings() == before


@pytest.mark.slow
def test_20_engines_in_turn_leave_nothing(folder: Path) -> None:
    before = belongings()
    for _ in range(20):
        with tiny_engine(folder, tp=2) as engine:
            assert tokens_of(engine, rows(5, vocab=VOCAB), greedy(2))
    assert belongings() == before


SCRIPT = """
import sys
from tests.helpers.engines import greedy, rows, tiny_engine, tokens_of
engine = tiny_engine(sys.argv[1], tp=2)
print("up", flush=True)
sys.stdin.readline()
print(tokens_of(engine, rows(5, 9, vocab=23), greedy(9)))
"""


@pytest.mark.slow
def test_eight_engines_start_and_answer_at_once(folder: Path) -> None:
    with tiny_engine(folder) as one:
        expected = str(tokens_of(one, rows(5, 9, vocab=VOCAB), greedy(9)))
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    assert [engine.stdout.readline() for engine in engines if engine.stdout] == ["up\n"] * 8
    assert [engine.communicate("go\n")[0] for engine in engines] == [expected + "\n"] * 8


def launched(num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`rackmount` under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", "rackmount.cli.app", *arguments]
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(num_ranks), *program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_ranks_of_a_launcher_answer_once_and_end(tmp_path: Path) -> None:
    made = chain_checkpoint(tmp_path)
    options = ("--tp", "1", "--executor", "external", "--max-tokens", "5", "--temperature", "0")
    done = launched(1, "run", str(made), "A", *options)
    assert (done.returncode, done.stdout) == (0, "BCDEF\n"), done.stderr


def test_two_ranks_of_a_launcher_equal_one_process(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import gc, os\n"
        "from rackmount.execution.worker import Worker\n"
        "from tests.helpers.engines import greedy, rows, tiny_engine, tokens_of\n"
        "execute = Worker.execute\n"
        "def collected(worker, plan):\n"
        "    assert gc.isenabled(), f'rank {os.environ[\"RANK\"]}'\n"
        "    return execute(worker, plan)\n"
        "Worker.execute = collected\n"
        f"engine = tiny_engine({str(folder)!r}, tp=2, executor='external')\n"
        "print(tokens_of(engine, rows(5, 9, vocab=23), greedy(9)))\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    with tiny_engine(folder) as one:
        expected = f"{tokens_of(one, rows(5, 9, vocab=VOCAB), greedy(9))}\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_external_without_a_launcher_or_with_another_number_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"needs RANK, .* in the environment; .*torchrun"):
        tiny_engine(folder, tp=2, executor="external")
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x"}
    for name, value in (given | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"started 4 ranks, .* asked for 2; choose tp=4"):
        tiny_engine(folder, tp=2, executor="external")


def test_smollm2_on_2_ranks_is_refused_with_the_legal_numbers() -> None:
    with pytest.raises(ConfigError, match="2 ranks do not divide heads=9; choose one of 1, 3, 9"):
        Engine("smollm2-135m", tp=2, device="cpu")


@pytest.mark.slow
def test_smollm2_on_3_ranks_equals_one(smollm2: Engine) -> None:
    question = [{"role": "user", "content": "Tell me about the moon."}]
    params = SamplingParams(temperature=0, max_tokens=48)
    (expected,) = smollm2.generate(question, params)
    with Engine("smollm2-135m", tp=3, dtype="float32", device="cpu", num_kv_blocks=64) as engine:
        (output,) = engine.generate(question, params)
    assert output.text == expected.text
    assert len(output.token_ids) > 20
