"""Requests off the wire: proto messages to a validated `Request`, everything that is wrong named at once."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from server.auth.principal import current_caller
from server.completion.requests import CompletionOptions, RequestMaker
from server.errors import UnknownModelError
from server.fim import ContextFile, Gap, PackedPrompt
from server.frontend import Frontend
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.api.v1.completion_pb2 import CompleteRequest
from specdec.engine.validation import validate_request
from specdec.errors import FieldViolation, InvalidRequestError, PromptTooLongError, ViolationCollector
from specdec.types import (
    EngineInfo,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    TextRules,
)

MAX_REQUEST_ID_CHARACTERS = 128
# The engine's fields that have another path in the messages.
_MESSAGE_PATHS = {
    "cache_salt": "cache.salt",
    "prediction": "prediction.token_ids",
    "target_tpot_ms": "scheduling.target_tpot_ms",
    "stopping.time_limit_s": "stopping.time_limit_ms",
    "stopping.decode_limit_s": "stopping.decode_time_limit_ms",
}


def validate(request: Request, info: EngineInfo, seen: ViolationCollector) -> None:
    """Refuse ``request`` for what ``seen`` holds already and for what the engine would refuse it.

    Raises:
        InvalidRequestError: with every bad field.
        PromptTooLongError: nothing else is wrong, but the prompt does not fit the context.
    """
    n = len(request.request_id)
    seen.check(n <= MAX_REQUEST_ID_CHARACTERS, "request_id", f"at most {MAX_REQUEST_ID_CHARACTERS} characters, got {n}")
    try:
        validate_request(request, info.vocab_size, info.max_context, info.drafters)
    except InvalidRequestError as error:
        known = {v.field for v in seen.violations}
        found = [FieldViolation(_MESSAGE_PATHS.get(v.field, v.field), v.description) for v in error.violations]
        seen.violations += [v for v in found if v.field not in known]
    except PromptTooLongError:
        seen.raise_if_any()
        raise
    seen.raise_if_any()


def grammar_message(grammar: GrammarParams) -> options.GrammarOptions:
    """``grammar`` as a client sends it."""
    if grammar.kind == GrammarKind.JSON_OBJECT:
        return options.GrammarOptions(json_object=True)
    if grammar.kind == GrammarKind.CHOICE:
        return options.GrammarOptions(choice=options.Choices(values=json.loads(grammar.text)))
    message = options.GrammarOptions()
    setattr(message, grammar.kind.value, grammar.text)
    return message


def read_grammar(message: options.GrammarOptions, seen: ViolationCollector) -> GrammarParams | None:
    """What ``message`` asks for; None when it is bad, which ``seen`` is told."""
    which = message.WhichOneof("kind")
    if which is None:
        seen.check(False, "grammar", f"one of {', '.join(kind.value for kind in GrammarKind)} is needed")
        return None
    kind = GrammarKind(which)
    if kind == GrammarKind.JSON_OBJECT:
        seen.check(message.json_object, "grammar.json_object", "must be true; leave grammar unset for any text")
        return GrammarParams(kind)
    if kind == GrammarKind.CHOICE:
        return GrammarParams(kind, json.dumps(list(message.choice.values), ensure_ascii=False))
    return GrammarParams(kind, getattr(message, which))


GenerateMessage = pb.GenerateRequest | pb.GenerateStreamRequest
PromptMessage = pb.GenerateRequest | pb.GenerateStreamRequest | pb.PrefillRequest

_MODES = {
    options.SpeculationOptions.MODE_UNSPECIFIED: SpeculationMode.AUTO,
    options.SpeculationOptions.MODE_AUTO: SpeculationMode.AUTO,
    options.SpeculationOptions.MODE_OFF: SpeculationMode.OFF,
    options.SpeculationOptions.MODE_ON: SpeculationMode.ON,
}
# Most requests leave most of it unsaid.
_SAMPLING, _OUTPUT, _SPECULATION, _RULES = SamplingParams(), OutputParams(), SpeculationParams(), TextRules()


async def read_generate(message: GenerateMessage, frontend: Frontend) -> Request:
    """The request ``message`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    seen = ViolationCollector()
    scheduling, stopping = message.scheduling, read_stopping(message.stopping)
    grammar = read_grammar(message.grammar, seen) if message.HasField("grammar") else None
    prompt = await _prompt(message, frontend, seen, grammar)
    request = Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=prompt.ids,
        sampling=read_sampling(message.sampling),
        stopping=_with_ends(stopping, prompt.ends),
        output=read_output(message.output),
        speculation=read_speculation(message.speculation, seen),
        priority=scheduling.priority,
        cache_salt=message.cache.salt,
        prediction_ids=await read_prediction(message, frontend, seen),
        session=message.session.id,
        target_tpot_ms=scheduling.target_tpot_ms if scheduling.HasField("target_tpot_ms") else None,
        grammar=grammar,
        healing_prefix=prompt.healing_prefix,
    )
    validate(request, frontend.info, seen)
    return request


async def read_prefill(message: pb.PrefillRequest, frontend: Frontend) -> Request:
    """The prefill-only request ``message`` asks for; raises as `read_generate`."""
    seen = ViolationCollector()
    prompt = await _prompt(message, frontend, seen)
    request = Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt_ids=prompt.ids,
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
    message: PromptMessage, frontend: Frontend, seen: ViolationCollector, grammar: GrammarParams | None = None
) -> PackedPrompt:
    """The prompt, which asks for what matches ``grammar``."""
    served = frontend.info.target
    if message.model not in ("", served):
        raise UnknownModelError(message.model, served)
    which = message.WhichOneof("prompt")
    if which == "fim":
        filling = CompletionOptions(grammar=grammar)
        return await RequestMaker(frontend).pack(read_gap(message.fim), filling, current_caller())
    if which == "text":
        ids = await frontend.encode(message.text)
    elif which == "chat":
        ids = await read_chat(message.chat, frontend, seen)
    else:
        ids = list(message.token_ids.ids)
    if not ids and not seen.violations:
        problem = "must hold at least one token" if which else "one of text, token_ids, chat and fim is needed"
        seen.violations.append(FieldViolation("prompt", problem))
    return PackedPrompt(tuple(ids), fills_in=False, ends=())


async def read_prediction(
    message: GenerateMessage | CompleteRequest, frontend: Frontend, seen: ViolationCollector
) -> tuple[int, ...]:
    """Token ids of what the output is expected to look like; what is said by halves is told to ``seen``.

    Raises:
        EngineDeadError: the tokenizer is not loaded yet.
    """
    which = message.prediction.WhichOneof("content")
    if which == "text":
        return tuple(await frontend.encode(message.prediction.text, add_special=False))
    unclear = which is None and message.HasField("prediction")
    seen.check(not unclear, "prediction", "one of text and token_ids is needed")
    return tuple(message.prediction.token_ids.ids)


def read_sampling(message: options.SamplingOptions) -> SamplingParams:
    """How tokens are chosen, as ``message`` says; what it does not say is as in `SamplingParams`."""
    unset = _SAMPLING
    if not message.ByteSize():
        return unset

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


def _with_ends(stopping: StoppingParams, ends: Sequence[int]) -> StoppingParams:
    return replace(stopping, stop_token_ids=(*stopping.stop_token_ids, *ends)) if ends else stopping


def read_stopping(message: options.StoppingOptions) -> StoppingParams:
    """When to stop, as ``message`` says; what it does not say is as in `StoppingParams`."""
    return StoppingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        include_stop=message.include_stop,
        ignore_eos=message.ignore_eos,
        rules=_rules(message),
        time_limit_s=message.time_limit_ms / 1e3 if message.HasField("time_limit_ms") else None,
        decode_limit_s=message.decode_time_limit_ms / 1e3 if message.HasField("decode_time_limit_ms") else None,
        finish_line=message.finish_line,
    )


def _rules(message: options.StoppingOptions) -> TextRules | None:
    brackets = message.brackets if message.HasField("brackets") else None
    rules = TextRules(
        max_lines=message.max_lines if message.HasField("max_lines") else None,
        min_indent=message.min_indent if message.HasField("min_indent") else None,
        blank_line=message.blank_line,
        closers=None if brackets is None else brackets.closers,
        quote="" if brackets is None else brackets.quote,
        suffix=message.suffix,
        lead=message.lead,
    )
    return None if rules == _RULES else rules


def read_output(message: options.OutputOptions) -> OutputParams:
    """What comes back."""
    if not message.ByteSize():
        return _OUTPUT
    return OutputParams(
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        text=message.text if message.HasField("text") else True,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        trees=message.trees,
    )


def read_speculation(message: options.SpeculationOptions, seen: ViolationCollector) -> SpeculationParams:
    """How to draft; an unknown mode is told to ``seen``."""
    if not message.ByteSize():
        return _SPECULATION
    mode = _MODES.get(message.mode)
    if mode is None:
        known = ", ".join(options.SpeculationOptions.Mode.keys())
        seen.check(False, "speculation.mode", f"unknown value {message.mode}; one of {known}")
    return SpeculationParams(
        mode=mode or SpeculationMode.AUTO,
        drafters=tuple(message.drafters) or None,
        max_nodes=message.max_nodes if message.HasField("max_nodes") else None,
        max_depth=message.max_depth if message.HasField("max_depth") else None,
        width=message.width if message.HasField("width") else None,
    )
