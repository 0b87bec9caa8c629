"""Our own server, with and without speculation, as anybody starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import specdec
from bench.peers.arm import OURS, OURS_AUTO, OURS_OFF, Arm
from bench.peers.http_peer import HttpPeer
from bench.peers.models import PeerModel
from bench.peers.offer import Offer
from bench.peers.peer_prompt import PeerPrompt
from bench.peers.peers_plan import PeersPlan

_WEIGHTS = "int8"
_BYTES_PER_WEIGHT, _BESIDE = 1.0, 1_000_000_000  # weights are packed as int8; Python, KV pages, the draft model


def our_arms(plan: PeersPlan, target: PeerModel, draft: PeerModel | None, log: Path) -> Offer:
    """Both; only the one that speculates is told of predictions, sessions and the draft model."""
    offer = Offer()
    base = [sys.executable, "-m", "specdec.cli.main", "serve", "--target", target.ref, "--dtype", _WEIGHTS]
    base += ["--device", "cpu", "--threads", str(plan.threads), "--cache-dir", str(plan.cache_dir), "--quiet"]
    base += ["--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "{port}"]
    ways = {
        OURS_OFF: ["--no-speculation"],
        OURS_AUTO: ["--draft", draft.ref] if draft is not None else [],
    }
    for name, words in ways.items():
        arm = Arm(name, OURS, _WEIGHTS, OURS_OFF)
        offer.have(HttpPeer(
            arm, [*base, *words], log / f"{name}.log", fields=_speculative if arm.speculates else _plain,
            env={name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            needs_bytes=int(target.n_weights * _BYTES_PER_WEIGHT) + _BESIDE, answer_s=plan.answer_s,
            about={"version": f"specdec {specdec.__version__}"},
        ))  # fmt: skip
    return offer


def _plain(prompt: PeerPrompt) -> dict[str, Any]:
    return {"speculation": {"mode": "off"}}


def _speculative(prompt: PeerPrompt) -> dict[str, Any]:
    fields: dict[str, Any] = {"session": prompt.session} if prompt.session else {}
    if prompt.prediction:
        fields["prediction"] = {"type": "content", "content": prompt.prediction}
    return fields
