"""Requests as messages, every field written out: the table of parameters is compared with it."""

from __future__ import annotations

from specdec.api.params import grammar_message
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.core.types import Request, SpeculationMode, StoppingParams

_MODES = {
    SpeculationMode.AUTO: options.SpeculationOptions.MODE_AUTO,
    SpeculationMode.OFF: options.SpeculationOptions.MODE_OFF,
    SpeculationMode.ON: options.SpeculationOptions.MODE_ON,
}


def stream_request(request: Request) -> pb.GenerateStreamRequest:
    """``request`` as a client sends it, all but the prompt and the id."""
    ids, grammar, resume = request.prediction_ids, request.grammar, request.resume
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
        resume=None if resume is None else options.ResumeOptions(
            token_ids=resume.token_ids, text_characters=resume.text_characters,
            numeric_fingerprint=resume.numeric_fingerprint,
        ),
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
