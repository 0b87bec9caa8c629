"""Requests, events and facts as msgpack-able tuples and back. Positional, so both ends must be of one version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from specdec.types import (
    Delta,
    DrafterStats,
    DrafterTrace,
    EngineInfo,
    EngineLoad,
    Failed,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationStats,
    Started,
    StepTrace,
    StepTree,
    StoppingParams,
    TextRules,
    Timings,
    TokenLogprobs,
    Usage,
)

_STARTED, _DELTA, _FINISHED, _FAILED = range(4)
_PLAIN: dict[Any, type] = {"int": int, "float": float, "str": str}
# Each record of a request or an event is read here, and asking a class for its fields takes longer than reading them.
_READERS: dict[type, attrgetter[tuple[Any, ...]]] = {
    kind: attrgetter(*(field.name for field in fields(kind)))
    for kind in (
        SamplingParams, StoppingParams, TextRules, OutputParams, SpeculationParams, GrammarParams, Started, Failed,
        Usage, SpeculationStats, DrafterStats, Timings, StepTree, EngineInfo, EngineLoad,
    )
}  # fmt: skip


def pack_request(request: Request) -> tuple[Any, ...]:
    """``request`` as nested tuples of plain values."""
    return (
        request.request_id,
        request.prompt_ids,
        _values(request.sampling),
        _stopping_values(request.stopping),
        _values(request.output),
        _values(request.speculation),
        request.priority,
        request.deadline_s,
        request.cache_salt,
        request.prediction_ids,
        request.session,
        request.target_tpot_ms,
        None if request.grammar is None else _values(request.grammar),
        request.healed,
    )


def unpack_request(parts: Sequence[Any]) -> Request:
    """The inverse of `pack_request`, after msgpack made lists of the tuples."""
    request_id, prompt_ids, sampling, stopping, output, speculation, priority, deadline_s, salt, *more = parts
    prediction, session, target_tpot_ms, grammar, healed = more
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        sampling=_sampling(sampling),
        stopping=_stopping(stopping),
        output=OutputParams(*output),
        speculation=_speculation(speculation),
        priority=priority,
        deadline_s=deadline_s,
        cache_salt=salt,
        prediction_ids=tuple(prediction),
        session=session,
        target_tpot_ms=target_tpot_ms,
        grammar=None if grammar is None else GrammarParams(GrammarKind(grammar[0]), grammar[1]),
        healed=healed,
    )


def pack_event(event: RequestEvent) -> tuple[Any, ...]:
    """``event`` as a tuple that begins with its kind and request id."""
    match event:
        case Delta(request_id, index, token_ids, text, logprobs, tree):
            rows = [(p.token_id, p.logprob, p.top) for p in logprobs]
            return (_DELTA, request_id, index, token_ids, text, rows, None if tree is None else _values(tree))
        case Started():
            return (_STARTED, *_values(event))
        case Finished(request_id, index, reason, matched_stop, usage, stats, timings):
            by_drafter = {name: _values(part) for name, part in stats.by_drafter.items()}
            figures = (_values(usage), (*_values(stats)[:-1], by_drafter), _values(timings))
            return (_FINISHED, request_id, index, reason.value, matched_stop, *figures)
        case Failed():
            return (_FAILED, *_values(event))


def unpack_event(parts: Sequence[Any]) -> RequestEvent:
    """The inverse of `pack_event`.

    Raises:
        ValueError: the kind is none of ours.
    """
    kind, *rest = parts
    if kind == _DELTA:
        request_id, index, token_ids, text, rows, tree = rest
        logprobs = [TokenLogprobs(t, p, [(i, q) for i, q in top]) for t, p, top in rows]
        return Delta(request_id, index, token_ids, text, logprobs, None if tree is None else StepTree(*tree))
    if kind == _STARTED:
        return Started(*rest)
    if kind == _FINISHED:
        request_id, index, reason, matched, usage, stats, timings = rest
        return Finished(
            request_id, index, FinishReason(reason), matched, Usage(*usage), _stats(stats), Timings(*timings)
        )
    if kind == _FAILED:
        return Failed(*rest)
    raise ValueError(f"unknown kind of event {kind!r}")


def pack_info(info: EngineInfo) -> tuple[Any, ...]:
    """``info`` as plain values."""
    return _values(info)


def unpack_info(parts: Sequence[Any]) -> EngineInfo:
    """The inverse of `pack_info`."""
    return EngineInfo(*_frozen(parts))


def pack_load(load: EngineLoad) -> tuple[Any, ...]:
    """``load`` as plain values."""
    return _values(load)


def unpack_load(parts: Sequence[Any]) -> EngineLoad:
    """The inverse of `pack_load`."""
    return EngineLoad(*parts)


def pack_trace(step: StepTrace) -> tuple[Any, ...]:
    """``step`` as nested tuples of plain values, without what replay needs."""
    return (*_plain_values(step), [_plain_values(part) for part in step.drafters])


def unpack_trace(parts: Sequence[Any]) -> StepTrace:
    """The inverse of `pack_trace`."""
    *scalars, drafters = parts
    return StepTrace(*[*scalars, [DrafterTrace(*part) for part in drafters]])


def _plain_values(record: StepTrace | DrafterTrace) -> tuple[Any, ...]:
    """The scalar fields. What the controller computes in numpy is no number to msgpack, so each is converted."""
    return tuple(_PLAIN[f.type](getattr(record, f.name)) for f in fields(record) if f.type in _PLAIN)


def _values(record: Any) -> tuple[Any, ...]:
    return _READERS[type(record)](record)


def _frozen(values: Sequence[Any]) -> tuple[Any, ...]:
    """Lists back to the tuples they were, one level deep."""
    return tuple(tuple(v) if isinstance(v, list) else v for v in values)


def _sampling(values: Sequence[Any]) -> SamplingParams:
    *scalars, bias, allowed, seed, n = values
    return SamplingParams(*[*scalars, tuple((t, b) for t, b in bias), tuple(allowed), seed, n])


def _stopping_values(stopping: StoppingParams) -> tuple[Any, ...]:
    return tuple(_values(v) if isinstance(v, TextRules) else v for v in _values(stopping))


def _stopping(values: Sequence[Any]) -> StoppingParams:
    *own, rules, time_limit_s, decode_limit_s, finish_line = _frozen(values)
    made = None if rules is None else TextRules(*rules)
    return StoppingParams(*[*own, made, time_limit_s, decode_limit_s, finish_line])


def _speculation(values: Sequence[Any]) -> SpeculationParams:
    mode, *rest = _frozen(values)
    return SpeculationParams(SpeculationMode(mode), *rest)


def _stats(values: Sequence[Any]) -> SpeculationStats:
    *scalars, by_drafter = values
    return SpeculationStats(*[*scalars, {name: DrafterStats(*pair) for name, pair in by_drafter.items()}])
