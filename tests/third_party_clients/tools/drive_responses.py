"""OpenAI's own client against a server's Responses API: ``drive_responses.py URL MODEL``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
WEATHER = {
    "type": "function", "name": "get_weather", "description": "Tells the weather of a city.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    },
}  # fmt: skip


class Choice(BaseModel):
    """A structured answer."""

    colour: Literal["red", "blue"]


def text(client: Any, **options: Any) -> dict[str, Any]:
    """The same question whole and streamed."""
    body = {"input": "Name three colours.", "instructions": "Be brief.", "max_output_tokens": 24, "temperature": 0}
    body |= options
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        kinds, pieces, last = [], [], None
        for event in stream:
            kinds.append(event.type)
            last = event
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
    raw = [event.type for event in client.responses.create(**body, stream=True)]
    return {
        "whole": whole.to_dict(), "text": whole.output_text, "pieces": pieces, "kinds": kinds, "raw": raw,
        "last": last.response.to_dict(),
    }  # fmt: skip


def tools(client: Any, **options: Any) -> dict[str, Any]:
    """A function is called, and its result sent back."""
    body = {
        "tools": [WEATHER], "max_output_tokens": 64, "temperature": 0, **options,
        "tool_choice": {"type": "function", "name": "get_weather"},
    }  # fmt: skip
    called = client.responses.create(input=QUESTION, **body)
    with client.responses.stream(input=QUESTION, **body) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    (call,) = [item for item in called.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny, 25 degrees."}
    answer = client.responses.create(input=[*QUESTION, *called.output, result], **body | {"tool_choice": "none"})
    return {
        "called": called.to_dict(), "streamed": streamed.to_dict(), "kinds": kinds, "said": answer.output_text,
        "arguments": json.loads(call.arguments),
    }  # fmt: skip


def refused(ask: Callable[[], Any]) -> dict[str, Any]:
    """How an error arrives."""
    try:
        ask()
    except openai.APIStatusError as error:
        return {"kind": type(error).__name__, "status": error.status_code, "code": error.code, "param": error.param}
    raise SystemExit("it was not refused")


def main(url: str, model: str) -> None:
    """Print what was received, as JSON."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    parsed = client.responses.parse(model=model, input="Choose a colour.", text_format=Choice, max_output_tokens=40)
    found = {
        "text": text(client, model=model),
        "tools": tools(client, model=model),
        "parsed": parsed.output_parsed.model_dump(),
        "completed": parsed.to_dict(),
        "state": refused(lambda: client.responses.create(model=model, input="a", previous_response_id="resp_1")),
        "embedding": refused(lambda: client.embeddings.create(model=model, input="a")),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
