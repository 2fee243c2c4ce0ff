"""Stop strings across segments are found and never streamed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfuse_shared import ConfigError, SamplingParams
from specfuse_shared.text.stops import LONGEST_STOP, MOST_STOPS, StopHold, find_stop, find_stops, partial_stop


@given(
    pieces=st.lists(st.text("abX", max_size=5), max_size=8),
    stops=st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_released_text_never_begins_a_stop_and_ends_before_it(pieces: list[str], stops: list[str]) -> None:
    hold, text, output = StopHold(stops), "", ""
    for piece in pieces:
        match = find_stop(text, piece, stops)
        if match is not None:
            output += hold.finish(piece, match.start)
            text += piece
            break
        output += hold.feed(piece)
        text += piece
        assert text.startswith(output)
    else:
        output += hold.finish("", len(text))
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert output == (text[: min(ends)] if ends else text)


def test_the_earliest_stop_string_wins_and_the_longest_at_one_position() -> None:
    match = find_stop("one ", "two END. three", ["three", "END", "END."])
    assert match is not None
    assert (match.start, match.stop) == (8, "END.")


def test_a_stop_string_can_begin_in_earlier_text() -> None:
    match = find_stop("answer\nObs", "ervation: 3", ["\nObservation:"])
    assert match is not None
    assert (match.start, match.end) == (6, 19)


def test_partial_stop_strings_are_held_back() -> None:
    assert partial_stop("answer\nObs", ["\nObservation:"]) == 4
    assert partial_stop("answer", ["\nObservation:"]) == 0
    hold = StopHold(["\nObservation:"])
    assert hold.feed("answer\nObs") == "answer"
    assert hold.feed("cure") == "\nObscure"


@given(text=st.text("ab", max_size=12), addition=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1)))
def test_every_stop_string_is_found_although_it_overlaps_others(text: str, addition: str, stops: list[str]) -> None:
    whole, result = text + addition, find_stops(text, addition, stops)
    for at in range(len(whole)):
        here = [s for s in stops if whole.startswith(s, at) and at + len(s) > len(text)]
        assert [m.stop for m in result if m.start == at] == ([max(here, key=len)] if here else [])


@pytest.mark.parametrize(
    ("stop", "reported"),
    [
        (["x"] * (MOST_STOPS + 1), rf"stop must have at most {MOST_STOPS} items, not {MOST_STOPS + 1}$"),
        (["a", "x" * (LONGEST_STOP + 1)], rf"stop\[1\] must have at most {LONGEST_STOP} characters, not 'x"),
        (["a", ""], r"stop\[1\] must have at least 1 character, not ''"),
    ],
)
def test_too_many_stops_and_too_long_or_empty_ones_are_refused(stop: list[str], reported: str) -> None:
    with pytest.raises(ConfigError, match=rf"SamplingParams\.{reported}"):
        SamplingParams(stop=stop)
    assert SamplingParams(stop=["x" * LONGEST_STOP] * MOST_STOPS)
