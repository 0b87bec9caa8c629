"""Many calls of many sessions through a fleet, and their outcomes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import httpx
import xxhash

from tests.fake_engine import answer_to
from tests.server.fake_tokenizer import ScriptedTokenizer

TOKENS = 16


def release_of(key: str, shares: Sequence[tuple[str, int]]) -> str:
    """The release that Envoy sends a session to: XXH64 of ``key`` in UTF-8, modulo the sum of the weights, selects a
    range of ``shares`` (`Fleet.shares`)."""
    ends = list(accumulate(weight for _, weight in shares))
    place = xxhash.xxh64_intdigest(key.encode("utf-8")) % ends[-1]
    return next(name for (name, _), end in zip(shares, ends, strict=True) if place < end)


@dataclass
class Outcomes:
    """The outcomes of calls."""

    complete: int = 0
    wrong: int = 0  # another text than the script's
    lost: Counter[str] = field(default_factory=Counter)  # without a byte, by error
    cut: Counter[str] = field(default_factory=Counter)  # after their first byte, by error
    arms: dict[str, set[str]] = field(default_factory=dict)  # releases that answered, by session

    @property
    def all(self) -> int:
        """The number of calls."""
        return self.complete + self.failed

    @property
    def failed(self) -> int:
        """The number of calls that did not get their text."""
        return self.wrong + self.lost.total() + self.cut.total()


def expected(prompt: str, tokens: int = TOKENS) -> str:
    """The text that every replica answers."""
    return bytes(answer_to(ScriptedTokenizer().encode(prompt), tokens)).decode()


async def call(client: httpx.AsyncClient, url: str, number: int, outcomes: Outcomes, tokens: int = TOKENS) -> None:
    """One streamed call of a session. tokens 0: different lengths, a third of the calls without a session."""
    prompt, session = f"call {number}", f"session-{number % 64}"
    text, began = expected(prompt, tokens or 2 + 7 * number % 13), False
    body = {"prompt": prompt, "max_tokens": len(text), "stream": True}
    headers = {"x-session-id": session} if tokens or number % 3 else {}
    answered = ""
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                outcomes.lost[f"{answer.status_code} {(await answer.aread())[:80]!r}"] += 1
                return
            outcomes.arms.setdefault(session, set()).add(answer.headers["x-specdec-release"])
            async for line in answer.aiter_lines():
                began = True
                if line.startswith("data: {"):
                    answered += json.loads(line[6:])["choices"][0]["text"]
    except httpx.HTTPError as error:
        (outcomes.cut if began else outcomes.lost)[type(error).__name__] += 1
        return
    if answered == text:
        outcomes.complete += 1
    elif text.startswith(answered):
        outcomes.cut["short"] += 1
    else:
        outcomes.wrong += 1


async def calls(
    url: str, *, at_once: int, while_: Callable[[int], bool], tokens: int = TOKENS, outcomes: Outcomes | None = None
) -> Outcomes:
    """Numbered calls, ``at_once`` at a time, as long as ``while_`` holds for their number."""
    outcomes, numbers = outcomes or Outcomes(), itertools.count()

    async def one_after_another(client: httpx.AsyncClient) -> None:
        while while_(number := next(numbers)):
            await call(client, url, number, outcomes, tokens)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(at_once)))
    return outcomes
