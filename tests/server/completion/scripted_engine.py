"""An engine whose answers the test writes, a piece at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from server.auth.principal import Principal
from server.completion.editor_session import SessionTable
from server.completion.prompt_packer import PromptPacker
from server.completion.requests import RequestMaker
from server.completion.time_budget import TimeBudget
from server.observe.observer import Observer
from server.request_stream import RequestStream, UnreadEvents
from specdec.core.types import (
    Delta,
    EngineInfo,
    EngineLoad,
    Finished,
    FinishReason,
    Request,
    SpeculationStats,
    Started,
    Timings,
    Usage,
)
from specdec.errors import RequestError
from tests.server.completion.code_tokenizer import CodeTokenizer

INFO = EngineInfo("m", None, "int8", "native", "bitwise", 4096, 300, 1 << 16, 8, ("suffix",), (261,), 2, "1", "fp32")


@dataclass
class Machine:
    """The speed and the load of an engine, as `TimeBudget` reads them. By default it is idle and of unknown speed."""

    times: tuple[float, ...] = ()
    wait_s: float = 0.0
    wait_token_s: float = 0.0  # of a prompt, per token
    in_flight: int = 0

    def forecast_s(self, tokens: float) -> float:
        return self.wait_s + self.wait_token_s * tokens

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(prompt_ms=self.times)


def budget_on(machine: Any, **more: Any) -> TimeBudget:
    """A time budget for ``machine``."""
    return TimeBudget(SimpleNamespace(engine=machine), machine, **more)  # type: ignore[arg-type]


class ScriptedRequest(RequestStream):
    """The stream of a request, and the script of its answer. ``closed``: its reader has closed the stream."""

    def __init__(self, principal: Principal, request: Request, unread: UnreadEvents) -> None:
        scoped = principal.scope_request(request)
        super().__init__(scoped, lambda complete: None, Observer().request(scoped), unread)
        self.closed = False

    def say(self, text: str) -> None:
        """More text."""
        self.push(Delta(self.request_id, 0, list(text.encode()), text))

    def start(self, cached: int = 0, queue_ms: float = 0.5) -> None:
        """The request is scheduled; ``cached`` tokens of its prompt are computed already."""
        self.push(Started(self.request_id, 7, len(self.request.prompt_ids), cached, queue_ms))

    def finish(self, reason: FinishReason = FinishReason.EOS, cached: int = 64) -> None:
        """Its end."""
        usage = Usage(len(self.request.prompt_ids), cached, 5)
        self.push(Finished(self.request_id, 0, reason, None, usage, SpeculationStats(), Timings()))

    def close(self) -> None:
        self.closed = True
        super().close()


class ScriptedEngine:
    """In place of `Admission`: collects the requests that the engine gets, in order."""

    def __init__(self) -> None:
        self.requests: list[ScriptedRequest] = []
        self.refusal: RequestError | None = None
        self.unread = UnreadEvents()
        self.watch_prompt: Callable[[RequestStream, str], None] = lambda stream, owner: None

    def admit(self, principal: Principal, request: Request, supersedes_key: str) -> ScriptedRequest:
        if self.refusal is not None:
            raise self.refusal
        made = ScriptedRequest(principal, request, self.unread)
        self.requests.append(made)
        if request.omitted is not None:
            self.watch_prompt(made, principal.scoped(request.cache_salt))
        return made

    @property
    def running(self) -> int:
        """Admitted requests that have not ended."""
        return sum(request.samples_left > 0 for request in self.requests)

    @property
    def last(self) -> ScriptedRequest:
        """The request submitted last."""
        return self.requests[-1]

    async def until(self, count: int) -> ScriptedRequest:
        """Wait for the ``count``-th request."""
        while len(self.requests) < count:
            await asyncio.sleep(0)
        return self.requests[count - 1]


def sessions_on(engine: ScriptedEngine, tokenizer: CodeTokenizer | None = None) -> SessionTable:
    """Sessions over ``engine``."""
    maker = RequestMaker(budget_on(Machine()))
    maker.packer = PromptPacker(tokenizer or CodeTokenizer(), INFO.max_context)  # type: ignore[arg-type]
    return SessionTable(maker, engine.admit)
