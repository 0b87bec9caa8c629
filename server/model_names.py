"""The names by which requests may ask for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath


def model_names(served: str) -> frozenset[str]:
    """``served`` and its short forms, in lower case: without folders or the hub's owner, without ``.gguf``, and each
    with ``:latest`` as Ollama's clients write."""
    whole = served.lower()
    last = PurePosixPath(whole).name
    names = {name for full in (whole, last) for name in (full, full.removesuffix(".gguf")) if name}
    return frozenset(names | {f"{name}:latest" for name in names})


class ModelNames:
    """One model's names: ``own``, by which a server of several models tells them apart, ``aliases``, and that of its
    target, which is known once the engine is ready. ``all_own``: those of all the server's models."""

    def __init__(self, aliases: Sequence[str] = (), own: str = "", all_own: Sequence[str] = ()) -> None:
        self.aliases, self.own, self.all_own = tuple(aliases), own, tuple(all_own)
        self._exact = frozenset(
            form for name in (own, *aliases) if name for form in (name.lower(), f"{name.lower()}:latest")
        )
        self._target, self._known = "", self._exact

    def include(self, asked: str, target: str = "") -> bool:
        """Whether ``asked`` means the model whose target is called ``target``; empty: that is not known yet."""
        if target != self._target:
            self._target, self._known = target, self._exact | (model_names(target) if target else frozenset())
        return asked.lower() in self._known
