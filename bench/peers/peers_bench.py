"""Asks every engine every prompt, in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bench.peers.answer import Answer
from bench.peers.arm import Arm
from bench.peers.peer import Peer
from bench.peers.peer_error import PeerError
from bench.peers.peer_prompt import PeerPrompt
from bench.peers.peers_run import PeersRun
from bench.peers.rounds import in_parts, one_by_one, turns
from bench.peers.stage import FreeBytes, Stage, available_bytes

Say = Callable[[str], None]
WARM_TOKENS = 16
PARTS = 2


class PeersBench:
    """keep: all engines stay in memory, idle ones stopped, and take turns at every prompt; else one is there at a time
    and they take turns at `PARTS` parts of all workloads. say: gets a line now and then."""

    def __init__(
        self, peers: Seq[Peer], say: Say, *, keep: bool = True, free_bytes: FreeBytes = available_bytes
    ) -> None:
        self._peers = {arm: peer for peer in peers for arm in peer.arms}
        self._say, self._keep, self._free_bytes = say, keep, free_bytes

    async def run(self, prompts: Seq[PeerPrompt], run: PeersRun) -> None:
        """Put every answer into ``run``. The first prompt also warms every process up, so it should not count.
        What goes wrong with one engine is noted in ``run``; the others go on. All that was started has ended when this
        returns or raises."""
        run.prompts = list(prompts)
        stage = Stage(keep=self._keep, free_bytes=self._free_bytes)
        async with stage:
            if self._keep:
                for (
                    arm
                ) in self._peers:  # before anything is measured: starting takes memory's bandwidth from nobody then
                    await self._enter(stage, arm, run)
            rounds = one_by_one(prompts) if self._keep else in_parts(prompts, PARTS)
            for arm, part in turns(list(self._peers), rounds):
                await self._turn(stage, arm, part, run)

    async def _turn(self, stage: Stage, arm: Arm, part: list[PeerPrompt], run: PeersRun) -> None:
        if not await self._enter(stage, arm, run):
            return
        for prompt in part:
            try:
                answer = await self._peers[arm].ask(arm, prompt)
            except PeerError as error:
                await self._lose(stage, arm, f"{prompt.name}: {error}", run)
                return
            run.note(arm, prompt, answer)
            self._say(f"{prompt.name} {arm.name}: {_figure(answer)}")

    async def _enter(self, stage: Stage, arm: Arm, run: PeersRun) -> bool:
        """Whether ``arm`` can be asked now; a fresh process has answered something before."""
        if arm.name in run.missing:
            return False
        peer, first = self._peers[arm], run.prompts[0]
        try:
            if await stage.enter(peer):
                self._say(f"started {', '.join(each.name for each in peer.arms)}")
                run.about |= {each.name: peer.facts() for each in peer.arms}
                limit = min(WARM_TOKENS, first.max_tokens)
                warm = dataclasses.replace(first, max_tokens=limit, session="", counted=False)
                for each in peer.arms:
                    await peer.ask(each, warm)
        except PeerError as error:
            await self._lose(stage, arm, str(error), run)
            return False
        return True

    async def _lose(self, stage: Stage, arm: Arm, why: str, run: PeersRun) -> None:
        peer = self._peers[arm]
        await stage.lose(peer, why)
        for each in peer.arms:
            if each.name not in run.missing:
                run.missing[each.name] = why
                self._say(f"without {each.name}: {why}")


def _figure(answer: Answer) -> str:
    if answer.error:
        return answer.error
    tpot = "-" if answer.tpot_ms is None else f"{answer.tpot_ms:.1f}"
    return f"{answer.tokens} tokens, {answer.ttft_ms:.0f} ms to the first, then {tpot} ms each"
