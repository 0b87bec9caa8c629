"""One request of a load: what is asked and when, what was observed of it, and the objectives it has to meet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

from specdec.client.prompt import ChatTurn, Fim
from specdec.core.types import SamplingParams, StoppingParams
from specdec.errors import ConfigError, SpecdecError


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Exactly one of ``text``, ``ids`` (the target's tokens), ``chat`` and ``gap`` is given. ``stop``, ``stop_ids``:
    texts and tokens that end the answer. ``prediction``: what the answer is expected to be like, as text or as the
    target's tokens, which only gRPC takes. ``session``: the editor or conversation, "" for none; only over gRPC.
    ``salt``: servers that support it share caches and draft texts only between equal ones. ``fixed``: the answer has
    ``max_tokens`` tokens, wherever the model would end it. ``sampling`` None: at the endpoint's temperature; ``seed``
    None: the server's. ``model``: one of several that the server has; empty: the endpoint's. ``counted``: False for a
    warm-up, which benchmarks of engines leave out of their figures.
    """

    name: str
    max_tokens: int
    text: str = ""
    chat: tuple[ChatTurn, ...] = ()
    gap: Fim | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    prediction: str | tuple[int, ...] = ""
    session: str = ""
    salt: str = ""
    fixed: bool = False
    ids: tuple[int, ...] = ()
    seed: int | None = None
    sampling: SamplingParams | None = None
    model: str = ""
    counted: bool = True

    @property
    def stopping(self) -> StoppingParams:
        return StoppingParams(
            max_tokens=self.max_tokens, stop=self.stop, stop_token_ids=self.stop_ids, ignore_eos=self.fixed
        )

    def of_fixed_length(self) -> LoadRequest:
        """The same, and every answer as long as the other."""
        return dataclasses.replace(self, stop=(), stop_ids=(), fixed=True)


class TimedRequest(NamedTuple):
    """``offset_s``: seconds after the beginning of the run."""

    offset_s: float
    ask: LoadRequest


Outcome = Literal["ok", "refused", "failed", "cut"]


@dataclass(slots=True)
class Record:
    """One request of a load. Times are seconds of the event loop's clock."""

    name: str
    due_s: float  # scheduled time; in a closed loop the time at which the request was sent
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)  # arrival of each message with text
    chunk_tokens: list[int] = field(default_factory=list)  # tokens of each; empty if the server does not report them
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokens_per_step: float | None = None
    accepted: tuple[int, ...] = ()  # entry k: verify steps that accepted k draft tokens; empty if not reported
    queue_ms: float | None = None  # None if the server does not report it
    text: str = ""
    token_ids: list[int] | None = None  # None if the server does not report them
    outcome: Outcome = "ok"  # "refused" by the server, "failed" in another way, "cut" by the client's timeout
    error: str = ""
    retry_after_s: float | None = None
    last_s: float = 0.0  # last event of an HTTP stream

    def chunk(self, now_s: float, tokens: int | None = None) -> None:
        """Record a message with text."""
        self.chunk_s.append(now_s)
        if tokens is not None:
            self.chunk_tokens.append(tokens)

    def steps(self, number: int, drafted: int, histogram: Sequence[int]) -> None:
        """Record ``number`` verify steps, ``drafted`` of them with drafts. histogram: those by accepted tokens."""
        if number:
            self.tokens_per_step = self.output_tokens / number
        counts = [*histogram] or [0]
        counts[0] += number - drafted
        self.accepted = tuple(counts) if number else ()

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.outcome == "ok"

    @property
    def slip_ms(self) -> float:
        """Milliseconds from the scheduled time to sending."""
        return (self.sent_s - self.due_s) * 1e3

    @property
    def ttft_ms(self) -> float:
        """From when it was due to the first text, or to the end of an answer without any."""
        first = self.chunk_s[0] if self.chunk_s else self.end_s
        return (first - self.due_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """From when it was due to the end."""
        return (self.end_s - self.due_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for fewer than two, and for an answer without text."""
        if self.output_tokens < 2 or not self.chunk_s:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between neighbouring messages with text."""
        return [(b - a) * 1e3 for a, b in pairwise(self.chunk_s)]

    def as_dict(self, start_s: float) -> dict[str, Any]:
        """JSON-able; times in ms, ``due_ms`` from the beginning of the run."""
        found: dict[str, Any] = {
            "name": self.name, "outcome": self.outcome, "due_ms": round((self.due_s - start_s) * 1e3, 3),
            "slip_ms": round(self.slip_ms, 3), "e2e_ms": round(self.e2e_ms, 3), "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens, "output_tokens": self.output_tokens, "chunks": len(self.chunk_s),
        }  # fmt: skip
        if self.ok:
            tpot = self.tpot_ms
            found |= {"ttft_ms": round(self.ttft_ms, 3), "tpot_ms": None if tpot is None else round(tpot, 4)}
        else:
            found |= {"error": self.error, "retry_after_s": self.retry_after_s}
        return found


class RefusedError(SpecdecError):
    """``retry_after_s``: when it is worth another try, None where the server gave no hint."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Endpoint(Protocol):
    """Sends one request at once and notes its answer; any number may run at the same time."""

    async def send(self, ask: LoadRequest, record: Record) -> None:
        """Note every message and the token counts in ``record``; returns at the end of the answer.

        Raises:
            RefusedError: the server does not take it now.
            SpecdecError: it failed in another way.
        """

    async def close(self) -> None:
        """Close the connections."""


METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Objective:
    """``metric``: one of `METRICS`; "itl" is the longest time between two messages of the answer."""

    metric: str
    limit_ms: float

    @staticmethod
    def read(text: str, metrics: Sequence[str] = METRICS) -> Objective:
        """From ``metric:milliseconds``, with one of ``metrics``.

        Raises:
            ConfigError: it is not of that form.
        """
        metric, _, limit = text.partition(":")
        try:
            limit_ms = float(limit)
        except ValueError:
            limit_ms = math.nan
        if metric not in metrics or not limit_ms > 0:
            raise ConfigError(f"goodput: {text!r} is not METRIC:MILLISECONDS with one of {', '.join(metrics)}")
        return Objective(metric, limit_ms)

    def kept_by(self, record: Record) -> bool:
        """Whether an answered request keeps it; one without the figure (a single token has no tpot) does. A text whose
        tokens the server did not count keeps no tpot, because none is known."""
        if self.metric == "itl":
            return max(record.gaps_ms, default=0.0) <= self.limit_ms
        if self.metric == "tpot" and record.chunk_s and not record.output_tokens:
            return False
        value: float | None = getattr(record, f"{self.metric}_ms")
        return value is None or value <= self.limit_ms

    def __str__(self) -> str:
        return f"{self.metric}:{self.limit_ms:g}"
