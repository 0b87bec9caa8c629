"""Anthropic's own client against a server: ``drive_anthropic.py URL MODEL``."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

QUESTION = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
WEATHER = {
    "name": "get_weather", "description": "Tells the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip

GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the client has no word for it any more


def text(client: Any, **options: Any) -> dict[str, Any]:
    """The same question whole and streamed."""
    fields = {"max_tokens": 24, "messages": [{"role": "user", "content": "Name three colours."}], **GREEDY}
    fields |= options
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    return {"whole": whole.to_dict(), "pieces": pieces, "final": final.to_dict()}


def tools(client: Any, **options: Any) -> dict[str, Any]:
    """A tool is called, and its result sent back."""
    fields = {
        "max_tokens": 64, **GREEDY, "tools": [WEATHER], "messages": QUESTION,
        "tool_choice": {"type": "tool", "name": "get_weather"}, **options,
    }  # fmt: skip
    called = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    (call,) = [block for block in called.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 25 degrees."}
    more = [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**fields | {"messages": [*QUESTION, *more], "tool_choice": {"type": "none"}})
    return {
        "called": called.to_dict(), "streamed": streamed.to_dict(), "kinds": kinds, "said": answer.to_dict(),
        "name": call.name, "input": call.input,
    }  # fmt: skip


def run_tool(client: Any, **options: Any) -> dict[str, Any]:
    """The client runs the tool itself, and asks again with its result."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"Sunny in {city}, 25 degrees."

    runner = client.beta.messages.tool_runner(
        max_tokens=64, tools=[get_weather], messages=QUESTION, max_iterations=2,
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, **GREEDY, **options,
    )  # fmt: skip
    return {"turns": [message.to_dict() for message in runner]}


def refused(client: Any, **options: Any) -> dict[str, Any]:
    """How an error arrives."""
    try:
        client.messages.create(**{"max_tokens": 4, "messages": QUESTION} | options)
    except anthropic.APIStatusError as error:
        return {"kind": type(error).__name__, "status": error.status_code, "id": error.request_id, "body": error.body}
    raise SystemExit("it was not refused")


def main(url: str, model: str) -> None:
    """Print what was received, as JSON."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "Count from one to nine in words."}]
    found = {
        "text": text(client, model=model),
        "tools": tools(client, model=model),
        "runner": run_tool(client, model=model),
        "form": client.messages.create(
            model=model, max_tokens=40, messages=messages, output_config=form
        ).to_dict(),
        "stopped": client.messages.create(
            model=model, max_tokens=60, messages=messages, stop_sequences=["three", "Three"], **GREEDY
        ).to_dict(),
        "begun": client.messages.create(
            model=model, max_tokens=8, messages=[*messages, {"role": "assistant", "content": "one, two, three,"}],
            **GREEDY,
        ).to_dict(),
        "count": client.messages.count_tokens(model=model, messages=messages).input_tokens,
        "models": [[card.id, card.display_name, card.created_at.year] for card in client.models.list()],
        "missing": refused(client, model="claude-sonnet-4-5"),
        "bad": refused(client, model=model, extra_body={"temperature": -1}),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
