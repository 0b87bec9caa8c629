"""A model ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.model_config import ModelConfig
from specdec.models.tokenizer import Tokenizer
from specdec.models.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What `load_model` returns. ``fingerprint`` (hex) changes with the source's content or the dtype; ``config``
    has the tokenizer's begin and end ids filled in."""

    name: str
    config: ModelConfig
    weights: ModelWeights
    tokenizer: Tokenizer
    fingerprint: str
