"""An engine's models on a GPU. Imports triton, which a CPU machine may lack."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from specdec.config import DeviceDtype, EngineConfig, WeightDtype
from specdec.control_groups import available_bytes
from specdec.core.tree import MAX_NODES
from specdec.engine.device_kernel_checks import check_kernels
from specdec.engine.device_verify import DeviceVerifier, warm_up
from specdec.engine.memory import MemoryBudget, MemoryNeed, kv_tokens_by_memory, measure_draft, wanted_context
from specdec.engine.numeric_fingerprint import gpu_arithmetic
from specdec.errors import ConfigError, ModelError
from specdec.models.config import ModelConfig
from specdec.models.decoder import TargetDecoder, kv_page_bytes
from specdec.models.device_decoder import DeviceDecoder, device_self_test
from specdec.models.device_weights import DeviceModel, load_device_model
from specdec.models.progress import Progress
from specdec.models.vocabulary_cut import VocabularyCut
from verify_kernels.backend_selection import NumericMode
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.kernel_launch import FP8, supports_fp8
from verify_kernels.gpu.sampling_table import SamplingPlan, SamplingWorkspace
from verify_kernels.gpu.triton_sampling import TritonSampling
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import SamplingKernels

_LOG = logging.getLogger(__name__)
# Settings that a refusal for lack of memory names, to be lowered.
_KV = ("engine.kv_tokens",)
_ROWS = ("engine.max_step_rows",)
_SAMPLES = ("engine.max_batch", "engine.max_step_rows")
WORKING_BYTES = 1 << 30  # for CUDA graphs, the kernels' code and the checks at start


DEVICE_ROWS = 1024  # of a step: prompts gain nothing beyond


def with_device_rows(config: EngineConfig) -> EngineConfig:
    """``config`` with the steps of a GPU where it leaves their size open: prompts are read faster in larger ones."""
    given = config.model_fields_set
    rows = config.max_step_rows if "max_step_rows" in given else max(DEVICE_ROWS, config.max_step_rows)
    chunk = config.prefill_chunk if "prefill_chunk" in given else rows
    return config.model_copy(update={"max_step_rows": rows, "prefill_chunk": chunk})


def device_needs(
    model: DeviceModel,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    pages: int,
    max_rows: int,
    max_logit_rows: int,
    max_positions: int,
    aux_layers: int,
) -> list[MemoryNeed]:
    """Device memory that `DeviceDecoder` and the verifier allocate for these sizes, as far as it grows with them."""
    c, name = model.config, model.name
    widths = (2 + aux_layers) * c.hidden_size + 2 * (c.q_size + c.kv_size + c.intermediate_size)
    partials = AttentionWorkspace.partial_bytes(
        heads=c.n_heads, head_dim=c.head_dim, kv_dtype=kv_dtype, max_rows=max_rows,
        max_pages=-(-max_positions // PAGE_SIZE), device=device,
    )  # fmt: skip
    sampling = SamplingWorkspace.bytes_needed(max_logit_rows, SamplingPlan.of(c.vocab_size))
    rows = model.weights.final_norm.dtype.itemsize * (max_rows * widths + max_logit_rows * c.hidden_size)
    logits = max_logit_rows * c.vocab_size * torch.float32.itemsize
    angles = len(c.rope.kinds) * max_positions * c.head_dim * torch.float32.itemsize
    return [
        MemoryNeed(f"KV cache of {name}", pages * kv_page_bytes(c, kv_dtype), _KV),
        MemoryNeed(f"attention's partial sums of {name}", partials, ("engine.max_context", *_ROWS)),
        MemoryNeed(f"rotary tables of {name}", angles, ("engine.max_context",)),
        MemoryNeed(f"rows of a step of {name}", rows, _ROWS),
        MemoryNeed(f"logits of {name}", logits, _SAMPLES),
        MemoryNeed(f"sampling for {name}", sampling, _SAMPLES),
    ]


FP8_CAPABILITY = (8, 9)  # first CUDA compute capability with float8 conversions


def build_device_decoder(
    config: EngineConfig,
    model: DeviceModel,
    device: torch.device,
    pages: int,
    positions: int,
    aux_layers: tuple[int, ...] = (),
    working_bytes: int = 0,
) -> DeviceDecoder:
    """A decoder with a KV pool of ``pages`` pages, for sequences of up to ``positions`` tokens and a tree. It leaves
    ``working_bytes`` of the device's memory free.

    Raises:
        ModelError: the device's memory is short.
        ConfigError: the device does not support the configured KV cache.
    """
    kv_dtype, sizes = device_kv_dtype(config, model.weights.final_norm.dtype), _step_sizes(config, positions)
    if device.type == "cuda":
        if kv_dtype == FP8 and not supports_fp8(device, FP8_CAPABILITY):
            raise ConfigError("engine.kv_dtype: this GPU does not support fp8; set it to auto")
        needs = device_needs(model, kv_dtype, device, pages=pages, aux_layers=len(aux_layers), **sizes)
        needs.append(MemoryNeed("working space", working_bytes))
        MemoryBudget(needs, torch.cuda.mem_get_info(device)[0], place="memory of the device").check()
    return DeviceDecoder(
        model, pages, device, max_entries=config.max_batch, aux_layers=aux_layers, kv_dtype=kv_dtype, **sizes
    )


def _step_sizes(config: EngineConfig, positions: int) -> dict[str, int]:
    """The largest step of a decoder for sequences of up to ``positions`` tokens and a tree."""
    return {
        "max_rows": config.max_step_rows,
        "max_logit_rows": min(config.max_step_rows, config.max_batch * MAX_NODES),
        "max_positions": positions + PAGE_SIZE,
    }


def device_kv_dtype(config: EngineConfig, rows: torch.dtype) -> torch.dtype:
    """The type of KV caches on a GPU. rows: type of the hidden states.

    Raises:
        ConfigError: the configured type is one for CPUs, or not that of the rows.
    """
    if config.kv_dtype == "fp8":
        return FP8
    if config.kv_dtype != "auto" and (config.kv_dtype, rows) != ("bf16", torch.bfloat16):
        raise ConfigError(f"engine.kv_dtype: {config.kv_dtype} is not supported on this GPU; set it to auto or fp8")
    return rows


@contextmanager
def named_shortage() -> Iterator[None]:
    """Raise a ModelError that names the settings to reduce where torch runs out of the device's memory, for example
    because another process takes it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).partition(". GPU")[0]
        raise ModelError(f"memory of the device: {said}; reduce {', '.join((*_KV, *_SAMPLES))}, or free some") from None


class DevicePlatform:
    """A GPU; see `specdec.engine.platform.HostPlatform`. `target_decoder` sets ``mode`` and ``kv_dtype``."""

    kernels = "triton"

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self.sampling: SamplingKernels = TritonSampling(device)
        self.mode: NumericMode = "numerical"
        self.kv_dtype = FP8
        self.arithmetic = gpu_arithmetic(device)

    @named_shortage()
    def load_target(self, progress: Progress | None) -> DeviceModel:
        """Load the target in the configured type."""
        return self._load(self._config.target, self._config.device_dtype, progress)

    @named_shortage()
    def load_draft(
        self, ref: str, dtype: WeightDtype | None, cut: VocabularyCut | None, progress: Progress | None
    ) -> DeviceModel:
        """Load a draft model in the target's type, or in 16 bits if that is float8."""
        own = self._config.device_dtype
        return self._load(ref, "auto" if own == "fp8" else own, progress)

    def kv_tokens(self, model: DeviceModel, aux_layers: int, budget: MemoryBudget) -> int:
        """A share of the device memory that is left, within the CPU memory of a head's cache."""
        config = self._config
        kv_dtype = device_kv_dtype(config, model.weights.final_norm.dtype)
        sizes = _step_sizes(config, wanted_context(config, model.config))
        needs = device_needs(model, kv_dtype, self._device, pages=0, aux_layers=aux_layers, **sizes)
        page_bytes, taken = kv_page_bytes(model.config, kv_dtype), sum(need.nbytes for need in needs)
        draft = measure_draft(config.model_copy(update={"draft_dtype": "bf16"}), model.config, None)
        if config.speculation.enabled and draft is not None:
            page_bytes += kv_page_bytes(draft.config, kv_dtype)
            taken += draft.weight_bytes + taken  # its working space is at most the target's
        on_gpu = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if on_gpu else available_bytes()
        tokens, rule = kv_tokens_by_memory(config, model.config, page_bytes // PAGE_SIZE, free - taken - WORKING_BYTES)
        _LOG.info("%d tokens of KV cache on the GPU: %s", tokens, rule)
        return min(tokens, budget.kv_tokens)

    @named_shortage()
    def target_decoder(
        self, model: DeviceModel, pages: int, positions: int, aux_layers: Sequence[int]
    ) -> DeviceDecoder:
        """The target's decoder, self-tested: each kernel beside plain torch, and rows in other batches.

        Raises:
            KernelError: a kernel is wrong here that nothing replaces.
            ConfigError: ``strict`` is set and the kernels are not bitwise.
        """
        decoder = build_device_decoder(
            self._config, model, self._device, pages, positions, tuple(aux_layers), WORKING_BYTES
        )
        failed = check_kernels(decoder) if self._device.type == "cuda" else set()  # interpreted kernels take minutes
        if "verify" in failed:
            self.sampling = ReferenceSampling()
        mode = device_self_test(decoder)
        self.mode, self.kv_dtype = "numerical" if failed else mode, decoder.pool.k.dtype
        if self._config.strict and self.mode != "bitwise":
            raise ConfigError(
                f"engine.strict: triton's kernels are {self.mode} here; drop strict or set engine.device to cpu"
            )
        return decoder

    @named_shortage()
    def draft_decoder(self, model: DeviceModel, pages: int, positions: int, target: ModelConfig) -> DeviceDecoder:
        """A draft model's decoder."""
        return build_device_decoder(self._config, model, self._device, pages, positions)

    @named_shortage()
    def verifier(self, decoder: TargetDecoder) -> DeviceVerifier | None:
        """The GPU's verifier, with the graphs of common steps captured; None: its kernels failed their self-test."""
        assert isinstance(decoder, DeviceDecoder)
        if isinstance(self.sampling, ReferenceSampling):
            return None
        verifier = DeviceVerifier(decoder)
        if self._device.type == "cuda":
            warm_up(verifier, decoder)
        return verifier

    def _load(self, ref: str, dtype: DeviceDtype, progress: Progress | None) -> DeviceModel:
        return load_device_model(
            ref, dtype=dtype, cache_dir=self._config.cache_dir, device=self._device,
            max_rows=self._config.max_step_rows, progress=progress,
        )  # fmt: skip
