"""Small random models on the device that tests have: a GPU, or the CPU with interpreted kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.models.config import ModelConfig
from specdec.models.decoder import Decoder, KvPool
from specdec.models.device_decoder import DeviceDecoder
from specdec.models.device_weights import DeviceModel, DeviceTypes, WeightsReader
from specdec.models.load import LoadedModel
from specdec.models.pack import pack_model
from specdec.models.progress import silent
from specdec.models.random_model import RANDOM_SHAPES, RandomSource, random_tokenizer
from verify_kernels.reference.backend import ReferenceBackend

TINY = replace(RANDOM_SHAPES["tiny"], n_heads=2, n_kv_heads=1, intermediate_size=96)
# Of cases that only the interpreter is slow at: a GPU runs them with the others.
SLOW_INTERPRETED = () if torch.cuda.is_available() else (pytest.mark.slow,)
PAGES = 12
MAX_ROWS, MAX_POSITIONS = 96, 320
# No configuration uses float32, and no chip has it compiled. It compares a forward with the CPU's to more digits than
# 16 bits have.
FLOAT32 = DeviceTypes("fp32", torch.float32, fp8=False)


def shape(**changes: Any) -> ModelConfig:
    """`TINY` with changes."""
    return replace(TINY, **changes)


def place() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_model(config: ModelConfig, dtype: Any = "fp32") -> DeviceModel:
    source, types = RandomSource("small", config, 0), FLOAT32 if dtype == "fp32" else DeviceTypes.of(dtype)
    weights = WeightsReader(source, types, place(), MAX_ROWS, silent).read()
    return LoadedModel("small", config, types.name, weights, random_tokenizer(config.vocab_size))


def device_decoder(config: ModelConfig, dtype: Any = "fp32", pages: int = PAGES, **changes: Any) -> DeviceDecoder:
    sizes: dict[str, Any] = {
        "max_entries": 4, "max_rows": MAX_ROWS, "max_logit_rows": MAX_ROWS, "max_positions": MAX_POSITIONS,
    }  # fmt: skip
    return DeviceDecoder(device_model(config, dtype), pages, place(), **{**sizes, **changes})


def host_decoder(config: ModelConfig, **changes: Any) -> Decoder:
    """The same model in float32 by the CPU's reference kernels."""
    weights = pack_model(RandomSource("small", config, 0), "fp32", silent).weights(config)
    return Decoder(
        config, weights, ReferenceBackend(1), KvPool(config, PAGES), max_rows=MAX_ROWS, max_logit_rows=MAX_ROWS,
        max_positions=MAX_POSITIONS, **changes,
    )  # fmt: skip
