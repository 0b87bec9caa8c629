"""Log-probabilities of a prompt's tokens. They are generated again under a grammar that allows no others.

The engine needs no support for it. Tokens that a grammar forces are drafted and always accepted, so a step scores as
many tokens as a tree has nodes, with the bits of plain decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from server.http.answering import whole_answer
from server.http.call import Call
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
)

WINDOW = 1024  # tokens of one grammar, whose text is bounded


def _windows(ids: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``ids`` without the first as ranges. An end token ends a range, because no grammar continues after one."""
    begin = 1
    for end in range(2, len(ids) + 1):
        if end == len(ids) or end - begin == WINDOW or ids[end - 1] in ends:
            yield begin, end
            begin = end


def scoring_requests(request: Request, ends: Sequence[int] = ()) -> Iterator[Request]:
    """Requests whose outputs together are the prompt of ``request`` without its first token. ``ends``: the model's end
    tokens. They are made one by one, since each holds a copy of the prompt."""
    ids, logprobs = request.prompt_ids, request.output.logprobs
    for begin, end in _windows(ids, ends):
        wanted = ids[begin:end]
        yield dataclasses.replace(
            request,
            request_id=f"{request.request_id}-prompt{begin}",
            prompt_ids=ids[:begin],
            prediction_ids=(),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=len(wanted), ignore_eos=True),
            output=OutputParams(logprobs=logprobs, text=False),
            grammar=GrammarParams(GrammarKind.EBNF, "start: " + " ".join(f"<[{token}]>" for token in wanted)),
        )


async def prompt_logprobs(call: Call, requests: Sequence[Request]) -> list[list[TokenLogprobs]]:
    """For each request, the log-probabilities of its prompt's tokens from the second on.

    Prompts are scored concurrently, and the windows of each prompt in order, so that each finds its prefix cached.

    Raises:
        RequestError: the engine refuses a request or fails.
    """
    found: list[list[TokenLogprobs]] = [[] for _ in requests]
    for asked in zip_longest(*(scoring_requests(request, call.model.info.eos_ids) for request in requests)):
        samples, _ = await whole_answer(call, [request for request in asked if request is not None])
        left = [rows for rows, request in zip(found, asked, strict=True) if request is not None]
        for rows, sample in zip(left, samples, strict=True):
            rows += sample.logprobs
    return found
