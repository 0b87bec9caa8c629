"""The OpenAPI document describes what is served, and requests generated from it cause no server error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from server.http import llamacpp_completions, ollama, tabby
from server.http.anthropic import MESSAGE_FIELDS, parse_messages
from server.http.app import ENDPOINTS, build_app
from server.http.call import Call
from server.http.openai_chat import CHAT_FIELDS, parse_chat
from server.http.openai_completions import COMPLETION_FIELDS, parse_completion
from server.http.responses import RESPONSES_FIELDS, parse_responses
from server.request_fields import Table, schemas
from tests.server.http.calls import code_context, make_call, make_context
from tests.server.http.harness import Server

HI = [{"role": "user", "content": "hi"}]


def test_every_endpoint_is_described_and_served(server: Server) -> None:
    response = server.client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    document = response.json()
    assert document["openapi"].startswith("3.1")
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(e.method.lower(), e.path.replace(":path", "")) for e in ENDPOINTS}
    app = build_app(make_context())
    served = {(method, route.path) for route in app.routes for method in route.methods}  # type: ignore[attr-defined]
    assert {(e.method, e.path) for e in ENDPOINTS} < served


def test_every_endpoint_that_makes_requests_is_gated() -> None:
    """Otherwise a drain neither refuses its calls nor waits for them."""
    makers = [each for each in ENDPOINTS if each.answer.__qualname__.startswith("answering.")]
    assert len(makers) > 8
    assert [each.path for each in makers if not each.gated] == [], "give them `gated=True`"


class Watched(dict[str, Any]):
    """A body that records which of its fields are read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


@pytest.mark.parametrize(
    ("reader", "body", "fields"),
    [
        (parse_completion, {"prompt": "hi"}, COMPLETION_FIELDS),
        (parse_chat, {"messages": HI}, CHAT_FIELDS),
        (parse_messages, {"messages": HI}, MESSAGE_FIELDS),
        (parse_responses, {"input": "hi"}, RESPONSES_FIELDS),
        (ollama.parse_generate, {"prompt": "hi"}, ollama.GENERATE_FIELDS),
        (ollama.parse_chat, {"messages": HI}, ollama.CHAT_FIELDS),
        (llamacpp_completions.parse_completion, {"prompt": "hi"}, llamacpp_completions.COMPLETION_FIELDS),
        (
            llamacpp_completions.parse_infill,
            {"input_prefix": "a", "input_suffix": "b"},
            llamacpp_completions.INFILL_FIELDS,
        ),
        (tabby.parse_completion, {"segments": {"prefix": "a"}}, tabby.COMPLETION_FIELDS),
    ],
)
def test_the_described_fields_are_those_that_are_read(
    reader: Callable[[Call], Awaitable[Any]], body: dict[str, Any], fields: Table
) -> None:
    async def read() -> set[str]:
        fills_in = reader in (llamacpp_completions.parse_infill, tabby.parse_completion)
        context = code_context() if fills_in else make_context()
        call = make_call(json.dumps(body).encode(), server=context)
        await call.read()
        call.data = watched = Watched(call.data)  # type: ignore[misc]
        await reader(call)
        return watched.seen

    assert asyncio.run(read()) == set(schemas(fields))


def test_requests_generated_from_the_schema_get_no_server_error(server: Server) -> None:
    """A few for each endpoint; `test_fuzz` makes many for those with the most fields."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in schema.get_all_operations():

        @settings(max_examples=5, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
        @given(case=result.ok().as_strategy())
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body.pop("cache_salt", None)  # the fake engine's scripts are not for strangers
            response = case.call(base_url=server.url)
            assert response.status_code < 500, response.text

        check()
    assert server.serving.client.engine.restarts == 0
