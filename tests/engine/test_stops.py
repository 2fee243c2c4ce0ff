"""Stop strings across borders: found, never shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specfuse_shared.text.stops import StopHold, find_stop, partial_stop


@given(
    pieces=st.lists(st.text("abX", max_size=5), max_size=8),
    stops=st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_what_is_released_never_begins_a_stop_and_ends_before_it(pieces: list[str], stops: list[str]) -> None:
    hold, text, shown = StopHold(stops), "", ""
    for piece in pieces:
        match = find_stop(text, piece, stops)
        if match is not None:
            shown += hold.finish(piece, match.start)
            text += piece
            break
        shown += hold.feed(piece)
        text += piece
        assert text.startswith(shown)
    else:
        shown += hold.finish("", len(text))
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert shown == (text[: min(ends)] if ends else text)


def test_the_earliest_stop_wins_and_the_longest_of_equals() -> None:
    match = find_stop("one ", "two END. three", ["three", "END", "END."])
    assert match is not None
    assert (match.start, match.stop) == (8, "END.")


def test_a_stop_may_begin_in_the_known_text() -> None:
    match = find_stop("answer\nObs", "ervation: 3", ["\nObservation:"])
    assert match is not None
    assert (match.start, match.end) == (6, 19)


def test_partial_stops_are_held() -> None:
    assert partial_stop("answer\nObs", ["\nObservation:"]) == 4
    assert partial_stop("answer", ["\nObservation:"]) == 0
    hold = StopHold(["\nObservation:"])
    assert hold.feed("answer\nObs") == "answer"
    assert hold.feed("cure") == "\nObscure"
