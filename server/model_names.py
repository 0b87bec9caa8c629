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
    """One model's names: that of its target, which is known once the engine is ready, and ``aliases``."""

    def __init__(self, aliases: Sequence[str] = ()) -> None:
        self.aliases = tuple(aliases)
        self._target, self._known = "", frozenset[str]()

    def include(self, asked: str, target: str) -> bool:
        """Whether ``asked`` means the model whose target is called ``target``."""
        if target != self._target:
            exact = {form for alias in self.aliases for form in (alias.lower(), f"{alias.lower()}:latest")}
            self._target, self._known = target, model_names(target) | exact
        return asked.lower() in self._known
