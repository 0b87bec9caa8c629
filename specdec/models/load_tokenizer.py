"""Loads a model's tokenizer without its weights."""

from __future__ import annotations

from pathlib import Path

from specdec.models.progress import Progress, silent
from specdec.models.resolve import resolve
from specdec.models.tokenizer import Tokenizer


def load_tokenizer(ref: str, cache_dir: Path, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of the model that ``ref`` names; the forms of `load_model`.

    Raises:
        ModelError: not found, truncated, corrupt, or without tokenizer.
        UnsupportedModelError: sound, but of an architecture that specdec does not run.
    """
    cache_dir = cache_dir.expanduser()
    checkpoint = resolve(ref, cache_dir, progress or silent)
    return checkpoint.tokenizer(cache_dir, checkpoint.open().config)
