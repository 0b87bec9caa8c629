"""The platform that runs an engine's models on the CPU; that of a GPU, with the same methods, is in `build_device`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from specdec.config import EngineConfig, WeightDtype
from specdec.control_groups import available_bytes
from specdec.engine.memory import MemoryBudget, draft_kv_dtype, host_kv_dtype, wanted_context
from specdec.engine.numeric_fingerprint import host_arithmetic
from specdec.errors import ConfigError
from specdec.models.config import ModelConfig
from specdec.models.decoder import Decoder, KvPool, TargetDecoder, kv_page_bytes
from specdec.models.load import LoadedModel, load_model
from specdec.models.memory import WORKING_BYTES, check_memory
from specdec.models.progress import Progress
from specdec.models.vocabulary_cut import VocabularyCut
from verify_kernels.backend_selection import Kernels, self_test
from verify_kernels.forward_batch import PAGE_SIZE

_LOG = logging.getLogger(__name__)

Target = LoadedModel[Any]


class HostPlatform:
    """The CPU.

    Attributes: ``kernels``, their name; ``sampling``, those that sample; ``mode``, whether a row has the same bits in
    any batch; ``kv_dtype``, of the target's KV cache; ``arithmetic``, what of machine and kernels bits depend on, for
    the numeric fingerprint.

    Raises:
        ConfigError: ``strict`` is set and the kernels are not bitwise, or the KV cache's type needs a GPU.
    """

    def __init__(self, config: EngineConfig, kernels: Kernels) -> None:
        self._config, self._backend = config, kernels.backend
        self._load = partial(load_model, cache_dir=config.cache_dir, round_blocks=kernels.round_blocks)
        self.kernels, self.sampling = kernels.name, kernels.sampling
        if config.kv_dtype == "fp8":
            raise ConfigError("engine.kv_dtype: fp8 needs a GPU; on a CPU set it to auto, bf16, int8 or fp32")
        self.kv_dtype = host_kv_dtype(config)
        self.mode = self_test(kernels.backend(), config.dtype, self.kv_dtype)
        self.arithmetic = host_arithmetic(kernels)
        if config.strict and self.mode != "bitwise":
            raise ConfigError(
                f"engine.strict: {kernels.name} kernels are {self.mode} here; drop strict or change engine.dtype"
            )

    def load_target(self, progress: Progress | None) -> Target:
        """Load the target in the configured type. Raises ModelError."""
        return self._load(self._config.target, dtype=self._config.dtype, progress=progress)

    def load_draft(
        self, ref: str, dtype: WeightDtype | None, cut: VocabularyCut | None, progress: Progress | None
    ) -> Target:
        """Load a draft model, by default in the configuration's type for drafts.

        Raises:
            ModelError: it cannot be loaded.
        """
        dtype = dtype or self._config.default_draft_dtype
        return self._load(ref, dtype=dtype, cut=cut, progress=progress)

    def kv_tokens(self, model: Target, aux_layers: int, budget: MemoryBudget) -> int:
        """Tokens that the KV caches hold: the planned number. model: the target. aux_layers: how many keep inputs."""
        return budget.kv_tokens

    def target_decoder(self, model: Target, pages: int, positions: int, aux_layers: Sequence[int]) -> TargetDecoder:
        """The target's decoder for sequences of up to ``positions`` tokens. aux_layers: layers whose inputs are kept.

        Raises:
            ModelError: it does not fit in memory.
        """
        return self._decoder(model, pages, positions, self.kv_dtype, 0, aux_layers)

    def draft_decoder(self, model: Target, pages: int, positions: int, target: ModelConfig) -> Decoder:
        """A draft model's decoder next to a target of shape ``target``. Raises ModelError."""
        promised = pages * kv_page_bytes(target, self.kv_dtype) + self._config.max_step_rows * target.vocab_size * 4
        return self._decoder(model, pages, positions, draft_kv_dtype(self._config), promised)

    def verifier(self, decoder: TargetDecoder) -> None:
        """None: the engine's default."""

    def _decoder(
        self,
        model: Target,
        pages: int,
        positions: int,
        kv_dtype: torch.dtype,
        already_promised: int,
        aux_layers: Sequence[int] = (),
    ) -> Decoder:
        """already_promised: bytes reserved for other parts and not yet allocated."""
        config = self._config
        need = pages * kv_page_bytes(model.config, kv_dtype)
        # Pools and logits are allocated lazily, so reserved bytes still count as free.
        promised = config.max_step_rows * model.config.vocab_size * 4 + already_promised
        free = available_bytes() - promised - config.spare_bytes
        # The plan counted the working space of loading; by now it is in use or given back.
        check_memory(f"engine.kv_tokens: the KV cache of {model.name}", need - WORKING_BYTES, None, free)
        return Decoder(
            model.config,
            model.weights,
            self._backend(),
            KvPool(model.config, pages, kv_dtype),
            max_rows=config.max_step_rows,
            max_logit_rows=config.max_step_rows,
            max_positions=positions + PAGE_SIZE,
            aux_layers=aux_layers,
        )


LEAST_CAPABILITY = (8, 0)  # of CUDA: bfloat16 products, asynchronous copies


def target_device(config: EngineConfig) -> torch.device | None:
    """The GPU that runs the target; None: the CPU.

    Raises:
        ConfigError: a GPU is configured, and torch finds none or the kernels do not run on it.
    """
    if config.device == "cpu":
        return None
    problem = "torch finds no GPU; install a CUDA build of torch, or"
    if torch.cuda.is_available():
        if torch.version.hip or torch.cuda.get_device_capability() >= LEAST_CAPABILITY:
            return torch.device("cuda", torch.cuda.current_device())
        problem = f"{torch.cuda.get_device_name()} is older than the kernels support (compute capability 8.0);"
        if config.device == "auto":
            _LOG.warning("engine.device: %s the CPU is used", problem)
    if config.device == "cuda":
        raise ConfigError(f"engine.device: {problem} set it to cpu")
    return None


def context_limit(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence served, in tokens: the configured one, within the model's limit and the KV cache.

    Raises:
        ConfigError: the configured context exceeds the model's.
    """
    if config.max_context > model.max_context:
        raise ConfigError(f"engine.max_context: {config.max_context} exceeds the model's {model.max_context}")
    wanted = wanted_context(config, model)
    # One page stays free of context so that a lone sequence always has room for a tree.
    return max(1, min(wanted, -(-config.kv_tokens // PAGE_SIZE) * PAGE_SIZE - PAGE_SIZE))
