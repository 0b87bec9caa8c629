"""A stand-in for Ray: actors live in this process, and the test sets the state of applications."""

from __future__ import annotations

import sys
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import cluster

NODE = "this node"


class RayError(Exception):
    """Of Ray."""


class RayServeException(Exception):  # noqa: N818 (Ray's name)
    """Of Ray Serve."""


class RayTaskError(RayError):
    """``cause``: the exception that an actor's method raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(repr(cause))
        self.cause = cause


class Reference:
    """The completed call of an actor's method."""

    def __init__(self, coroutine: Any) -> None:
        self._value, self._error = None, None
        try:
            coroutine.send(None)
            raise AssertionError("an actor's method waits for something")
        except StopIteration as stop:
            self._value = stop.value
        except Exception as error:
            self._error = RayTaskError(error)

    def result(self) -> Any:
        """Returns or raises its result."""
        if self._error is not None:
            raise self._error
        return self._value

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.result()
        yield


class Handle:
    """The handle of an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *words: Reference(getattr(self.actor, method)(*words)))


class ScriptedRay:
    """``apps``: Serve's applications by name. ``starts``: status of a new one. ``ends``: whether deleted ones disappear
    immediately. ``deleted``: in order. ``options``: of the last `init`. ``running``: whether Ray runs; calls without it
    raise, since real ones would start Ray."""

    def __init__(self) -> None:
        self.apps: dict[str, SimpleNamespace] = {}
        self.starts, self.ends, self.running, self.reconstructed = "RUNNING", True, False, False
        self.deleted, self.actors = list[str](), dict[str, Handle]()
        self.options = dict[str, Any]()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes it importable as ``ray``."""
        for name, contents in self._modules().items():
            module = types.ModuleType(name)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, module)

    def app(self, status: str, trigger: str = "UNSPECIFIED", message: str = "") -> SimpleNamespace:
        """An application with one deployment."""
        of_app = {"HEALTHY": "RUNNING", "UPDATING": "DEPLOYING"}.get(status, status)
        of_deployment = {"RUNNING": "HEALTHY", "DEPLOYING": "UPDATING"}.get(status, status)
        server = SimpleNamespace(status=_Status(of_deployment), status_trigger=trigger, message=message)
        return SimpleNamespace(status=of_app, message="", deployments={"server": server})

    def _modules(self) -> dict[str, dict[str, Any]]:
        context = SimpleNamespace(
            gcs_address="127.0.0.1:1", get_node_id=lambda: NODE, was_current_actor_reconstructed=self.reconstructed
        )
        exceptions = types.ModuleType("ray.exceptions")
        exceptions.__dict__.update(RayError=RayError, RayTaskError=RayTaskError)
        serve = types.ModuleType("ray.serve")
        serve.__dict__.update(
            start=self._start, run_many=self._run_many, delete=self._delete, status=self._status,
            RunTarget=lambda target, name, route_prefix: name, deployment=lambda cls: _Bound(),
        )  # fmt: skip
        options = {"AutoscalingConfig": SimpleNamespace, "AutoscalingPolicy": SimpleNamespace}
        return {
            "ray": {
                "init": self._init, "shutdown": self._shutdown, "get": lambda reference, timeout: reference.result(),
                "kill": self._kill, "get_actor": self._get_actor, "remote": self._remote, "serve": serve,
                "exceptions": exceptions, "get_runtime_context": lambda: context,
                "util": SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
            },
            "ray.exceptions": exceptions.__dict__,
            "ray.serve": serve.__dict__,
            "ray.serve._private": {},
            "ray.serve._private.replica": {"add_port_to_grpc_server": lambda server, address: address},
            "ray.serve.config": options,
            "ray.serve.exceptions": {"RayServeException": RayServeException},
            "ray.util": {},
            "ray.util.scheduling_strategies": {"NodeAffinitySchedulingStrategy": lambda *_, **__: None},
        }  # fmt: skip

    def _init(self, **options: Any) -> None:
        self.running, self.options = True, options

    def _shutdown(self) -> None:
        self.running = False

    def _must_run(self) -> None:
        assert self.running, "Ray would be started again for this"

    def _start(self, **_: Any) -> None:
        self._must_run()

    def _run_many(self, names: list[str], **_: Any) -> None:
        self._must_run()
        for name in names:
            self.apps[name] = self.app(self.starts)

    def _delete(self, name: str, _blocking: bool = True) -> None:
        self._must_run()
        assert not _blocking, "waits for a minute, whatever the drain is"
        self.deleted.append(name)
        if self.ends:
            self.apps.pop(name, None)

    def _status(self) -> SimpleNamespace:
        self._must_run()
        return SimpleNamespace(applications=dict(self.apps))

    def _get_actor(self, name: str, namespace: str) -> Handle:
        self._must_run()
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def _kill(self, handle: Handle) -> None:
        self.actors = {name: other for name, other in self.actors.items() if other is not handle}

    def _remote(self, **_: Any) -> Any:
        return lambda cls: SimpleNamespace(options=lambda **options: _Class(self, cls, **options))


class _Status(str):
    @property
    def value(self) -> str:
        return str(self)


class _Class:
    def __init__(self, ray: ScriptedRay, cls: type, name: str, get_if_exists: bool = False, **_: Any) -> None:
        self._ray, self._cls, self._name, self._shared = ray, cls, name, get_if_exists

    def remote(self, *words: Any) -> Handle:
        """Creates the actor."""
        if self._name in self._ray.actors:
            if self._shared:
                return self._ray.actors[self._name]
            raise ValueError(f"the name {self._name} is taken")
        handle = self._ray.actors[self._name] = Handle(self._cls(*words))
        return handle


class _Bound:
    def options(self, **_: Any) -> _Bound:
        """Ignores the options."""
        return self

    def bind(self, *_: Any) -> None:
        """Returns None."""


@contextmanager
def scripted_ray() -> Iterator[tuple[ScriptedRay, Any, Any]]:
    """Yields the stand-in and fresh modules `cluster.operate` and `cluster.ray_serve` on it, for this context only."""
    scripted = ScriptedRay()
    with pytest.MonkeyPatch.context() as monkeypatch:
        scripted.install(monkeypatch)
        _forget()
        try:
            from cluster import operate, ray_serve

            yield scripted, operate, ray_serve
        finally:
            _forget()


def _forget() -> None:
    for name in ("operate", "ray_serve"):
        sys.modules.pop(f"cluster.{name}", None)
        if hasattr(cluster, name):
            delattr(cluster, name)
