"""`specdec ab run`: ask both arms of an experiment, and conclude."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.ab_conclude import conclude, conclusion_options
from specdec.cli.credential_options import credential_options, pop_credentials
from specdec.cli.options import add_engine_options, pop_config

if TYPE_CHECKING:
    from bench.experiment.side import Side
    from server.experiment.config.experiment_config import ExperimentConfig
    from specdec.client import Credentials
    from specdec.config import Config

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("run")
@click.argument("experiment", type=_FILE)
@click.option("--url", help="The server of both arms: grpc://HOST:PORT, or http://HOST:PORT/v1 (any OpenAI endpoint).")
@click.option("--a", "url_a", help="The first arm's server, with --b for the other's. Default: the plan's `url`.")
@click.option("--b", "url_b", help="The second arm's server.")
@click.option("--model", default="", help="OpenAI endpoints only; default: the first that the server names.")
@click.option("--b-model", default="", help="The same for --b.")
@credential_options
@click.option("--b-key-file", type=_FILE, help="File that holds the key for --b; without one, --b gets no key.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder; default: ab-NAME.")
@click.option("--max-requests", type=click.IntRange(min=2), help="Of both arms together, instead of the plan's.")
@click.option("--quiet", is_flag=True, help="No progress while it runs.")
@conclusion_options
@add_engine_options
def run_command(**values: Any) -> None:
    """Ask both arms what the plan in EXPERIMENT says, and conclude.

    Modes paired_replay and aa ask either arm the same, in turns of opposite order; switchback changes the arm of what
    arrives from block to block. With --target (and --draft), a server is started here and both arms are asked of it.

    Records lie in the folder as soon as they are made. After a stop or a kill, the same command goes on where it was.
    Exit codes are those of `specdec ab analyze`.
    """
    from bench.experiment.read_plan import read_plan

    key_b, credentials = values.pop("b_key_file"), pop_credentials(values)
    values["local"] = values["engine__target"] is not None or values["config_file"] is not None
    server = pop_config(values)
    config = read_plan(values["experiment"])
    if values["max_requests"] is not None:
        stopping = config.stopping.model_copy(update={"max_requests": values["max_requests"]})
        config = config.model_copy(update={"stopping": stopping})
    config, sides = _sides(config, values, credentials, key_b)
    out = values["out"] or Path(f"ab-{config.name}")
    why = asyncio.run(_run(config, sides, server, out, values["quiet"]))
    if not values["as_json"]:
        click.echo(f"ended: {why}")
    sys.exit(conclude(out, values["demand"], values["as_json"]))


def _sides(
    config: ExperimentConfig, values: dict[str, Any], credentials: Credentials, key_b: Path | None
) -> tuple[ExperimentConfig, tuple[Side, Side] | None]:
    """The plan with the arms' URLs, and where they are; None: on a server that is to be started."""
    from bench.experiment.side import Side
    from specdec.cli.credential_options import read_key

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
    if key_b is not None and pair[0] is None:
        raise click.UsageError("--b-key-file means nothing without --b")
    if local:
        return config, None
    if url is not None:
        one = Side(url, "--url", url, credentials, values["model"])
        return config, (one, one)
    if given == ["the plan"]:
        sources = [f"{values['experiment']}: arms.{name}.url" for name in config.arms]
    else:
        sources = ["--a", "--b"]
        arms = {
            name: arm.model_copy(update={"url": at}) for (name, arm), at in zip(config.arms.items(), pair, strict=True)
        }
        config = config.model_copy(update={"arms": arms})
    # A key is for the server it was given for.
    second = dataclasses.replace(credentials, key=read_key("--b-key-file", key_b))
    return config, (
        Side(pair[0], sources[0], pair[0], credentials, values["model"]),
        Side(pair[1], sources[1], pair[1], second, values["b_model"]),
    )


async def _run(
    config: ExperimentConfig, sides: tuple[Side, Side] | None, server: Config, out: Path, quiet: bool
) -> str:
    from bench.experiment.session import run_experiment
    from bench.experiment.side import Side
    from bench.local_server import LocalServer
    from specdec.cli.ab_progress import AbProgress

    with AbProgress(quiet) as progress:
        if sides is not None:
            return await run_experiment(config, sides, out, progress.watch)
        here = server.server.model_copy(update={"host": "127.0.0.1", "grpc_port": 0, "http_port": None})
        async with LocalServer(server.model_copy(update={"server": here})) as started:
            one = Side(f"grpc://{started.grpc_address}", "--target", "started for this experiment")
            return await run_experiment(config, (one, one), out, progress.watch)
