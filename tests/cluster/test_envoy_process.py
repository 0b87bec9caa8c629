"""Envoy as a process, with a script in its place: certificates and ports, orphans, signals and the log."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import trustme

from cluster import envoy_process, supervisor
from cluster.config import ClusterConfig, ListenConfig
from cluster.envoy_process import EnvoyError, EnvoyProcess, check_certificates, check_ports
from cluster.fleet import Fleet
from cluster.state_folder import bound_log
from specdec.errors import ConfigError
from tests.cluster.envoy_fleet import cluster_config
from tests.cluster.scripted_envoy import program


def process(folder: Path, says: int = 0) -> EnvoyProcess:
    config = cluster_config()
    return EnvoyProcess(config, Fleet.of(config), folder / "envoy", program(folder, says))


async def test_an_orphaned_envoy_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = process(tmp_path)
    await first._spawn()  # and no supervisor watches it
    async with process(tmp_path) as second:
        assert first._process is not None
        assert await asyncio.wait_for(first._process.wait(), 10) < 0
        assert psutil.pid_exists(second.pid)
    assert f"stopping Envoy (process {first.pid})" in caplog.text


async def test_a_process_that_reads_its_files_is_not_ended(tmp_path: Path) -> None:
    envoy = process(tmp_path)
    words = [sys.executable, "-c", "import sys; sys.stdin.read()", str(tmp_path / "envoy" / "bootstrap.json")]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as other:
        async with envoy:
            assert other.poll() is None
        other.kill()


async def test_another_containers_envoy_is_not_ended(tmp_path: Path) -> None:
    """It has the same path, and another file there."""
    folder = tmp_path / "envoy"
    folder.mkdir()
    envoy = [
        sys.executable,
        "-c",
        "print(flush=True); import sys; sys.stdin.read()",
        "--config-path",
        f"{folder}/bootstrap.json",
    ]
    contained = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder), *envoy]
    with subprocess.Popen(contained, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        assert other.stdout is not None
        if not other.stdout.readline():
            pytest.skip("mount namespaces need privileges")
        async with process(tmp_path):
            assert other.poll() is None
        other.kill()


async def test_a_terminals_signal_does_not_reach_it(tmp_path: Path) -> None:
    async with process(tmp_path) as envoy:
        assert os.getsid(envoy.pid) == envoy.pid


@pytest.mark.parametrize(
    "error", [OSError(errno.EAGAIN, "no process"), EnvoyError("not ready"), ValueError("a defect")]
)
async def test_an_error_during_a_restart_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    async with process(tmp_path) as envoy:
        spawn, errors = envoy._spawn, [error, error]

        async def fails_twice() -> None:
            if errors:
                raise errors.pop()
            await spawn()

        monkeypatch.setattr(envoy, "_spawn", fails_twice)
        former = envoy.pid
        os.kill(former, signal.SIGKILL)
        while envoy.pid == former:
            await asyncio.sleep(0.01)
        assert not errors
        assert envoy._supervisor.failures == 3


@pytest.mark.parametrize("turns", range(5))
async def test_bug_one_that_exits_just_before_its_stop_is_not_restarted(tmp_path: Path, turns: int) -> None:
    """The stop was lost where it met the exit, since `asyncio.wait_for` drops such a cancellation."""
    exits = asyncio.Event()
    watching = asyncio.create_task(process(tmp_path)._exit_status(Mock(wait=exits.wait)))
    await asyncio.sleep(0.01)
    exits.set()
    for _ in range(turns):  # of the event loop
        await asyncio.sleep(0)
    stopped = watching.cancel()
    await asyncio.wait([watching])
    assert watching.cancelled() == stopped


@pytest.mark.parametrize("refuses", [False, True])
async def test_one_that_hangs_is_killed_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(envoy_process, "_CHECK_S", 0.05)
    monkeypatch.setattr(envoy_process, "_ADMIN_S", 0.2)
    async with process(tmp_path) as envoy:
        former = envoy.pid
        await asyncio.sleep(0.3)
        assert envoy.pid == former
        if refuses:
            envoy.admin.address_file.write_text("127.0.0.1:1")  # nothing listens there
        else:
            os.kill(former, signal.SIGSTOP)
        while envoy.pid == former:
            await asyncio.sleep(0.01)
        assert not psutil.pid_exists(former)


@pytest.mark.parametrize("lacks", ["address file", "descriptors"])
async def test_one_that_answers_is_not_killed_for_faults_of_this_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    checks = 0

    def count(_: Path) -> None:
        nonlocal checks
        checks += 1

    monkeypatch.setattr(envoy_process, "_CHECK_S", 0.01)
    monkeypatch.setattr(envoy_process, "bound_log", count)
    async with process(tmp_path) as envoy:
        former, limits, until = envoy.pid, resource.getrlimit(resource.RLIMIT_NOFILE), checks + 10
        if lacks == "descriptors":
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        else:
            envoy.admin.address_file.unlink()
        try:
            while checks < until:
                await asyncio.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert envoy.pid == former
        assert psutil.pid_exists(former)


async def test_its_calls_are_drained_though_the_file_of_its_address_is_gone(tmp_path: Path) -> None:
    async with process(tmp_path) as envoy:
        address = envoy.admin.address
        envoy.admin.address_file.unlink()
        await envoy.admin.drain(0.0, lambda: False)  # raises if it cannot ask Envoy
        assert envoy.admin.address == address


async def test_its_log_is_bounded_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envoy_process, "_CHECK_S", 0.01)
    monkeypatch.setattr(envoy_process, "bound_log", lambda path: bound_log(path, 1000))
    log = tmp_path / "envoy" / "envoy.log"
    async with process(tmp_path, says=5000):
        while not (tmp_path / "envoy" / "envoy.log.1").exists() or log.stat().st_size:
            await asyncio.sleep(0.01)
    assert (tmp_path / "envoy" / "envoy.log.1").stat().st_size == 5001


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A certificate, its key and an authority."""
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    found = {"tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key", "tls_client_ca": tmp_path / "ca"}
    own.cert_chain_pems[0].write_to_path(found["tls_cert"])
    own.private_key_pem.write_to_path(found["tls_key"])
    authority.cert_pem.write_to_path(found["tls_client_ca"])
    return found


def test_valid_and_missing_files_are_accepted(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    check_certificates(ListenConfig(**files))
    check_certificates(ListenConfig(**{name: Path("~") / path.name for name, path in files.items()}))
    check_certificates(ListenConfig())


@pytest.mark.parametrize("field", ["tls_cert", "tls_key", "tls_client_ca"])
def test_a_missing_or_irregular_file_is_named(files: dict[str, Path], field: str) -> None:
    files[field].write_text("no PEM")
    with pytest.raises(ConfigError, match=rf"listen\.{field}.*PEM"):
        check_certificates(ListenConfig(**files))
    files[field].unlink()
    with pytest.raises(ConfigError, match=rf"^listen\.{field}: {files[field]} cannot be read \(No such file"):
        check_certificates(ListenConfig(**files))


def config(port: int, **listen: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"models": [{"name": "coder", "http_port": port, "grpc_port": None}], "listen": {"admin_port": 0, **listen}}
    )


def test_a_port_in_use_is_named_even_if_it_could_be_shared() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"coder\.http_port: cannot listen on 127\.0\.0\.1:{port} .*process {os.getpid()} "
        ):
            check_ports(config(port))
        with pytest.raises(
            ConfigError, match=rf"listen\.admin_port: cannot listen on 127\.0\.0\.1:{port} .*choose another admin_port"
        ):
            check_ports(config(1 if port != 1 else 2, admin_port=port))
    check_ports(config(port))


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"coder\.http_port: cannot listen on 192\.0\.2\.1:8401 .*listen\.host"):
        check_ports(config(8401, host="192.0.2.1"))
