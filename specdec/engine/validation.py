"""Checks a request at the engine's door; every bad field is named at once."""

from __future__ import annotations

import math

from specdec.errors import PromptTooLongError, ViolationCollector
from specdec.tree import MAX_NODES
from specdec.types import (
    GrammarKind,
    GrammarParams,
    Request,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    TextRules,
)
from verify_kernels.sampling import MIN_TEMPERATURE

MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_SCHEMA_BYTES = 1 << 16  # what the compiler's stack is known to bear, see `specdec.grammar.compiler`
MAX_GRAMMAR_BYTES = 1 << 14  # of an expression or of rules, which can take far longer to compile than a schema
MAX_RULE_TEXT = 4096  # characters of what follows in the file, far more than a rule looks at
MAX_HEALING_PREFIX = 256  # characters; a word has far fewer
QUOTES = ("", "'", '"', "`", "'''", '"""', "#")
MAX_BIAS = 1e4  # far beyond any logit, and far from what a float32 sum could turn into infinity


def validate_request(request: Request, vocab_size: int, max_context: int, drafters: tuple[str, ...]) -> None:
    """Refuse what can not be served.

    Raises:
        InvalidRequestError: fields out of range, each one listed.
        PromptTooLongError: prompt and one new token exceed ``max_context``.
    """
    seen = ViolationCollector()
    seen.check(bool(request.request_id), "request_id", "must not be empty")
    seen.check(bool(request.prompt_ids), "prompt", "must hold at least one token")
    seen.check(_encodable(request.cache_salt), "cache_salt", "must be text that UTF-8 can hold")
    seen.check(_ids_ok(request.prompt_ids, vocab_size), "prompt.token_ids", f"ids must lie in [0, {vocab_size})")
    seen.check(_ids_ok(request.prediction_ids, vocab_size), "prediction", f"ids must lie in [0, {vocab_size})")
    seen.check(_encodable(request.session), "session", "must be text that UTF-8 can hold")
    seen.check(_positive_or_none(request.deadline_s), "deadline_s", "must be a positive number of seconds")
    tpot = "must be a positive number of milliseconds"
    seen.check(_positive_or_none(request.target_tpot_ms), "target_tpot_ms", tpot)
    _check_sampling(seen, request.sampling, vocab_size)
    _check_stopping(seen, request.stopping, vocab_size)
    logprobs = request.output.logprobs
    seen.check(logprobs is None or 0 <= logprobs <= MAX_LOGPROBS, "output.logprobs", f"must lie in 0..{MAX_LOGPROBS}")
    _check_speculation(seen, request.speculation, drafters)
    if request.grammar is not None:
        _check_grammar(seen, request.grammar)
        seen.check(
            not request.healing_prefix,
            "healing_prefix",
            "goes with no grammar, which is about whole tokens; leave one out",
        )
    fits = len(request.healing_prefix) <= MAX_HEALING_PREFIX and _encodable(request.healing_prefix)
    seen.check(fits, "healing_prefix", f"at most {MAX_HEALING_PREFIX} characters of text that UTF-8 can hold")
    seen.raise_if_any()
    if len(request.prompt_ids) + 1 > max_context:
        raise PromptTooLongError(max_context - 1, len(request.prompt_ids))


def _check_sampling(seen: ViolationCollector, s: SamplingParams, vocab_size: int) -> None:
    warm = s.temperature == 0 or _within(s.temperature, MIN_TEMPERATURE, 100.0)
    seen.check(warm, "sampling.temperature", f"must be 0 (greedy) or lie in [{MIN_TEMPERATURE}, 100]")
    seen.check(0 <= s.top_k < 1 << 31, "sampling.top_k", "must be 0 (off) or positive, and below 2^31")
    seen.check(_within(s.top_p, 0.0, 1.0) and s.top_p > 0, "sampling.top_p", "must lie in (0, 1]")
    seen.check(_within(s.min_p, 0.0, 1.0), "sampling.min_p", "must lie in [0, 1]")
    seen.check(_within(s.repetition_penalty, 1e-3, 1e3), "sampling.repetition_penalty", "must lie in [0.001, 1000]")
    for name in ("presence_penalty", "frequency_penalty"):
        seen.check(_within(getattr(s, name), -100.0, 100.0), f"sampling.{name}", "must lie in [-100, 100]")
    bias_ok = all(0 <= t < vocab_size and _within(b, -MAX_BIAS, MAX_BIAS) for t, b in s.logit_bias)
    bounds = f"ids must lie in [0, {vocab_size}) and biases in [-{MAX_BIAS:g}, {MAX_BIAS:g}]"
    seen.check(bias_ok, "sampling.logit_bias", bounds)
    seen.check(
        _ids_ok(s.allowed_token_ids, vocab_size), "sampling.allowed_token_ids", f"ids must lie in [0, {vocab_size})"
    )
    seen.check(s.seed is None or 0 <= s.seed < 1 << 64, "sampling.seed", "must be an unsigned 64-bit number")
    seen.check(1 <= s.n <= MAX_N, "sampling.n", f"must lie in 1..{MAX_N}")


def _check_stopping(seen: ViolationCollector, s: StoppingParams, vocab_size: int) -> None:
    seen.check(s.max_tokens is None or s.max_tokens >= 0, "stopping.max_tokens", "must not be negative")
    seen.check(s.min_tokens >= 0, "stopping.min_tokens", "must not be negative")
    if s.max_tokens is not None:
        seen.check(s.min_tokens <= s.max_tokens, "stopping.min_tokens", "must not exceed max_tokens")
    seen.check(all(s.stop) and len(s.stop) <= MAX_STOPS, "stopping.stop", f"at most {MAX_STOPS} non-empty strings")
    seen.check(_ids_ok(s.stop_token_ids, vocab_size), "stopping.stop_token_ids", f"ids must lie in [0, {vocab_size})")
    for name in ("time_limit_s", "decode_limit_s"):
        seen.check(_positive_or_none(getattr(s, name)), f"stopping.{name}", "must be a positive number of seconds")
    timed = s.time_limit_s is not None or s.decode_limit_s is not None
    seen.check(timed or not s.finish_line, "stopping.finish_line", "needs a time limit; set one, or leave it unset")
    if s.rules is not None:
        _check_rules(seen, s.rules)


def _check_rules(seen: ViolationCollector, rules: TextRules) -> None:
    lines, indent, closers = rules.max_lines, rules.min_indent, rules.closers
    seen.check(lines is None or lines >= 1, "stopping.max_lines", "must be positive; leave it unset for any number")
    seen.check(indent is None or indent >= 0, "stopping.min_indent", "must not be negative")
    brackets = closers is None or (set(closers) <= set(")]}") and len(closers) <= MAX_RULE_TEXT)
    seen.check(brackets, "stopping.brackets.closers", f"at most {MAX_RULE_TEXT} closing brackets, of ) ] and }}")
    seen.check(rules.quote in QUOTES, "stopping.brackets.quote", "must be empty or one of ' \" ` ''' \"\"\" and #")
    for name in ("suffix", "lead"):
        text = getattr(rules, name)
        ok = len(text) <= MAX_RULE_TEXT and _encodable(text)
        seen.check(ok, f"stopping.{name}", f"at most {MAX_RULE_TEXT} characters of text that UTF-8 can hold")
    seen.check(not rules.lead.strip(), "stopping.lead", "must be white space only")


def _check_speculation(seen: ViolationCollector, s: SpeculationParams, drafters: tuple[str, ...]) -> None:
    limit = MAX_NODES - 1
    seen.check(s.max_nodes is None or 0 <= s.max_nodes <= limit, "speculation.max_nodes", f"must lie in 0..{limit}")
    seen.check(s.max_depth is None or 0 <= s.max_depth <= limit, "speculation.max_depth", f"must lie in 0..{limit}")
    seen.check(s.width is None or 1 <= s.width <= 16, "speculation.width", "must lie in 1..16")
    unknown = sorted(set(s.drafters or ()) - set(drafters))
    loaded = ", ".join(drafters) or "none"
    seen.check(not unknown, "speculation.drafters", f"unknown {', '.join(unknown)}; loaded: {loaded}")


def _check_grammar(seen: ViolationCollector, grammar: GrammarParams) -> None:
    """What can be said without compiling it; ``GrammarCompiler.compile`` says the rest."""
    kinds = ", ".join(kind.value for kind in GrammarKind)
    if grammar.kind not in list(GrammarKind):
        seen.check(False, "grammar", f"unknown kind {grammar.kind!r}; choose one of {kinds}")
    elif grammar.kind is GrammarKind.JSON_OBJECT:
        seen.check(not grammar.text, "grammar", "json_object takes no text; use json_schema for a schema")
    elif not _encodable(grammar.text):
        seen.check(False, "grammar", "must be text that UTF-8 can hold")
    else:
        seen.check(bool(grammar.text.strip()), "grammar", f"{grammar.kind.value} needs a text")
        wide = grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE)
        limit = MAX_SCHEMA_BYTES if wide else MAX_GRAMMAR_BYTES
        seen.check(len(grammar.text.encode()) <= limit, "grammar", f"must not exceed {limit} bytes; simplify it")


def _within(value: float, low: float, high: float) -> bool:
    return math.isfinite(value) and low <= value <= high


def _positive_or_none(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value > 0)


def _ids_ok(ids: tuple[int, ...], vocab_size: int) -> bool:
    return all(isinstance(i, int) for i in ids) and (not ids or (min(ids) >= 0 and max(ids) < vocab_size))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
