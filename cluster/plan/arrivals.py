"""The requests of a plan and their arrival times: a captured trace, or random ones."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle
from pathlib import Path

from specdec.core.types import OutputParams, Request, SamplingParams, StoppingParams
from specdec.errors import ConfigError
from specdec.load.arrivals import BLOCK_TOKENS, Arrivals
from specdec.load.trace_file import TraceLine, read_trace_lines

Block = tuple[int, ...]
_PLAIN, _TOKENS_ONLY = SamplingParams(seed=0), OutputParams(text=False)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A simulated request."""

    at_s: float  # arrival, after the start of the plan
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[Block, ...] = ()
    """The beginning of the prompt, in blocks of 64 tokens (the last may be shorter). Prompts that begin with the same
    blocks share them; the rest of the prompt is unique."""
    session: str = ""  # routing key
    salt: str = ""
    deadline_s: float | None = None
    was_first_s: float | None = None  # recorded time to the first token

    def request(self, number: int) -> Request:
        """The engine's request, with ``number`` as its id."""
        shared = [token for block in self.blocks for token in block]
        tail = self.prompt_tokens - len(shared)
        own = _token(f"own {number}")
        return Request(
            str(number), tuple(shared + [own] * tail), _PLAIN,
            StoppingParams(max_tokens=self.output_tokens, ignore_eos=True), _TOKENS_ONLY, cache_salt=self.salt,
            deadline_s=self.deadline_s,
        )  # fmt: skip


def _token(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big") >> 2


def _block(name: str) -> Block:
    return (_token(name),) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Traffic:
    """The distribution of random requests.

    Raises:
        ConfigError: tokens of sessions without sessions; or prompts are not longer than their shared beginning, or
            longer than the longest.
    """

    prompt_tokens: int = 512  # mean length
    output_tokens: int = 64  # mean length
    shared_tokens: int = 0  # at the beginning of every prompt, in whole blocks of 64
    sessions: int = 0  # each request belongs to one, chosen at random; 0: none
    session_tokens: int = 0  # shared by the prompts of a session, after shared_tokens, in whole blocks of 64
    spread: bool = True  # geometric distribution of lengths; False: every length is its mean
    longest_prompt: int = sys.maxsize  # longer prompts are cut to it, because servers refuse them

    def __post_init__(self) -> None:
        if self.session_tokens and not self.sessions:
            raise ConfigError("traffic: session_tokens needs sessions")
        if self.prompt_tokens <= self.shared_tokens + self.session_tokens:
            raise ConfigError(
                f"traffic: prompt_tokens includes the shared tokens, so it must exceed "
                f"{self.shared_tokens + self.session_tokens} (shared_tokens and session_tokens)"
            )
        if self.prompt_tokens > self.longest_prompt:
            raise ConfigError(
                f"traffic: prompt_tokens is {self.prompt_tokens}, but the context has room for {self.longest_prompt}"
            )

    def draw(self, rng: random.Random) -> PlannedRequest:
        """Returns a random request, at 0 s."""
        session = f"session-{rng.randrange(self.sessions)}" if self.sessions else ""
        blocks = [_block(f"shared {n}") for n in range(self.shared_tokens // BLOCK_TOKENS)]
        blocks += [_block(f"{session} {n}") for n in range(self.session_tokens // BLOCK_TOKENS)]
        common = self.shared_tokens + self.session_tokens
        own = min(self._length(self.prompt_tokens - common, rng), self.longest_prompt - common)
        return PlannedRequest(0.0, common + own, self._length(self.output_tokens, rng), tuple(blocks), session)

    def _length(self, mean: int, rng: random.Random) -> int:
        if not self.spread or mean == 1:
            return mean
        return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))


def drawn_requests(arrivals: Arrivals, traffic: Traffic, seed: int) -> list[PlannedRequest]:
    """Random requests of ``traffic`` at ``arrivals``; deterministic in ``seed``."""
    rng = random.Random(seed)
    return [replace(traffic.draw(rng), at_s=at_s) for at_s in arrivals.offsets(seed)]


def at_rate(requests: Sequence[PlannedRequest], arrivals: Arrivals, seed: int) -> list[PlannedRequest]:
    """``requests`` in order, repeated, at ``arrivals`` instead of their own times."""
    return [replace(one, at_s=at_s) for at_s, one in zip(arrivals.offsets(seed), cycle(requests), strict=False)]


def read_requests(path: Path, speed: float = 1.0) -> list[PlannedRequest]:
    """The requests of a trace or a folder of captures, by arrival; speed: 2 replays them in half the time.

    Raises:
        ConfigError: the file cannot be read; a line is invalid, whose number and field are named; or the requests are
            of several models, of which a profile describes one.
    """
    lines = read_trace_lines(path)
    if len(models := {line.model for _, line in lines}) > 1:
        names = ", ".join(sorted(repr(model) for model in models))
        raise ConfigError(f"trace: {path.name} has requests of several models ({names}); keep the lines of one")
    return [_planned(line, speed, f"trace: {place}") for place, line in lines]


def _planned(line: TraceLine, speed: float, where: str) -> PlannedRequest:
    if line.prompt_ids is None and line.prompt_blocks is None:
        raise ConfigError(f"{where}: prompt_ids or prompt_blocks is needed, as `specdec serve --capture` writes")
    output = line.was_tokens or line.max_tokens
    if output is None:
        raise ConfigError(f"{where}: was_tokens or max_tokens is needed")
    if (ids := line.prompt_ids) is not None:
        blocks = tuple(tuple(ids[at : at + BLOCK_TOKENS]) for at in range(0, len(ids), BLOCK_TOKENS))
        tokens = len(ids)
    else:
        blocks, tokens = tuple(_block(name) for name in line.prompt_blocks or ()), line.prompt_tokens
    return PlannedRequest(
        line.offset_s / speed, tokens, output, blocks, line.session, line.salt, was_first_s=line.was_first_s
    )
