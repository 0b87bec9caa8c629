"""Requests off the wire: proto messages to a validated `Request`."""

from __future__ import annotations

import uuid
from typing import Any

from server.frontend import Frontend
from server.grpc.grammar_convert import read_grammar
from server.grpc.validation import validate
from server.request_errors import UnknownModelError
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.errors import FieldViolation, InvalidRequestError, ViolationCollector
from specdec.types import (
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)

GenerateMessage = pb.GenerateRequest | pb.GenerateStreamRequest
PromptMessage = pb.GenerateRequest | pb.GenerateStreamRequest | pb.PrefillRequest

_MODES = {
    options.SpeculationOptions.MODE_UNSPECIFIED: SpeculationMode.AUTO,
    options.SpeculationOptions.MODE_AUTO: SpeculationMode.AUTO,
    options.SpeculationOptions.MODE_OFF: SpeculationMode.OFF,
    options.SpeculationOptions.MODE_ON: SpeculationMode.ON,
}


async def read_generate(message: GenerateMessage, frontend: Frontend) -> Request:
    """The request ``message`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    seen = ViolationCollector()
    scheduling = message.scheduling
    request = Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=await _prompt(message, frontend, seen),
        sampling=_sampling(message.sampling),
        stopping=_stopping(message.stopping),
        output=_output(message.output),
        speculation=_speculation(message.speculation, seen),
        priority=scheduling.priority,
        cache_salt=message.cache.salt,
        prediction_ids=await _prediction(message, frontend, seen),
        session=message.session.id,
        target_tpot_ms=scheduling.target_tpot_ms if scheduling.HasField("target_tpot_ms") else None,
        grammar=read_grammar(message.grammar, seen) if message.HasField("grammar") else None,
    )
    validate(request, frontend.info, seen)
    return request


async def read_prefill(message: pb.PrefillRequest, frontend: Frontend) -> Request:
    """The prefill-only request ``message`` asks for; raises as `read_generate`."""
    seen = ViolationCollector()
    request = Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=await _prompt(message, frontend, seen),
        stopping=StoppingParams(max_tokens=0),
        priority=message.scheduling.priority,
        cache_salt=message.cache.salt,
    )
    validate(request, frontend.info, seen)
    return request


async def read_chat(chat: options.ChatPrompt, frontend: Frontend, seen: ViolationCollector) -> list[int]:
    """Token ids of ``chat``; empty when it is bad, which ``seen`` is told.

    Raises:
        RequestError: the model knows no chat, or is not loaded.
    """
    if not chat.messages:
        seen.check(False, "chat.messages", "must hold at least one message")
        return []
    bad = [i for i, m in enumerate(chat.messages) if not m.role]
    for i in bad:
        seen.check(False, f"chat.messages[{i}].role", "must not be empty")
    if bad:
        return []
    try:
        return await frontend.encode_chat([{"role": m.role, "content": m.content} for m in chat.messages])
    except InvalidRequestError as error:
        seen.violations += error.violations
        return []


async def _prompt(message: PromptMessage, frontend: Frontend, seen: ViolationCollector) -> tuple[int, ...]:
    served = frontend.info.target
    if message.model not in ("", served):
        raise UnknownModelError(message.model, served)
    which = message.WhichOneof("prompt")
    if which == "text":
        ids = await frontend.encode(message.text)
    elif which == "chat":
        ids = await read_chat(message.chat, frontend, seen)
    else:
        ids = list(message.token_ids.ids)
    if not ids and not seen.violations:
        problem = "must hold at least one token" if which else "one of text, token_ids and chat is needed"
        seen.violations.append(FieldViolation("prompt", problem))
    return tuple(ids)


async def _prediction(message: GenerateMessage, frontend: Frontend, seen: ViolationCollector) -> tuple[int, ...]:
    which = message.prediction.WhichOneof("content")
    if which == "text":
        return tuple(await frontend.encode(message.prediction.text, add_special=False))
    unclear = which is None and message.HasField("prediction")
    seen.check(not unclear, "prediction", "one of text and token_ids is needed")
    return tuple(message.prediction.token_ids.ids)


def _sampling(message: options.SamplingOptions) -> SamplingParams:
    unset = SamplingParams()

    def scalar(name: str, default: Any) -> Any:
        return getattr(message, name) if message.HasField(name) else default  # type: ignore[arg-type]

    return SamplingParams(
        temperature=scalar("temperature", unset.temperature),
        top_k=scalar("top_k", unset.top_k),
        top_p=scalar("top_p", unset.top_p),
        min_p=scalar("min_p", unset.min_p),
        repetition_penalty=scalar("repetition_penalty", unset.repetition_penalty),
        presence_penalty=scalar("presence_penalty", unset.presence_penalty),
        frequency_penalty=scalar("frequency_penalty", unset.frequency_penalty),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        seed=scalar("seed", unset.seed),
        n=scalar("n", unset.n),
    )


def _stopping(message: options.StoppingOptions) -> StoppingParams:
    return StoppingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        include_stop=message.include_stop,
        ignore_eos=message.ignore_eos,
    )


def _output(message: options.OutputOptions) -> OutputParams:
    return OutputParams(
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        text=message.text if message.HasField("text") else True,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
    )


def _speculation(message: options.SpeculationOptions, seen: ViolationCollector) -> SpeculationParams:
    known = ", ".join(options.SpeculationOptions.Mode.keys())
    seen.check(message.mode in _MODES, "speculation.mode", f"unknown value {message.mode}; one of {known}")
    return SpeculationParams(
        mode=_MODES.get(message.mode, SpeculationMode.AUTO),
        drafters=tuple(message.drafters) or None,
        max_nodes=message.max_nodes if message.HasField("max_nodes") else None,
        max_depth=message.max_depth if message.HasField("max_depth") else None,
        width=message.width if message.HasField("width") else None,
    )
