"""Clients' use of tools in /v1/chat/completions: ``drive_tools.py URL MODEL``."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from mistralai.client import Mistral

QUESTION = "What is the weather in Paris?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city", "unit"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city", "parameters": SCHEMA},
}
RESULT = "Sunny, 25 degrees."


def with_openai(url: str, model: str) -> dict[str, Any]:
    """OpenAI's own: a call, the same as a stream, the result sent back, and refusals."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    body: dict[str, Any] = {
        "model": model, "messages": messages, "tools": [WEATHER], "tool_choice": "required", "temperature": 0,
        "parallel_tool_calls": False, "max_tokens": 64,
    }  # fmt: skip
    called = client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
    streamed = stream.get_final_completion().choices[0]
    call = called.message.tool_calls[0]
    messages = [*messages, called.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    reply = client.chat.completions.create(**body | {"messages": messages, "tool_choice": "none"}).choices[0]
    refused = []
    named = {"type": "function", "function": {"name": "other"}}
    for bad in ({"tool_choice": named}, {"tools": [WEATHER, WEATHER]}, {"tools": [], "tool_choice": "required"}):
        try:
            client.chat.completions.create(**body | bad)
        except openai.BadRequestError as error:
            refused.append(error.param)
    return {
        "called": called.to_dict(), "streamed": streamed.to_dict(), "kinds": kinds, "said": reply.message.content,
        "refused": refused,
    }  # fmt: skip


def with_langchain(url: str, model: str) -> dict[str, Any]:
    """LangChain's: tools bound to a model, in one piece and as a stream, and a structured answer by a named tool."""
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=64, max_retries=0)
    bound = chat.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
    called = bound.invoke([HumanMessage(QUESTION)])
    pieces = list(bound.stream([HumanMessage(QUESTION)]))
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    answer = ToolMessage(RESULT, tool_call_id=called.tool_calls[0]["id"])
    reply = chat.bind_tools([WEATHER], tool_choice="none").invoke([HumanMessage(QUESTION), called, answer])
    structured = chat.with_structured_output({"title": "place", **SCHEMA}, method="function_calling").invoke(QUESTION)
    return {
        "called": called.tool_calls, "streamed": streamed.tool_calls, "invalid": called.invalid_tool_calls,
        "reason": called.response_metadata["finish_reason"], "said": reply.content, "structured": structured,
    }  # fmt: skip


def with_mistral(url: str, model: str) -> dict[str, Any]:
    """Mistral's, whose value for "required" is "any"."""
    client = Mistral(server_url=url, api_key="none")
    body: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": QUESTION}], "tools": [WEATHER], "temperature": 0,
        "tool_choice": "any", "parallel_tool_calls": False, "max_tokens": 64,
    }  # fmt: skip
    called = client.chat.complete(**body).choices[0]
    pieces = [event.data.choices[0] for event in client.chat.stream(**body)]
    calls = [call for piece in pieces for call in piece.delta.tool_calls or []]
    call = called.message.tool_calls[0]
    answer = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": RESULT}
    talk = [*body["messages"], called.message, answer]
    reply = client.chat.complete(**body | {"messages": talk, "tool_choice": "none"}).choices[0]
    return {
        "name": call.function.name, "arguments": json.loads(call.function.arguments), "reason": called.finish_reason,
        "streamed": [call.function.name, "".join(call.function.arguments for call in calls)],
        "end": pieces[-1].finish_reason, "said": reply.message.content,
    }  # fmt: skip


def main(url: str, model: str) -> None:
    """Print what was received, as JSON."""
    seen = {"openai": with_openai, "langchain": with_langchain, "mistral": with_mistral}
    print(json.dumps({name: client(url, model) for name, client in seen.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
