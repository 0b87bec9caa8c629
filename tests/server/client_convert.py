"""A client's side of the conversion: requests to messages, messages to events."""

from __future__ import annotations

from server.grpc.messages import REASONS
from server.grpc.request_reader import grammar_message
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.api.v1 import result_pb2 as result
from specdec.client.messages import tree_of
from specdec.types import (
    Delta,
    DrafterStats,
    Finished,
    FinishReason,
    Request,
    SpeculationMode,
    SpeculationStats,
    Started,
    StoppingParams,
    Timings,
    TokenLogprobs,
    Usage,
)

_REASONS_BACK: dict[int, FinishReason] = {number: reason for reason, number in REASONS.items()}
_MODES = {
    SpeculationMode.AUTO: options.SpeculationOptions.MODE_AUTO,
    SpeculationMode.OFF: options.SpeculationOptions.MODE_OFF,
    SpeculationMode.ON: options.SpeculationOptions.MODE_ON,
}


def event_from_message(message: pb.GenerateStreamResponse, request_id: str) -> Started | Delta | Finished | None:
    """What a client reads off the stream, as the engine said it; None for a kind of a later version."""
    which = message.WhichOneof("event")
    if which == "started":
        m = message.started
        return Started(m.request_id, m.seed, m.prompt_tokens, m.cached_tokens, m.queue_ms)
    if which == "delta":
        d = message.delta
        rows = [TokenLogprobs(p.token_id, p.logprob, [(t.token_id, t.logprob) for t in p.top]) for p in d.logprobs]
        tree = tree_of(d.tree) if d.HasField("tree") else None
        return Delta(request_id, d.index, list(d.token_ids), d.text, rows, tree)
    if which == "finished":
        return _finished(message.finished, request_id)
    return None


def stream_request(request: Request) -> pb.GenerateStreamRequest:
    """``request`` as a client sends it, all but the prompt and the id."""
    ids, grammar = request.prediction_ids, request.grammar
    s, out, spec = request.sampling, request.output, request.speculation
    return pb.GenerateStreamRequest(
        sampling=options.SamplingOptions(
            temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p,
            repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty, logit_bias=dict(s.logit_bias),
            allowed_token_ids=s.allowed_token_ids, seed=s.seed, n=s.n,
        ),
        stopping=stopping_message(request.stopping),
        output=options.OutputOptions(
            logprobs=out.logprobs, text=out.text, skip_special_tokens=out.skip_special_tokens, trees=out.trees
        ),
        speculation=options.SpeculationOptions(
            mode=_MODES[spec.mode], drafters=spec.drafters or (), max_nodes=spec.max_nodes,
            max_depth=spec.max_depth, width=spec.width,
        ),
        cache=options.CacheOptions(salt=request.cache_salt),
        scheduling=options.SchedulingOptions(priority=request.priority, target_tpot_ms=request.target_tpot_ms),
        prediction=options.PredictionOptions(token_ids=options.TokenIds(ids=ids)) if ids else None,
        session=options.SessionOptions(id=request.session),
        grammar=None if grammar is None else grammar_message(grammar),
    )  # fmt: skip


def stopping_message(stop: StoppingParams) -> options.StoppingOptions:
    """``stop`` as a client sends it."""
    message = options.StoppingOptions(
        max_tokens=stop.max_tokens, min_tokens=stop.min_tokens, stop=stop.stop, stop_token_ids=stop.stop_token_ids,
        include_stop=stop.include_stop, ignore_eos=stop.ignore_eos, time_limit_ms=_ms(stop.time_limit_s),
        decode_time_limit_ms=_ms(stop.decode_limit_s), finish_line=stop.finish_line,
    )  # fmt: skip
    rules = stop.rules
    if rules is not None:
        brackets = None if rules.closers is None else options.BracketOptions(closers=rules.closers, quote=rules.quote)
        message.MergeFrom(
            options.StoppingOptions(
                max_lines=rules.max_lines, min_indent=rules.min_indent, blank_line=rules.blank_line, brackets=brackets,
                suffix=rules.suffix, lead=rules.lead,
            )
        )  # fmt: skip
    return message


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _finished(m: pb.Finished, request_id: str) -> Finished:
    stop = m.WhichOneof("matched_stop")
    matched: str | int | None = None
    if stop is not None:
        matched = m.stop_string if stop == "stop_string" else m.stop_token_id
    u, t = m.usage, m.timings
    return Finished(
        request_id,
        m.index,
        _REASONS_BACK[m.finish_reason],
        matched,
        Usage(
            u.prompt_tokens, u.cached_tokens, u.output_tokens, u.preemptions,
            u.accepted_prediction_tokens, u.rejected_prediction_tokens,
        ),
        _stats(m.metrics.speculative_decoding),
        Timings(t.queue_ms, t.prefill_ms, t.decode_ms, t.draft_ms, t.verify_ms),
    )  # fmt: skip


def _stats(m: result.SpeculativeDecodingMetrics) -> SpeculationStats:
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
