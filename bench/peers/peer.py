"""Parts of an engine comparison: plan, prompts, arms and answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specdec.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """What `specdec bench peers` measures."""

    target: str  # a catalogue name or a file
    draft: str | None
    cache_dir: Path
    threads: int
    workloads: tuple[str, ...]
    engines: tuple[str, ...]
    prompts: int = 4  # per workload
    max_tokens: int = 64

    @property
    def folder(self) -> Path:
        """The folder of the installed engines, their logs and converted models."""
        return self.cache_dir / "peers"


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """One prompt. All engines get the same token ids, so tokenizers and chat templates cannot differ."""

    workload: str
    name: str
    ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    prediction: str = ""  # text that the answer may resemble, for engines that take one
    session: str = ""  # for engines that take one
    fixed: bool = False  # the answer has `max_tokens` tokens; stops and the model's own end are ignored
    counted: bool = True  # False: a warm-up


OURS = "specdec"
OURS_OFF, OURS_AUTO = "specdec off", "specdec auto"


@dataclass(frozen=True, slots=True)
class Arm:
    """One engine with one setting."""

    name: str
    engine: str  # one of `ENGINES`
    weights: str  # numeric type of the weights
    plain: str  # name of the arm of the same engine and weights that does not draft; may be this one

    @property
    def speculates(self) -> bool:
        """Whether the arm drafts."""
        return self.plain != self.name


FEWEST = 4  # tokens; in shorter answers the text held back for stop strings dominates the time


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine returned for one prompt."""

    tokens: int = 0  # as the engine counts them
    ttft_ms: float = 0.0  # time to the first text
    e2e_ms: float = 0.0
    text: str = ""
    error: str = ""  # the reason if there is no answer
    tokens_per_step: float | None = None  # None: the engine does not report it

    @property
    def decoded(self) -> int:
        """Number of tokens after the first."""
        return 0 if self.error else max(0, self.tokens - 1)

    @property
    def decode_ms(self) -> float:
        """Time of the tokens after the first."""
        return self.e2e_ms - self.ttft_ms

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first; None for fewer than `FEWEST` tokens."""
        return self.decode_ms / self.decoded if self.decoded >= FEWEST else None

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON types."""
        if self.error:
            return {"error": self.error}
        tpot = self.tpot_ms
        return {
            "tokens": self.tokens, "ttft_ms": round(self.ttft_ms, 3), "e2e_ms": round(self.e2e_ms, 3),
            "tpot_ms": None if tpot is None else round(tpot, 4), "text": self.text,
        }  # fmt: skip


class PeerError(SpecdecError):
    """An engine did not start, did not answer or returned an invalid answer. The other engines are still measured."""


class Peer(Protocol):
    """The process of one arm. Every method but `end` and `facts` raises PeerError if the process is gone."""

    arm: Arm
    needs_bytes: int  # memory that it will allocate, approximately

    async def start(self) -> None:
        """Start the process and wait until it accepts prompts; on an error nothing of it is left running."""

    async def ask(self, prompt: PeerPrompt) -> Answer:
        """The answer to one prompt; `Answer.error` is set if the engine refuses the prompt."""

    def pause(self) -> None:
        """Stop the processes, so that they take no time from other engines."""

    def resume(self) -> None:
        """Continue the stopped processes."""

    async def end(self) -> None:
        """End all processes, in any state. May be called more than once."""

    def facts(self) -> dict[str, Any]:
        """Version and command for the report, as JSON types."""
