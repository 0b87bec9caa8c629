"""What a client asks with and what it gets: prompts, gaps, conversations, options, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

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
    """``role``: "system", "user", "assistant", or whatever the model's template knows."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file or a part of one. ``time_ms``: when it was last looked at or changed, Unix time; those of the lowest
    ``score``, then the oldest, are left out first where not all fit."""

    filename: str
    text: str
    time_ms: int = 0
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Fim:
    """What stands before and behind the gap. ``middle_prefix``: what the filling begins with; None leaves it to the
    server. ``extra``: other texts of the project. ``language``: as editors name it; empty: as ``file_name`` ends."""

    prefix: str
    suffix: str = ""
    middle_prefix: str | None = None
    extra: tuple[ContextFile, ...] = ()
    repo_name: str = ""
    file_name: str = ""
    language: str = ""


@dataclass(frozen=True, slots=True)
class CompletionHints:
    """None leaves a choice to the server. ``mode``: fill in or be refused where the model can not; else continue the
    prefix there; or continue it in any case. ``max_prompt_tokens``: at least 64. The others: whether the text ends
    where it leaves the gap's indentation, closes a bracket of its surroundings, or repeats what follows."""

    mode: Literal["middle", "middle_or_prefix", "prefix"] = "middle"
    max_prompt_tokens: int | None = None
    stop_at_dedent: bool | None = None
    stop_at_bracket: bool | None = None
    stop_at_suffix: bool | None = None


Prompt = str | Fim | Sequence[int] | Sequence[ChatTurn]
"""A text, a gap in one, token ids as they are, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """As the fields of `specdec.core.types.Request`; what is left out is as there.

    ``prediction``: text or token ids. ``supersedes_key``: ends the running request with the same one. ``timeout_s``:
    the call's deadline, over all its tries. ``resume``: where a stream of before broke off, whose tokens the caller
    has kept; a stream that breaks off while it is read goes on by itself.
    """

    request_id: str
    model: str
    sampling: SamplingParams
    stopping: StoppingParams
    output: OutputParams
    speculation: SpeculationParams
    grammar: GrammarParams | None
    prediction: str | Sequence[int]
    session: str
    cache_salt: str
    priority: int
    target_tpot_ms: float | None
    supersedes_key: str
    timeout_s: float | None
    resume: ResumeParams | None


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """Sample ``index``, whole. ``matched_stop``: the stop string or token id that ended it, if one did."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    stats: SpeculationStats
    timings: Timings


@dataclass(frozen=True, slots=True)
class Generated:
    """``seed``: the one in force, drawn by the engine where none was given."""

    request_id: str
    model: str
    seed: int
    samples: list[GeneratedSample]

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text
