"""What several members think, as the one text that clients have a place for."""

from __future__ import annotations

from specfuse_shared.events import ThinkingEvent


class Thoughts:
    """Members think at the same time; as one text, the first one's comes as it grows, the others' behind it."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._others: dict[str, str] = {}

    def feed(self, event: ThinkingEvent) -> str:
        """What can be told at once."""
        self._first = self._first or event.member
        if event.member == self._first:
            return event.text
        self._others[event.member] = self._others.get(event.member, "") + event.text
        return ""

    def rest(self) -> str:
        """What was kept back, when the answer begins."""
        kept, self._others = self._others, {}
        return "".join(f"\n\n{thoughts}" for thoughts in kept.values())
