"""What a report says about the GPU it was made on."""

from __future__ import annotations

import datetime
import subprocess
from typing import Any

import torch
import triton

from bench.kernels.kernel_timer import KernelTimer

# Bytes per second, from the makers' data sheets
NOMINAL = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.039e12, "B200": 8.0e12, "MI300X": 5.3e12}
COPY_BYTES = 2 << 30


def peak_bandwidth(device: torch.device) -> tuple[float, str]:
    """Bytes per second of the GPU's memory, and where that figure is from: its data sheet, or a copy."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, value in NOMINAL.items():
            if known in name:
                return value, "data sheet"
    return copy_bandwidth(device), "copy"


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a plain copy."""
    size = COPY_BYTES if device.type == "cuda" else 1 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / KernelTimer(device).microseconds(lambda: target.copy_(source), cold=False) * 1e6


def device_facts(device: torch.device, commit: str = "") -> dict[str, Any]:
    """Hardware, versions, date and commit, which git is asked for where none is given."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, kernels interpreted"
    peak, source = peak_bandwidth(device)
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or commit_here(),
        "peak_bytes_per_s": peak,
        "peak_source": source,
        "copy_bytes_per_s": copy_bandwidth(device),
    }


def commit_here() -> str | None:
    """Of the sources; None where there is no git or they came without their history."""
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return git.stdout.strip() or None
