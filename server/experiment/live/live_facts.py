"""Where and with what an experiment runs, for whoever reads its report later."""

from __future__ import annotations

import os
import platform

from specdec.types import EngineInfo


def live_facts(info: EngineInfo) -> dict[str, str]:
    """Facts by what they are called."""
    return {
        "server": f"specdec {info.version}",
        "model": info.target,
        "draft": info.draft or "none",
        "drafters": ", ".join(info.drafters) or "none",
        "numbers": f"{info.dtype}, {info.kernels} kernels, {info.numeric_mode}",
        "threads": str(info.threads),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": platform.system(),
    }
