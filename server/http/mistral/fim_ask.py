"""What a body of /v1/fim/completions asks for."""

from __future__ import annotations

from server.completion.completion_options import DEFAULT_MAX_TOKENS
from server.http.call import Call
from server.http.openai.completion_ask import CompletionAsk, read_completion
from specdec.errors import FieldViolation, InvalidRequestError


async def read_fim(call: Call) -> CompletionAsk:
    """What ``call`` asks for: OpenAI's fields, with ``random_seed`` for the seed, and one prompt, of text.

    Raises:
        FimNotSupportedError: the model can not fill in the middle of a text.
        RequestError: it can not be served; every bad field is named.
    """
    if not isinstance(call.data.get("prompt"), str):
        raise InvalidRequestError([FieldViolation("prompt", "must be text: what stands before the gap")])
    if call.data.get("random_seed") is not None:
        call.data["seed"] = call.data["random_seed"]
    return await read_completion(call, DEFAULT_MAX_TOKENS)
