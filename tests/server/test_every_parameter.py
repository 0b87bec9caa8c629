"""Every parameter of a request reaches the engine by every API that has it, and is rejected alike wherever it is sent.

The cases follow from the table of parameters: a new parameter is tested without a change here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any, cast

import msgpack
import pytest

from bench.experiment.plan import read_arm
from server.experiment.arm_options import read_options
from server.grpc.request_reader import parse_generate
from server.http.openai_completions import parse_completion
from server.ipc import pack, unpack
from specdec.api.params import fill_values, grammar_message, read_grammar
from specdec.api.v1 import generation_pb2 as pb
from specdec.client.messages import fill_request
from specdec.client.prompt import GenerateOptions
from specdec.core.fields import Flag, Int, LogitBias, Number, OneOf, Param, Seed, Text, Texts, TokenIds, params_of
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    TextRules,
)
from specdec.errors import InvalidRequestError, ViolationCollector
from specdec.grammar.compiler import _HINTS
from tests.server.http.calls import asked, make_model

GROUPS: dict[str, Any] = {
    "sampling": SamplingParams, "stopping": StoppingParams, "rules": TextRules, "output": OutputParams,
    "speculation": SpeculationParams, "": Request,
}  # fmt: skip
EVERY = [(group, each) for group, record in GROUPS.items() for each in params_of(record)]
# Fields that no caller sends: the remaining time of a call, and what the server derives from texts.
MADE = {"deadline_s", "prediction_ids", "healing_prefix"}
SENT = [(group, each) for group, each in EVERY if each.name not in MADE]
INFO = make_model().info


def named(value: Any) -> str:
    return value.name if isinstance(value, Param) else str(value)


def good(each: Param) -> Any:
    """A value that is fine, and not the default."""
    match each.kind:
        case Number(low, high):
            bounds = [bound for bound in (low, high) if math.isfinite(bound)]
            value: Any = sum(bounds) / len(bounds) + 0.25
        case Int(low):
            value = low + 3 if low + 3 != each.default else low + 4
        case Flag():
            value = not each.default
        case Text(among=among):
            value = among[:1] or ("\n  " if each.name == "lead" else "x")
        case Texts():
            value = INFO.indexes[:1] if each.name == "indexes" else INFO.drafters[:1]
        case TokenIds():
            value = (3,)
        case LogitBias():
            value = ((3, 0.5),)
        case OneOf(values):
            value = type(each.default)(values[-1])
        case Seed():
            value = 7
    assert value != each.default
    assert not each.kind.problem(value, INFO.vocab_size)
    return value


def bad(each: Param) -> list[Any]:
    """Values beyond its bounds."""
    match each.kind:
        case Number(low, high):
            return [v for v in (low - 1, high + 1, math.nan if low == -math.inf else low - 0.5) if math.isfinite(v)]
        case Int(low, high):
            return [low - 2, high + 1]
        case Texts(limit=limit):
            return [("",), tuple(f"x{i}" for i in range(limit + 1))]
        case TokenIds(limit=limit, distinct=distinct):
            return [(INFO.vocab_size,), (3,) * ((INFO.vocab_size if distinct else limit) + 1)]
        case LogitBias(limit=limit):
            return [((3, 1e9),), ((INFO.vocab_size, 0.0),), tuple((i, 0.0) for i in range(limit + 1))]
        case Text(limit=limit):
            return [] if limit is None else ["x" * (limit + 1)]
    return []


def plain_of(value: Any) -> Any:
    """As it stands in a plan."""
    return list(value) if isinstance(value, tuple) else value


def with_value(group: str, each: Param, value: Any) -> Request:
    """A request that sets this field and the fields it requires."""
    records = {name: kind() for name, kind in GROUPS.items() if name}
    records["stopping"] = dataclasses.replace(records["stopping"], time_limit_s=9.0)  # finish_line goes with one
    own = {} if group else {each.name: value}
    if group:
        records[group] = dataclasses.replace(records[group], **{each.name: value})
    rules = records.pop("rules")
    if rules != TextRules():
        rules = rules if group == "rules" and each.name == "closers" else dataclasses.replace(rules, closers=")")
        records["stopping"] = dataclasses.replace(records["stopping"], rules=rules)
    return Request(request_id="r", prompt_ids=(7,), **records, **own)


def over_grpc(request: Request) -> Request:
    """Return what the engine's process receives of a client's request."""
    options = {
        name: getattr(request, name)
        for name in ("sampling", "stopping", "output", "speculation", *(p.name for _, p in SENT))
        if hasattr(request, name)
    }
    message = fill_request(
        pb.GenerateRequest(), request.prompt_ids, cast(GenerateOptions, options | {"request_id": "r"})
    )
    message = pb.GenerateRequest.FromString(message.SerializeToString())
    return across(asyncio.run(parse_generate(message, make_model())))


def over_http(group: str, each: Param, value: Any) -> Request:
    """The same of a body."""
    plain = {str(k): v for k, v in value} if isinstance(each.kind, LogitBias) else value
    body: dict[str, Any] = {"prompt": [7], "stream": True}
    fields = {each.json_name: plain}
    return across(asked(parse_completion, body | ({group: fields} if group == "speculation" else fields)).requests[0])


def across(request: Request) -> Request:
    return unpack(Request, msgpack.unpackb(msgpack.packb(request, default=pack)))


def found_in(request: Request, group: str, each: Param) -> Any:
    record = request.stopping.rules if group == "rules" else getattr(request, group) if group else request
    return getattr(record, each.name)


def refusal(way: Any, *asked_for: Any) -> str | None:
    """Return why a value is rejected, or None if the value cannot be encoded."""
    try:
        way(*asked_for)
    except InvalidRequestError as error:
        (violation,) = error.violations
        return violation.description
    except (ValueError, OverflowError):
        return None
    return ""


@pytest.mark.parametrize(("group", "each"), SENT, ids=named)
def test_the_parameter_reaches_the_engine(group: str, each: Param) -> None:
    value = good(each)
    request = with_value(group, each, value)
    place = f"name {each.path} in specdec/api/v1/options.proto, and run `make proto`"
    assert over_grpc(request) == request, place
    if each.json_name is not None:
        assert found_in(over_http(group, each, value), group, each) == value


@pytest.mark.parametrize(("group", "each"), SENT, ids=named)
def test_an_out_of_range_value_is_rejected_alike_everywhere(group: str, each: Param) -> None:
    for value in bad(each):
        told = {refusal(over_grpc, with_value(group, each, value))}
        if each.json_name is not None:
            told.add(refusal(over_http, group, each, value))
            assert told != {None}
        assert told - {None} <= {each.kind.problem(value, INFO.vocab_size)}


@pytest.mark.parametrize("kind", GrammarKind)
def test_every_kind_of_grammar_has_a_message_and_a_hint(kind: GrammarKind) -> None:
    grammar = GrammarParams(kind, {GrammarKind.JSON_OBJECT: "", GrammarKind.CHOICE: '["a"]'}.get(kind, "a"))
    assert read_grammar(grammar_message(grammar), ViolationCollector()) == grammar
    assert kind in _HINTS, "say in specdec/grammar/compiler.py what to do where it is refused"


def test_experiments_accept_every_speculation_parameter() -> None:
    values = {each.name: good(each) for each in params_of(SpeculationParams)}
    plain = {name: plain_of(v) for name, v in values.items()}
    options, problems = read_options({"speculation": plain}, ())
    assert not problems
    assert options.put(Request("r", (7,))).speculation == SpeculationParams(**values)
    assert read_arm({"speculation": plain})[0].options["speculation"] == SpeculationParams(**values)
    for each in params_of(SpeculationParams):
        for value in bad(each):
            _, problems = read_options({"speculation": {each.name: plain_of(value)}}, ())
            assert [text for _, text in problems] == [each.kind.problem(value, 0)]


def test_a_message_without_a_field_name_is_unchanged() -> None:
    assert fill_values(pb.GenerateRequest(), Request, {"healing_prefix": "x"}) == pb.GenerateRequest()
