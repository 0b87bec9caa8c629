"""Protocols of the engine and the tokenizer that the server drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from specdec.config import WeightDtype
from specdec.core.cache_events import CacheFollower
from specdec.core.types import EngineInfo, EngineLoad, Request, RequestEvent, StepTrace
from specdec.models.tokenizer import TextTokenizer
from specdec.models.tool_forms import ToolForm

# (task, units done, total units); a total of 0: unknown
ProgressListener = Callable[[str, int, int], None]


class EngineLike(Protocol):
    """An engine, which its process drives from one thread."""

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        """Queue ``request``, which has waited for ``waited_s`` elsewhere.

        Raises:
            RequestError: it is refused; the engine is unchanged.
        """

    def abort(self, request_id: str) -> bool:
        """End a request and free its memory; the next `step` returns Finished for its open samples."""

    def step(self) -> list[RequestEvent]:
        """Run one step and return its events. An exception means that the engine is broken."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def info(self) -> EngineInfo:
        """The engine's description."""

    def load(self) -> EngineLoad:
        """The current load."""

    def trace(self, limit: int) -> list[StepTrace]:
        """Up to ``limit`` recent steps, newest last."""

    def follow_cache(self, follower: CacheFollower) -> None:
        """Report every page of the prefix cache to ``follower``; called before the first request."""

    def flush_cache(self) -> int:
        """Drop the cached prefixes that no running request uses; returns the number of pages freed."""

    def load_draft(self, draft: str, dtype: WeightDtype | None) -> Any:
        """Load a draft model for `swap_draft` while the current one stays in use. The only method that another thread
        may call.

        Raises:
            SpecdecError: it cannot be loaded, or does not fit.
        """

    def swap_draft(self, draft: Any | None) -> EngineInfo:
        """Draft with a model that `load_draft` returned, or with none; returns the new description.

        Raises:
            SpecdecError: it cannot be used; nothing has changed.
        """

    def close(self) -> None:
        """End every request and free resources."""


class TokenizerLike(TextTokenizer, Protocol):
    """Text to ids and back; safe to use from several threads."""

    special_ids: frozenset[int]
    end_id: int | None  # ends every text to be embedded; None: nothing does

    @property
    def longest_token(self) -> int:
        """The most characters that one token stands for."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""

    @property
    def has_tool_template(self) -> bool:
        """Whether the model's own chat template renders tools."""

    @property
    def tool_form(self) -> ToolForm:
        """The form of tool calls in the model's text."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation; ``variables``: as in `ChatTemplate.render`.

        Raises:
            ModelError: the model has no chat template.
            InvalidRequestError: the template refuses the messages.
        """
