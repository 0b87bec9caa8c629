"""`specdec cluster`: a fleet of servers on Ray Serve, behind Envoy."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import importlib
import importlib.util
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from cluster.config import ClusterConfig

_COMPLETE_S = 3600.0
_RAY_ON_SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: on loopback only, on any system


def _fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``file`` and ``address``."""
    command = click.option(
        "--ray", "address", metavar="ADDRESS",
        help="Ray of several machines, such as host:6379 or auto; default: a private one on this machine.",
    )(command)  # fmt: skip
    return click.option(
        "-f", "--file", "file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="cluster.yaml", help="Configuration of the fleet.",
    )(command)  # fmt: skip


@click.group("cluster")
def cluster_group() -> None:
    """Serve models with several replicas behind one address each."""


@cluster_group.command("serve")
@_fleet_options
def serve_command(file: Path, address: str | None) -> None:
    """Run the fleet and its Envoy until SIGTERM or Ctrl-C. Running calls are finished first; a second signal stops at
    once."""
    config, operate = _fleet(file, address)
    asyncio.run(operate.serve_fleet(config, address, click.echo))
    click.echo("stopped", err=True)


@cluster_group.command("status")
@_fleet_options
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def status_command(file: Path, address: str | None, as_json: bool) -> None:
    """Show releases with their weights, and replicas with their load."""
    config, operate = _fleet(file, address)
    with operate.attached(config, address) as reconciler:
        found = operate.status(reconciler)
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(status_lines(found)))


@cluster_group.command("scale")
@_fleet_options
@click.argument("model")
@click.argument("replicas", type=click.IntRange(min=1))
@click.option("--max", "most", type=click.IntRange(min=1), help="Autoscale from REPLICAS to this number.")
@click.option("--release", help="Release; default: the one with the most sessions.")
def scale_command(
    file: Path, address: str | None, model: str, replicas: int, most: int | None, release: str | None
) -> None:
    """Run REPLICAS of MODEL until the file is applied again. Superfluous ones finish their calls first."""
    config, operate = _fleet(file, address)
    with operate.attached(config, address) as reconciler:
        operate.scale(reconciler, model, release, replicas, replicas if most is None else most)


@cluster_group.command("drain")
@_fleet_options
@click.argument("replica")
def drain_command(file: Path, address: str | None, replica: str) -> None:
    """Let REPLICA finish its calls, then stop and replace it. `status` shows its id."""
    from cluster.fleet import draining

    config, operate = _fleet(file, address)
    with operate.attached(config, address) as reconciler:
        operate.change(reconciler, draining, replica)


@cluster_group.command("rollout")
@_fleet_options
@click.argument("model", required=False)
@click.argument("release", required=False)
@click.option("--weight", type=click.IntRange(0, 100), help="Canary: percentage of the sessions for RELEASE.")
@click.option("--promote", is_flag=True, help="Give RELEASE all sessions; other releases keep their replicas.")
@click.option("--rollback", is_flag=True, help="Restore the weights of MODEL before their last change.")
@click.option("--restart", is_flag=True, help="Replace every replica of RELEASE, default the live one, one by one.")
@click.option("--wait/--no-wait", default=True, help="Wait until all replicas are ready.", show_default=True)
def rollout_command(
    file: Path,
    address: str | None,
    model: str | None,
    release: str | None,
    weight: int | None,
    promote: bool,
    rollback: bool,
    restart: bool,
    wait: bool,
) -> None:
    """Apply the file, or move sessions between releases. Applying starts new releases, replaces replicas with changed
    settings and stops removed releases."""
    from cluster.fleet import rolled_back, switched, with_share

    asked = [name for name, given in (
        ("--weight", weight is not None), ("--promote", promote), ("--rollback", rollback), ("--restart", restart)
    ) if given]  # fmt: skip
    if len(asked) > 1:
        raise click.UsageError(f"{' and '.join(asked)}: one at a time")
    if bool(asked) != (model is not None):
        raise click.UsageError("--weight, --promote, --rollback and --restart need MODEL, and MODEL needs one of them")
    if (weight is not None or promote) and release is None:
        raise click.UsageError(f"{asked[0]} needs a RELEASE")
    if rollback and release is not None:
        raise click.UsageError("--rollback takes no RELEASE: it restores the weights of all releases of MODEL")
    config, operate = _fleet(file, address)
    with operate.attached(config, address) as reconciler:
        rollouts, report = [], functools.partial(click.echo, err=True)
        if model is None:
            rollouts = operate.apply(reconciler, config, report)
        elif restart:
            rollouts = [operate.restart(reconciler, model, release)]
        elif rollback:
            operate.change(reconciler, rolled_back, model)
        elif promote:
            operate.change(reconciler, switched, model, release)
        else:
            operate.change(reconciler, with_share, model, release, weight)
        if wait:
            drains_s = config.drain_s * sum(model.replicas.max for model in config.models)
            operate.wait_complete(reconciler, rollouts, _COMPLETE_S + drains_s, report)
        click.echo("\n".join(status_lines(operate.status(reconciler))))


def status_lines(found: dict[str, Any]) -> list[str]:
    """The output of `status`."""
    lines = []
    for model, releases in found["models"].items():
        whole = sum(release["weight"] for release in releases.values()) or 1
        for name, release in releases.items():
            share = 100 * release["weight"] / whole
            lines.append(f"{model}.{name}: {share:.3g} % of the sessions, fingerprint {release['fingerprint'] or '-'}")
            lines += [_replica_line(replica) for replica in release["replicas"]]
    lines += [f"{app}: {why}" for app, why in found["failures"].items()]
    return lines


def _replica_line(replica: dict[str, Any]) -> str:
    line = f"  {replica['id']}  {replica['state']}"
    if replica["http_port"]:
        line += f"  {replica['host']} http {replica['http_port']} grpc {replica['grpc_port']}"
    if replica["waiting"] is not None:
        line += f"  {replica['busy']:.0%} busy, {replica['waiting']:g} waiting, {replica['wait_s']:.2f} s to wait"
    return line


def _fleet(file: Path, address: str | None) -> tuple[ClusterConfig, Any]:
    """Returns the configuration and the module that imports Ray. Ray reads its authentication from the environment: a
    private Ray uses the token in the fleet's folder, one of several machines its operator's settings.

    Raises:
        ConfigError: the file is invalid, Ray is not installed, or others may write to the folder.
    """
    from cluster.config import load_cluster_config

    config = load_cluster_config(file)
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed: run `make setup-cluster`, or pip install '.[cluster]', in specdec's checkout"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report usage to its makers
    if address is None:
        from cluster.state_folder import private_folder

        folder = private_folder(config.folder)
        os.environ |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file(folder / "ray-token")),
            _RAY_ON_SEVERAL_MACHINES: "0",
        }
    return config, importlib.import_module("cluster.operate")


def token_file(path: Path) -> Path:
    """Returns ``path``; creates it with a secret that only its owner can read if it is missing or empty.

    Raises:
        ConfigError: it cannot be written.
    """
    from cluster.state_folder import replace_files

    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two first commands use one secret
        if not path.exists() or not path.stat().st_size:
            replace_files({path: secrets.token_hex(32).encode()})
    except OSError as error:
        raise ConfigError(f"folder: {path} cannot be written ({error.strerror})") from None
    finally:
        os.close(folder)
    return path
