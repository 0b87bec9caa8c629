"""Requests and the events that answer them. No torch, no I/O."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from specdec.core.fields import (
    INT31,
    MAX_ALLOWED_TOKENS,
    MAX_BIASED_TOKENS,
    MAX_DRAFT_NODES,
    MAX_DRAFTERS,
    MAX_FINGERPRINT,
    MAX_HEALING_PREFIX,
    MAX_INDEXES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_NAME,
    MAX_PREDICTION_TOKENS,
    MAX_RESUMED_TOKENS,
    MAX_RULE_TEXT,
    MAX_STOP_TEXT,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MIN_TEMPERATURE,
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
    """Why a sequence ended."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"  # an error: the call's deadline passed
    ABORTED = "aborted"  # by Abort, a client that left, or a request that supersedes it
    # The next five are the text rules of a request (`TextRules`).
    LINES = "lines"
    INDENT = "indent"
    BLANK_LINE = "blank_line"
    BRACKET = "bracket"
    SUFFIX = "suffix"
    TIME_LIMIT = "time_limit"  # a regular end: the request's own time limit passed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits."""

    temperature: float = param(
        1.0,
        Number(MIN_TEMPERATURE, 100.0, f"must be 0 (greedy) or lie in [{MIN_TEMPERATURE}, 100]", also=0.0),
        "0 is greedy.",
    )
    """At 0 the lowest id wins ties."""
    top_k: int = param(0, Int(0, INT31, "must be 0 (off) or positive, and below 2^31", off=-1), "0 and -1: off.")
    top_p: float = param(1.0, Number(0.0, 1.0))
    """1 is off; 0 leaves the most likely token."""
    min_p: float = param(0.0, Number(0.0, 1.0))
    """0 is off."""
    repetition_penalty: float = param(1.0, Number(1e-3, 1e3))
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    presence_penalty: float = param(0.0, Number(-100.0, 100.0))
    """Counts output tokens, as frequency_penalty does."""
    frequency_penalty: float = param(0.0, Number(-100.0, 100.0))
    logit_bias: tuple[tuple[int, float], ...] = param((), LogitBias(MAX_BIASED_TOKENS), "By token id.")
    allowed_token_ids: tuple[int, ...] = param((), TokenIds(MAX_ALLOWED_TOKENS, distinct=True))
    """Empty: all."""
    seed: int | None = param(None, Seed(), "The same seed gives the same tokens. -1 or none: a fresh one.")
    """None: the engine draws one and reports it in `Started`."""
    n: int = param(1, Int(1, MAX_N))
    """Samples of the prompt. Sample 0 uses ``seed`` itself, sample i a seed derived from (seed, i)."""
    thinking_budget: int = param(
        -1,
        Int(-1, INT31),
        "Tokens after which the model's thoughts are closed. -1: no limit. No effect with a grammar.",
        json="thinking_token_budget",
    )
    """Models that do not mark thoughts ignore it."""


def draw_seed() -> int:
    """A random seed for a request that gives none; 53 bits, which JavaScript numbers hold exactly."""
    return secrets.randbits(53)


def sample_seed(seed: int, index: int) -> int:
    """The unsigned 64-bit seed of sample ``index`` of a request: ``seed`` itself for 0, else a hash of the two."""
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")


_RULE_TEXT = Text(MAX_RULE_TEXT)


@dataclass(frozen=True, slots=True)
class TextRules:
    """Where a text that is inserted into a file ends, by its layout. What ends the text is not part of it."""

    max_lines: int | None = param(None, Int(1, UINT32, "must be positive; leave it unset for any number"), json=None)
    """Ends after so many lines. An empty rest of the line in which the text begins does not count."""
    min_indent: int | None = param(None, Int(0, UINT32, "must not be negative"), json=None)
    """Ends before a line, not the first, that is indented by fewer characters. Blank lines are ignored."""
    blank_line: bool = param(False, Flag(), json=None)
    """Ends before a blank line that is not the first."""
    closers: str | None = param(
        None,
        Text(MAX_RULE_TEXT, f"at most {MAX_RULE_TEXT} closing brackets, of ) ] and }}", among=")]}"),
        path="brackets.closers",
        label="brackets.closers",
        json=None,
    )
    """Ends before a closing bracket that the text did not open, except these, in this order. None: ignores brackets."""
    quote: str = param(
        "",
        OneOf(("", "'", '"', "`", "'''", '"""', "#"), "must be empty or one of ' \" ` ''' \"\"\" and #"),
        path="brackets.quote",
        label="brackets.quote",
        json=None,
    )
    """The quotation mark or comment sign that is open where the text begins."""
    suffix: str = param("", _RULE_TEXT, json=None)
    """What follows in the file. The text ends where it begins to repeat this; if this closes the open string, the text
    does not leave that string."""
    lead: str = param("", _RULE_TEXT, json=None)
    """The line break and white space before the text, if nothing else precedes it; a repeated suffix includes them."""


_SECONDS = Number(0.0, rule="must be a positive number", above=True)
_COUNT = Int(0, UINT32, "must not be negative, and below 2^32")


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a sequence ends.

    Below ``min_tokens`` the end and stop tokens are masked out of the logits, and stop strings and text rules are not
    checked.
    """

    max_tokens: int | None = param(
        None, Int(0, UINT32, _COUNT.rule, off=-1), "0: only compute the prompt into the prefix cache. -1: no limit."
    )
    """None: up to the context limit."""
    min_tokens: int = param(0, _COUNT)
    stop: tuple[str, ...] = param(
        (),
        Texts(MAX_STOPS, alone=True, longest=MAX_STOP_TEXT),
        f"At most {MAX_STOPS} strings, of up to {MAX_STOP_TEXT} characters each; names of special tokens "
        "stop at those.",
    )
    stop_token_ids: tuple[int, ...] = param((), TokenIds(MAX_STOP_TOKENS))
    include_stop: bool = param(False, Flag(), json="include_stop_str_in_output")
    """Keeps in the text the stop token or string that ended it."""
    ignore_eos: bool = param(False, Flag())
    rules: TextRules | None = None
    time_limit_s: float | None = param(None, _SECONDS, path="time_limit_ms", scale=1e3, json=None)
    """From arrival. When it has passed, the text so far is the answer."""
    decode_limit_s: float | None = param(None, _SECONDS, path="decode_time_limit_ms", scale=1e3, json=None)
    """The same from the first token."""
    finish_line: bool = param(False, Flag(), json=None)
    """A text that has begun when its time limit passes continues to the end of its line."""


@dataclass(frozen=True, slots=True)
class OutputParams:
    """What an answer contains."""

    logprobs: int | None = param(None, Int(0, MAX_LOGPROBS))
    """None: none. k: those of the chosen and the k likeliest tokens, from the unprocessed logits."""
    text: bool = param(True, Flag(), json=None)
    """False: token ids only."""
    skip_special_tokens: bool = param(True, Flag())
    trees: bool = param(
        False, Flag(), "Streamed chunks with the token tree their step verified.", json="return_step_trees"
    )


class SpeculationMode(StrEnum):
    """How much is drafted."""

    AUTO = "auto"  # the controller decides
    OFF = "off"  # plain decoding
    ON = "on"  # always up to the limits given


_MODES = OneOf(tuple(SpeculationMode))


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Control of speculation by a request. None leaves a choice to the engine's configuration."""

    mode: SpeculationMode = param(SpeculationMode.AUTO, _MODES)
    drafters: tuple[str, ...] | None = param(None, Texts(MAX_DRAFTERS))
    """Names of the drafters that may propose."""
    max_nodes: int | None = param(None, Int(0, MAX_DRAFT_NODES))
    """Draft nodes of one tree, without the pending token."""
    max_depth: int | None = param(None, Int(0, MAX_DRAFT_NODES))
    width: int | None = param(None, Int(1, 16))
    """Children per node."""
    indexes: tuple[str, ...] | None = param(None, Texts(MAX_INDEXES), "Names of the server's indexes to draft from.")


DRAFT_MODELS = ("model", "parallel")
"""Drafters that run `engine.draft`, at most one of which is loaded; a request may give it either name."""


def selects(drafters: Sequence[str] | None, name: str) -> bool:
    """Whether a request's ``drafters`` include the loaded drafter ``name``."""
    if drafters is None or name in drafters:
        return True
    return name in DRAFT_MODELS and not set(DRAFT_MODELS).isdisjoint(drafters)


JSON_WHITESPACE = r" |\n{1,2}[ \t]{0,40}"
"""White space between tokens of JSON that matches a schema, unless the schema has its own. Bounded: an unsure model may
continue with white space for ever."""


class GrammarKind(StrEnum):
    """The language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # no text: any object
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"  # a JSON array of strings


@dataclass(frozen=True, slots=True)
class GrammarParams:
    """What the whole output must match."""

    kind: GrammarKind
    text: str = ""
    of_schemas: bool = False
    """The server wrote the text around a caller's JSON schemas, so it may be as long as these."""


@dataclass(frozen=True, slots=True)
class ResumeParams:
    """Where a stream of another engine broke off. The request continues at the token after ``token_ids``."""

    token_ids: tuple[int, ...] = param(
        (), TokenIds(MAX_RESUMED_TOKENS), "The output tokens received, all of one sample."
    )
    text_characters: int | None = param(
        None, _COUNT, "Characters of their text received, in code points. None: all of it."
    )
    numeric_fingerprint: str = param(
        "",
        Text(MAX_FINGERPRINT, f"at most {MAX_FINGERPRINT} characters"),
        "The fingerprint of the server that generated them.",
    )


class Pooling(StrEnum):
    """How the final hidden states of a text's tokens become its embedding."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # their mean


@dataclass(frozen=True, slots=True)
class Request:
    """One request to an engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    output: OutputParams = field(default_factory=OutputParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = param(0, Int(-INT31 - 1, INT31), "A higher one is scheduled first.", path="scheduling.priority")
    deadline_s: float | None = param(None, _SECONDS, json=None)
    """From arrival at the engine; None: none."""
    cache_salt: str = param(
        "",
        Text(MAX_NAME),
        "Requests share cached prefixes and draft texts only with an equal salt.",
        path="cache.salt",
    )
    prediction_ids: tuple[int, ...] = param((), TokenIds(MAX_PREDICTION_TOKENS), label="prediction", json=None)
    """What the caller expects the output to resemble. Changes how fast tokens come, never which."""
    omitted: tuple[int, ...] | None = None
    """What its time objective left out of the prompt, as in `Usage`: lines before the gap, after it and of other files,
    recent edits. None: it has no such objective."""
    session: str = param(
        "", Text(MAX_NAME), "An editor or a conversation; also the header x-session-id.", path="session.id"
    )
    """Earlier texts of a session may be drafted from, under an equal salt."""
    target_tpot_ms: float | None = param(
        None,
        Number(0.0, rule="must be a positive number of milliseconds", above=True),
        "Milliseconds per token to keep to.",
        path="scheduling.target_tpot_ms",
    )
    """While a request is slower than this, its drafts are verified before others'."""
    grammar: GrammarParams | None = None
    healing_prefix: str = param("", Text(MAX_HEALING_PREFIX), json=None)
    """The end of the prompt's text, left out of ``prompt_ids`` because it may be one token together with what follows.
    The output's first tokens spell it and count as output; its text begins behind it."""
    resume: ResumeParams | None = None
    pooling: Pooling | None = None
    """Returns an embedding of the prompt and generates nothing. None: generates."""

    @property
    def tokens_to_read(self) -> int:
        """Tokens of the prompt and of a resumed output."""
        return len(self.prompt_ids) + (0 if self.resume is None else len(self.resume.token_ids))


POSITIONS = 8  # depths at which acceptance is counted one by one


@dataclass(slots=True)
class DrafterStats:
    """One drafter's nodes. A node that several drafters proposed counts for each."""

    num_draft_tokens: int = 0  # verified
    num_accepted_draft_tokens: int = 0
    # By k: trees with a verified node of it at depth k + 1, and those in which such a node was accepted.
    proposed_at: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * POSITIONS)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted nodes per verified node; 0 if none was verified."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance(self) -> tuple[float | None, ...]:
        """By position from 1, the share of proposals that were accepted; None where nothing was proposed."""
        return tuple(a / n if n else None for n, a in zip(self.proposed_at, self.accepted_at, strict=True))

    def add(self, other: DrafterStats) -> None:
        """Add the counts of ``other``."""
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens
        for k in range(POSITIONS):
            self.proposed_at[k] += other.proposed_at[k]
            self.accepted_at[k] += other.accepted_at[k]


@dataclass(slots=True)
class SpeculationStats:
    """Speculation of one sequence. The names are those of vLLM's ``metrics.speculative_decoding``."""

    num_steps: int = 0  # verify steps
    num_spec_steps: int = 0  # steps with at least one draft node
    num_draft_tokens: int = 0  # verified
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)  # by k: steps of `num_spec_steps` that accepted k
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of ``other``."""
        self.num_steps += other.num_steps
        self.num_spec_steps += other.num_spec_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens
        histogram, more = self.acceptance_histogram, other.acceptance_histogram
        histogram += [0] * (len(more) - len(histogram))
        for accepted, steps in enumerate(more):
            histogram[accepted] += steps
        for name, drafter in other.by_drafter.items():
            self.by_drafter.setdefault(name, DrafterStats()).add(drafter)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative step, the target's own one included; 1 if there was none."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted nodes per verified node; 0 if none was verified."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True)
class Timings:
    """Milliseconds of one sequence."""

    queue_ms: float = 0.0  # arrival to first scheduling
    prefill_ms: float = 0.0  # first scheduling to first token
    decode_ms: float = 0.0  # first token to the end
    draft_ms: float = 0.0  # its steps' time in propose
    verify_ms: float = 0.0  # its steps' time in verify


@dataclass(slots=True)
class Usage:
    """Token counts of one sequence."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    output_tokens: int = 0
    preemptions: int = 0  # times it gave up its pages because pages were short
    accepted_prediction_tokens: int = 0  # tokens of the prediction that were drafted and accepted
    rejected_prediction_tokens: int = 0  # the other tokens of the prediction
    pauses: int = 0  # times it left the batch to another prompt during its prefill
    resumed_tokens: int = 0  # output tokens that came with the request
    # What the time objective left out of the prompt
    omitted_prefix_lines: int = 0
    omitted_suffix_lines: int = 0
    omitted_file_lines: int = 0
    omitted_edits: int = 0


@dataclass(slots=True)
class StepTree:
    """What one step verified for one sequence. Node 0, the root, is the last committed token."""

    tokens: list[int]  # by node, in topological order
    parents: list[int]  # by node; -1 for the root
    chances: list[float]  # by node: estimated chance of being reached; 1.0 for the root
    sources: list[list[str]]  # by node: names of the drafters that proposed it
    accepted: list[int]  # nodes whose tokens this Delta begins with; a token after them is the target's own
    draft_ms: float  # of the step, for all its sequences
    verify_ms: float  # of the step, for all its sequences


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # token id and log-probability, likeliest first


@dataclass(slots=True)
class Started:
    """The request was first scheduled."""

    request_id: str
    seed: int  # the one in force
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    queue_ms: float
    numeric_fingerprint: str = ""  # of the engine; engines with the same one can resume the stream
    resumed_tokens: int = 0  # output tokens that came with the request
    prompt_digest: str = ""  # 32 hex digits over the prompt's tokens and the cache salt


@dataclass(slots=True)
class Delta:
    """New tokens of one sample; at most one Delta per sample and step."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str  # complete characters that cannot begin a stop string; all Deltas join to the text
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # aligned with token_ids; empty if not requested
    tree: StepTree | None = None  # None: not requested


@dataclass(slots=True)
class Finished:
    """One sample ended."""

    request_id: str
    index: int
    reason: FinishReason
    matched_stop: str | int | None  # what ended the sample
    usage: Usage
    stats: SpeculationStats
    timings: Timings
    embedding: bytes = b""  # float32 values in little-endian order, of Euclidean length 1; empty: not requested


@dataclass(slots=True)
class Failed:
    """The request ended with an error."""

    request_id: str
    reason: str  # as `RequestError.reason`
    message: str
    details: list[Any] = field(default_factory=list)  # as `RequestError.details`


RequestEvent = Started | Delta | Finished | Failed


def unstarted(request_id: str, request: Request, reason: FinishReason, queue_ms: float) -> list[Finished]:
    """The ends of all samples of a request that was never scheduled."""
    usage, times = Usage(len(request.prompt_ids)), Timings(queue_ms)
    return [Finished(request_id, i, reason, None, usage, SpeculationStats(), times) for i in range(request.sampling.n)]


@dataclass(slots=True)
class DrafterTrace:
    """One drafter's part in a step."""

    name: str
    decision: str  # a `DraftDecision` (`specdec.control.inputs`): why it was asked, or not
    sequences: int = 0  # that it was asked for
    proposed: int = 0  # nodes
    verified: int = 0  # nodes
    accepted: int = 0  # nodes
    predicted: float = 0.0  # accepted nodes expected of those verified
    ms: float = 0.0
    read: int = 0  # tokens of text that its model read before it proposed


@dataclass(slots=True)
class StepTrace:
    """One step."""

    step: int
    at_s: float  # seconds since the engine's start
    sequences: int  # that sampled at least one token
    rows: int  # computed in all
    prefill_rows: int  # rows of prompts
    context: float  # mean number of tokens that a row attends to
    candidates: int  # draft nodes proposed
    budget: int  # draft nodes verified
    predicted_tokens: float  # the target's own ones included, as in realised_tokens
    realised_tokens: int
    predicted_draft_ms: float
    realised_draft_ms: float
    predicted_verify_ms: float  # NaN: nothing was predicted, as with speculation off
    realised_verify_ms: float  # 0: not measured, because another forward was still running
    plan_ms: float
    commit_ms: float
    control_ms: float  # the controller's own time
    drafters: list[DrafterTrace] = field(default_factory=list)
    # Plain values from which `specdec trace replay` repeats the decision
    replay: dict[str, Any] = field(default_factory=dict)

    @property
    def predicted_ms(self) -> float:
        """Expected milliseconds of drafting and verifying."""
        return self.predicted_draft_ms + self.predicted_verify_ms

    @property
    def realised_ms(self) -> float:
        """Milliseconds that drafting and verifying took."""
        return self.realised_draft_ms + self.realised_verify_ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole step; 0 if its forward was not measured."""
        whole_ms = self.plan_ms + self.realised_ms + self.commit_ms
        return self.realised_tokens / whole_ms * 1e3 if self.realised_verify_ms > 0 else 0.0


MAX_QUEUED_REQUESTS = 256  # requests that may wait for an engine; further ones are refused


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that change only with a swap of the draft model."""

    target: str
    draft: str | None
    dtype: str  # of the weights
    kernels: str  # native, reference or triton
    numeric_mode: str  # bitwise (bits do not depend on the batch) or numerical
    max_context: int  # tokens
    vocab_size: int
    kv_tokens: int  # tokens
    max_batch: int  # sequences
    drafters: tuple[str, ...]  # loaded
    eos_ids: tuple[int, ...]
    threads: int
    version: str
    kv_dtype: str
    indexes: tuple[str, ...] = ()  # names that the `index` drafter may draft from
    memory_bytes: int = 0  # main memory that the engine needs, allocated or not
    weight_bytes: int = 0  # on the target's device; 0: unknown
    numeric_fingerprint: str = ""  # 32 hex digits; engines with the same one answer a request with the same bits
    pooling: str = ""  # of a model made for embeddings (`Pooling`) or for reranking ("rank"); empty: it generates text
    embedding_size: int = 0  # values of an embedding; 0: unknown
    head: str = ""  # folder of the feature head as it was given; empty: none
    head_acceptance: tuple[float, ...] = ()  # by position from 1, as its publisher measured it; empty: unknown


@dataclass(slots=True)
class ServerLoad:
    """How busy an engine is, as its server reports it. Counts are totals since the engine's start unless said
    otherwise."""

    running_requests: int = 0  # now; a request counts once, whatever its samples
    waiting_requests: int = 0  # now
    free_pages: int = 0  # now
    total_pages: int = 0
    tokens_per_second: float = 0.0  # a decaying average
    prefix_hit_tokens: int = 0  # of prompt_tokens, found in the prefix cache
    prompt_tokens: int = 0
    steps: int = 0
    drafting_steps: int = 0  # steps that verified draft tokens

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages that running requests hold, 0 to 1."""
        return (self.total_pages - self.free_pages) / self.total_pages if self.total_pages else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens found in the prefix cache, 0 to 1."""
        return self.prefix_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class EngineLoad(ServerLoad):
    """A `ServerLoad` with the figures behind a server's metrics and the expected times of prompts."""

    step_rows: int = 0
    draft_rows: int = 0  # draft tokens verified
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    step_sequences: int = 0
    # By k: steps of more than 2^(k-1) and at most 2^k sequences, and the same by rows
    steps_by_sequences: list[int] = field(default_factory=list)
    steps_by_rows: list[int] = field(default_factory=list)
    # By k: expected milliseconds of a forward of 4^k prompt tokens that runs alone; empty: unknown
    prompt_ms: tuple[float, ...] = ()
    disk_bytes: int = 0  # now, of the prefix cache's files
    disk_pages_written: int = 0
    disk_pages_read: int = 0
    # By cause; `off`: 1 if it is configured and cannot be used
    disk_pages_missed: dict[str, int] = field(default_factory=dict)


def metrics_dict(stats: SpeculationStats) -> dict[str, Any]:
    """Return ``stats`` as vLLM's ``metrics``, with ``num_steps`` and ``by_drafter`` added."""
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
    """Return ``step`` without its replay values for JSON. Infinities and NaN become None."""
    scalars = {f.name: _writable(getattr(step, f.name)) for f in fields(step) if f.name not in ("drafters", "replay")}
    drafters = [{f.name: _writable(getattr(part, f.name)) for f in fields(part)} for part in step.drafters]
    return {**scalars, "drafters": drafters}


def trace_step(values: Any) -> StepTrace:
    """The step of which `trace_dict` returned ``values``, with NaN for each None and without values of later versions.

    Raises:
        KeyError, TypeError: they are not those of a step.
    """
    drafters = [DrafterTrace(**_readable(DrafterTrace, part)) for part in values["drafters"]]
    return StepTrace(**(_readable(StepTrace, values) | {"drafters": drafters}))


def _writable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _readable(kind: type[StepTrace | DrafterTrace], values: Any) -> dict[str, Any]:
    given = {f.name: values[f.name] for f in fields(kind) if f.name in values}
    return {name: math.nan if value is None else value for name, value in given.items()}
