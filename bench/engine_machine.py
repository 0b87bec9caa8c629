"""Where and when figures were measured, and with what."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from bench.bandwidth import BandwidthProbe
from specdec.config import EngineConfig
from specdec.types import EngineInfo


def machine_facts(config: EngineConfig, info: EngineInfo) -> dict[str, Any]:
    """Processor, cores, memory bandwidth (bytes read, GB/s; None with the reference kernels), model, date, commit."""
    bandwidth = None
    if info.kernels == "native":
        bandwidth = round(BandwidthProbe(config.cache_dir, info.threads).median() / 1e9, 2)
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": info.threads,
        "read_bandwidth_gb_s": bandwidth,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "version": info.version,
        "target": info.target,
        "draft": info.draft,
        "dtype": info.dtype,
        "kernels": info.kernels,
        "numeric_mode": info.numeric_mode,
        "drafters": list(info.drafters),
        "speculation": config.speculation.model_dump(mode="json"),
    }


def cpu_model() -> str:
    """The processor as it calls itself, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit this code is from, with `+` when files differ from it; None outside a git checkout."""
    try:
        found = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
