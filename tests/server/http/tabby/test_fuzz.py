"""Calls made from the description of Tabby's bodies, one of which stands behind OpenAI's in the document."""

from __future__ import annotations

import math
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from server.http.app import openapi_document
from server.http.tabby import COMPLETION_FIELDS, EVENT_FIELDS, SEGMENT_FIELDS, TABBY
from server.request_fields import schemas
from tests.server.http.harness import Server
from tests.server.http.tabby.book_server import COMPLETIONS, EVENTS
from tests.server.http.test_body import JSON


def test_requests_generated_from_the_schema_get_no_server_error(server: Server) -> None:
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
def test_any_json_in_any_field_is_served_or_rejected(server: Server, data: st.DataObject) -> None:
    for path, fields in ((COMPLETIONS, COMPLETION_FIELDS), (EVENTS, EVENT_FIELDS)):
        body: dict[str, Any] = data.draw(st.dictionaries(st.sampled_from(sorted(schemas(fields))), JSON, max_size=4))
        if data.draw(st.booleans()):
            body["segments"] = data.draw(st.dictionaries(st.sampled_from(sorted(schemas(SEGMENT_FIELDS))), JSON))
        body.pop("cache_salt", None)
        text = server.client.build_request("POST", path, json=_writable(body | {"language": "c"}))
        response = server.client.send(text)
        rejected = (400, 404) if "model" in body else (400,)  # 404: another model
        assert response.status_code in (200, *rejected), response.text


def _writable(value: Any) -> Any:
    """``value`` without the numbers that JSON has no words for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_writable(item) for item in value]
    return {k: _writable(v) for k, v in value.items()} if isinstance(value, dict) else value
