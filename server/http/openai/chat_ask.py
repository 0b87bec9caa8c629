"""What a body of /v1/chat/completions asks for."""

from __future__ import annotations

from dataclasses import dataclass

from server.http.body import Body
from server.http.call import Call
from server.http.fields.common import read_common
from server.http.fields.grammar import read_grammar
from server.http.fields.prediction import read_prediction
from server.http.fields.sampling import read_sampling
from server.http.fields.stopping import MAX_TOKENS, read_stopping
from server.http.openai.messages import read_conversation
from server.http.openai.samples_asked import read_n
from server.http.openai.step_tree import read_step_trees
from server.http.openai.stream_options import StreamOptions, read_stream_options
from server.http.openai.tools import read_tools
from server.http.validation import validate
from specdec.engine.validation import MAX_LOGPROBS
from specdec.types import OutputParams, Request


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """``tools``: the model was told of tools, so its text may hold calls of them."""

    request: Request
    streaming: StreamOptions
    tools: bool
    return_token_ids: bool


async def read_chat(call: Call) -> ChatAsk:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, frontend = call.body(), call.face.frontend
    call.face.check_model(body.text("model"))
    call.field_names["prompt"] = "messages"
    tools = read_tools(body)
    ids = await read_conversation(body, frontend, tools)
    streaming = read_stream_options(body)
    request = Request(
        request_id=f"chatcmpl-{call.request_id}",
        prompt_ids=ids or (0,),  # a stand-in where the messages are bad: the other fields are checked all the same
        sampling=read_sampling(body, read_n(body)),
        stopping=read_stopping(body, frontend.loaded_tokenizer, _max_tokens(body)),
        output=OutputParams(
            logprobs=_logprobs(body),
            skip_special_tokens=body.flag("skip_special_tokens", True),
            trees=read_step_trees(body, streaming),
        ),
        prediction_ids=await read_prediction(body, frontend),
        grammar=read_grammar(body),
        **read_common(call, body),
    )
    token_ids = body.flag("return_token_ids")
    body.seen.check(bool(ids) or bool(body.seen.violations), "messages", "must amount to at least one token")
    validate([request], call.face.info, body.seen)
    told = tools is not None and frontend.loaded_tokenizer.has_tool_template
    return ChatAsk(request, streaming, told, token_ids)


def _max_tokens(body: Body) -> int | None:
    """``max_completion_tokens``, or by its former name ``max_tokens``; None: up to the context limit."""
    old, new = body.integer("max_tokens", 0, MAX_TOKENS), body.integer("max_completion_tokens", 0, MAX_TOKENS)
    if new is not None:
        body.names["stopping.max_tokens"] = "max_completion_tokens"
    return old if new is None else new


def _logprobs(body: Body) -> int | None:
    wanted, top = body.flag("logprobs"), body.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        body.refuse("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None
