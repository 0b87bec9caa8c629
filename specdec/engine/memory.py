"""What a configuration will need of memory, added up before anything of it is loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draft.head_checkpoint import HeadTensors, parse_head_config
from specdec.config import EngineConfig, SpeculationConfig
from specdec.errors import ModelError
from specdec.models.config import ModelConfig
from specdec.models.decoder import kv_page_bytes
from specdec.models.hf import read_json
from specdec.models.memory import GIB, WORKING_BYTES, ModelSize, available_bytes, measure_model
from specdec.models.progress import Progress
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """``what`` in words, ``nbytes`` of it, and the ``options`` of the configuration that decide how much it is.

    ``later``: it is not needed to serve, but what is served may come to take so much.
    """

    what: str
    nbytes: int
    options: tuple[str, ...] = ()
    later: bool = False


class MemoryBudget:
    """``needs`` against ``available`` bytes. ``kv_token_bytes``: what one token of the KV caches takes, and
    ``kv_tokens`` how many are wanted; fewer than ``least_kv_tokens`` would not serve the context that was asked for.
    ``weight_bytes``: of the target, wherever it lives.
    """

    def __init__(
        self,
        needs: Sequence[MemoryNeed],
        available: int,
        *,
        kv_token_bytes: int = 0,
        kv_tokens: int = 0,
        least_kv_tokens: int = 0,
        weight_bytes: int = 0,
    ) -> None:
        self.weight_bytes = weight_bytes
        self.needs, self.available = tuple(needs), max(0, available)
        self._kv_token_bytes, self._kv_tokens, self._least = kv_token_bytes, kv_tokens, least_kv_tokens

    @property
    def needed(self) -> int:
        """Bytes needed to serve."""
        return sum(need.nbytes for need in self.needs if not need.later)

    @property
    def later(self) -> int:
        """Bytes that what is served may come to take on top."""
        return sum(need.nbytes for need in self.needs if need.later)

    @property
    def fits(self) -> bool:
        """Whether there is enough to serve."""
        return self.needed <= self.available

    def lines(self) -> list[str]:
        """A table for people: the largest first."""
        ordered = sorted(self.needs, key=lambda need: (need.later, -need.nbytes))
        width = max((len(need.what) for need in ordered), default=0)
        rows = [
            f"{need.what:{width}}  {need.nbytes / GIB:6.2f} GiB{' at most' if need.later else ''}"
            f"{'  ' + ', '.join(need.options) if need.options else ''}"
            for need in ordered
        ]
        return [*rows, f"{'together':{width}}  {self.needed / GIB:6.2f} GiB of {self.available / GIB:.2f} available"]

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            ModelError: it does not; tells what needs how much, and what to change.
        """
        if self.fits:
            return
        missing = (self.needed - self.available) / GIB
        raise ModelError(
            f"memory: {missing:.2f} GiB too little; {self._way_out()}. What is needed:\n  " + "\n  ".join(self.lines())
        )

    def _way_out(self) -> str:
        if self._kv_token_bytes:
            others = self.needed - self._kv_tokens * self._kv_token_bytes
            fitting = (self.available - others) // self._kv_token_bytes // 64 * 64
            if fitting >= self._least:
                return f"lower engine.kv_tokens from {self._kv_tokens} to {fitting}"
        options = {option: need.nbytes for need in reversed(self.needs) if not need.later for option in need.options}
        best = sorted(options, key=lambda option: -options[option])[:4]
        return f"choose less or smaller for {', '.join(best)}, or free some memory" if best else "free some memory"


_LOG = logging.getLogger(__name__)
TEXT_TOKEN_BYTES = 150  # of a token kept to draft from (`SuffixAutomaton`)
_KV = ("engine.kv_tokens", "engine.kv_dtype")
_HOST_KV = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_DTYPE_BYTES = {"auto": 1, "int8": 1, "bf16": 2, "fp32": 4}


def host_kv_dtype(config: EngineConfig) -> torch.dtype:
    """Of a target's KV cache on the CPU."""
    return _HOST_KV.get(config.kv_dtype, torch.bfloat16)


def draft_kv_dtype(config: EngineConfig) -> torch.dtype:
    """Of a draft model's KV cache on the CPU, or a head's, which is there even beside a target on a GPU. Their caches
    are small, and int8 would cost acceptance."""
    return torch.float32 if config.kv_dtype == "fp32" else torch.bfloat16


def plan_memory(
    config: EngineConfig, progress: Progress | None = None, available: int | None = None, *, on_device: bool = False
) -> MemoryBudget:
    """The budget of an engine of ``config``. available: bytes there are (default: measured). on_device: target and
    draft model live in a GPU's memory, which is not counted here.

    Raises:
        ModelError: a model can not be found or read.
    """
    target = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress)
    pages = -(-max(config.kv_tokens, PAGE_SIZE) // PAGE_SIZE)
    needs: list[MemoryNeed] = []
    page_bytes = 0
    if not on_device:
        page_bytes = kv_page_bytes(target.config, host_kv_dtype(config))
        needs += _model_needs("target", target, config, pages * page_bytes, ("engine.target", "engine.dtype"))
    if config.speculation.enabled:
        draft = None if on_device else _draft(config, progress)
        if draft is not None:
            draft_page = kv_page_bytes(draft.config, draft_kv_dtype(config))
            needs += _model_needs("draft", draft, config, pages * draft_page, ("engine.draft", "engine.draft_dtype"))
            page_bytes += draft_page
        if "head" in config.drafters and config.draft_head is not None:
            weights, head = _head(Path(config.draft_head).expanduser(), config, target.config)
            head_page = kv_page_bytes(head, draft_kv_dtype(config))
            needs.append(MemoryNeed("head: weights", weights, ("engine.draft_head",)))
            needs.append(MemoryNeed("head: KV cache", pages * head_page, _KV))
            page_bytes += head_page
        if "suffix" in config.drafters:
            needs.append(_texts(config.speculation))
    needs.append(MemoryNeed("working space", WORKING_BYTES))
    return MemoryBudget(
        needs,
        (available_bytes() if available is None else available) - config.spare_bytes,
        kv_token_bytes=page_bytes // PAGE_SIZE,
        kv_tokens=pages * PAGE_SIZE,
        least_kv_tokens=(config.max_context or PAGE_SIZE) + PAGE_SIZE,
        weight_bytes=target.weight_bytes,
    )


def tell_memory(budget: MemoryBudget) -> None:
    """Log the budget; warn where it fits now and may not for ever.

    Raises:
        ModelError: it does not fit.
    """
    budget.check()
    for line in budget.lines():
        _LOG.info("memory: %s", line)
    if budget.needed + budget.later > budget.available:
        growing = [need for need in budget.needs if need.later]
        options = ", ".join(option for need in growing for option in need.options)
        _LOG.warning("memory: enough to begin with, but not for all that may come; consider lower %s", options)


def _model_needs(
    role: str, model: ModelSize, config: EngineConfig, cache: int, options: tuple[str, ...]
) -> list[MemoryNeed]:
    return [
        MemoryNeed(f"{role}: weights of {model.name}", model.weight_bytes, options),
        MemoryNeed(f"{role}: KV cache", cache, _KV),
        MemoryNeed(f"{role}: step buffers", model.step_bytes(config.max_step_rows), ("engine.max_step_rows",)),
    ]


def _draft(config: EngineConfig, progress: Progress | None) -> ModelSize | None:
    if config.draft is None or "model" not in config.drafters:
        return None
    dtype = config.draft_dtype or config.default_draft_dtype
    return measure_model(config.draft, dtype=dtype, cache_dir=config.cache_dir, progress=progress)


def _head(folder: Path, config: EngineConfig, target: ModelConfig) -> tuple[int, ModelConfig]:
    """Bytes of a feature head's weights, and the shape of its one layer."""
    head = parse_head_config(read_json(folder / "config.json"), str(folder), target)
    tensors = HeadTensors(folder)
    values = sum(math.prod(tensors.shape(name)) for name in tensors.names if name not in ("d2t", "t2d"))
    return values * _DTYPE_BYTES[config.dtype], head.model


def _texts(speculation: SpeculationConfig) -> MemoryNeed:
    tokens = speculation.sessions * speculation.session_tokens + speculation.shared_salts * speculation.shared_tokens
    options = tuple(f"engine.speculation.{name}" for name in ("shared_tokens", "session_tokens", "sessions"))
    return MemoryNeed("texts to draft from", tokens * TEXT_TOKEN_BYTES, options, later=True)
