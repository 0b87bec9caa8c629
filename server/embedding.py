"""Embeddings of texts and scores of documents, for every protocol: their requests, run a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.admission import run_requests
from server.errors import GenerationFailedError
from server.served_model import ServedModel
from specdec.core.fields import MAX_LOGPROBS
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    OutputParams,
    Pooling,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    TokenLogprobs,
    Usage,
)
from specdec.engine.validation import check_requests
from specdec.errors import RequestError, ViolationCollector
from specdec.models.embedding import RANK, truncated

MAX_INPUTS = 2048  # texts or documents of one call; OpenAI's limit
IN_FLIGHT = 2  # requests of a call that are in the engine at once, per place in its batch


class EmbeddingsNotSupportedError(RequestError):
    """The model was not made for embeddings. SDKs do not retry after this status."""

    reason = "EMBEDDINGS_NOT_SUPPORTED"
    http_status, grpc_code, field = 422, "FAILED_PRECONDITION", "model"

    def __init__(self, target: str) -> None:
        super().__init__(
            f"{target[:200]} makes no embeddings; serve an embedding model beside it (`engines`) and name that one in "
            "`model`"
        )


class RerankNotSupportedError(RequestError):
    """The model was not made for reranking."""

    reason = "RERANK_NOT_SUPPORTED"
    http_status, grpc_code, field = 422, "FAILED_PRECONDITION", "model"

    def __init__(self, target: str) -> None:
        super().__init__(
            f"{target[:200]} does not rerank documents; serve a reranker that answers yes or no, such as "
            "Qwen3-Reranker, beside it (`engines`) and send it this call"
        )


@dataclass(slots=True)
class Answer:
    """What the engine returned for one request."""

    end: Finished = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


async def run_all(model: ServedModel, requests: Sequence[Request]) -> list[Answer]:
    """The answers to ``requests``, in their order; at most `IN_FLIGHT` of them per place in the batch run at once.

    Raises:
        RequestError: as in `run_requests`, or a request was aborted.
    """
    answers = [Answer() for _ in requests]
    most = IN_FLIGHT * model.info.max_batch
    async with aclosing(run_requests(model.admission, requests, most=most)) as events:
        async for event in events:
            if isinstance(event, Delta):
                answers[event.index].logprobs += event.logprobs
            elif isinstance(event, Finished):
                if event.reason is FinishReason.ABORTED:
                    raise GenerationFailedError("ABORTED", "the request was aborted before its end")
                answers[event.index].end = event
    return answers


async def embedded_ids(model: ServedModel, given: str | Sequence[int], longest: int | None = None) -> tuple[int, ...]:
    """Token ids of a text to be embedded, with the token that ends them if the model has one; ids stay as they are.

    Empty for an empty text. longest: cut the text's own tokens to so many in all; None: never.
    """
    if not isinstance(given, str) or not given:
        return tuple(given) if not isinstance(given, str) else ()
    tokenizer = model.tokenizer.loaded
    if longest is not None:
        given = given[: longest * tokenizer.longest_token]  # later characters are in none of the first tokens
    ids, end = await model.tokenizer.encode(given), tokenizer.end_id
    await asyncio.sleep(0)  # a call has many texts, and other calls run in between
    if end is None:
        return tuple(ids[:longest])
    return (*ids[: None if longest is None else longest - 1], end)


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """A call for embeddings of one or more texts."""

    model: ServedModel
    dimensions: int | None  # leading values to return; None: all

    @staticmethod
    def of(model: ServedModel, dimensions: int | None, violations: ViolationCollector) -> EmbeddingCall:
        """A call that returns the first ``dimensions`` values; a bad number is added to ``violations``.

        Raises:
            EmbeddingsNotSupportedError: the model was not made for embeddings.
        """
        info = model.info
        if info.pooling not in tuple(Pooling):
            raise EmbeddingsNotSupportedError(info.target)
        sized = dimensions is None or 1 <= dimensions <= info.embedding_size
        violations.check(sized, "dimensions", f"must lie in 1..{info.embedding_size}, the size of the model's own")
        return EmbeddingCall(model, dimensions)

    async def run(
        self,
        call_id: str,
        prompts: Sequence[tuple[int, ...]],
        options: dict[str, Any],
        violations: ViolationCollector,
        name: str,
    ) -> list[tuple[NDArray[np.float32], Usage]]:
        """The embeddings of ``prompts``, float32 [size], with what each took.

        options: fields of `Request`. name: of the field that the prompts are from.

        Raises:
            RequestError: the prompts or the options cannot be served, and every bad field is listed; or as `run_all`.
        """
        for i, ids in enumerate(prompts):
            violations.check(bool(ids), f"{name}[{i}]" if len(prompts) > 1 else name, "must hold at least one token")
        violations.raise_if_any()
        stopping, pooling = StoppingParams(max_tokens=0), Pooling(self.model.info.pooling)
        requests = [
            Request(f"{call_id}-{i}", ids, stopping=stopping, pooling=pooling, **options)
            for i, ids in enumerate(prompts)
        ]
        check_requests(requests, self.model.info, violations, {"prompt.token_ids": name})
        answers = await run_all(self.model, requests)
        return [(truncated(answer.end.embedding, self.dimensions), answer.end.usage) for answer in answers]


def check_count(count: int, violations: ViolationCollector, name: str) -> bool:
    """Whether a call may have ``count`` texts; if not, adds to ``violations``."""
    violations.check(count > 0, name, "must hold at least one text")
    violations.check(count <= MAX_INPUTS, name, f"holds {count} texts, at most {MAX_INPUTS} may be; send fewer")
    return 0 < count <= MAX_INPUTS


# Qwen3-Reranker's prompt. Its own special tokens are parsed; those that a document spells out are not.
_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Reranker:
    """Scores documents by a model that was trained to answer yes or no."""

    model: ServedModel
    yes: int  # token ids
    no: int

    @staticmethod
    def of(model: ServedModel) -> Reranker:
        """The reranker of ``model``.

        Raises:
            RerankNotSupportedError: it was not made for reranking, or lacks a token for yes or no.
        """
        encode = model.tokenizer.loaded.encode
        pair = [encode(word, add_special=False) for word in ("yes", "no")]
        if model.info.pooling != RANK or any(len(ids) != 1 for ids in pair):
            raise RerankNotSupportedError(model.info.target)
        return Reranker(model, pair[0][0], pair[1][0])

    async def requests(
        self, call_id: str, query: str, documents: Sequence[str], instruction: str, options: dict[str, Any]
    ) -> list[Request]:
        """A request per document that generates yes or no."""
        encode = self.model.tokenizer.encode
        head, tail = [await encode(text, add_special=False, parse_special=True) for text in (_HEAD, _TAIL)]
        requests = []
        for i, document in enumerate(documents):
            text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            body = await encode(text, add_special=False)
            await asyncio.sleep(0)
            ids = (*head, *body, *tail)
            requests.append(self._request(Request(f"{call_id}-{i}", ids, **options), (self.yes, self.no)))
        return requests

    async def scores(self, requests: Sequence[Request]) -> tuple[list[float], int]:
        """The chance of yes against no for each request, 0 to 1, and the tokens of all prompts; raises as `run_all`.

        The likelier of both tokens is generated, with its log-probability and those of the likeliest tokens. Where the
        other one is not among these, it is generated too, from the cached prompt.
        """
        answers = await run_all(self.model, requests)
        found = [_logprobs(answer) for answer in answers]
        missing = [(i, token) for i, known in enumerate(found) for token in (self.yes, self.no) if token not in known]
        again = [
            replace(self._request(requests[i], (token,)), request_id=f"{requests[i].request_id}-{token}")
            for i, token in missing
        ]
        for (i, _), answer in zip(missing, await run_all(self.model, again), strict=True):
            found[i] |= _logprobs(answer)
        margins = np.array([known[self.yes] - known[self.no] for known in found])
        return (1.0 / (1.0 + np.exp(-margins))).tolist(), sum(answer.end.usage.prompt_tokens for answer in answers)

    @staticmethod
    def _request(request: Request, allowed: tuple[int, ...]) -> Request:
        """``request`` for the likeliest token of ``allowed``."""
        return replace(
            request,
            sampling=SamplingParams(temperature=0.0, allowed_token_ids=allowed),
            stopping=StoppingParams(max_tokens=1, ignore_eos=True),
            output=OutputParams(logprobs=MAX_LOGPROBS, text=False),
            speculation=SpeculationParams(mode=SpeculationMode.OFF),
        )


def _logprobs(answer: Answer) -> dict[int, float]:
    """Log-probabilities of the generated and the likeliest tokens by id."""
    (row,) = answer.logprobs
    return dict(row.top) | {row.token_id: row.logprob}
