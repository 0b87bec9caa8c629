"""Adds up what a configuration will need of memory, before anything of it is loaded."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from draft.head_config import parse_head_config
from draft.head_tensors import HeadTensors
from specdec.config import EngineConfig, SpeculationConfig
from specdec.engine.memory_budget import MemoryBudget
from specdec.engine.memory_need import MemoryNeed
from specdec.models.hf_source import read_json
from specdec.models.kv_pool import KvPool
from specdec.models.memory import WORKING_BYTES, available_bytes
from specdec.models.memory_size import ModelSize, measure_model
from specdec.models.model_config import ModelConfig
from specdec.models.progress import Progress
from verify_kernels.forward_batch import PAGE_SIZE

_LOG = logging.getLogger(__name__)
TEXT_TOKEN_BYTES = 150  # of a token kept to draft from (`SuffixAutomaton`)
_DTYPE_BYTES = {"int8": 1, "bf16": 2, "fp32": 4}


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
        needs += _model_needs("target", target, config, pages, ("engine.target", "engine.dtype"))
        page_bytes = KvPool.bytes_per_page(target.config)
    if config.speculation.enabled:
        draft = None if on_device else _draft(config, progress)
        if draft is not None:
            needs += _model_needs("draft", draft, config, pages, ("engine.draft", "engine.draft_dtype"))
            page_bytes += KvPool.bytes_per_page(draft.config)
        if "head" in config.drafters and config.draft_head is not None:
            weights, head = _head(Path(config.draft_head).expanduser(), config, target.config)
            head_page = KvPool.bytes_per_page(head)
            needs.append(MemoryNeed("head: weights", weights, ("engine.draft_head",)))
            needs.append(MemoryNeed("head: KV cache", pages * head_page, ("engine.kv_tokens",)))
            page_bytes += head_page
        if "suffix" in config.drafters:
            needs.append(_texts(config.speculation))
    needs.append(MemoryNeed("working space", WORKING_BYTES))
    return MemoryBudget(
        needs,
        available_bytes() if available is None else available,
        kv_token_bytes=page_bytes // PAGE_SIZE,
        kv_tokens=pages * PAGE_SIZE,
        least_kv_tokens=(config.max_context or PAGE_SIZE) + PAGE_SIZE,
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
    role: str, model: ModelSize, config: EngineConfig, pages: int, options: tuple[str, ...]
) -> list[MemoryNeed]:
    return [
        MemoryNeed(f"{role}: weights of {model.name}", model.weight_bytes, options),
        MemoryNeed(f"{role}: KV cache", pages * KvPool.bytes_per_page(model.config), ("engine.kv_tokens",)),
        MemoryNeed(f"{role}: step buffers", model.step_bytes(config.max_step_rows), ("engine.max_step_rows",)),
    ]


def _draft(config: EngineConfig, progress: Progress | None) -> ModelSize | None:
    if config.draft is None or "model" not in config.drafters:
        return None
    dtype = config.draft_dtype or ("int4" if config.dtype == "int8" else config.dtype)
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
