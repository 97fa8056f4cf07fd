"""What a row may draw, as a bitmask: held to plain sets; the same array while nothing changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackmount.sampling.bitmask import ban, num_words
from rackmount.sampling.masks import RowMask, completions

V = 70
IDS = st.integers(0, V - 1)


def tokens(bitmask: np.ndarray) -> set[int]:
    marks = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:V]
    return set(np.flatnonzero(marks).tolist())


def mask_of(**given: object) -> RowMask:
    nothing = {
        "allowed": None,
        "grammar": None,
        "bad_words": [],
        "early": [],
        "min_position": 0,
    }
    return RowMask(V, **(nothing | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(("vocab_size", "expected"), [(1, 1), (32, 1), (33, 2), (151936, 4748)])
def test_a_bitmask_has_words_enough(vocab_size: int, expected: int) -> None:
    assert num_words(vocab_size) == expected


def test_a_ban_clears_its_bits_and_no_other() -> None:
    bitmask = np.full(num_words(V), -1, np.int32)
    ban(bitmask, [0, 31, 32, 69, 31])
    assert tokens(bitmask) == set(range(V)) - {0, 31, 32, 69}
    ban(bitmask, [])
    ban(bitmask, [96, 151936])
    assert len(tokens(bitmask)) == V - 4


@given(
    allowed=st.none() | st.lists(IDS, min_size=1),
    bad_words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=4),
    early=st.sets(IDS),
    min_position=st.integers(0, 6),
    history=st.lists(st.integers(0, 4), max_size=9),
)
def test_all_bans_together_leave_what_none_of_them_takes(
    allowed: list[int] | None,
    bad_words: list[list[int]],
    early: set[int],
    min_position: int,
    history: list[int],
) -> None:
    expected = set(range(V) if allowed is None else allowed)
    for *start, last in bad_words:
        if len(start) <= len(history) and start == history[len(history) - len(start) :]:
            expected.discard(last)
    if len(history) < min_position:
        expected -= early
    mask = mask_of(allowed=allowed, bad_words=bad_words, early=early, min_position=min_position)
    assert tokens(mask.at(np.array(history, int))) == expected
    assert mask.reads_history == any(len(word) > 1 for word in bad_words)


def test_a_mask_that_reads_no_history_is_the_same_array_until_the_stop_ids_are_free() -> None:
    mask = mask_of(allowed=[1, 2, 3], bad_words=[[3]], early=[2], min_position=4)
    early, late = mask.at(np.zeros(3, int)), mask.at(np.zeros(4, int))
    assert (tokens(early), tokens(late)) == ({1}, {1, 2})
    assert mask.at(np.zeros(0, int)) is early and mask.at(np.zeros(9, int)) is late


def test_a_word_longer_than_the_history_is_not_completed() -> None:
    assert completions([[1, 2, 3], [2, 3], [5]], np.array([2])) == [3, 5]
    assert completions([[1, 2], [5]], np.array([], int)) == [5]
    assert completions([], np.array([1])) == []
