"""The folder of a fleet: only its owner writes there, one fleet holds it at a time, and its logs stay small."""

from __future__ import annotations

import json
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.deployment import deployment_of
from cluster.fleet import Fleet, Replica, ReplicaState, with_replica, with_weights
from cluster.state_folder import FleetState, bound_log, is_locked, locked, log_tail, private_folder, replace_files
from specdec.errors import ConfigError
from tools.markdown import REPOSITORY


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_is_created_private(tmp_path: Path) -> None:
    assert mode(private_folder(tmp_path / "a" / "b")) == 0o700
    (tmp_path / "there").mkdir(mode=0o755)
    assert mode(private_folder(tmp_path / "there")) == 0o755  # chosen by a user; no other user can write


@pytest.mark.parametrize("bits", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_rejected(tmp_path: Path, bits: int) -> None:
    tmp_path.chmod(bits)
    with pytest.raises(ConfigError, match=f"other users may write to {tmp_path}; chmod go-w"):
        private_folder(tmp_path)


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"folder: .*file/state cannot be created"):
        private_folder(tmp_path / "file" / "state")


def test_one_process_holds_a_folder_until_it_dies(tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n" + (
        "from pathlib import Path\nfrom cluster.state_folder import locked\n"
        f"with locked(Path({str(tmp_path)!r})):\n    print('mine', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        assert is_locked(tmp_path)
        with (
            pytest.raises(ConfigError, match=rf"folder: {tmp_path} is in use .*process {other.pid}\)"),
            locked(tmp_path),
        ):
            pass
        other.kill()
    assert not is_locked(tmp_path)
    assert not is_locked(tmp_path / "none")
    with locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_too_large_log_is_rotated_and_its_writer_continues(tmp_path: Path) -> None:
    log = tmp_path / "envoy.log"
    bound_log(log)  # none yet
    with log.open("ab", buffering=0) as writer:
        writer.write(b"first " * 10)
        bound_log(log, limit=100)
        assert log.stat().st_size == 60
        writer.write(b"more " * 10)
        bound_log(log, limit=100)
        writer.write(b"last")
    assert log.read_bytes() == b"last"
    assert (tmp_path / "envoy.log.1").read_bytes() == b"first " * 10 + b"more " * 10


def test_an_error_quotes_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "envoy.log"
    log.write_bytes(b"first " * 1000 + b"\xff last\n")
    assert len(log_tail(log)) <= 2000
    assert log_tail(log).endswith("first \ufffd last")
    log.write_bytes(b"former\nmine")
    assert log_tail(log, len(b"former\n")) == "mine"
    assert log_tail(log, 100) == "former\nmine"  # it was truncated after its 100 bytes were counted
    log.write_bytes(b"")
    assert log_tail(log) == "its log is empty"
    log.unlink()  # or the supervisor of a server that died could not report it, and nothing would replace it
    assert log_tail(log) == "its log cannot be read (No such file or directory)"


def state() -> FleetState:
    config = ClusterConfig.model_validate(
        {"models": [{"name": "coder", "releases": {"blue": {}, "green": {"weight": 0}}}], "folder": "/nowhere"}
    )
    fleet = Fleet.of(config)
    for name in ("blue", "green"):
        replica = Replica(f"coder.{name}.0", "coder", name, "127.0.0.1", 81, 80, "f", ReplicaState.READY, "owner")
        fleet = with_replica(fleet, replica)
    fleet = with_weights(fleet, "coder", {"blue": 90, "green": 10})
    deployment = deployment_of(config, "coder", "blue").model_copy(update={"key": "secret"})
    return FleetState(config=config, deployments={deployment.app: deployment}, fleet=fleet)


def test_the_saved_state_is_private_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    replace_files({path: state().encoded()})
    assert mode(path) == 0o600
    assert FleetState.load(path) == state()
    assert FleetState.load(path).deployments["coder.blue"].version == state().deployments["coder.blue"].version
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_others_could_read_is_replaced_by_a_private_one(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text("as a backup left it")
    path.chmod(0o644)
    replace_files({path: state().encoded()})
    assert mode(path) == 0o600


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A disk on which files end after 4 KiB."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_changes_no_file_and_leaves_no_temporary_one(tmp_path: Path, full_disk: None) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert replace_files({first: b"old", second: b"old"}) == [first, second]
    with pytest.raises(OSError, match="File too large"):
        replace_files({first: b"new", second: b"x" * 10_000})
    assert (first.read_bytes(), second.read_bytes()) == (b"old", b"old")
    assert {*tmp_path.iterdir()} == {first, second}
    assert replace_files({first: b"new", second: b"old"}) == [first]


def test_bug_a_file_that_cannot_be_read_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no change of the fleet could be written any more."""
    path = tmp_path / "fleet.json"
    path.write_text("of another user")

    def refuse(path: Path) -> bytes:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        assert replace_files({path: b"new"}) == [path]
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("bits", [0o620, 0o602])
def test_a_file_that_others_may_have_written_is_not_read(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "fleet.json"
    replace_files({path: state().encoded()})
    path.chmod(bits)
    with pytest.raises(ConfigError, match=r"other users may write to .*fleet\.json"):
        FleetState.load(path)


def test_an_invalid_state_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        FleetState.load(path)
    replace_files({path: b"{}"})
    with pytest.raises(ConfigError, match=r"fleet\.json: config: Field required"):
        FleetState.load(path)
    former = json.loads(state().encoded())  # versions before listed the releases
    former["fleet"]["releases"] = {"coder": [{"name": "blue", "weight": 100, "fingerprint": "f"}]}
    replace_files({path: json.dumps(former).encode()})
    with pytest.raises(ConfigError, match=r"fleet\.json: fleet\.releases\.coder: Input should be an object"):
        FleetState.load(path)
