"""`specdec plan`: simulates a fleet, and exports the profile of a replica."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from bench.serve import ARRIVALS
from specdec.cli.bench_output import count_option, json_option, print_table, progress_line
from specdec.cli.options import POSITIVE, FiniteRange, ScreenGroup, add_server_options, check_folder, pop_config
from specdec.errors import ConfigError

if TYPE_CHECKING:
    from cluster.plan.arrivals import PlannedRequest
    from cluster.plan.profile import Profile
    from cluster.plan.simulate import FleetRun
    from cluster.plan.sizing import Goal

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_TRACE = click.Path(exists=True, path_type=Path)
_REPLICAS = click.IntRange(1, 4096)


_SCREEN = {
    "Goal": ("--profile", "--objective", "--share", "--replicas"),
    "Load": ("--trace", "--rate", "--duration", "--prompt-tokens", "--output-tokens", "--sessions"),
    "Report": ("--json",),
}


@click.group("plan", cls=ScreenGroup, screen=_SCREEN, invoke_without_command=True)
@click.option("--profile", type=_FILE, help="Profile of a replica, from `specdec plan export`.")
@click.option("--objective", "objectives", multiple=True, help="METRIC:MS with ttft, tpot or e2e; may be repeated.")
@click.option(
    "--share", type=FiniteRange(0, 1, min_open=True), default=0.99, show_default=True,
    help="Share of requests that must meet every --objective; with one objective, 0.99 is its p99.",
)  # fmt: skip
@click.option("--replicas", type=_REPLICAS, help="Number of replicas, instead of the fewest that meet the objectives.")
@click.option("--most", type=_REPLICAS, default=4096, show_default=True, help="Largest number of replicas to try.")
@click.option("--trace", type=_TRACE, help="Captured requests: the folder of `specdec serve --capture`.")
@click.option(
    "--speed", type=POSITIVE, default=1.0, show_default=True, help="Of --trace: 2 replays it in half the time."
)
@click.option("--rate", type=POSITIVE, help="Requests per second; with --trace, its requests at this rate.")
@click.option("--duration", type=POSITIVE, default=60.0, show_default=True, help="Seconds of load at --rate.")
@click.option(
    "--arrivals", type=click.Choice(ARRIVALS), default="poisson", show_default=True, help="Arrivals at --rate."
)
@click.option(
    "--shape", type=POSITIVE, default=0.5, show_default=True, help="Shape of gamma arrivals; below 1: bursts."
)
@count_option("--prompt-tokens", default=512, help="Mean length, including shared tokens.")
@count_option("--output-tokens", default=64, help="Mean length.")
@count_option("--shared-tokens", default=0, least=0, help="Beginning that all prompts share.")
@count_option("--sessions", default=0, least=0, help="Number of workspaces or conversations.")
@count_option("--session-tokens", default=0, least=0, help="Beginning that the prompts of a session share.")
@click.option("--same-length", is_flag=True, help="Every request has the mean lengths, instead of geometric ones.")
@click.option("--deadline", type=POSITIVE, help="Deadline of every request in seconds.")
@count_option("--seed", default=0, least=0, help="Of all random numbers.")
@json_option
@click.pass_context
def plan_group(ctx: click.Context, **values: Any) -> None:
    """Simulate how many replicas meet an objective.

    Runs the server's scheduler, prefix cache and admission on a virtual clock, with measured times of forwards.
    """
    given = {name for name in values if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    if ctx.invoked_subcommand is None:
        _refuse_ignored(given, values)
        _plan(values)
    elif given:
        raise click.UsageError(f"give the options of `{ctx.invoked_subcommand}` after it")


_DRAWN = ("prompt_tokens", "output_tokens", "shared_tokens", "sessions", "session_tokens")


def _refuse_ignored(given: Collection[str], values: dict[str, Any]) -> None:
    """Raises click.UsageError if an option was ``given`` that has no effect beside the others."""
    traced, timed = values["trace"] is not None, values["rate"] is not None
    for names, useful, way_out in (
        ((*_DRAWN, "same_length"), not traced, "describes random requests; leave out --trace"),
        (("duration", "arrivals", "shape"), timed, "is for arrivals at a rate; give --rate"),
        (("shape",), values["arrivals"] == "gamma", "is for --arrivals gamma"),
        (("speed",), traced and not timed, "is for a --trace at its own times; give --trace, and leave out --rate"),
        (("share",), bool(values["objectives"]), "is for --objective; give one"),
        (("most",), values["replicas"] is None, "is for the fewest replicas; leave out --replicas"),
    ):
        if not useful and (found := [name for name in names if name in given]):
            raise click.UsageError(f"--{found[0].replace('_', '-')} {way_out}")


def _plan(values: dict[str, Any]) -> None:
    from cluster.plan.profile import read_profile
    from cluster.plan.sizing import PlanReport

    if values["profile"] is None:
        raise click.UsageError("give --profile; `specdec plan export --target MODEL --out FILE` makes one")
    profile, goal = read_profile(values["profile"]), _goal(values)
    requests = _requests(values, profile)
    began = time.perf_counter()
    run = _run(values, profile, requests, goal)
    report = PlanReport(run, goal, time.perf_counter() - began)
    if values["as_json"]:
        click.echo(json.dumps(report.as_dict()))
        return
    for heads, rows in report.tables():
        print_table(heads, rows)


def _run(values: dict[str, Any], profile: Profile, requests: list[PlannedRequest], goal: Goal | None) -> FleetRun:
    """Runs the given number of replicas, or the fewest that meet ``goal``."""
    from cluster.plan.simulate import FleetPlan, simulate
    from cluster.plan.sizing import counted_replicas, least_replicas

    plan = FleetPlan(profile, values["replicas"] or 1, values["seed"])
    if values["replicas"] is not None:
        return simulate(plan, requests)
    if goal is None:
        raise click.UsageError("give --objective METRIC:MS for the fewest replicas that meet it, or --replicas")
    found = least_replicas(plan, requests, goal, values["most"], progress_line())
    if found is None:
        tried = min(values["most"], len(requests))  # more than one replica per request cannot help
        raise click.ClickException(
            f"objective: not met by {counted_replicas(tried)}; a single request may already take longer: "
            "try --replicas 1 with a low --rate"
        )
    return found


def _requests(values: dict[str, Any], profile: Profile) -> list[PlannedRequest]:
    import dataclasses

    from cluster.plan.arrivals import Traffic, at_rate, drawn_requests, read_requests
    from specdec.load.arrivals import Arrivals, shape_of

    arrivals = None
    if values["rate"] is not None:
        shape = shape_of(values["arrivals"], values["shape"])
        arrivals = Arrivals(values["rate"], values["duration"], shape)
    longest = profile.limits.max_context - 1  # a server needs room for a token of the answer
    if values["trace"] is not None:
        requests = read_requests(values["trace"], values["speed"])
        if over := sum(one.prompt_tokens > longest for one in requests):
            progress_line()(
                f"{over} of {len(requests)} prompts have more than {longest} tokens: they do not fit the context of "
                "the profile, and are refused by any number of replicas"
            )
        requests = requests if arrivals is None else at_rate(requests, arrivals, values["seed"])
    elif arrivals is None:
        raise click.UsageError("give --trace PATH, or --rate requests per second")
    else:
        given = {name: values[name] for name in _DRAWN}
        traffic = Traffic(**given, spread=not values["same_length"], longest_prompt=longest)
        requests = drawn_requests(arrivals, traffic, values["seed"])
    if not requests:
        raise click.UsageError("--rate: no request arrives within --duration; raise one of them")
    return [dataclasses.replace(one, deadline_s=values["deadline"]) for one in requests]


def _goal(values: dict[str, Any]) -> Goal | None:
    from cluster.plan.sizing import SIMULATED, Goal
    from specdec.load.request import Objective

    try:
        objectives = tuple(Objective.read(text, SIMULATED) for text in values["objectives"])
    except ConfigError as error:
        raise click.UsageError(f"--objective: {str(error).removeprefix('goodput: ')}") from None
    return Goal(objectives, values["share"]) if objectives else None


@plan_group.command("export")
@add_server_options
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Profile to write.")
@click.option("--decisions", type=_FILE, help="Decision trace of such a server under load (--trace-file).")
@click.option("--captured", type=_TRACE, help="Folder of its --capture, with the requests of the same time.")
def export_command(out: Path, decisions: Path | None, captured: Path | None, **values: Any) -> None:
    """Write the profile of a replica on this machine.

    It holds limits, costs of forwards and figures of the traces. Without traces it has no drafts, and a step takes only
    its forward.
    """
    from bench.machine import cpu_model
    from cluster.plan.export import export_profile
    from specdec.cli.progress_bar import load_parts

    config = pop_config(values)
    if config.engines:
        raise ConfigError(
            f"engines: a profile describes one model, not {', '.join(config.engines)}; "
            "give a file in which `engine:` describes that one"
        )
    check_folder("--out", out)
    if captured is not None and decisions is None:
        raise click.UsageError("--captured needs --decisions of the same time")
    parts = load_parts(config.engine)
    profile = export_profile(parts, config.server, cpu_model(), decisions, captured)
    out.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    drafts = f"{profile.tokens_per_step:.2f} tokens per step" if decisions else "no traces, no drafts"
    click.echo(f"{out}: {profile.target} on {profile.machine}, {drafts}")
