"""Finds out what a model's name means."""

from __future__ import annotations

import re
from pathlib import Path

from specdec.errors import ModelError
from specdec.models.catalogue import CATALOGUE, suggestion
from specdec.models.checkpoint import Checkpoint
from specdec.models.fetch import Fetcher
from specdec.models.gguf_checkpoint import GGUFCheckpoint
from specdec.models.hf_checkpoint import HFCheckpoint
from specdec.models.hub import fetch_from_hub
from specdec.models.progress import Progress
from specdec.models.random_checkpoint import PREFIX, RandomCheckpoint

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(ref: str, cache_dir: Path, progress: Progress) -> Checkpoint:
    """What ``ref`` names: an existing folder or file first, then "random:SHAPE", a catalogue name, or a hub id.

    Raises:
        ModelError: it names nothing, or what it names can not be fetched.
    """
    path = Path(ref).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: not a model; give a .gguf file or a Hugging Face model folder")
        return GGUFCheckpoint(path)
    if ref.startswith(PREFIX):
        return RandomCheckpoint(ref)
    if ref in CATALOGUE:
        entry = CATALOGUE[ref]
        fetched = Fetcher(cache_dir / "models").fetch(entry, progress)
        return GGUFCheckpoint(fetched, name=ref, sha256=entry.sha256)
    if ref.endswith(".gguf") or ref.startswith((".", "/", "~")):
        raise ModelError(f"{ref}: no such file or folder")
    if _HUB_ID.fullmatch(ref):
        return HFCheckpoint(fetch_from_hub(ref), name=ref.rpartition("/")[2])
    raise ModelError(f"{ref}: no such file, folder or catalogue model{suggestion(ref)}")


def is_here(ref: str, cache_dir: Path) -> bool:
    """Whether `resolve` would find ``ref`` without fetching anything; of a hub id that is not known."""
    if Path(ref).expanduser().exists() or ref.startswith(PREFIX):
        return True
    fetcher = Fetcher(cache_dir.expanduser() / "models")
    return ref in CATALOGUE and fetcher.is_complete(CATALOGUE[ref])


def _folder(path: Path) -> Checkpoint:
    """A model folder, or one that just holds a .gguf file."""
    files = sorted(path.glob("*.gguf"))
    if not (path / "config.json").exists() and files:
        if len(files) > 1:
            raise ModelError(f"{path}: holds {len(files)} .gguf files; name one, such as {files[0]}")
        return GGUFCheckpoint(files[0])
    return HFCheckpoint(path)
