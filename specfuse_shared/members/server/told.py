"""What a server told of the places of one answer, so that it is asked once."""

from __future__ import annotations

from collections.abc import Sequence

from specfuse_shared.errors import ServerError
from specfuse_shared.members.server.dialect import Place, with_place

_NOTHING = Place()


class Told:
    """Places by the ids between the prompt and them. `vocabulary_size`: ids are below it."""

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size
        self._places = dict[tuple[int, ...], Place]()

    def add(self, ids: tuple[int, ...], place: Place) -> None:
        """Raises `ServerError` for a token that is none."""
        token = place.likeliest
        if token is not None and not (type(token) is int and 0 <= token < self._size):
            raise ServerError("the server gave tokens that its model does not have")
        with_place(self._places, ids, place)

    def at(self, ids: tuple[int, ...]) -> Place:
        """What is known of the place behind `ids`."""
        return self._places.get(ids, _NOTHING)

    def knows(self, ids: tuple[int, ...], tokens: Sequence[int]) -> bool:
        """Whether log p of all these tokens behind `ids` is known."""
        return set(tokens) <= self.at(ids).logprobs.keys()

    def unknown_from(self, ids: tuple[int, ...], start: int) -> int:
        """The place of the first of the ids, from `start` on, whose log p is not known; their number, if all are."""
        places = range(start, len(ids))
        return next((n for n in places if not self.knows(ids[:n], ids[n : n + 1])), len(ids))

    def keep(self, answer: tuple[int, ...]) -> None:
        """The answer is this now; of other ones nothing is needed any more."""
        self._places = {ids: place for ids, place in self._places.items() if ids[: len(answer)] == answer}

    def clear(self) -> None:
        """The prompt is another one now."""
        self._places.clear()
