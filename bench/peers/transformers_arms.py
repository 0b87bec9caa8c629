"""transformers: plain, prompt lookup, and universal assisted generation where there is a smaller model."""

from __future__ import annotations

from pathlib import Path

from bench.peers.arm import Arm
from bench.peers.environment import Environment
from bench.peers.models import PeerModel
from bench.peers.offer import Offer
from bench.peers.peer_error import PeerError
from bench.peers.peers_plan import PeersPlan
from bench.peers.pipe_peer import PipePeer

ENGINE = "transformers"
_SCRIPT = Path(__file__).with_name("transformers_child.py")
_BESIDE = 1_500_000_000  # Python and its libraries, the KV cache, the smaller model


async def transformers_arms(plan: PeersPlan, target: PeerModel, draft: PeerModel | None, log: Path) -> Offer:
    """One process for all, bf16 weights, exported from the .gguf file where the model is one."""
    offer, home = Offer(), Environment(plan.folder, ENGINE)
    plain = Arm("transformers", ENGINE, "bf16", "transformers")
    arms = {plain: "plain", Arm("transformers prompt lookup", ENGINE, "bf16", plain.name): "lookup"}
    assisted = Arm("transformers assisted", ENGINE, "bf16", plain.name)
    smaller = draft if draft is not None and draft.path != target.path else None
    if smaller is not None:
        arms[assisted] = "assistant"
    try:
        home.require()
        words = [str(home.python), str(_SCRIPT), "--model", str(await target.folder()), "--threads", str(plan.threads)]
        words += ["--draft", str(await smaller.folder())] if smaller is not None else []
    except PeerError as error:
        for arm in arms:
            offer.lack(arm, str(error))
        return offer
    versions = ", ".join(f"{name} {version}" for name, version in home.versions("transformers", "torch").items())
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(plan.threads)}
    offer.have(PipePeer(
        arms, words, log / f"{ENGINE}.log", env=env, needs_bytes=2 * target.n_weights + _BESIDE,
        answer_s=plan.answer_s, about={"version": versions},
    ))  # fmt: skip
    if smaller is None:
        offer.lack(assisted, "no other model was named to draft; --draft does it")
    return offer
