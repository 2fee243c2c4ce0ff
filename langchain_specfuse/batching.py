"""Batches: as many inputs at once as the engine answers at once, a thread for each, and Ctrl-C that ends them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from langchain_specfuse.interrupts import interruptible

Configs = RunnableConfig | Sequence[RunnableConfig] | None


class EngineBatches(BaseChatModel):
    """A chat model whose inputs of one batch are in the engine together; `max_concurrency` may allow fewer."""

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers to all inputs."""
        each = self._side_by_side(config, len(inputs), kwargs)
        whole = super().batch
        flag: Any = return_exceptions
        [answers] = interruptible(lambda: iter([whole(inputs, each, return_exceptions=flag, **kwargs)]))
        return answers

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Index and answer of each input, in the order in which they are finished."""
        each = self._side_by_side(config, len(inputs), kwargs)
        flag: Any = return_exceptions
        completed: Callable[..., Iterator[tuple[int, Any]]] = super().batch_as_completed
        return interruptible(lambda: completed(inputs, each, return_exceptions=flag, **kwargs))

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answers to all inputs."""
        each = self._side_by_side(config, len(inputs), kwargs)
        return await super().abatch(inputs, each, return_exceptions=return_exceptions, **kwargs)

    def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Index and answer of each input, in the order in which they are finished."""
        each = self._side_by_side(config, len(inputs), kwargs)
        flag: Any = return_exceptions
        answers: AsyncIterator[tuple[int, Any]]
        answers = super().abatch_as_completed(inputs, each, return_exceptions=flag, **kwargs)
        return answers

    def _side_by_side(self, config: Configs, count: int, options: Mapping[str, Any]) -> list[RunnableConfig]:
        limit = self._most_at_once(options)
        each = get_config_list(config, count)
        return [{**one, "max_concurrency": min(limit, one.get("max_concurrency") or limit)} for one in each]

    def _most_at_once(self, options: Mapping[str, Any]) -> int:
        """How many answers the engine of a call runs at once."""
        raise NotImplementedError
