"""Models: where they come from, how they become packed weights, and how they run."""

from specdec.models.catalogue import CATALOGUE, DEFAULT_MODEL, find_entry
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.fetch import Fetcher
from specdec.models.load import LoadedModel, load_model
from specdec.models.progress import Progress
from specdec.models.tokenizer import Tokenizer
from specdec.models.weights import LayerWeights, ModelWeights

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "Fetcher",
    "LayerWeights",
    "LoadedModel",
    "ModelConfig",
    "ModelWeights",
    "Progress",
    "RopeConfig",
    "Tokenizer",
    "find_entry",
    "load_model",
]
