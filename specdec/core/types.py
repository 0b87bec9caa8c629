"""The vocabulary of specdec: what a request asks for, and what an engine answers. No torch, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from specdec.core.fields import (
    INT31,
    MAX_DRAFT_NODES,
    MAX_FINGERPRINT,
    MAX_HEALING_PREFIX,
    MAX_INDEXES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_NAME,
    MAX_RULE_TEXT,
    MAX_STOP_TEXT,
    MAX_STOPS,
    MIN_TEMPERATURE,
    NAME_RULE,
    UINT32,
    Flag,
    Int,
    LogitBias,
    Number,
    OneOf,
    Seed,
    Text,
    Texts,
    TokenIds,
    param,
)


class FinishReason(StrEnum):
    """Why a sequence ended. ``ABORTED`` covers client cancel; ``DEADLINE`` a passed deadline, which is an error, where
    ``TIME_LIMIT`` is an end like any other. ``LINES``, ``INDENT``, ``BLANK_LINE``, ``BRACKET`` and ``SUFFIX`` are the
    text rules of a request."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    LINES = "lines"
    INDENT = "indent"
    BLANK_LINE = "blank_line"
    BRACKET = "bracket"
    SUFFIX = "suffix"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    ``temperature`` 0 is greedy (lowest id wins ties). ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    ``seed`` None: the engine draws one and reports it in :class:`~specdec.core.types.Started`.
    ``n`` samples share the prompt; sample i uses the seed derived from (seed, i); sample 0 uses ``seed`` itself.
    ``allowed_token_ids`` empty: all allowed. ``repetition_penalty`` divides positive and multiplies negative
    logits of tokens seen in prompt or output; presence and frequency penalties count output tokens only.
    """

    temperature: float = param(
        1.0,
        Number(MIN_TEMPERATURE, 100.0, f"must be 0 (greedy) or lie in [{MIN_TEMPERATURE}, 100]", also=0.0),
        "0 is greedy.",
    )
    top_k: int = param(0, Int(0, INT31, "must be 0 (off) or positive, and below 2^31", off=-1), "0 and -1: off.")
    top_p: float = param(1.0, Number(0.0, 1.0, "must lie in (0, 1]", above=True))
    min_p: float = param(0.0, Number(0.0, 1.0))
    repetition_penalty: float = param(
        1.0, Number(1e-3, 1e3), names={"llamacpp": "repeat_penalty", "ollama": "repeat_penalty"}
    )
    presence_penalty: float = param(0.0, Number(-100.0, 100.0))
    frequency_penalty: float = param(0.0, Number(-100.0, 100.0))
    logit_bias: tuple[tuple[int, float], ...] = param((), LogitBias(), "By token id.")
    allowed_token_ids: tuple[int, ...] = param((), TokenIds(), names={"llamacpp": None})
    seed: int | None = param(None, Seed(), "The same seed gives the same tokens. -1 or none: a fresh one.")
    n: int = param(1, Int(1, MAX_N), names={"llamacpp": "n_cmpl", "ollama": None})


_RULE_TEXT = Text(MAX_RULE_TEXT, f"at most {MAX_RULE_TEXT} characters of text that UTF-8 can hold")


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

    max_lines: int | None = param(None, Int(1, UINT32, "must be positive; leave it unset for any number"), json=None)
    min_indent: int | None = param(None, Int(0, UINT32, "must not be negative"), json=None)
    blank_line: bool = param(False, Flag(), json=None)
    closers: str | None = param(
        None,
        Text(MAX_RULE_TEXT, f"at most {MAX_RULE_TEXT} closing brackets, of ) ] and }}", among=")]}"),
        path="brackets.closers",
        label="brackets.closers",
        json=None,
    )
    quote: str = param(
        "",
        OneOf(("", "'", '"', "`", "'''", '"""', "#"), "must be empty or one of ' \" ` ''' \"\"\" and #"),
        path="brackets.quote",
        label="brackets.quote",
        json=None,
    )
    suffix: str = param("", _RULE_TEXT, json=None)
    lead: str = param("", _RULE_TEXT, json=None)


_SECONDS = Number(0.0, rule="must be a positive number of seconds", above=True)


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When to stop. ``max_tokens`` None: up to the context limit. Stop tokens and strings are cut from the
    text unless ``include_stop``. Below ``min_tokens`` EOS and stop token ids are masked out of the logits and
    stop strings and text rules are not looked for.

    ``time_limit_s`` counts from arrival, ``decode_limit_s`` from the first token; when one has passed, what is there is
    the answer. With ``finish_line`` a text that has begun goes on to the end of its line first."""

    max_tokens: int | None = param(
        None,
        Int(0, UINT32, "must not be negative, and below 2^32"),
        "0: only compute the prompt into the prefix cache.",
    )
    min_tokens: int = param(0, Int(0, UINT32, "must not be negative, and below 2^32"))
    stop: tuple[str, ...] = param(
        (),
        Texts(MAX_STOPS, alone=True, longest=MAX_STOP_TEXT),
        f"At most {MAX_STOPS} different strings, of up to {MAX_STOP_TEXT} characters each; names of special tokens "
        "stop at those.",
    )
    stop_token_ids: tuple[int, ...] = param((), TokenIds())
    include_stop: bool = param(False, Flag(), json="include_stop_str_in_output")
    ignore_eos: bool = param(False, Flag())
    rules: TextRules | None = None
    time_limit_s: float | None = param(None, _SECONDS, path="time_limit_ms", scale=1e3, json=None)
    decode_limit_s: float | None = param(None, _SECONDS, path="decode_time_limit_ms", scale=1e3, json=None)
    finish_line: bool = param(False, Flag(), json=None)


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What comes back. ``logprobs`` None: none; k >= 0: the chosen token's and the top k's log-probabilities
    of the model's unprocessed logits. ``text`` False: token ids only. ``trees``: each Delta with its step's tree."""

    logprobs: int | None = param(None, Int(0, MAX_LOGPROBS))
    text: bool = param(True, Flag(), json=None)
    skip_special_tokens: bool = param(True, Flag())
    trees: bool = param(
        False, Flag(), "Streamed chunks with the token tree their step verified.", json="return_step_trees"
    )


class SpeculationMode(StrEnum):
    """AUTO lets the controller decide, OFF is plain decode, ON always drafts the caps given."""

    AUTO = "auto"
    OFF = "off"
    ON = "on"


_MODES = OneOf(tuple(SpeculationMode))


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Per-request control of speculation; None leaves a choice to the engine's configuration.

    ``max_nodes`` (draft nodes of one tree, without the pending token), ``max_depth`` and ``width`` (children per
    node) replace the configured ones for this request; ``drafters`` names which drafters may propose, ``indexes`` which
    of the indexes configured they may draft from.
    """

    mode: SpeculationMode = param(SpeculationMode.AUTO, _MODES)
    drafters: tuple[str, ...] | None = param(None, Texts())
    max_nodes: int | None = param(None, Int(0, MAX_DRAFT_NODES))
    max_depth: int | None = param(None, Int(0, MAX_DRAFT_NODES))
    width: int | None = param(None, Int(1, 16))
    indexes: tuple[str, ...] | None = param(None, Texts(MAX_INDEXES), "Names of the server's indexes to draft from.")


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
class ResumeParams:
    """Where a stream broke off that goes on here, as if nothing had happened: at the token after ``token_ids``.

    ``token_ids``: all output tokens that the caller has, of one sample. ``text_characters`` (Unicode code points): how
    much of their text it has; None: all that came with them. ``numeric_fingerprint``: of the engine that said them.
    """

    token_ids: tuple[int, ...] = param((), TokenIds(), "The output tokens that came.")
    text_characters: int | None = param(
        None,
        Int(0, UINT32, "must not be negative, and below 2^32"),
        "Characters of their text that came, in code points. None: all that goes with the tokens.",
    )
    numeric_fingerprint: str = param(
        "", Text(MAX_FINGERPRINT, f"at most {MAX_FINGERPRINT} characters"), "Of the server that they came from."
    )


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine takes it. ``deadline_s`` is seconds from arrival at the engine (None: none).

    ``cache_salt`` separates prefix caches and draft texts: requests share them only with an equal salt.
    ``max_tokens`` 0 in ``stopping`` means prefill only: warm the prefix cache, emit no token.
    ``prediction_ids`` is what the caller expects the output to look like, ``session`` names an editor or a
    conversation whose earlier texts may be drafted from; both change how fast tokens come, never which.
    ``target_tpot_ms`` is the time per output token this request should keep to; while it lags behind, its drafts
    are verified before others'.
    ``healing_prefix`` is the end of the prompt's text where that may be one token with what follows, left out of
    ``prompt_ids``: the output spells it first, in tokens that count as output, and its text begins behind it.
    ``resume``: the request was begun elsewhere; what comes is what would have come there.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    output: OutputParams = field(default_factory=OutputParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = param(0, Int(-INT31 - 1, INT31), "A higher one is scheduled first.", path="scheduling.priority")
    deadline_s: float | None = param(None, _SECONDS, json=None)
    cache_salt: str = param(
        "",
        Text(MAX_NAME, NAME_RULE),
        "Requests share cached prefixes and draft texts only with an equal salt.",
        path="cache.salt",
    )
    prediction_ids: tuple[int, ...] = param((), TokenIds(), label="prediction", json=None)
    session: str = param(
        "", Text(MAX_NAME, NAME_RULE), "An editor or a conversation; also the header x-session-id.", path="session.id"
    )
    target_tpot_ms: float | None = param(
        None,
        Number(0.0, rule="must be a positive number of milliseconds", above=True),
        "Milliseconds per token to keep to.",
        path="scheduling.target_tpot_ms",
    )
    grammar: GrammarParams | None = None
    healing_prefix: str = param(
        "", Text(MAX_HEALING_PREFIX, f"at most {MAX_HEALING_PREFIX} characters of text that UTF-8 can hold"), json=None
    )
    resume: ResumeParams | None = None

    @property
    def tokens_to_read(self) -> int:
        """Tokens that are there before the first one to be generated."""
        return len(self.prompt_ids) + (0 if self.resume is None else len(self.resume.token_ids))


@dataclass(slots=True)
class DrafterStats:
    """One drafter's part: nodes of its that were verified, and those accepted. A node that several drafters
    proposed counts for each."""

    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of verified; 0 when none was verified."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one sequence; field names as vLLM's ``metrics.speculative_decoding``.

    ``num_steps`` counts verify steps, ``num_spec_steps`` those with at least one draft node;
    ``acceptance_histogram[k]`` counts the latter by accepted draft tokens.
    """

    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative step, the target's own one included; 1 when there was none."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of verified draft nodes; 0 when none was verified."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True)
class Timings:
    """Milliseconds spent by one sequence. ``queue_ms``: arrival to first scheduling; ``prefill_ms``: first
    scheduling to first token; ``decode_ms``: first token to the end; ``draft_ms`` and ``verify_ms``: its steps'
    time in propose and in verify."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0


@dataclass(slots=True)
class Usage:
    """Token counts of one sequence. ``cached_tokens``: prompt tokens whose KV came from the prefix cache.
    ``preemptions``: times it gave up its pages because there were too few; ``pauses``: times it gave up its place in
    the batch to another prompt while its own was read.

    ``resumed_tokens`` of the ``output_tokens`` came with the request, which was begun elsewhere.
    ``accepted_prediction_tokens``: tokens of the request's prediction that were drafted and came out;
    ``rejected_prediction_tokens``: the others of it. Both 0 without a prediction.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    pauses: int = 0
    resumed_tokens: int = 0


@dataclass(slots=True)
class StepTree:
    """What was verified for one sequence in one step, and what came of it.

    tokens, parents (-1 for the root), chances (estimated chance that the node is reached, 1.0 for the root) and sources
    (names of the drafters that proposed it, none for the root) are parallel, in topological order; node 0 is the token
    said last. accepted: the nodes whose tokens this Delta begins with, in order; a token after theirs is the target's
    own. draft_ms, verify_ms: milliseconds of the step, shared by all sequences in it.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]
    sources: list[list[str]]
    accepted: list[int]
    draft_ms: float
    verify_ms: float


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one emitted position: the chosen token's and the best k, by falling probability."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Started:
    """The request was first scheduled. ``seed`` is the one in force (drawn when the request gave none);
    ``numeric_fingerprint`` as in `EngineInfo`: an engine that has it can go on where this one ends. ``resumed_tokens``:
    output tokens that came with the request. ``prompt_digest``, 32 hex digits, is over the prompt's tokens and its
    cache salt.
    """

    request_id: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    queue_ms: float
    numeric_fingerprint: str = ""
    resumed_tokens: int = 0
    prompt_digest: str = ""


@dataclass(slots=True)
class Delta:
    """New tokens of sample ``index``, at most one Delta per sample and engine step.

    ``text`` holds back incomplete UTF-8 and text that may turn out to begin a stop string, so the text of
    all Deltas joined is the final text. ``logprobs`` is aligned with ``token_ids`` when asked for, else empty.
    ``tree`` is what the step verified, when asked for.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tree: StepTree | None = None


@dataclass(slots=True)
class Finished:
    """Sample ``index`` ended. ``matched_stop`` is the stop string or token id that ended it, if one did."""

    request_id: str
    index: int
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    stats: SpeculationStats
    timings: Timings


@dataclass(slots=True)
class Failed:
    """The request ended with an error; ``reason`` is a RequestError's machine-readable cause."""

    request_id: str
    reason: str
    message: str


RequestEvent = Started | Delta | Finished | Failed


@dataclass(slots=True)
class DrafterTrace:
    """One drafter's part in a step: sequences it was asked for, nodes it proposed, nodes of its that were verified
    and accepted, the accepted tokens expected of those verified, and milliseconds it took. ``decision`` says why it
    was asked or not: `on`, `off`, `probe`, `forced` (mode ON), `free` (costs next to nothing), `read` (a long
    text first, in pieces)."""

    name: str
    decision: str
    sequences: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    predicted: float = 0.0
    ms: float = 0.0


@dataclass(slots=True)
class StepTrace:
    """One step. ``sequences`` sampled a token at least; ``rows`` were computed in all, ``prefill_rows`` of them for
    prompts; ``context`` is the mean number of tokens a row looked back on.

    ``candidates`` draft nodes were proposed, the ``budget`` best verified. Tokens count those of the target itself
    too. ``at_s`` counts from the engine's start. ``control_ms`` is the controller's own time. ``replay`` holds the
    plain values from which `specdec trace replay` reproduces the decision.
    """

    step: int
    at_s: float
    sequences: int
    rows: int
    prefill_rows: int
    context: float
    candidates: int
    budget: int
    predicted_tokens: float
    realised_tokens: int
    predicted_draft_ms: float
    realised_draft_ms: float
    predicted_verify_ms: float
    realised_verify_ms: float
    plan_ms: float
    commit_ms: float
    control_ms: float
    drafters: list[DrafterTrace] = field(default_factory=list)
    replay: dict[str, object] = field(default_factory=dict)

    @property
    def predicted_ms(self) -> float:
        """Milliseconds expected of drafting and verifying."""
        return self.predicted_draft_ms + self.predicted_verify_ms

    @property
    def realised_ms(self) -> float:
        """Milliseconds that drafting and verifying took."""
        return self.realised_draft_ms + self.realised_verify_ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this step over its whole time; 0 when no time was measured."""
        whole_ms = self.plan_ms + self.realised_ms + self.commit_ms
        return self.realised_tokens / whole_ms * 1e3 if whole_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that do not change while an engine lives.

    ``kernels`` is `native` or `reference`, ``numeric_mode`` `bitwise` (bits that do not depend on the
    batch) or `numerical`.
    ``max_context`` and ``kv_tokens`` are in tokens, ``max_batch`` in sequences; ``drafters`` are those loaded,
    ``indexes`` the names of what the `index` drafter may draft from.
    ``dtype`` is of the weights, which take ``weight_bytes`` in memory (0: not known), ``kv_dtype`` of the KV cache.
    ``memory_bytes`` is what it needs of the machine's memory, though it may not have taken it yet.
    ``numeric_fingerprint``, 32 hex digits, is equal in engines that say the same bits to the same request.
    ``tp``: processes that the target is cut over; ``threads`` are of all of them.
    """

    target: str
    draft: str | None
    dtype: str
    kernels: str
    numeric_mode: str
    max_context: int
    vocab_size: int
    kv_tokens: int
    max_batch: int
    drafters: tuple[str, ...]
    eos_ids: tuple[int, ...]
    threads: int
    version: str
    kv_dtype: str
    indexes: tuple[str, ...] = ()
    memory_bytes: int = 0
    weight_bytes: int = 0
    numeric_fingerprint: str = ""
    tp: int = 1


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is now.

    Requests are counted once whatever their number of samples. ``tokens_per_second`` is a decayed average of emitted
    tokens. ``prefix_hit_tokens`` of ``prompt_tokens`` prompt tokens since the start came from the prefix cache.

    Since the start: ``steps`` were run, with ``step_rows`` rows of ``step_sequences`` sequences in all;
    ``drafting_steps`` of them verified any draft, ``draft_rows`` draft tokens together. They took ``plan_ms``,
    ``draft_ms``, ``verify_ms`` and ``commit_ms``. ``steps_by_rows[k]`` had more than 2^(k-1) and at most 2^k rows,
    ``steps_by_sequences[k]`` so many sequences.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    free_pages: int = 0
    total_pages: int = 0
    tokens_per_second: float = 0.0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    drafting_steps: int = 0
    step_rows: int = 0
    draft_rows: int = 0
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    step_sequences: int = 0
    steps_by_sequences: tuple[int, ...] = ()
    steps_by_rows: tuple[int, ...] = ()

    @property
    def kv_usage(self) -> float:
        """Part of the KV pages that running requests hold, 0 to 1."""
        return (self.total_pages - self.free_pages) / self.total_pages if self.total_pages else 0.0

    @property
    def hit_rate(self) -> float:
        """Part of all prompt tokens that came from the prefix cache."""
        return self.prefix_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def metrics_dict(stats: SpeculationStats) -> dict[str, Any]:
    """``stats`` as vLLM answers them below ``metrics``, with ``num_steps`` and ``by_drafter`` added."""
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": list(stats.acceptance_histogram),
            "num_spec_steps": stats.num_spec_steps,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "num_steps": stats.num_steps,
            "by_drafter": {
                name: {
                    "num_draft_tokens": part.num_draft_tokens,
                    "num_accepted_draft_tokens": part.num_accepted_draft_tokens,
                    "draft_acceptance_rate": part.draft_acceptance_rate,
                }
                for name, part in stats.by_drafter.items()
            },
        }
    }


def trace_dict(step: StepTrace) -> dict[str, Any]:
    """``step`` without what replay needs; numbers that JSON can not write, infinite ones and NaN, become None."""
    scalars = {f.name: _writable(getattr(step, f.name)) for f in fields(step) if f.name not in ("drafters", "replay")}
    return {**scalars, "drafters": [_drafter_dict(part) for part in step.drafters]}


def _drafter_dict(part: DrafterTrace) -> dict[str, Any]:
    return {f.name: _writable(getattr(part, f.name)) for f in fields(part)}


def _writable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
