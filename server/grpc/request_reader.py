"""Proto messages to validated requests, and their admission. A refusal names every bad field."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from server.auth.principal import current_caller
from server.completion.documents import ContextFile, Gap
from server.completion.prompt_packer import PackedPrompt
from server.completion.requests import DEFAULT_STOPPING, CompletionOptions
from server.errors import DeadlinePassedError
from server.grpc.errors import Context
from server.hold_headers import HOLD_HEADER, holds
from server.json_body import Body, read_object
from server.request_fields import NO_PROMPT
from server.request_stream import RequestStream
from server.served_model import ServedModel
from specdec.api.params import read_grammar, read_params, read_values
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.api.v1.completion_pb2 import CompleteRequest, PredictEditRequest, SessionSetup
from specdec.core.fields import params_of
from specdec.core.types import (
    EngineInfo,
    OutputParams,
    Request,
    ResumeParams,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    TextRules,
)
from specdec.engine.validation import check_requests
from specdec.errors import FieldViolation, InvalidRequestError, ViolationCollector

# The paths of fields that the engine calls differently
_MESSAGE_PATHS = {"prediction": "prediction.token_ids"} | {
    prefix + each.label: prefix + each.path
    for prefix, record in (("", Request), ("stopping.", StoppingParams))
    for each in params_of(record)
    if "." in each.path or each.scale != 1
}


def validate(request: Request, info: EngineInfo, violations: ViolationCollector) -> None:
    """Call `check_requests` with the messages' names."""
    check_requests([request], info, violations, _MESSAGE_PATHS)


def admit(
    model: ServedModel, request: Request, scheduling: options.SchedulingOptions, context: Context
) -> RequestStream:
    """Admit the request, with the rest of the call's time as its deadline.

    Raises:
        DeadlinePassedError: no time is left.
        RequestError: as `Admission.admit` raises.
    """
    remaining = context.time_remaining()
    if remaining is not None:
        if remaining <= 0:
            raise DeadlinePassedError
        request = replace(request, deadline_s=remaining)
    return model.admission.admit(current_caller(), request, scheduling.supersedes_key)


def holds_headers(model: ServedModel, context: Context) -> bool:
    """Return whether a stream's first message waits for the first token; raises as `holds`."""
    metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
    return holds(str(metadata.get(HOLD_HEADER, "")), model.hold_headers)


GenerateMessage = pb.GenerateRequest | pb.GenerateStreamRequest
PromptMessage = pb.GenerateRequest | pb.GenerateStreamRequest | pb.PrefillRequest


async def parse_generate(message: GenerateMessage, model: ServedModel) -> Request:
    """Return the request in ``message``.

    Raises:
        RequestError: it cannot be served; every bad field is listed.
    """
    violations = ViolationCollector()
    base = read_base(message, violations)
    prompt = await _prompt(message, model, violations, base)
    request = replace(
        base,
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=prompt.ids,
        stopping=prompt.limits(base.stopping) if prompt.ends or prompt.n_healing_tokens else base.stopping,
        prediction_ids=await read_prediction(message, model, violations),
        healing_prefix=prompt.healing_prefix,
    )
    validate(request, model.info, violations)
    return request


def read_base(
    message: GenerateMessage | CompleteRequest | SessionSetup | PredictEditRequest, violations: ViolationCollector
) -> Request:
    """Return the options in ``message`` as a request without id and prompt."""
    stopping = read_params(StoppingParams, message.stopping, violations)
    rules = read_values(TextRules, message.stopping, violations)
    base = Request(
        request_id="",
        prompt_ids=(),
        sampling=read_params(SamplingParams, message.sampling, violations),
        stopping=replace(stopping, rules=TextRules(**rules)) if rules else stopping,
        speculation=read_params(SpeculationParams, message.speculation, violations, "speculation."),
        **read_values(Request, message, violations),
    )
    if isinstance(message, SessionSetup | PredictEditRequest):
        return base
    return replace(
        base,
        output=read_params(OutputParams, message.output, violations),
        grammar=read_grammar(message.grammar, violations) if message.HasField("grammar") else None,
        resume=read_params(ResumeParams, message.resume, violations, "resume.") if message.HasField("resume") else None,
    )


async def parse_prefill(message: pb.PrefillRequest, model: ServedModel) -> Request:
    """Return the prefill-only request in ``message``; raises as `parse_generate`."""
    violations = ViolationCollector()
    prompt = await _prompt(message, model, violations, Request("", (), cache_salt=message.cache.salt))
    request = Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=prompt.ids,
        stopping=StoppingParams(max_tokens=0),
        priority=message.scheduling.priority,
        cache_salt=message.cache.salt,
    )
    validate(request, model.info, violations)
    return request


async def read_chat(chat: options.ChatPrompt, model: ServedModel, violations: ViolationCollector) -> list[int]:
    """Return the token ids of ``chat``. If it is invalid, adds to ``violations`` and returns none.

    Raises:
        RequestError: the model has no chat template, or is not loaded.
    """
    if not chat.messages:
        violations.check(False, "chat.messages", "must hold at least one message")
        return []
    bad = [i for i, m in enumerate(chat.messages) if not m.role]
    for i in bad:
        violations.check(False, f"chat.messages[{i}].role", "must not be empty")
    if bad:
        return []
    variables = _read_variables(chat.template_variables, violations)
    try:
        messages = [{"role": m.role, "content": m.content} for m in chat.messages]
        return await model.tokenizer.encode_chat(messages, variables=variables)
    except InvalidRequestError as error:
        for each in error.violations:
            field = "chat" if each.field == "prompt" else f"chat.{each.field}"
            violations.found.append(FieldViolation(field, each.description))
        return []


def _read_variables(text: str, violations: ViolationCollector) -> dict[str, Any]:
    name = "chat.template_variables"
    try:
        found = read_object(text.encode()) if text else {}
    except InvalidRequestError as error:
        violations.check(False, name, error.violations[0].description)
        return {}
    return Body({name: found}, violations).value(name) or {}


def read_gap(message: options.FimPrompt) -> Gap:
    begun = message.HasField("middle_prefix")
    return Gap(
        prefix=message.prefix + message.middle_prefix,
        suffix=message.suffix,
        head_from=len(message.prefix) if begun else None,
        files=read_files(message.extra),
        repo=message.repo_name,
        path=message.file_name,
        language=message.language,
    )


def read_files(messages: Iterable[options.ContextFile]) -> tuple[ContextFile, ...]:
    """Return the texts that accompany a gap. A score that is not finite counts as 0."""
    return tuple(
        ContextFile(m.filename, m.text, m.score if math.isfinite(m.score) else 0.0, m.time_ms) for m in messages
    )


async def _prompt(
    message: PromptMessage, model: ServedModel, violations: ViolationCollector, base: Request
) -> PackedPrompt:
    """Return the prompt. base: the options, on which its fill-in-the-middle form depends."""
    model.check_name(message.model)
    which = message.WhichOneof("prompt")
    if which == "fim":
        completion = CompletionOptions(replace(base, stopping=DEFAULT_STOPPING))
        return await model.maker.pack(read_gap(message.fim), completion)
    if which == "text":
        ids = await model.tokenizer.encode(message.text)
    elif which == "chat":
        ids = await read_chat(message.chat, model, violations)
    else:
        ids = list(message.token_ids.ids)
    violations.check(which is not None, "prompt", "one of text, token_ids, chat and fim is needed")
    return PackedPrompt(tuple(ids) or (NO_PROMPT if violations.found else ()))


async def read_prediction(
    message: GenerateMessage | CompleteRequest, model: ServedModel, violations: ViolationCollector
) -> tuple[int, ...]:
    """Return the token ids of the prediction. If it is incomplete, adds to ``violations``.

    Raises:
        EngineDeadError: the tokenizer is not loaded yet.
    """
    which = message.prediction.WhichOneof("content")
    if which == "text":
        return await model.tokenizer.encode_prediction(message.prediction.text)
    unclear = which is None and message.HasField("prediction")
    violations.check(not unclear, "prediction", "one of text and token_ids is needed")
    return tuple(message.prediction.token_ids.ids)
