"""Runs one client against a server and prints what it received, as JSON: ``python drive.py URL MODEL CLIENT``.

It runs in a separate environment, with the packages of requirements.txt. Every client sends the same requests as
plainly as its own documentation does, greedily, so that all must receive the same text.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

QUESTION = "Why is the sky blue?"
PROMPT = "The capital of France is"
BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
MODEL, KEY, LIMIT = sys.argv[2], "none", 24
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def joined(parts: Iterable[Any]) -> str:
    return "".join(part for part in parts if part)


def openai(url: str) -> dict[str, Any]:
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        people: int

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    settings: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": LIMIT}
    chat = client.chat.completions.create(**settings, messages=MESSAGES)
    stream = client.chat.completions.create(**settings, messages=MESSAGES, stream=True)
    parsed = client.chat.completions.parse(
        model=MODEL, temperature=0, messages=MESSAGES, response_format=City, max_tokens=200
    )
    scored = client.completions.create(**settings, prompt=PROMPT, echo=True, logprobs=1)
    gap = client.completions.create(**settings, prompt=BEFORE, suffix=BEHIND)
    return {
        "chat": chat.choices[0].message.content,
        "stream": joined(chunk.choices[0].delta.content for chunk in stream if chunk.choices),
        "text": client.completions.create(**settings, prompt=PROMPT).choices[0].text,
        "parsed": type(parsed.choices[0].message.parsed).__name__,
        "echo": joined(scored.choices[0].logprobs.tokens),
        "gap": gap.choices[0].text,
        "models": [model.id for model in client.models.list()],
    }


def openai_agents(url: str) -> dict[str, Any]:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    async def ask(kind: Any, limit: int) -> str:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        agent = Agent(
            name="a",
            model=kind(model=MODEL, openai_client=client),
            model_settings=ModelSettings(temperature=0, max_tokens=limit),
        )
        return str((await Runner.run(agent, QUESTION)).final_output)

    # It takes an answer of the Responses API that reached its limit for an error, so that one is let end.
    return {
        "chat": asyncio.run(ask(OpenAIChatCompletionsModel, LIMIT)),
        "whole": asyncio.run(ask(OpenAIResponsesModel, 1000)),
    }


def anthropic(url: str) -> dict[str, Any]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=KEY)
    settings: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": LIMIT,
        "messages": MESSAGES,
        "extra_body": {"temperature": 0},
    }
    with client.messages.stream(**settings) as stream:
        streamed = joined(stream.text_stream)
    return {"chat": client.messages.create(**settings).content[0].text, "stream": streamed}


def mistralai(url: str) -> dict[str, Any]:
    from mistralai.client import Mistral

    client = Mistral(server_url=url, api_key=KEY)
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": LIMIT, "temperature": 0, "messages": MESSAGES}
    with client.chat.stream(**settings) as stream:
        streamed = joined(event.data.choices[0].delta.content for event in stream if event.data.choices)
    gap = client.fim.complete(model=MODEL, prompt=BEFORE, suffix=BEHIND, max_tokens=LIMIT, temperature=0)
    return {
        "chat": client.chat.complete(**settings).choices[0].message.content,
        "stream": streamed,
        "gap": gap.choices[0].message.content,
        "models": [model.id for model in client.models.list().data],
    }


def ollama(url: str) -> dict[str, Any]:
    from ollama import Client

    client, options = Client(host=url), {"temperature": 0, "num_predict": LIMIT}
    chat = client.chat(MODEL, MESSAGES, options=options, logprobs=True, top_logprobs=2)
    return {
        "chat": chat.message.content,
        "stream": joined(p.message.content for p in client.chat(MODEL, MESSAGES, options=options, stream=True)),
        "text": client.generate(MODEL, PROMPT, raw=True, options=options).response,
        "gap": client.generate(MODEL, BEFORE, suffix=BEHIND, options=options).response,
        "json": client.chat(MODEL, MESSAGES, options=options | {"num_predict": 200}, format=SCHEMA).message.content,
        "echo": joined(row.token for row in chat.logprobs or []),
        "models": [model.model for model in client.list().models if model.size],
    }


def langchain_openai(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI, OpenAI

    settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": KEY, "model": MODEL, "temperature": 0}
    chat, text = ChatOpenAI(**settings, max_tokens=LIMIT), OpenAI(**settings, max_tokens=LIMIT)
    structured = ChatOpenAI(**settings, max_tokens=200).with_structured_output(
        {"title": "City", **SCHEMA}, method="json_schema"
    )
    return {
        "chat": chat.invoke(QUESTION).content,
        "stream": joined(chunk.content for chunk in chat.stream(QUESTION)),
        "text": text.invoke(PROMPT),
        "json": json.dumps(structured.invoke(QUESTION)),
    }


def langchain_ollama(url: str) -> dict[str, Any]:
    from langchain_ollama import ChatOllama

    chat = ChatOllama(base_url=url, model=MODEL, temperature=0, num_predict=LIMIT)
    return {"chat": chat.invoke(QUESTION).content, "stream": joined(c.content for c in chat.stream(QUESTION))}


def litellm(url: str) -> dict[str, Any]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    from litellm import completion, text_completion

    settings: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": LIMIT}
    ours: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY}
    stream = completion(**ours, **settings, stream=True)
    text = text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY, prompt=PROMPT, temperature=0,
        max_tokens=LIMIT,
    )  # fmt: skip
    return {
        "chat": completion(**ours, **settings).choices[0].message.content,
        "stream": joined(chunk.choices[0].delta.content for chunk in stream),
        "text": text.choices[0].text,
        "ollama": completion(model=f"ollama_chat/{MODEL}", api_base=url, **settings).choices[0].message.content,
        "vllm": completion(model=f"hosted_vllm/{MODEL}", api_base=f"{url}/v1", **settings).choices[0].message.content,
    }


def llama_index(url: str) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    settings: dict[str, Any] = {"model": MODEL, "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0}
    chat = OpenAILike(**settings, max_tokens=LIMIT, is_chat_model=True)
    messages = [ChatMessage(role="user", content=QUESTION)]
    return {
        "chat": chat.chat(messages).message.content,
        "stream": joined(part.delta for part in chat.stream_chat(messages)),
        "text": OpenAILike(**settings, max_tokens=LIMIT).complete(PROMPT).text,
    }


def instructor(url: str) -> dict[str, Any]:
    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: str
        people: int

    client = library.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=library.Mode.JSON_SCHEMA)
    found = client.chat.completions.create(
        model=MODEL, temperature=0, max_tokens=200, response_model=City, messages=MESSAGES, max_retries=0
    )
    return {"json": found.model_dump_json()}


def pydantic_ai(url: str) -> dict[str, Any]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": LIMIT})
    return {"chat": agent.run_sync(QUESTION).output}


def llm(url: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        models = f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {url}/v1\n"
        Path(folder, "extra-openai-models.yaml").write_text(models, encoding="utf-8")

        def ask(*options: str) -> str:
            command = [sys.executable, "-m", "llm", "-m", "ours", "-o", "temperature", "0", "--key", KEY, *options]
            done = subprocess.run(
                [*command, "-o", "max_tokens", str(LIMIT), QUESTION], check=False, capture_output=True, text=True,
                env={**os.environ, "LLM_USER_PATH": folder}, cwd=folder, stdin=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return done.stdout.removesuffix("\n")

        return {"chat": ask("--no-stream"), "stream": ask()}


def dspy(url: str) -> dict[str, Any]:
    import dspy as library

    lm = library.LM(f"openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=LIMIT, cache=False)
    (found,) = lm(messages=MESSAGES)
    return {"chat": found if isinstance(found, str) else found["text"]}


def smolagents(url: str) -> dict[str, Any]:
    from smolagents import OpenAIServerModel

    model = OpenAIServerModel(MODEL, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=LIMIT)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    return {
        "chat": model.generate(messages).content,
        "stream": joined(delta.content for delta in model.generate_stream(messages)),
    }


def haystack(url: str) -> dict[str, Any]:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        api_key=Secret.from_token(KEY), model=MODEL, api_base_url=f"{url}/v1",
        generation_kwargs={"temperature": 0, "max_tokens": LIMIT},
    )  # fmt: skip
    return {"chat": generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text}


def lm_eval(url: str) -> dict[str, Any]:
    """Log-likelihoods by ``echo`` with ``logprobs``, with the server's own tokeniser."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(base_url=f"{url}/v1/completions", model=MODEL, max_length=512)
    answers = [" Paris", " banana"]
    settings = [Instance("loglikelihood", {}, (PROMPT, answer), at) for at, answer in enumerate(answers)]
    until = {"until": ["\n"], "max_gen_toks": LIMIT}
    return {
        "scores": [[float(score), bool(greedy)] for score, greedy in model.loglikelihood(settings)],
        "rolling": float(model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (QUESTION,), 0)])[0]),
        "until": model.generate_until([Instance("generate_until", {}, (PROMPT, until), 0)])[0],
    }


CLIENTS: tuple[Callable[[str], dict[str, Any]], ...] = (
    openai, openai_agents, anthropic, mistralai, ollama, langchain_openai, langchain_ollama, litellm, llama_index,
    instructor, pydantic_ai, llm, dspy, smolagents, haystack, lm_eval,
)  # fmt: skip

if __name__ == "__main__":
    address, _, name = sys.argv[1:]
    (client,) = (each for each in CLIENTS if each.__name__ == name)
    found = client(address)
    print("\n" + json.dumps(found))
