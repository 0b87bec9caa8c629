"""The engine process's side of what operators ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from server.admin_errors import DraftNotSwappedError, NotAdministeredError, SwapUnderWayError
from server.administered_engine import AdministeredEngine
from server.draft_load import DraftLoad
from server.engine_protocol import EngineLike
from server.frames import Frame
from server.parent_link import ParentLink
from server.request_errors import GenerationFailedError, pack_error
from server.wire import pack_info
from specdec.errors import RequestError, SpecdecError

_LOG = logging.getLogger(__name__)
FLUSH_CACHE, SWAP_DRAFT = "flush_cache", "swap_draft"


class EngineAdmin:
    """Carries out commands between steps and answers each; whatever goes wrong costs nobody's request."""

    def __init__(self, engine: EngineLike, link: ParentLink) -> None:
        self._engine, self._link = engine, link
        self._loading: DraftLoad | None = None

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something to do soon."""
        return self._loading is not None

    def take(self, number: int, command: str, args: list[Any]) -> None:
        """Carry out ``command``, or begin to; its answer carries ``number``."""
        self._answer(number, lambda: self._begin(number, command, args))

    def poll(self) -> None:
        """Between steps: put a draft model in place once it is loaded."""
        loading = self._loading
        if loading is not None and loading.done:
            self._loading = None
            self._answer(loading.number, lambda: self._swap(loading.result()))

    def _begin(self, number: int, command: str, args: list[Any]) -> Any:
        engine = self._engine
        if not isinstance(engine, AdministeredEngine):
            raise NotAdministeredError(f"this engine does not know {command}")
        if command == FLUSH_CACHE:
            return engine.flush_cache()
        if command != SWAP_DRAFT:
            raise ValueError(f"unknown command {command!r}")
        if self._loading is not None:
            raise SwapUnderWayError
        draft, dtype = args
        if draft is None:
            return self._swap(None)
        self._loading = DraftLoad(number, lambda: engine.load_draft(draft, dtype))
        return None

    def _swap(self, draft: Any | None) -> Any:
        assert isinstance(self._engine, AdministeredEngine)  # `_begin` saw to it
        return pack_info(self._engine.swap_draft(draft))

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        """Send what ``work`` returns, or why it failed; None: it goes on."""
        result = error = None
        try:
            result = work()
        except RequestError as refusal:
            error = pack_error(refusal)
        except SpecdecError as refusal:
            error = pack_error(DraftNotSwappedError(f"{refusal}; the draft model is as before"))
        except Exception:
            _LOG.exception("an operator's command failed")
            error = pack_error(GenerationFailedError("INTERNAL", "the engine could not do it; its log tells more"))
        if result is not None or error is not None:
            self._link.send(Frame.ADMIN, number, error, result)
