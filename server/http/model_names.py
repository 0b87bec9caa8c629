"""The names under which a client may ask for the model."""

from __future__ import annotations

from pathlib import PurePosixPath


def model_names(served: str) -> frozenset[str]:
    """``served`` and its short forms, in lower case: without folders or the hub's owner, without ``.gguf``, and each
    with ``:latest`` as Ollama's clients write."""
    whole = served.lower()
    last = PurePosixPath(whole).name
    names = {name for full in (whole, last) for name in (full, full.removesuffix(".gguf")) if name}
    return frozenset(names | {f"{name}:latest" for name in names})
