"""What requests may ask for, and the words in which the rest is refused."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackmount.sampling import params as params_module
from rackmount.sampling.params import SamplingParams
from rackmount_registry.errors import RackmountError

INF, NAN = math.inf, math.nan


def test_an_unknown_keyword_is_a_type_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]  # the point of the test
    assert str(error.value) == "unexpected keyword 'temprature' (did you mean 'temperature'?)"
    with pytest.raises(TypeError, match=r"unexpected keyword 'zzz'$"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


def test_parameters_are_keywords_only_and_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[call-arg]
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        *((name, value, "finite number from 0") for name in ("temperature", "top_p", "min_p")
          for value in (NAN, INF, -INF, -0.1)),
        ("temperature", 10**400, "from 0 up"),
        ("top_p", 1.01, "from 0 to 1"),
        ("min_p", 1.01, "from 0 to 1"),
        ("top_k", -2, "an integer from -1 up"),
        ("n", 0, "from 1 to 1024"),
        ("n", 10**9, "from 1 to 1024"),
        *(("repetition_penalty", value, "from 0.01 to 100") for value in (NAN, INF, 0, -1, 101)),
        *((name, value, "from -2 to 2") for name in ("presence_penalty", "frequency_penalty")
          for value in (NAN, -INF, -2.1, 2.1)),
        ("min_tokens", -1, "an integer from 0 up"),
        ("max_tokens", 0, "an integer from 1 up"),
        ("seed", -1, f"from 0 to {2**64 - 1}"),
        ("seed", 2**64, f"from 0 to {2**64 - 1}"),
        ("logprobs", -1, "an integer from 0 up"),
        ("prompt_logprobs", -1, "an integer from 0 up"),
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_with_value_and_legal_values(
    name: str, value: Any, legal: str
) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    assert isinstance(error.value, RackmountError)
    assert str(error.value).startswith(f"{name}={value!r} is out of range; it must be ")
    assert legal in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_token_ids": []}, "allows no token"),
        ({"allowed_token_ids": [3, -1]}, "allowed_token_ids id=-1 is out of range"),
        ({"stop_token_ids": [-7]}, "stop_token_ids id=-7 is out of range"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias id=-1 is out of range"),
        ({"logit_bias": {5: NAN}}, r"logit_bias\[5\]=nan is out of range.*from -100 to 100"),
        ({"logit_bias": {5: 101}}, r"logit_bias\[5\]=101 is out of range.*from -100 to 100"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias has 1025 ids; it must have from 0 to 1024",
        ),
        ({"bad_words": ["a", ""]}, "bad_words holds an empty string"),
        ({"stop": ""}, "stop holds an empty string"),
        ({"stop": ["a", ""]}, "stop holds an empty string"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is above max_tokens=4"),
        ({"stop": "a", "detokenize": False}, "stop='a' needs text"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs")
          for value in (True, 1.0, "1", [1])),
        *((name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty")
          for value in (True, "0.5", None, 1j)),
        ("n", None),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("stop", 5),
        ("stop", ("a",)),
        ("stop", [b"a"]),
        ("bad_words", "word"),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [True]),
        ("stop_token_ids", ["5"]),
        ("logit_bias", [1]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: False}),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_a_type_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"temperature": 1e-300},
        {"temperature": 1e300},
        {"top_p": 0},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"top_k": -1},
        {"top_k": 10**30},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
        {"min_tokens": 4, "max_tokens": 4},
        {"stop": ["a", "b"]},
        {"logit_bias": {0: 100, 1: -100.0}},
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
    ],
)
def test_the_ends_of_every_range_are_legal(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert all(getattr(params, name) == value for name, value in given.items())


def test_ids_must_lie_in_the_vocabulary() -> None:
    for given in ({"logit_bias": {10: 1.0}}, {"allowed_token_ids": [10]}, {"stop_token_ids": [10]}):
        params = SamplingParams(**given)
        params.validate_for(11)
        with pytest.raises(ValueError, match=r"id 10, which is outside.*legal ids are 0 to 9"):
            params.validate_for(10)


def test_no_more_logprobs_than_the_vocabulary_has_ids() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        params = SamplingParams(**{name: 10})  # type: ignore[arg-type]
        params.validate_for(10)
        with pytest.raises(ValueError, match=f"{name}=10 is above .* from 0 to 9"):
            params.validate_for(9)


def test_min_tokens_needs_an_allowed_id_that_does_not_end_the_request() -> None:
    params = SamplingParams(allowed_token_ids=[2, 3], stop_token_ids=[3], min_tokens=1)
    params.validate_for(10)
    params.validate_for(10, eos_token_ids=[4])
    with pytest.raises(ValueError, match="min_tokens=1 bans every id"):
        params.validate_for(10, eos_token_ids=[2])
    ignoring = SamplingParams(
        allowed_token_ids=[2, 3], stop_token_ids=[3], min_tokens=1, ignore_eos=True
    )
    ignoring.validate_for(10, eos_token_ids=[2])


def test_stop_ids_are_the_requests_own_and_the_models_unless_ignored() -> None:
    assert SamplingParams(stop_token_ids=[3]).stop_ids([1, 2]) == {1, 2, 3}
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).stop_ids([1, 2]) == {3}


def test_stop_strings_are_a_tuple_however_given() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_parameters_survive_copies_and_messages() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.5}, seed=2**64 - 1)
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_the_documented_table_is_the_modules() -> None:
    page = Path(__file__).parents[2] / "docs" / "sampling.md"
    rows = [line for line in (params_module.__doc__ or "").splitlines() if line.startswith("|")]
    assert len(rows) > 15
    assert "\n".join(rows) in page.read_text()
