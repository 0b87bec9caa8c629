"""What a server says, as the types that the engine has for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import model_pb2 as model
from specdec.api.v1 import result_pb2 as result
from specdec.api.v1 import trace_pb2 as trace
from specdec.client.generated import Generated
from specdec.client.generated_sample import GeneratedSample
from specdec.types import (
    Delta,
    DrafterStats,
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

_NUMBERS = dict(result.FinishReason.items())
_REASONS: dict[int, FinishReason] = {
    _NUMBERS[f"FINISH_REASON_{r.name}"]: r for r in FinishReason if f"FINISH_REASON_{r.name}" in _NUMBERS
}
_STEP = tuple(f.name for f in fields(StepTrace) if f.name not in ("drafters", "replay"))
_DRAFTER = tuple(f.name for f in fields(DrafterTrace))


def event_of(
    message: pb.GenerateStreamResponse | completion.CompleteResponse, request_id: str
) -> Started | Delta | Finished | None:
    """An event of a stream, as the engine said it; None for a kind of a later version."""
    which = message.WhichOneof("event")
    if which == "started":
        m = message.started
        return Started(m.request_id, m.seed, m.prompt_tokens, m.cached_tokens, m.queue_ms)
    if which == "delta":
        d = message.delta
        tree = tree_of(d.tree) if d.HasField("tree") else None
        return Delta(request_id, d.index, list(d.token_ids), d.text, logprobs_of(d.logprobs), tree)
    if which == "finished":
        f = message.finished
        metrics, timings = stats_of(f.metrics), timings_of(f.timings)
        return Finished(request_id, f.index, reason_of(f.finish_reason), _stop(f), usage_of(f.usage), metrics, timings)
    return None


def generated_of(message: pb.GenerateResponse) -> Generated:
    """A whole answer."""
    samples = [
        GeneratedSample(
            s.index, list(s.token_ids), s.text, logprobs_of(s.logprobs), reason_of(s.finish_reason), _stop(s),
            usage_of(s.usage), stats_of(s.metrics), timings_of(s.timings),
        )
        for s in message.samples
    ]  # fmt: skip
    return Generated(message.request_id, message.model, message.seed, samples)


def reason_of(number: int) -> FinishReason:
    """Why a sample ended; one of a later version was cut short somehow."""
    return _REASONS.get(number, FinishReason.ABORTED)


def logprobs_of(rows: Iterable[result.TokenLogprobs]) -> list[TokenLogprobs]:
    """One per position."""
    return [TokenLogprobs(p.token_id, p.logprob, [(t.token_id, t.logprob) for t in p.top]) for p in rows]


def tree_of(m: result.StepTree) -> StepTree:
    """What a step verified."""
    nodes = m.nodes
    return StepTree(
        tokens=[n.token_id for n in nodes], parents=[n.parent for n in nodes], chances=[n.chance for n in nodes],
        sources=[list(n.sources) for n in nodes], accepted=list(m.accepted), draft_ms=m.draft_ms, verify_ms=m.verify_ms,
    )  # fmt: skip


def usage_of(m: result.Usage) -> Usage:
    """Token counts."""
    return Usage(**_named(m, tuple(f.name for f in fields(Usage))))


def timings_of(m: result.Timings) -> Timings:
    """Milliseconds."""
    return Timings(**_named(m, tuple(f.name for f in fields(Timings))))


def stats_of(message: result.Metrics) -> SpeculationStats:
    """What speculation did."""
    m = message.speculative_decoding
    return SpeculationStats(
        num_steps=m.num_steps,
        num_spec_steps=m.num_spec_steps,
        num_draft_tokens=m.num_draft_tokens,
        num_accepted_draft_tokens=m.num_accepted_draft_tokens,
        acceptance_histogram=list(m.acceptance_histogram),
        by_drafter={
            name: DrafterStats(part.num_draft_tokens, part.num_accepted_draft_tokens)
            for name, part in m.by_drafter.items()
        },
    )


def info_of(m: model.GetServerInfoResponse) -> EngineInfo:
    """What is served."""
    return EngineInfo(
        target=m.target, draft=m.draft if m.HasField("draft") else None, dtype=m.dtype, kernels=m.kernels,
        numeric_mode=model.NumericMode.Name(m.numeric_mode).removeprefix("NUMERIC_MODE_").lower(),
        max_context=m.max_context, vocab_size=m.vocab_size, kv_tokens=m.kv_tokens, max_batch=m.max_batch,
        drafters=tuple(m.drafters), eos_ids=tuple(m.eos_token_ids), threads=m.threads, version=m.version,
    )  # fmt: skip


def load_of(m: model.GetLoadResponse) -> EngineLoad:
    """How busy it is."""
    return EngineLoad(**_named(m, tuple(f.name for f in fields(EngineLoad))))


def step_of(m: trace.StepTrace) -> StepTrace:
    """One step of the engine."""
    drafters = [DrafterTrace(**_named(drafter, _DRAFTER)) for drafter in m.drafters]
    return StepTrace(**_named(m, _STEP), drafters=drafters)


def _named(message: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def _stop(m: pb.Finished | pb.Sample) -> str | int | None:
    which = m.WhichOneof("matched_stop")
    if which is None:
        return None
    return m.stop_string if which == "stop_string" else m.stop_token_id
