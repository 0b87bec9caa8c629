"""Fields that other servers take and this one does not, where leaving them out changes what the answer means.

Unknown fields are ignored, as clients expect. These few are told of in ``warnings``: who asks for beam search should
know that the answer is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Each with values that, beside those, ask for nothing either. Whichever an endpoint reads is not looked for there.
_MEANING: Mapping[str, tuple[Any, ...]] = {
    # vLLM, OpenAI, Mistral
    "use_beam_search": (), "length_penalty": (1,), "early_stopping": (), "best_of": (1,), "n": (1,), "bad_words": (),
    "logits_processors": (), "prompt_logprobs": (), "prompt_embeds": (), "truncate_prompt_tokens": (-1,),
    "echo": (), "suffix": (), "tools": (), "tool_choice": ("auto", "none"), "parallel_tool_calls": (True,),
    "functions": (), "function_call": ("auto", "none"), "audio": (), "modalities": (["text"],),
    "web_search_options": (), "verbosity": ("medium",), "reasoning_effort": ("none",), "thinking_token_budget": (),
    "chat_template": (), "chat_template_kwargs": (), "documents": (), "continue_final_message": (),
    "add_generation_prompt": (True,), "spaces_between_special_tokens": (True,), "guided_whitespace_pattern": (),
    "safe_prompt": (), "prompt_mode": (),
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
    # SGLang, TGI and others
    "lora_path": (), "adapter_id": (), "stop_regex": (), "no_stop_trim": (), "session_params": (),
    "custom_logit_processor": (), "watermark": (), "truncate": (), "top_a": (), "smoothing_factor": (),
}  # fmt: skip
_OPTIONS = "options"  # Ollama's place for some of them


def body_fields(operation: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of the fields of an OpenAPI operation's body; none where it has no JSON object."""
    content = operation.get("requestBody", {}).get("content", {})
    found: Mapping[str, Any] = content.get("application/json", {}).get("schema", {}).get("properties", {})
    return found


def warnings(data: Mapping[str, Any], known: Mapping[str, Any], left_out: Sequence[str] = ()) -> list[dict[str, str]]:
    """What of a body was ignored and would have changed the answer's meaning. ``known``: the fields that are read;
    ``left_out``: what of them was ignored nevertheless."""
    names = [*_ignored(data, known), *left_out]
    inner, options = known.get(_OPTIONS), data.get(_OPTIONS)
    if inner is not None and isinstance(options, dict):
        names += [f"{_OPTIONS}.{name}" for name in _ignored(options, inner.get("properties", {}))]
    return [{"param": name, "message": "is not served here, and was ignored"} for name in names]


def _ignored(data: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    for name, value in data.items():
        if name in _MEANING and name not in known and value not in _NOTHING and value not in _MEANING[name]:
            yield name
