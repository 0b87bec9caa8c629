"""`specdec ab`: run experiments, see what their records say, and how large the next one has to be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specdec.cli.ab_conclude import REPORT, RESULT, conclude, conclusion_options, write_text
from specdec.cli.ab_live_cmd import start_command, status_command, stop_command
from specdec.cli.ab_run_cmd import run_command

if TYPE_CHECKING:
    from server.experiment.config.metric_target import MetricTarget

_FOLDER = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group("ab")
def ab_group() -> None:
    """Latency experiments: run one, analyse it, show its report, plan the next."""


ab_group.add_command(run_command)
ab_group.add_command(start_command)
ab_group.add_command(stop_command)
ab_group.add_command(status_command)


@ab_group.command("analyze")
@_FOLDER
@conclusion_options
def analyze_command(folder: Path, demand: str, as_json: bool) -> None:
    """Analyse the experiment in FOLDER; write result.json and report.html beside its records.

    Exit code 0 when the verdict is as demanded. Else 10: worse; 11: undecided; 12: invalid; 13: equivalent where
    better was demanded. 1: there is nothing to analyse; 2: the command line is wrong.
    """
    sys.exit(conclude(folder, demand, as_json))


@ab_group.command("report")
@_FOLDER
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to; default: FOLDER/report.html.")
def report_command(folder: Path, out: Path | None) -> None:
    """Make the page of an analysed experiment again, from its result.json."""
    from server.experiment.analysis.result import Result
    from server.experiment.report.render import render

    out = out or folder / REPORT
    write_text(out, render(Result.read(folder / RESULT)))
    click.echo(str(out))


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
    """Say how many pairs or blocks find a change, judging by FOLDER, a capture in which both arms were the same."""
    from server.experiment.analysis.plan import make_plan
    from server.experiment.config.stopping import Stopping
    from server.experiment.manifest import Manifest
    from server.experiment.record_log import read_records

    size, chance = _share("--effect", effect), _share("--power", power)
    manifest = Manifest.read(folder)
    target = manifest.config.primary if metric is None else _target(metric)
    stopping = Stopping(rule="always_valid" if always_valid else "fixed", alpha=manifest.config.stopping.alpha)
    plan = make_plan(manifest, read_records(folder), target, stopping, size, chance, simulations)
    if as_json:
        click.echo(plan.model_dump_json())
        return
    click.echo(f"{plan.units} {plan.unit_name}s find a change of {size:.1%} in {plan.label}")
    low, high = plan.power_bounds
    click.echo(f"with a chance of {plan.power:.0%} ({low:.0%} to {high:.0%} at 95%, from {simulations} simulations)")
    click.echo(f"the capture took {plan.seconds:.0f} s for as many; it has {plan.captured_units}")
    if plan.merged > 1:
        click.echo(f"{plan.merged} consecutive {plan.unit_name}s depend on each other and were taken as one")


@ab_group.command("check")
@_FOLDER
@click.option("--experiments", type=click.IntRange(2, 100_000), default=200, show_default=True, help="To cut it into.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def check_command(folder: Path, experiments: int, as_json: bool) -> None:
    """Count how often a difference is found where there is none: in FOLDER, a capture in which both arms were the same,
    cut into many experiments.

    Exit code 14 when it is found more often than chance explains.
    """
    from server.experiment.analysis.exit_code import FALSE_ALARMS
    from server.experiment.analysis.false_alarms import count_false_alarms
    from server.experiment.manifest import Manifest
    from server.experiment.record_log import read_records

    found = count_false_alarms(Manifest.read(folder), read_records(folder), experiments)
    if as_json:
        click.echo(found.model_dump_json())
    else:
        low, high = found.bounds
        click.echo(f"{found.experiments} experiments of {found.units_each} {found.unit_name}s, {found.label}")
        click.echo(
            f"{found.alarms} found a difference: {found.alarms / experiments:.1%} ({low:.1%} to {high:.1%} at 95%)"
        )
        click.echo(f"{found.alpha:.0%} may; more than {found.most} would be more than chance explains")
    sys.exit(0 if found.held else FALSE_ALARMS)


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

    from server.experiment.config.metric_target import MetricTarget

    try:
        return MetricTarget.model_validate(metric)
    except ValidationError as error:
        raise click.UsageError(f"--metric: {error.errors()[0]['msg']}") from None
