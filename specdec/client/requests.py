"""What a client asks for, as messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.client.chat_turn import ChatTurn
from specdec.client.completion_hints import CompletionHints
from specdec.client.fim import Fim
from specdec.client.generate_options import GenerateOptions
from specdec.client.prompt import Prompt
from specdec.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)

Message = TypeVar("Message", pb.GenerateRequest, pb.GenerateStreamRequest)
PromptMessage = pb.GenerateRequest | pb.GenerateStreamRequest | pb.PrefillRequest

_MODES = {
    SpeculationMode.AUTO: options.SpeculationOptions.MODE_AUTO,
    SpeculationMode.OFF: options.SpeculationOptions.MODE_OFF,
    SpeculationMode.ON: options.SpeculationOptions.MODE_ON,
}


def fill_request(message: Message, prompt: Prompt, asked: GenerateOptions) -> Message:
    """``message`` with all that is asked for, but the timeout, which is the call's."""
    fill_prompt(message, prompt)
    message.request_id, message.model = asked.get("request_id", ""), asked.get("model", "")
    message.sampling.CopyFrom(sampling_message(asked.get("sampling", SamplingParams())))
    message.stopping.CopyFrom(stopping_message(asked.get("stopping", StoppingParams())))
    message.output.CopyFrom(output_message(asked.get("output", OutputParams())))
    message.speculation.CopyFrom(speculation_message(asked.get("speculation", SpeculationParams())))
    message.cache.salt, message.session.id = asked.get("cache_salt", ""), asked.get("session", "")
    message.scheduling.CopyFrom(scheduling_message(asked))
    prediction, grammar = asked.get("prediction", ""), asked.get("grammar")
    if isinstance(prediction, str):
        if prediction:
            message.prediction.text = prediction
    elif prediction:
        message.prediction.token_ids.ids.extend(prediction)
    if grammar is not None:
        message.grammar.CopyFrom(grammar_message(grammar))
    return message


def completion_message(gap: Fim, hints: CompletionHints, asked: GenerateOptions) -> completion.CompleteRequest:
    """What belongs into a gap; sampling and stopping are the server's where they are not asked for."""
    whole = fill_request(pb.GenerateRequest(), gap, asked)
    mode = completion.CompletionOptions.Mode.Value(f"MODE_{hints.mode.upper()}")
    message = completion.CompleteRequest(
        request_id=whole.request_id, model=whole.model, fim=whole.fim,
        completion=completion.CompletionOptions(
            mode=mode, max_prompt_tokens=hints.max_prompt_tokens, stop_at_dedent=hints.stop_at_dedent,
            stop_at_bracket=hints.stop_at_bracket, stop_at_suffix=hints.stop_at_suffix,
        ),
        output=whole.output, speculation=whole.speculation, cache=whole.cache, scheduling=whole.scheduling,
        session=whole.session,
    )  # fmt: skip
    for name in ("sampling", "stopping"):
        if name in asked:
            getattr(message, name).CopyFrom(getattr(whole, name))
    for name in ("prediction", "grammar"):
        if whole.HasField(name):  # type: ignore[arg-type]
            getattr(message, name).CopyFrom(getattr(whole, name))
    return message


def fill_prompt(message: PromptMessage, prompt: Prompt) -> None:
    """Put ``prompt`` into ``message``."""
    if isinstance(prompt, str):
        message.text = prompt
    elif isinstance(prompt, Fim):
        message.fim.CopyFrom(fim_message(prompt))
    elif prompt and isinstance(prompt[0], ChatTurn):
        message.chat.CopyFrom(chat_message([turn for turn in prompt if isinstance(turn, ChatTurn)]))
    else:
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(token for token in prompt if isinstance(token, int))


def chat_message(turns: Sequence[ChatTurn]) -> options.ChatPrompt:
    """A conversation."""
    return options.ChatPrompt(messages=[options.ChatMessage(role=turn.role, content=turn.content) for turn in turns])


def fim_message(gap: Fim) -> options.FimPrompt:
    """A gap in a text."""
    return options.FimPrompt(
        prefix=gap.prefix, suffix=gap.suffix, middle_prefix=gap.middle_prefix, repo_name=gap.repo_name,
        file_name=gap.file_name, language=gap.language,
        extra=[
            options.ContextFile(filename=f.filename, text=f.text, time_ms=f.time_ms, score=f.score) for f in gap.extra
        ],
    )  # fmt: skip


def sampling_message(s: SamplingParams) -> options.SamplingOptions:
    """How tokens are chosen."""
    return options.SamplingOptions(
        temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p,
        repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty, logit_bias=dict(s.logit_bias), allowed_token_ids=s.allowed_token_ids,
        seed=s.seed, n=s.n,
    )  # fmt: skip


def stopping_message(stop: StoppingParams) -> options.StoppingOptions:
    """When generation ends."""
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


def output_message(out: OutputParams) -> options.OutputOptions:
    """What comes back."""
    return options.OutputOptions(
        logprobs=out.logprobs, text=out.text, skip_special_tokens=out.skip_special_tokens, trees=out.trees
    )


def speculation_message(spec: SpeculationParams) -> options.SpeculationOptions:
    """How drafts are made."""
    return options.SpeculationOptions(
        mode=_MODES[spec.mode], drafters=spec.drafters or (), max_nodes=spec.max_nodes, max_depth=spec.max_depth,
        width=spec.width,
    )  # fmt: skip


def scheduling_message(asked: GenerateOptions) -> options.SchedulingOptions:
    """Who goes first."""
    return options.SchedulingOptions(
        priority=asked.get("priority", 0), target_tpot_ms=asked.get("target_tpot_ms"),
        supersedes_key=asked.get("supersedes_key", ""),
    )  # fmt: skip


def grammar_message(grammar: GrammarParams) -> options.GrammarOptions:
    """What the output must match."""
    if grammar.kind == GrammarKind.JSON_OBJECT:
        return options.GrammarOptions(json_object=True)
    if grammar.kind == GrammarKind.CHOICE:
        return options.GrammarOptions(choice=options.Choices(values=json.loads(grammar.text)))
    message = options.GrammarOptions()
    setattr(message, grammar.kind.value, grammar.text)
    return message


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
