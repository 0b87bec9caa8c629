"""Text embeddings: how a model's files say that it makes them, and the arithmetic from hidden states to a vector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.core.types import Pooling
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import read_json, read_text_file, well_formed

RANK = "rank"  # the pooling of a model made for reranking
_RERANKER = "rerank"  # part of the names of such models
# GGUF's ``*.pooling_type``: 0 none, 1 mean, 2 first token, 3 last token, 4 rank
_GGUF_TYPES: dict[int, str] = {0: "", 1: Pooling.MEAN, 3: Pooling.LAST, 4: RANK}
# The flags or names that sentence-transformers writes to a pooling module's configuration
_POOLINGS: dict[str, str] = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
}
_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers; others would change the vector


class Pooler:
    """Makes a sequence's embedding from the final hidden states of its tokens.

    The bits depend on neither the batch nor the chunks of the prompt: states are added one by one in the tokens' order,
    in float64.
    """

    def __init__(self, pooling: Pooling, n_tokens: int) -> None:
        self._pooling, self._n_tokens = pooling, n_tokens
        self._n_pooled = 0  # leading tokens whose states were added
        self._sum: NDArray[np.float64] = np.zeros(1)

    @property
    def most_cached(self) -> int | None:
        """Leading tokens whose states are not needed any more, so that cached KV may replace their computation; None:
        all but the last."""
        return self._n_pooled if self._pooling is Pooling.MEAN else None

    def wanted(self, start: int, end: int) -> range:
        """The rows of the chunk of tokens ``start`` to ``end`` whose states are needed, counted from ``start``."""
        if self._pooling is Pooling.MEAN:
            return range(max(self._n_pooled - start, 0), end - start)
        return range(end - start - 1, end - start) if end == self._n_tokens else range(0)

    def add(self, states: NDArray[np.float64]) -> None:
        """Add the states [rows, hidden] of the rows that `wanted` returned."""
        for state in states:
            self._sum = self._sum + state
            self._n_pooled += 1

    @property
    def is_finite(self) -> bool:
        """Whether every value of the sum is."""
        return bool(np.isfinite(self._sum).all())

    def embedding(self) -> bytes:
        """The states' sum, scaled to length 1, as `Finished.embedding`."""
        return _of_length_one(self._sum).tobytes()


def truncated(embedding: bytes, size: int | None) -> NDArray[np.float32]:
    """The first ``size`` values of a `Finished.embedding`, scaled to length 1 again; None: all of it."""
    values: NDArray[np.float32] = np.frombuffer(embedding, "<f4")
    if size is None or size >= len(values):
        return values
    return _of_length_one(values[:size].astype(np.float64))


def _of_length_one(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Zeros stay zeros."""
    length = np.sqrt(np.square(values).sum())
    return (values / (length or 1.0)).astype("<f4")


def pooling_by_name(name: str) -> str:
    """`EngineInfo.pooling` of a model whose files say nothing: rerankers that answer yes or no are plain models."""
    return RANK if _RERANKER in name.lower() else ""


def gguf_pooling(metadata: dict[str, Any], path: Path) -> str:
    """`EngineInfo.pooling` of a GGUF file.

    Raises:
        UnsupportedModelError: the file asks for another kind of pooling.
    """
    kind = int(metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0))
    if kind not in _GGUF_TYPES:
        raise UnsupportedModelError(f"{path}: pooling type {kind} is not supported; use a model of mean or last token")
    return _GGUF_TYPES[kind]


def folder_pooling(folder: Path) -> str:
    """`EngineInfo.pooling` of a Hugging Face folder, from the files of sentence-transformers if there are any.

    Raises:
        UnsupportedModelError: it asks for another kind of pooling, or for a further module.
        ModelError: a file cannot be read, or modules.json is not a list of modules.
    """
    path = folder / "modules.json"
    if not path.exists():
        return ""
    with well_formed(str(path)):  # kind of each module, and its subfolder; that of the transformer itself is empty
        modules = json.loads(read_text_file(path))
        places = {each["type"].rpartition(".")[2]: Path(each.get("path", "")) for each in modules}
    if any(Path(place.name) != place for place in places.values()):
        raise ModelError(f"{folder}: modules.json names a folder outside the model's")
    unknown = [kind for kind in places if kind not in _MODULES]
    if unknown:
        raise UnsupportedModelError(
            f"{folder}: modules.json: module '{unknown[0]}' is not supported; use a model without it"
        )
    configuration = read_json(folder / places["Pooling"] / "config.json") if "Pooling" in places else {}
    chosen = [flag for flag, on in configuration.items() if flag.startswith("pooling_mode_") and on is True]
    if (named := configuration.get("pooling_mode")) is not None:  # newer versions write this instead of the flags
        chosen = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    found = _POOLINGS.get(chosen[0]) if len(chosen) == 1 else None
    if found is None:
        raise UnsupportedModelError(
            f"{folder}: pooling by {', '.join(chosen) or 'nothing'} is not supported; only mean_tokens or lasttoken is"
        )
    return found
