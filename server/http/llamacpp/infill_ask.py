"""What a body of /infill asks for."""

from __future__ import annotations

import dataclasses

from server.auth.caller import current_caller
from server.completion.completion_options import CompletionOptions
from server.completion.context_file import ContextFile
from server.completion.gap import Gap
from server.http.body import Body
from server.http.call import Call
from server.http.fields.common import read_common
from server.http.llamacpp.ask import Ask
from server.http.llamacpp.ask_reader import read_ask
from server.http.llamacpp.logit_bias import read_logit_bias
from server.http.llamacpp.probabilities import read_output
from server.http.llamacpp.sampling import read_llama_sampling
from server.http.llamacpp.stopping import read_llama_grammar, read_llama_stopping
from server.http.validation import validate

REPOSITORY, OWN_NAME = "myproject", "filename"  # what llama.cpp itself calls them


async def read_infill(call: Call) -> Ask:
    """What ``call`` asks for.

    Raises:
        FimNotSupportedError: the model can not fill in the middle of a text.
        RequestError: it can not be served; every bad field is named.
    """
    body, frontend = call.body(), call.face.frontend
    call.face.check_model(body.text("model"))
    gap = _gap(body)
    stopping = read_llama_stopping(body, frontend.loaded_tokenizer)
    bias = await read_logit_bias(body, frontend)
    sampling = dataclasses.replace(read_llama_sampling(body), logit_bias=bias)
    options = CompletionOptions(
        dedent=False,  # clients say what they want in n_indent
        sampling=sampling,
        output=read_output(body),
        stopping=stopping,
        grammar=read_llama_grammar(body),
        **read_common(call, body),
    )
    body.seen.raise_if_any()
    maker = call.face.completion.maker
    request = await maker.make(gap, options, current_caller(), f"infill-{call.request_id}")
    ask = read_ask(body, request, stopping.max_tokens)
    validate([request], call.face.info, body.seen)
    return ask


def _gap(body: Body) -> Gap:
    """``prompt`` is the cursor's line in front of it. The newest of the other texts is the last, and goes in first."""
    for name in ("input_prefix", "input_suffix"):
        if not body.has(name):
            body.refuse(name, f'"{name}" is required')
    files = []
    for i, extra in enumerate(body.objects("input_extra")):
        text, filename, time_ms = extra.text("text"), extra.text("filename"), extra.number("time")
        if text is None:
            extra.refuse("text", "must be a string")
            continue
        files.append(ContextFile(filename or f"snippet{i}", text, time_ms=int(time_ms or 0)))
    shown = bool(files)
    return Gap(
        prefix=(body.text("input_prefix") or "") + (body.text("prompt") or ""),
        suffix=body.text("input_suffix") or "",
        files=tuple(files),
        repo=REPOSITORY if shown else "",
        path=OWN_NAME if shown else "",
    )
