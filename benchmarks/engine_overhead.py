"""What the host does for a step beside the model: microseconds a decode step, by part.

Usage: python benchmarks/engine_overhead.py [--requests 1 256] [--steps 200] [--text FOLDER]
       [--out FILE.json]

An engine whose executor answers every step at once, with random tokens. Parts are medians over the
steps in which all requests decode. With `--text` answers are text, by the tokenizer in FOLDER.
"codec" is what ranks in processes of their own add: the plan to bytes, and the result from bytes.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from rackmount import Engine, SamplingParams
from rackmount.execution.codec import MessageCodec
from rackmount.execution.messages import StepResult
from rackmount.scheduling.plan import StepPlan
from rackmount_tools.machine import describe_machine

VOCAB, PROMPT_TOKENS = 32_000, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": VOCAB,
    "dtype": "float32",
}


class RandomAnswers:
    """A `rackmount_registry.executor.Executor` without ranks."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()
        self._tokens = np.random.default_rng(0).integers(VOCAB, size=1 << 16, dtype=np.int32)
        self._num_steps = 0
        self.decode: tuple[StepPlan, StepResult] | None = None
        """The last step of all requests."""

    def call(self, request: Any) -> list[Any]:
        raise AssertionError("the start is over")

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        self._num_steps += 1
        first = 37 * self._num_steps % (1 << 15)
        result = StepResult(token_ids=self._tokens[first : first + np.count_nonzero(plan.samples)])
        self.decode = plan, result
        return result

    def forget(self) -> None:
        self._plans.clear()

    def close(self) -> None:
        self._plans.clear()


class Watch:
    """Microseconds of each call, by name."""

    def __init__(self) -> None:
        self._spent: dict[str, list[float]] = {}

    def over(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        spent = self._spent.setdefault(name, [])

        def timed(*given: Any) -> Any:
            begin = time.perf_counter_ns()
            result = inner(*given)
            spent.append((time.perf_counter_ns() - begin) / 1e3)
            return result

        return timed

    def median(self, name: str) -> float:
        """Without the first and the last calls, which admit and end."""
        return statistics.median(self._spent[name][3:-3])


def measure(folder: Path, num: int, steps: int, tokenizer: Any, stream: bool) -> dict[str, float]:
    """The parts of a step for `num` requests that decode."""
    engine = Engine(
        folder,
        load_format="dummy",
        device="cpu",
        async_scheduling=True,
        max_num_seqs=num,
        max_num_batched_tokens=max(2048, num * PROMPT_TOKENS),
        max_model_len=PROMPT_TOKENS + steps + 2,
        num_kv_blocks=num * ((PROMPT_TOKENS + steps) // 16 + 2),
        block_size=16,
    )
    with engine:
        core, executor, watch = engine.core, RandomAnswers(), Watch()
        core.executor.close()
        core.executor, engine._intake.tokenizer = executor, tokenizer
        owners: dict[str, Any] = {
            "schedule": core.scheduler,
            "submit": executor,
            "collect": executor,
            "update": core.scheduler,
            "step": core,
            "_step": engine,
        }
        for name, owner in owners.items():
            setattr(owner, name, watch.over(name, getattr(owner, name)))
        prompts = np.random.default_rng(1).integers(VOCAB, size=(num, PROMPT_TOKENS)).tolist()
        params = SamplingParams(
            temperature=0, max_tokens=steps, ignore_eos=True, detokenize=tokenizer is not None
        )
        begin = time.perf_counter_ns()
        if stream:
            for _ in engine.stream(prompts, params):
                pass
        else:
            engine.generate(prompts, params)
        whole = (time.perf_counter_ns() - begin) / 1e3 / steps
        assert core.stats.total_sampled_tokens == num * steps, "a request ended early"
    schedule, update, step, all_of_it = map(watch.median, ("schedule", "update", "step", "_step"))
    fake = watch.median("submit") + watch.median("collect")
    assert executor.decode is not None
    return {
        "schedule": schedule,
        "update": update,
        "events": step - schedule - update - fake,
        "delivery": all_of_it - step,
        "a step": all_of_it - fake,
        "mean of all steps, prompts too": whole,
        "codec": codec_us(*executor.decode),
    }


def codec_us(plan: StepPlan, result: StepResult) -> float:
    codec, spent = MessageCodec(), []
    data = codec.encode(result)
    for _ in range(200):
        begin = time.perf_counter_ns()
        codec.encode(plan)
        codec.decode(data)
        spent.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--text", type=Path, help="a folder with a tokenizer; else tokens alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokenizers: dict[str, Any] = {"tokens": None}
    if args.text:
        from transformers import AutoTokenizer

        tokenizers["text"] = AutoTokenizer.from_pretrained(args.text)
    results = {}
    with TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(CONFIG))
        for num in args.requests:
            for kind, tokenizer in tokenizers.items():
                for way in ("generate", "stream"):
                    parts = measure(Path(name), num, args.steps, tokenizer, way == "stream")
                    rounded = {part: round(value, 1) for part, value in parts.items()}
                    results[f"{num} requests, {kind}, {way}"] = rounded
    summary = json.dumps({"machine": describe_machine("numpy"), "step_us": results}, indent=1)
    print(summary)
    if args.out:
        args.out.write_text(summary + "\n")


if __name__ == "__main__":
    main()
