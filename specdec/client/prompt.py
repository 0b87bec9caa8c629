"""Prompts, options and answers of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from specdec.core.types import (
    FinishReason,
    GrammarParams,
    OutputParams,
    ResumeParams,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
    Timings,
    TokenLogprobs,
    Usage,
)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A message of a conversation."""

    role: str  # "system", "user", "assistant", or another that the model's template knows
    content: str


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file, or a part of one. If not all fit, those of the lowest score, then the oldest, are left out first."""

    filename: str
    text: str
    time_ms: int = 0  # when it was last viewed or changed, Unix time
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Fim:
    """A gap to fill."""

    prefix: str  # the text before the gap
    suffix: str = ""  # the text after it
    middle_prefix: str | None = None  # start of the filling; None: chosen by the server
    extra: tuple[ContextFile, ...] = ()  # other texts of the project
    repo_name: str = ""
    file_name: str = ""
    language: str = ""  # the editor's name; empty: by the extension of ``file_name``


@dataclass(frozen=True, slots=True)
class CompletionHints:
    """Options of code completion; None: the server's default."""

    # "middle": fails if the model cannot fill in; "middle_or_prefix": then ignores the suffix; "prefix": always does
    mode: Literal["middle", "middle_or_prefix", "prefix"] = "middle"
    max_prompt_tokens: int | None = None  # at least 64
    stop_at_dedent: bool | None = None  # where the text leaves the gap's indentation
    stop_at_bracket: bool | None = None  # where it closes a bracket that was open at the gap
    stop_at_suffix: bool | None = None  # where it repeats the text after the gap
    ttft_ms: float | None = None  # milliseconds to the first token, which limit the prompt


Prompt = str | Fim | Sequence[int] | Sequence[ChatTurn]
"""A text, a gap, token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """Fields and defaults as in `specdec.core.types.Request`, unless a comment says otherwise."""

    request_id: str
    model: str
    sampling: SamplingParams
    stopping: StoppingParams
    output: OutputParams
    speculation: SpeculationParams
    grammar: GrammarParams | None
    prediction: str | Sequence[int]  # text or token ids
    template_variables: Mapping[str, Any]  # of the chat template, such as ``enable_thinking`` of Qwen3
    session: str
    cache_salt: str
    priority: int
    target_tpot_ms: float | None
    supersedes_key: str  # ends the running request with the same key
    timeout_s: float | None  # the call's deadline, over all tries
    resume: ResumeParams | None  # of a stream of an earlier client; this client's streams resume by themselves


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """A complete sample."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    reason: FinishReason
    matched_stop: str | int | None  # the stop string or token id that ended it
    usage: Usage
    stats: SpeculationStats
    timings: Timings


@dataclass(frozen=True, slots=True)
class Generated:
    """A complete answer."""

    request_id: str
    model: str
    seed: int  # drawn by the engine if none was given
    samples: list[GeneratedSample]

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text
