"""Engine configuration: model, numbers, memory, batch, speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["int8", "bf16", "fp32"]


class SpeculationConfig(BaseModel):
    """The fixed drafting budget, until a controller decides it, and which drafters are loaded.

    ``drafters`` are tried together and their proposals merged into one tree.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    drafters: tuple[str, ...] | None = Field(None, description="default: suffix, and model when `draft` is set")
    max_nodes: int = Field(7, ge=0, le=63, description="draft nodes per tree, without the pending token")
    max_depth: int = Field(7, ge=0, le=63)
    width: int = Field(2, ge=1, le=16, description="children per node a drafter may propose")


class EngineConfig(BaseModel):
    """Everything the engine is built from. Sizes are in tokens unless a name says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field("smollm2-135m", min_length=1, description="HF folder, .gguf file, hub id or catalogue name")
    draft: str | None = Field(None, description="model for the `model` drafter; same forms as target")
    dtype: Dtype = "int8"
    kernels: Literal["auto", "native", "reference"] = "auto"
    strict: bool = Field(False, description="refuse to serve unless the numeric mode is `bitwise`")
    threads: int = Field(0, ge=0, description="compute threads; 0: the cores this process may use")
    cache_dir: Path = Field(Path("~/.cache/specdec"), description="downloads, packed weights, built kernels")

    max_context: int = Field(0, ge=0, description="0: the model's own limit, at most 8192")
    kv_tokens: int = Field(16384, ge=128, description="tokens the KV cache holds, rounded up to pages of 64")
    prefix_cache: bool = True

    max_batch: int = Field(16, ge=1, le=256, description="sequences decoded together")
    max_step_rows: int = Field(256, ge=64, le=4096, description="rows of one forward: tree nodes and prefill rows")
    prefill_chunk: int = Field(192, ge=1, description="prompt rows one step may take")
    max_queued_requests: int = Field(256, ge=0)

    speculation: SpeculationConfig = SpeculationConfig()

    @model_validator(mode="after")
    def _choose_drafters(self) -> EngineConfig:
        if self.speculation.drafters is None:
            chosen = ("suffix", "model") if self.draft is not None else ("suffix",)
            # The one place where a validated value is completed; the configuration is frozen from here on.
            object.__setattr__(self, "speculation", self.speculation.model_copy(update={"drafters": chosen}))
        return self

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters to load, in order."""
        return self.speculation.drafters or ()

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.prefill_chunk > self.max_step_rows:
            raise ValueError("prefill_chunk must not exceed max_step_rows")
        if self.max_batch > self.max_step_rows:
            raise ValueError("max_batch must not exceed max_step_rows: every sequence needs one row")
        if "model" in self.drafters and self.draft is None:
            raise ValueError("speculation.drafters names `model`, but draft gives no model")
        return self
