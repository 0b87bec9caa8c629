"""A script as a peer: lines of JSON both ways, and what may be wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.peers.clients import PipePeer
from bench.peers.peer import PeerError, PeerPrompt
from tests.bench.peers.peers import arm

PLAIN, DRAFTING = arm("t"), arm("t lookup", plain="t")


def peer(folder: Path, answer_s: float = 60.0) -> PipePeer:
    words = [sys.executable, "-I", str(Path(__file__).with_name("fake_child.py"))]
    arms = {PLAIN: "plain", DRAFTING: "lookup"}
    return PipePeer(arms, words, folder / "log", answer_s=answer_s, about={"version": "1"})


def prompt(first: int, *, fixed: bool = False) -> PeerPrompt:
    return PeerPrompt("chat", "chat/1", (first, 2), 6, stop=("x",), fixed=fixed)


async def test_answers_of_each_arm(tmp_path: Path) -> None:
    found = peer(tmp_path)
    await found.start()
    try:
        plain, lookup = await found.ask(PLAIN, prompt(1)), await found.ask(DRAFTING, prompt(1, fixed=True))
        found.pause()
        found.resume()
        again = await found.ask(PLAIN, prompt(1))
    finally:
        await found.end()
    assert (plain.text, lookup.text) == ("plain ['x'] False", "lookup [] True")
    assert again == plain
    assert (plain.tokens, plain.decoded, plain.tpot_ms) == (6, 4, 5.0)


@pytest.mark.parametrize(
    ("first", "why"),
    [(666, "out of luck"), (667, "no JSON"), (669, "can not be read"), (670, r"no answer after 0\.3 s")],
)
async def test_what_may_be_wrong(tmp_path: Path, first: int, why: str) -> None:
    found = peer(tmp_path, 0.3 if first == 670 else 60.0)
    await found.start()
    try:
        with pytest.raises(PeerError, match=why):
            await found.ask(PLAIN, prompt(first))
    finally:
        await found.end()


async def test_a_prompt_it_refuses(tmp_path: Path) -> None:
    found = peer(tmp_path)
    await found.start()
    try:
        assert (await found.ask(PLAIN, prompt(668))).error == "too long"
        assert (await found.ask(PLAIN, prompt(1))).error == ""
    finally:
        await found.end()
