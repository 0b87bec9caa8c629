"""`specdec ab`: experiments, run from here or in a server: planned, started, watched, analysed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import (
    Ask,
    ScreenCommand,
    add_engine_options,
    asks_server,
    credential_options,
    pop_config,
    pop_credentials,
)

if TYPE_CHECKING:
    from bench.experiment.plan import ArmServer
    from bench.experiment.run_folder import Progress
    from server.experiment.config import ExperimentConfig, MetricTarget
    from specdec.api.v1.experiment_pb2 import Experiment
    from specdec.client.client import Client
    from specdec.client.connection import Credentials
    from specdec.config import Config


RESULT, REPORT = "result.json", "report.html"


@click.group("ab")
def ab_group() -> None:
    """Latency experiments: run one, analyse it, plan the next."""


def conclusion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``demand`` and ``as_json``, which `conclude` takes."""
    demand = click.option(
        "--demand",
        type=click.Choice(["not-worse", "better", "none"]),
        default="not-worse",
        show_default=True,
        help="Verdict for which the exit code is 0; not-worse: better or equivalent; none: anything valid.",
    )
    return demand(click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command))


def conclude(folder: Path, demand: str, as_json: bool) -> int:
    """Analyse the records in ``folder``, write `RESULT` and `REPORT` next to them, print the verdict; return exit code.

    Raises:
        ExperimentError: there is nothing to analyse.
    """
    from server.experiment.analysis.analyse import analyse
    from server.experiment.analysis.result import exit_code
    from server.experiment.folder import ExperimentFolder
    from server.experiment.records import read_records
    from server.experiment.report.render import render

    experiment = ExperimentFolder(folder)
    ended = experiment.state().state != "running"
    result = analyse(experiment.manifest(), read_records(folder), ended=ended)
    (folder / RESULT).write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    (folder / REPORT).write_text(render(result), encoding="utf-8")
    if as_json:
        click.echo(result.model_dump_json())
    else:
        click.echo(_conclusion(result.verdict.headline, result.verdict.reasons, result.notes))
        click.echo(f"report: {folder / REPORT}")
    return exit_code(result.verdict.kind, demand, result.guardrails)  # type: ignore[arg-type]  # click has checked it


def _conclusion(headline: str, reasons: Iterable[str], notes: Iterable[str]) -> str:
    return "\n".join((headline, *(f"  {line}" for line in reasons), *(f"  Note: {note}." for note in notes)))


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SCREEN = {
    "Servers": ("--url", "--a", "--b", "--key-file", "--target", "--draft"),
    "Run": ("--out", "--max-requests", "--quiet"),
    "Verdict": ("--demand", "--json"),
}


@ab_group.command("run", cls=ScreenCommand, screen=_SCREEN)
@click.argument("experiment", type=_FILE)
@click.option("--url", help="The server of both arms: grpc://HOST:PORT, or http://HOST:PORT/v1 (any OpenAI endpoint).")
@click.option("--a", "url_a", help="The first arm's server, with --b for the other's. Default: the plan's `url`.")
@click.option("--b", "url_b", help="The second arm's server.")
@click.option("--model", default="", help="One of several that the server has; default: the first that it names.")
@click.option("--b-model", default="", help="The same for --b.")
@credential_options
@click.option("--b-key-file", type=_FILE, help="File that holds the key for --b; without one, --b gets no key.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default: ab-NAME.")
@click.option("--max-requests", type=click.IntRange(min=2), help="Of both arms together, instead of the plan's.")
@click.option("--quiet", is_flag=True, help="No progress while it runs.")
@conclusion_options
@add_engine_options
def run_command(**values: Any) -> None:
    """Run the plan in the file EXPERIMENT, and compute the verdict.

    Every request goes to both arms, in alternating order. With --target the command starts one server for both.
    Records are written at once; after a stop or a kill, the same command resumes. Exit codes are those of `specdec ab
    analyze`.
    """
    from bench.experiment.plan import read_plan

    key_b, credentials = values.pop("b_key_file"), pop_credentials(values)
    values["local"] = values["engine__target"] is not None or values["config_file"] is not None
    server = pop_config(values)
    config = read_plan(values["experiment"])
    if values["max_requests"] is not None:
        stopping = config.stopping.model_copy(update={"max_requests": values["max_requests"]})
        config = config.model_copy(update={"stopping": stopping})
    config, servers = _servers(config, values, credentials, key_b)
    out = values["out"] or Path(f"ab-{config.name}")
    try:
        why = asyncio.run(_run(config, servers, server, out, values["quiet"]))
    except KeyboardInterrupt:
        if not out.is_dir():
            raise
        raise KeyboardInterrupt(f"the records stay in {out}, and the same command goes on with them") from None
    if not values["as_json"]:
        click.echo(f"ended: {why}")
    sys.exit(conclude(out, values["demand"], values["as_json"]))


def _servers(
    config: ExperimentConfig, values: dict[str, Any], credentials: Credentials, key_b: Path | None
) -> tuple[ExperimentConfig, tuple[ArmServer, ArmServer] | None]:
    """The plan with the URLs of the servers that are asked, and these; None: a server that is to be started."""
    from bench.experiment.plan import ArmServer
    from specdec.cli.options import given_key

    url, pair = values["url"], (values["url_a"], values["url_b"])
    if (pair[0] is None) != (pair[1] is None):
        raise click.UsageError("--a and --b belong together: give both, or --url for one server")
    local = values["local"]
    written = [arm.url for arm in config.arms.values()]
    given = [name for name, there in (("--url", url), ("--a and --b", pair[0]), ("--target", local)) if there]
    if not given and all(written):
        given, pair = ["the plan"], (written[0], written[1])
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise click.UsageError(f"the arms need servers: give one of --url, --a and --b, --target; there is {found}")
    if pair[0] is None and (key_b is not None or values["b_model"]):
        raise click.UsageError(f"--b-{'model' if key_b is None else 'key-file'} means nothing without --b")
    if local and values["model"]:
        raise click.UsageError("--model means nothing for the server of --target")
    if config.assignment.mode == "aa" and pair[0] != pair[1]:
        raise click.UsageError("--b: mode aa compares an arm with itself; give --url")
    servers: tuple[ArmServer, ArmServer] | None = None
    if local:
        pair = None, None
    elif url is not None:
        pair = url, url
        servers = (ArmServer(url, "--url", url, credentials, values["model"]),) * 2
    else:
        from_plan = [f"{values['experiment']}: arms.{name}.url" for name in config.arms]
        sources = from_plan if given == ["the plan"] else ["--a", "--b"]
        # A key is for the server it was given for.
        second = dataclasses.replace(credentials, key=given_key("--b-key-file", key_b))
        servers = (
            ArmServer(pair[0], sources[0], pair[0], credentials, values["model"]),
            ArmServer(pair[1], sources[1], pair[1], second, values["b_model"], "--b-key-file"),
        )
    # Reports and manifests name these URLs, not those of the file.
    arms = {name: arm.model_copy(update={"url": at}) for (name, arm), at in zip(config.arms.items(), pair, strict=True)}
    return config.model_copy(update={"arms": arms}), servers


async def _run(
    config: ExperimentConfig, servers: tuple[ArmServer, ArmServer] | None, server: Config, out: Path, quiet: bool
) -> str:
    from bench.experiment.plan import ArmServer
    from bench.experiment.session import run_experiment
    from bench.local_server import LocalServer, private_config
    from specdec.cli.progress_bar import LiveLine

    with LiveLine(quiet=quiet, plain_every_s=30) as line:

        def watch(progress: Progress) -> None:
            line.show(progress_line(progress, line.passed_s))

        if servers is not None:
            return await run_experiment(config, servers, out, watch)
        async with LocalServer(private_config(server)) as started:
            one = ArmServer(f"grpc://{started.grpc_address}", "--target", "started for this experiment")
            return await run_experiment(config, (one, one), out, watch)


_NO_RESULT, _ENGINE_UNAVAILABLE = "EXPERIMENT_NO_RESULT", "ENGINE_UNAVAILABLE"  # reasons of a `CallError`


@ab_group.command("start")
@click.argument("plan", type=_FILE)
@asks_server
def start_command(plan: Path, ask: Ask, model: str) -> None:
    """Start or resume the experiment of the file PLAN.

    A running server runs it on its own traffic. The key must be marked `admin`. Modes: hash, switchback, aa; see
    docs/experiments.md.
    """
    from specdec.config import read_text

    text = read_text(plan, f"{plan}:")
    _show_status(_ask_when_ready(ask, lambda client: client.experiments.start(text, model=model)))


@ab_group.command("stop")
@click.argument("name")
@asks_server
def stop_command(name: str, ask: Ask, model: str) -> None:
    """Stop the experiment NAME in a running server. Its records stay; starting it again resumes it."""
    _show_status(ask(lambda client: client.experiments.stop(name, model=model)))


@ab_group.command("status")
@click.argument("name", required=False)
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Write NAME's report, one HTML page, to FILE."
)
@asks_server
def status_command(name: str | None, report: Path | None, ask: Ask, model: str) -> None:
    """Show a server's experiments, or the state and figures of NAME."""
    if name is None:
        if report is not None:
            raise click.UsageError("--report: name the experiment")
        found = ask(lambda client: client.experiments.every(model=model))
        click.echo("\n".join(map(_line, found)) or "no experiments")
        return
    experiment, text, page = ask(lambda client: _look(client, name, model, report is not None))
    _show_status(experiment)
    click.echo(text)
    if report is not None:
        if not page:
            raise click.ClickException(f"--report: {report} is not written, because there is no result yet")
        report.write_text(page, encoding="utf-8")
        click.echo(f"report: {report}")


async def _look(client: Client, name: str, model: str, report: bool) -> tuple[Experiment, str, str]:
    """How the experiment stands, what its records say, and the page."""
    from specdec.client.connection import CallError

    experiment = await client.experiments.get(name, model=model)
    try:
        result = await client.experiments.result(name, report=report, model=model)
    except CallError as error:
        if error.reason != _NO_RESULT:
            raise
        return experiment, f"no result yet: {error.message}", ""
    text = _conclusion(result.headline, result.reasons, json.loads(result.result_json)["notes"])
    return experiment, text, result.report_html


def _ask_when_ready(ask: Ask, call: Callable[[Client], Awaitable[Experiment]]) -> Experiment:
    """What ``call`` returns; waits while the server's engine loads or restarts. Raises CallError."""
    from specdec.client.connection import CallError

    waits = False
    while True:
        try:
            return ask(call)
        except CallError as error:
            if error.reason != _ENGINE_UNAVAILABLE:
                raise
            if not waits:
                click.echo(f"waiting for the server: {error.message}", err=True)
            waits = True


def _show_status(experiment: Experiment) -> None:
    click.echo(_line(experiment))
    for why, count in sorted(experiment.left_out.items()):
        click.echo(f"  left out: {count} requests: {why}")
    for warning in experiment.warnings:
        click.echo(f"  warning: {warning}")


def _line(experiment: Experiment) -> str:
    """One line about an experiment."""
    from specdec.api.v1 import experiment_pb2 as pb

    state = pb.ExperimentState.Name(experiment.state).removeprefix("EXPERIMENT_STATE_").lower()
    arms = ", ".join(f"{arm.arm} {arm.records}" for arm in experiment.arms)
    why = f" ({experiment.reason})" if experiment.reason else ""
    return f"{experiment.name}: {state}{why}, {experiment.mode}, records: {arms or 'none'}"


_FOLDER = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))


@ab_group.command("analyze")
@_FOLDER
@conclusion_options
def analyze_command(folder: Path, demand: str, as_json: bool) -> None:
    """Analyse the records in FOLDER. Writes result.json and report.html there.

    Exit code 0 when the verdict is as demanded. Else 10: worse; 11: undecided; 12: invalid; 13: equivalent where
    better was demanded; 15: a guardrail is open. 1: there is nothing to analyse; 2: the command line is wrong.
    """
    sys.exit(conclude(folder, demand, as_json))


@ab_group.command("plan")
@_FOLDER
@click.option("--effect", required=True, help="The change to be found, such as 5% or 0.05.")
@click.option("--power", default="80%", show_default=True, help="The chance to find it.")
@click.option("--metric", help="Such as ttft_ms@p95 or tpot_ms:mean; default: the primary metric of FOLDER's plan.")
@click.option("--always-valid", is_flag=True, help="For an experiment that is looked at before its end.")
@click.option("--simulations", type=click.IntRange(50, 10_000), default=200, show_default=True, help="Per size tried.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan_command(
    folder: Path, effect: str, power: str, metric: str | None, always_valid: bool, simulations: int, as_json: bool
) -> None:
    """Compute how many pairs or blocks detect a change. FOLDER holds an experiment with two equal arms."""
    from server.experiment.analysis.power import plan_size
    from server.experiment.config import Stopping
    from server.experiment.folder import ExperimentFolder
    from server.experiment.records import read_records

    size, chance = _share("--effect", effect), _share("--power", power)
    manifest = ExperimentFolder(folder).manifest()
    target = manifest.config.primary if metric is None else _target(metric)
    stopping = Stopping(rule="always_valid" if always_valid else "fixed", alpha=manifest.config.stopping.alpha)
    plan = plan_size(manifest, read_records(folder), target, stopping, size, chance, simulations)
    if as_json:
        click.echo(plan.model_dump_json())
        return
    if not manifest.config.arms_are_equal:
        click.echo("the arms of this experiment differ, and their difference counts as noise: prefer two equal arms")
    click.echo(f"{plan.units} {plan.unit_name}s find a change of {size:.1%} in {plan.label}")
    if always_valid:  # other values widen the intervals at that number
        click.echo(f"with `stopping: {{rule: always_valid, expected_units: {plan.units}}}`")
    low, high = plan.power_bounds
    click.echo(f"with a chance of {plan.power:.0%} ({low:.0%} to {high:.0%} at 95%, from {simulations} simulations)")
    click.echo(f"at the pace of this experiment they take {plan.seconds:.0f} s; it has {plan.captured_units}")
    if plan.captured_units < plan.recorded_units:  # answers without text have no ttft_ms, for example
        every = -(-plan.units * plan.recorded_units // plan.captured_units)
        click.echo(
            f"{plan.captured_units} of {plan.recorded_units} {plan.unit_name}s have {target.metric}: run {every}"
        )
    if plan.merged > 1:
        click.echo(f"{plan.merged} consecutive {plan.unit_name}s depend on each other and were taken as one")


def _share(option: str, text: str) -> float:
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 0.99:
        raise click.UsageError(f"{option}: give a share between 0 and 99%, such as 5% or 0.05, not {text!r}")
    return value


def _target(metric: str) -> MetricTarget:
    from pydantic import ValidationError

    from server.experiment.config import MetricTarget

    try:
        return MetricTarget.model_validate(metric)
    except ValidationError as error:
        raise click.UsageError(f"--metric: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def progress_line(progress: Progress, passed_s: float) -> str:
    """Counts so far, the medians of both arms and their ratio."""
    from specdec.load.figures import brief

    of = "" if progress.planned is None else f"/{progress.planned}"
    words = [f"{passed_s:6.0f} s", f"pairs {len(progress.done)}{of}"]
    a, b = medians = progress.medians()
    for name, value in zip(progress.names, medians, strict=True):
        words.append(f"{name} {progress.metric} " + ("-" if value is None else brief(value)))
    if a and b is not None:
        words.append(f"ratio {b / a:.3f}")
    words.append(f"different tokens {len(progress.mismatched)}")
    words.append(f"failed {progress.failed[0]}+{progress.failed[1]}")
    return "  ".join(words)
