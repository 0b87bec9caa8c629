"""One whole run of `specdec bench peers`."""

from __future__ import annotations

import datetime
import os
import platform
import time
from typing import Any

import psutil

from bench.bandwidth import BandwidthProbe
from bench.engine_bench_error import BenchError
from bench.engine_machine import commit, cpu_model
from bench.peers.llama_arms import llama_arms
from bench.peers.models import PeerModel, find_model
from bench.peers.offer import Offer
from bench.peers.our_arms import our_arms
from bench.peers.peer_prompts import peer_prompts
from bench.peers.peers_bench import PeersBench, Say
from bench.peers.peers_plan import PeersPlan
from bench.peers.peers_run import PeersRun
from bench.peers.transformers_arms import transformers_arms
from bench.peers.vllm_arms import vllm_arms
from specdec.errors import KernelError
from specdec.models.load_tokenizer import load_tokenizer
from specdec.models.progress import Progress

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
    offer = await _offer(plan, target, draft)
    run.arms, run.missing = offer.arms, dict(offer.missing)
    for name, why in offer.missing.items():
        say(f"without {name}: {why}")
    if not offer.peers:
        raise BenchError("no engine to ask: " + "; ".join(f"{name}: {why}" for name, why in offer.missing.items()))
    await PeersBench(offer.peers, say, keep=plan.keep).run(prompts, run)
    run.seconds = time.perf_counter() - began
    return run


async def _offer(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> Offer:
    log, offer = plan.folder / "logs", Offer()
    if "specdec" in plan.engines:
        offer.join(our_arms(plan, target, draft, log))
    if "llama.cpp" in plan.engines:
        offer.join(await llama_arms(plan, target, draft, log))
    if "vllm" in plan.engines:
        offer.join(await vllm_arms(plan, target, log))
    if "transformers" in plan.engines:
        offer.join(await transformers_arms(plan, target, draft, log))
    return offer


def _machine(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> dict[str, Any]:
    """Hardware, model and what was asked; measured before any engine is in memory."""
    try:
        bandwidth = f"{BandwidthProbe(plan.cache_dir, plan.threads).median() / 1e9:.1f}"
    except KernelError as error:
        bandwidth = f"not known ({error})"
    ends = "ends and stops are obeyed" if plan.natural_ends else "ends and stops are ignored (ignore_eos) but in fim"
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "read_bandwidth_gb_s": bandwidth,
        "threads": plan.threads,
        "target": f"{target.name}, file {target.weights}",
        "draft": "none" if draft is None else f"{draft.name}, file {draft.weights}",
        "asked": f"greedy, at most {plan.max_tokens} tokens, one prompt at a time; {ends}",
        "order": _TURNS if plan.keep else _ONE_ALIVE,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }
