"""Many calls of many sessions through a fleet, and what became of each."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from tests.fake_engine import answer_to
from tests.server.fake_tokenizer import ScriptedTokenizer

TOKENS = 16


@dataclass
class Outcomes:
    """``lost``: calls that not one byte came back for, by what came instead; ``cut``: calls that had begun. ``arms``:
    the release that each session was told of."""

    complete: int = 0
    wrong: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    arms: dict[str, set[str]] = field(default_factory=dict)

    @property
    def all(self) -> int:
        """How many calls there were."""
        return self.complete + self.wrong + self.lost.total() + self.cut.total()


def expected(prompt: str, tokens: int = TOKENS) -> str:
    """The one text that any replica answers."""
    return bytes(answer_to(ScriptedTokenizer().encode(prompt), tokens)).decode()


async def call(client: httpx.AsyncClient, url: str, number: int, outcomes: Outcomes, tokens: int = TOKENS) -> None:
    """One stream of a session."""
    prompt, session = f"call {number}", f"session-{number % 64}"
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
    text = ""
    try:
        async with client.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"x-session-id": session}
        ) as answer:
            if answer.status_code != 200:
                outcomes.lost[f"{answer.status_code} {(await answer.aread())[:80]!r}"] += 1
                return
            outcomes.arms.setdefault(session, set()).add(answer.headers["x-specdec-release"])
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
    except httpx.HTTPError as error:
        (outcomes.cut if text else outcomes.lost)[type(error).__name__] += 1
        return
    if text == expected(prompt, tokens):
        outcomes.complete += 1
    elif expected(prompt, tokens).startswith(text):
        outcomes.cut["short"] += 1
    else:
        outcomes.wrong += 1


async def calls(url: str, *, at_once: int, while_: Callable[[int], bool], tokens: int = TOKENS) -> Outcomes:
    """So many calls at a time, for as long as ``while_`` of their number says so."""
    outcomes, numbers = Outcomes(), itertools.count()

    async def one_after_another(client: httpx.AsyncClient) -> None:
        while while_(number := next(numbers)):
            await call(client, url, number, outcomes, tokens)

    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(at_once)))
    return outcomes
