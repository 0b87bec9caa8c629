"""From what the load generator saw of a request to the experiment's record of it."""

from __future__ import annotations

from collections.abc import Mapping

from bench.serve.ask import Ask
from bench.serve.record import Outcome
from bench.serve.record import Record as Seen
from server.experiment.record import NO_BLOCK, Record

_STATUS: Mapping[Outcome, str] = {"ok": "ok", "refused": "REFUSED", "failed": "FAILED", "cut": "TIMED_OUT"}


def to_record(
    seen: Seen,
    *,
    ask: Ask,
    arm: str,
    zero_s: float,
    scheduled: bool,
    by_ids: bool,
    block: int = NO_BLOCK,
    pair: str = "",
    warm_up: bool = False,
    prompt: str | None = None,
) -> Record:
    """The record of ``seen``, whose request was ``ask``.

    zero_s: the beginning of the run on the event loop's clock. scheduled: it had an arrival time. by_ids: outputs are
    compared by token ids, else by text. A server may be asked over a connection that takes time: what it says of its
    queue counts from the sending.
    """
    hashed = seen.token_hash if by_ids else seen.text_hash
    return Record(
        request=f"{seen.name}/{arm}",
        arm=arm,
        arrival=seen.sent_s - zero_s,
        scheduled=seen.due_s - zero_s if scheduled else None,
        started=None if seen.queue_ms is None else seen.sent_s - zero_s + seen.queue_ms / 1e3,
        first_token=seen.chunk_s[0] - zero_s if seen.chunk_s else None,
        end=seen.end_s - zero_s,
        tokens=seen.output_tokens,
        chunks=len(seen.chunk_s),
        prompt_tokens=seen.prompt_tokens,
        cached_tokens=seen.cached_tokens,
        accepted=seen.accepted,
        token_hash=hashed if seen.ok else b"",
        block=block,
        pair=pair,
        key=ask.session,
        status=_STATUS[seen.outcome],
        error=seen.error,
        warm_up=warm_up,
        workload=ask.name,
        prompt=prompt,
    )


def prompt_of(ask: Ask) -> str:
    """The prompt in words, for plans that keep prompts."""
    if ask.gap is not None:
        return f"{ask.gap.prefix}<gap>{ask.gap.suffix}"
    if ask.chat:
        return "\n".join(f"{turn.role}: {turn.content}" for turn in ask.chat)
    return ask.text or " ".join(map(str, ask.ids))
