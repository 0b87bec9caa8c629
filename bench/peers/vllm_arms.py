"""vLLM's CPU build: plain, and with n-gram drafts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.peers.arm import Arm
from bench.peers.environment import Environment
from bench.peers.http_peer import HttpPeer
from bench.peers.models import PeerModel
from bench.peers.offer import Offer
from bench.peers.peer import Peer
from bench.peers.peer_error import PeerError
from bench.peers.peers_plan import PeersPlan

ENGINE = "vllm"
_NAME = "target"
_CONTEXT = 4096
_KV_GIB = 1
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_BESIDE = 2_500_000_000  # Python and its libraries in two processes, KV pages
_START_S = 600.0  # the first start compiles the model


async def vllm_arms(plan: PeersPlan, target: PeerModel, log: Path) -> Offer:
    """Two server processes of bf16 weights, exported from the .gguf file where the model is one."""
    offer, home = Offer(), Environment(plan.folder, ENGINE)
    plain = Arm("vllm", ENGINE, "bf16", "vllm")
    drafting = Arm("vllm n-gram", ENGINE, "bf16", "vllm")
    extra: dict[Arm, list[str]] = {plain: [], drafting: ["--speculative-config", json.dumps(_DRAFTS)]}
    for arm, words in extra.items():
        try:
            home.require()
            peer = _peer(plan, home, arm, await target.folder(), target.n_weights, words, log)
        except PeerError as error:
            offer.lack(arm, str(error))
        else:
            offer.have(peer)
    return offer


def _peer(
    plan: PeersPlan, home: Environment, arm: Arm, folder: Path, n_weights: int, extra: list[str], log: Path
) -> Peer:
    words = [str(home.program("vllm")), "serve", str(folder), "--served-model-name", _NAME, "--dtype", "bfloat16"]
    words += ["--host", "127.0.0.1", "--port", "{port}", "--max-model-len", str(_CONTEXT), "--max-num-seqs", "4"]
    words += ["--generation-config", "vllm", *extra]
    cores = sorted(os.sched_getaffinity(0))[: plan.threads]
    env: dict[str, str] = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        # What the ahead-of-time compiler keeps, this build can not load again: every start would compile anew.
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0",
        "PATH": f"{home.path / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    openmp = home.path / "lib" / "libiomp5.so"  # vLLM says it is faster with it
    env |= {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    about: dict[str, Any] = {"version": _versions(home)}
    return HttpPeer(
        arm, words, log / f"{arm.name}.log", env=env, model=_NAME, needs_bytes=2 * n_weights + _BESIDE,
        start_s=_START_S, answer_s=plan.answer_s, about=about,
    )  # fmt: skip


def _versions(home: Environment) -> str:
    return ", ".join(f"{name} {version}" for name, version in home.versions("vllm-cpu", "torch").items())
