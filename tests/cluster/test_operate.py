"""A fleet starts, changes and stops cleanly, whatever happens meanwhile. Ray and Envoy are scripted."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from cluster import envoy_process
from cluster.config import ClusterConfig
from cluster.deployment import deployment_of
from cluster.fleet import with_share
from cluster.reconciler import ready
from cluster.replica_process import RefusedKeyError
from cluster.state_folder import locked, private_folder
from specdec.errors import ConfigError, ModelError, SpecdecError
from tests.cluster.envoy_fleet import free_port
from tests.cluster.scripted_envoy import program
from tests.cluster.scripted_ray import Handle, ScriptedRay, scripted_ray


class Fleet:
    """``serve`` runs it; ``on_say`` has callbacks for reported lines, by their beginning."""

    def __init__(self, ray: ScriptedRay, operate: Any, ray_serve: Any, folder: Path) -> None:
        self.ray, self.operate, self.ray_serve, self.folder = ray, operate, ray_serve, folder
        self.said, self.on_say = list[str](), dict[str, Callable[[], None]]()
        self.config = self.configured()

    def configured(self, **changed: Any) -> ClusterConfig:
        """A configuration of one model, with ``changed`` fields."""
        ports = getattr(self, "ports", None) or (free_port(), free_port())
        self.ports = ports
        model = {"name": "coder", "http_port": ports[0], "grpc_port": ports[1], **changed.pop("model", {})}
        data = {
            "models": [model],
            "listen": {"admin_port": 0},
            "folder": self.folder / "state",
            "drain_s": 0,
            **changed,
        }
        return ClusterConfig.model_validate(data)

    def say(self, line: str) -> None:
        """Records a line and runs its callbacks."""
        self.said.append(line)
        for begins, work in self.on_say.items():
            if line.startswith(begins):
                work()

    async def serve(self, address: str | None = None) -> None:
        """Runs until a signal arrives."""
        await self.operate.serve_fleet(self.config, address, self.say)

    @property
    def envoys(self) -> list[int]:
        """Envoy processes on this fleet's files."""
        bootstrap = str(self.folder / "state" / "envoy" / "bootstrap.json")
        return [each.pid for each in psutil.process_iter(["cmdline"]) if bootstrap in (each.info["cmdline"] or ())]

    def is_gone(self) -> bool:
        """Whether nothing of it is left."""
        return not (self.ray.apps or self.ray.actors or self.ray.running or self.envoys)


def interrupt() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet whose replicas are ready immediately."""
    monkeypatch.setattr(envoy_process, "find_envoy", lambda: program(tmp_path))
    with scripted_ray() as (ray, operate, ray_serve):
        yield Fleet(ray, operate, ray_serve, tmp_path)


async def test_it_serves_until_it_is_interrupted(fleet: Fleet) -> None:
    fleet.on_say["ready: coder"] = interrupt
    await fleet.serve()
    assert fleet.is_gone()
    assert fleet.ray.deleted == ["coder.blue"]
    assert any("second signal" in line for line in fleet.said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_an_interrupt_while_replicas_start_ends_everything(fleet: Fleet, number: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup, whose signal a fleet ignores")
    fleet.ray.starts = "DEPLOYING"
    fleet.on_say["starting coder.blue"] = lambda: os.kill(os.getpid(), number)
    await fleet.serve()
    assert fleet.is_gone()
    assert fleet.ray.deleted == ["coder.blue"]
    assert "stopping before the fleet was complete" in fleet.said


async def test_an_interrupt_while_ray_starts_starts_no_replica(fleet: Fleet) -> None:
    init = fleet.ray._init

    def interrupted(**options: Any) -> None:
        init(**options)
        assert not fleet.envoys
        interrupt()

    fleet.operate.ray.init = interrupted
    await fleet.serve()
    assert fleet.is_gone()
    assert fleet.said == []


async def test_a_signal_that_ray_takes_while_it_starts_ends_the_command(fleet: Fleet) -> None:
    """Until `ray.init` returns, Ray handles SIGTERM itself; a service manager would take its exit code for a fault."""

    def ended(**options: Any) -> None:
        raise SystemExit(signal.SIGTERM)

    fleet.operate.ray.init = ended
    await fleet.serve()
    assert not fleet.envoys
    assert fleet.is_gone()


async def test_an_interrupt_while_envoy_starts_starts_no_replica(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = envoy_process.EnvoyProcess._spawn

    async def spawned(envoy: Any) -> None:
        await spawn(envoy)
        interrupt()
        await asyncio.sleep(0.1)  # signals are taken by the loop

    monkeypatch.setattr(envoy_process.EnvoyProcess, "_spawn", spawned)
    await fleet.serve()
    assert fleet.is_gone()
    assert fleet.said == []


async def test_a_second_interrupt_exits_immediately(fleet: Fleet) -> None:
    fleet.config = fleet.configured(drain_s=3600)
    fleet.ray.ends = False
    fleet.on_say = {"ready: coder": interrupt, "stopping: running": interrupt}
    await fleet.serve()
    assert not fleet.envoys
    assert not fleet.ray.running


async def test_a_failed_start_ends_what_was_started(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.config = fleet.configured(model={"releases": {"blue": {}, "green": {"weight": 0}}})
    deploy = fleet.ray_serve.deploy

    def fails(reconciler: Any, deployment: Any) -> None:
        deploy(reconciler, deployment)
        if deployment.release == "green":
            raise ModelError("no room")

    monkeypatch.setattr(fleet.operate, "deploy", fails)
    with pytest.raises(ModelError, match="no room"):
        await fleet.serve("ray:6379")
    assert fleet.is_gone()
    assert fleet.ray.deleted == ["coder.blue", "coder.green"]


async def test_bug_grpc_aborted_servers_of_a_ray_of_several_machines_between_fork_and_exec(fleet: Fleet) -> None:
    """Two in a hundred starts ended by SIGALRM, where Ray's workers did not get the variable from `serve` itself."""
    fleet.on_say["ready: coder"] = interrupt
    await fleet.serve("ray:6379")
    workers = fleet.ray.options["runtime_env"]
    assert workers["env_vars"] == {"GRPC_ENABLE_FORK_SUPPORT": "0"}
    _, service, *_ = yaml.safe_load_all((Path(__file__).parents[2] / "deploy/k8s/rayservice.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["runtime_env"] == workers


async def test_the_cause_that_keeps_replicas_from_starting_is_reported_once(fleet: Fleet) -> None:
    fleet.ray.starts = "DEPLOYING"
    message = "resources required for each replica: 64 CPUs"
    looks: list[float] = []

    def status() -> SimpleNamespace:
        looks.append(time.monotonic())
        if len(looks) > 8:
            interrupt()
        return SimpleNamespace(applications={"coder.blue": fleet.ray.app("UPDATING", message=message)})

    fleet.operate.serve.status = status
    fleet.ray.ends = True
    fleet.on_say["stopping before"] = lambda: setattr(fleet.operate.serve, "status", fleet.ray._status)
    await fleet.serve()
    assert [line for line in fleet.said if "64 CPUs" in line] == [f"coder.blue: UPDATING: {message}"]


async def test_orphaned_replicas_on_a_shared_ray_are_ended_first(fleet: Fleet) -> None:
    fleet.ray.running = True
    reconciler = fleet.ray_serve.start_reconciler(fleet.config)
    fleet.ray_serve.deploy(
        reconciler, deployment_of(fleet.config, "coder", "blue").model_copy(update={"release": "old"})
    )
    fleet.on_say["ready: coder"] = interrupt
    await fleet.serve("ray:6379")
    assert fleet.ray.deleted == ["coder.old", "coder.blue"]
    assert fleet.is_gone()


async def test_another_fleet_on_the_same_ray_is_not_touched(fleet: Fleet) -> None:
    fleet.ray.running = True
    other = fleet.configured(folder=fleet.folder / "other")
    fleet.ray_serve.start_reconciler(other)
    with pytest.raises(ConfigError, match=rf"another fleet runs on this Ray, of the folder {other.folder}"):
        await fleet.serve("ray:6379")
    assert fleet.ray.actors
    assert not fleet.envoys


async def test_two_fleets_do_not_share_a_folder(fleet: Fleet) -> None:
    with (
        locked(private_folder(fleet.config.folder)),
        pytest.raises(ConfigError, match=rf"folder: {fleet.config.folder} is in use by another"),
    ):
        await fleet.serve()
    fleet.on_say["ready: coder"] = interrupt
    await fleet.serve()


async def test_a_port_in_use_or_a_missing_file_is_named_before_ray_is_started(fleet: Fleet) -> None:
    with (
        socket.create_server(("127.0.0.1", fleet.ports[0])),
        pytest.raises(ConfigError, match=rf"coder\.http_port: cannot listen on 127\.0\.0\.1:{fleet.ports[0]}"),
    ):
        await fleet.serve()
    fleet.config = fleet.configured(listen={"admin_port": 0, "tls_cert": "/none", "tls_key": "/none"})
    with pytest.raises(ConfigError, match=r"listen\.tls_cert: /none cannot be read"):
        await fleet.serve()
    fleet.config = fleet.configured(model={"key_file": "/none"})
    with pytest.raises(ConfigError, match=r"coder\.key_file: /none cannot be read"):
        await fleet.serve()
    assert fleet.said == []
    assert not fleet.envoys


def started(fleet: Fleet) -> Handle:
    """The reconciler of a running fleet."""
    fleet.ray.running = True
    reconciler: Handle = fleet.ray_serve.start_reconciler(fleet.config)
    fleet.ray_serve.deploy(reconciler, deployment_of(fleet.config, "coder", "blue"))
    return reconciler


def test_without_a_running_fleet_ray_is_not_searched(fleet: Fleet) -> None:
    for _ in range(2):
        with pytest.raises(fleet.operate.FleetUnreachableError, match="no fleet runs here in the folder"):
            fleet.operate.attached(fleet.config).__enter__()
        private_folder(fleet.config.folder).joinpath("ray-address").write_text("127.0.0.1:1")
        assert not fleet.ray.running
    with (
        locked(fleet.config.folder),
        pytest.raises(fleet.operate.FleetUnreachableError, match="no fleet runs on this Ray"),
    ):
        fleet.operate.attached(fleet.config).__enter__()


def test_a_rollout_that_changes_envoys_start_settings_is_rejected_by_name(fleet: Fleet) -> None:
    reconciler = started(fleet)
    bootstrap = (fleet.folder / "state" / "envoy" / "bootstrap.json").read_text()
    moved = fleet.configured(model={"http_port": free_port()}, listen={"admin_port": 0, "host": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"listen\.host, coder\.http_port: cannot change while the fleet runs"):
        fleet.operate.apply(reconciler, moved, fleet.say)
    assert (fleet.folder / "state" / "envoy" / "bootstrap.json").read_text() == bootstrap
    (rollout,) = fleet.operate.apply(reconciler, fleet.configured(drain_s=90), fleet.say)
    assert (rollout.deployment.app, rollout.deployment.drain_s, rollout.former.drain_s) == ("coder.blue", 90, 0)


def test_a_rollout_without_a_running_model_is_rejected_by_the_models_name(fleet: Fleet) -> None:
    reconciler = started(fleet)
    other = fleet.configured(model={"name": "chat"})
    with pytest.raises(ConfigError, match=r"coder\.http_port.* chat\.grpc_port: cannot change while the fleet runs"):
        fleet.operate.apply(reconciler, other, fleet.say)


def test_a_rollout_of_a_starting_fleet_is_rejected(fleet: Fleet) -> None:
    fleet.ray.running = True
    reconciler = fleet.ray_serve.start_reconciler(fleet.config)
    with pytest.raises(ConfigError, match="still starting"):
        fleet.operate.apply(reconciler, fleet.config, fleet.say)
    for begin in (fleet.operate.restart, lambda *of: fleet.operate.scale(*of, 1, 2)):
        with pytest.raises(ConfigError, match="still starting"):
            begin(reconciler, "coder", None)


def test_bug_an_unknown_release_is_refused_with_those_of_its_model(fleet: Fleet) -> None:
    chat = {"name": "chat", "http_port": 1, "grpc_port": 2}
    fleet.config = fleet.config.model_validate(
        fleet.config.model_dump() | {"models": [*fleet.config.model_dump()["models"], chat]}
    )
    reconciler = started(fleet)
    fleet.ray_serve.deploy(reconciler, deployment_of(fleet.config, "chat", "blue"))
    with pytest.raises(ConfigError, match=r"coder has no release 'red'; there are: blue$"):
        fleet.operate.restart(reconciler, "coder", "red")


@pytest.mark.parametrize(("takes_s", "is_too_long"), [(590.0, False), (700.0, True)])
def test_a_rollout_waits_for_the_full_drain_of_an_ending_release(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, takes_s: float, is_too_long: bool
) -> None:
    fleet.config = fleet.configured(drain_s=600)
    started(fleet)
    now_s = 0.0
    fleet.ray.ends = False

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s > takes_s:
            fleet.ray.apps.clear()

    monkeypatch.setattr(fleet.ray_serve, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    running = [deployment_of(fleet.config, "coder", "blue")]
    if is_too_long:
        with pytest.raises(ModelError, match=r"coder\.blue: replicas still run"):
            fleet.ray_serve.remove(running)
    else:
        fleet.ray_serve.remove(running)


def test_replicas_that_die_or_drain_meanwhile_do_not_fail_a_rollout(fleet: Fleet) -> None:
    started(fleet)
    for status in ("UNHEALTHY", "DEPLOY_FAILED"):
        fleet.ray.apps["coder.blue"] = fleet.ray.app(status, "HEALTH_CHECK_FAILED", "A replica's health check failed.")
        assert not fleet.ray_serve.is_complete("coder.blue")
        fleet.ray.apps["coder.blue"] = fleet.ray.app(status, "REPLICA_STARTUP_FAILED", "no such file")
        with pytest.raises(ModelError, match=r"coder\.blue: no such file"):
            fleet.ray_serve.is_complete("coder.blue")


def deployments(reconciler: Handle) -> dict[str, Any]:
    """The recorded deployments, by application."""
    found: dict[str, Any] = reconciler.state.remote().result().deployments
    return found


def fail(fleet: Fleet, app: str) -> None:
    """Serve gives up starting the present version of ``app``."""
    fleet.ray.apps[app] = fleet.ray.app("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED", f"no model for {app}")


def test_a_rollout_whose_replicas_cannot_be_started_is_undone(fleet: Fleet) -> None:
    reconciler = started(fleet)
    former = deployments(reconciler)
    changed = fleet.configured(
        model={"releases": {"blue": {"settings": {"engine": {"threads": 3}}}, "green": {"weight": 0}}}
    )
    rollouts = fleet.operate.apply(reconciler, changed, fleet.say)
    for rollout in rollouts:
        fail(fleet, rollout.deployment.app)
    with pytest.raises(ModelError, match=r"(?s)coder\.blue: no model for.*coder\.green: no model for"):
        fleet.operate.wait_complete(reconciler, rollouts, 60, fleet.say)
    assert deployments(reconciler) == former
    assert [*fleet.ray.apps] == ["coder.blue"]
    assert [*fleet.operate.status(reconciler)["models"]["coder"]] == ["blue"]
    fleet.operate.wait_complete(reconciler, [fleet.operate.restart(reconciler, "coder", None)], 60, fleet.say)
    assert [each.deployment.app for each in fleet.operate.apply(reconciler, changed, fleet.say)] == [
        "coder.blue", "coder.green"
    ]  # fmt: skip


def test_a_rollout_that_cannot_be_undone_hides_no_other(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler, undone = started(fleet), list[str]()
    changed = fleet.configured(
        model={"releases": {"blue": {"settings": {"engine": {"threads": 3}}}, "green": {"weight": 0}}}
    )
    rollouts = fleet.operate.apply(reconciler, changed, fleet.say)
    for rollout in rollouts:
        fail(fleet, rollout.deployment.app)

    def undo(reconciler: Any, rollout: Any) -> None:
        undone.append(rollout.deployment.app)
        raise ConfigError("it has replicas; drain them first")

    monkeypatch.setattr(fleet.operate, "_undo", undo)
    with pytest.raises(ModelError, match=r"(?s)blue: no model for.*blue: the rollout is not undone: it has.*green: no"):
        fleet.operate.wait_complete(reconciler, rollouts, 60, fleet.say)
    assert undone == ["coder.blue", "coder.green"]


def test_a_rollout_tries_a_release_again_whose_failure_nobody_awaited(fleet: Fleet) -> None:
    reconciler = started(fleet)
    changed = fleet.configured(drain_s=90)
    (begun,) = fleet.operate.apply(reconciler, changed, fleet.say)
    (same,) = fleet.operate.apply(reconciler, changed, fleet.say)
    assert same == (begun.deployment, begun.deployment)
    fail(fleet, "coder.blue")
    (again,) = fleet.operate.apply(reconciler, changed, fleet.say)
    assert again.deployment.version != begun.deployment.version
    assert fleet.ray_serve.is_complete("coder.blue")


def test_a_rollout_that_was_interrupted_is_completed_by_the_next(fleet: Fleet) -> None:
    reconciler = started(fleet)
    fleet.operate.serve.run_many, run_many = None, fleet.operate.serve.run_many
    with pytest.raises(TypeError):  # it is recorded, and Serve never gets it
        fleet.operate.apply(reconciler, fleet.configured(drain_s=90), fleet.say)
    fleet.operate.serve.run_many = run_many
    former = fleet.ray.apps["coder.blue"]
    (rollout,) = fleet.operate.apply(reconciler, fleet.configured(drain_s=90), fleet.say)
    assert fleet.ray.apps["coder.blue"] is not former
    fleet.operate.wait_complete(reconciler, [rollout], 60, fleet.say)


def test_a_rollout_waits_for_unchanged_releases_too(fleet: Fleet) -> None:
    """An earlier command may have ended before they were complete."""
    reconciler = started(fleet)
    fleet.ray.starts = "DEPLOYING"
    rollouts = fleet.operate.apply(reconciler, fleet.config, fleet.say)
    assert fleet.said == []
    with pytest.raises(ModelError, match=r"coder\.blue: not complete after 0 s"):
        fleet.operate.wait_complete(reconciler, rollouts, 0, fleet.say)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "Deployment 'server' in application 'coder.blue' has 2 replicas that have taken more than 30s to be "
            "scheduled. This may be due to waiting for the cluster to auto-scale or for a runtime environment to be "
            'installed. Resources required for each replica: {"CPU": 8.0}, total resources available: {}. Use `ray '
            "status` for more details.",
            'no machine has room yet for 2 of the replicas, which reserve {"CPU": 8.0} each',
        ),
        (
            "Deployment 'server' in application 'coder.blue' has 1 replicas that have taken more than 30s to "
            "initialize.\nThis may be caused by a slow __init__ or reconfigure method.",
            "coder.blue: UPDATING: 1 of the replicas are still loading",
        ),
    ],
)
def test_a_rollout_reports_what_it_waits_for(fleet: Fleet, message: str, said: str) -> None:
    reconciler = started(fleet)
    rollouts = fleet.operate.apply(reconciler, fleet.configured(drain_s=90), fleet.say)
    fleet.ray.apps["coder.blue"] = fleet.ray.app("UPDATING", message=message)
    fleet.on_say["coder.blue: "] = lambda: fleet.ray.apps.update({"coder.blue": fleet.ray.app("RUNNING")})
    fleet.operate.wait_complete(reconciler, rollouts, 60, fleet.say)
    assert said in fleet.said[-1]


@pytest.mark.parametrize("state", ["DEPLOY_FAILED", "RUNNING"])
def test_a_rollout_that_another_command_replaced_is_reported_and_changes_nothing(fleet: Fleet, state: str) -> None:
    reconciler = started(fleet)
    mine = fleet.operate.apply(reconciler, fleet.configured(drain_s=90), fleet.say)
    fleet.operate.apply(reconciler, fleet.configured(drain_s=30), fleet.say)
    fleet.ray.apps["coder.blue"] = fleet.ray.app(state, "REPLICA_STARTUP_FAILED", "no such file")
    with pytest.raises(ModelError, match=r"coder\.blue: another command changed it meanwhile"):
        fleet.operate.wait_complete(reconciler, mine, 60, fleet.say)
    assert deployments(reconciler)["coder.blue"].drain_s == 30


def test_a_release_that_cannot_be_removed_yet_is_removed_by_the_next_rollout(fleet: Fleet) -> None:
    reconciler = started(fleet)
    two = fleet.configured(model={"releases": {"blue": {}, "green": {"weight": 0}}})
    fleet.operate.apply(reconciler, two, fleet.say)
    late = fleet.operate.ask(reconciler, "join", "coder", "green", "127.0.0.1")
    with pytest.raises(ConfigError, match="coder/green has replicas"):
        fleet.operate.apply(reconciler, fleet.config, fleet.say)
    fleet.operate.ask(reconciler, "leave", late)
    fleet.operate.apply(reconciler, fleet.config, fleet.say)
    assert [*fleet.operate.status(reconciler)["models"]["coder"]] == ["blue"]


def test_a_rayservice_with_another_release_extends_the_running_fleet(fleet: Fleet) -> None:
    fleet.ray.running = True
    file, content = fleet.folder / "cluster.yaml", fleet.config.model_dump(mode="json")
    for releases in ({"blue": {}}, {"blue": {}, "green": {"weight": 0}}):
        content["models"][0]["releases"] = releases
        file.write_text(yaml.safe_dump(content))
        for release in releases:
            fleet.ray_serve.application({"file": str(file), "model": "coder", "release": release})
    reconciler = fleet.ray_serve.find_reconciler()
    assert fleet.operate.ask(reconciler, "join", "coder", "green", "10.0.0.1").id == "coder.green.0"
    content["listen"]["admin_port"] = 8000
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"listen\.admin_port: cannot change while the fleet runs"):
        fleet.ray_serve.application({"file": str(file), "model": "coder", "release": "blue"})


@pytest.mark.parametrize("error", [ModelError, RefusedKeyError])
def test_a_failed_server_start_is_reported_without_rays_stack(fleet: Fleet, error: type[ModelError]) -> None:
    started(fleet)
    message = (
        'The deployment failed to start 4 times in a row. Error:\nray::blue:server() (pid=1)\n  File "ray_serve.py"\n'
        'RuntimeError: Traceback (most recent call last):\n  File "ray_serve.py"\n'
        f"{error.__module__}.{error.__name__}: the server ended with status 1; its log ends with: no model\n"
        "of that name\n"
    )
    fleet.ray.apps["coder.blue"] = fleet.ray.app("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED", message)
    error_text = "the server ended with status 1; its log ends with: no model\nof that name"
    with pytest.raises(ModelError) as caught:
        fleet.ray_serve.is_complete("coder.blue")
    assert str(caught.value) == f"coder.blue: {error_text}"
    assert fleet.ray_serve.failures() == {"coder.blue": f"DEPLOY_FAILED: {error_text}"}


def test_a_change_that_cannot_be_recorded_is_not_started(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler = started(fleet)
    write, versions = fleet.ray_serve.replace_files, dict(fleet.ray.apps)

    def full(contents: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fleet.ray_serve, "replace_files", full)
    for begin in (
        lambda: fleet.operate.scale(reconciler, "coder", None, 2, 3),
        lambda: fleet.operate.apply(reconciler, fleet.configured(drain_s=90), fleet.say),
    ):
        with pytest.raises(SpecdecError, match=r"No space left on device.*nothing changed"):
            begin()
    assert fleet.ray.apps == versions
    assert fleet.operate.answer(reconciler.state.remote()).config == fleet.config
    (deployment,) = deployments(reconciler).values()
    assert (deployment.replicas.max, deployment.drain_s) == (1, 0)
    assert "No space left" in fleet.operate.status(reconciler)["failures"]["reconciler"]
    monkeypatch.setattr(fleet.ray_serve, "replace_files", write)
    fleet.operate.scale(reconciler, "coder", None, 2, 3)
    assert fleet.ray.apps["coder.blue"] is not versions["coder.blue"]
    assert fleet.operate.status(reconciler)["failures"] == {}


def test_the_only_release_keeps_all_sessions(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="coder has no release but blue"):
        fleet.operate.change(started(fleet), with_share, "coder", "blue", 5)


@pytest.mark.parametrize(
    ("weights", "percent"), [((1, 1, 0), (45, 50)), ((100, 100, 0), (45, 50)), ((30, 30, 30), (62, 33))]
)
def test_a_canary_gets_its_share_whatever_the_weights_were(
    fleet: Fleet, weights: tuple[int, ...], percent: tuple[int, ...]
) -> None:
    """``red`` has no ready replica: its weight is written anew, and its share stays."""
    names = ("blue", "red", "green")
    releases = {name: {"weight": weight} for name, weight in zip(names, weights, strict=True)}
    fleet.config = fleet.configured(model={"releases": releases})
    fleet.ray.running = True
    reconciler = fleet.ray_serve.start_reconciler(fleet.config)
    for name in ("blue", "green"):
        replica = fleet.operate.ask(reconciler, "join", "coder", name, "127.0.0.1")
        fleet.operate.ask(reconciler, "beat", ready(replica, 1, 2, "f" * 32), None)
    fleet.operate.change(reconciler, with_share, "coder", "green", 5)
    found = fleet.operate.status(reconciler)["models"]["coder"]
    assert tuple(found[name]["weight"] for name in names) == (*percent, 5)
    with pytest.raises(ConfigError, match="coder/red has no replica that is ready"):
        fleet.operate.change(reconciler, with_share, "coder", "red", 60)


async def test_a_restarted_reconciler_continues_from_its_file_or_without(fleet: Fleet) -> None:
    started(fleet)
    fleet.ray_serve.ray.get_runtime_context().was_current_actor_reconstructed = True
    restarted = fleet.ray_serve.ReconcilerActor(fleet.config, True)
    assert [*(await restarted.state()).deployments] == ["coder.blue"]
    (fleet.folder / "state" / "fleet.json").chmod(0o666)
    rebuilt = fleet.ray_serve.ReconcilerActor(fleet.config, True)
    assert not (await rebuilt.state()).deployments
    # `status` shows it: the weights are those of the file again, and no release can be changed.
    assert "other users may write" in await rebuilt.error()
    assert await restarted.error() == ""


def test_addresses_of_ipv6_have_brackets(fleet: Fleet) -> None:
    lines = [*fleet.operate._ready_lines(fleet.configured(listen={"host": "::1"}))]
    assert lines[1:] == [f"  gRPC  [::1]:{fleet.ports[1]}", f"  HTTP  http://[::1]:{fleet.ports[0]}"]
