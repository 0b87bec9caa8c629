"""Endpoints for operators and monitoring: probes, version, trace, metrics and experiments."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson

import specdec
from server.auth.access import METRICS_PATH
from server.auth.principal import check_admin
from server.engine_client import DEFAULT_TRACE_STEPS, MAX_TRACE_STEPS, TRACE_LIMIT_RULE
from server.experiment.live.conclusions import NoResultError
from server.experiment.live.experiments import Experiments
from server.http.call import Call, Endpoint, ErrorStyle
from server.http.fields import MODEL_QUERY
from server.http.openai_format import OPENAI_ERRORS
from server.json_body import write_json
from specdec.core.types import trace_dict
from specdec.errors import InvalidRequestError

PROBE_ERRORS = ErrorStyle(lambda refusal: {"error": refusal.message}, write_json)


async def live(call: Call) -> None:
    """The server runs, whatever the engine does."""
    await call.reply(200, {"status": "ok", "engine": call.server.models.state})


async def ready(call: Call) -> None:
    """Whether a request would be accepted now, by any model or the one in the query."""
    models = call.server.models
    state, is_ready = models.state, models.take_requests
    if call.query.get("model"):
        state, is_ready = call.model.client.engine.state, call.model.takes_requests
    await call.reply(200 if is_ready else 503, {"status": "ready" if is_ready else "not ready", "engine": state})


async def version(call: Call) -> None:
    """The release."""
    await call.reply(200, {"version": specdec.__version__})


async def trace(call: Call) -> None:
    """The engine's last steps, newest last."""
    given = call.query.get("limit", str(DEFAULT_TRACE_STEPS))
    if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= MAX_TRACE_STEPS):
        raise InvalidRequestError.of("limit", TRACE_LIMIT_RULE)
    await call.reply(200, [trace_dict(step) for step in await call.model.client.trace(int(given))])


_LIMIT = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_TRACE_STEPS}}
PROBES = (
    Endpoint("GET", "/livez", live, PROBE_ERRORS, "The server runs"),
    Endpoint("GET", "/readyz", ready, PROBE_ERRORS, "Requests are taken", parameters=(MODEL_QUERY,)),
    Endpoint("GET", "/ping", live, PROBE_ERRORS, "vLLM: the server runs"),
    Endpoint("POST", "/ping", live, PROBE_ERRORS, "vLLM: the server runs"),
    Endpoint("GET", "/version", version, PROBE_ERRORS, "The release"),
    Endpoint("GET", "/trace", trace, PROBE_ERRORS, "The controller's last decisions", parameters=(_LIMIT, MODEL_QUERY)),
)


async def metrics(call: Call) -> None:
    """The server's metrics as text or as OpenMetrics, by the ``accept`` header."""
    data, media_type = call.server.models.exporter.render(call.header("accept"))
    await call.reply_data(200, data, media_type)


METRICS = (Endpoint("GET", METRICS_PATH, metrics, PROBE_ERRORS, "Prometheus metrics"),)


PATH = "/v1/experiments"
_HTML = b"text/html; charset=utf-8"


async def start_experiment(call: Call) -> None:
    """Start or resume the experiment that the body describes in YAML or JSON."""
    experiments = _experiments(call)
    try:
        plan = call.content.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError.of("plan", "must be UTF-8 text") from None
    status = await experiments.start(plan)
    await call.reply(201, asdict(status))


async def list_experiments(call: Call) -> None:
    """All experiments."""
    await call.reply(200, {"experiments": [asdict(status) for status in await _experiments(call).statuses()]})


async def show_experiment(call: Call) -> None:
    """An experiment's status and its result so far. While ``result`` is null, ``note`` says why."""
    experiments, name = _experiments(call), call.path_params["name"]
    status: dict[str, Any] = asdict(await experiments.get(name))
    try:
        found = orjson.loads((await experiments.conclude(name)).result)
        result, note = {field: found[field] for field in ("verdict", "primary", "guardrails", "notes")}, ""
    except NoResultError as error:
        result, note = None, str(error)
    await call.reply(200, {**status, "result": result, "note": note})


async def show_report(call: Call) -> None:
    """An experiment's result so far, as an HTML page."""
    found = await _experiments(call).conclude(call.path_params["name"])
    await call.reply_data(200, found.report.encode(), _HTML)


async def stop_experiment(call: Call) -> None:
    """End an experiment and keep its records."""
    await call.reply(200, asdict(await _experiments(call).stop(call.path_params["name"])))


def _experiments(call: Call) -> Experiments:
    check_admin(PATH)
    return call.model.experiments


_ALL = (MODEL_QUERY,)
_ONE = ({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}, MODEL_QUERY)
_PLAN = {
    "required": True,
    "content": {"application/yaml": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "object"}}},
}
EXPERIMENTS = (
    Endpoint("POST", PATH, start_experiment, OPENAI_ERRORS, "Start an experiment", body=_PLAN, parameters=_ALL),
    Endpoint("GET", PATH, list_experiments, OPENAI_ERRORS, "The experiments", parameters=_ALL),
    Endpoint("GET", f"{PATH}/{{name}}", show_experiment, OPENAI_ERRORS, "How an experiment stands", parameters=_ONE),
    Endpoint("GET", f"{PATH}/{{name}}/report", show_report, OPENAI_ERRORS, "An experiment's report", parameters=_ONE),
    Endpoint("DELETE", f"{PATH}/{{name}}", stop_experiment, OPENAI_ERRORS, "Stop an experiment", parameters=_ONE),
)
