"""What a request asks for. Every field is validated once, at admission (`specdec.engine.validation`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits (DESIGN section 4).

    ``temperature`` 0 is greedy (lowest id wins ties). ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``seed`` None: the engine draws one and reports it in :class:`~specdec.types.Started`.
    ``n`` samples share the prompt; sample i uses the seed derived from (seed, i); sample 0 uses ``seed`` itself.
    ``allowed_token_ids`` empty: all allowed. ``repetition_penalty`` divides positive and multiplies negative
    logits of tokens seen in prompt or output; presence and frequency penalties count output tokens only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    n: int = 1


@dataclass(frozen=True, slots=True)
class TextRules:
    """Where a text that is put into a file ends, by its layout; what ends it is never part of it.

    ``max_lines``: at the end of so many lines; an empty rest of the line it begins in does not count. ``min_indent``:
    before a line, not the first, whose first visible character has fewer characters of white space before it; lines
    without one don't matter. ``blank_line``: before a line without visible characters, not the first.
    ``closers`` None: brackets don't matter; else before a closing bracket ``)``, ``]`` or ``}`` that the text did not
    open, but for these, which it may close in this order. ``quote``: the quotation mark that is open where the text
    begins, if one is. ``suffix``: what follows in the file; the text ends where it begins to repeat that. ``lead``:
    the line break and the white space in front of the text where nothing else is, for a suffix that repeats those too.
    """

    max_lines: int | None = None
    min_indent: int | None = None
    blank_line: bool = False
    closers: str | None = None
    quote: str = ""
    suffix: str = ""
    lead: str = ""


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When to stop. ``max_tokens`` None: up to the context limit. Stop tokens and strings are cut from the
    text unless ``include_stop``. Below ``min_tokens`` EOS and stop token ids are masked out of the logits and
    stop strings and text rules are not looked for.

    ``time_limit_s`` counts from arrival, ``decode_limit_s`` from the first token; when one has passed, what is there is
    the answer. With ``finish_line`` a text that has begun goes on to the end of its line first."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    rules: TextRules | None = None
    time_limit_s: float | None = None
    decode_limit_s: float | None = None
    finish_line: bool = False


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What comes back. ``logprobs`` None: none; k >= 0: the chosen token's and the top k's log-probabilities
    of the model's unprocessed logits. ``text`` False: token ids only. ``trees``: each Delta with its step's tree."""

    logprobs: int | None = None
    text: bool = True
    skip_special_tokens: bool = True
    trees: bool = False


class SpeculationMode(StrEnum):
    """AUTO lets the controller decide, OFF is plain decode, ON always drafts the caps given."""

    AUTO = "auto"
    OFF = "off"
    ON = "on"


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Per-request control of speculation; None leaves a choice to the engine's configuration.

    ``max_nodes`` (draft nodes of one tree, without the pending token), ``max_depth`` and ``width`` (children per
    node) replace the configured ones for this request; ``drafters`` names which drafters may propose.
    """

    mode: SpeculationMode = SpeculationMode.AUTO
    drafters: tuple[str, ...] | None = None
    max_nodes: int | None = None
    max_depth: int | None = None
    width: int | None = None


class GrammarKind(StrEnum):
    """What the text of a grammar is written in. ``CHOICE``: a JSON array of strings; ``JSON_OBJECT``: no text."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class GrammarParams:
    """What the output must match, from its first token to its end."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine takes it. ``deadline_s`` is seconds from arrival at the engine (None: none).

    ``cache_salt`` separates prefix caches and draft texts: requests share them only with an equal salt.
    ``max_tokens`` 0 in ``stopping`` means prefill only: warm the prefix cache, emit no token.
    ``prediction_ids`` is what the caller expects the output to look like, ``session`` names an editor or a
    conversation whose earlier texts may be drafted from; both change how fast tokens come, never which.
    ``target_tpot_ms`` is the time per output token this request should keep to; while it lags behind, its drafts
    are verified before others'.
    ``healed`` is the end of the prompt's text where that may be one token with what follows, left out of
    ``prompt_ids``: the output spells it first, in tokens that count as output, and its text begins behind it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    output: OutputParams = field(default_factory=OutputParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    prediction_ids: tuple[int, ...] = ()
    session: str = ""
    target_tpot_ms: float | None = None
    grammar: GrammarParams | None = None
    healed: str = ""
