"""A Hugging Face model folder as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from specdec.models.fingerprint import fingerprint_files
from specdec.models.hf_source import HFSource, read_json, weight_files
from specdec.models.hf_tokenizer import load_hf_tokenizer
from specdec.models.model_config import ModelConfig
from specdec.models.quantized_config import parse_quantized_config
from specdec.models.quantized_source import QuantizedSource
from specdec.models.tensor_source import TensorSource
from specdec.models.tokenizer import Tokenizer


class HFCheckpoint:
    """config.json, safetensors and tokenizer.json in ``path``."""

    keeps_packed = True

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.resolve().name

    def fingerprint(self) -> str:
        """Over the configuration and every weight file."""
        read_json(self.path / "config.json")  # first, because a folder without one is most often no model at all
        optional = self.path / "generation_config.json"
        extra = [optional] if optional.exists() else []
        return fingerprint_files([self.path / "config.json", *extra, *weight_files(self.path)])

    def open(self) -> TensorSource:
        """The tensors; those of AWQ and GPTQ folders dequantised as they are read."""
        source = HFSource(self.path)
        quantized = read_json(self.path / "config.json").get("quantization_config")
        if quantized is None:
            return source
        return QuantizedSource(source, parse_quantized_config(quantized, self.name))

    def tokenizer(self, cache_dir: Path, config: ModelConfig) -> Tokenizer:
        """The folder's own tokenizer; nothing has to be converted."""
        return load_hf_tokenizer(self.path, config)
