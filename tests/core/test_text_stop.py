"""Stop strings against a definition on the whole text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rackmount.text.stop import StopStrings


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grows the text by a character until it ends with a stop string; the longest of these cuts."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def stream(pieces: list[str], stops: list[str], include: bool = False):
    """Each push's text, the flush's text last, and the stop string that ended it."""
    matcher, out = StopStrings(stops, include), []
    for piece in pieces:
        text, matched = matcher.push(piece)
        out.append(text)
        if matched is not None:
            return [*out, matcher.flush()], matched
    return [*out, matcher.flush()], None


ABC = st.text("ab€", max_size=30)


@settings(deadline=None, max_examples=400)
@given(
    pieces=st.lists(ABC, max_size=12),
    stops=st.lists(st.text("ab€", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
@example(pieces=["aaaab"], stops=["aaab"], include=False)
@example(pieces=list("aabaabaa€"), stops=["aabaaa", "aabaa€"], include=False)
def test_any_pieces_give_the_text_of_the_definition_and_leak_nothing(pieces, stops, include):
    text = "".join(pieces)
    expected, stop = naive(text, stops, include)
    out, matched = stream(pieces, stops, include)
    assert ("".join(out), matched) == (expected, stop)
    for end in range(len(out)):
        assert expected.startswith("".join(out[:end]))


@settings(deadline=None)
@given(pieces=st.lists(ABC, max_size=12), stops=st.lists(st.text("ab€", min_size=1), max_size=3))
def test_only_what_may_begin_a_stop_string_is_held(pieces, stops):
    matcher, given_out, pushed = StopStrings(stops), "", ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        if matched is not None:
            return
        given_out, pushed = given_out + text, pushed + piece
        held = pushed[len(given_out) :]
        assert given_out + held == pushed
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_over_many_pieces_does_not_leak():
    assert stream(list("abcDEFGHIJk"), ["DEFGHIJ"]) == ([*"abc", *7 * [""], ""], "DEFGHIJ")


def test_a_false_alarm_is_given_out_as_soon_as_it_is_one():
    assert stream(["abc", "DEF", "x"], ["DEFGHIJ"]) == (["abc", "", "DEFx", ""], None)


def test_held_text_comes_from_the_flush_when_the_output_ends():
    assert stream(["abcDEF"], ["DEFGHIJ"]) == (["abc", "DEF"], None)


def test_the_stop_string_that_ends_first_wins_and_of_those_the_longest():
    assert stream(["xabcd"], ["abcd", "b"]) == (["xa", ""], "b")
    assert stream(["xabcd"], ["bc", "abc", "c"]) == (["x", ""], "abc")


def test_a_stop_string_of_one_character_holds_nothing():
    assert stream(["ab", "c\nd"], ["\n"]) == (["ab", "c", ""], "\n")


def test_the_stop_string_may_stay_in_the_output():
    assert stream(["ab", "STO", "P!"], ["STOP"], include=True) == (["ab", "", "STOP", ""], "STOP")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match=r"stop=\['a', ''\] has an empty string"):
        StopStrings(["a", ""])


def test_a_long_repetitive_stop_string_costs_no_more_per_character():
    watch = StopStrings(["a" * 20_000 + "b"])
    out, matched = watch.push("a" * 200_000)
    assert (len(out), matched) == (180_000, None)
    assert watch.push("b") == ("", "a" * 20_000 + "b")
