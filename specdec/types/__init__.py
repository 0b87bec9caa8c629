"""The vocabulary of specdec: what a request says, and what an engine answers. No torch, no I/O."""

from specdec.types.engine_info import EngineInfo, EngineLoad
from specdec.types.events import Delta, Failed, Finished, RequestEvent, Started, TokenLogprobs
from specdec.types.finish_reason import FinishReason
from specdec.types.request import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    TextRules,
)
from specdec.types.stats import DrafterStats, SpeculationStats, Timings, Usage
from specdec.types.step_trace import DrafterTrace, StepTrace
from specdec.types.step_tree import StepTree

__all__ = [
    "Delta",
    "DrafterStats",
    "DrafterTrace",
    "EngineInfo",
    "EngineLoad",
    "Failed",
    "FinishReason",
    "Finished",
    "GrammarKind",
    "GrammarParams",
    "OutputParams",
    "Request",
    "RequestEvent",
    "SamplingParams",
    "SpeculationMode",
    "SpeculationParams",
    "SpeculationStats",
    "Started",
    "StepTrace",
    "StepTree",
    "StoppingParams",
    "TextRules",
    "Timings",
    "TokenLogprobs",
    "Usage",
]
