"""Engine configuration: model, numbers, memory, batch, speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["int8", "bf16", "fp32"]
WeightDtype = Literal["int4", "int8", "bf16", "fp32"]
DeviceDtype = Literal["auto", "bf16", "fp16", "fp8", "fp32"]
KvDtype = Literal["auto", "fp8"]


class SpeculationConfig(BaseModel):
    """Which drafters are loaded, how far each request may draft, and how the controller behaves.

    ``drafters`` are tried together and their proposals merged into one tree. ``max_nodes``, ``max_depth`` and
    ``width`` bound every tree; in mode ON, where nothing is decided, a request that names no caps of its own drafts
    ``fixed_nodes`` nodes to ``fixed_depth``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="false: plain decoding, whatever a request asks for; no drafter is loaded")
    drafters: tuple[str, ...] | None = Field(
        None, description="to load, in order; null: grammar, prediction, suffix, and model and head where there is one"
    )
    max_nodes: int = Field(31, ge=0, le=63, description="draft nodes per tree, without the pending token")
    max_depth: int = Field(31, ge=0, le=63, description="draft tokens in a row, one behind the other")
    width: int = Field(
        3, ge=1, le=16, description="children per node a drafter may propose", json_schema_extra={"unit": "nodes"}
    )
    fixed_nodes: int = Field(7, ge=0, le=63, description="mode ON: draft nodes per tree")
    fixed_depth: int = Field(7, ge=0, le=63, description="mode ON: depth of a tree")
    draft_reads: int = Field(
        256,
        ge=0,
        description="of a long prompt a draft model of another vocabulary reads so many tokens at least; 0: all",
        json_schema_extra={"unit": "tokens"},
    )
    profile_s: float = Field(3.0, ge=0, le=60, description="spent at start on measuring costs; 0: guess them")
    probe_every: int = Field(
        16, ge=2, description="between probes of a drafter that is off", json_schema_extra={"unit": "steps"}
    )
    stall_ms: float = Field(2000.0, gt=0, description="a drafter slower than this is dropped for the request")
    trace_steps: int = Field(1024, ge=0, le=1_000_000, description="the decision trace keeps so many; 0: none")
    trace_file: Path | None = Field(None, description="JSON lines of every step's decision, for replay")
    session_tokens: int = Field(65536, ge=0, description="earlier text kept per session; 0: none")
    sessions: int = Field(64, ge=0, description="remembered at a time", json_schema_extra={"unit": "sessions"})
    shared_tokens: int = Field(262144, ge=0, description="finished text kept for other requests of a salt; 0: none")
    shared_age_s: float = Field(3600.0, gt=0, description="shared text is forgotten after so long")
    shared_salts: int = Field(
        16, ge=1, description="tenants whose finished texts are kept", json_schema_extra={"unit": "salts"}
    )


class EngineConfig(BaseModel):
    """Everything the engine is built from. Sizes are in tokens unless a name says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field("smollm2-135m", min_length=1, description="HF folder, .gguf file, hub id or catalogue name")
    draft: str | None = Field(None, description="small model that drafts; same forms as target, any vocabulary")
    draft_dtype: WeightDtype | None = Field(None, description="default: int4 beside an int8 target, else the target's")
    draft_head: str | None = Field(None, description="EAGLE-3 checkpoint folder for the `head` drafter")
    dtype: Dtype = Field("int8", description="numeric type of the weights on a CPU")
    kernels: Literal["auto", "native", "reference"] = Field("auto", description="on a CPU")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the target runs; auto: on a GPU if any")
    device_dtype: DeviceDtype = Field("auto", description="on a GPU; auto: bf16, or the checkpoint's own 4 bits")
    kv_dtype: KvDtype = Field("auto", description="KV cache on a GPU; fp8: half the memory, slightly other numbers")
    strict: bool = Field(False, description="refuse to serve unless the numeric mode is `bitwise`")
    threads: int = Field(
        0,
        ge=0,
        description="that compute; 0: as many as there are cores that this process may use",
        json_schema_extra={"unit": "threads"},
    )
    cache_dir: Path = Field(Path("~/.cache/specdec"), description="downloads, packed weights, built kernels")

    max_context: int = Field(0, ge=0, description="prompt and output together; 0: the model's own limit, at most 8192")
    kv_tokens: int = Field(16384, ge=128, description="tokens the KV cache holds, rounded up to pages of 64")
    prefix_cache: bool = Field(True, description="prompts that begin alike share what was computed of them")

    max_batch: int = Field(
        16, ge=1, le=256, description="decoded together at most", json_schema_extra={"unit": "sequences"}
    )
    max_step_rows: int = Field(256, ge=64, le=4096, description="of one forward: tree nodes and tokens of prompts")
    prefill_chunk: int = Field(
        192, ge=1, description="of prompts, that one step may take", json_schema_extra={"unit": "tokens"}
    )
    max_queued_requests: int = Field(256, ge=0, description="requests that may wait; more are refused")

    speculation: SpeculationConfig = SpeculationConfig()

    @model_validator(mode="after")
    def _choose_drafters(self) -> EngineConfig:
        if self.speculation.drafters is None:
            models = ("model",) * (self.draft is not None) + ("head",) * (self.draft_head is not None)
            chosen = ("grammar", "prediction", "suffix", *models)
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
        if self.kv_dtype == "fp8" and self.device_dtype == "fp32":
            raise ValueError("kv_dtype fp8 does not go with device_dtype fp32; set that to auto, bf16, fp16 or fp8")
        if "model" in self.drafters and self.draft is None:
            raise ValueError("speculation.drafters names `model`, but draft gives no model")
        if "head" in self.drafters and self.draft_head is None:
            raise ValueError("speculation.drafters names `head`, but draft_head gives no checkpoint")
        return self
