"""What an operator does with a fleet: start it, change what it runs, end it. `specdec cluster` is the face of this."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from cluster import ray_serve
from cluster.config import ClusterConfig, fixed_changes
from cluster.deployment import LOOPBACK, Deployment, deployment_of
from cluster.envoy_process import EnvoyProcess
from cluster.fleet import Fleet
from cluster.listen import check_certificates
from cluster.ray_serve import NAMESPACE, RunsElsewhereError, answer, ask, deploy, find_keeper, remove, start_keeper
from cluster.state_folder import is_locked, locked, private_folder
from specdec.errors import ConfigError, ModelError, SpecdecError

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
    """A Ray on this machine's loopback address, for as long as the context lasts; where it is, the folder tells.

    Raises:
        RunsElsewhereError: it does not start.
    """
    place = _address_file(config)
    try:
        ray.init(
            address="local", _node_ip_address=LOOPBACK, object_store_memory=_OBJECT_STORE, runtime_env=_HOOK,
            **_SETTINGS,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError) as error:
        ray.shutdown()
        raise RunsElsewhereError(f"Ray does not start: {error}") from None
    try:
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
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RunsElsewhereError(f"no Ray answers at {address}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


async def serve_fleet(config: ClusterConfig, address: str | None, say: Say) -> None:
    """Run a fleet and its Envoy until SIGTERM or SIGINT; a second one ends at once. ``address``: that of a Ray of
    several machines; None: it is this machine's own, and ends with the fleet.

    Raises:
        ConfigError: a port or a file can not be had, or another fleet has the folder or that Ray.
        ModelError: a server does not start.
        EnvoyError: Envoy does not.
        RunsElsewhereError: no Ray answers at ``address``.
    """
    host = LOOPBACK if address is None else ""
    with locked(private_folder(config.folder)):
        check_certificates(config.listen)
        deployments = [
            deployment_of(config, model.name, release, host=host)
            for model in config.models
            for release in model.releases
        ]
        envoy = EnvoyProcess(config, Fleet.of(config), ray_serve.envoy_folder(config))
        await envoy.clear_the_way()
        stop = _Stop()
        stop.listen()
        # Before Envoy, which would be left: while Ray starts, SIGTERM is its own, and ends this process as it stands.
        with own_ray(config) if address is None else _joined(address):
            stop.listen()
            async with envoy:
                await _run(config, deployments, envoy, stop, say)


class _Stop:
    """``asked``: SIGTERM or SIGINT came, for an end in good order. ``hurried``: another came, for an end at once."""

    def __init__(self) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()

    def listen(self) -> None:
        """To these signals, and to a terminal that is closed, unless that is nothing to us (nohup)."""
        hangup = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else ()
        for number in (signal.SIGTERM, signal.SIGINT, *hangup):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


async def _run(
    config: ClusterConfig, deployments: Sequence[Deployment], envoy: EnvoyProcess, stop: _Stop, say: Say
) -> None:
    """On a Ray that is there, behind an Envoy that is."""
    await asyncio.to_thread(_end_left_behind, config, stop, say)
    if stop.asked.is_set():
        return
    watching: asyncio.Task[None] | None = None
    try:
        keeper = await asyncio.to_thread(_begin, config, deployments, say)
        watching = asyncio.create_task(_watch(keeper, say))
        if await _all_complete(deployments, stop, say):
            for line in _ready_lines(config):
                say(line)
            await stop.asked.wait()
            say("stopping: calls that run are finished first; a second signal ends at once")
            await _unless(stop.hurried, envoy.stop(await _drain_s(keeper, config)))
        else:
            say("stopping before the fleet was complete")
    finally:
        if watching is not None:
            watching.cancel()
        await asyncio.to_thread(_end, deployments, stop, say)


def _begin(config: ClusterConfig, deployments: Sequence[Deployment], say: Say) -> Any:
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    keeper = start_keeper(config)
    ask(keeper, "status")
    for deployment in deployments:
        replicas = deployment.replicas
        say(f"starting {deployment.app}: {replicas.min} to {replicas.max} replicas")
        deploy(keeper, deployment)
    return keeper


async def _all_complete(deployments: Sequence[Deployment], stop: _Stop, say: Say) -> bool:
    """Wait for all replicas; False: a signal came before. Says what keeps Ray from starting them. No look at them goes
    on when this returns: Ray would be started again for it."""
    said: dict[str, str] = {}
    for deployment in deployments:
        while not await asyncio.to_thread(ray_serve.is_complete, deployment.app):
            failing = await asyncio.to_thread(ray_serve.failures)
            for app, why in failing.items():
                if said.get(app) != why:
                    say(f"{app}: {why}")
            said = failing
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.asked.wait(), _POLL_S)
            if stop.asked.is_set():
                return False
    return True


async def _drain_s(keeper: Any, config: ClusterConfig) -> float:
    """What the file said of it when it was applied last, as long as there is a keeper to tell."""
    with contextlib.suppress(ray.exceptions.RayError):
        config = await keeper.config.remote()
    return config.drain_s


async def _unless(hurried: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work`` to its end, or until ``hurried``; raises what it raises."""
    tasks = [asyncio.create_task(work), asyncio.create_task(hurried.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    (result, _) = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(result, Exception):
        raise result


async def _watch(keeper: Any, say: Say) -> None:
    """Say what becomes of replicas."""
    seen, silent = dict[str, str](), False
    while True:
        try:
            models = await keeper.call.remote("status")
        except ray.exceptions.RayError as error:
            if not silent:
                say(f"the keeper does not answer: {error!r}")
            silent = True
        else:
            silent = False
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


def _end_left_behind(config: ClusterConfig, stop: _Stop, say: Say) -> None:
    """End the replicas of one that was killed, on a Ray that outlived it.

    Raises:
        ConfigError: a fleet runs there that may be alive.
    """
    try:
        keeper = find_keeper()
    except RunsElsewhereError:
        return
    here = ray.get_runtime_context().get_node_id()
    if not answer(keeper.is_left_behind.remote(config.folder.expanduser(), here)):
        folder = answer(keeper.config.remote()).folder
        raise ConfigError(
            f"another fleet runs on this Ray, of the folder {folder}; end it, or give this one its own Ray"
        )
    say("ending what an earlier `specdec cluster serve` left on this Ray")
    _end([], stop, say)


def _end(deployments: Sequence[Deployment], stop: _Stop, say: Say) -> None:
    """End the keeper and its replicas, ``deployments`` among them, however far they have come. Serve stays: on a Ray of
    several machines it may run what is not ours."""
    try:
        keeper = find_keeper()
    except RunsElsewhereError:
        return
    try:
        known = {deployment.app: deployment for deployment in deployments} | answer(keeper.deployments.remote())
        remove(keeper, list(known.values()), stop.hurried.is_set)
    except (SpecdecError, ray.exceptions.RayError, RayServeException) as error:
        say(f"replicas may be left: {error}")
    ray.kill(keeper)


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
    if not others:
        raise ConfigError(f"{model} has no release but {release}, which has all sessions")
    giver = max(others, key=lambda name: others[name])
    left = 100 - percent - sum(weight for name, weight in others.items() if name != giver)
    if left < 0:
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
        ConfigError: what can not change has, or a release that has sessions is not in the file any more.
    """
    running: dict[str, Deployment] = answer(keeper.deployments.remote())
    if not running:
        raise ConfigError("the fleet is still being started; wait until `specdec cluster serve` says that it is ready")
    if fixed := fixed_changes(answer(keeper.config.remote()), config):
        raise ConfigError(
            f"{', '.join(fixed)}: can not change while the fleet runs, since Envoy listens by it from its start on; "
            "put it back, or start the fleet anew"
        )
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
        remove(keeper, [deployment])
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
    with contextlib.suppress(OSError):
        told = _address_file(config).read_text()
        if is_locked(config.folder.expanduser()):  # what a killed one told leads nowhere, and Ray tries it for minutes
            return told
    raise RunsElsewhereError(
        f"no fleet runs here in the folder {config.folder}; start one with `specdec cluster serve`, "
        "or give --ray ADDRESS"
    )
