"""The operations of `specdec cluster`: start a fleet, change it, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from cluster import ray_serve
from cluster.config import ClusterConfig, authority
from cluster.deployment import LOOPBACK, Deployment, deployment_of
from cluster.envoy_process import EnvoyProcess, check_certificates
from cluster.fleet import Fleet
from cluster.ray_serve import (
    NAMESPACE,
    FleetUnreachableError,
    answer,
    ask,
    deploy,
    find_reconciler,
    remove,
    start_reconciler,
)
from cluster.state_folder import FleetState, is_locked, locked, private_folder
from cluster.supervisor import Supervisor
from specdec.errors import ConfigError, ModelError, SpecdecError

Report = Callable[[str], None]
logging.getLogger("ray.serve").setLevel(logging.WARNING)
_POLL_S = 0.25
_OBJECT_STORE = 80 << 20  # bytes; Ray's minimum, since the fleet does not use it
# Servers are started by fork and exec. Between the two, gRPC's handlers of fork may abort the child.
_WORKERS = {
    "worker_process_setup_hook": "specdec.put_own_modules_first", "env_vars": {"GRPC_ENABLE_FORK_SUPPORT": "0"},
}  # fmt: skip
_SETTINGS = {
    "namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False, "logging_level": "ERROR",
}  # fmt: skip


@contextlib.contextmanager
def own_ray(config: ClusterConfig) -> Iterator[None]:
    """Runs a Ray on the loopback address, and writes its address to the fleet's folder.

    Raises:
        FleetUnreachableError: it does not start.
    """
    address_file = _address_file(config)
    address_file.unlink(missing_ok=True)  # of a `serve` that was killed
    with _joined("Ray does not start", address="local", object_store_memory=_OBJECT_STORE, include_dashboard=False):
        try:
            address_file.write_text(ray.get_runtime_context().gcs_address)
            yield
        finally:
            address_file.unlink(missing_ok=True)


@contextlib.contextmanager
def attached(config: ClusterConfig, address: str | None = None) -> Iterator[Any]:
    """Connects to the Ray at ``address``, default the one of the fleet's folder; yields the fleet's reconciler.

    Raises:
        FleetUnreachableError: there is none.
    """
    with _joined_own(config) if address is None else _ray_at(address):
        yield find_reconciler()


def _joined_own(config: ClusterConfig) -> contextlib.AbstractContextManager[None]:
    with contextlib.suppress(OSError):
        address = _address_file(config).read_text()
        if is_locked(config.folder):  # else `serve` was killed, and Ray would try the address for minutes
            return _joined(f"no Ray answers at {address}", address=address)
    raise FleetUnreachableError(
        f"no fleet runs here in the folder {config.folder}; start one with `specdec cluster serve`, "
        "or give --ray ADDRESS"
    )


def _ray_at(address: str) -> contextlib.AbstractContextManager[None]:
    return _joined(f"no Ray answers at {address} (one with a token needs RAY_AUTH_MODE=token here)", address=address)


@contextlib.contextmanager
def _joined(refusal: str, **options: Any) -> Iterator[None]:
    try:
        ray.init(runtime_env=_WORKERS, **_SETTINGS, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise FleetUnreachableError(f"{refusal}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


async def serve_fleet(config: ClusterConfig, address: str | None, report: Report) -> None:
    """Runs a fleet and its Envoy until SIGTERM or SIGINT; a second signal stops at once.

    ``address``: of a Ray of several machines; None: starts a Ray on this machine, which stops with the fleet.

    Raises:
        ConfigError: a port or a file is not available, or another fleet uses the folder or that Ray.
        ModelError: a server does not start.
        EnvoyError: Envoy does not start.
        FleetUnreachableError: no Ray answers at ``address``.
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
        await envoy.prepare()
        stop = _Stop()
        stop.listen()
        # Before Envoy starts: Ray exits on SIGTERM while it starts, and would leave an Envoy behind.
        with contextlib.ExitStack() as ray_runs:
            try:
                ray_runs.enter_context(own_ray(config) if address is None else _ray_at(address))
            except SystemExit:
                return
            stop.listen()
            async with envoy:
                await _run(config, deployments, envoy, stop, report)


class _Stop:
    """``asked``: a signal asked for a graceful stop. ``hurried``: a second one asked for an immediate stop."""

    def __init__(self) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()

    def listen(self) -> None:
        """Handles SIGTERM, SIGINT, and SIGHUP unless it is ignored (nohup)."""
        hangup = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else ()
        for number in (signal.SIGTERM, signal.SIGINT, *hangup):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


async def _run(
    config: ClusterConfig, deployments: Sequence[Deployment], envoy: EnvoyProcess, stop: _Stop, report: Report
) -> None:
    """With Ray and Envoy running."""
    await asyncio.to_thread(_end_left_behind, config, stop, report)
    if stop.asked.is_set():
        return
    try:
        reconciler = await asyncio.to_thread(_begin, config, deployments, report)
        watcher = Supervisor("watcher of replicas", functools.partial(_watch, reconciler, report))
        watcher.start()
        try:
            if await asyncio.to_thread(_all_complete, deployments, stop, report):
                for line in _ready_lines(config):
                    report(line)
                await stop.asked.wait()
                report("stopping: running calls are finished first; a second signal stops at once")
                await envoy.stop(await _drain_s(reconciler, config), stop.hurried.is_set)
            else:
                report("stopping before the fleet was complete")
        finally:
            await watcher.stop()
    finally:
        await asyncio.to_thread(_end, deployments, stop, report)


def _begin(config: ClusterConfig, deployments: Sequence[Deployment], report: Report) -> Any:
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    reconciler = start_reconciler(config)
    ask(reconciler, "status")
    for deployment in deployments:
        replicas = deployment.replicas
        report(f"starting {deployment.app}: {replicas.min} to {replicas.max} replicas")
        deploy(reconciler, deployment)
    return reconciler


def _all_complete(deployments: Sequence[Deployment], stop: _Stop, report: Report) -> bool:
    """Waits for all replicas; False: a signal came first. Reports what keeps Ray from starting them. No call of Serve
    is pending when this returns, since it would start Ray again."""
    reported: dict[str, str] = {}
    for deployment in deployments:
        while not ray_serve.is_complete(deployment.app):
            reported = _report_failures(reported, report)
            time.sleep(_POLL_S)
            if stop.asked.is_set():
                return False
    return True


def _report_failures(reported: dict[str, str], report: Report) -> dict[str, str]:
    """Reports those of Serve's messages that differ from ``reported``; returns all."""
    failing = ray_serve.failures()
    for app, why in failing.items():
        if reported.get(app) != why:
            report(f"{app}: {why}")
    return failing


async def _drain_s(reconciler: Any, config: ClusterConfig) -> float:
    """The drain time that was applied last; of ``config`` if the reconciler does not answer."""
    with contextlib.suppress(ray.exceptions.RayError):
        config = (await reconciler.state.remote()).config
    return config.drain_s


async def _watch(reconciler: Any, report: Report) -> None:
    """Reports the replicas' changes of state."""
    seen, silent = dict[str, str](), False
    while True:
        try:
            models = await reconciler.call.remote("status")
        except ray.exceptions.RayError as error:
            if not silent:
                report(f"the reconciler does not answer: {error!r}")
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
                    report(f"{name}: {state}")
            seen = states
        await asyncio.sleep(_POLL_S)


def _end_left_behind(config: ClusterConfig, stop: _Stop, report: Report) -> None:
    """Stops the replicas of a `specdec cluster serve` that was killed, on a Ray that outlived it.

    Raises:
        ConfigError: a fleet runs there that may be alive.
    """
    try:
        reconciler = find_reconciler()
    except FleetUnreachableError:
        return
    here = ray.get_runtime_context().get_node_id()
    if not answer(reconciler.is_left_behind.remote(config.folder, here)):
        folder = answer(reconciler.state.remote()).config.folder
        raise ConfigError(
            f"another fleet runs on this Ray, of the folder {folder}; stop it, or give this one its own Ray"
        )
    report("stopping what an earlier `specdec cluster serve` left on this Ray")
    _end([], stop, report)


def _end(deployments: Sequence[Deployment], stop: _Stop, report: Report) -> None:
    """Stops the reconciler and all replicas, those of ``deployments`` included. Serve stays: on a Ray of several
    machines it may run other applications."""
    try:
        reconciler = find_reconciler()
    except FleetUnreachableError:
        return
    try:
        recorded = answer(reconciler.state.remote()).deployments
        known = {deployment.app: deployment for deployment in deployments} | recorded
        remove(list(known.values()), stop.hurried.is_set)
    except (SpecdecError, ray.exceptions.RayError, RayServeException) as error:
        report(f"some replicas may still run: {error}")
    ray.kill(reconciler)


def _ready_lines(config: ClusterConfig) -> Iterator[str]:
    scheme = "https" if config.listen.tls_cert else "http"
    for model in config.models:
        yield f"ready: {model.name}"
        if model.grpc_port is not None:
            yield f"  gRPC  {authority(config.listen.host, model.grpc_port)}"
        if model.http_port is not None:
            yield f"  HTTP  {scheme}://{authority(config.listen.host, model.http_port)}"


def status(reconciler: Any) -> dict[str, Any]:
    """The fleet's models, releases and replicas, and Ray's messages about releases that fail."""
    failures = ray_serve.failures()
    if error := answer(reconciler.error.remote()):
        failures["reconciler"] = error
    return {"models": ask(reconciler, "status"), "failures": failures}


def scale(reconciler: Any, model: str, release: str | None, low: int, high: int) -> None:
    """Sets the bounds for the number of replicas of a release, default the live one. No replica is replaced.

    Raises:
        ConfigError: there is no such release, or the bounds are invalid.
    """
    deploy(reconciler, _deployed(reconciler, model, release).scaled(low, high))


class Rollout(NamedTuple):
    """A deployment that was begun. ``former``: the deployment that it replaces; None: the release is new."""

    deployment: Deployment
    former: Deployment | None


def restart(reconciler: Any, model: str, release: str | None) -> Rollout:
    """Begins to replace every replica of a release, one by one; default the live release.

    Raises:
        ConfigError: there is no such release.
    """
    former = _deployed(reconciler, model, release)
    found = former.restarted()
    deploy(reconciler, found)
    return Rollout(found, former)


def change(reconciler: Any, transition: Callable[..., Fleet], *arguments: Any) -> None:
    """Applies a function of `cluster.fleet`: `draining` to replace a replica; `with_share`, `switched`, `rolled_back`.

    Raises:
        ConfigError: the function refuses it.
        FleetWriteError: the fleet's files cannot be written; nothing changed.
    """
    ask(reconciler, "apply", transition, *arguments)


def apply(reconciler: Any, config: ClusterConfig, report: Report) -> list[Rollout]:
    """Begins to apply a changed cluster.yaml; returns what `wait_complete` waits for: all releases of the file, also
    those that did not change, since an earlier command may have ended before they were complete. The weights of
    releases stay; `change` changes them. A release whose replicas could not be started is started again.

    Raises:
        ConfigError: a field changed that a running fleet cannot adopt, or the file lacks a release with sessions.
    """
    state = _running(reconciler)
    running = state.deployments
    host = next(iter(running.values())).host
    wanted = [deployment_of(config, model.name, name, host=host) for model in config.models for name in model.releases]
    named = {model.name for model in config.models}  # `configure` refuses a file without a model that runs
    over = [each for each in running.values() if each.model in named and each.app not in {one.app for one in wanted}]
    for deployment in over:
        if state.fleet.release(deployment.model, deployment.release).weight:
            raise ConfigError(f"{deployment.app} still has sessions; give them to another release first")
    ask(reconciler, "configure", config)
    rollouts = []
    for deployment in wanted:
        former = running.get(deployment.app)
        if former is not None:
            deployment = deployment.model_copy(update={"restarts": former.restarts})
            if deployment == former and ray_serve.has_failed(deployment.app):
                deployment = deployment.restarted()  # Serve ignores a version that it has given up
        if deployment != former:
            verb = "starting" if former is None else "replacing" if former.version != deployment.version else "changing"
            report(f"{verb} {deployment.app}")
        deploy(reconciler, deployment)  # an equal one too: a command may have ended between its record and its start
        rollouts.append(Rollout(deployment, former))
    for deployment in over:
        report(f"stopping {deployment.app}")
        _remove_release(reconciler, deployment)
    return rollouts


def wait_complete(reconciler: Any, rollouts: Sequence[Rollout], limit_s: float, report: Report) -> None:
    """Waits until all replicas of ``rollouts`` run with the present version. Reports what keeps Ray from starting them.

    Raises:
        ModelError: new replicas cannot be started, so their release is as before; they do not start in time; or
            another command replaced them.
    """
    late_s = time.monotonic() + limit_s
    failed, reported = [], dict[str, str]()
    for rollout in rollouts:
        app = rollout.deployment.app
        try:
            while not (replaced := _is_replaced(reconciler, rollout)) and not ray_serve.is_complete(app):
                if time.monotonic() > late_s:
                    failed.append(f"{app}: not complete after {limit_s:g} s; see `specdec cluster status`")
                    break
                reported = _report_failures(reported, report)
                time.sleep(_POLL_S)
            if replaced:
                failed.append(f"{app}: another command changed it meanwhile; see `specdec cluster status`")
        except ModelError as error:
            failed.append(str(error))
            try:
                _undo(reconciler, rollout)
            except SpecdecError as problem:
                failed.append(f"{app}: the rollout is not undone: {problem}")
    if failed:
        raise ModelError("\n".join(failed))


def _is_replaced(reconciler: Any, rollout: Rollout) -> bool:
    """Whether another command replaced the release's replicas, or removed it."""
    present: Deployment | None = answer(reconciler.state.remote()).deployments.get(rollout.deployment.app)
    return present is None or present.version != rollout.deployment.version


def _undo(reconciler: Any, rollout: Rollout) -> None:
    """After a failed start Serve keeps the replicas of the version before, but replaces none that dies. So the release
    gets its former deployment; a new release is removed."""
    if rollout.former is None:
        _remove_release(reconciler, rollout.deployment)
    else:
        deploy(reconciler, rollout.former)


def _remove_release(reconciler: Any, deployment: Deployment) -> None:
    remove([deployment])
    ask(reconciler, "removed", deployment)


def _deployed(reconciler: Any, model: str, release: str | None) -> Deployment:
    """The deployment of a release, default the one with the most sessions.

    Raises:
        ConfigError: there is no such model or release.
    """
    state = _running(reconciler)
    weights = state.fleet.weights(model)
    release = release or max(weights, key=weights.__getitem__)
    found = {each.release: each for each in state.deployments.values() if each.model == model}
    if release not in found:
        raise ConfigError(f"{model} has no release {release!r}; there are: {', '.join(found)}")
    return found[release]


def _running(reconciler: Any) -> FleetState:
    """The state of a fleet that has started.

    Raises:
        ConfigError: no deployment is recorded.
    """
    found: FleetState = answer(reconciler.state.remote())
    if not found.deployments:
        raise ConfigError(
            "the fleet is still starting: wait until `specdec cluster serve` reports that it is ready. If it did, the "
            "reconciler lost fleet.json in the fleet's folder; then restart `specdec cluster serve`"
        )
    return found


def _address_file(config: ClusterConfig) -> Path:
    return config.folder / "ray-address"
