"""Our types as proto messages; nothing here can refuse anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from specdec.api.v1 import generation_pb2, trace_pb2
from specdec.api.v1 import model_pb2 as model
from specdec.api.v1 import result_pb2 as result
from specdec.core.types import (
    Delta,
    DrafterTrace,
    EngineInfo,
    EngineLoad,
    Finished,
    FinishReason,
    SpeculationStats,
    Started,
    StepTrace,
    StepTree,
    Timings,
    TokenLogprobs,
    Usage,
)

# A passed deadline is a status, not a finish reason.
REASONS = {
    FinishReason.EOS: result.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: result.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: result.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: result.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: result.FINISH_REASON_ABORTED,
    FinishReason.LINES: result.FINISH_REASON_LINES,
    FinishReason.INDENT: result.FINISH_REASON_INDENT,
    FinishReason.BLANK_LINE: result.FINISH_REASON_BLANK_LINE,
    FinishReason.BRACKET: result.FINISH_REASON_BRACKET,
    FinishReason.SUFFIX: result.FINISH_REASON_SUFFIX,
    FinishReason.TIME_LIMIT: result.FINISH_REASON_TIME_LIMIT,
}
_NUMERIC_MODES = {"bitwise": model.NUMERIC_MODE_BITWISE, "numerical": model.NUMERIC_MODE_NUMERICAL}


def started_message(event: Started, model_name: str, arm: str = "") -> generation_pb2.Started:
    """The stream's first message. arm: as `Started.arm` has it."""
    return generation_pb2.Started(
        request_id=event.request_id, model=model_name, seed=event.seed, prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens, queue_ms=event.queue_ms, arm=arm,
        numeric_fingerprint=event.numeric_fingerprint, resumed_tokens=event.resumed_tokens,
        prompt_digest=event.prompt_digest,
    )  # fmt: skip


def delta_message(event: Delta) -> generation_pb2.Delta:
    """New tokens."""
    return generation_pb2.Delta(
        index=event.index, token_ids=event.token_ids, text=event.text, logprobs=logprobs_messages(event.logprobs),
        tree=None if event.tree is None else tree_message(event.tree),
    )  # fmt: skip


def finished_message(event: Finished) -> generation_pb2.Finished:
    """A sample's end."""
    message = generation_pb2.Finished(
        index=event.index,
        finish_reason=REASONS[event.reason],
        usage=usage_message(event.usage),
        metrics=metrics_message(event.stats),
        timings=timings_message(event.timings),
    )
    _set_stop(message, event.matched_stop)
    return message


def sample_message(index: int, deltas: list[Delta], end: Finished) -> generation_pb2.Sample:
    """A whole sample."""
    message = generation_pb2.Sample(
        index=index,
        token_ids=[t for d in deltas for t in d.token_ids],
        text="".join(d.text for d in deltas),
        logprobs=logprobs_messages(p for d in deltas for p in d.logprobs),
        finish_reason=REASONS[end.reason],
        usage=usage_message(end.usage),
        metrics=metrics_message(end.stats),
        timings=timings_message(end.timings),
    )
    _set_stop(message, end.matched_stop)
    return message


def logprobs_messages(rows: Iterable[TokenLogprobs]) -> list[result.TokenLogprobs]:
    """One message per position."""
    return [
        result.TokenLogprobs(
            token_id=row.token_id,
            logprob=row.logprob,
            top=[result.TopLogprob(token_id=t, logprob=p) for t, p in row.top],
        )
        for row in rows
    ]


def tree_message(tree: StepTree) -> result.StepTree:
    """What a step verified."""
    rows = zip(tree.tokens, tree.parents, tree.chances, tree.sources, strict=True)
    nodes = [result.StepTreeNode(token_id=t, parent=p, chance=c, sources=s) for t, p, c, s in rows]
    return result.StepTree(
        nodes=nodes, accepted=tree.accepted, draft_ms=tree.draft_ms, verify_ms=tree.verify_ms
    )  # fmt: skip


def timings_message(timings: Timings) -> result.Timings:
    """Milliseconds."""
    return result.Timings(**_named_fields(timings, _TIMINGS))


def metrics_message(stats: SpeculationStats) -> result.Metrics:
    """What speculation did, in the shape of vLLM's answers."""
    return result.Metrics(
        speculative_decoding=result.SpeculativeDecodingMetrics(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=stats.acceptance_histogram,
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            num_steps=stats.num_steps,
            by_drafter={
                name: result.DrafterMetrics(
                    num_draft_tokens=part.num_draft_tokens,
                    num_accepted_draft_tokens=part.num_accepted_draft_tokens,
                    draft_acceptance_rate=part.draft_acceptance_rate,
                )
                for name, part in stats.by_drafter.items()
            },
        )
    )


def info_message(info: EngineInfo, restarts: int) -> model.GetServerInfoResponse:
    """Facts about the engine."""
    return model.GetServerInfoResponse(
        version=info.version, target=info.target, draft=info.draft, dtype=info.dtype, kernels=info.kernels,
        numeric_mode=_NUMERIC_MODES.get(info.numeric_mode, model.NUMERIC_MODE_UNSPECIFIED),
        max_context=info.max_context, vocab_size=info.vocab_size, kv_tokens=info.kv_tokens, max_batch=info.max_batch,
        drafters=info.drafters, eos_token_ids=info.eos_ids, threads=info.threads, engine_restarts=restarts, tp=info.tp,
        kv_dtype=info.kv_dtype, weight_bytes=info.weight_bytes, memory_bytes=info.memory_bytes,
        numeric_fingerprint=info.numeric_fingerprint,
    )  # fmt: skip


def load_message(load: EngineLoad) -> model.GetLoadResponse:
    """How busy the engine is."""
    return model.GetLoadResponse(**_named_fields(load, _LOAD))


def usage_message(usage: Usage) -> result.Usage:
    """Token counts."""
    return result.Usage(**_named_fields(usage, _USAGE))


def _set_stop(message: generation_pb2.Finished | generation_pb2.Sample, matched: str | int | None) -> None:
    if isinstance(matched, str):
        message.stop_string = matched
    elif matched is not None:
        message.stop_token_id = matched


_USAGE, _TIMINGS, _LOAD = (tuple(f.name for f in fields(kind)) for kind in (Usage, Timings, EngineLoad))
_STEP_FIELDS = tuple(f.name for f in fields(StepTrace) if f.name not in ("drafters", "replay"))
_DRAFTER_FIELDS = tuple(f.name for f in fields(DrafterTrace))


def trace_message(step: StepTrace) -> trace_pb2.StepTrace:
    """``step``, without what replay needs."""
    return trace_pb2.StepTrace(
        **_named_fields(step, _STEP_FIELDS),
        drafters=[trace_pb2.DrafterTrace(**_named_fields(d, _DRAFTER_FIELDS)) for d in step.drafters],
    )


def _named_fields(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}
