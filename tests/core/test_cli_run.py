import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.helpers.checkpoints import edit_config, edit_tensors, tiny_checkpoint
from tests.helpers.mounting import plugins
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import rackmount.plugin
import rackmount_backends.plugin
import rackmount_models.plugin
from rackmount import Engine, SamplingParams
from rackmount.cli.app import build_app
from rackmount.cli.options import EngineOptions
from rackmount.config import EngineConfig
from rackmount.report import startup_report
from rackmount_registry.plugins import PluginManager

Result = Any

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MANAGER = PluginManager.from_modules(
    {
        "rackmount-core": rackmount.plugin,
        "rackmount-plugins-backends": rackmount_backends.plugin,
        "rackmount-plugins-models": rackmount_models.plugin,
    }
)
POOL = {"num_kv_blocks": 64, "block_size": 4}
POOL_FLAGS = ["--num-kv-blocks", "64", "--block-size", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=CHAT_TEMPLATE, eos_token="</s>"
    )
    folder, _ = tiny_checkpoint(
        tmp_path_factory.mktemp("model"), "llama", vocab_size=len(tokenizer), eos_token_id=256
    )
    tokenizer.save_pretrained(folder)
    return folder


def run(model: Path, *args: str, lines: str = "") -> Result:
    command = ["run", str(model), *POOL_FLAGS, "--max-tokens", "6", *args]
    return CliRunner().invoke(build_app(MANAGER), command, input=lines)


def expected(model: Path, prompt: Any, **params: Any) -> Any:
    with Engine(model, manager=MANAGER, **POOL) as engine:
        (output,) = engine.generate(prompt, SamplingParams(**{"max_tokens": 6, **params}))
    return output


def test_the_answer_goes_to_stdout_and_all_else_to_stderr(model):
    result = run(model, "hello", "--temperature", "0")
    assert result.exit_code == 0
    assert result.stdout == expected(model, "hello", temperature=0).text + "\n"
    report, *_, figures = result.stderr.splitlines()
    assert report == f"{model} in float32 on cpu"
    assert figures.startswith("6 tokens at ") and " tokens/s, the first after " in figures
    assert figures.endswith("prompt of 5, 0 of them cached, ended by length")


def test_json_is_one_object_and_nothing_else_on_stdout(model):
    result = run(model, "hello", "--json", "--temperature", "0")
    content, output = json.loads(result.stdout), expected(model, "hello", temperature=0)
    assert result.exit_code == 0
    assert content["text"] == output.text
    assert content["token_ids"] == output.token_ids
    assert content["finish_reason"] == "length"
    assert content["usage"] == {"prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 6}
    times = content["timings"]
    assert 0 < times["time_to_first_token_s"] < times["total_s"]
    after_first = times["total_s"] - times["time_to_first_token_s"]
    assert times["decode_tokens_per_s"] == pytest.approx(5 / after_first)


def test_sampling_options_reach_the_sampler(model):
    given = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    content = json.loads(run(model, "hello", "--json", *flags).stdout)
    assert content["token_ids"] == expected(model, "hello", **given).token_ids
    assert content["token_ids"] != expected(model, "hello", **given | {"seed": 8}).token_ids


def test_stop_may_be_given_several_times(model):
    text = expected(model, "hello", temperature=0).text
    first, second = text[2], text[1]
    result = run(model, "hello", "--temperature", "0", "--stop", first, "--stop", second)
    assert result.stdout == text[: min(text.index(first), text.index(second))] + "\n"
    assert "ended by" not in result.stderr


def test_chat_puts_the_prompt_into_the_template(model):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    result = run(model, "hi", "--chat", "--system", "be brief", "--temperature", "0")
    assert result.stdout == expected(model, messages, temperature=0).text + "\n"


@pytest.mark.parametrize("flags", [["--chat"], []])
def test_lines_in_a_chat_keep_the_conversation_and_hit_the_prefix_cache(model, flags):
    result = run(model, *flags, "--json", "--temperature", "0", lines="hi\n\nyou?\n")
    first, second = map(json.loads, result.stdout.splitlines())
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "you?"},
    ]
    output = expected(model, conversation, temperature=0)
    assert second["token_ids"] == output.token_ids
    assert second["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert first["usage"]["cached_tokens"] == 0 and second["usage"]["cached_tokens"] >= 4


def test_without_chat_each_line_is_a_prompt_of_its_own(model):
    lines = "hello\nhello\n/exit\nnever\n"
    result = run(model, "--no-chat", "--temperature", "0", lines=lines)
    text = expected(model, "hello", temperature=0).text
    assert (result.exit_code, result.stdout) == (0, f"{text}\n{text}\n")


def test_lines_to_a_model_without_a_template_are_prompts_unless_there_is_a_system_message(
    model, tmp_path
):
    plain = Path(shutil.copytree(model, tmp_path / "plain"))
    (plain / "chat_template.jinja").unlink()
    text = expected(model, "hello", temperature=0).text
    result = run(plain, "--temperature", "0", lines="hello\nhello\n")
    assert (result.exit_code, result.stdout) == (0, f"{text}\n{text}\n")
    result = run(plain, "--system", "be brief", lines="hello\n")
    assert (result.exit_code, result.stdout) == (2, "")
    refusal = f"error: {plain} has no chat template: leave out --chat and --system\n"
    assert result.stderr.endswith(refusal)
    assert run(plain, "hello", "--chat").stderr.endswith(refusal)


def test_a_refused_line_is_named_and_the_next_one_answered(model):
    lines = f"{'x' * 64}\nhello\n"
    result = run(model, "--no-chat", "--temperature", "0", lines=lines)
    assert result.exit_code == 0
    assert "error: prompt of 64 tokens is too long: max_model_len=64" in result.stderr
    assert result.stdout == expected(model, "hello", temperature=0).text + "\n"
    refused, answered = map(
        json.loads, run(model, "--no-chat", "--json", lines=lines).stdout.splitlines()
    )
    assert refused["error"].startswith("prompt of 64 tokens is too long")
    assert answered["usage"]["prompt_tokens"] == 5


def test_a_refused_line_leaves_no_trace_in_the_conversation(model):
    result = run(model, "--chat", "--json", "--temperature", "0", lines=f"{'x' * 64}\nhi\n")
    content = json.loads(result.stdout.splitlines()[1])
    messages = [{"role": "user", "content": "hi"}]
    assert content["token_ids"] == expected(model, messages, temperature=0).token_ids


def test_empty_input_is_no_error(model):
    result = run(model)
    assert (result.exit_code, result.stdout) == (0, "")


def test_a_prompt_that_is_refused_ends_with_2_and_an_empty_stdout(model):
    result = run(model, "x" * 64, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("error: prompt of 64 tokens is too long")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "nan"], "temperature=nan is out of range"),
        (["--top-p", "2"], "top_p=2.0 is out of range"),
        (["--max-tokens", "0"], "max_tokens=0 is out of range"),
        (["--system", "be brief"], "needs --chat"),
        (["--system", "be brief", "--no-chat"], "needs --chat"),
        (["--load-format", "dummy"], "load_format='dummy': random weights have no tokenizer"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_looked_for(args, message):
    result = run(Path("no-such-model"), "hello", *args)
    assert result.exit_code == 2
    assert message in result.stderr and "no-such-model" not in result.stderr


def test_engine_options_reach_the_engine(model):
    result = run(model, "hello", "--dtype", "float46")
    assert result.exit_code == 2
    assert "dtype='float46' (did you mean 'float64'?)" in result.stderr
    result = run(model, "hello", "--dtype", "float64", "--max-model-len", "20")
    assert f"{model} in float64 on cpu" in result.stderr
    assert "at most 12 requests of 20 tokens" in result.stderr
    flags = ["--no-chat", "--no-enable-prefix-caching"]
    result = run(model, *flags, "--json", lines="hello\nhello\n")
    assert [json.loads(s)["usage"]["cached_tokens"] for s in result.stdout.splitlines()] == [0, 0]


def test_the_load_of_experts_is_a_table_after_the_answers(model, tmp_path):
    sparse, _ = tiny_checkpoint(tmp_path, "qwen3-moe", vocab_size=257, mlp_only_layers=[0])
    for file in model.glob("tokenizer*"):
        shutil.copy(file, sparse)
    flags = ["--expert-load", "--expert-kernel", "torch"]
    command = ["run", str(sparse), "hello", *POOL_FLAGS, "--max-tokens", "6", *flags]
    result = CliRunner().invoke(build_app(plugins()), command)
    assert result.exit_code == 0
    head, line, note = result.stderr.splitlines()[-3:]
    columns = ["experts", "choices", "used", "max/mean", "busiest expert (share)"]
    assert re.split(" {2,}", head) == columns
    assert note.startswith("in the model's last layer, only tokens that are sampled from")
    layer, tokens, used, imbalance, busiest, share = line.split()
    # The last layer computes a prompt's last token alone.
    assert (layer, tokens) == ("model.layers.1.mlp.experts", str((1 + 5) * 3))
    assert re.fullmatch(r"[3-8]/8", used) and 1 <= float(imbalance) <= 8 / 3
    assert 0 <= int(busiest) < 8
    assert float(share[1:-2]) == pytest.approx(100 * float(imbalance) / 8, abs=0.1)


def test_the_load_of_experts_is_refused_where_there_are_none(model):
    result = run(model, "hello", "--expert-load")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--expert-load: {model} has no experts" in result.stderr


def test_options_not_given_are_the_engines_own_defaults():
    assert EngineConfig.create(model="m", **EngineOptions().arguments()) == EngineConfig(model="m")


@pytest.mark.parametrize(("name", "kind"), [("dp", "Data"), ("ep", "Expert")])
def test_the_help_names_the_only_number_of_ranks_that_is_legal(model, name, kind):
    assert f"choose {name}=1" in run(model, "hello", f"--{name}", "2").stderr
    described = CliRunner().invoke(build_app(MANAGER), ["run", "--help"]).stdout
    assert f"{kind}-parallel ranks; only 1" in " ".join(described.split())


def test_an_answer_that_the_model_cannot_give_ends_with_1(model, tmp_path):
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    edit_tensors(broken, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    result = run(broken, "hello")
    assert (result.exit_code, result.stdout) == (1, "\n")
    assert "0 tokens, " in result.stderr
    assert result.stderr.endswith("ended by error: the model's logits left no token to sample\n")


def test_a_key_of_the_config_is_blamed_for_what_is_wrong_with_it(model, tmp_path):
    """And not the tokenizer, whose library reads the config too."""
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    edit_config(broken, lambda config: config.update(num_hidden_layers="two"))
    result = run(broken, "hello")
    assert result.exit_code == 2
    assert "num_hidden_layers='two' must be a positive integer" in result.stderr


def test_the_startup_report_says_what_was_mounted_and_what_fits(model):
    with Engine(model, manager=MANAGER, num_kv_blocks=50, block_size=4) as engine:
        lines = startup_report(engine.rack, engine.core, engine.manager)
    backends = "torch (rackmount-plugins-backends 0), the only one that fits"
    weights = sum(t.nbytes for t in load_file(model / "model.safetensors").values())
    assert lines[0] == f"{model} in float32 on cpu"
    assert "architecture: llama (rackmount-plugins-models 0), as config.json says" in lines
    assert "quantization_scheme: none, as config.json says" in lines
    assert f"linear_kernel for dense: {backends}" in lines
    assert f"attention_backend: {backends}" in lines
    assert not any("quantization_config" in line for line in lines)
    assert lines[-5:] == [
        f"weights: {weights / 1024:.1f} KiB ({weights / 1024:.1f} KiB read)",
        "KV memory: 100 KiB",  # 2 layers, keys and values, 2 heads of 16, 4 bytes: 512 a token
        "KV cache: 200 tokens (50 blocks of 4)",
        "at most 3 requests of 64 tokens",
        "CUDA graphs: none, cpu has no CUDA graphs",
    ]


def test_the_startup_report_tells_names_that_the_checkpoint_lists_in_vain(model, tmp_path):
    folder = Path(shutil.copytree(model, tmp_path / "w8"))
    stored = {"quant_method": "w8", "ignore": ["lm_head", "mlp.upproj"]}
    edit_config(folder, lambda values: values.update(quantization_config=stored))
    given = {"load_format": "dummy", "num_kv_blocks": 50, "block_size": 4}
    with Engine(folder, manager=plugins(), device="cpu", **given) as engine:
        lines = startup_report(engine.rack, engine.core, engine.manager)
    assert "quantization_config names 'mlp.upproj': no tensor of this model is meant" in lines
