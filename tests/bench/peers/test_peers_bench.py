"""Who is asked, stopped, continued and ended when; and that one engine's failure is nobody else's."""

from __future__ import annotations

import pytest

from bench.peers.peer import PeerPrompt
from bench.peers.peers_report import PeersRun
from bench.peers.peers_session import PeersBench
from tests.bench.peers.peers import Actor, prompts

PLENTY = 10**12


async def acted(peers: list[Actor], asked: list[PeerPrompt], *, keep: bool = True, free: int = PLENTY) -> PeersRun:
    run = PeersRun(arms=[arm for peer in peers for arm in peer.arms])
    await PeersBench(peers, lambda line: None, keep=keep, free_bytes=lambda: free).run(asked, run)
    return run


async def test_idle_engines_are_stopped_and_turns_go_to_and_fro() -> None:
    told: list[str] = []
    run = await acted([Actor(["a"], told), Actor(["b1", "b2"], told)], prompts(2))
    assert told == [
        "start a", "a chat/0 (warm)", "pause a", "start b1", "b1 chat/0 (warm)", "b2 chat/0 (warm)",
        "pause b1", "resume a", "a chat/0 (warm)",
        "pause a", "resume b1", "b1 chat/0 (warm)", "b2 chat/0 (warm)", "b2 chat/1", "b1 chat/1",
        "pause b1", "resume a", "a chat/1", "end a", "end b1",
    ]  # fmt: skip
    assert set(run.answers) == {(name, f"chat/{i}") for name in ("a", "b1", "b2") for i in range(2)}
    assert not run.missing


async def test_one_at_a_time_in_memory() -> None:
    told: list[str] = []
    await acted([Actor(["a"], told), Actor(["b"], told)], prompts(4), keep=False)
    living: list[str] = []
    for line in told:
        match line.split():
            case ["start", name]:
                living.append(name)
            case ["end", name]:
                living.remove(name)
            case ["pause" | "resume", _]:
                raise AssertionError(line)
            case [name, *_]:
                assert living == [name]
    assert living == []
    assert [line for line in told if line.startswith("start")] == ["start a", "start b", "start a"]


@pytest.mark.parametrize("breaks", ["start", "ask", "pause", "resume"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("keep", [True, False])
async def test_what_goes_wrong_with_one_harms_nobody_else(breaks: str, place: int, keep: bool) -> None:
    told: list[str] = []
    peers = [Actor([name], told) for name in "abc"]
    peers[place].breaks = breaks
    asked = prompts(3) + prompts(3, "edit")
    run = await acted(peers, asked, keep=keep)
    broken = peers[place].arms[0].name
    for name in "abc":
        if name != broken:
            assert {p for a, p in run.answers if a == name} == {prompt.name for prompt in asked}
            assert name not in run.missing
    if keep or breaks in ("start", "ask"):
        assert f"can not {breaks}" in run.missing[broken]
        lost_at = max(i for i, line in enumerate(told) if line == f"end {broken}")
        assert not [line for line in told[lost_at:] if line.startswith((f"{broken} ", f"start {broken}"))]
    for name in "abc":
        began, ended = told.count(f"start {name}"), told.count(f"end {name}")
        assert began <= ended


async def test_too_little_memory_is_a_reason() -> None:
    told: list[str] = []
    run = await acted([Actor(["a"], told), Actor(["b"], told, needs_bytes=5 * 10**9)], prompts(2), free=10**9)
    assert run.missing == {"b": "needs some 5.0 GB, 1.0 GB are free; --alive one keeps one engine at a time in memory"}
    assert "start b" not in told
    assert ("a", "chat/1") in run.answers


async def test_the_rest_is_ended_when_the_run_is_stopped() -> None:
    told: list[str] = []

    class Stopped(Actor):
        async def ask(self, arm, prompt):  # type: ignore[no-untyped-def]
            if prompt.counted:
                raise RuntimeError("stop")
            return await super().ask(arm, prompt)

    with pytest.raises(RuntimeError, match="stop"):
        await acted([Actor(["a"], told), Stopped(["b"], told), Actor(["c"], told)], prompts(2))
    assert told[-3:] == ["end a", "end b", "end c"]
