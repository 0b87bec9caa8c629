"""Conversion between the client's types and gRPC messages, both ways."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar, cast

from specdec.api.params import fill_params, fill_values, grammar_message
from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import model_pb2 as model
from specdec.api.v1 import options_pb2 as options
from specdec.api.v1 import result_pb2 as result
from specdec.client.prompt import ChatTurn, CompletionHints, Fim, Generated, GeneratedSample, GenerateOptions, Prompt
from specdec.core.types import (
    Delta,
    DrafterStats,
    EngineInfo,
    Finished,
    FinishReason,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    Started,
    StepTree,
    StoppingParams,
    Timings,
    TokenLogprobs,
    Usage,
)

Message = TypeVar("Message", pb.GenerateRequest, pb.GenerateStreamRequest, completion.CompleteRequest)
Record = TypeVar("Record")


def fill_request(message: Message, prompt: Prompt, asked: GenerateOptions) -> Message:
    """``message`` with all that is asked for, but the timeout, which is the call's; raises TypeError for an option that
    does not exist."""
    if unknown := ", ".join(sorted(asked.keys() - GenerateOptions.__annotations__)):
        raise TypeError(
            f"{unknown}: not among the options {', '.join(GenerateOptions.__annotations__)}; "
            "the fields of parameters go inside, as in stopping=StoppingParams(max_tokens=20)"
        )
    fill_prompt(message, prompt)
    if variables := asked.get("template_variables"):
        if isinstance(message, completion.CompleteRequest) or not message.HasField("chat"):
            raise TypeError("template_variables: need a conversation as the prompt; leave them out for any other")
        message.chat.template_variables = json.dumps(variables)
    message.request_id, message.model = asked.get("request_id", ""), asked.get("model", "")
    fill_params(message.sampling, asked.get("sampling", SamplingParams()))
    stopping = asked.get("stopping", StoppingParams())
    if isinstance(stopping.stop, str):  # each of its letters would be one
        raise TypeError(f"stopping.stop: must be a list of texts, such as [{stopping.stop!r}], not a text")
    message.stopping.SetInParent()
    fill_params(message.stopping, stopping)
    if stopping.rules is not None:
        fill_params(message.stopping, stopping.rules)
    fill_params(message.output, asked.get("output", OutputParams()))
    fill_params(message.speculation, asked.get("speculation", SpeculationParams()))
    fill_values(message, Request, asked)
    message.scheduling.supersedes_key = asked.get("supersedes_key", "")
    prediction = asked.get("prediction", "")
    if prediction is not None and not isinstance(prediction, str):
        _fill_ids(message.prediction.token_ids, prediction, "prediction: must be a text, or token ids")
    elif prediction:
        message.prediction.text = prediction
    if (grammar := asked.get("grammar")) is not None:
        message.grammar.CopyFrom(grammar_message(grammar))
    if (resume := asked.get("resume")) is not None:
        message.resume.SetInParent()
        fill_params(message.resume, resume)
    return message


def completion_message(gap: Fim, hints: CompletionHints, asked: GenerateOptions) -> completion.CompleteRequest:
    """What belongs into a gap; sampling and stopping are the server's where they are not asked for."""
    mode = completion.CompletionOptions.Mode.Value(f"MODE_{hints.mode.upper()}")
    made = completion.CompletionOptions(**asdict(hints) | {"mode": mode})
    message = fill_request(completion.CompleteRequest(completion=made), gap, asked)
    for name in ("sampling", "stopping"):
        if name not in asked:
            message.ClearField(name)
    return message


_PROMPTS = {"text": "a text", "fim": "a gap", "chat": "a conversation", "token_ids": "token ids"}


def fill_prompt(message: Any, prompt: Prompt) -> None:
    """Put ``prompt`` into ``message``; raises TypeError for one of a kind that it has no field for."""
    taken = [name for name in _PROMPTS if name in message.DESCRIPTOR.fields_by_name]
    if isinstance(prompt, Fim) and "fim" in taken:
        message.fim.CopyFrom(options.FimPrompt(**asdict(prompt)))
    elif isinstance(prompt, str) and "text" in taken:
        message.text = prompt
    elif "chat" in taken and isinstance(prompt, Sequence) and prompt and all(isinstance(t, ChatTurn) for t in prompt):
        turns = (turn for turn in prompt if isinstance(turn, ChatTurn))
        message.chat.messages.extend(options.ChatMessage(role=turn.role, content=turn.content) for turn in turns)
    elif "token_ids" in taken:
        _fill_ids(message.token_ids, prompt, "prompt: must be a text, a gap, a conversation, or token ids")
    else:
        raise TypeError(f"prompt: must be {' or '.join(_PROMPTS[name] for name in taken)}")


def _fill_ids(message: options.TokenIds, tokens: Any, allowed: str) -> None:
    """Put token ids into ``message``; raises TypeError that begins with ``allowed`` for what are none."""
    message.SetInParent()
    try:
        if isinstance(tokens, bytes):
            raise TypeError  # a text that was encoded: its bytes are no token ids
        message.ids.extend([operator.index(token) for token in tokens])
    except (TypeError, ValueError):
        raise TypeError(f"{allowed}, all of them integers from 0") from None


_NUMBERS = dict(result.FinishReason.items())
_REASONS: dict[int, FinishReason] = {
    _NUMBERS[name]: reason for reason in FinishReason if (name := f"FINISH_REASON_{reason.name}") in _NUMBERS
}


def event_of(
    message: pb.GenerateStreamResponse | completion.CompleteResponse, request_id: str
) -> Started | Delta | Finished | None:
    """An event of a stream, as the engine said it; None for a kind of a later version."""
    which = message.WhichOneof("event")
    if which == "started":
        return record_of(Started, message.started)
    if which == "delta":
        d = message.delta
        tree = tree_of(d.tree) if d.HasField("tree") else None
        return Delta(request_id, d.index, list(d.token_ids), d.text, logprobs_of(d.logprobs), tree)
    if which == "finished":
        f = message.finished
        usage, metrics, timings = record_of(Usage, f.usage), stats_of(f.metrics), record_of(Timings, f.timings)
        return Finished(request_id, f.index, reason_of(f.finish_reason), _stop(f), usage, metrics, timings)
    return None


def generated_of(message: pb.GenerateResponse) -> Generated:
    """A whole answer."""
    samples = [
        GeneratedSample(
            s.index, list(s.token_ids), s.text, logprobs_of(s.logprobs), reason_of(s.finish_reason), _stop(s),
            record_of(Usage, s.usage), stats_of(s.metrics), record_of(Timings, s.timings),
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
    """Convert the token tree that one step verified."""
    nodes = m.nodes
    return StepTree(
        tokens=[n.token_id for n in nodes], parents=[n.parent for n in nodes], chances=[n.chance for n in nodes],
        sources=[list(n.sources) for n in nodes], accepted=list(m.accepted), draft_ms=m.draft_ms, verify_ms=m.verify_ms,
    )  # fmt: skip


def stats_of(message: result.Metrics) -> SpeculationStats:
    """What speculation did."""
    m = message.speculative_decoding
    by_drafter = {name: record_of(DrafterStats, part) for name, part in m.by_drafter.items()}
    return record_of(SpeculationStats, m, acceptance_histogram=list(m.acceptance_histogram), by_drafter=by_drafter)


def info_of(m: model.GetServerInfoResponse) -> EngineInfo:
    """Convert the server's description of its engine."""
    return record_of(
        EngineInfo, m, draft=m.draft if m.HasField("draft") else None, drafters=tuple(m.drafters),
        numeric_mode=model.NumericMode.Name(m.numeric_mode).removeprefix("NUMERIC_MODE_").lower(),
        eos_ids=tuple(m.eos_token_ids),
    )  # fmt: skip


def record_of(kind: type[Record], message: Any, **other: Any) -> Record:
    """A record of ``other`` and the fields of the same names in ``message``."""
    names = [f.name for f in fields(cast(Any, kind)) if f.name in message.DESCRIPTOR.fields_by_name]
    return kind(**{name: getattr(message, name) for name in names} | other)


def _stop(m: pb.Finished | pb.Sample) -> str | int | None:
    which = m.WhichOneof("matched_stop")
    return None if which is None else getattr(m, which)
