"""The engine's types as proto messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

from server.observe.records import current_arm
from specdec.api.v1 import generation_pb2
from specdec.api.v1 import model_pb2 as model
from specdec.api.v1 import result_pb2 as result
from specdec.core.types import (
    Delta,
    EngineInfo,
    Finished,
    FinishReason,
    RequestEvent,
    ServerLoad,
    SpeculationStats,
    Started,
    StepTree,
    Timings,
    TokenLogprobs,
)

Answer = TypeVar("Answer")
# A passed deadline is a status, not a finish reason.
REASONS: dict[FinishReason, result.FinishReason.ValueType] = {
    reason: result.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    for reason in FinishReason
    if reason is not FinishReason.DEADLINE
}
_NUMERIC_MODES = {"bitwise": model.NUMERIC_MODE_BITWISE, "numerical": model.NUMERIC_MODE_NUMERICAL}


def event_message(kind: Callable[..., Answer], event: RequestEvent, model_name: str) -> Answer:
    """``event`` as a message of a stream, which is a ``kind``."""
    if isinstance(event, Delta):
        delta = generation_pb2.Delta(
            index=event.index, token_ids=event.token_ids, text=event.text, logprobs=_logprobs_messages(event.logprobs),
            tree=None if event.tree is None else _tree_message(event.tree),
        )  # fmt: skip
        return kind(delta=delta)
    if isinstance(event, Started):
        return kind(started=generation_pb2.Started(model=model_name, arm=current_arm(), **_named_fields(event)))
    assert isinstance(event, Finished)  # `Failed` is raised by the stream
    return kind(finished=generation_pb2.Finished(**_end_fields(event)))


def sample_message(deltas: list[Delta], end: Finished) -> generation_pb2.Sample:
    return generation_pb2.Sample(
        token_ids=[t for d in deltas for t in d.token_ids],
        text="".join(d.text for d in deltas),
        logprobs=_logprobs_messages(p for d in deltas for p in d.logprobs),
        **_end_fields(end),
    )


def _end_fields(end: Finished) -> dict[str, Any]:
    """Return what `Finished` and `Sample` have in common."""
    found: dict[str, Any] = {"index": end.index, "finish_reason": REASONS[end.reason], **figures(end)}
    if end.matched_stop is not None:
        found["stop_string" if isinstance(end.matched_stop, str) else "stop_token_id"] = end.matched_stop
    return found


def figures(end: Finished) -> dict[str, Any]:
    """Return the fields of messages with the figures of a sample."""
    usage = result.Usage(**_named_fields(end.usage))
    return {"usage": usage, "metrics": _metrics_message(end.stats), "timings": timings_message(end.timings)}


def _logprobs_messages(rows: Iterable[TokenLogprobs]) -> list[result.TokenLogprobs]:
    return [
        result.TokenLogprobs(
            token_id=row.token_id,
            logprob=row.logprob,
            top=[result.TopLogprob(token_id=t, logprob=p) for t, p in row.top],
        )
        for row in rows
    ]


def _tree_message(tree: StepTree) -> result.StepTree:
    rows = zip(tree.tokens, tree.parents, tree.chances, tree.sources, strict=True)
    nodes = [result.StepTreeNode(token_id=t, parent=p, chance=c, sources=s) for t, p, c, s in rows]
    return result.StepTree(nodes=nodes, accepted=tree.accepted, draft_ms=tree.draft_ms, verify_ms=tree.verify_ms)


def timings_message(timings: Timings) -> result.Timings:
    return result.Timings(**_named_fields(timings))


def _metrics_message(stats: SpeculationStats) -> result.Metrics:
    return result.Metrics(
        speculative_decoding=result.SpeculativeDecodingMetrics(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            by_drafter={
                name: result.DrafterMetrics(
                    draft_acceptance_rate=part.draft_acceptance_rate,
                    **_named_fields(part, "proposed_at", "accepted_at"),
                )
                for name, part in stats.by_drafter.items()
            },
            **_named_fields(stats, "by_drafter"),
        )
    )


def info_message(info: EngineInfo, restarts: int) -> model.GetServerInfoResponse:
    return model.GetServerInfoResponse(
        numeric_mode=_NUMERIC_MODES.get(info.numeric_mode, model.NUMERIC_MODE_UNSPECIFIED),
        eos_token_ids=info.eos_ids, engine_restarts=restarts,
        **_named_fields(info, "numeric_mode", "eos_ids", "indexes", "head", "head_acceptance"),
    )  # fmt: skip


def load_message(load: ServerLoad) -> model.GetLoadResponse:
    # The engine's load has further fields.
    return model.GetLoadResponse(**{field.name: getattr(load, field.name) for field in fields(ServerLoad)})


def _named_fields(record: Any, *others: str) -> dict[str, Any]:
    """Return the fields that the message has by the same names. others: those that it has otherwise, or not."""
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name not in others}
