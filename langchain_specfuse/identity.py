"""What a model says of itself: its name and sampling to traces, its sizes as a profile, and all of it to `dumps`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile

from langchain_specfuse.errors import as_langchain
from specfuse_shared.frameworks import EnsembleSettings


class InferredProfile(dict[str, Any]):
    """A profile that a model found out about itself, and nobody set."""


class DescribedModel(EnsembleSettings, BaseChatModel):
    """A chat model over an ensemble, as far as it only says what it is.

    `model_name` and `model` are always a name: that of the ensemble or of the server's model where none was chosen, as
    those who read it of other models expect.
    """

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)  # a property cannot stand in the place of pydantic's field
        return self._model_name() if name == "model_name" and found is None else found

    @property
    def model(self) -> str:
        """The name of the ensemble, or of a server's model."""
        return self._model_name()

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What a trace and the key of a cache hold: name and sampling, and for all the rest its digest."""
        kwargs = json.dumps(self.to_json()["kwargs"], sort_keys=True, default=repr)
        return {**self._traced(), "settings": hashlib.sha256(kwargs.encode()).hexdigest()[:16]}

    def to_json(self) -> Any:
        """The model as LangChain's `dumps` writes and `loads` reads it: without keys, engines and local paths.

        `loads` has to be told that it may make one: `allowed_objects=[ChatSpecFuse]`, `valid_namespaces=[…]` of it.
        Local folders are named; they are found again in the same process.
        """
        told = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p}
        named = {} if self.base_url and self._chosen_model is None else {"model_name": self._model_name()}
        kwargs = {**self.model_dump(exclude_defaults=True), **told, **named}
        return {"lc": 1, "type": "constructor", "id": self.lc_id(), "kwargs": kwargs, "name": type(self).__name__}

    def _resolve_model_profile(self) -> ModelProfile:
        """`max_input_tokens` is the smallest member's, as far as it is known yet; `load` learns it."""
        limit = self._context_limit()
        profile = ModelProfile(
            **({} if limit is None else {"max_input_tokens": limit}),
            name=self._model_name(),
            max_output_tokens=self.max_tokens,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
            reasoning_output=self._thinks(),
        )
        return cast("ModelProfile", InferredProfile(profile))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other settings; an inferred `profile` follows `max_tokens`."""
        copied = super().model_copy(update=update, deep=deep)
        if isinstance(copied.profile, InferredProfile) and "max_tokens" in (update or {}):
            copied.profile = cast("ModelProfile", InferredProfile(copied.profile, max_output_tokens=copied.max_tokens))
        return copied

    def load(self, on_progress: Any = None) -> Self:
        """Load the members now, or ask the server for its model; `profile` has their sizes then.

        Raises `MemberLoadError`.
        """
        with as_langchain():
            super().load(on_progress)
        if isinstance(self.profile, InferredProfile):
            self.profile = self._resolve_model_profile()
        return self
