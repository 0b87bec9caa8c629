"""What a body of /v1/completions asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from server.http.body import Body
from server.http.call import Call
from server.http.fields.common import read_common
from server.http.fields.grammar import read_grammar
from server.http.fields.prediction import read_prediction
from server.http.fields.sampling import read_sampling
from server.http.fields.stopping import MAX_TOKENS, read_stopping
from server.http.openai.prompts import Prompt, read_prompts
from server.http.openai.samples_asked import read_n
from server.http.openai.step_tree import read_step_trees
from server.http.openai.stream_options import StreamOptions, read_stream_options
from server.http.validation import validate
from specdec.engine.validation import MAX_LOGPROBS
from specdec.types import OutputParams, Request

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, slots=True)
class CompletionAsk:
    """One request per prompt. ``echo``: the text to put before each prompt's samples."""

    requests: tuple[Request, ...]
    streaming: StreamOptions
    echo: tuple[str, ...]
    return_token_ids: bool


async def read_completion(call: Call, default_tokens: int = DEFAULT_MAX_TOKENS) -> CompletionAsk:
    """What ``call`` asks for; ``default_tokens`` at most where it does not say how many.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body = call.body()
    call.face.check_model(body.text("model"))
    call.field_names["prompt.token_ids"] = "prompt"
    given = body.integer("max_tokens", 0, MAX_TOKENS)
    max_tokens = default_tokens if given is None else given
    prompts = await read_prompts(body, call.face.frontend, max_tokens)
    streaming = read_stream_options(body)
    template = await _template(call, body, max_tokens)
    if prompts and prompts[0].ends:
        ends = (*template["stopping"].stop_token_ids, *prompts[0].ends)
        template["stopping"] = dataclasses.replace(template["stopping"], stop_token_ids=ends)
    if read_step_trees(body, streaming):
        template["output"] = dataclasses.replace(template["output"], trees=True)
    request_id = f"cmpl-{call.request_id}"
    # Without a good prompt the other fields are checked all the same, on a stand-in.
    ids = [prompt.ids for prompt in prompts] or [(0,)]
    requests = tuple(
        Request(request_id=request_id if len(ids) == 1 else f"{request_id}-{i}", prompt_ids=tokens, **template)
        for i, tokens in enumerate(ids)
    )
    echo, token_ids = body.flag("echo"), body.flag("return_token_ids")
    if echo and template["output"].logprobs is not None:
        body.refuse(
            "echo", "can not go with logprobs; ask for logprobs alone, and put the prompt before the text yourself"
        )
    validate(requests, call.face.info, body.seen)
    texts = [await _text(call, prompt) if echo else "" for prompt in prompts]
    return CompletionAsk(requests, streaming, tuple(texts), token_ids)


async def _template(call: Call, body: Body, max_tokens: int) -> dict[str, Any]:
    """The fields of `Request` but for prompt and id."""
    frontend = call.face.frontend
    return {
        "sampling": read_sampling(body, read_n(body)),
        "stopping": read_stopping(body, frontend.loaded_tokenizer, max_tokens),
        "output": OutputParams(
            logprobs=body.integer("logprobs", 0, MAX_LOGPROBS),
            skip_special_tokens=body.flag("skip_special_tokens", True),
        ),
        "prediction_ids": await read_prediction(body, frontend),
        "grammar": read_grammar(body),
        **read_common(call, body),
    }


async def _text(call: Call, prompt: Prompt) -> str:
    return await call.face.frontend.decode(prompt.ids) if prompt.text is None else prompt.text
