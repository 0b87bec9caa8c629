"""The vocabulary of specdec: what a request says, and what an engine answers. No torch, no I/O."""

from specdec.types.engine_info import EngineInfo, EngineLoad
from specdec.types.events import Delta, Failed, Finished, RequestEvent, Started, TokenLogprobs
from specdec.types.finish_reason import FinishReason
from specdec.types.request import (
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.types.stats import SpeculationStats, Timings, Usage

__all__ = [
    "Delta",
    "EngineInfo",
    "EngineLoad",
    "Failed",
    "FinishReason",
    "Finished",
    "OutputParams",
    "Request",
    "RequestEvent",
    "SamplingParams",
    "SpeculationMode",
    "SpeculationParams",
    "SpeculationStats",
    "Started",
    "StoppingParams",
    "Timings",
    "TokenLogprobs",
    "Usage",
]
