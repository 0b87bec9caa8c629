"""/v1/embeddings in OpenAI's form, and /v1/rerank in that of Jina and Cohere."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.embedding import INSTRUCTION, MAX_INPUTS, EmbeddingCall, Reranker, check_count, embedded_ids
from server.http.call import Call, Endpoint
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
from server.served_model import Task
from specdec.core.types import Request
from specdec.engine.validation import check_requests

_ENCODINGS = ("float", "base64")
_OPTIONS: Table = (param_field(Request, "priority"), param_field(Request, "cache_salt"))
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
    with call.model.gate.enter():
        body, fields = await call.read_request(EMBEDDING_FIELDS)
        own, violations = fields.own, body.violations
        asked = EmbeddingCall.of(call.model, own.get("dimensions"), violations)
        given = listed_prompts(own.get("input"))
        if given is None:
            body.refuse("input", PROMPT_RULE)
        elif own["encoding_format"] not in _ENCODINGS:
            body.refuse("encoding_format", f"must be one of {', '.join(_ENCODINGS)}")
        elif check_count(len(given), violations, "input"):
            call.field_names |= {"prompt": "input", "prompt.token_ids": "input"}
        violations.raise_if_any()
        prompts = [await embedded_ids(call.model, each) for each in given or ()]
        found = await asked.run(f"embd-{call.request_id}", prompts, _options(fields), violations, "input")
        tokens = sum(usage.prompt_tokens for _, usage in found)
        write = _base64 if own["encoding_format"] == "base64" else np.ascontiguousarray
        data = [{"object": "embedding", "index": i, "embedding": write(row)} for i, (row, _) in enumerate(found)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"object": "list", "data": data, "model": call.model.name, "usage": usage, **call.notes()}
        await call.reply(200, answer)


def _options(fields: RequestFields) -> dict[str, Any]:
    """The options of `_OPTIONS` as fields of `Request`."""
    return {each.sets: fields.engine[each.sets] for each in _OPTIONS if each.sets in fields.engine}


def _base64(values: NDArray[np.float32]) -> str:
    """The values as float32 in little-endian order."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


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
    with call.model.gate.enter():
        body, fields = await call.read_request(RERANK_FIELDS)
        reranker, own, violations = Reranker.of(call.model), fields.own, body.violations
        documents = _documents(body, own.get("documents"))
        violations.check(bool(own.get("query")), "query", "must be a text that is not empty")
        violations.raise_if_any()
        call.field_names |= {"prompt": "documents", "prompt.token_ids": "documents"}
        instruction = own.get("instruction") or INSTRUCTION
        requests = await reranker.requests(
            f"rerank-{call.request_id}", own["query"], documents, instruction, _options(fields)
        )
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
    else:
        check_count(len(texts), body.violations, "documents")
    return texts


EMBEDDINGS = (
    Endpoint("POST", "/v1/embeddings", embed, OPENAI_ERRORS, "Embeddings of texts", EMBEDDING_FIELDS, ("input",),
             task=Task.EMBED),
    *(Endpoint("POST", path, rerank, OPENAI_ERRORS, "Documents by relevance to a query", RERANK_FIELDS,
               ("query", "documents"), task=Task.RERANK) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
)  # fmt: skip
