"""Engines with random weights: config.json is all that they need."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.engines import byte_tokenizer, greedy, rows, tiny_engine, tokens_of
from tests.helpers.executors import threads

from rackmount import Engine, SamplingParams
from rackmount.loading.dummy import DummyCheckpoint
from rackmount_registry.errors import CheckpointError, RequestError

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "eos_token_id": 5,
}
PROMPTS = rows(7, 12, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config alone")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def dummy(model: Path, **arguments: Any) -> Engine:
    return tiny_engine(model, load_format="dummy", **arguments)


def answers(model: Path, **arguments: Any) -> list[list[int]]:
    # Sampled: greedy answers of so small a random model are one token over and over.
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=7)
    with dummy(model, **arguments) as engine:
        return tokens_of(engine, PROMPTS, params)


def test_a_folder_with_a_configuration_alone_or_the_file_is_enough(folder: Path) -> None:
    told = answers(folder)
    assert [len(tokens) for tokens in told] == [8] * 3
    assert answers(folder / "config.json") == told


def test_the_seed_of_the_engine_is_that_of_the_weights(folder: Path) -> None:
    assert answers(folder, seed=1) != answers(folder)


def test_nothing_is_read_of_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    made, _ = tiny_checkpoint(tmp_path, "llama")
    byte_tokenizer().save_pretrained(made)
    (made / "model.safetensors").write_bytes(b"no tensors")
    with dummy(made) as engine:
        assert engine.core.weight_bytes_read == 0
        assert engine.tokenizer is None


def test_prompts_are_token_ids_and_answers_have_no_text(folder: Path) -> None:
    with dummy(folder) as engine:
        (output,) = engine.generate(PROMPTS[0], greedy(4))
        assert (output.text, len(output.token_ids)) == ("", 4)
        assert [chunk.text for chunk in engine.stream(PROMPTS[0], greedy(2))] == ["", ""]
        with pytest.raises(RequestError, match="no tokenizer to encode text; give lists of token"):
            engine.generate("text")


def test_the_configuration_says_what_ends_an_answer(folder: Path) -> None:
    with dummy(folder) as engine:
        assert engine.eos_token_ids == {5}


def test_ranks_share_one_random_model(folder: Path) -> None:
    two = answers(folder, manager=threads(), executor="threads", tp=2, dtype="float64")
    assert two == answers(folder, dtype="float64")


def test_ranks_in_processes_of_their_own_need_the_configuration_alone(folder: Path) -> None:
    assert answers(folder, executor="multiprocess", tp=2, dtype="float64") == answers(
        folder, dtype="float64"
    )


def test_without_a_configuration_nothing_starts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no file that a mounted reader takes"):
        dummy(tmp_path)


def test_a_dummy_checkpoint_has_no_tensor() -> None:
    checkpoint = DummyCheckpoint(CONFIG)
    assert not checkpoint.tensors and not checkpoint.generation_config
    with pytest.raises(KeyError, match="lm_head"):
        checkpoint.read("lm_head.weight")
