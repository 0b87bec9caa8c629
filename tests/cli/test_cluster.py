"""`specdec cluster`: its arguments and its output."""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import signal
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cluster import state_folder
from specdec.cli.cluster import _fleet, cluster_group, status_lines, token_file
from specdec.errors import ConfigError

FOUND: dict[str, Any] = {
    "models": {
        "coder": {
            "blue": {
                "weight": 90,
                "fingerprint": "f00d",
                "replicas": [
                    {
                        "id": "coder.blue.0", "state": "ready", "host": "10.0.0.1", "http_port": 81, "grpc_port": 80,
                        "fingerprint": "f00d", "waiting": 2, "wait_s": 0.25, "busy": 0.5,
                    },
                    {
                        "id": "coder.blue.1", "state": "starting", "host": "10.0.0.2", "http_port": 0, "grpc_port": 0,
                        "fingerprint": "", "waiting": None, "wait_s": None, "busy": None,
                    },
                ],
            },
            "green": {"weight": 30, "fingerprint": "", "replicas": []},
        }
    },
    "failures": {"coder.green": "UNHEALTHY: no room"},
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A cluster.yaml."""
    path = tmp_path / "cluster.yaml"
    path.write_text(f"models: [{{name: coder}}]\nfolder: {tmp_path / 'state'}\n")
    return path


def run(*words: object) -> Result:
    """The command's outcome."""
    return CliRunner().invoke(cluster_group, [str(word) for word in words])


@pytest.mark.parametrize(("address", "several"), [(None, "0"), ("head:6379", None)])
def test_a_private_ray_is_on_loopback_only(
    file: Path, address: str | None, several: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the machine's address it would accept connections from others, and be lost when that address changes."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    ray = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "cluster.operate", ModuleType("cluster.operate"))
    _fleet(file, address)
    assert os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == several


def test_status_shows_releases_replicas_and_failures() -> None:
    assert status_lines(FOUND) == [
        "coder.blue: 75 % of the sessions, fingerprint f00d",
        "  coder.blue.0  ready  10.0.0.1 http 81 grpc 80  50% busy, 2 waiting, 0.25 s to wait",
        "  coder.blue.1  starting",
        "coder.green: 25 % of the sessions, fingerprint -",
        "coder.green: UNHEALTHY: no room",
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("coder",), "--rollback and --restart need MODEL"),
        (("--promote",), "--rollback and --restart need MODEL"),
        (("coder", "green", "--promote", "--rollback"), "--promote and --rollback: one at a time"),
        (("coder", "--weight", "5"), "--weight needs a RELEASE"),
        (("coder", "green", "--rollback"), "--rollback takes no RELEASE"),
        (("coder", "green", "--weight", "101"), "0<=x<=100"),
    ],
)
def test_incomplete_or_contradictory_rollouts_are_rejected(file: Path, words: tuple[str, ...], problem: str) -> None:
    done = run("rollout", "-f", file, *words)
    assert done.exit_code == 2
    assert problem in done.output


@pytest.mark.parametrize("words", [("serve",), ("status",), ("scale", "coder", "2"), ("drain", "coder.blue.0")])
def test_without_ray_every_command_prints_how_to_install_it(
    file: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command, *rest = words
    done = run(command, "-f", file, *rest)
    assert "pip install '.[cluster]'" in str(done.exception)


def test_an_invalid_file_is_named_before_anything_is_started(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("models: [{name: coder, replicas: {min: 0}}]")
    assert "models.0.replicas.min" in str(run("serve", "-f", path).exception)


def test_the_token_of_a_fleets_ray_is_private_to_its_owner_and_persistent(tmp_path: Path) -> None:
    path = token_file(tmp_path / "ray-token")
    secret = path.read_text()
    assert len(secret) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_file(path).read_text() == secret


def test_an_empty_token_is_written_again(tmp_path: Path) -> None:
    """Ray refuses an empty one, as a full disk may have left it."""
    (tmp_path / "ray-token").touch()
    assert len(token_file(tmp_path / "ray-token").read_text()) == 64


def test_a_token_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT, SMB and many FUSE file systems have none."""

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    assert len(token_file(tmp_path / "ray-token").read_text()) == 64


def test_two_first_commands_use_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would refuse the command whose token the other replaced."""
    write, path = state_folder.replace_files, tmp_path / "ray-token"

    def slow(contents: Any) -> list[Path]:
        time.sleep(0.1)
        return write(contents)

    monkeypatch.setattr(state_folder, "replace_files", slow)
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda _: token_file(path).read_text(), range(2))
    assert first == second


def test_a_full_disk_leaves_no_token_without_content(tmp_path: Path) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"folder: .*/ray-token cannot be written \(File too large\)"):
            token_file(tmp_path / "ray-token")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not [*tmp_path.iterdir()]
