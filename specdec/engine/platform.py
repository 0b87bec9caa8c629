"""The platforms that run an engine's models: the CPU, alone or with several processes; a GPU is in `build_device`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from specdec.config import EngineConfig, WeightDtype
from specdec.engine.memory import MemoryBudget, draft_kv_dtype, host_kv_dtype, wanted_context
from specdec.engine.numeric_fingerprint import host_arithmetic
from specdec.engine.verify import StepVerifier
from specdec.errors import ConfigError, ModelError
from specdec.models.config import ModelConfig
from specdec.models.decoder import Decoder, KvPool, TargetDecoder, kv_page_bytes
from specdec.models.load import LoadedModel, PackedModel, load_model, with_tokenizer
from specdec.models.memory import available_bytes
from specdec.models.pack import PackedFileError
from specdec.models.progress import Progress, silent
from specdec.models.tensor_parallel.parallel_decoder import ParallelDecoder
from specdec.models.tensor_parallel.rank_processes import RankProcesses
from specdec.models.tensor_parallel.shard_decoder import StepSizes
from specdec.models.tensor_parallel.shares import rank_processors, share_layout, share_out
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocabulary_cut import VocabularyCut
from verify_kernels.backend import Backend
from verify_kernels.backend_selection import Kernels, NumericMode, self_test
from verify_kernels.cpu.shared_ranks import spin_for
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.sampling import SamplingKernels

_LOG = logging.getLogger(__name__)

Target = LoadedModel[Any]


class Platform(Protocol):
    """The device that runs target and draft model."""

    kernels: str
    """Name of its kernels."""
    sampling: SamplingKernels
    mode: NumericMode
    """Whether a row has the same bits in any batch; set by `target_decoder`."""
    kv_dtype: torch.dtype
    """Of the target's KV cache; set by `target_decoder`."""
    arithmetic: str
    """The properties of machine and kernels that bits depend on, for the numeric fingerprint."""

    def load_target(self, progress: Progress | None, tokenizer: Tokenizer | None) -> Target:
        """Load the target. tokenizer: its own, if loaded before. Raises ModelError."""

    def load_draft(
        self,
        ref: str,
        dtype: WeightDtype | None,
        cut: VocabularyCut | None,
        target_tokenizer: Tokenizer,
        progress: Progress | None,
    ) -> Target:
        """Load a draft model. dtype, cut: used on a CPU only. target_tokenizer: reused if equal. Raises ModelError."""

    def kv_tokens(self, model: Target, aux_layers: int, budget: MemoryBudget) -> int:
        """Tokens that the KV caches hold, by free memory. model: the target. budget: of the CPU."""

    def target_decoder(self, model: Target, pages: int, positions: int, aux_layers: Sequence[int]) -> TargetDecoder:
        """The target's decoder for sequences of up to ``positions`` tokens. aux_layers: layers whose inputs are kept.

        Raises:
            ModelError: it does not fit in memory.
            ConfigError: it cannot run as configured, or ``strict`` is set and its mode is not bitwise.
        """

    def draft_decoder(self, model: Target, pages: int, positions: int, target: ModelConfig) -> TargetDecoder:
        """A draft model's decoder next to a target of shape ``target``. Raises ModelError."""

    def verifier(self, decoder: TargetDecoder) -> StepVerifier | None:
        """The platform's own verifier, warmed up; None: the engine uses its default."""


class HostPlatform:
    """The CPU.

    Raises:
        ConfigError: ``strict`` is set and the kernels are not bitwise, or the KV cache's type needs a GPU.
    """

    def __init__(self, config: EngineConfig, kernels: Kernels) -> None:
        self._config, self._backend, self._packing = config, kernels.backend, kernels.packing
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

    def load_target(self, progress: Progress | None, tokenizer: Tokenizer | None) -> Target:
        """Load the target in the configured type."""
        config = self._config
        return load_model(
            config.target,
            dtype=config.dtype,
            cache_dir=config.cache_dir,
            progress=progress,
            packing=self._packing,
            like=tokenizer,
        )

    def load_draft(
        self,
        ref: str,
        dtype: WeightDtype | None,
        cut: VocabularyCut | None,
        target_tokenizer: Tokenizer,
        progress: Progress | None,
    ) -> Target:
        """Load a draft model, by default in the configuration's type for drafts."""
        config = self._config
        return load_model(
            ref,
            dtype=dtype or config.default_draft_dtype,
            cache_dir=config.cache_dir,
            progress=progress,
            cut=cut,
            packing=self._packing,
            like=target_tokenizer,
        )

    def kv_tokens(self, model: Target, aux_layers: int, budget: MemoryBudget) -> int:
        """The planned number."""
        return budget.kv_tokens

    def target_decoder(self, model: Target, pages: int, positions: int, aux_layers: Sequence[int]) -> TargetDecoder:
        """The target's decoder."""
        return build_decoder(
            self._config, model, self._backend(), pages, positions, self.kv_dtype, aux_layers=aux_layers
        )

    def draft_decoder(self, model: Target, pages: int, positions: int, target: ModelConfig) -> Decoder:
        """A draft model's decoder."""
        promised = pages * kv_page_bytes(target, self.kv_dtype) + self._config.max_step_rows * target.vocab_size * 4
        kv_dtype = draft_kv_dtype(self._config)
        return build_decoder(self._config, model, self._backend(), pages, positions, kv_dtype, promised)

    def verifier(self, decoder: TargetDecoder) -> None:
        """None: the engine's default."""


def target_device(config: EngineConfig) -> torch.device | None:
    """The GPU that runs the target; None: the CPU.

    Raises:
        ConfigError: a GPU is configured and torch finds none, or it is combined with ``tp``.
    """
    if config.device == "cpu":
        return None
    if config.tp > 1 and (config.device == "cuda" or torch.cuda.is_available()):
        raise ConfigError("engine.tp: only a CPU's target is cut over processes; set it to 1, or engine.device to cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if config.device == "cuda":
        raise ConfigError("engine.device: torch finds no GPU; install a CUDA build of torch, or set it to cpu")
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


def build_decoder(
    config: EngineConfig,
    model: Target,
    backend: Backend,
    pages: int,
    positions: int,
    kv_dtype: torch.dtype,
    already_promised: int = 0,
    aux_layers: Sequence[int] = (),
) -> Decoder:
    """A decoder with a KV pool of ``pages`` pages, for sequences of up to ``positions`` tokens and a tree.

    already_promised: bytes reserved for other parts and not yet allocated. aux_layers: layers whose inputs are kept.

    Raises:
        ModelError: it does not fit in memory.
    """
    check_kv_memory(config, model, pages, kv_dtype, already_promised)
    return Decoder(
        model.config,
        model.weights,
        backend,
        KvPool(model.config, pages, kv_dtype),
        max_rows=config.max_step_rows,
        max_logit_rows=config.max_step_rows,
        max_positions=positions + PAGE_SIZE,
        aux_layers=aux_layers,
    )


def check_kv_memory(
    config: EngineConfig, model: Target, pages: int, kv_dtype: torch.dtype, already_promised: int = 0
) -> None:
    """Raise ModelError if the KV cache does not fit; parameters as for `build_decoder`."""
    need = pages * kv_page_bytes(model.config, kv_dtype)
    # Pools and logits are allocated lazily, so reserved bytes still count as free.
    promised = config.max_step_rows * model.config.vocab_size * 4 + already_promised
    free = available_bytes() - promised - config.spare_bytes
    if need > free:
        raise ModelError(
            f"engine.kv_tokens: the KV cache of {model.name} needs {need / 2**30:.1f} GiB, "
            f"{max(free, 0) / 2**30:.1f} GiB are free; lower kv_tokens"
        )


class ParallelPlatform(HostPlatform):
    """The CPU, with the target over ``config.tp`` processes of ``threads`` threads each.

    On a machine with several NUMA nodes each process is bound to a node of its own, this one included.

    Raises:
        ConfigError: as `HostPlatform`, or the kernels or this system do not support it.
    """

    def __init__(self, config: EngineConfig, kernels: Kernels, threads: int) -> None:
        if kernels.name != "native":
            raise ConfigError(f"engine.tp: {kernels.name} kernels do not run over processes; set it to 1")
        if not hasattr(os, "memfd_create"):
            raise ConfigError("engine.tp: processes share memory by memfd_create, which this system lacks; set it to 1")
        super().__init__(config, kernels)
        self._cores = os.sched_getaffinity(0)
        if config.tp > len(self._cores):
            _LOG.warning("engine.tp: %d processes on %d cores wait for each other", config.tp, len(self._cores))
        self._threads = threads

    def load_target(self, progress: Progress | None, tokenizer: Tokenizer | None) -> Target:
        """Load this process's share of the target; the other processes start to load theirs."""
        config = self._config
        with PackedModel(
            config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress, packing=self._packing
        ) as model:
            self._share = share_out(model.file.config, config.tp)[0]
            processors = rank_processors(config.tp, self._cores)
            self._others = RankProcesses(model, config.tp, self._threads, config.cache_dir, processors)
            try:
                if processors is not None:
                    _LOG.info("engine.tp: processes stay on processors %s", processors)
                    os.sched_setaffinity(0, processors[0])
                return self._own_share(model, progress or silent, tokenizer)
            except BaseException:
                self._others.close()
                raise

    def _own_share(self, model: PackedModel, progress: Progress, tokenizer: Tokenizer | None) -> Target:
        config, file, name, done = self._config, model.file, model.checkpoint.name, 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress(f"loading {name}", done, file.nbytes)

        try:
            buffer = file.read_parts(*share_layout(file.layout, self._share), on_bytes)
        except (PackedFileError, OSError) as error:
            raise model.damaged(error) from None
        shape, found = with_tokenizer(model.checkpoint, file.config, config.cache_dir, tokenizer)
        return LoadedModel(name, shape, config.dtype, buffer.weights(file.config), found, model.key, file.bits)

    def target_decoder(self, model: Target, pages: int, positions: int, aux_layers: Sequence[int]) -> ParallelDecoder:
        """The target's decoder; waits for the other processes."""
        config = self._config
        try:
            check_kv_memory(config, model, pages, self.kv_dtype)
            sizes = StepSizes(config.max_step_rows, config.max_step_rows, positions + PAGE_SIZE, pages)
            return ParallelDecoder(
                dataclasses.replace(self._share, config=model.config), model.weights, self._backend(), self._others,
                sizes, self.kv_dtype, cache_dir=config.cache_dir, aux_layers=aux_layers,
                spin_us=spin_for(config.tp, self._threads, len(self._cores)),
            )  # fmt: skip
        except BaseException:
            self._others.close()
            raise
