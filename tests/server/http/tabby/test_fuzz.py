"""Calls made from the description of Tabby's bodies, one of which stands behind OpenAI's in the document."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any, cast

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from server.completion.service import CompletionService
from server.http.app import openapi_document
from server.http.tabby import (
    COMPLETION_FIELDS,
    EVENT_FIELDS,
    SEGMENT_FIELDS,
    TABBY,
    parse_completion,
    read_segments,
)
from server.json_body import Body
from specdec.errors import ViolationCollector
from tests.server.http.calls import make_call
from tests.server.http.harness import Server
from tests.server.http.tabby.book_server import COMPLETIONS, EVENTS
from tests.server.http.test_body import JSON


def test_calls_made_from_the_description_meet_no_fault(server: Server) -> None:
    schema = schemathesis.openapi.from_dict(openapi_document(TABBY))
    for result in schema.get_all_operations():

        @settings(max_examples=25, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
        @given(case=result.ok().as_strategy())  # type: ignore[union-attr]
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body.pop("cache_salt", None)  # the engine's scripts are not for strangers
            response = case.call(base_url=server.url)
            assert response.status_code < 500, response.text

        check()
    assert server.serving.client.engine.restarts == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_json_in_any_field_is_served_or_refused(server: Server, data: st.DataObject) -> None:
    for path, fields in ((COMPLETIONS, COMPLETION_FIELDS), (EVENTS, EVENT_FIELDS)):
        body: dict[str, Any] = data.draw(st.dictionaries(st.sampled_from(sorted(fields)), JSON, max_size=4))
        if data.draw(st.booleans()):
            body["segments"] = data.draw(st.dictionaries(st.sampled_from(sorted(SEGMENT_FIELDS)), JSON))
        body.pop("cache_salt", None)
        text = server.client.build_request("POST", path, json=_writable(body | {"language": "c"}))
        response = server.client.send(text)
        assert response.status_code in (200, 400), response.text


def _writable(value: Any) -> Any:
    """``value`` without the numbers that JSON has no words for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_writable(item) for item in value]
    return {k: _writable(v) for k, v in value.items()} if isinstance(value, dict) else value


class Watched(dict[str, Any]):
    """A body that notes which of its fields are asked for."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


def test_the_fields_described_are_those_that_are_read() -> None:
    watched = Watched({"prefix": ""})
    read_segments(Body(watched, ViolationCollector()), "")
    assert watched.seen == set(SEGMENT_FIELDS)

    async def read() -> set[str]:
        call = make_call(json.dumps({"debug_options": {"raw_prompt": "a"}}).encode())
        await call.read()
        call.data = body = Watched(call.data)
        await parse_completion(call, cast(CompletionService, None))  # a raw prompt needs none
        return body.seen

    assert asyncio.run(read()) == set(COMPLETION_FIELDS)
