"""`specdec ab start`, `stop` and `status`: experiments in a running server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specdec.cli.credential_options import credential_options, pop_credentials
from specdec.config import ServerConfig

if TYPE_CHECKING:
    from specdec.api.v1.experiment_pb2 import Experiment
    from specdec.client import Client

_SERVER = click.option(
    "--server",
    default=f"127.0.0.1:{ServerConfig.model_fields['grpc_port'].default}",
    show_default=True,
    help="HOST:PORT of a running server's gRPC.",
)
_NO_RESULT = "EXPERIMENT_NO_RESULT"
Answer = TypeVar("Answer")


@click.command("start")
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_SERVER
@credential_options
def start_command(plan: Path, server: str, **credentials: Any) -> None:
    """Start the experiment that the YAML file PLAN describes in a running server, or go on with it.

    The key must be one marked `admin`. Modes: hash, switchback, shadow, aa; see docs/experiments.md.
    """
    try:
        text = plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{plan}: can not be read ({error})") from None
    _show(_ask(server, credentials, lambda client: client.experiments.start(text)))


@click.command("stop")
@click.argument("name")
@_SERVER
@credential_options
def stop_command(name: str, server: str, **credentials: Any) -> None:
    """Stop the experiment NAME in a running server. Its records stay; starting it again goes on with them."""
    _show(_ask(server, credentials, lambda client: client.experiments.stop(name)))


@click.command("status")
@click.argument("name", required=False)
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write NAME's report, one page, here.")
@_SERVER
@credential_options
def status_command(name: str | None, report: Path | None, server: str, **credentials: Any) -> None:
    """Show the experiments of a running server, or how NAME stands and what its records say so far."""
    if name is None:
        if report is not None:
            raise click.UsageError("--report: name the experiment")
        found = _ask(server, credentials, lambda client: client.experiments.every())
        for experiment in found:
            click.echo(_line(experiment))
        if not found:
            click.echo("no experiments")
        return
    experiment, text, page = _ask(server, credentials, lambda client: _look(client, name, report is not None))
    _show(experiment)
    click.echo(text)
    if report is not None and page:
        try:
            report.write_text(page, encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{report}: can not be written ({error.strerror})") from None
        click.echo(f"report: {report}")


async def _look(client: Client, name: str, report: bool) -> tuple[Experiment, str, str]:
    """How the experiment stands, what its records say, and the page."""
    from specdec.client import CallError

    experiment = await client.experiments.get(name)
    try:
        result = await client.experiments.result(name, report=report)
    except CallError as error:
        if error.reason != _NO_RESULT:
            raise
        return experiment, f"no result yet: {error.message}", ""
    return experiment, "\n".join((result.headline, *(f"  {reason}" for reason in result.reasons))), result.report_html


def _ask(server: str, credentials: dict[str, Any], call: Callable[[Client], Awaitable[Answer]]) -> Answer:
    """The answer of one call to ``server``. Raises CallError."""
    from specdec.client import Client, RetryPolicy

    async def run() -> Answer:
        async with Client(server, pop_credentials(credentials), RetryPolicy(unreachable=False)) as client:
            return await call(client)

    return asyncio.run(run())


def _show(experiment: Experiment) -> None:
    click.echo(_line(experiment))
    for why, count in sorted(experiment.left_out.items()):
        click.echo(f"  left out: {count} requests: {why}")
    if experiment.given_up:
        click.echo(f"  shadows given up: {experiment.given_up}")
    for warning in experiment.warnings:
        click.echo(f"  warning: {warning}")


def _line(experiment: Experiment) -> str:
    """One line about an experiment."""
    from specdec.api.v1 import experiment_pb2 as pb

    state = pb.ExperimentState.Name(experiment.state).removeprefix("EXPERIMENT_STATE_").lower()
    arms = ", ".join(f"{arm.arm} {arm.records}" for arm in experiment.arms)
    why = f" ({experiment.reason})" if experiment.reason else ""
    return f"{experiment.name}: {state}{why}, {experiment.mode}, records: {arms or 'none'}"
