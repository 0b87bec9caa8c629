"""Checks a request before it is queued: every bad field is named at once.

Each parameter's bounds stand beside it in `specdec.core.types`; here is what concerns several of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.core.fields import UTF8, TokenIds, encodable, params_of
from specdec.core.types import (
    EngineInfo,
    GrammarKind,
    GrammarParams,
    Request,
    ResumeParams,
    SpeculationParams,
    StoppingParams,
)
from specdec.errors import FieldViolation, FingerprintMismatchError, InvalidRequestError, PromptTooLongError

MAX_SCHEMA_BYTES = 1 << 16  # what the compiler's stack is known to bear, see `specdec.grammar.compiler`
MAX_GRAMMAR_BYTES = 1 << 14  # of an expression or of rules, which can take far longer to compile than a schema


def validate_request(
    request: Request,
    vocab_size: int,
    max_context: int,
    drafters: tuple[str, ...],
    indexes: tuple[str, ...] | None = None,
) -> None:
    """Refuse what can not be served. drafters, indexes: those there are. None: no index is looked for, since a key
    may be allowed more of them than there are.

    Raises:
        InvalidRequestError: fields out of range, each one listed.
        PromptTooLongError: prompt and one new token exceed ``max_context``.
    """
    fits = len(request.prompt_ids) < max_context
    # A prompt that is refused for its length is not looked through: it may be of any length.
    violations = [*prompt_violations(request, vocab_size)] if fits else []
    violations += option_violations(request, vocab_size, drafters, indexes)
    if violations:
        raise InvalidRequestError(violations)
    if not fits:
        raise PromptTooLongError(max_context - 1, len(request.prompt_ids))
    if request.tokens_to_read > max_context:
        together = f"with the prompt are {request.tokens_to_read}, more than the context of {max_context}"
        raise InvalidRequestError([FieldViolation("resume.token_ids", together)])


def prompt_violations(request: Request, vocab_size: int) -> Iterator[FieldViolation]:
    """What is wrong with the request's id and prompt, whatever its length."""
    if not request.request_id:
        yield FieldViolation("request_id", "must not be empty")
    if not request.prompt_ids:
        yield FieldViolation("prompt", "must hold at least one token")
    problem = TokenIds().problem(request.prompt_ids, vocab_size)
    if problem:
        yield FieldViolation("prompt.token_ids", problem)


def option_violations(
    request: Request, vocab_size: int, drafters: tuple[str, ...], indexes: tuple[str, ...] | None = None
) -> Iterator[FieldViolation]:
    """What is wrong with everything else."""
    yield from _out_of_bounds("", request, vocab_size)
    yield from _out_of_bounds("sampling.", request.sampling, vocab_size)
    yield from _out_of_bounds("stopping.", request.stopping, vocab_size)
    yield from _stopping_misfits(request.stopping)
    yield from _out_of_bounds("output.", request.output, vocab_size)
    yield from _out_of_bounds("speculation.", request.speculation, vocab_size)
    yield from _unknown_drafters(request.speculation, drafters)
    if indexes is not None:
        yield from _unknown_indexes(request.speculation, indexes)
    if request.resume is not None:
        yield from _out_of_bounds("resume.", request.resume, vocab_size)
        yield from _resume_misfits(request, request.resume)
    if request.grammar is not None:
        problem = _grammar_problem(request.grammar)
        if problem:
            yield FieldViolation("grammar", problem)
        if request.healing_prefix:
            yield FieldViolation("healing_prefix", "goes with no grammar, which is about whole tokens; leave one out")


def _out_of_bounds(prefix: str, record: Any, vocab_size: int) -> Iterator[FieldViolation]:
    for each in params_of(type(record)):
        value = getattr(record, each.name)
        if value is None or value is each.default:
            continue
        problem = each.kind.problem(value, vocab_size)
        if problem:
            yield FieldViolation(prefix + each.label, problem)


def _stopping_misfits(s: StoppingParams) -> Iterator[FieldViolation]:
    if s.max_tokens is not None and s.min_tokens > s.max_tokens:
        yield FieldViolation("stopping.min_tokens", "must not exceed max_tokens")
    if s.finish_line and s.time_limit_s is None and s.decode_limit_s is None:
        yield FieldViolation("stopping.finish_line", "needs a time limit; set one, or leave it unset")
    if s.rules is not None:
        yield from _out_of_bounds("stopping.", s.rules, 0)
        if s.rules.lead.strip():
            yield FieldViolation("stopping.lead", "must be white space only")


def _resume_misfits(request: Request, resume: ResumeParams) -> Iterator[FieldViolation]:
    sampling, limit, count = request.sampling, request.stopping.max_tokens, len(resume.token_ids)
    if sampling.n != 1:
        yield FieldViolation("sampling.n", "must be 1 with resume: every sample is resumed by a request of its own")
    if sampling.seed is None and sampling.temperature > 0:
        yield FieldViolation("sampling.seed", "must be given with resume: the seed in force that the stream began with")
    if limit is not None and count > limit:
        yield FieldViolation("resume.token_ids", f"are {count}, more than max_tokens ({limit}), which counts them too")


def check_fingerprint(request: Request, info: EngineInfo) -> None:
    """Refuse to go on with what was begun on other numbers.

    Raises:
        FingerprintMismatchError: another numeric fingerprint than this engine's.
    """
    resume = request.resume
    if resume is not None and resume.numeric_fingerprint != info.numeric_fingerprint:
        raise FingerprintMismatchError.between(resume.numeric_fingerprint, info.numeric_fingerprint)


def _unknown_drafters(s: SpeculationParams, drafters: tuple[str, ...]) -> Iterator[FieldViolation]:
    unknown = sorted(set(s.drafters or ()) - set(drafters))
    if unknown:
        loaded = ", ".join(drafters) or "none"
        yield FieldViolation("speculation.drafters", f"unknown {', '.join(unknown)}; loaded: {loaded}")


def _unknown_indexes(s: SpeculationParams, indexes: tuple[str, ...]) -> Iterator[FieldViolation]:
    unknown = sorted(set(s.indexes or ()) - {*indexes, ""})
    if unknown:
        yield FieldViolation("speculation.indexes", f"no index here is called {', '.join(unknown)}")


def _grammar_problem(grammar: GrammarParams) -> str:
    """What can be said without compiling it; ``GrammarCompiler.compile`` says the rest."""
    if grammar.kind not in list(GrammarKind):
        return f"unknown kind {grammar.kind!r}; choose one of {', '.join(GrammarKind)}"
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return "json_object takes no text; use json_schema for a schema" if grammar.text else ""
    if not encodable(grammar.text):
        return UTF8
    if not grammar.text.strip():
        return f"{grammar.kind.value} needs a text"
    wide = grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE)
    limit = MAX_SCHEMA_BYTES if wide else MAX_GRAMMAR_BYTES
    return f"must not exceed {limit} bytes; simplify it" if len(grammar.text.encode()) > limit else ""
