"""What is known of a request, as an experiment's record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import zip_longest

from server.experiment.live.part import Part
from server.experiment.live.run_clock import RunClock
from server.experiment.record import Record
from server.experiment.token_bytes import token_bytes
from server.telemetry.request_record import RequestRecord
from specdec.errors import RequestError
from specdec.types import Finished, FinishReason, Request

CANCELLED = "cancelled"
Decode = Callable[[Sequence[int]], str]


def make_record(
    part: Part, seen: RequestRecord, clock: RunClock, decode: Decode | None = None, pair: str = ""
) -> Record:
    """The record of a request that has ended. decode: its prompt is told, as text; None: it is not."""
    request, started = seen.request, seen.started
    status, error = _status(seen)
    return Record(
        request=part.name,
        arm=part.choice.arm,
        arrival=clock.at(seen.began_s),
        started=None if started is None else clock.at(seen.made_s + started.queue_ms / 1e3),
        first_token=None if seen.first_s is None else clock.at(seen.first_s),
        end=clock.at(seen.ended_s),
        tokens=seen.output_tokens,
        chunks=part.chunks,
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=0 if started is None else started.cached_tokens,
        batch=part.batch,
        accepted=_accepted(seen.finished),
        token_hash=b"" if part.tokens is None or _by_the_clock(request) else _token_hash(part.tokens),
        block=part.choice.block,
        pair=pair,
        key=part.choice.key,
        status=status,
        error=error,
        warm_up=part.choice.warm_up,
        workload="" if seen.call is None else seen.call.endpoint,
        prompt=None if decode is None else decode(request.prompt_ids),
        overridden=part.overridden,
    )


def refused_record(part: Part, request: Request, error: RequestError, now: float) -> Record:
    """The record of a request that was not let in: its arm was too busy for it, or down. now: Unix time."""
    return Record(
        request=part.name, arm=part.choice.arm, arrival=now, end=now, prompt_tokens=len(request.prompt_ids),
        block=part.choice.block, key=part.choice.key, status=error.reason, error=str(error),
        warm_up=part.choice.warm_up, overridden=part.overridden,
    )  # fmt: skip


def _status(seen: RequestRecord) -> tuple[str, str]:
    if seen.error is not None:
        return seen.error.reason, str(seen.error)
    ends = {finished.reason for finished in seen.finished}
    if not seen.complete or FinishReason.ABORTED in ends:
        return CANCELLED, ""
    return ("DEADLINE_EXCEEDED", "") if FinishReason.DEADLINE in ends else ("ok", "")


def _accepted(finished: Sequence[Finished]) -> tuple[int, ...]:
    """Steps by accepted draft tokens, of all samples; a step without a draft accepted none."""
    columns = zip_longest(*(end.stats.acceptance_histogram for end in finished), fillvalue=0)
    counts = [sum(column) for column in columns]
    plain = sum(end.stats.num_steps - end.stats.num_spec_steps for end in finished)
    return (counts[0] + plain, *counts[1:]) if counts else ((plain,) if plain else ())


def _by_the_clock(request: Request) -> bool:
    """Whether chance decides how long the answer is."""
    return request.stopping.time_limit_s is not None or request.stopping.decode_limit_s is not None


def _token_hash(tokens: Sequence[tuple[int, list[int]]]) -> bytes:
    """Of all samples' token ids, each sample's with its number and length before."""
    samples: dict[int, list[int]] = defaultdict(list)
    for index, ids in tokens:
        samples[index] += ids
    found = blake2b(digest_size=16)
    for index, ids in sorted(samples.items()):
        found.update(token_bytes([index, len(ids), *ids]))
    return found.digest()
