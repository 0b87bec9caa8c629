"""What an operator does with a fleet: start it, change what it runs, end it. `specdec cluster` is the face of this."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster import ray_serve
from cluster.config import ClusterConfig
from cluster.deployment import LOOPBACK, Deployment, deployment_of
from cluster.envoy_process import EnvoyProcess
from cluster.fleet import Fleet
from cluster.ray_serve import NAMESPACE, RunsElsewhereError, answer, ask, deploy, find_keeper, remove, start_keeper
from specdec.errors import ConfigError, ModelError

Say = Callable[[str], None]
logging.getLogger("ray.serve").setLevel(logging.WARNING)
_POLL_S = 0.25
_OBJECT_STORE = 80 << 20  # the least that Ray takes: nothing of ours goes through it
_HOOK = {"worker_process_setup_hook": "specdec.put_own_modules_first"}
_SETTINGS = {
    "namespace": NAMESPACE, "include_dashboard": False, "log_to_driver": False, "configure_logging": False,
    "logging_level": "ERROR",
}  # fmt: skip


@contextlib.contextmanager
def own_ray(config: ClusterConfig) -> Iterator[None]:
    """A Ray on this machine's loopback address, for as long as the context lasts; where it is, the folder tells."""
    ray.init(
        address="local", _node_ip_address=LOOPBACK, object_store_memory=_OBJECT_STORE, runtime_env=_HOOK, **_SETTINGS
    )
    place = _address_file(config)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(ray.get_runtime_context().gcs_address)
        yield
    finally:
        place.unlink(missing_ok=True)
        ray.shutdown()


@contextlib.contextmanager
def attached(config: ClusterConfig, address: str | None = None) -> Iterator[Any]:
    """The keeper of a fleet that runs, on the Ray at ``address``; None: on the one that its folder tells of.

    Raises:
        RunsElsewhereError: there is none.
    """
    with _joined(address or _told_address(config)):
        yield find_keeper()


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    try:
        ray.init(address=address, runtime_env=_HOOK, **{**_SETTINGS, "include_dashboard": None})
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunsElsewhereError(f"no Ray answers at {address}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


async def serve_fleet(config: ClusterConfig, address: str | None, say: Say) -> None:
    """Run a fleet and its Envoy until SIGTERM or SIGINT. ``address``: that of a Ray of several machines; None: it is
    this machine's own, and ends with the fleet.

    Raises:
        ConfigError: a port or a file can not be had.
        ModelError: a server does not start.
        EnvoyError: Envoy does not.
        RunsElsewhereError: no Ray answers at ``address``.
    """
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted.set)
    host = LOOPBACK if address is None else ""
    async with EnvoyProcess(config, Fleet.of(config), ray_serve.envoy_folder(config)) as envoy:
        with own_ray(config) if address is None else _joined(address):
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, interrupted.set)  # Ray has put handlers of its own there
            keeper = await asyncio.to_thread(_begin, config, host, say)
            watching = asyncio.create_task(_watch(keeper, say))
            try:
                await _until(interrupted, _all_complete(config, say))
                await interrupted.wait()
                say("stopping: calls that run are finished first")
                await envoy.stop(config.drain_s)
            finally:
                watching.cancel()
                await asyncio.to_thread(_end, keeper)


def _begin(config: ClusterConfig, host: str, say: Say) -> Any:
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    keeper = start_keeper(config)
    ask(keeper, "status")
    for model in config.models:
        for release in model.releases:
            say(f"starting {model.name}.{release}: {model.replicas.min} to {model.replicas.max} replicas")
            deploy(keeper, deployment_of(config, model.name, release, host=host))
    return keeper


async def _all_complete(config: ClusterConfig, say: Say) -> None:
    apps = [f"{model.name}.{release}" for model in config.models for release in model.releases]
    await asyncio.to_thread(wait_complete, apps, math.inf)
    for line in _ready_lines(config):
        say(line)


async def _until(interrupted: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work`` unless interrupted before; raises what it raises."""
    tasks = [asyncio.create_task(work), asyncio.create_task(interrupted.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if tasks[0].done() and not tasks[0].cancelled():
        tasks[0].result()


async def _watch(keeper: Any, say: Say) -> None:
    """Say what becomes of replicas."""
    seen: dict[str, str] = {}
    while True:
        try:
            models = await keeper.call.remote("status")
        except ray.exceptions.RayError as error:
            say(f"the keeper does not answer: {error!r}")
        else:
            states = {
                replica["id"]: replica["state"]
                for releases in models.values()
                for release in releases.values()
                for replica in release["replicas"]
            }
            for name in sorted(states.keys() | seen.keys()):
                if (state := states.get(name, "gone")) != seen.get(name):
                    say(f"{name}: {state}")
            seen = states
        await asyncio.sleep(_POLL_S)


def _end(keeper: Any) -> None:
    with contextlib.suppress(RunsElsewhereError):
        for deployment in answer(keeper.deployments.remote()).values():
            remove(keeper, deployment)
    ray.kill(keeper)  # Serve stays: on a Ray of several machines it may run what is not ours


def _ready_lines(config: ClusterConfig) -> Iterator[str]:
    scheme = "https" if config.listen.tls_cert else "http"
    for model in config.models:
        yield f"ready: {model.name}"
        if model.grpc_port is not None:
            yield f"  gRPC  {config.listen.host}:{model.grpc_port}"
        if model.http_port is not None:
            yield f"  HTTP  {scheme}://{config.listen.host}:{model.http_port}"


def status(keeper: Any) -> dict[str, Any]:
    """What the fleet is: its models, releases and replicas; and what Ray has to say of releases that fail."""
    return {"models": ask(keeper, "status"), "failures": ray_serve.failures()}


def scale(keeper: Any, model: str, release: str | None, low: int, high: int) -> None:
    """Other bounds of how many replicas a release has; without a name, the live one. No replica is replaced for it.

    Raises:
        ConfigError: there is no such release, or the bounds are none.
    """
    deploy(keeper, _deployed(keeper, model, release).scaled(low, high))


def restart(keeper: Any, model: str, release: str | None) -> Deployment:
    """Begin to replace every replica of a release, one after the other; without a name, the live one.

    Raises:
        ConfigError: there is no such release.
    """
    found = _deployed(keeper, model, release).restarted()
    deploy(keeper, found)
    return found


def drain(keeper: Any, replica: str) -> None:
    """Begin to end one replica in good order; another takes its place.

    Raises:
        ConfigError: there is none of that id.
    """
    ask(keeper, "drain", replica)


def canary(keeper: Any, model: str, release: str, percent: int) -> None:
    """``release`` gets so many percent of the model's sessions, which are taken from the live one or given back to it.

    Raises:
        ConfigError: it has no replica that is ready, or more is asked for than the live release has.
    """
    weights = _weights(keeper, model)
    if release not in weights:
        raise ConfigError(f"{model} has no release {release!r}; there are: {', '.join(weights)}")
    others = {name: weight for name, weight in weights.items() if name != release}
    giver = max(others, key=lambda name: others[name], default=release)
    left = 100 - percent - sum(weight for name, weight in others.items() if name != giver)
    if giver == release or left < 0:
        raise ConfigError(f"{model}.{release} can not have {percent} % of the sessions: the others have {others}")
    ask(keeper, "weigh", model, {release: percent, giver: left})


def promote(keeper: Any, model: str, release: str) -> None:
    """``release`` gets all sessions; the others keep their replicas.

    Raises:
        ConfigError: it has no replica that is ready.
    """
    ask(keeper, "promote", model, release)


def roll_back(keeper: Any, model: str) -> None:
    """The sessions are split as before the last change.

    Raises:
        ConfigError: there was none, or who had sessions has no replica any more.
    """
    ask(keeper, "roll_back", model)


def apply(keeper: Any, config: ClusterConfig, say: Say) -> list[str]:
    """Begin to make the fleet what a changed cluster.yaml says; returns the applications to wait for. Ports and models
    are Envoy's from its start on. The weights of releases stay: `weigh`, `promote` and `roll_back` change them.

    Raises:
        ConfigError: a release that has sessions is not in the file any more.
    """
    running: dict[str, Deployment] = answer(keeper.deployments.remote())
    known = {deployment.model for deployment in running.values()}
    if new := [model.name for model in config.models if model.name not in known]:
        raise ConfigError(f"{', '.join(new)}: a model's ports are opened when the fleet starts; start it anew")
    host = next(iter(running.values())).host
    wanted = [deployment_of(config, model.name, name, host=host) for model in config.models for name in model.releases]
    over = [deployment for app, deployment in running.items() if app not in {each.app for each in wanted}]
    states = ask(keeper, "status")
    for deployment in over:
        if states[deployment.model][deployment.release]["weight"]:
            raise ConfigError(f"{deployment.app} has sessions still; give them to another release first")
    answer(keeper.configure.remote(config))
    changed = []
    for deployment in wanted:
        former = running.get(deployment.app)
        if former is not None:
            deployment = deployment.model_copy(update={"restarts": former.restarts})
        if deployment != former:
            verb = "starting" if former is None else "replacing" if former.version != deployment.version else "changing"
            say(f"{verb} {deployment.app}")
            deploy(keeper, deployment)
            changed.append(deployment.app)
    for deployment in over:
        say(f"ending {deployment.app}")
        remove(keeper, deployment)
        ask(keeper, "close_release", deployment.model, deployment.release)
    return changed


def wait_complete(apps: list[str], limit_s: float) -> None:
    """Until all replicas of these applications are there and none of an earlier version is.

    Raises:
        ModelError: the new ones do not start, or not in time; those of the version before stay.
    """
    late_s = time.monotonic() + limit_s
    for app in apps:
        while not ray_serve.is_complete(app):
            if time.monotonic() > late_s:
                raise ModelError(f"{app}: not complete after {limit_s:g} s; `specdec cluster status` tells more")
            time.sleep(_POLL_S)


def _weights(keeper: Any, model: str) -> dict[str, int]:
    """By release, as percent.

    Raises:
        ConfigError: there is no such model.
    """
    models = ask(keeper, "status")
    if model not in models:
        raise ConfigError(f"no model {model!r} in the fleet; there are: {', '.join(models)}")
    weights = {name: release["weight"] for name, release in models[model].items()}
    whole = sum(weights.values())
    return {name: round(100 * weight / whole) for name, weight in weights.items()}


def _deployed(keeper: Any, model: str, release: str | None) -> Deployment:
    weights = _weights(keeper, model)
    release = release or max(weights, key=lambda name: weights[name])
    running: dict[str, Deployment] = answer(keeper.deployments.remote())
    for deployment in running.values():
        if (deployment.model, deployment.release) == (model, release):
            return deployment
    raise ConfigError(f"{model} has no release {release!r}; there are: {', '.join(running)}")


def _address_file(config: ClusterConfig) -> Path:
    return config.folder.expanduser() / "ray-address"


def _told_address(config: ClusterConfig) -> str:
    try:
        return _address_file(config).read_text()
    except OSError:
        raise RunsElsewhereError(
            f"no fleet runs here that {_address_file(config)} would tell of; start one with `specdec cluster serve`, "
            "or give --ray ADDRESS"
        ) from None
