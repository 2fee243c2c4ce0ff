"""A member on a server: its local text side, and checks of the server before the member is used.

An event loop in a separate thread has the requests of all such members in flight. Batching is up to the servers. A
request that is no longer needed is cancelled by closing its connection. If a server is unreachable, the
stages of its members fail and they leave the answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from specfuse_shared.config import MemberConfig, SamplingParams
from specfuse_shared.errors import (
    ConfigError,
    ServerError,
    ServerModelError,
    ServerSettingsError,
    SlowVerificationWarning,
    UnsupportedModelError,
)
from specfuse_shared.loading.pretrained import MemberFiles
from specfuse_shared.members.server.session import ServerSession
from specfuse_shared.members.server.vllm import TOKEN_BY_TOKEN, ScoredLine, ServerClient, ServerFacts, VllmDialect
from specfuse_shared.members.session import ids_without_text, stop_ids_of
from specfuse_shared.members.stages import (
    NOTHING_YET,
    CacheUse,
    Close,
    Closed,
    Fault,
    Member,
    MemberInfo,
    OnForward,
    Open,
    Reply,
    StageRequest,
    StageResult,
    ignore_results,
    ignore_steps,
    unanswered,
)
from specfuse_shared.placement.sizing import ModelSizes
from specfuse_shared.policies import ROUNDING
from specfuse_shared.text.chat_template import MemberText, PromptEncoder
from specfuse_shared.types import MemberReport

_SAMPLE = (
    "The tide follows the moon: the sea rises when the moon is high, and the sea falls when the moon is low. "
    "Nobody at 12 harbour street, says the keeper, has ever seen the tide wait for a ship."
)
_JUDGED = 8
"""Tokens at the end of the sample that both ways of scoring are compared on."""
_SAVED = "; then a verification is a request for each candidate of others, and a draft under a grammar takes fewer"
_NO_GRAMMARS = f"its structured outputs do not keep to ranges of tokens, so {TOKEN_BY_TOKEN}"


class ServerMember:
    """A language model behind the server of its `config`, whose tokenizer and template are read here.

    `connect` comes next, in the event loop that runs its answers. Raises `MemberLoadError`.
    """

    def __init__(self, config: MemberConfig, cache_dir: str | None = None) -> None:
        self._config = config
        self.name = config.label
        self._began = time.monotonic()
        files = MemberFiles(config, cache_dir)
        tokenizer = files.tokenizer()
        settings, generation = files.settings()
        self._architecture = (getattr(settings, "architectures", None) or ["unknown"])[0]
        self._parameters = _parameters(settings)
        text = settings.get_text_config(decoder=True) if settings is not None else None
        size = getattr(text, "vocab_size", None) or len(tokenizer)
        prompts = PromptEncoder(tokenizer, config.chat_template, config.template_options, self.name, config.thinking)
        self.stop_ids = stop_ids_of((generation, settings, tokenizer), prompts, config)
        self.special_ids = ids_without_text(tokenizer, size, self.stop_ids)
        self.text = MemberText(prompts, self.stop_ids, size)
        self.vocabulary_size = size
        self._is_doubtful = False
        self._checking = asyncio.Lock()
        self._client: ServerClient | None = None
        self.dialect: VllmDialect
        self._facts: ServerFacts
        self._error = 0.0

    def __repr__(self) -> str:
        return f"ServerMember({self.name!r}, {self._config.server!r})"

    async def connect(self, on_forward: OnForward) -> None:
        """Reach the server, and find out whether a member can live there.

        Raises `MemberLoadError`, and `ConfigError` where the environment has no key.
        """
        config = self._config
        self._client = ServerClient(
            str(config.server),
            config.server_timeout,
            _key(config),
            config.api_key_env,
            lambda seconds, steps: on_forward(self.name, 1, seconds, steps),
        )
        self.dialect = VllmDialect(self._client, config.server_model or config.model)
        await self._check()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def ready(self) -> None:
        """Check a server again after a failure: another server may respond now. Raises `ServerError`."""
        if self._is_doubtful:
            async with self._checking:
                if self._is_doubtful:
                    await self._check()
                    self._is_doubtful = False

    def observe(self, error: Exception) -> None:
        """A request failed."""
        self._is_doubtful = self._is_doubtful or isinstance(error, ServerError)

    def open(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> ServerSession:
        """A new answer to `prompt`."""
        return ServerSession(self, prompt, params, seed)

    @property
    def member(self) -> Member:
        """The coordinator's view of this member."""
        return Member(self.info, self.text)

    @property
    def info(self) -> MemberInfo:
        """The member's facts for the coordinator; it uses no local memory."""
        return MemberInfo(
            name=self.name,
            weight=self._config.weight,
            devices={},
            context_limit=self._context,
            thinks=self.text.prompts.thinks,
            bytes_per_token=0,
            smallest_row=1,
            vocabulary_size=self.vocabulary_size,
            drafts_under_grammar=self._config.drafts_under_grammar,
            may_guess=self.dialect.verification != "prompt",
            report=self._report,
        )

    @property
    def _context(self) -> int | None:
        return min((n for n in (self._config.max_context, self._facts.context) if n), default=None)

    @property
    def _report(self) -> MemberReport:
        cache = {True: "on", None: "unknown"}.get(self._facts.prefix_cache, "off")
        if self._facts.block_tokens:
            cache += f" in blocks of {self._facts.block_tokens}"
        return MemberReport(
            name=self.name,
            model=self._config.model,
            architecture=self._architecture,
            parameters=self._parameters,
            memory_bytes=0,
            device=str(self._config.server),
            dtype="the server's",
            quantization=None,
            attention=f"the server's, prefix cache {cache}",
            verification=self.dialect.verification,
            probe_error=self._error,
            graphs="the server's",
            template=self.text.prompts.kind,
            context=self._context,
            stop_token_ids=self.stop_ids,
            load_seconds=self._seconds,
            backend=self._facts.title,
            advice=self._advice,
        )

    @property
    def _advice(self) -> str:
        if self.dialect.verification == "tokens":
            return "" if self.dialect.takes_grammars else _NO_GRAMMARS
        return f"{self.dialect.no_tokens}{_SAVED}" if self.dialect.no_tokens else ""

    # ── checks ───────────────────────────────────────────────────────────────────────────────────

    async def _check(self) -> None:
        self._facts = await self.dialect.facts()
        self._check_model(self._facts)
        await self._check_vocabulary()
        if self._facts.prefix_cache is False:
            raise ServerSettingsError(
                f"member {self.name!r}: the prefix cache of the server at {self._config.server} is off, so that every "
                "round would read its whole context many times: start it without --no-enable-prefix-caching"
            )
        await self._check_scores()
        self._seconds = time.monotonic() - self._began

    def _check_model(self, facts: ServerFacts) -> None:
        """Check that the server has the model, by its name or by its source."""
        requested = self._config.server_model or self._config.model
        served_name = next((name for name, root in facts.models.items() if requested in (name, root)), None)
        if served_name is None:
            served = ", ".join(map(repr, facts.models)) or "none"
            raise ServerModelError(
                f"member {self.name!r}: the server at {self._config.server} has no model {requested!r} "
                f"(it has {served}): name the one that is meant with MemberConfig(server_model=…)"
            )
        self.dialect.model = served_name

    async def _check_vocabulary(self) -> None:
        own_ids, server_ids = self._sample, await self.dialect.tokenized(_SAMPLE)
        if own_ids != server_ids:
            raise ServerModelError(
                f"member {self.name!r}: the server at {self._config.server} has another vocabulary than the tokenizer "
                f"of {self._config.tokenizer or self._config.model!r}: name the model that it serves"
            )

    async def _check_scores(self) -> None:
        """Both ways of scoring agree, on ids from all of the vocabulary."""
        ids, last = self._sample, self.vocabulary_size - 1
        line = ScoredLine(tuple(ids[:-_JUDGED]), tuple(ids[-_JUDGED:]), (*self.stop_ids, last))
        self._error = await self.dialect.settle([line, ScoredLine(tuple(ids[:3]), (last,))], self._facts.block_tokens)
        if self._error > ROUNDING:
            raise UnsupportedModelError(
                f"member {self.name!r}: the server at {self._config.server} scores the same tokens in two ways that "
                f"differ by {self._error:.2g} nats: neither can be trusted"
            )
        if self.dialect.verification == "prompt":
            warnings.warn(
                f"member {self.name!r}: the server at {self._config.server} cannot score named tokens after its "
                "prefix cache (vLLM can with logprob_token_ids), so each round it reads the whole context again for "
                "every candidate",
                SlowVerificationWarning,
                stacklevel=2,
            )

    @property
    def _sample(self) -> list[int]:
        tokenizer: Any = self.text.prompts.tokenizer
        return list(tokenizer.encode(_SAMPLE, add_special_tokens=False))


def _parameters(settings: Any) -> int:
    """Parameters of a model with these settings; 0 where the library cannot say."""
    try:
        return ModelSizes(settings).parameters if settings is not None else 0
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return 0


def _key(config: MemberConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise ConfigError(
            f"member {config.label!r}: the environment variable {config.api_key_env} holds no key: set it, or leave "
            "MemberConfig(api_key_env=…) out"
        )
    return key


logger = logging.getLogger(__name__)

T = TypeVar("T")
Key = tuple[int, str]


class ServerLane:
    """Runs the stages of `members`; connects to their servers first. Raises `MemberLoadError` where one is unfit."""

    def __init__(
        self,
        members: Sequence[ServerMember],
        on_forward: OnForward = ignore_steps,
    ) -> None:
        self.served = {member.name: member for member in members}
        self._sessions: dict[Key, ServerSession] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._reply: Reply = ignore_results
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="specfuse servers", daemon=True)
        self._thread.start()
        try:
            self._call(self._connect(on_forward))
        except BaseException:
            self.close()
            raise

    @property
    def members(self) -> Sequence[MemberInfo]:
        return [member.info for member in self.served.values()]

    def memory(self) -> Mapping[str, int]:
        """Nothing of ours."""
        return {}

    def remember(self, limits: Mapping[str, int]) -> None:
        """What is remembered is the servers' affair."""

    def cache_use(self) -> CacheUse:
        return CacheUse()

    @property
    def fault(self) -> Fault | None:
        """A server that fails is no fault of the lane: its members are asked again in the next answer."""
        return None if self._thread.is_alive() else Fault("EngineClosedError", "the lane of servers has ended")

    def reply_to(self, reply: Reply) -> None:
        self._reply = reply

    def submit(self, requests: Sequence[StageRequest]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._start, requests)
        except RuntimeError as error:  # the loop is closed
            self._reply([unanswered(request, Fault.of(error)) for request in requests])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._call(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ── in the loop ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self, on_forward: OnForward) -> None:
        connecting = (member.connect(on_forward) for member in self.served.values())
        for problem in await asyncio.gather(*connecting, return_exceptions=True):
            if problem is not None:
                raise problem

    async def _leave(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sessions.clear()
        for member in self.served.values():
            await member.close()

    def _start(self, requests: Sequence[StageRequest]) -> None:
        for request in requests:
            key = request.answer, request.member
            before = self._tasks.get(key)
            work = self._forget(request, before) if isinstance(request.op, Close) else self._stage(request)
            self._tasks[key] = task = self._loop.create_task(work)
            task.add_done_callback(partial(self._over, key))

    def _over(self, key: Key, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _stage(self, request: StageRequest) -> None:
        key, op, value, fault = (request.answer, request.member), request.op, None, None
        member = self.served[request.member]
        try:
            if isinstance(op, Open):
                self._sessions[key] = member.open(op.prompt, op.params, op.seed)
            value = await self._sessions[key].stage(op)
        except Exception as error:
            member.observe(error)
            logger.warning("member %s failed in %s: %s", request.member, op.stage, error)
            fault = Fault.of(error)
        session = self._sessions.get(key)
        self._reply([StageResult(*key, value, session.counts if session else NOTHING_YET, fault)])

    async def _forget(self, request: StageRequest, before: asyncio.Task[None] | None) -> None:
        """Cancel what still runs, and say so when it is over."""
        key = request.answer, request.member
        if before is not None:
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
        session = self._sessions.pop(key, None)
        self._reply([StageResult(*key, Closed(), session.counts if session else NOTHING_YET)])
