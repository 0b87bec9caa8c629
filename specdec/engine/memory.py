"""The memory that a configuration needs, computed before anything is loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from draft.head_checkpoint import head_bytes, is_head, parse_head_config, read_tensors
from draft.model import TAIL_POOL
from draft.text_store import max_tokens
from specdec.config import LEAST_KV_TOKENS, EngineConfig
from specdec.control_groups import available_bytes
from specdec.errors import ConfigError, ModelError
from specdec.models.checkpoint import read_json
from specdec.models.config import ModelConfig
from specdec.models.decoder import kv_page_bytes
from specdec.models.memory import GIB, WORKING_BYTES, ModelSize, measure_model
from specdec.models.progress import Progress
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocabulary_cut import most_frequent
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """One part of the memory."""

    what: str
    """For people."""
    nbytes: int
    options: tuple[str, ...] = ()
    """Settings that decide its size."""
    later: bool = False
    """It is not needed at start; serving may grow to it."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """``needs`` against ``available`` bytes."""

    needs: Sequence[MemoryNeed]
    available: int
    place: str = "memory"
    """Name of the memory in error messages."""
    kv_token_bytes: int = 0
    """Of one token in all KV caches."""
    kv_tokens: int = 0
    """Length of the KV caches."""
    least_kv_tokens: int = 0
    """Fewer do not hold the configured context."""
    kv_rule: str = "engine.kv_tokens"
    """How the length was chosen."""
    weight_bytes: int = 0
    """Of the target on a CPU."""
    spare_bytes: int = 0
    """Left to other programs and models; ``available`` does not include them."""

    @property
    def needed(self) -> int:
        """Bytes needed to serve."""
        return sum(need.nbytes for need in self.needs if not need.later)

    @property
    def later(self) -> int:
        """Further bytes that serving may grow to."""
        return sum(need.nbytes for need in self.needs if need.later)

    @property
    def fits(self) -> bool:
        """Whether the needs at start fit."""
        return self.needed <= self.available

    def lines(self) -> list[str]:
        """A table to print, largest part first."""
        ordered = sorted(self.needs, key=lambda need: (need.later, -need.nbytes))
        width = max((len(need.what) for need in ordered), default=0)
        rows = [
            f"{need.what:{width}}  {need.nbytes / GIB:6.2f} GiB{' at most' if need.later else ''}"
            f"{'  ' + ', '.join(need.options) if need.options else ''}"
            for need in ordered
        ]
        spare = f", besides {self.spare_bytes / GIB:.2f} of engine.spare_bytes" if self.spare_bytes else ""
        together = f"{self.needed / GIB:6.2f} GiB of {self.available / GIB:.2f} available{spare}"
        return [*rows, f"{'together':{width}}  {together}"]

    def summary(self) -> str:
        """One line for people."""
        gib = {need.what: f"{need.what} {need.nbytes / GIB:.2f}" for need in self.needs}
        now = ", ".join(gib[need.what] for need in sorted(self.needs, key=lambda n: -n.nbytes) if not need.later)
        later = "".join(f"; {gib[need.what]} at most" for need in self.needs if need.later)
        cache = f"; {self.kv_tokens} tokens of KV cache: {self.kv_rule}" if self.kv_tokens else ""
        return f"{self.needed / GIB:.2f} of {self.available / GIB:.2f} GiB of memory: {now}{later}{cache}"

    def check(self) -> None:
        """Raise ModelError if the needs do not fit; it lists them and says what to change."""
        if self.fits:
            return
        missing = (self.needed - self.available) / GIB
        raise ModelError(
            f"{self.place}: {missing:.2f} GiB too little; {self._way_out()}. Needed:\n  " + "\n  ".join(self.lines())
        )

    def _way_out(self) -> str:
        if self.kv_token_bytes:
            others = self.needed - self.kv_tokens * self.kv_token_bytes
            fitting = (self.available - others) // self.kv_token_bytes // PAGE_SIZE * PAGE_SIZE
            if fitting >= self.least_kv_tokens:
                return f"lower engine.kv_tokens from {self.kv_tokens} to {fitting}"
        options = {option: need.nbytes for need in reversed(self.needs) if not need.later for option in need.options}
        best = sorted(options, key=lambda option: -options[option])[:4]
        return f"reduce {', '.join(best)}, or free some memory" if best else "free some memory"


_LOG = logging.getLogger(__name__)
TEXT_TOKEN_BYTES = 100  # of a token of a text that is drafted from
_KV = ("engine.kv_tokens", "engine.kv_dtype")  # settings that decide the size of a cache
_HOST_KV = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def host_kv_dtype(config: EngineConfig) -> torch.dtype:
    """Type of a target's KV cache on the CPU."""
    return _HOST_KV.get(config.kv_dtype, torch.bfloat16)


def draft_kv_dtype(config: EngineConfig) -> torch.dtype:
    """Type of the KV cache of a draft model on the CPU or a feature head. Never int8: these caches are small, and it
    would cost acceptance."""
    return torch.float32 if config.kv_dtype == "fp32" else torch.bfloat16


DEFAULT_CONTEXT = 8192  # tokens, where the model allows more and none is configured


def wanted_context(config: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence that should be served, in tokens, before the limit of the KV cache."""
    return config.max_context or min(model.max_context, DEFAULT_CONTEXT)


_KV_SHARE = 0.4  # of the memory left: two servers that start on one machine both find what they planned


def kv_tokens_by_memory(
    config: EngineConfig, model: ModelConfig, token_bytes: int, left: int, later: int = 0
) -> tuple[int, str]:
    """The default length of the KV caches in tokens, and the rule that chose it.

    `_KV_SHARE` of the memory left, at least one longest sequence, at most a full batch of them. Pages are allocated by
    the system when they are first written, so another server still sees them as free.

    token_bytes: of one token in all caches of a device. left: bytes that other needs leave there. later: bytes among
    them that serving may grow to.
    """
    longest = wanted_context(config, model) + PAGE_SIZE  # one page for a tree
    most = config.max_batch * longest
    share = int(max(0, left - later) * _KV_SHARE) // token_bytes if token_bytes else most
    if share >= most:
        return most, f"{config.max_batch} sequences of {longest - PAGE_SIZE} tokens"
    if share >= longest:
        return max(share // PAGE_SIZE * PAGE_SIZE, longest), "two fifths of the memory that is left"
    fitting = max(0, left) // token_bytes // PAGE_SIZE * PAGE_SIZE
    return max(LEAST_KV_TOKENS, min(longest, fitting)), "one sequence, as long as memory allows"


def plan_memory(
    config: EngineConfig,
    progress: Progress | None = None,
    available: int | None = None,
    *,
    on_device: bool = False,
    tokenizer: Tokenizer | None = None,
) -> MemoryBudget:
    """The budget of an engine of ``config``.

    available: bytes; None: measured. on_device: target and draft model are in GPU memory, which is not counted.
    tokenizer: the target's; None: a draft's output table is not cut.

    Raises:
        ModelError: a model cannot be found or read; begins with the field, unless it is the target.
        ConfigError: ``draft`` or ``draft_head`` names no such model.
    """
    target = measure_model(config.target, dtype=config.dtype, cache_dir=config.cache_dir, progress=progress)
    needs: list[MemoryNeed] = []
    page_bytes: dict[str, int] = {}  # of a KV page, by model
    if not on_device:
        needs += _model_needs("target", target, config, ("engine.target", "engine.dtype"))
        page_bytes["target"] = kv_page_bytes(target.config, host_kv_dtype(config))
    if config.speculation.enabled:
        draft = measure_draft(config, target.config, tokenizer, progress)
        if draft is not None and not on_device:
            needs += _model_needs("draft", draft, config, ("engine.draft", "engine.draft_dtype"))
            page_bytes["draft"] = kv_page_bytes(draft.config, draft_kv_dtype(config))
        if "head" in config.drafters and config.draft_head is not None:
            weights, head = _head(Path(os.path.expanduser(config.draft_head)), config, target.config)
            needs.append(MemoryNeed("head: weights", weights, ("engine.draft_head",)))
            page_bytes["head"] = kv_page_bytes(head, draft_kv_dtype(config))
        if "suffix" in config.drafters:
            nbytes = max_tokens(config.speculation.shared_tokens) * TEXT_TOKEN_BYTES
            options = ("engine.speculation.shared_tokens",)
            needs.append(MemoryNeed("texts to draft from", nbytes, options, later=True))
    needs.append(MemoryNeed("working space", WORKING_BYTES))
    available = (available_bytes() if available is None else available) - config.spare_bytes
    token_bytes = sum(page_bytes.values()) // PAGE_SIZE
    tails = TAIL_POOL * page_bytes.get("draft", 0)
    tokens, rule = config.kv_tokens, "engine.kv_tokens"
    if tokens == 0:
        left = available - tails - sum(need.nbytes for need in needs if not need.later)
        later = sum(need.nbytes for need in needs if need.later)
        tokens, rule = kv_tokens_by_memory(config, target.config, token_bytes, left, later)
    pages = -(-tokens // PAGE_SIZE)
    kv_bytes = {role: pages * each + (tails if role == "draft" else 0) for role, each in page_bytes.items()}
    needs += [MemoryNeed(f"{role}: KV cache", nbytes, _KV) for role, nbytes in kv_bytes.items()]
    return MemoryBudget(
        needs,
        max(0, available),
        kv_token_bytes=token_bytes,
        kv_tokens=pages * PAGE_SIZE,
        kv_rule=rule,
        least_kv_tokens=(config.max_context or PAGE_SIZE) + PAGE_SIZE,
        weight_bytes=target.weight_bytes,
        spare_bytes=config.spare_bytes,
    )


def report_memory(budget: MemoryBudget) -> None:
    """Log the budget; warn if it fits now but not all that serving may grow to.

    Raises:
        ModelError: it does not fit.
    """
    budget.check()
    _LOG.info("%s", budget.summary())
    if budget.needed + budget.later > budget.available:
        options = ", ".join(option for need in budget.needs if need.later for option in need.options)
        _LOG.warning("memory: enough at start, but not for all that serving may grow to; lower %s to be safe", options)


def _model_needs(role: str, model: ModelSize, config: EngineConfig, options: tuple[str, ...]) -> list[MemoryNeed]:
    return [
        MemoryNeed(f"{role}: weights of {model.name}", model.weight_bytes, options),
        MemoryNeed(f"{role}: step buffers", model.step_bytes(config.max_step_rows), ("engine.max_step_rows",)),
    ]


def measure_draft(
    config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer | None, progress: Progress | None = None
) -> ModelSize | None:
    """The size of the draft model on a CPU, with its output table cut; None: there is none.

    target: the target's shape. tokenizer: see `plan_memory`.

    Raises:
        ModelError: it cannot be found or read; begins with the field.
        ConfigError: it is a feature head.
    """
    if config.draft is None or "model" not in config.drafters:
        return None
    if is_head(config.draft):
        raise ConfigError(f"engine.draft: {config.draft} is a feature head; name it as engine.draft_head")
    cut = None
    if tokenizer is not None:
        cut = most_frequent(tokenizer.fingerprint, config.draft_vocab, target.vocab_size)
    with _named("engine.draft"):
        return measure_model(
            config.draft, dtype=config.draft_dtype or config.default_draft_dtype, cache_dir=config.cache_dir,
            progress=progress, cut=cut,
        )  # fmt: skip


@contextmanager
def _named(field: str) -> Iterator[None]:
    """A ModelError begins with ``field``, since the message alone does not say which of the models is meant."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"{field}: {error}") from None


def _head(folder: Path, config: EngineConfig, target: ModelConfig) -> tuple[int, ModelConfig]:
    """Bytes of a feature head's weights, and the shape of its layer."""
    if not (folder / "config.json").exists():
        raise ConfigError(f"engine.draft_head: {folder} has no config.json; name the folder of an EAGLE-3 head")
    with _named("engine.draft_head"):
        head = parse_head_config(read_json(folder / "config.json"), str(folder), target)
        tensors, _ = read_tensors(folder)
    return head_bytes(tensors, config.dtype), head.model
