"""Requests off the wire: proto messages to a validated `Request`, everything that is wrong named at once."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from server.auth.principal import current_caller
from server.completion.documents import ContextFile, Gap
from server.completion.prompt_packer import PackedPrompt
from server.completion.requests import CompletionOptions
from server.served_model import ServedModel
from specdec.api.params import read_grammar, read_params, read_values
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.api.v1.completion_pb2 import CompleteRequest, SessionSetup
from specdec.core.fields import params_of
from specdec.core.types import (
    EngineInfo,
    GrammarParams,
    OutputParams,
    Request,
    ResumeParams,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    TextRules,
)
from specdec.engine.validation import check_requests
from specdec.errors import FieldViolation, InvalidRequestError, PromptTooLongError, ViolationCollector


def _message_paths() -> dict[str, str]:
    """The engine's names of fields that have another path in the messages."""
    found = {"prediction": "prediction.token_ids"}
    for prefix, record in (("", Request), ("stopping.", StoppingParams)):
        found |= {prefix + p.label: prefix + p.path for p in params_of(record) if "." in p.path or p.scale != 1}
    return found


_MESSAGE_PATHS = _message_paths()


def validate(request: Request, info: EngineInfo, violations: ViolationCollector) -> None:
    """As `check_requests`, by the messages' names."""
    check_requests([request], info, violations, _MESSAGE_PATHS)


GenerateMessage = pb.GenerateRequest | pb.GenerateStreamRequest
PromptMessage = pb.GenerateRequest | pb.GenerateStreamRequest | pb.PrefillRequest


async def parse_generate(message: GenerateMessage, model: ServedModel) -> Request:
    """The request ``message`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    violations = ViolationCollector()
    stopping = read_stopping(message.stopping, violations)
    grammar = read_grammar(message.grammar, violations) if message.HasField("grammar") else None
    prompt = await _prompt(message, model, violations, grammar)
    request = Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=prompt.ids,
        sampling=read_params(SamplingParams, message.sampling, violations),
        stopping=_with_ends(stopping, prompt.ends),
        output=read_params(OutputParams, message.output, violations),
        speculation=read_params(SpeculationParams, message.speculation, violations, "speculation."),
        prediction_ids=await read_prediction(message, model, violations),
        grammar=grammar,
        healing_prefix=prompt.healing_prefix,
        resume=read_resume(message, violations),
        **read_own(message, violations),
    )
    validate(request, model.info, violations)
    return request


async def parse_prefill(message: pb.PrefillRequest, model: ServedModel) -> Request:
    """The prefill-only request ``message`` asks for; raises as `parse_generate`."""
    violations = ViolationCollector()
    prompt = await _prompt(message, model, violations)
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
    """Token ids of ``chat``; empty when it is bad, which ``violations`` is told.

    Raises:
        RequestError: the model knows no chat, or is not loaded.
    """
    if not chat.messages:
        violations.check(False, "chat.messages", "must hold at least one message")
        return []
    bad = [i for i, m in enumerate(chat.messages) if not m.role]
    for i in bad:
        violations.check(False, f"chat.messages[{i}].role", "must not be empty")
    if bad:
        return []
    try:
        return await model.tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in chat.messages])
    except InvalidRequestError as error:
        violations.found += error.violations
        return []


def read_gap(message: options.FimPrompt) -> Gap:
    """The gap that ``message`` spells out."""
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
    """Texts beside a gap; a score that is no number is none."""
    return tuple(
        ContextFile(m.filename, m.text, m.score if math.isfinite(m.score) else 0.0, m.time_ms) for m in messages
    )


async def _prompt(
    message: PromptMessage, model: ServedModel, violations: ViolationCollector, grammar: GrammarParams | None = None
) -> PackedPrompt:
    """The prompt, which asks for what matches ``grammar``."""
    model.check_name(message.model)
    which = message.WhichOneof("prompt")
    if which == "fim":
        filling = CompletionOptions(grammar=grammar)
        return await model.completion.maker.pack(read_gap(message.fim), filling, current_caller())
    if which == "text":
        ids = await model.tokenizer.encode(message.text)
    elif which == "chat":
        ids = await read_chat(message.chat, model, violations)
    else:
        count, longest = len(message.token_ids.ids), model.info.max_context - 1
        if count > longest:  # it is not worth a copy
            raise PromptTooLongError(longest, count)
        ids = list(message.token_ids.ids)
    if not ids and not violations.found:
        problem = "must hold at least one token" if which else "one of text, token_ids, chat and fim is needed"
        violations.found.append(FieldViolation("prompt", problem))
    return PackedPrompt(tuple(ids), fills_in=False, ends=())


async def read_prediction(
    message: GenerateMessage | CompleteRequest, model: ServedModel, violations: ViolationCollector
) -> tuple[int, ...]:
    """Token ids of what the output is expected to look like; what is said by halves is told to ``violations``.

    Raises:
        EngineDeadError: the tokenizer is not loaded yet.
    """
    which = message.prediction.WhichOneof("content")
    if which == "text":
        return tuple(await model.tokenizer.encode(message.prediction.text, add_special=False))
    unclear = which is None and message.HasField("prediction")
    violations.check(not unclear, "prediction", "one of text and token_ids is needed")
    return tuple(message.prediction.token_ids.ids)


def _with_ends(stopping: StoppingParams, ends: Sequence[int]) -> StoppingParams:
    return replace(stopping, stop_token_ids=(*stopping.stop_token_ids, *ends)) if ends else stopping


def read_stopping(message: options.StoppingOptions, violations: ViolationCollector) -> StoppingParams:
    """When to stop, as ``message`` says; what it does not say is as in `StoppingParams`."""
    stopping = read_params(StoppingParams, message, violations)
    rules = read_values(TextRules, message, violations)
    return replace(stopping, rules=TextRules(**rules)) if rules else stopping


def read_resume(message: GenerateMessage | CompleteRequest, violations: ViolationCollector) -> ResumeParams | None:
    """Where a stream broke off that goes on."""
    given = message.HasField("resume")
    return read_params(ResumeParams, message.resume, violations, "resume.") if given else None


def read_own(message: PromptMessage | CompleteRequest | SessionSetup, violations: ViolationCollector) -> dict[str, Any]:
    """The options that are fields of `Request` itself."""
    return read_values(Request, message, violations)
