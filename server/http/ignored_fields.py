"""Fields that other servers have and this one lacks, where that changes what the answer means.

Unknown fields are ignored, as clients expect. The answer lists these few in ``warnings``: a caller who asks for beam
search should learn that this answer does not come from one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.request_fields import Table

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Each with further values that request nothing. A field that the endpoint reads is never reported.
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


def warnings(data: Mapping[str, Any], known: Table, left_out: Sequence[str] = ()) -> list[dict[str, str]]:
    """The fields of a body that were ignored and would have changed what the answer means.

    known: the fields that the endpoint reads.
    left_out: parts of them that it ignored.
    """
    names = [*_ignored(data, known), *left_out]
    for each in known:
        inner = data.get(each.name)
        if each.fields and isinstance(inner, dict):
            names += [f"{each.name}.{name}" for name in _ignored(inner, each.fields)]
    return [{"param": name, "message": "is not served here, and was ignored"} for name in names]


def _ignored(data: Mapping[str, Any], known: Table) -> Iterator[str]:
    read = {each.name for each in known}
    for name, value in data.items():
        if name in _MEANING and name not in read and value not in _NOTHING and value not in _MEANING[name]:
            yield name
