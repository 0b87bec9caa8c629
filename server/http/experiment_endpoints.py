"""Live experiments over HTTP, for operators: /v1/experiments."""

from __future__ import annotations

from typing import Any

import orjson

from server.auth.check_admin import check_admin
from server.experiment.live.experiments import Experiments
from server.experiment.live.live_errors import NoResultError
from server.http.call import Call
from server.http.endpoint import Endpoint
from server.http.fields.schema import RESPONSES
from server.http.openai.errors import OpenAIErrors
from specdec.errors import FieldViolation, InvalidRequestError

PATH = "/v1/experiments"
_HTML = b"text/html; charset=utf-8"


async def start_experiment(call: Call) -> None:
    """Begins the experiment that the body describes, in YAML or JSON, or goes on with it."""
    experiments = _experiments(call)
    try:
        plan = call.content.decode()
    except UnicodeDecodeError:
        raise InvalidRequestError([FieldViolation("plan", "must be UTF-8 text")]) from None
    status = await experiments.start(plan)
    await call.reply(201, status.as_dict())


async def list_experiments(call: Call) -> None:
    """All there are."""
    await call.reply(200, {"experiments": [status.as_dict() for status in await _experiments(call).statuses()]})


async def show_experiment(call: Call) -> None:
    """How one stands, and what its records say so far: ``result`` is null while they say nothing, ``note`` why."""
    experiments, name = _experiments(call), _name(call)
    status: dict[str, Any] = (await experiments.get(name)).as_dict()
    try:
        found = orjson.loads((await experiments.conclude(name)).result)
        result, note = {field: found[field] for field in ("verdict", "primary", "guardrails", "notes")}, ""
    except NoResultError as error:
        result, note = None, str(error)
    await call.reply(200, {**status, "result": result, "note": note})


async def show_report(call: Call) -> None:
    """What its records say so far, as a page."""
    found = await _experiments(call).conclude(_name(call))
    await call.reply_data(200, found.report.encode(), _HTML)


async def stop_experiment(call: Call) -> None:
    """Ends one; its records stay."""
    await call.reply(200, (await _experiments(call).stop(_name(call))).as_dict())


def _experiments(call: Call) -> Experiments:
    check_admin(PATH)
    return call.face.frontend.experiments


def _name(call: Call) -> str:
    return str(call.path_params["name"])


_ERRORS = OpenAIErrors()
_ONE = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
_PLAN = {
    "required": True,
    "content": {"application/yaml": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "object"}}},
}
EXPERIMENTS = (
    Endpoint("POST", PATH, start_experiment, _ERRORS,
             {"summary": "Start an experiment", "requestBody": _PLAN, "responses": RESPONSES}),
    Endpoint("GET", PATH, list_experiments, _ERRORS, {"summary": "The experiments", "responses": RESPONSES}),
    Endpoint("GET", f"{PATH}/{{name}}", show_experiment, _ERRORS,
             {"summary": "How an experiment stands", "parameters": _ONE, "responses": RESPONSES}),
    Endpoint("GET", f"{PATH}/{{name}}/report", show_report, _ERRORS,
             {"summary": "An experiment's report", "parameters": _ONE, "responses": RESPONSES}),
    Endpoint("DELETE", f"{PATH}/{{name}}", stop_experiment, _ERRORS,
             {"summary": "Stop an experiment", "parameters": _ONE, "responses": RESPONSES}),
)  # fmt: skip
