"""One finished sample as llama.cpp's clients read it."""

from __future__ import annotations

from typing import Any

from server.http.llamacpp.ask import Ask
from specdec.types import Finished, FinishReason

_WORDS = (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN)
_LIMITS = (FinishReason.LENGTH, FinishReason.TIME_LIMIT, FinishReason.INDENT)


def result(
    ask: Ask,
    model: str,
    text: str,
    token_ids: list[int],
    end: Finished,
    probabilities: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """All fields, or those that were asked for. ``tokens_cached`` counts what the cache holds afterwards, of which
    ``timings/cache_n`` were there before. ``probabilities`` None: none were asked for, or they were told before."""
    usage, reason = end.usage, end.reason
    stopped = str(end.matched_stop) if reason is FinishReason.STOP_STRING else ""
    kind = "limit" if reason in _LIMITS else "word" if reason in _WORDS else "eos"
    found = {
        "index": end.index,
        "content": text,
        "tokens": token_ids if ask.return_tokens else [],
        "id_slot": 0,
        "stop": True,
        "model": model,
        "tokens_predicted": usage.output_tokens,
        "tokens_evaluated": usage.prompt_tokens,
        "generation_settings": _settings(ask),
        "has_new_line": "\n" in text,
        "truncated": False,
        "stop_type": "none" if reason is FinishReason.ABORTED else kind,
        "stopping_word": stopped,
        "tokens_cached": usage.prompt_tokens + usage.output_tokens,
        "timings": timings(end),
    }
    if probabilities is not None:
        found["completion_probabilities"] = probabilities
    return found if ask.response_fields is None else picked(found, ask.response_fields)


def picked(found: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """The values at ``paths``, each under its whole path; what is not there is left out."""
    chosen: dict[str, Any] = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            chosen[path] = value
    return chosen


def timings(end: Finished) -> dict[str, Any]:
    """Milliseconds and tokens per second; 0 where nothing was done. Drafts as llama.cpp counts them."""
    computed, made = end.usage.prompt_tokens - end.usage.cached_tokens, end.usage.output_tokens
    return {
        "cache_n": end.usage.cached_tokens,
        **_rates("prompt", computed, end.timings.prefill_ms),
        **_rates("predicted", made, end.timings.decode_ms),
        "draft_n": end.stats.num_draft_tokens,
        "draft_n_accepted": end.stats.num_accepted_draft_tokens,
    }


def _rates(name: str, tokens: int, ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / tokens if tokens else 0.0,
        f"{name}_per_second": tokens * 1e3 / ms if ms > 0 else 0.0,
    }


def _settings(ask: Ask) -> dict[str, Any]:
    sampling = ask.request.sampling
    return {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "n_predict": ask.n_predict,
        "stop": ask.request.stopping.stop,
        "speculation": ask.request.speculation.mode,
    }
