"""What OpenAI's completions and chat share: options of answers, usage, log-probabilities, chunks, errors."""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from time import time
from typing import Any

from server.http.answering import DONE, Answer, Sample, Totals, sse
from server.http.call import Call, ErrorStyle
from server.http.errors import Refusal
from server.http.fields import COMMON, MODEL, SAMPLING, STOPPING
from server.json_body import Body, RequestFields
from server.request_fields import (
    GRAMMAR,
    INTEGER,
    PREDICTION,
    RESUME,
    Field,
    Table,
    flag_field,
    object_field,
    param_field,
)
from specdec.core.fields import MAX_N
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    Request,
    ResumeParams,
    SamplingParams,
    StepTree,
    TokenLogprobs,
    metrics_dict,
)
from specdec.models.tokenizer import Tokenizer

ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 422: "not_supported_error", 429: "rate_limit_error",
    500: "server_error", 501: "not_supported_error", 503: "server_error",
}  # fmt: skip
TOO_LONG = "This model's maximum context length is {limit} tokens, but the {message}"


def _error_body(refusal: Refusal) -> dict[str, Any]:
    """``param`` is the first wrong field, and ``errors`` lists all of them."""
    error: dict[str, Any] = {
        "message": refusal.worded(TOO_LONG),
        "type": ERROR_TYPES.get(refusal.status, "invalid_request_error"),
        "param": refusal.field,
        "code": refusal.reason.lower(),
    }
    if refusal.violations:
        error["errors"] = [{"param": v.field, "message": v.description} for v in refusal.violations]
    return {"error": error}


OPENAI_ERRORS = ErrorStyle(_error_body, sse)  # no [DONE] follows, because the answer is incomplete


def check_shared(body: Body, fields: RequestFields) -> None:
    """Refuse a ``best_of`` that differs from ``n``, since every sample that is made is returned, and
    ``return_step_trees`` without a stream, whose chunks are the steps."""
    n = fields.engine.get("sampling.n", 1)
    if fields.own.get("best_of", n) != n:
        body.refuse("best_of", f"must equal n ({n}): every sample is returned; ask for more with n and choose yourself")
    if fields.engine.get("output.trees") and not fields.own["stream"]:
        body.refuse("return_step_trees", "goes with the steps of a streamed answer: set stream to true")


def set_logprobs(body: Body, fields: RequestFields, wanted: bool, needed: str = "logprobs to be true") -> None:
    """``top_logprobs`` counts only if log-probabilities are ``wanted`` at all; ``needed`` says how to ask for them."""
    top = fields.engine.pop("output.logprobs", None)
    if top and not wanted:
        body.refuse("top_logprobs", f"needs {needed}")
    if wanted:
        fields.engine["output.logprobs"] = top or 0


def usage_so_far(totals: Totals) -> dict[str, Any]:
    """OpenAI's ``usage`` without its details."""
    return {
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.output_tokens,
        "total_tokens": totals.prompt_tokens + totals.output_tokens,
    }


def usage(totals: Totals) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return usage_so_far(totals) | {
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens, **totals.omitted},
        "completion_tokens_details": {
            "accepted_prediction_tokens": totals.accepted_prediction_tokens,
            "rejected_prediction_tokens": totals.rejected_prediction_tokens,
            "reasoning_tokens": totals.thought_tokens,
            **({"resumed_tokens": totals.resumed_tokens} if totals.resumed_tokens else {}),
        },
    }


def extras(totals: Totals) -> dict[str, Any]:
    """Further fields: the first prompt's seed, and the statistics of speculation in vLLM's form."""
    return {"seed": totals.seed, "metrics": metrics_dict(totals.stats)}


_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


def finish_fields(event: Finished, called_tools: bool = False) -> dict[str, Any]:
    """``finish_reason`` (``abort``, as in vLLM, if the request was aborted by its id), and vLLM's ``stop_reason``: the
    caller's stop string or token id that ended the sample."""
    reason = _REASONS.get(event.reason, "stop")
    return {
        "finish_reason": "tool_calls" if called_tools and reason == "stop" else reason,
        "stop_reason": None if event.reason is FinishReason.EOS else event.matched_stop,
    }


def step_tree_value(tree: StepTree, tokenizer: Tokenizer) -> dict[str, Any]:
    """``tree`` with the text of each node; an incomplete character becomes a replacement character."""
    rows = zip(tree.tokens, tree.parents, tree.chances, tree.sources, strict=True)
    return {
        "nodes": [
            {
                "token_id": token,
                "text": tokenizer.token_bytes(token).decode("utf-8", "replace"),
                "parent": parent,
                "chance": chance,
                "sources": sources,
            }
            for token, parent, chance, sources in rows
        ],
        "accepted": tree.accepted,
        "draft_ms": round(tree.draft_ms, 3),
        "verify_ms": round(tree.verify_ms, 3),
    }


_FLOOR = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


class LegacyLogprobs:
    """Log-probabilities in the form of /v1/completions. Each sample needs its own, which counts text offsets; a resumed
    sample begins after the text of its ``resume`` tokens. skip_special: the text has no special tokens."""

    def __init__(self, tokenizer: Tokenizer, resume: ResumeParams | None = None, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        for token in () if resume is None else resume.token_ids:
            self._advance(token)

    def prompt(self, first: int, rows: Sequence[TokenLogprobs], text: str) -> dict[str, list[Any]]:
        """The rows of a prompt; its token ``first`` has no log-probability. text: the prompt's, which may hold some of
        its special tokens."""
        begin: dict[str, list[Any]] = {
            "text_offset": [self._advance(first, text)],
            "token_logprobs": [None],
            "tokens": [self._text(first)],
            "top_logprobs": [None],
        }
        return {name: begin[name] + values for name, values in self.rows(rows, text).items()}

    def rows(self, rows: Sequence[TokenLogprobs], prompt: str | None = None) -> dict[str, list[Any]]:
        """The next rows. Offsets count characters of the text. prompt: the rows are those of this text."""
        return {
            "text_offset": [self._advance(row.token_id, prompt) for row in rows],
            "token_logprobs": [_number(row.logprob) for row in rows],
            "tokens": [self._text(row.token_id) for row in rows],
            "top_logprobs": [{self._text(token): _number(p) for token, p in row.top} for row in rows],
        }

    def _advance(self, token: int, prompt: str | None = None) -> int:
        """Return the token's offset, and move past it if the text has it."""
        offset, shown = self._offset, True
        if token in self._tokenizer.special_ids:
            shown = not self._skip_special if prompt is None else prompt.startswith(self._text(token), offset)
        if shown:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offset

    def _text(self, token: int) -> str:
        """An incomplete character is written as ``bytes:\\xe2\\x80``, so that tokens remain distinct."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def logprob_entries(
    tokenizer: Tokenizer, rows: Sequence[TokenLogprobs], *, with_ids: bool = False
) -> list[dict[str, Any]]:
    """The tokens of ``rows`` as in /v1/chat/completions, each with the likeliest tokens at its position in
    ``top_logprobs``. with_ids: every token also has its ``id``, as in llama.cpp."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        named = {"id": token} if with_ids else {}
        return {**named, "token": data.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(data)}

    return [entry(row.token_id, row.logprob) | {"top_logprobs": [entry(*top) for top in row.top]} for row in rows]


def _number(logprob: float) -> float:
    return max(logprob, _FLOOR)


class ChoicesAnswer(Answer):
    """What the answers of completions and chat have in common: choices, in one piece or in the chunks of a stream.

    With ``include_usage``, a last chunk without choices has the usage; with ``continuous_usage_stats``, every chunk has
    the usage so far. With ``return_token_ids``, choices have their token ids, and the prompt's are returned too.
    """

    id_prefix: str  # of the answer's id
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"  # what an answer and a chunk are called
    is_mistral = False  # Mistral's: the last chunk with a choice has the usage, and a call comes in one piece

    def __init__(self, call: Call, requests: Sequence[Request], own: Mapping[str, Any]) -> None:
        """own: the fields of the body that are options of the answer."""
        super().__init__(call, requests, stream=own["stream"])
        self.own = own
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{call.request_id}",
            "object": self.chunk_kind if self.stream else self.kind,
            "created": int(time()),
            "model": call.model.name,
            "system_fingerprint": call.model.fingerprint,
            **call.notes(),
        }
        self._samples = requests[0].sampling.n * len(requests)

    def last(self) -> bytes:
        if not self.own["include_usage"]:
            return DONE
        return sse({**self._head, "choices": [], "usage": usage(self.totals), **extras(self.totals)}) + DONE

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        choices = [self._choice(sample) for sample in samples]
        return {**self._head, "choices": choices, "usage": usage(self.totals), **extras(self.totals)}

    @abstractmethod
    def _choice(self, sample: Sample) -> dict[str, Any]:
        """A whole sample. Counts the tokens of its thoughts in `totals`."""

    def _ids(self, **ids: Sequence[int]) -> dict[str, Any]:
        """``ids``, if the call asks for them."""
        return ids if self.own["return_token_ids"] else {}

    def _beside(self, event: Delta) -> dict[str, Any]:
        """What a choice has beside the text of ``event``, if the call asks for it: token ids, the tree of the step."""
        found: dict[str, Any] = {}
        if self.own["return_token_ids"]:
            found["token_ids"] = event.token_ids
        if event.tree is not None:
            found["step_tree"] = step_tree_value(event.tree, self._tokenizer)
        return found

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        """One chunk with one choice."""
        chunk = {**self._head, "choices": [choice], **more}
        if self.own["include_usage"]:
            chunk["usage"] = usage_so_far(self.totals) if self.own["continuous_usage_stats"] else None
        return sse(chunk)

    def _last_chunk(self, choice: dict[str, Any]) -> bytes:
        """The chunk that ends a sample, which `totals` already counts. The last one has the figures, unless a chunk of
        their own was requested."""
        if self.totals.finished < self._samples or self.own["include_usage"]:
            return self._chunk(choice)
        figures = extras(self.totals)
        if self.is_mistral:
            figures["usage"] = usage(self.totals)
        return self._chunk(choice, **figures)


SHARED: Table = (
    MODEL,
    param_field(SamplingParams, "n"),
    Field("best_of", {**INTEGER, "description": "Equal to n, if present."}, partial(Body.integer, low=1, high=MAX_N)),
    flag_field("stream"),
    object_field("stream_options", (flag_field("include_usage"), flag_field("continuous_usage_stats"))),
    flag_field("return_token_ids"),
    *SAMPLING,
    *STOPPING,
    *GRAMMAR,
    PREDICTION,
    RESUME,
    *COMMON,
)
"""Fields of completions and chat alike."""
