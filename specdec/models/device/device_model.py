"""A model whose weights lie on a GPU, ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.models.device.device_types import DeviceTypes
from specdec.models.device.device_weights import DeviceWeights
from specdec.models.model_config import ModelConfig
from specdec.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What `load_device_model` returns; ``config`` has the tokenizer's begin and end ids filled in. ``dtype``: what
    the layers' weights are held in, for people."""

    name: str
    config: ModelConfig
    dtype: str
    types: DeviceTypes
    weights: DeviceWeights
    tokenizer: Tokenizer
