"""What a planned fleet is asked, and when: a trace of requests that came to a server, or drawn ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle
from pathlib import Path
from typing import Any

from specdec.core.fields import MAX_NAME
from specdec.core.types import OutputParams, Request, SamplingParams, StoppingParams
from specdec.errors import ConfigError
from specdec.load.arrivals import BLOCK_TOKENS, Arrivals

Block = tuple[int, ...]
_PLAIN, _TOKENS_ONLY = SamplingParams(seed=0), OutputParams(text=False)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """``at_s``: seconds after the beginning. The prompt begins with ``blocks`` of 64 tokens (the last may be shorter),
    which it shares with those prompts that begin with the same ones; its other ``prompt_tokens`` nobody else has.
    ``session``: who asks, as a router sees it. ``output_tokens``: as long as its answer is. ``was_first_s``: of a
    recorded one, what it waited for its first tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[Block, ...] = ()
    session: str = ""
    salt: str = ""
    deadline_s: float | None = None
    was_first_s: float | None = None

    def request(self, number: int) -> Request:
        """As an engine is asked it, as the ``number``-th."""
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
    """What drawn requests are like. Prompts of ``prompt_tokens`` and answers of ``output_tokens`` are means of
    geometric distributions where ``spread``, else of that length exactly. Every prompt begins with the same
    ``shared_tokens``, then those of its session: of ``sessions`` one is drawn each time, with ``session_tokens`` of its
    own (both in whole blocks of 64).

    Raises:
        ConfigError: a figure is out of range, or prompts are no longer than what they share.
    """

    prompt_tokens: int = 512
    output_tokens: int = 64
    shared_tokens: int = 0
    sessions: int = 0
    session_tokens: int = 0
    spread: bool = True

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"traffic: {name} must be at least 1, not {getattr(self, name)}")
        for name in ("shared_tokens", "sessions", "session_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"traffic: {name} must not be negative, not {getattr(self, name)}")
        if self.session_tokens and not self.sessions:
            raise ConfigError("traffic: session_tokens means nothing without sessions; say how many there are")
        if self.prompt_tokens <= self.shared_tokens + self.session_tokens:
            raise ConfigError(
                f"traffic: prompt_tokens counts what is shared too, so it must exceed "
                f"{self.shared_tokens + self.session_tokens} (shared_tokens and session_tokens)"
            )

    def draw(self, rng: random.Random) -> PlannedRequest:
        """One request, at 0."""
        session = f"session-{rng.randrange(self.sessions)}" if self.sessions else ""
        blocks = [_block(f"shared {n}") for n in range(self.shared_tokens // BLOCK_TOKENS)]
        blocks += [_block(f"{session} {n}") for n in range(self.session_tokens // BLOCK_TOKENS)]
        common = self.shared_tokens + self.session_tokens
        own = self._length(self.prompt_tokens - common, rng)
        return PlannedRequest(0.0, common + own, self._length(self.output_tokens, rng), tuple(blocks), session)

    def _length(self, mean: int, rng: random.Random) -> int:
        if not self.spread or mean == 1:
            return mean
        return 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))


def drawn_requests(arrivals: Arrivals, traffic: Traffic, seed: int) -> list[PlannedRequest]:
    """Requests of ``traffic`` at ``arrivals``; the same for the same seed."""
    rng = random.Random(seed)
    return [replace(traffic.draw(rng), at_s=at_s) for at_s in arrivals.offsets(seed)]


def at_rate(requests: Sequence[PlannedRequest], arrivals: Arrivals, seed: int) -> list[PlannedRequest]:
    """``requests`` in their order, over and over, at ``arrivals`` instead of their own times."""
    return [replace(one, at_s=at_s) for at_s, one in zip(arrivals.offsets(seed), cycle(requests), strict=False)]


def read_requests(path: Path, speed: float = 1.0) -> list[PlannedRequest]:
    """The trace in ``path``, by arrival, as `specdec capture` writes them: JSON lines with ``offset_s``, with
    ``prompt_ids`` or with ``prompt_blocks`` and ``prompt_tokens``, and with ``was_tokens`` or ``max_tokens``; may have
    ``session`` and ``salt``. speed: 2 replays it in half the time.

    Raises:
        ConfigError: it can not be read, holds no request, or a line is not of that form; names it and the field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"trace: {path} can not be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace: {path} is not UTF-8 text") from None
    found = [_read(line, f"trace: {path.name}, line {number}", speed) for number, line in enumerate(lines, 1) if line]
    if not found:
        raise ConfigError(f"trace: {path} holds no request")
    return sorted(found, key=lambda one: one.at_s)


def _read(line: str, where: str, speed: float) -> PlannedRequest:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON ({error})") from None
    if not isinstance(item, dict):
        raise ConfigError(f"{where} is not an object")
    offset = item.get("offset_s")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not 0 <= offset < math.inf:
        raise ConfigError(f"{where}: offset_s must be a number of seconds, at least 0")
    if "prompt_ids" in item:
        blocks, tokens = _ids(item["prompt_ids"], where)
    elif "prompt_blocks" in item:
        blocks, tokens = _named(item, where)
    else:
        raise ConfigError(f"{where}: prompt_ids or prompt_blocks is needed; `specdec capture` writes such traces")
    output = _whole(item, "was_tokens" if item.get("was_tokens") else "max_tokens", where)
    was_first_s = item.get("was_first_s")
    if was_first_s is not None and not (isinstance(was_first_s, int | float) and was_first_s >= 0):
        raise ConfigError(f"{where}: was_first_s must be a number of seconds")
    return PlannedRequest(
        offset / speed, tokens, output, blocks, _text(item, "session", where), _text(item, "salt", where),
        was_first_s=was_first_s,
    )  # fmt: skip


def _ids(value: Any, where: str) -> tuple[tuple[Block, ...], int]:
    good = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    if not good or not value:
        raise ConfigError(f"{where}: prompt_ids must be a list of token ids")
    return tuple(tuple(value[at : at + BLOCK_TOKENS]) for at in range(0, len(value), BLOCK_TOKENS)), len(value)


def _named(item: dict[str, Any], where: str) -> tuple[tuple[Block, ...], int]:
    names = item["prompt_blocks"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: prompt_blocks must be a list of texts")
    tokens = _whole(item, "prompt_tokens", where)
    if tokens < BLOCK_TOKENS * len(names):
        raise ConfigError(f"{where}: prompt_tokens must be at least {BLOCK_TOKENS * len(names)}, 64 for each block")
    return tuple(_block(name) for name in names), tokens


def _whole(item: dict[str, Any], name: str, where: str) -> int:
    value = item.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {name} must be a whole number, at least 1")
    return value


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name, "")
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ConfigError(f"{where}: {name} must be a text of at most {MAX_NAME} characters")
    return value
