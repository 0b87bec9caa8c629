"""The order in which engines are started, queried, paused and ended; the failure of one engine harms no other."""

from __future__ import annotations

import pytest

from bench.peers.peers_report import PeersRun
from bench.peers.peers_session import PeersBench
from specdec.load.request import LoadRequest
from tests.bench.peers.peers import Actor, prompts


async def acted(peers: list[Actor], asked: list[LoadRequest]) -> PeersRun:
    run = PeersRun(arms=[peer.arm for peer in peers], prompts={"all": asked})
    await PeersBench(peers, lambda line: None).run(run)
    return run


async def test_one_engine_runs_at_a_time_and_turns_go_to_and_fro() -> None:
    calls: list[str] = []
    run = await acted([Actor("a", calls), Actor("b", calls)], prompts(3))
    warm = "chat/0"
    assert calls[:6] == ["start a", f"a {warm}", "pause a", "start b", f"b {warm}", "pause b"]
    asked = [
        *(f"{name} {warm}" for name in "ab"),
        *(f"{name} chat/1" for name in "ba"),
        *(f"{name} chat/2" for name in "ab"),
    ]
    assert calls[6:] == [call for ask in asked for call in (f"resume {ask[0]}", ask, f"pause {ask[0]}")] + [
        "end b",
        "end a",
    ]
    assert set(run.answers) == {(name, f"chat/{i}") for name in "ab" for i in range(3)}
    assert not run.missing


@pytest.mark.parametrize("breaks", ["start", "ask", "pause", "resume"])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_the_failure_of_one_harms_no_other(breaks: str, place: int) -> None:
    calls: list[str] = []
    peers = [Actor(name, calls) for name in "abc"]
    peers[place].breaks = breaks
    asked = prompts(3) + prompts(3, "edit")
    run = await acted(list(peers), asked)
    broken = peers[place].arm.name
    for name in set("abc") - {broken}:
        assert {p for a, p in run.answers if a == name} == {ask.name for ask in asked}
        assert name not in run.missing
    assert run.missing[broken].endswith(f"cannot {breaks}")
    ended_at = calls.index(f"end {broken}")
    assert not [line for line in calls[ended_at:] if line.startswith((f"{broken} ", f"start {broken}"))]
    assert {f"end {name}" for name in "abc"} <= set(calls)


async def test_too_little_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.peers_session.available_bytes", lambda: 10**9)
    calls: list[str] = []
    run = await acted([Actor("a", calls), Actor("b", calls, needs_bytes=5 * 10**9)], prompts(2))
    assert run.missing == {"b": "needs about 5.0 GB, 1.0 GB are free"}
    assert "start b" not in calls
    assert ("a", "chat/1") in run.answers


async def test_the_limit_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.control_groups._limits", lambda *_: [10**6])
    run = PeersRun(arms=["a"], prompts={"chat": prompts(2)})
    await PeersBench([Actor("a", [], needs_bytes=2 * 10**6)], lambda line: None).run(run)
    assert run.missing == {"a": "needs about 0.0 GB, 0.0 GB are free"}


async def test_all_are_ended_when_the_run_is_interrupted() -> None:
    calls: list[str] = []

    class Stopped(Actor):
        async def ask(self, ask):  # type: ignore[no-untyped-def]
            if ask.name == "chat/1":
                raise RuntimeError("stop")
            return await super().ask(ask)

    with pytest.raises(RuntimeError, match="stop"):
        await acted([Actor("a", calls), Stopped("b", calls), Actor("c", calls)], prompts(2))
    assert calls[-3:] == ["end c", "end b", "end a"]
