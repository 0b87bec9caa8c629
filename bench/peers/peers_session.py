"""One run of `specdec bench peers`: every engine gets every prompt, one at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any

import psutil

from bench.engine_bench import BenchError, Say
from bench.machine import host_facts, read_bandwidth_gb_s
from bench.peers.engines import MAKERS, PeerModel, find_model
from bench.peers.peer import PeerError, PeersPlan
from bench.peers.peer_process import HttpPeer
from bench.peers.peers_report import PeersRun, time_per_token
from bench.workloads.make import make_workload
from bench.workloads.workload import WorkloadUnavailableError
from specdec.control_groups import available_bytes
from specdec.load.figures import in_cell
from specdec.load.request import LoadRequest, Record
from specdec.models.progress import Progress
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import Tokenizer

WARM_TOKENS = 16  # of a warm-up's answer
NATURAL = ("fim",)  # workloads whose answers end by themselves: text after a middle is of no use


def peer_prompts(
    tokenizer: Tokenizer, workloads: Seq[str], count: int, max_tokens: int, note: Say
) -> dict[str, list[LoadRequest]]:
    """By workload, up to ``count`` counted prompts behind their warm-ups. All engines get the same token ids, so
    tokenizers and chat templates cannot differ.

    max_tokens: length of every answer, except those of `NATURAL`. note: receives each omitted part with the reason.
    """
    found: dict[str, list[LoadRequest]] = {}
    for name in workloads:
        try:
            workload = make_workload(name, tokenizer, count, max_tokens, note)
        except WorkloadUnavailableError as error:
            note(f"{name}: {error}")
            continue
        found[name] = [_for_http(tokenizer, name, prompt) for group in workload.groups for prompt in group]
    return found


def _for_http(tokenizer: Tokenizer, workload: str, prompt: LoadRequest) -> LoadRequest:
    """The request with its prediction as text, which is all that HTTP takes."""
    limit = prompt.max_tokens if prompt.counted or prompt.session else min(WARM_TOKENS, prompt.max_tokens)
    assert not isinstance(prompt.prediction, str)  # `make_workload` gives tokens
    ask = dataclasses.replace(prompt, max_tokens=limit, prediction=tokenizer.decode(prompt.prediction))
    return ask if workload in NATURAL else ask.of_fixed_length()


class PeersBench:
    """Queries ``peers`` in turns. All stay in memory; those that do not answer are stopped.

    say: receives progress. reads_ahead: each engine reads a counted prompt before the question, as in a running
    session.
    """

    def __init__(self, peers: Seq[HttpPeer], say: Say, *, reads_ahead: bool = False) -> None:
        self._peers, self._say, self._reads_ahead = list(peers), say, reads_ahead

    async def run(self, run: PeersRun) -> None:
        """Put the answer to each of its prompts into ``run``. An engine that fails is noted there, and the others
        continue. All processes have ended when this returns or raises."""
        asks = list(chain.from_iterable(run.prompts.values()))
        async with AsyncExitStack() as stack:
            # All start first, so that loading takes no memory bandwidth from a measurement.
            for peer in list(self._peers):
                stack.push_async_callback(peer.end)
                await self._attempt(peer, run, self._start(peer, asks[0], run))
            for number, ask in enumerate(asks):
                # A B C, C B A, and so on: a steady drift of the machine costs every engine the same.
                for peer in self._peers[:: -1 if number % 2 else 1]:
                    await self._attempt(peer, run, self._ask(peer, ask, run))

    async def _start(self, peer: HttpPeer, first: LoadRequest, run: PeersRun) -> None:
        """Start an engine, let it answer one prompt to warm up, and pause it."""
        free = available_bytes()
        if peer.needs_bytes > free:
            raise PeerError(f"needs about {peer.needs_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        await peer.start()
        self._say(f"started {peer.arm.name}")
        run.about[peer.arm.name] = peer.facts()
        await peer.ask(dataclasses.replace(first, max_tokens=min(WARM_TOKENS, first.max_tokens), session=""))
        peer.pause()

    async def _ask(self, peer: HttpPeer, ask: LoadRequest, run: PeersRun) -> None:
        peer.resume()
        try:
            if self._reads_ahead and ask.counted:
                run.readings[peer.arm.name, ask.name] = await peer.ask(dataclasses.replace(ask, max_tokens=1))
            answer = await peer.ask(ask)
        except PeerError as error:
            raise PeerError(f"{ask.name}: {error}") from None
        run.answers[peer.arm.name, ask.name] = answer
        self._say(f"{ask.name} {peer.arm.name}: {_figure(answer)}")
        peer.pause()

    async def _attempt(self, peer: HttpPeer, run: PeersRun, work: Any) -> None:
        """Await ``work``; if the engine fails, end it and continue without it."""
        try:
            await work
        except PeerError as error:
            run.missing[peer.arm.name] = str(error)
            self._say(f"without {peer.arm.name}: {error}")
            self._peers.remove(peer)
            await peer.end()


def _figure(answer: Record) -> str:
    if not answer.ok:
        return answer.error
    each = in_cell(time_per_token(answer), 1)
    return f"{answer.output_tokens} tokens, {answer.ttft_ms:.0f} ms to the first, then {each} ms each"


async def run_peers(plan: PeersPlan, say: Say, progress: Progress) -> PeersRun:
    """Everything that ``plan`` asks for; a cancelled call still returns what was answered to counted prompts.

    Raises:
        BenchError: there is no prompt or no engine.
        ModelError: the model is not available.
    """
    began = time.perf_counter()
    run = PeersRun()
    target = find_model(plan.target, plan.cache_dir, progress)
    draft = None if plan.draft is None else find_model(plan.draft, plan.cache_dir, progress)
    tokenizer = load_tokenizer(plan.target, plan.cache_dir, progress)
    run.prompts = peer_prompts(tokenizer, plan.workloads, plan.prompts, plan.max_tokens, run.left_out.append)
    if not run.prompts:
        raise BenchError("no prompts: " + "; ".join(run.left_out))
    run.machine = _machine(plan, target, draft)
    peers: list[HttpPeer] = []
    for engine in plan.engines:
        try:
            peers += MAKERS[engine](plan, target, draft)
        except PeerError as error:
            run.missing[engine] = str(error)
            say(f"without {engine}: {error}")
    if not peers:
        raise BenchError("no engine: " + "; ".join(f"{name}: {reason}" for name, reason in run.missing.items()))
    run.arms = [peer.arm for peer in peers]
    try:
        await PeersBench(peers, say).run(run)
    except asyncio.CancelledError:
        counted = {ask.name for asks in run.prompts.values() for ask in asks if ask.counted}
        if not counted & {name for _, name in run.answers}:
            raise
        run.stopped = True
    run.seconds = time.perf_counter() - began
    return run


def _machine(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> dict[str, Any]:
    """Hardware, models and settings; measured before any engine is in memory."""
    return {
        **host_facts(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "read_bandwidth_gb_s": read_bandwidth_gb_s(plan.cache_dir, plan.threads),
        "threads": plan.threads,
        "target": f"{target.name}, file {target.weights}",
        "draft": "none" if draft is None else f"{draft.name}, file {draft.weights}",
        "asked": f"greedy, {plan.max_tokens} tokens (fim: at most), one prompt at a time",
        "order": "all engines in memory, idle ones stopped; to and fro at every prompt",
    }
