"""The names under which requests may address a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath


def model_names(served: str) -> frozenset[str]:
    """``served`` and its short forms in lower case: without folder or owner, without ``.gguf``, each with and without
    Ollama's ``:latest``."""
    whole = served.lower()
    last = PurePosixPath(whole).name
    names = {name for full in (whole, last) for name in (full, full.removesuffix(".gguf")) if name}
    return frozenset(names | {f"{name}:latest" for name in names})


class ModelNames:
    """One model's names."""

    def __init__(self, aliases: Sequence[str] = (), own: str = "", all_own: Sequence[str] = ()) -> None:
        """own: its name in the configuration of several models. all_own: the own names of all models of the server."""
        self.aliases, self.own, self.all_own = tuple(aliases), own, tuple(all_own)
        self._exact = frozenset(
            form for name in (own, *aliases) if name for form in (name.lower(), f"{name.lower()}:latest")
        )
        self._target, self._known = "", self._exact

    def include(self, asked: str, target: str = "") -> bool:
        """Whether ``asked`` names the model. target: the name of its target; empty until the engine is ready."""
        if target != self._target:
            self._target, self._known = target, self._exact | (model_names(target) if target else frozenset())
        return asked.lower() in self._known
