"""How probable given texts are to each member as the beginning of its answer; nothing is written."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence

from specfuse_shared.errors import GenerationError
from specfuse_shared.events import Event, FinishEvent
from specfuse_shared.fusion.drafting import Results
from specfuse_shared.fusion.lateness import Wanted
from specfuse_shared.fusion.participants import Participants
from specfuse_shared.members.base import Member
from specfuse_shared.members.stages import Close, Fault, Open, ScoringQuery, Verdicts, Verify
from specfuse_shared.messages import Message
from specfuse_shared.results import EnsembleResult
from specfuse_shared.settings.config import EnsembleConfig
from specfuse_shared.settings.sampling_params import SamplingParams
from specfuse_shared.text.tool_calls import ToolUse
from specfuse_shared.types import FinishReason


class ScoringSession:
    """One prompt, put to members with texts that they shall judge; `scores` holds what each found.

    A session like `AnswerSession`, whose answer is empty. A member that fails has no scores; where all do, it raises
    `GenerationError`. Raises `RequestError` on construction if the request cannot be served.
    """

    text = ""
    max_thinking_tokens = 0

    def __init__(
        self,
        config: EnsembleConfig,
        members: Sequence[Member],
        messages: Sequence[Message],
        texts: Sequence[str],
        tools: ToolUse,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.participants = Participants(config, members, messages, tools.offered, check)
        self._prompts = {name: self.participants.scoring_prompt(name, texts) for name in self.participants.sides}
        self._questions = tuple(ScoringQuery(text, False) for text in texts)
        thoughts = {name: len(prompt) - len(self.participants[name].prompt) for name, prompt in self._prompts.items()}
        self.max_tokens = max(thoughts[m.name] + len(m.codec.encode(text)) for m in members for text in texts)
        self.scores: dict[str, tuple[float, ...]] = {}
        self.events: deque[Event] = deque()
        self.finished = False

    def run(self) -> Generator[Wanted, Results, None]:
        """Yields stages by member, is sent their results."""
        began, sides = time.monotonic(), self.participants.sides
        params = SamplingParams(max_tokens=max(1, self.max_tokens))
        opened = yield Wanted({name: Open(prompt, params, 0) for name, prompt in self._prompts.items()})
        faults = {name: result.error for name, result in opened.items() if result.error is not None}
        ready = [name for name in sides if name not in faults]
        judged = (yield Wanted({name: Verify(self._questions) for name in ready})) if ready else {}
        for name in ready:
            if (fault := judged[name].error) is not None:
                faults[name] = fault
            elif isinstance(verdicts := judged[name].value, Verdicts):
                self.scores[name] = tuple(math.fsum(verdict.logprobs) for verdict in verdicts.each)
        yield Wanted({name: Close(remember=name in self.scores) for name in sides})
        self._finish(faults, time.monotonic() - began)

    def _finish(self, faults: Mapping[str, Fault], seconds: float) -> None:
        if not self.scores:
            name, fault = next(iter(faults.items()))
            what = f"member {name!r} could not judge the texts"
            raise GenerationError(f"{what}: {fault.message}", member=name, text="", public=f"{what} ({fault.kind})")
        self.finished = True
        usage = self.participants.usage("")
        members = tuple(self.participants.sides)
        result = EnsembleResult("", FinishReason.STOP, None, usage, (), members, None, 0.0, None, seconds)
        self.events.append(FinishEvent(result))
