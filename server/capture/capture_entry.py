"""What is written down of one request."""

from __future__ import annotations

from typing import Any

from server.capture.block_hashes import BlockHashes
from server.telemetry.request_record import RequestRecord

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def capture_entry(record: RequestRecord, at_s: float, hashes: BlockHashes, *, prompts: bool) -> dict[str, Any]:
    """Plain values. ``at_s``: when it arrived, in Unix time; other times are seconds after that.

    Without ``prompts`` nothing is kept that was said: no tokens, no strings, and of sessions, salts and callers only
    whether they are the same as another request's.
    """
    request = record.request
    started, call = record.started, record.call
    entry: dict[str, Any] = {
        "at_s": at_s,
        "end_s": record.ended_s - record.began_s,
        "first_s": record.ttft_s,
        "status": "ok" if record.complete and record.error is None else _reason(record),
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": 0 if started is None else started.cached_tokens,
        "output_tokens": record.output_tokens,
        "blocks": hashes.of_prompt(request.prompt_ids),
        "n": request.sampling.n,
        "max_tokens": request.stopping.max_tokens,
        "ignore_eos": request.stopping.ignore_eos,
        "seed": request.sampling.seed if started is None else started.seed,
        **{name: getattr(request.sampling, name) for name in _SAMPLING},
        "speculation": request.speculation.mode.value,
        "priority": request.priority,
        "session": hashes.of_name(request.session),
        "salt": hashes.of_name(request.cache_salt),
        "prediction_tokens": len(request.prediction_ids),
        "grammar": None if request.grammar is None else request.grammar.kind.value,
    }
    if call is not None:
        entry |= {"face": call.face, "endpoint": call.endpoint}
    if prompts:
        entry |= {"ids": request.prompt_ids, "stop": request.stopping.stop, "prediction_ids": request.prediction_ids}
    return entry


def _reason(record: RequestRecord) -> str:
    if record.error is None:
        return "LEFT"
    return str(getattr(record.error, "reason", "INTERNAL"))
