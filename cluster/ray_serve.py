"""Ray Serve as the control plane: an application per release whose replicas each watch over one server.

No call of a client comes through Ray. It places replicas on machines, starts them again, replaces them one by one and
decides how many there are; the servers are reached at ports of their own.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.autoscale import ReplicaLoad, ServePolicy
from cluster.config import ClusterConfig, load_cluster_config
from cluster.deployment import Deployment, deployment_of
from cluster.envoy_process import EnvoyError, EnvoyProcess
from cluster.fleet import Fleet, Replica, ReplicaState
from cluster.fleet_state import FleetState
from cluster.reconciler import Order, Reconciler, ready
from cluster.replica_process import ReplicaProcess
from cluster.state_folder import private_folder
from specdec.errors import ConfigError, ModelError, SpecdecError

_LOG = logging.getLogger("ray.serve")
NAMESPACE = "specdec"
KEEPER = "keeper"
HEAD = "node:__internal_head__"  # what Ray calls a resource that its head alone has
SETTLE_S = 0.5  # Envoy takes over a file some milliseconds after it was renamed
_ROUTABLE_S = 20.0
_POLL_S = 0.05
_MARGIN_S = 20.0  # beyond the drain, before Ray kills a replica that ends
_ENDED_S = 60.0  # beyond the drain, for Ray to notice that a replica has
_SURGE_PERCENT = 25  # of the replicas, and at least one, are started before as many of the old ones end
_START_TRIES = 3


class RunsElsewhereError(SpecdecError):
    """Ray or the fleet can not be reached."""


class ReconcilerActor:
    """The fleet's keeper, on the machine that Envoy runs on, whose files it writes; Envoy itself is somebody else's
    child, and outlives it. ``of_serve``: `specdec cluster serve` started it, and should end it."""

    def __init__(self, config: ClusterConfig, of_serve: bool) -> None:
        self._of_serve = of_serve
        self._state = private_folder(config.folder) / "fleet.json"
        known = FleetState(config=config, deployments={}, fleet=Fleet.of(config))
        if ray.get_runtime_context().was_current_actor_reconstructed:
            try:
                known = FleetState.load(self._state)
            except ConfigError as error:
                _LOG.error("%s; the fleet is what its replicas say", error)
        self._config, self._deployments = known.config, known.deployments
        self._envoy = EnvoyProcess(self._config, known.fleet, envoy_folder(config))
        self._keeper = Reconciler(known.fleet, self._write, interval_s=known.config.health.interval_s)

    async def call(self, method: str, *words: Any) -> Any:
        """A method of the `Reconciler`, from its event loop."""
        self._keeper.drop_silent()
        return getattr(self._keeper, method)(*words)

    async def is_left_behind(self, folder: Path, node: str) -> bool:
        """Whether the `specdec cluster serve` that started it had this folder on this node of Ray, for one that has the
        folder's lock now."""
        here = ray.get_runtime_context().get_node_id()
        return self._of_serve and (self._config.folder.expanduser(), here) == (folder, node)

    async def config(self) -> ClusterConfig:
        """What the file said when it was applied last."""
        return self._config

    async def configure(self, config: ClusterConfig) -> None:
        """The file was changed: how calls are spread, and which releases there are."""
        self._config = config
        self._keeper.allow_interval(config.health.interval_s)
        for model in config.models:
            for release in model.releases:
                self._keeper.open_release(model.name, release)
        self._envoy = EnvoyProcess(config, self._keeper.fleet, envoy_folder(config))
        self._save()

    async def wait_routable(self, replica: Replica) -> None:
        """Wait until Envoy sends calls to ``replica``: what it replaces stays until then."""
        try:
            await self._envoy.wait_routable([(replica.host, replica.http_port)], _ROUTABLE_S)
        except (EnvoyError, OSError) as error:
            _LOG.warning("%s serves, and yet: %s", replica.id, error)

    async def deployed(self, deployment: Deployment) -> None:
        """Remember what runs of a release."""
        self._deployments[deployment.app] = deployment
        self._save()

    async def removed(self, deployment: Deployment) -> None:
        """Nothing runs of a release any more."""
        self._deployments.pop(deployment.app, None)
        self._save()

    async def deployments(self) -> dict[str, Deployment]:
        """What runs, by the names of Serve's applications."""
        return dict(self._deployments)

    def _write(self, fleet: Fleet) -> None:
        self._envoy.update(fleet)
        self._save(fleet)

    def _save(self, fleet: Fleet | None = None) -> None:
        fleet = fleet or self._keeper.fleet
        FleetState(config=self._config, deployments=self._deployments, fleet=fleet).save(self._state)


class ServerReplica:
    """What Ray Serve runs as a replica: it starts a server, tells the keeper how that is, and ends it in good order.

    Raises from its constructor, so that Serve counts the deployment as failed and keeps the replicas of the version
    before: the server does not start, or its numeric fingerprint is not that of its pool.
    """

    async def __init__(self, deployment: Deployment) -> None:  # type: ignore[misc]
        self._deployment = deployment
        self._keeper = ray.get_actor(KEEPER, namespace=NAMESPACE)
        self._load: ReplicaLoad | None = None
        self._ended = ""  # why it serves nothing any more
        host = deployment.host or ray.util.get_node_ip_address()
        self._replica: Replica = await self._ask("join", deployment.model, deployment.release, host)
        self._beats: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        try:
            self._process = ReplicaProcess(
                self._replica.id,
                deployment.settings,
                host=host,
                folder=deployment.folder,
                python=deployment.python,
                drain_s=deployment.drain_s,
                key=deployment.key,
            )
            self._beats = asyncio.create_task(self._beat_forever())
            await self._wait_ready()
        except BaseException:
            await self._end()
            raise

    async def __call__(self) -> str:
        """Serve wants something to call; nobody does."""
        return self._replica.id

    def check_health(self) -> None:
        """Serve's hook. Raises where it is to be replaced: its server is dead, or was drained."""
        if self._ended:
            raise ModelError(f"{self._replica.id}: {self._ended}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what `ServePolicy` reads."""
        load = self._load
        return {} if load is None else {"waiting": load.waiting, "wait_s": load.wait_s, "busy": load.busy}

    async def __del__(self) -> None:
        """Serve's hook for an end in good order: no more calls, then those that run, then the server."""
        await self._drain()

    async def _wait_ready(self) -> None:
        process = self._process
        while not await process.is_ready():
            if not process.alive:
                raise ModelError(process.explained())
            await asyncio.sleep(_POLL_S)
        fingerprint, self._load = await process.told()
        self._replica = ready(self._replica, process.http_port, process.grpc_port, fingerprint)
        if misfit := (await self._beat()).misfit:
            raise ModelError(f"{self._replica.id} is refused: {misfit}; let it be a release of its own")
        await self._keeper.wait_routable.remote(self._replica)

    async def _beat_forever(self) -> None:
        """While it drains too: who says nothing for so long as a stream may take loses its place."""
        while self._process.alive:
            await asyncio.sleep(self._deployment.interval_s)
            self._process.bound_log()
            try:
                order = await self._beat()
            except ray.exceptions.RayError as error:
                _LOG.warning("%s: the keeper does not answer: %r", self._replica.id, error)
                continue
            if order.drain:
                self._begin_drain()
        if not self._ended:
            self._ended = self._process.explained()
            await self._tell("leave")

    async def _beat(self) -> Order:
        if self._replica.fingerprint and self._draining is None:
            try:
                _, self._load = await self._process.told()
            except ModelError as error:  # too busy to say, or dying: either is seen elsewhere
                _LOG.warning("%s: %s", self._replica.id, error)
        order: Order = await self._ask("beat", self._replica, self._load)
        return order

    async def _drain(self) -> None:
        """Returns when its calls are done, whoever began it: Serve, which replaces what is drained already, kills a
        replica once this has returned."""
        if (draining := self._begin_drain()) is not None:
            await asyncio.shield(draining)

    def _begin_drain(self) -> asyncio.Task[None] | None:
        if self._draining is None and not self._ended:
            self._ended = "it was drained"
            self._draining = asyncio.create_task(self._finish_calls())
        return self._draining

    async def _finish_calls(self) -> None:
        self._replica = replace(self._replica, state=ReplicaState.DRAINING)
        await self._tell("retire")
        await asyncio.sleep(SETTLE_S)
        self._process.begin_stop()
        await self._process.stopped(asyncio.sleep)
        await self._end()

    async def _end(self) -> None:
        """Its place is free again; a server that is there still is killed with this process."""
        if self._beats is not None:
            self._beats.cancel()
        await self._tell("leave")

    async def _tell(self, method: str) -> None:
        """A keeper that does not answer is no reason to cut calls; it forgets those who are silent."""
        try:
            await self._ask(method, self._replica)
        except ray.exceptions.RayError as error:
            _LOG.warning("%s: the keeper does not answer: %r", self._replica.id, error)

    async def _ask(self, method: str, *words: Any) -> Any:
        return await self._keeper.call.remote(method, *words)


def envoy_folder(config: ClusterConfig) -> Path:
    """Where Envoy's files are."""
    return config.folder.expanduser() / "envoy"


def start_keeper(config: ClusterConfig) -> Any:
    """The keeper's handle; it runs on this machine."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _keeper_actor(config, of_serve=True, scheduling_strategy=here)


def _keeper_actor(config: ClusterConfig, *, of_serve: bool, **placed: Any) -> Any:
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)(ReconcilerActor)
    return actor.options(name=KEEPER, namespace=NAMESPACE, lifetime="detached", **placed).remote(config, of_serve)


def find_keeper() -> Any:
    """The handle of the fleet's keeper.

    Raises:
        RunsElsewhereError: there is none.
    """
    try:
        return ray.get_actor(KEEPER, namespace=NAMESPACE)
    except ValueError:
        raise RunsElsewhereError("no fleet runs on this Ray; start one with `specdec cluster serve`") from None


def ask(keeper: Any, method: str, *words: Any) -> Any:
    """A method of the `Reconciler`, from outside of Ray.

    Raises:
        ConfigError: as that method does.
        RunsElsewhereError: the keeper is gone.
    """
    return answer(keeper.call.remote(method, *words))


def answer(reference: Any) -> Any:
    """What an actor's method returned, or raised."""
    try:
        return ray.get(reference, timeout=60)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, SpecdecError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise RunsElsewhereError(f"the fleet's keeper does not answer: {error!r}") from None


def deploy(keeper: Any, deployment: Deployment) -> None:
    """Start a release, or bring it to what ``deployment`` says: where its version is another, new replicas come before
    old ones go. Does not wait for them."""
    target = serve.RunTarget(_application(deployment), name=deployment.app, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    answer(keeper.deployed.remote(deployment))


def application(args: Mapping[str, str]) -> Any:
    """What the configuration of a Ray Serve that others run names as ``import_path``, as a RayService does: one release
    of a cluster.yaml, which lies at ``file`` on every machine. The keeper runs on Ray's head, and Envoy has to as well.

    args: ``file``, ``model`` and ``release``.

    Raises:
        ConfigError: the file can not be used, or there is no such model or release.
    """
    config = load_cluster_config(Path(args["file"]))
    deployment = deployment_of(config, args["model"], args["release"], host="")
    keeper = _keeper_actor(config, of_serve=False, get_if_exists=True, resources={HEAD: 0.001})
    answer(keeper.deployed.remote(deployment))
    return _application(deployment)


def _application(deployment: Deployment) -> Any:
    with warnings.catch_warnings():
        # The interval of reports has its successor in an environment variable only.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = serve.deployment(ServerReplica).options(_internal=True, **_options(deployment))
    return found.bind(deployment)


def remove(keeper: Any, deployments: Sequence[Deployment], hurried: Callable[[], bool] = lambda: False) -> None:
    """End every replica of these releases, each once its calls are done, and wait for that, unless ``hurried``.

    Raises:
        ModelError: some are there still, long after they may have been.
    """
    for deployment in deployments:
        serve.delete(deployment.app, _blocking=False)  # Serve itself would wait for a minute, however long calls take
    apps = {deployment.app for deployment in deployments}
    late_s = time.monotonic() + _ENDED_S + max((deployment.drain_s for deployment in deployments), default=0)
    while (left := apps & serve.status().applications.keys()) and not hurried():
        if time.monotonic() > late_s:
            raise ModelError(f"{', '.join(sorted(left))}: replicas are there still, though their drain_s is over")
        time.sleep(_POLL_S)
    for deployment in deployments:
        answer(keeper.removed.remote(deployment))


def failures() -> dict[str, str]:
    """What Serve says of releases that are not as they should be, by application."""
    found = {}
    for name, app in serve.status().applications.items():
        for deployment in app.deployments.values():
            if deployment.status not in ("HEALTHY", "UPSCALING", "DOWNSCALING") and deployment.message:
                found[name] = f"{deployment.status.value}: {_cause(deployment.message)}"
    return found


def _cause(message: str) -> str:
    """What a server or a replica said itself, where Ray quotes it behind its own stack."""
    return re.split(r"^specdec\.errors\.\w+: ", message, flags=re.MULTILINE)[-1].strip()


def is_complete(app: str) -> bool:
    """Whether all replicas of an application are there, none of them of an earlier version. One that died meanwhile, or
    was drained, is replaced and waited for.

    Raises:
        ModelError: the new ones can not be started; those of the version before stay.
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


def _options(deployment: Deployment) -> dict[str, Any]:
    """A number that does not change is one with equal bounds: replicas that were started without autoscaling would
    never report their load to it."""
    rule = deployment.rule
    scaling = AutoscalingConfig(
        min_replicas=rule.low,
        max_replicas=rule.high,
        metrics_interval_s=rule.period_s / 5,
        look_back_period_s=rule.period_s,
        upscale_delay_s=0.0,  # the policy itself waits, and knows for what
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=ServePolicy, policy_kwargs=asdict(rule)),
    )
    return {
        "name": "server",
        "version": deployment.version,
        "ray_actor_options": _resources(deployment),
        "autoscaling_config": scaling,
        "health_check_period_s": deployment.interval_s,
        "graceful_shutdown_timeout_s": deployment.drain_s + _MARGIN_S,
        "max_surge_percent": _SURGE_PERCENT,
        "max_constructor_retry_count": _START_TRIES,
    }


def _resources(deployment: Deployment) -> dict[str, Any]:
    replicas = deployment.replicas
    memory = {"memory": replicas.memory_bytes} if replicas.memory_bytes else {}
    return {"num_cpus": replicas.cpus, "num_gpus": replicas.gpus, **memory}
