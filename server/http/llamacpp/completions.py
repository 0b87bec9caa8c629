"""POST /infill and POST /completion."""

from __future__ import annotations

from server.http.answering import stream_answer, whole_answer
from server.http.call import Call
from server.http.llamacpp.ask import Ask
from server.http.llamacpp.completion_ask import read_completion
from server.http.llamacpp.infill_ask import read_infill
from server.http.llamacpp.llama_stream import LlamaStream
from server.http.llamacpp.probabilities import probabilities
from server.http.llamacpp.result import result
from server.http.sample import Sample


async def infill(call: Call) -> None:
    """Fill a gap.

    Raises:
        RequestError: it can not be done.
    """
    with call.face.frontend.gate.enter():
        await _answer(call, await read_infill(call))


async def complete(call: Call) -> None:
    """Continue a text; raises as `infill`."""
    with call.face.frontend.gate.enter():
        await _answer(call, await read_completion(call))


async def _answer(call: Call, ask: Ask) -> None:
    """Several samples are a list, one is not."""
    model, tokenizer = call.face.info.target, call.face.frontend.loaded_tokenizer
    if ask.stream:
        await stream_answer(call, [ask.request], LlamaStream(ask, model, tokenizer), share=True)
        return
    samples, _ = await whole_answer(call, [ask.request], share=True)
    likely = ask.request.output.logprobs is not None

    def of(sample: Sample) -> dict[str, object]:
        assert sample.end is not None  # an answer in one piece is made of finished samples
        rows = probabilities(sample.logprobs, tokenizer) if likely else None
        return result(ask, model, sample.text, sample.token_ids, sample.end, rows)

    found = [of(sample) for sample in samples]
    await call.reply(200, found if len(found) > 1 else found[0])
