"""Where the target runs, as the configuration and the machine have it."""

from __future__ import annotations

import torch

from specdec.config import EngineConfig
from specdec.errors import ConfigError


def target_device(config: EngineConfig) -> torch.device | None:
    """The GPU that the target is to run on; None: it runs on the CPU.

    Raises:
        ConfigError: a GPU was asked for and torch finds none.
    """
    if config.device == "cpu":
        return None
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if config.device == "cuda":
        raise ConfigError("engine.device: torch finds no GPU; install a CUDA build of torch, or set it to cpu")
    return None
