"""Between our types and proto messages, both ways; nothing here can refuse anything."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import model_pb2 as model
from specdec.api.v1 import options_pb2 as options
from specdec.api.v1 import result_pb2 as result
from specdec.types import (
    Delta,
    EngineInfo,
    EngineLoad,
    Finished,
    FinishReason,
    Request,
    SpeculationMode,
    SpeculationStats,
    Started,
    Timings,
    TokenLogprobs,
    Usage,
)

# A passed deadline is a status, not a finish reason.
_REASONS = {
    FinishReason.EOS: result.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: result.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: result.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: result.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: result.FINISH_REASON_ABORTED,
}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}
_MODES = {
    SpeculationMode.AUTO: options.SpeculationOptions.MODE_AUTO,
    SpeculationMode.OFF: options.SpeculationOptions.MODE_OFF,
    SpeculationMode.ON: options.SpeculationOptions.MODE_ON,
}
_NUMERIC_MODES = {"bitwise": model.NUMERIC_MODE_BITWISE, "numerical": model.NUMERIC_MODE_NUMERICAL}


def started_message(event: Started, model_name: str) -> pb.Started:
    """The stream's first message."""
    return pb.Started(
        request_id=event.request_id, model=model_name, seed=event.seed, prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens, queue_ms=event.queue_ms,
    )  # fmt: skip


def delta_message(event: Delta) -> pb.Delta:
    """New tokens."""
    return pb.Delta(
        index=event.index, token_ids=event.token_ids, text=event.text, logprobs=logprobs_messages(event.logprobs)
    )


def finished_message(event: Finished) -> pb.Finished:
    """A sample's end."""
    message = pb.Finished(
        index=event.index,
        finish_reason=_REASONS[event.reason],
        usage=_usage(event.usage),
        speculation=_stats(event.stats),
        timings=timings_message(event.timings),
    )
    _set_stop(message, event.matched_stop)
    return message


def sample_message(index: int, deltas: list[Delta], end: Finished) -> pb.Sample:
    """A whole sample."""
    message = pb.Sample(
        index=index,
        token_ids=[t for d in deltas for t in d.token_ids],
        text="".join(d.text for d in deltas),
        logprobs=logprobs_messages(p for d in deltas for p in d.logprobs),
        finish_reason=_REASONS[end.reason],
        usage=_usage(end.usage),
        speculation=_stats(end.stats),
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


def timings_message(timings: Timings) -> result.Timings:
    """Milliseconds."""
    return result.Timings(
        queue_ms=timings.queue_ms, prefill_ms=timings.prefill_ms, decode_ms=timings.decode_ms,
        draft_ms=timings.draft_ms, verify_ms=timings.verify_ms,
    )  # fmt: skip


def info_message(info: EngineInfo, restarts: int) -> model.GetServerInfoResponse:
    """Facts about the engine."""
    return model.GetServerInfoResponse(
        version=info.version, target=info.target, draft=info.draft, dtype=info.dtype, kernels=info.kernels,
        numeric_mode=_NUMERIC_MODES.get(info.numeric_mode, model.NUMERIC_MODE_UNSPECIFIED),
        max_context=info.max_context, vocab_size=info.vocab_size, kv_tokens=info.kv_tokens, max_batch=info.max_batch,
        drafters=info.drafters, eos_token_ids=info.eos_ids, threads=info.threads, engine_restarts=restarts,
    )  # fmt: skip


def load_message(load: EngineLoad) -> model.GetLoadResponse:
    """How busy the engine is."""
    return model.GetLoadResponse(
        running_requests=load.running_requests, waiting_requests=load.waiting_requests, free_pages=load.free_pages,
        total_pages=load.total_pages, tokens_per_second=load.tokens_per_second,
        prefix_hit_tokens=load.prefix_hit_tokens, prompt_tokens=load.prompt_tokens,
    )  # fmt: skip


def event_from_message(message: pb.GenerateStreamResponse, request_id: str) -> Started | Delta | Finished | None:
    """What a client reads off the stream, as the engine said it; None for a kind of a later version."""
    which = message.WhichOneof("event")
    if which == "started":
        m = message.started
        return Started(m.request_id, m.seed, m.prompt_tokens, m.cached_tokens, m.queue_ms)
    if which == "delta":
        d = message.delta
        rows = [TokenLogprobs(p.token_id, p.logprob, [(t.token_id, t.logprob) for t in p.top]) for p in d.logprobs]
        return Delta(request_id, d.index, list(d.token_ids), d.text, rows)
    if which == "finished":
        return _finished(message.finished, request_id)
    return None


def stream_request(request: Request) -> pb.GenerateStreamRequest:
    """``request`` as a client sends it, all but the prompt and the id."""
    s, stop, out, spec = request.sampling, request.stopping, request.output, request.speculation
    return pb.GenerateStreamRequest(
        sampling=options.SamplingOptions(
            temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p,
            repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty, logit_bias=dict(s.logit_bias),
            allowed_token_ids=s.allowed_token_ids, seed=s.seed, n=s.n,
        ),
        stopping=options.StoppingOptions(
            max_tokens=stop.max_tokens, min_tokens=stop.min_tokens, stop=stop.stop,
            stop_token_ids=stop.stop_token_ids, include_stop=stop.include_stop, ignore_eos=stop.ignore_eos,
        ),
        output=options.OutputOptions(
            logprobs=out.logprobs, text=out.text, skip_special_tokens=out.skip_special_tokens
        ),
        speculation=options.SpeculationOptions(
            mode=_MODES[spec.mode], drafters=spec.drafters or (), max_nodes=spec.max_nodes,
            max_depth=spec.max_depth, width=spec.width,
        ),
        cache=options.CacheOptions(salt=request.cache_salt),
        scheduling=options.SchedulingOptions(priority=request.priority),
    )  # fmt: skip


def _finished(m: pb.Finished, request_id: str) -> Finished:
    stop = m.WhichOneof("matched_stop")
    matched: str | int | None = None
    if stop is not None:
        matched = m.stop_string if stop == "stop_string" else m.stop_token_id
    u, s, t = m.usage, m.speculation, m.timings
    return Finished(
        request_id,
        m.index,
        _REASONS_BACK[m.finish_reason],
        matched,
        Usage(u.prompt_tokens, u.cached_tokens, u.output_tokens, u.preemptions),
        SpeculationStats(
            s.num_steps, s.num_draft_tokens, s.num_accepted_tokens, list(s.acceptance_histogram),
            {name: (d.proposed_tokens, d.accepted_tokens) for name, d in s.by_drafter.items()},
        ),
        Timings(t.queue_ms, t.prefill_ms, t.decode_ms, t.draft_ms, t.verify_ms),
    )  # fmt: skip


def _usage(usage: Usage) -> result.Usage:
    return result.Usage(
        prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, output_tokens=usage.output_tokens,
        preemptions=usage.preemptions,
    )  # fmt: skip


def _stats(stats: SpeculationStats) -> result.SpeculationStats:
    return result.SpeculationStats(
        num_steps=stats.num_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        acceptance_histogram=stats.acceptance_histogram,
        by_drafter={
            name: result.DrafterStats(proposed_tokens=proposed, accepted_tokens=accepted)
            for name, (proposed, accepted) in stats.by_drafter.items()
        },
    )


def _set_stop(message: pb.Finished | pb.Sample, matched: str | int | None) -> None:
    if isinstance(matched, str):
        message.stop_string = matched
    elif matched is not None:
        message.stop_token_id = matched
