"""Embeddings in the form of OpenAI at /v1/embeddings, and reranking in that of Jina and Cohere at /v1/rerank."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.http.answering import Sample, Totals, whole_answer
from server.http.call import Call, Endpoint
from server.http.errors import CallRefusedError
from server.http.fields import MODEL
from server.http.openai_completions import PROMPT_RULE, PROMPTS, listed_prompts
from server.http.openai_format import OPENAI_ERRORS
from server.json_body import Body, RequestFields
from server.request_fields import (
    TEXT,
    Field,
    Schema,
    Table,
    either,
    flag_field,
    integer_field,
    listed,
    param_field,
    text_field,
    with_fields,
)
from server.served_model import ServedModel, Task
from specdec.core.fields import MAX_LOGPROBS
from specdec.core.types import (
    OutputParams,
    Pooling,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.validation import check_requests
from specdec.models.embedding import RANK, truncated

MAX_INPUTS = 2048  # texts or documents of one call; OpenAI's limit
IN_FLIGHT = 2  # requests of a call that are in the engine at once, per place in its batch
_NOT_SUPPORTED = 422  # SDKs do not retry after this status
_OPTIONS: Table = (param_field(Request, "priority"), param_field(Request, "cache_salt"))


async def _answers(call: Call, requests: Sequence[Request]) -> tuple[list[Sample], Totals]:
    """As `whole_answer`, all or none; at most `IN_FLIGHT` requests per place in the batch run at once."""
    return await whole_answer(call, requests, most=IN_FLIGHT * call.model.info.max_batch, all_or_none=True)


def _options(fields: RequestFields) -> dict[str, Any]:
    """The options of `_OPTIONS` as fields of `Request`."""
    return {each.sets: fields.engine[each.sets] for each in _OPTIONS if each.sets in fields.engine}


def _check_count(body: Body, name: str, count: int) -> None:
    if count > MAX_INPUTS:
        body.refuse(name, f"holds {count} texts, at most {MAX_INPUTS} may be; send fewer")


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


async def embeddings(
    call: Call,
    body: Body,
    name: str,
    given: Sequence[str | Sequence[int]],
    prefix: str,
    options: dict[str, Any],
    *,
    dimensions: int | None = None,
    longest: int | None = None,
) -> tuple[list[NDArray[np.float32]], int]:
    """The embeddings of the texts and lists of token ids in the field ``name``, float32 [size], and the number of all
    their tokens.

    prefix: of the requests' ids. options: fields of `Request`. dimensions: leading values to return; None: all.
    longest: as in `embedded_ids`.

    Raises:
        RequestError: the model was not made for embeddings, or the call cannot be served, and every bad field is
            listed; or as `_answers`.
    """
    model, info, violations = call.model, call.model.info, body.violations
    if info.pooling not in tuple(Pooling):
        problem = "makes no embeddings; serve an embedding model beside it (`engines`) and name that one in `model`"
        raise CallRefusedError(_NOT_SUPPORTED, "EMBEDDINGS_NOT_SUPPORTED", f"{info.target[:200]} {problem}", "model")
    if dimensions is not None and not 1 <= dimensions <= info.embedding_size:
        body.refuse("dimensions", f"must lie in 1..{info.embedding_size}, the size of the model's own")
    _check_count(body, name, len(given))
    violations.raise_if_any()
    call.field_names |= {"prompt": name, "prompt.token_ids": name}
    prompts = [await embedded_ids(model, each, longest) for each in given]
    for i, ids in enumerate(prompts):
        violations.check(bool(ids), f"{name}[{i}]" if len(prompts) > 1 else name, "must hold at least one token")
    violations.raise_if_any()
    if not prompts:
        return [], 0
    stopping, pooling = StoppingParams(max_tokens=0), Pooling(info.pooling)
    requests = [
        Request(f"{prefix}{i}-{call.request_id}", ids, stopping=stopping, pooling=pooling, **options)
        for i, ids in enumerate(prompts)
    ]
    check_requests(requests, info, violations)
    samples, totals = await _answers(call, requests)
    return [truncated(sample.end.embedding, dimensions) for sample in samples], totals.prompt_tokens


_ENCODINGS = ("float", "base64")
DIMENSIONS = integer_field("dimensions", 1, "So many leading values, scaled to length 1 again; default all.")
EMBEDDING_FIELDS: Table = (
    MODEL,
    Field("input", {**PROMPTS, "description": f"At most {MAX_INPUTS} texts, or lists of token ids."}, Body.raw),
    Field("encoding_format", {"enum": [*_ENCODINGS]}, Body.text, default="float"),
    DIMENSIONS,
    *_OPTIONS,
)


async def embed(call: Call) -> None:
    """An embedding of each text."""
    body, fields = await call.read_request(EMBEDDING_FIELDS)
    own, given = fields.own, listed_prompts(fields.own.get("input"))
    if given is None:
        body.refuse("input", PROMPT_RULE)
    if own["encoding_format"] not in _ENCODINGS:
        body.refuse("encoding_format", f"must be one of {', '.join(_ENCODINGS)}")
    dimensions, options = own.get("dimensions"), _options(fields)
    rows, tokens = await embeddings(call, body, "input", given or (), "embd", options, dimensions=dimensions)
    write = _base64 if own["encoding_format"] == "base64" else np.ascontiguousarray
    data = [{"object": "embedding", "index": i, "embedding": write(row)} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": call.model.name, "usage": usage, **call.notes()}
    await call.reply(200, answer)


def _base64(values: NDArray[np.float32]) -> str:
    """The values as float32 in little-endian order."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


# Qwen3-Reranker's prompt. Its own special tokens are parsed; those that a document spells out are not.
_HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Reranker:
    """Scores documents by a model that was trained to answer yes or no."""

    def __init__(self, call: Call) -> None:
        """The reranker of the model that ``call`` means.

        Raises:
            CallRefusedError: it was not made for reranking, or lacks a token for yes or no.
        """
        encode = call.model.tokenizer.loaded.encode
        pair = [encode(word, add_special=False) for word in ("yes", "no")]
        if call.model.info.pooling != RANK or any(len(ids) != 1 for ids in pair):
            problem = (
                f"{call.model.info.target[:200]} does not rerank documents; serve a reranker that answers yes or no, "
                "such as Qwen3-Reranker, beside it (`engines`) and send it this call"
            )
            raise CallRefusedError(_NOT_SUPPORTED, "RERANK_NOT_SUPPORTED", problem, "model")
        self._call = call
        self.yes, self.no = pair[0][0], pair[1][0]  # token ids

    async def requests(
        self, query: str, documents: Sequence[str], instruction: str, options: dict[str, Any]
    ) -> list[Request]:
        """A request per document that generates yes or no. options: fields of `Request`."""
        encode = self._call.model.tokenizer.encode
        head, tail = [await encode(text, add_special=False, parse_special=True) for text in (_HEAD, _TAIL)]
        requests = []
        for i, document in enumerate(documents):
            text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            body = await encode(text, add_special=False)
            await asyncio.sleep(0)
            whole = Request(f"rerank{i}-{self._call.request_id}", (*head, *body, *tail), **options)
            requests.append(self._request(whole, (self.yes, self.no)))
        return requests

    async def scores(self, requests: Sequence[Request]) -> tuple[list[float], int]:
        """The chance of yes against no for each request, 0 to 1, and the tokens of all prompts; raises as `_answers`.

        The likelier of both tokens is generated, with its log-probability and those of the likeliest tokens. Where the
        other one is not among these, it is generated too, from the cached prompt.
        """
        samples, totals = await _answers(self._call, requests)
        found = [_logprobs(sample) for sample in samples]
        missing = [(i, token) for i, known in enumerate(found) for token in (self.yes, self.no) if token not in known]
        if missing:
            again = [
                replace(self._request(requests[i], (token,)), request_id=f"{token}-{requests[i].request_id}")
                for i, token in missing
            ]
            samples, _ = await _answers(self._call, again)
            for (i, _), sample in zip(missing, samples, strict=True):
                found[i] |= _logprobs(sample)
        margins = np.array([known[self.yes] - known[self.no] for known in found])
        return (1.0 / (1.0 + np.exp(-margins))).tolist(), totals.prompt_tokens

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


def _logprobs(sample: Sample) -> dict[int, float]:
    """Log-probabilities of the generated and the likeliest tokens by id."""
    (row,) = sample.logprobs
    return dict(row.top) | {row.token_id: row.logprob}


_DOCUMENT: Schema = either(TEXT, with_fields({"text": TEXT}, "text"))
RERANK_FIELDS: Table = (
    MODEL,
    text_field("query"),
    Field("documents", {**listed(_DOCUMENT), "description": f"At most {MAX_INPUTS} texts."}, Body.raw),
    integer_field("top_n", 1, "So many documents of the highest scores; default all."),
    flag_field("return_documents"),
    text_field("instruction", "What makes a document relevant; default: that it answers a web search query."),
    *_OPTIONS,
)


async def rerank(call: Call) -> None:
    """The documents by falling relevance to the query."""
    body, fields = await call.read_request(RERANK_FIELDS)
    reranker, own, violations = Reranker(call), fields.own, body.violations
    documents = _documents(body, own.get("documents"))
    violations.check(bool(own.get("query")), "query", "must be a text that is not empty")
    violations.raise_if_any()
    call.field_names |= {"prompt": "documents", "prompt.token_ids": "documents"}
    instruction = own.get("instruction") or INSTRUCTION
    requests = await reranker.requests(own["query"], documents, instruction, _options(fields))
    check_requests(requests, call.model.info, violations)
    scores, tokens = await reranker.scores(requests)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: own.get("top_n")]
    shown = own["return_documents"]
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": scores[i], **({"document": {"text": documents[i]}} if shown else {})}
        for i in order
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "results": results, "model": call.model.name, "usage": usage, **call.notes()}
    await call.reply(200, answer)


def _documents(body: Body, given: Any) -> list[str]:
    """The documents' texts; ``body`` notes what is wrong."""
    whole = given if isinstance(given, list) else [None]
    found = [each.get("text") if isinstance(each, dict) else each for each in whole]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        body.refuse("documents", 'must be a list of strings or of {"text": "..."}')
    elif not texts:
        body.refuse("documents", "must hold at least one text")
    _check_count(body, "documents", len(texts))
    return texts


EMBEDDINGS = (
    Endpoint("POST", "/v1/embeddings", embed, OPENAI_ERRORS, "Embeddings of texts", EMBEDDING_FIELDS, ("input",),
             task=Task.EMBED, gated=True),
    *(Endpoint("POST", path, rerank, OPENAI_ERRORS, "Documents by relevance to a query", RERANK_FIELDS,
               ("query", "documents"), task=Task.RERANK, gated=True)
      for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
)  # fmt: skip
