"""A model on disk, before it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from specdec.models.model_config import ModelConfig
from specdec.models.tensor_source import TensorSource
from specdec.models.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """Somewhere a model's tensors and tokenizer can be read from, in any of the formats."""

    @property
    def name(self) -> str:
        """How messages and cache files call the model."""
        ...

    @property
    def path(self) -> Path:
        """The file or folder; of a model that is in none, a name in its place."""
        ...

    @property
    def keeps_packed(self) -> bool:
        """Whether its packed weights are kept on disk, to load sooner the next time."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 over what identifies the content without reading all of it (names, sizes, times, headers)."""
        ...

    def open(self) -> TensorSource:
        """The tensors; raises ModelError."""
        ...

    def tokenizer(self, cache_dir: Path, config: ModelConfig) -> Tokenizer:
        """The tokenizer, from ``cache_dir`` where it had to be converted; raises ModelError."""
        ...
