"""Parts of an engine comparison: plan, prompts, arms, answers, and the order of requests."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specdec.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """``target``, ``draft``: as everywhere. ``engines``: of `ENGINES`. ``keep``: all stay in memory, see `ActivePeer`.
    ``natural_ends``: answers end where the model or the workload ends them, else only fill-in-the-middle does and the
    others have ``max_tokens``. ``answer_s``: longest a single answer may take."""

    target: str
    draft: str | None
    cache_dir: Path
    threads: int
    workloads: tuple[str, ...]
    engines: tuple[str, ...]
    prompts: int = 4
    max_tokens: int = 64
    natural_ends: bool = False
    keep: bool = True
    answer_s: float = 180.0

    @property
    def folder(self) -> Path:
        """Where peers are installed and their models lie."""
        return self.cache_dir / "peers"


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """The same ids go to all, so no tokenizer or chat template can differ. ``prediction`` (text the answer may be
    like) and ``session`` are for engines that know of them. ``fixed``: the answer has ``max_tokens`` tokens, wherever
    the model would end it; else it ends at ``stop``, ``stop_ids`` and the model's own end. One that is not ``counted``
    warms up."""

    workload: str
    name: str
    ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    prediction: str = ""
    session: str = ""
    fixed: bool = False
    counted: bool = True


OURS = "specdec"


@dataclass(frozen=True, slots=True)
class Arm:
    """``engine``: one of `ENGINES`. ``weights``: their numeric type. ``plain``: the name of the arm of the
    same engine and weights that does not speculate; its own where it is that one."""

    name: str
    engine: str
    weights: str
    plain: str

    @property
    def speculates(self) -> bool:
        """Whether it drafts."""
        return self.plain != self.name


OURS_OFF, OURS_AUTO = "specdec off", "specdec auto"


FEWEST = 4  # with fewer, the text held back for stop strings dominates the time


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens``: generated, as the engine counts them. ``first_tokens``: of these, how many there were at ``ttft_ms``,
    the time to the first text; ``e2e_ms``: to the end. ``error``: why there is no answer, "" where there is one."""

    tokens: int = 0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    text: str = ""
    first_tokens: int = 1
    error: str = ""

    @property
    def decoded(self) -> int:
        """Tokens after the first; those whose time per token is known."""
        return 0 if self.error else max(0, self.tokens - self.first_tokens)

    @property
    def decode_ms(self) -> float:
        """What they took."""
        return self.e2e_ms - self.ttft_ms

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first; None where there are fewer than `FEWEST`."""
        return self.decode_ms / self.decoded if self.decoded >= FEWEST else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        if self.error:
            return {"error": self.error}
        tpot = self.tpot_ms
        return {
            "tokens": self.tokens, "first_tokens": self.first_tokens, "ttft_ms": round(self.ttft_ms, 3),
            "e2e_ms": round(self.e2e_ms, 3), "tpot_ms": None if tpot is None else round(tpot, 4), "text": self.text,
        }  # fmt: skip


class PeerError(SpecdecError):
    """A peer did not start, did not answer, or answered nonsense; the others are measured all the same."""


class Peer(Protocol):
    """Serves its ``arms``, one prompt at a time. ``needs_bytes``: memory it is going to take, roughly."""

    arms: Seq[Arm]
    needs_bytes: int

    async def start(self) -> None:
        """Returns once it takes prompts; raises PeerError, and then nothing of it is left running."""

    async def ask(self, arm: Arm, prompt: PeerPrompt) -> Answer:
        """Its answer, with ``error`` set where it refuses. Raises PeerError where it is no longer to be counted on."""

    def pause(self) -> None:
        """Stop all its processes where they are: it takes no time from others then. Raises PeerError if it is gone."""

    def resume(self) -> None:
        """Let them go on; raises PeerError if it is gone."""

    async def end(self) -> None:
        """End every process of it, whatever state it is in; may be called at any time, and again."""

    def facts(self) -> dict[str, Any]:
        """Return the version and command for the report, as JSON types."""


@dataclass(slots=True)
class PeerSet:
    """``arms``: all of them, in the order of the tables; those without a peer are in ``missing``, with the reason."""

    arms: list[Arm] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, peer: Peer) -> None:
        """A process that can be started, for all its arms."""
        self.arms += peer.arms
        self.peers.append(peer)

    def add_missing(self, arm: Arm, why: str) -> None:
        """An arm that can not be run."""
        self.arms.append(arm)
        self.missing[arm.name] = why

    def extend(self, other: PeerSet) -> None:
        """All that ``other`` has, behind what is here."""
        self.arms += other.arms
        self.peers += other.peers
        self.missing |= other.missing


def one_by_one(prompts: Seq[PeerPrompt]) -> list[list[PeerPrompt]]:
    """Every prompt is a round of its own: the finest interleaving, for engines that stay where they are."""
    return [[prompt] for prompt in prompts]


def in_parts(prompts: Seq[PeerPrompt], number: int) -> list[list[PeerPrompt]]:
    """At most ``number`` rounds with about the same share of every workload, for engines that are started for each.
    What belongs together stays together: a session, and what warms up with what follows it."""
    parts: list[list[PeerPrompt]] = [[] for _ in range(number)]
    for workload in dict.fromkeys(prompt.workload for prompt in prompts):
        groups = _groups([prompt for prompt in prompts if prompt.workload == workload])
        for place, group in enumerate(groups):
            parts[place * number // len(groups)] += group
    return [part for part in parts if part]


def _groups(prompts: Seq[PeerPrompt]) -> list[list[PeerPrompt]]:
    groups: list[list[PeerPrompt]] = []
    for prompt in prompts:
        before = groups[-1][-1] if groups else None
        if before is not None and (not before.counted or (prompt.session and prompt.session == before.session)):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    return groups


def turns(arms: Seq[Arm], rounds: Seq[list[PeerPrompt]]) -> Iterator[tuple[Arm, list[PeerPrompt]]]:
    """A B C, C B A, A B C and so on: over two rounds a steady drift costs every arm the same."""
    for number, prompts in enumerate(rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            yield arm, prompts
