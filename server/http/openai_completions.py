"""OpenAI's /v1/completions: its body, its streamed and its whole answer, log-probabilities of the prompt's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from server.completion.prompt_packer import PackedPrompt
from server.http.answering import Sample, answer, whole_answer
from server.http.call import Call
from server.http.fields import TTFT
from server.http.openai_format import SHARED, ChoicesAnswer, LegacyLogprobs, check_shared, finish_fields
from server.json_body import Body, RequestFields
from server.request_fields import (
    IDS,
    NO_PROMPT,
    TEXTS,
    Field,
    Table,
    either,
    flag_field,
    listed,
    param_field,
    param_fields,
    text_field,
)
from server.served_model import ServedModel
from specdec.core.types import (
    Delta,
    Finished,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    SamplingParams,
    StoppingParams,
    TokenLogprobs,
)
from specdec.engine.validation import check_requests

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16  # OpenAI's
PROMPTS = either(TEXTS, IDS, listed(IDS))
PROMPT_RULE = "must be text, a list of token ids, or a list of such"


def completion_fields(default_tokens: int, *, parse_special: bool) -> Table:
    """The fields of a completion, which generates ``default_tokens`` at most if it does not say how many."""
    return (
        *SHARED,
        *param_fields(OutputParams),
        param_field(StoppingParams, "max_tokens", default=default_tokens),
        Field("prompt", PROMPTS, Body.raw),
        text_field("suffix", "What follows the gap to be filled."),
        TTFT,
        flag_field("echo"),
        flag_field("add_special_tokens", default=True),
        flag_field(
            "parse_special", "Special tokens spelled out in the prompt are read as such.", default=parse_special
        ),
    )


COMPLETION_FIELDS = completion_fields(DEFAULT_MAX_TOKENS, parse_special=True)


async def read_prompts(body: Body, fields: RequestFields, model: ServedModel) -> list[PackedPrompt]:
    """Every prompt, encoded. With ``suffix``, each prompt is the text before a gap, of which as much is used as leaves
    room for the output.

    Raises:
        FimNotSupportedError: there is a suffix, and the model cannot fill in.
    """
    own = fields.own
    given, suffix = listed_prompts(own.get("prompt")), own.get("suffix")
    if given is None:
        body.refuse("prompt", PROMPT_RULE)
        given = []
    if len(given) > MAX_PROMPTS:
        body.refuse("prompt", f"at most {MAX_PROMPTS} prompts, got {len(given)}; send the others separately")
        given = []
    if suffix and not all(isinstance(prompt, str) for prompt in given):
        body.refuse("suffix", "needs prompts of text")
        given = []
    prompts = []
    for prompt in given:
        if not isinstance(prompt, str):
            prompts.append(PackedPrompt(tuple(prompt)))
        elif suffix:
            packed = await model.maker.pack_between(
                prompt, suffix, fields.engine["stopping.max_tokens"], salt=fields.engine.get("cache_salt", ""),
                ttft_ms=own.get("ttft_ms"),
            )  # fmt: skip
            fields.stop_at(packed.ends)
            prompts.append(packed)
        else:
            special, parse = own["add_special_tokens"], own["parse_special"]
            ids = await model.tokenizer.encode(prompt, add_special=special, parse_special=parse)
            prompts.append(PackedPrompt(tuple(ids)))
    return prompts


def listed_prompts(value: Any) -> list[str | list[int]] | None:
    """The texts and lists of token ids in a body's value; None: it is neither, nor a list of them."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return None
    if _is_ids(value):
        return [value]
    return value if all(isinstance(prompt, str) or _is_ids(prompt) for prompt in value) else None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


class CompletionAnswer(ChoicesAnswer):
    """A stream has a chunk per Delta with text and one per sample's end."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, call: Call, requests: Sequence[Request], own: Mapping[str, Any], echo: Sequence[str]) -> None:
        """requests: one per prompt. echo: the text in front of each prompt's samples."""
        super().__init__(call, requests, own)
        self.echo, self._n = echo, self.request.sampling.n
        self.scores: Sequence[Sequence[TokenLogprobs]] = ()  # of each prompt's tokens, if they were requested
        self._prompts = {request.request_id: number for number, request in enumerate(requests)}
        self._logprobs: list[LegacyLogprobs] | None = None
        if self.request.output.logprobs is not None:
            skip = self.request.output.skip_special_tokens
            self._logprobs = [
                LegacyLogprobs(self._tokenizer, self.request.resume, skip_special=skip) for _ in range(self._samples)
            ]

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Delta):
            return self._delta(event)
        if isinstance(event, Finished):
            return self._last_chunk({"index": event.index, "text": "", "logprobs": None, **finish_fields(event)})
        prompt = self._prompts[event.request_id]
        return b"".join(self._beginning(prompt, prompt * self._n + i) for i in range(self._n))

    def _beginning(self, prompt: int, index: int) -> bytes:
        """The prompt as a sample's first chunk, if the call asks for any of it."""
        text = self.echo[prompt]
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self.scores:
            choice["logprobs"] = self._prompt_rows(prompt, index)
        if self.own["return_token_ids"]:
            choice |= {"prompt_token_ids": self.requests[prompt].prompt_ids, "token_ids": []}
        elif not text:
            return b""
        return self._chunk(choice)

    def _delta(self, event: Delta) -> bytes:
        beside = self._beside(event)
        if not (event.text or self._logprobs or beside):
            return b""
        logprobs = None if self._logprobs is None else self._logprobs[event.index].rows(event.logprobs)
        choice = {"index": event.index, "text": event.text, "logprobs": logprobs, "finish_reason": None}
        return self._chunk(choice | beside)

    def _choice(self, sample: Sample) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None:
            before = self._prompt_rows(sample.prompt, sample.index) if self.scores else {}
            rows = self._logprobs[sample.index].rows(sample.logprobs)
            logprobs = {name: before.get(name, []) + values for name, values in rows.items()}
        prompt_ids = self.requests[sample.prompt].prompt_ids
        return {
            "index": sample.index,
            "text": self.echo[sample.prompt] + sample.text,
            "logprobs": logprobs,
            **finish_fields(sample.end),
            **self._ids(prompt_token_ids=prompt_ids, token_ids=sample.token_ids),
        }

    def _prompt_rows(self, prompt: int, index: int) -> dict[str, list[Any]]:
        assert self._logprobs is not None  # scored prompts have log-probabilities
        first = self.requests[prompt].prompt_ids[0]
        return self._logprobs[index].prompt(first, self.scores[prompt], self.echo[prompt])


async def parse_completion(
    call: Call, table: Table = COMPLETION_FIELDS, form: type[CompletionAnswer] = CompletionAnswer
) -> CompletionAnswer:
    """What ``call`` asks for; raises as `Call.checked_request`."""
    body, fields = await call.read_request(table)
    call.field_names["prompt.token_ids"] = "prompt"
    prompts = await read_prompts(body, fields, call.model)
    check_shared(body, fields)
    if body.raw("max_tokens") == -1:
        fields.engine["stopping.max_tokens"] = None  # not the dialect's default either
    requests = tuple(
        dataclasses.replace(
            # The number is in front: another call may have the id that a number behind this one's would make.
            fields.request(f"cmpl{i if len(prompts) > 1 else ''}-{call.request_id}", prompt.ids),
            omitted=prompt.omitted,
        )
        for i, prompt in enumerate(prompts or [PackedPrompt(NO_PROMPT)])
    )
    echo = fields.own.get("echo", False)  # Mistral's gaps have none
    if requests[0].resume is not None and (echo or len(requests) > 1):
        body.refuse("resume", "goes with one prompt, and without echo, which came before")
    if call.supersedes_key and len(requests) > 1:
        body.refuse("supersedes_key", "goes with one prompt; send the others in calls of their own")
    if echo and requests[0].output.logprobs is not None and fields.own.get("suffix"):
        body.refuse("echo", "cannot go with logprobs and suffix; leave out one of them")
    check_requests(requests, call.model.info, body.violations)
    texts = [""] * len(prompts)
    if echo:
        given = listed_prompts(fields.own["prompt"]) or ()
        texts = [each if isinstance(each, str) else await call.model.tokenizer.decode(each) for each in given]
    return form(call, requests, fields.own, texts)


async def complete(call: Call) -> None:
    """Answer a call of /v1/completions."""
    form = await parse_completion(call)
    if form.own["echo"] and form.request.output.logprobs is not None:
        form.scores = await prompt_logprobs(call, form.requests)
    await answer(call, form)


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
            request_id=f"prompt{begin}-{request.request_id}",
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
        windows = [request for request in asked if request is not None]
        samples, _ = await whole_answer(call, windows)
        left = [rows for rows, request in zip(found, asked, strict=True) if request is not None]
        for rows, sample in zip(left, samples, strict=True):
            rows += sample.logprobs
    return found
