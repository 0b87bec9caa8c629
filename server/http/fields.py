"""Body fields that several dialects share, the readers of a call's body, and warnings about fields without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from server.http.conversation import read_text
from server.http.tool_use import TOOLS, ToolUse
from server.json_body import Body
from server.request_fields import (
    INTEGER,
    MAX_SHOWN,
    MAX_UNKNOWN,
    NUMBER,
    OBJECT,
    SPECULATION,
    TEXT,
    Field,
    Table,
    either,
    flag_field,
    listed,
    param_field,
    param_fields,
    text_field,
    with_fields,
)
from server.served_model import ServedModel
from specdec.core.fields import INT31, MAX_DRAFT_NODES, MAX_NAME
from specdec.core.types import Request, SamplingParams, SpeculationParams, StoppingParams
from specdec.errors import InvalidRequestError
from specdec.models.tokenizer import Tokenizer


def read_limit(body: Body, name: str, low: int) -> int | None:
    """A number of tokens to generate. A negative one, from ``low`` on, means up to the context's limit."""
    limit = body.integer(name, low, INT31)
    return None if limit is None or limit < 0 else limit


def _read_ttft(body: Body, name: str) -> float | None:
    value = body.number(name)
    if value is not None and value <= 0:
        body.refuse(name, "must be a positive number of milliseconds; leave it out for no objective")
    return value


TTFT = Field(
    "ttft_ms",
    {**NUMBER, "exclusiveMinimum": 0, "description": "Milliseconds to the first token, which limit the prompt."},
    _read_ttft,
)


async def read_conversation(
    body: Body,
    own: Mapping[str, Any],
    model: ServedModel,
    tools: ToolUse | None,
    *,
    variables: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> tuple[int, ...]:
    """Token ids of ``messages`` and of the answer's beginning. Empty: there are none, or ``messages`` are wrong, which
    ``body`` notes. own: the fields that were read of it. variables: of the chat template, besides those of ``body``.

    The answer continues a last message of the assistant that has a true ``prefix``, or any that calls no tools if
    ``continues`` or `continue_final_message` is true. Else it begins one unless `add_generation_prompt` is false.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    given, messages = body.objects("messages"), body.raw("messages")
    if not given:
        if messages is None or messages == []:
            body.refuse("messages", "must hold at least one message")
        return ()
    n_known = len(body.violations.found)
    for message in given:
        if not message.text("role"):
            message.refuse("role", "must be a string that is not empty")
        elif message.raw("role") == "user" and not message.has("content"):
            message.refuse("content", "must be text or a list of text parts")
    if len(body.violations.found) > n_known:
        return ()
    beginning, last = "", messages[-1]
    is_begun = own.get("continue_final_message", False)  # vLLM
    if is_begun and (last["role"] != "assistant" or last.get("tool_calls")):
        body.refuse("continue_final_message", "the last message is no text of the assistant; leave this field out")
    is_begun = is_begun or last.get("prefix") is True or (continues and not last.get("tool_calls"))  # Mistral; Ollama
    if is_begun and last["role"] == "assistant":
        beginning = read_text(given[-1], "content", ("text",)) if given[-1].has("content") else ""
        messages = messages[:-1]
    elif not own.get("add_generation_prompt", True):
        variables = {**(variables or {}), "add_generation_prompt": False}
    separates = own.get("separate_reasoning", True)
    return await encode_messages(body, model, messages, tools, beginning, variables, separates=separates)


async def encode_messages(
    body: Body,
    model: ServedModel,
    messages: list[dict[str, Any]],
    tools: ToolUse | None,
    beginning: str = "",
    variables: Mapping[str, Any] | None = None,
    *,
    separates: bool = True,
) -> tuple[int, ...]:
    """Token ids of ``messages`` and of the answer's ``beginning``, as `read_conversation` returns them; ``variables``
    as there.

    separates: the answer has no thoughts, so its beginning follows them.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    known = None if tools is None else tools.tools
    try:
        every = {**(variables or {}), **template_variables(body)}
        ids = await model.tokenizer.encode_chat(messages, known, every)
    except InvalidRequestError as error:
        body.violations.found += error.violations
        return ()
    if not beginning:
        return tuple(ids)
    tokenizer = model.tokenizer.loaded
    if separates and tokenizer.thought_marks is not None and tokenizer.leaves_thoughts_open(ids):
        _, _, closing = tokenizer.thought_marks
        ids = [*ids, *closing]
    return (*ids, *await model.tokenizer.encode(beginning, add_special=False))


def template_variables(body: Body) -> dict[str, Any]:
    """The variables of the chat template that ``body`` sets."""
    given = body.object(TEMPLATE_VARIABLES.name)
    variables: dict[str, Any] = {} if given is None else body.value(TEMPLATE_VARIABLES.name) or {}
    for name in ("messages", "tools"):
        if name in variables:
            body.refuse(f"{TEMPLATE_VARIABLES.name}.{name}", "is a field of the body")
    return variables


TEMPLATE_VARIABLES = Field(
    "chat_template_kwargs",
    {**OBJECT, "description": "Variables of the model's chat template, such as `enable_thinking` of Qwen3."},
)
EFFORT = text_field("reasoning_effort", "A variable of the chat template; `none` sets `enable_thinking: false` too.")


def effort_variables(body: Body, name: str, effort: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """The variables of the chat template that an `EFFORT` sets; ``name`` is that of its field."""
    if effort is None:
        return {}
    variables = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
    thinks = effort != "none" or tokenizer.thought_marks is not None
    if thinks and not any(map(tokenizer.template_mentions, variables)):
        body.warn(name, "has no effect: the model's chat template does not read it")
    return variables


MODEL = text_field("model", "None, or the one served.")
MODEL_QUERY = {"name": "model", "in": "query", "schema": TEXT, "description": "Which one, where several are served."}
STREAM = flag_field("stream")
SAMPLING = param_fields(SamplingParams, "n")
STOPPING = param_fields(StoppingParams, "max_tokens")
# Names of llama.cpp, one of them in some of its versions, and of Alibaba's API.
THOUGHTS = tuple(
    param_field(SamplingParams, "thinking_budget", name)
    for name in ("thinking_budget_tokens", "reasoning_budget_tokens", "thinking_budget")
)


def _read_draft_limit(body: Body, name: str) -> SpeculationParams:
    return SpeculationParams(max_depth=min(max(0, body.integer(name, -INT31, INT31) or 0), MAX_DRAFT_NODES))


COMMON: Table = (
    Field("speculative.n_max", {
        **INTEGER, "description": "llama.cpp's speculation.max_depth. 0: no drafts. `speculation` replaces it.",
    }, _read_draft_limit, "speculation"),
    SPECULATION,
    *param_fields(Request),
    text_field(
        "supersedes_key",
        "Ends the running request with the same key and tenant, which gets 409, SUPERSEDED. For one prompt only.",
        maxLength=MAX_NAME,
    ),
)  # fmt: skip
CONTINUES = "If the last one is the assistant's, the answer continues it."
_MESSAGE = with_fields({"role": {**TEXT, "minLength": 1}, "content": either(TEXT, {"type": "array"})}, "role")
CONVERSATION: Table = (
    Field("messages", listed(_MESSAGE, minItems=1)),
    TEMPLATE_VARIABLES,
    flag_field("add_generation_prompt", "Whether a message of the assistant begins.", default=True),
    flag_field("continue_final_message", "The answer continues the last message, which is the assistant's."),
    *TOOLS,
)


_LIKENESS = 0.83  # of two names, as difflib computes it, from 0 to 1: a letter or two differ

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Each with further values that request nothing. A field that the endpoint reads is never reported.
_MEANING: Mapping[str, tuple[Any, ...]] = {
    # vLLM, OpenAI, Mistral
    "use_beam_search": (), "length_penalty": (1,), "early_stopping": (), "best_of": (1,), "n": (1,), "bad_words": (),
    "logits_processors": (), "prompt_logprobs": (), "prompt_embeds": (), "truncate_prompt_tokens": (-1,),
    "echo": (), "logprobs": (), "return_token_ids": (), "return_step_trees": (),
    "suffix": (), "tools": (), "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,),
    "functions": (), "function_call": ("auto", "none"), "audio": (), "modalities": (["text"],),
    "web_search_options": (), "verbosity": ("medium",), "reasoning_effort": ("none",), "thinking_token_budget": (-1,),
    "thinking_budget_tokens": (-1,), "reasoning_budget_tokens": (-1,),
    "chat_template": (), "chat_template_kwargs": (), "documents": (), "continue_final_message": (),
    "add_generation_prompt": (True,), "spaces_between_special_tokens": (True,), "guided_whitespace_pattern": (),
    "safe_prompt": (), "prompt_mode": (), "moderation": (),
    # grammars, where another dialect's name is used
    "grammar": (), "json_schema": (), "response_format": ({"type": "text"},), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "structured_outputs": (), "format": (), "regex": (), "ebnf": (),
    # limits, likewise
    "max_tokens": (), "max_completion_tokens": (), "max_new_tokens": (), "n_predict": (-1,), "num_predict": (-1,),
    # llama.cpp, Ollama
    "lora": (), "mirostat": (), "dynatemp_range": (), "typical_p": (1,), "xtc_probability": (), "top_n_sigma": (-1,),
    "dry_multiplier": (), "tfs_z": (1,), "image_data": (), "grammar_lazy": (), "images": (),
    # Anthropic, OpenAI's Responses
    "thinking": ({"type": "disabled"},), "mcp_servers": (), "context_management": (), "max_tool_calls": (),
    "compaction": (), "container": (),
    "effort": ("high",), "reasoning": ({"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    # SGLang, TGI and others
    "lora_path": (), "adapter_id": (), "stop_regex": (), "no_stop_trim": (), "session_params": (),
    "custom_logit_processor": (), "watermark": (), "truncate": (), "top_a": (), "smoothing_factor": (),
}  # fmt: skip


def ignored_fields(
    data: Mapping[str, Any], known: Table, *, every: bool = False, path: str = ""
) -> Iterator[tuple[str, str]]:
    """Names of fields that are ignored and should not be ignored in silence, each with what is wrong with it.

    known: the fields that the endpoint reads.
    every: also unknown fields that resemble none of them.
    path: stands before the names.
    """
    read = {each.name for each in known}
    plain = {_plain(name): name for name in read}
    compared = 0
    for name, value in data.items():
        if name in read or value is None:
            continue
        if name in _MEANING:
            if value not in _NOTHING and value not in _MEANING[name]:
                yield path + name, "is not served here"
        elif compared < MAX_UNKNOWN:
            compared += 1
            likely = get_close_matches(_plain(name[:MAX_SHOWN]), plain, n=1, cutoff=_LIKENESS)
            if likely or every:
                hint = f" (did you mean {plain[likely[0]]}?)" if likely else ""
                yield path + name[:MAX_SHOWN], f"is not known{hint}"
    for each in known:
        inner = data.get(each.name)
        if each.fields and isinstance(inner, dict):
            yield from ignored_fields(inner, each.fields, every=every, path=f"{path}{each.name}.")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
