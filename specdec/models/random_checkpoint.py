"""A model of a given shape with random weights: for benchmarks of speed, without any download."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specdec.errors import ModelError
from specdec.models.model_config import ModelConfig
from specdec.models.random_shapes import RANDOM_SHAPES
from specdec.models.random_source import RandomSource
from specdec.models.random_tokenizer import random_tokenizer
from specdec.models.tokenizer import Tokenizer

PREFIX = "random:"
_RECIPE = 1  # raise when other values come out of the same seed


class RandomCheckpoint:
    """The `Checkpoint` that "random:SHAPE" names.

    Raises:
        ModelError: no such shape.
    """

    keeps_packed = False  # made as fast as read from a disk, and as large

    def __init__(self, name: str, seed: int = 0) -> None:
        shape = name.removeprefix(PREFIX)
        if shape not in RANDOM_SHAPES:
            known = ", ".join(PREFIX + known for known in RANDOM_SHAPES)
            raise ModelError(f"{name}: no such shape; there are {known}")
        self.name = PREFIX + shape
        self.path = Path(self.name)
        self._config = RANDOM_SHAPES[shape]
        self._seed = seed

    def fingerprint(self) -> str:
        """Over the shape, the seed and the recipe."""
        return hashlib.sha256(f"random {_RECIPE} {self._seed} {self._config}".encode()).hexdigest()

    def open(self) -> RandomSource:
        """The tensors."""
        return RandomSource(self.name, self._config, self._seed)

    def tokenizer(self, cache_dir: Path, config: ModelConfig) -> Tokenizer:
        """Made for the shape's vocabulary."""
        return random_tokenizer(config.vocab_size)
