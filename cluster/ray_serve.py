"""Ray Serve as the control plane: one application per release, whose replicas each supervise one server.

Ray places replicas on machines, restarts them, replaces them one by one and decides how many there are. Clients' calls
do not pass through Ray; they reach the servers on their own ports.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.autoscale import ReplicaLoad, ServePolicy
from cluster.config import ClusterConfig, load_cluster_config
from cluster.deployment import LOOPBACK, Deployment, deployment_of
from cluster.envoy import EnvoyFiles, fleet_files, write_bootstrap
from cluster.envoy_process import EnvoyAdmin, EnvoyError
from cluster.fleet import Fleet, Replica, ReplicaState
from cluster.reconciler import BEAT_S, Order, Reconciler, ready
from cluster.replica_process import RefusedKeyError, ReplicaProcess, SilentServerError
from cluster.state_folder import FleetState, private_folder, replace_files
from cluster.supervisor import Supervisor
from specdec.errors import ConfigError, ModelError, SpecdecError

_LOG = logging.getLogger("ray.serve")
NAMESPACE = "specdec"
RECONCILER = "reconciler"
HEAD = "node:__internal_head__"  # Ray's name of a resource that only its head node has
SETTLE_S = 0.5  # Envoy reloads a file within milliseconds of its replacement
_ROUTABLE_S = 20.0  # for Envoy to find a new replica healthy
_POLL_S = 0.05
_MARGIN_S = 20.0  # after the drain time, before Ray kills a replica
_ENDED_S = 60.0  # after the drain time, for Ray to report that a replica ended
_SURGE_PERCENT = 25  # of the replicas, at least one: started before as many old ones stop
_START_TRIES = 3
_ANSWER_S = 60.0  # for an answer of the reconciler
_HANGS_AFTER = 20  # requests without an answer in a row: a minute


class FleetUnreachableError(SpecdecError):
    """Ray or the fleet cannot be reached."""


class ReconcilerActor:
    """The fleet's reconciler, on the machine of Envoy, whose files it writes. Envoy is not its child and outlives it.

    ``of_serve``: `specdec cluster serve` started it, and should stop it.
    """

    def __init__(self, config: ClusterConfig, of_serve: bool) -> None:
        self._of_serve = of_serve
        self._lost = ""  # why it does not continue from its state, if it does not
        self._file, self._envoy = private_folder(config.folder) / "fleet.json", EnvoyFiles(envoy_folder(config))
        state = FleetState(config=config, deployments={}, fleet=Fleet.of(config))
        if ray.get_runtime_context().was_current_actor_reconstructed:
            try:
                state = FleetState.load(self._file)
            except ConfigError as error:
                self._lost = f"{error}; the fleet is rebuilt from heartbeats: restart `specdec cluster serve`"
                _LOG.error("%s", self._lost)
        self._reconciler = Reconciler(state, self._write)
        write_bootstrap(state.config, self._envoy)

    async def call(self, method: str, *words: Any) -> Any:
        """Calls a method of the `Reconciler`."""
        self._reconciler.reconcile()
        return getattr(self._reconciler, method)(*words)

    async def is_left_behind(self, folder: Path, node: str) -> bool:
        """Whether it was started by a `specdec cluster serve` of this folder on this Ray node. The caller holds the
        folder's lock, so that one is dead."""
        here = ray.get_runtime_context().get_node_id()
        return self._of_serve and (self._reconciler.state.config.folder, here) == (folder, node)

    async def state(self) -> FleetState:
        """The configuration that was applied last, the recorded deployments and the fleet."""
        return self._reconciler.state

    async def wait_routable(self, replica: Replica) -> None:
        """Waits until Envoy sends calls to ``replica``, so that the replica which it replaces can stop."""
        try:
            await EnvoyAdmin(self._envoy).wait_routable(replica.host, replica.http_port, _ROUTABLE_S)
        except (EnvoyError, OSError) as error:
            _LOG.warning("%s is ready, but gets no calls: %s", replica.id, error)

    async def error(self) -> str:
        """Why the files differ from the fleet, or the fleet from what operators made of it; empty: neither does."""
        return self._reconciler.write_error or self._lost

    def _write(self, state: FleetState) -> None:
        """Publishes ``state`` to Envoy, and saves it for a restart."""
        replace_files({**fleet_files(state.config, state.fleet, self._envoy), self._file: state.encoded()})


class ServerReplica:
    """A replica of Ray Serve: starts a server, sends its heartbeats to the reconciler, and stops it after a drain.

    The constructor raises if the server does not start, or if its numeric fingerprint is not that of its pool. Serve
    then fails the deployment and keeps the replicas of the version before.
    """

    async def __init__(self, deployment: Deployment) -> None:  # type: ignore[misc]
        _keep_calls_on_loopback()
        self._reconciler = ray.get_actor(RECONCILER, namespace=NAMESPACE)
        self._load: ReplicaLoad | None = None
        self._unanswered = 0  # requests to the server, in a row
        self._killed = ""  # why the server was killed, if it was
        self._ended = ""  # why it does not serve any more
        host = deployment.host or ray.util.get_node_ip_address()
        self._replica: Replica = await self._ask("join", deployment.model, deployment.release, host)
        self._heartbeat = Supervisor(f"heartbeat of {self._replica.id}", self._beat_forever)
        self._draining: asyncio.Task[None] | None = None
        try:
            self._process = ReplicaProcess(self._replica.id, deployment, host)
            self._heartbeat.start()
            await self._wait_ready()
        except BaseException:
            self._ended = "it did not start"  # Serve deletes it next: there is nothing to drain
            await self._leave()
            raise

    async def __call__(self) -> str:
        """Required by Serve; not called."""
        return self._replica.id

    def check_health(self) -> None:
        """Serve's hook. Raises if the replica has to be replaced: its server died or was drained."""
        if self._ended:
            raise ModelError(f"{self._replica.id}: {self._ended}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: the figures for `ServePolicy`."""
        load = self._load
        return {} if load is None else {"waiting": load.waiting, "wait_s": load.wait_s, "busy": load.busy}

    async def __del__(self) -> None:
        """Serve's hook for a graceful stop. Serve kills the replica when this returns, so it waits for a drain that has
        already begun."""
        if (draining := self._begin_drain()) is not None:
            await asyncio.shield(draining)

    async def _wait_ready(self) -> None:
        process = self._process
        while not await process.is_ready():
            if not process.alive:
                raise ModelError(process.exit_reason())
            await asyncio.sleep(_POLL_S)
        fingerprint, self._load = await process.load()
        self._replica = ready(self._replica, process.http_port, process.grpc_port, fingerprint)
        if misfit := (await self._beat()).misfit:
            raise ModelError(f"{self._replica.id} is refused: {misfit}; it needs a release of its own")
        await self._reconciler.wait_routable.remote(self._replica)

    async def _beat_forever(self) -> None:
        """Sends heartbeats until the server exits, also while it drains: a stream may outlast `SILENT_PERIODS`."""
        while self._process.alive:
            await asyncio.sleep(BEAT_S)
            self._process.bound_log()
            try:
                order = await self._beat()
            except ray.exceptions.RayError as error:
                _LOG.warning("%s: the reconciler does not answer: %r", self._replica.id, error)
                continue
            if order.drain:
                self._begin_drain()
        if not self._ended:
            self._ended = self._killed + self._process.exit_reason()
            _LOG.error("%s: %s", self._replica.id, self._ended)
            await self._notify("leave")

    async def _beat(self) -> Order:
        if self._replica.fingerprint and self._draining is None:
            try:
                _, self._load = await self._process.load()
                self._unanswered = 0
            except SilentServerError as error:  # the last load stays
                _LOG.warning("%s: %s", self._replica.id, error)
                self._unanswered += 1
                if self._unanswered == _HANGS_AFTER:  # Envoy's health checks fail too, so it gets no calls
                    self._killed = f"its server did not answer {_HANGS_AFTER} requests in a row and was killed: "
                    self._process.kill()
            except ModelError as error:
                _LOG.warning("%s: %s", self._replica.id, error)
                self._unanswered = 0
                if isinstance(error, RefusedKeyError):  # the key may never be accepted again
                    self._load = None
        order: Order = await self._ask("beat", self._replica, self._load)
        return order

    def _begin_drain(self) -> asyncio.Task[None] | None:
        if self._draining is None and not self._ended:
            self._ended = "it was drained"
            self._draining = asyncio.create_task(self._drain())
        return self._draining

    async def _drain(self) -> None:
        self._replica = replace(self._replica, state=ReplicaState.DRAINING)
        await self._notify("beat", self._load)
        await asyncio.sleep(SETTLE_S)
        await self._process.stop()
        await self._leave()

    async def _leave(self) -> None:
        """Frees the replica's id. A server that still runs is killed with this process."""
        await self._heartbeat.stop()
        await self._notify("leave")

    async def _notify(self, method: str, *words: Any) -> None:
        """Calls the reconciler, but continues without its answer: it drops silent replicas itself."""
        try:
            await self._ask(method, self._replica, *words)
        except ray.exceptions.RayError as error:
            _LOG.warning("%s: the reconciler does not answer: %r", self._replica.id, error)

    async def _ask(self, method: str, *words: Any) -> Any:
        return await self._reconciler.call.remote(method, *words)


def _keep_calls_on_loopback() -> None:
    """Serve opens a gRPC port for calls to this process, on all interfaces; no part of a fleet calls it."""
    from ray.serve._private import replica  # which is loaded only where a replica runs

    listen = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: listen(server, f"{LOOPBACK}:0")


def envoy_folder(config: ClusterConfig) -> Path:
    """The folder of Envoy's files."""
    return config.folder / "envoy"


def start_reconciler(config: ClusterConfig) -> Any:
    """Starts the reconciler on this machine; returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _reconciler_actor(config, of_serve=True, scheduling_strategy=here)


def _reconciler_actor(config: ClusterConfig, *, of_serve: bool, **placed: Any) -> Any:
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)(ReconcilerActor)
    return actor.options(name=RECONCILER, namespace=NAMESPACE, lifetime="detached", **placed).remote(config, of_serve)


def find_reconciler() -> Any:
    """Returns the handle of the fleet's reconciler.

    Raises:
        FleetUnreachableError: there is none.
    """
    try:
        return ray.get_actor(RECONCILER, namespace=NAMESPACE)
    except ValueError:
        raise FleetUnreachableError("no fleet runs on this Ray; start one with `specdec cluster serve`") from None


def ask(reconciler: Any, method: str, *words: Any) -> Any:
    """Calls a method of the `Reconciler` from outside of Ray.

    Raises:
        ConfigError: as the method does.
        FleetUnreachableError: the reconciler does not answer.
    """
    return answer(reconciler.call.remote(method, *words))


def answer(reference: Any) -> Any:
    """The result of an actor's method; raises what it raised."""
    try:
        return ray.get(reference, timeout=_ANSWER_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SpecdecError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise FleetUnreachableError(f"the fleet's reconciler does not answer: {error!r}") from None


def deploy(reconciler: Any, deployment: Deployment) -> None:
    """Starts or updates a release; does not wait for its replicas. If the version differs, new replicas start before
    old ones stop."""
    ask(reconciler, "deployed", deployment)  # first: it may fail, and then nothing changed
    target = serve.RunTarget(_application(deployment), name=deployment.app, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def application(args: Mapping[str, str]) -> Any:
    """The ``import_path`` for a Ray Serve configuration, such as a RayService: one release of the cluster.yaml at
    ``file``, which every machine has. The reconciler runs on Ray's head node, where Envoy has to run as well.

    args: ``file``, ``model`` and ``release``.

    Raises:
        ConfigError: the file is invalid, or there is no such model or release.
    """
    config = load_cluster_config(Path(args["file"]))
    deployment = deployment_of(config, args["model"], args["release"], host="")
    reconciler = _reconciler_actor(config, of_serve=False, get_if_exists=True, resources={HEAD: 0.001})
    ask(reconciler, "configure", config)  # the file may have another release than at the first call
    ask(reconciler, "deployed", deployment)
    return _application(deployment)


def _application(deployment: Deployment) -> Any:
    with warnings.catch_warnings():
        # Ray replaced the option for the reporting interval by an environment variable.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = serve.deployment(ServerReplica).options(_internal=True, **_options(deployment))
    return found.bind(deployment)


def remove(deployments: Sequence[Deployment], hurried: Callable[[], bool] = lambda: False) -> None:
    """Stops all replicas of ``deployments`` after their drain, and waits for that, unless ``hurried``.

    Raises:
        ModelError: some still run long after their drain time.
    """
    for deployment in deployments:
        serve.delete(deployment.app, _blocking=False)  # the blocking form gives up after a minute
    apps = {deployment.app for deployment in deployments}
    late_s = time.monotonic() + _ENDED_S + max((deployment.drain_s for deployment in deployments), default=0)
    while (left := apps & serve.status().applications.keys()) and not hurried():
        if time.monotonic() > late_s:
            raise ModelError(f"{', '.join(sorted(left))}: replicas still run after their drain_s")
        time.sleep(_POLL_S)


def failures() -> dict[str, str]:
    """Serve's messages about unhealthy releases, by application."""
    found = {}
    for name, app in serve.status().applications.items():
        for deployment in app.deployments.values():
            if deployment.status not in ("HEALTHY", "UPSCALING", "DOWNSCALING") and deployment.message:
                found[name] = f"{deployment.status.value}: {_cause(deployment.message)}"
    return found


def _cause(message: str) -> str:
    """The message of the server or replica, without Ray's stack trace before it. Ray's own about slow starts name its
    methods and commands, so they are said in the fleet's words."""
    if slow := re.search(r" has (\d+) replicas\s+that have taken more than .* to be scheduled.*: (\{.*?\}),", message):
        return (
            f"no machine has room yet for {slow[1]} of the replicas, which reserve {slow[2]} each: scale others down, "
            "or reserve less under `replicas` in cluster.yaml"
        )
    if slow := re.search(r" has (\d+) replicas\s+that have taken more than .* to initialize", message):
        return f"{slow[1]} of the replicas are still loading"
    return re.split(r"^(?:specdec\.errors|cluster\.\w+)\.\w+: ", message, flags=re.MULTILINE)[-1].strip()


def is_complete(app: str) -> bool:
    """Whether all replicas of an application run, all of the present version. Replicas that died or were drained
    meanwhile are being replaced.

    Raises:
        ModelError: the new replicas cannot be started; those of the version before stay.
    """
    status = serve.status().applications.get(app)
    if status is None:
        return False
    if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        failed = [each for each in status.deployments.values() if each.status in ("DEPLOY_FAILED", "UNHEALTHY")]
        if not failed or any(each.status_trigger != "HEALTH_CHECK_FAILED" for each in failed):
            messages = [each.message for each in failed if each.message] or [status.message]
            raise ModelError(f"{app}: {_cause(messages[0])}")
    return bool(status.status == "RUNNING")


def has_failed(app: str) -> bool:
    """Whether Serve gave up starting the present version of an application."""
    try:
        is_complete(app)
    except ModelError:
        return True
    return False


def _options(deployment: Deployment) -> dict[str, Any]:
    """A fixed number of replicas has equal bounds: without autoscaling, replicas would not report their load, and could
    not be autoscaled later."""
    replicas, rule = deployment.replicas, deployment.autoscaling
    policy = {"low": replicas.min, "high": replicas.max, **rule.model_dump()}  # a `ScalingRule`
    scaling = AutoscalingConfig(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        metrics_interval_s=rule.period_s / 5,
        look_back_period_s=rule.period_s,
        upscale_delay_s=0.0,  # the policy does the waiting
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=ServePolicy, policy_kwargs=policy),
    )
    return {
        "name": "server",
        "version": deployment.version,
        "ray_actor_options": _resources(deployment),
        "autoscaling_config": scaling,
        "health_check_period_s": BEAT_S,
        "graceful_shutdown_timeout_s": deployment.drain_s + _MARGIN_S,
        "max_surge_percent": _SURGE_PERCENT,
        "max_constructor_retry_count": _START_TRIES,
    }


def _resources(deployment: Deployment) -> dict[str, Any]:
    replicas = deployment.replicas
    memory = {"memory": replicas.memory_bytes} if replicas.memory_bytes else {}
    return {"num_cpus": replicas.cpus or 1.0, "num_gpus": replicas.gpus, **memory}
