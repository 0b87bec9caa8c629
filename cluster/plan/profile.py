"""The profile of a replica, as a file: limits, measured costs, drafted steps and overheads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from specdec.config import EngineConfig, problems
from specdec.control.estimates.costs import CostTable
from specdec.core.fields import MAX_DRAFT_NODES
from specdec.core.types import EngineInfo
from specdec.errors import ConfigError

VERSION = 2
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Nodes = Annotated[int, Field(ge=0, le=MAX_DRAFT_NODES)]
_Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaLimits(_Part):
    """Limits of the engine and of admission: settings, and arguments of `EngineParts` and `Admission`."""

    max_batch: int = Field(ge=1, le=256)
    max_step_rows: int = Field(ge=1)
    prefill_chunk: int = Field(ge=1)
    max_context: int = Field(ge=1)
    kv_tokens: int = Field(ge=64)
    max_queued_requests: int = Field(ge=0)
    target_tpot_ms: _Positive
    prefix_cache: bool
    max_queued_tokens: int = Field(ge=0)


class DraftedStep(_Part):
    """A recorded step."""

    sequences: tuple[tuple[_Nodes, Annotated[int, Field(ge=1)]], ...] = Field(min_length=1)
    """(draft nodes, tokens) of each sequence that sampled."""
    draft_ms: _Milliseconds = 0.0  # of the propose stage

    @field_validator("sequences")
    @classmethod
    def _fits(cls, sequences: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        if any(tokens > nodes + 1 for nodes, tokens in sequences):
            raise ValueError("a tree of n nodes yields at most n + 1 tokens")
        return sequences


class Overheads(_Part):
    """Time outside forwards and drafts."""

    step_ms: _Milliseconds = 0.0
    step_ms_per_sequence: _Milliseconds = 0.0  # added to step_ms
    request_ms: _Milliseconds = 0.0  # of a request outside the engine, both ways


class Profile(_Part):
    """One replica.

    Raises:
        ValidationError: a field is missing, unknown or out of range.
    """

    specdec_plan: int = VERSION
    target: str
    machine: str = ""
    limits: ReplicaLimits
    verify: dict[str, Any]  # milliseconds of the target's forward, `CostTable.as_dict`
    noise: tuple[_Positive, ...] = ()  # quantiles of measured over expected forward time; empty: no noise
    drafted: tuple[DraftedStep, ...] = ()  # empty: no speculation
    overheads: Overheads = Overheads()

    @field_validator("specdec_plan")
    @classmethod
    def _is_ours(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"version {version} is not supported, only {VERSION}; export it again")
        return version

    @field_validator("verify")
    @classmethod
    def _is_a_table(cls, verify: dict[str, Any]) -> dict[str, Any]:
        try:
            CostTable.from_dict(verify)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost table ({error!r})") from None
        return verify

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per sequence and step."""
        found = [tokens for step in self.drafted for _, tokens in step.sequences]
        return sum(found) / len(found) if found else 1.0

    def engine_config(self) -> EngineConfig:
        """The engine's configuration."""
        limits = self.limits.model_dump(include=set(EngineConfig.model_fields))
        return EngineConfig(target=self.target, **limits)

    def engine_info(self, vocab_size: int) -> EngineInfo:
        """The engine's information; the planner's tokens are below ``vocab_size``."""
        limits = self.limits
        return EngineInfo(
            target=self.target, draft=None, dtype="", kernels="", numeric_mode="", max_context=limits.max_context,
            vocab_size=vocab_size, kv_tokens=limits.kv_tokens, max_batch=limits.max_batch, drafters=(), eos_ids=(),
            threads=0, version="", kv_dtype="",
        )  # fmt: skip


def read_profile(path: Path) -> Profile:
    """Reads the profile at ``path``.

    Raises:
        ConfigError: it cannot be read or is invalid; names every bad field.
    """
    try:
        profile = Profile.model_validate_json(path.read_bytes())
        profile.engine_config()
    except OSError as error:
        raise ConfigError(f"profile: {path} cannot be read ({error.strerror})") from None
    except ValidationError as error:
        raise ConfigError(f"profile: {path}: {problems(error, Profile)}; `specdec plan export` makes one") from None
    return profile
