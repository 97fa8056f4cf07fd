"""SmolLM2-135M-Instruct, from the wheel on the package index to its answers."""

from typing import Any

import pytest
import torch
from benchmarks.cpu_decode import oracle
from tests.helpers.engines import assert_idle, greedy, tokens_of

from rackmount import Engine, SamplingParams

LENGTH = 64
"""Tokens of a prompt."""
SHORT, LONG = 24, 64
"""Tokens of an answer, in the quick lane and in the slow one."""

TEXTS = [
    "The history of the printing press begins long before Gutenberg. In China, printers carved "
    "whole pages of text into blocks of wood, inked them, and pressed them onto paper. Movable "
    "type followed in the eleventh century, made of clay that was baked hard. What Gutenberg "
    "added in Mainz around 1450 was a mould that cast letters of metal",
    "def fibonacci(n):\n    '''Return the first n Fibonacci numbers as a list.'''\n    numbers = "
    "[0, 1]\n    while len(numbers) < n:\n        numbers.append(numbers[-1] + numbers[-2])\n    "
    "return numbers[:n]\n\n\ndef is_prime(n):\n    '''Tell whether n is a prime number.'''\n    "
    "if n < 2:\n        return False\n",
    "Once upon a time, in a village between two mountains, there lived an old clockmaker who "
    "could not sleep. Every night he sat by his window, listened to the hundred clocks in his "
    "shop, and waited for the one that was always late. One evening in autumn a girl knocked at "
    "his door. She held a small silver watch",
    "To make a simple tomato soup, you need two pounds of ripe tomatoes, one onion, two cloves of "
    "garlic, a little olive oil, salt, pepper and a handful of fresh basil. First, chop the onion "
    "and the garlic. Then heat the oil in a large pot over medium heat and add the onion. Stir "
    "until it is soft, about five minutes. Next",
    "Water boils at 100 degrees Celsius at sea level, but on a high mountain it boils at a lower "
    "temperature, because the air pressure is lower there. This is why food takes longer to cook "
    "in the mountains. A pressure cooker works the other way around: it keeps the steam inside, "
    "so that the pressure rises and the water",
]


@pytest.fixture(scope="module")
def prompts(smollm2: Engine) -> list[list[int]]:
    return [smollm2.tokenizer.encode(text)[:LENGTH] for text in TEXTS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], request: pytest.FixtureRequest) -> list[list[int]]:
    """What `transformers` generates, from the tensors that the same reader gives: so many tokens as
    the test that asks wants."""
    ids, length = torch.tensor(prompts), request.param
    assert ids.shape == (5, LENGTH)
    model: Any = oracle("smollm2-135m", torch.float32)
    with torch.inference_mode():
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
        )
    answers: list[list[int]] = generated[:, LENGTH:].tolist()
    assert all(len(answer) == length for answer in answers)
    return answers


@pytest.mark.parametrize(
    "expected", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], indirect=True
)
def test_greedy_text_of_five_prompts_together_equals_transformers(
    smollm2: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    outputs = smollm2.generate(prompts, greedy(len(expected[0])))  # type: ignore[arg-type]
    assert [output.token_ids for output in outputs] == expected
    assert [output.text for output in outputs] == smollm2.tokenizer.batch_decode(expected)
    assert_idle(smollm2)


@pytest.mark.parametrize(
    ("expected", "index"),
    [(SHORT, 0), *(pytest.param(LONG, i, marks=pytest.mark.slow) for i in range(5))],
    indirect=["expected"],
)
def test_greedy_text_of_a_prompt_alone_equals_transformers(
    index: int, smollm2: Engine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    smollm2.reset_prefix_cache()
    assert tokens_of(smollm2, [prompts[index]], greedy(len(expected[0]))) == [expected[index]]


def test_it_knows_the_capital_of_france(smollm2: Engine) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=40)
    (output,) = smollm2.generate(question, params)
    assert output.text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert "".join(chunk.text for chunk in smollm2.stream(question, params)) == output.text
    assert smollm2.generate(question, params)[0].num_cached_tokens > 16
