"""One whole run of `specdec bench peers`: every engine is asked every prompt, in turns, of which one runs at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any

import psutil

from bench.engine_bench import BenchError
from bench.machine import BandwidthProbe, host_facts
from bench.peers.engines import PeerModel, find_model, llama_arms, our_arms, transformers_arms, vllm_arms
from bench.peers.peer import Answer, Arm, Peer, PeerError, PeerPrompt, PeerSet, PeersPlan, in_parts, one_by_one, turns
from bench.peers.peers_report import PeersRun
from bench.workloads.make import make_workload
from bench.workloads.workload import BenchPrompt, WorkloadUnavailableError
from specdec.errors import KernelError
from specdec.models.progress import Progress
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import Tokenizer

WARM_TOKENS = 16
NATURAL = ("fim",)  # what would come behind the end of a middle is no work that anybody wants done


def peer_prompts(
    tokenizer: Tokenizer, workloads: Seq[str], count: int, max_tokens: int, *, natural_ends: bool,
    note: Callable[[str], None],
) -> list[PeerPrompt]:  # fmt: skip
    """``count`` counted prompts of each of ``workloads``, as far as there are so many, and before them what warms up.

    max_tokens: longest answer. natural_ends: answers end where model and workload end them; else all but `NATURAL` are
    as long as they may be. note: receives a message for each part that is left out, with the reason.
    """
    found: list[PeerPrompt] = []
    for name in workloads:
        try:
            (workload,) = make_workload(name, tokenizer, count, max_tokens, note)
        except WorkloadUnavailableError as error:
            note(f"{name}: {error}")
            continue
        prompts = [prompt for group in workload.groups for prompt in group]
        fixed = name not in NATURAL and not natural_ends
        found += [_peer_prompt(tokenizer, name, prompt, fixed) for prompt in _first(prompts, count)]
    return found


def _first(prompts: Seq[BenchPrompt], count: int) -> list[BenchPrompt]:
    """Up to the last that counts: what only warms up for later ones is left away."""
    places = [place for place, prompt in enumerate(prompts) if prompt.counted][:count]
    return list(prompts[: places[-1] + 1]) if places else []


def _peer_prompt(tokenizer: Tokenizer, workload: str, prompt: BenchPrompt, fixed: bool) -> PeerPrompt:
    assert prompt.stopping.max_tokens is not None  # `make_workload` was given one
    made = PeerPrompt(
        workload, prompt.name, prompt.prompt_ids, prompt.stopping.max_tokens, prompt.stopping.stop,
        prompt.stopping.stop_token_ids, tokenizer.decode(prompt.prediction_ids), prompt.session, fixed, prompt.counted,
    )  # fmt: skip
    if made.counted or made.session:
        return made
    return dataclasses.replace(made, max_tokens=min(WARM_TOKENS, made.max_tokens))


FreeBytes = Callable[[], int]


def available_bytes() -> int:
    """Memory that can be had without pushing anybody else out."""
    return int(psutil.virtual_memory().available)


class ActivePeer:
    """Use as ``async with``; when that ends, so have all peers.

    keep: all that were started stay in memory, stopped in their tracks while another is on; else each is ended before
    the next is started.
    """

    def __init__(self, *, keep: bool, free_bytes: FreeBytes = available_bytes) -> None:
        self._keep, self._free_bytes = keep, free_bytes
        self._started: list[Peer] = []
        self._current: Peer | None = None
        self.lost: dict[Arm, str] = {}

    async def __aenter__(self) -> ActivePeer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        started, self._started, self._current = self._started, [], None
        await _end_all(started)

    async def enter(self, peer: Peer) -> bool:
        """Bring ``peer`` on, and everybody else off; whether it had to be started for that.

        Raises:
            PeerError: it can not be started or continued; it is lost then.
        """
        if peer is self._current:
            return False
        await self._leave()
        if self._why_lost(peer):
            raise PeerError(self._why_lost(peer))
        try:
            fresh = peer not in self._started
            if fresh:
                await self._start(peer)
            else:
                peer.resume()
        except PeerError as error:
            await self.lose(peer, str(error))
            raise
        self._current = peer
        return fresh

    async def lose(self, peer: Peer, why: str) -> None:
        """``peer`` is not to be asked again: end it, and remember ``why``."""
        self.lost |= dict.fromkeys(peer.arms, why)
        if peer is self._current:
            self._current = None
        if peer in self._started:
            self._started.remove(peer)
        await peer.end()

    async def _start(self, peer: Peer) -> None:
        free = self._free_bytes()
        if peer.needs_bytes > free:
            way_out = "; --alive one keeps one engine at a time in memory" if self._keep and self._started else ""
            raise PeerError(f"needs some {peer.needs_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free{way_out}")
        self._started.append(peer)
        await peer.start()

    async def _leave(self) -> None:
        peer, self._current = self._current, None
        if peer is None:
            return
        if not self._keep:
            self._started.remove(peer)
            await peer.end()
            return
        try:
            peer.pause()
        except PeerError as error:  # it has ended by itself: its next turn is not going to come
            await self.lose(peer, str(error))

    def _why_lost(self, peer: Peer) -> str:
        return next((self.lost[arm] for arm in peer.arms if arm in self.lost), "")


async def _end_all(peers: Seq[Peer]) -> None:
    """End all peers, also on an interrupt or if one does not end."""
    if not peers:
        return
    try:
        await peers[0].end()
    finally:
        await _end_all(peers[1:])


Say = Callable[[str], None]
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
        active = ActivePeer(keep=self._keep, free_bytes=self._free_bytes)
        async with active:
            if self._keep:  # all start first, so that loading takes no memory bandwidth from a measurement
                for arm in self._peers:
                    await self._enter(active, arm, run)
            rounds = one_by_one(prompts) if self._keep else in_parts(prompts, PARTS)
            for arm, part in turns(list(self._peers), rounds):
                await self._turn(active, arm, part, run)

    async def _turn(self, active: ActivePeer, arm: Arm, part: list[PeerPrompt], run: PeersRun) -> None:
        if not await self._enter(active, arm, run):
            return
        for prompt in part:
            try:
                answer = await self._peers[arm].ask(arm, prompt)
            except PeerError as error:
                await self._lose(active, arm, f"{prompt.name}: {error}", run)
                return
            run.note(arm, prompt, answer)
            self._say(f"{prompt.name} {arm.name}: {_figure(answer)}")

    async def _enter(self, active: ActivePeer, arm: Arm, run: PeersRun) -> bool:
        """Whether ``arm`` can be asked now; a fresh process has answered something before."""
        if arm.name in run.missing:
            return False
        peer, first = self._peers[arm], run.prompts[0]
        try:
            if await active.enter(peer):
                self._say(f"started {', '.join(each.name for each in peer.arms)}")
                run.about |= {each.name: peer.facts() for each in peer.arms}
                limit = min(WARM_TOKENS, first.max_tokens)
                warm = dataclasses.replace(first, max_tokens=limit, session="", counted=False)
                for each in peer.arms:
                    await peer.ask(each, warm)
        except PeerError as error:
            await self._lose(active, arm, str(error), run)
            return False
        return True

    async def _lose(self, active: ActivePeer, arm: Arm, why: str, run: PeersRun) -> None:
        peer = self._peers[arm]
        await active.lose(peer, why)
        for each in peer.arms:
            if each.name not in run.missing:
                run.missing[each.name] = why
                self._say(f"without {each.name}: {why}")


def _figure(answer: Answer) -> str:
    if answer.error:
        return answer.error
    tpot = "-" if answer.tpot_ms is None else f"{answer.tpot_ms:.1f}"
    return f"{answer.tokens} tokens, {answer.ttft_ms:.0f} ms to the first, then {tpot} ms each"


_TURNS = "all engines in memory, idle ones stopped; to and fro at every prompt"
_ONE_ALIVE = "one engine in memory at a time; to and fro at halves of every workload"


async def run_peers(plan: PeersPlan, say: Say, progress: Progress) -> PeersRun:
    """All that ``plan`` asks for.

    Raises:
        BenchError: there is no prompt to ask, or no engine to ask.
        ModelError: the model can not be had.
    """
    began = time.perf_counter()
    run = PeersRun()
    exports = plan.folder / "models"
    target = find_model(plan.target, plan.cache_dir, exports, progress)
    draft = None if plan.draft is None else find_model(plan.draft, plan.cache_dir, exports, progress)
    prompts = peer_prompts(
        load_tokenizer(plan.target, plan.cache_dir, progress), plan.workloads, plan.prompts, plan.max_tokens,
        natural_ends=plan.natural_ends, note=run.left_out.append,
    )  # fmt: skip
    if not prompts:
        raise BenchError("nothing to ask: " + "; ".join(run.left_out))
    run.machine = _machine(plan, target, draft)
    say("looking for the engines")
    found = await _peer_set(plan, target, draft)
    run.arms, run.missing = found.arms, dict(found.missing)
    for name, why in found.missing.items():
        say(f"without {name}: {why}")
    if not found.peers:
        raise BenchError("no engine to ask: " + "; ".join(f"{name}: {why}" for name, why in found.missing.items()))
    await PeersBench(found.peers, say, keep=plan.keep).run(prompts, run)
    run.seconds = time.perf_counter() - began
    return run


async def _peer_set(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> PeerSet:
    log, peers = plan.folder / "logs", PeerSet()
    if "specdec" in plan.engines:
        peers.extend(our_arms(plan, target, draft, log))
    if "llama.cpp" in plan.engines:
        peers.extend(await llama_arms(plan, target, draft, log))
    if "vllm" in plan.engines:
        peers.extend(await vllm_arms(plan, target, log))
    if "transformers" in plan.engines:
        peers.extend(await transformers_arms(plan, target, draft, log))
    return peers


def _machine(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> dict[str, Any]:
    """Hardware, model and what was asked; measured before any engine is in memory."""
    try:
        bandwidth = f"{BandwidthProbe(plan.cache_dir, plan.threads).median() / 1e9:.1f}"
    except KernelError as error:
        bandwidth = f"not known ({error})"
    ends = "ends and stops are obeyed" if plan.natural_ends else "ends and stops are ignored (ignore_eos) but in fim"
    return {
        **host_facts(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "read_bandwidth_gb_s": bandwidth,
        "threads": plan.threads,
        "target": f"{target.name}, file {target.weights}",
        "draft": "none" if draft is None else f"{draft.name}, file {draft.weights}",
        "asked": f"greedy, at most {plan.max_tokens} tokens, one prompt at a time; {ends}",
        "order": _TURNS if plan.keep else _ONE_ALIVE,
    }
