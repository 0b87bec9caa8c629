"""What the serving side needs of an engine and of a tokenizer, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from specdec.config import WeightDtype
from specdec.core.cache_events import CacheRecorder
from specdec.core.types import EngineInfo, EngineLoad, Request, RequestEvent, StepTrace
from specdec.models.tool_forms import ToolForm

# (what is being done, units done, units in all); a total of 0 means the size is not known
ProgressListener = Callable[[str, int, int], None]


class EngineLike(Protocol):
    """An engine as its process drives it, from one thread."""

    def submit(self, request: Request) -> None:
        """Queue ``request``.

        Raises:
            RequestError: it is refused; the engine is as before.
        """

    def abort(self, request_id: str) -> bool:
        """End a request now, its memory free on return; its unfinished samples' Finished come with the next `step`."""

    def step(self) -> list[RequestEvent]:
        """Run one step; empty when idle. An exception means that the engine is broken."""

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def info(self) -> EngineInfo:
        """What the engine is."""

    def load(self) -> EngineLoad:
        """How busy it is."""

    def trace(self, limit: int) -> list[StepTrace]:
        """The last ``limit`` steps, or as many as are kept; newest last."""

    def close(self) -> None:
        """End every request and let go of resources."""


@runtime_checkable
class AdministeredEngine(Protocol):
    """An engine that can be changed while it serves. All but `load_draft` belong to the thread that drives it."""

    def flush_cache(self) -> int:
        """Forget the cached prefixes that no running request uses; returns how many pages that frees."""

    def load_draft(self, draft: str, dtype: WeightDtype | None) -> Any:
        """Load a draft model for `swap_draft`, beside the one in use; may be called from another thread.

        Raises:
            SpecdecError: it can not be had, or does not fit.
        """

    def swap_draft(self, draft: Any | None) -> EngineInfo:
        """Draft with what `load_draft` gave from now on, or with none; returns what the engine is now.

        Raises:
            SpecdecError: it can not be; all is as before.
        """


@runtime_checkable
class CachingEngine(Protocol):
    """An engine that says which pages of text its prefix cache holds."""

    def tell_cache(self, recorder: CacheRecorder) -> None:
        """Tell ``recorder`` of every page from now on; called before the first request."""


@dataclass(slots=True)
class KvEventCounts:
    """messages: published; overflows: times a subscriber's queue was found full: it misses messages until it
    has read half of those that wait; replayed: messages sent again."""

    messages: int = 0
    overflows: int = 0
    replayed: int = 0


class CacheFeed(Protocol):
    """Where messages of the prefix cache go."""

    counts: KvEventCounts

    def publish(self, payload: bytes) -> None:
        """The engine's next message."""

    def cleared(self) -> None:
        """An engine begins with nothing in its cache, or ended."""


class TokenizerLike(Protocol):
    """Text to ids and back; safe to use from several threads."""

    special_ids: frozenset[int]

    @property
    def longest_token(self) -> int:
        """No token stands for more characters."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""

    @property
    def has_tool_template(self) -> bool:
        """Whether the model's own chat template tells it of tools."""

    @property
    def tool_form(self) -> ToolForm:
        """The form of tool calls in the model's text."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of ``text``."""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation.

        Raises:
            ModelError: the model has no chat template.
            InvalidRequestError: the template refuses the messages.
        """

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a special token gives its name."""

    def special_id(self, name: str) -> int | None:
        """Id of the special token ``name``; None when there is none of that name."""
