"""The check of a request before it is queued. A refusal names every bad field.

The front end and the engine library call `check_requests`; behind it, a request is trusted. Each parameter's bounds
stand at its field in `specdec.core.types`; this module holds the rules over several fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specdec.core.fields import UTF8, TokenIds, encodable, params_of
from specdec.core.types import (
    EngineInfo,
    GrammarKind,
    GrammarParams,
    Pooling,
    Request,
    ResumeParams,
    SpeculationParams,
    StoppingParams,
    selects,
)
from specdec.errors import (
    FieldViolation,
    FingerprintMismatchError,
    GenerationNotSupportedError,
    PromptTooLongError,
    ViolationCollector,
)

MAX_REQUEST_ID_CHARACTERS = 128
MAX_SCHEMA_BYTES = 1 << 16  # tested with the compiler's stack, see `specdec.grammar.compiler`
MAX_GRAMMAR_BYTES = 1 << 14  # of an expression or of rules, which can take far longer to compile than a schema


def check_requests(
    requests: Sequence[Request],
    info: EngineInfo,
    violations: ViolationCollector | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse ``requests`` that ``info``'s engine cannot serve. They differ only in their ids and prompts.

    ``violations`` holds the violations found before. ``names`` maps the engine's field names to the caller's;
    others stay as they are.

    Raises:
        GenerationNotSupportedError: they generate, and the model was made for embeddings.
        FingerprintMismatchError: they resume a stream of an engine with another numeric fingerprint.
        InvalidRequestError: fields are out of range; each one is listed.
        PromptTooLongError: nothing else is wrong, but a prompt and one new token exceed the context.
    """
    if requests[0].pooling is None and info.pooling in tuple(Pooling):
        raise GenerationNotSupportedError(info.target)
    resume = requests[0].resume
    if resume is not None and resume.numeric_fingerprint != info.numeric_fingerprint:
        raise FingerprintMismatchError.between(resume.numeric_fingerprint, info.numeric_fingerprint)
    collector = ViolationCollector() if violations is None else violations
    found = [*_option_violations(requests[0], info)]
    for request in requests:
        found += _prompt_violations(request, info)
    known = {violation.field for violation in collector.found}
    for violation in found:
        name = names.get(violation.field, violation.field)
        if name not in known:
            collector.found.append(FieldViolation(name, violation.description))
            known.add(name)
    collector.raise_if_any()
    longest = max(len(request.prompt_ids) for request in requests)
    if longest >= info.max_context:
        raise PromptTooLongError(info.max_context - 1, longest)


def _prompt_violations(request: Request, info: EngineInfo) -> Iterator[FieldViolation]:
    n = len(request.request_id)
    if n > MAX_REQUEST_ID_CHARACTERS:
        yield FieldViolation("request_id", f"at most {MAX_REQUEST_ID_CHARACTERS} characters, got {n}")
    if not request.prompt_ids:
        yield FieldViolation("prompt", "must hold at least one token")
    if len(request.prompt_ids) >= info.max_context:
        return  # a prompt that is too long is refused before its ids are checked
    problem = TokenIds(info.max_context).problem(request.prompt_ids, info.vocab_size)
    if problem:
        yield FieldViolation("prompt.token_ids", problem)
    if request.tokens_to_read > info.max_context:
        together = f"with the prompt are {request.tokens_to_read}, more than the context of {info.max_context}"
        yield FieldViolation("resume.token_ids", together)


def _option_violations(request: Request, info: EngineInfo) -> Iterator[FieldViolation]:
    vocab_size = info.vocab_size
    yield from out_of_bounds("", request, vocab_size)
    yield from out_of_bounds("sampling.", request.sampling, vocab_size)
    yield from out_of_bounds("stopping.", request.stopping, vocab_size)
    yield from _stopping_misfits(request.stopping)
    yield from out_of_bounds("output.", request.output, vocab_size)
    yield from out_of_bounds("speculation.", request.speculation, vocab_size)
    yield from _unknown_drafters(request.speculation, info.drafters)
    yield from _unknown_indexes(request.speculation, info.indexes)
    if request.resume is not None:
        yield from out_of_bounds("resume.", request.resume, vocab_size)
        yield from _resume_misfits(request, request.resume)
    if request.grammar is not None:
        problem = _grammar_problem(request.grammar)
        if problem:
            yield FieldViolation("grammar", problem)
        if request.healing_prefix:
            yield FieldViolation(
                "healing_prefix", "cannot be combined with a grammar, which constrains whole tokens; leave one out"
            )


def out_of_bounds(prefix: str, record: Any, vocab_size: int) -> Iterator[FieldViolation]:
    """The fields of ``record`` that its class's parameters do not allow, with ``prefix`` before their names."""
    for each in params_of(record.__class__):
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
        yield from out_of_bounds("stopping.", s.rules, 0)
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


def _unknown_drafters(s: SpeculationParams, drafters: tuple[str, ...]) -> Iterator[FieldViolation]:
    unknown = sorted(name for name in s.drafters or () if not any(selects((name,), loaded) for loaded in drafters))
    if unknown:
        loaded = ", ".join(drafters) or "none"
        yield FieldViolation("speculation.drafters", f"unknown {', '.join(unknown)}; loaded: {loaded}")


def _unknown_indexes(s: SpeculationParams, indexes: tuple[str, ...]) -> Iterator[FieldViolation]:
    unknown = sorted(set(s.indexes or ()) - {*indexes, ""})
    if unknown:
        yield FieldViolation("speculation.indexes", f"no index is named {', '.join(unknown)}; see engine.indexes")


def _grammar_problem(grammar: GrammarParams) -> str:
    """Faults that show without compiling it; `GrammarCompiler.compile` finds the others."""
    if grammar.kind not in list(GrammarKind):
        return f"unknown kind {grammar.kind!r}; choose one of {', '.join(GrammarKind)}"
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return "json_object takes no text; use json_schema for a schema" if grammar.text else ""
    if not encodable(grammar.text):
        return UTF8
    if not grammar.text.strip():
        return f"{grammar.kind.value} needs a text"
    wide = grammar.of_schemas or grammar.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE)
    limit = MAX_SCHEMA_BYTES if wide else MAX_GRAMMAR_BYTES
    return f"must not exceed {limit} bytes; simplify it" if len(grammar.text.encode()) > limit else ""
