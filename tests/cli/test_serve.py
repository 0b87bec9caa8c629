"""What `specdec serve` completes in its configuration, and what `specdec status` shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from specdec.cli.main import cli
from specdec.cli.serve import with_disk_cache
from specdec.config import Config, EngineConfig
from tests.fake_engine import CHAT
from tests.server.auth.key_files import make_key
from tests.server.http.harness import running_serving
from tests.server.http.test_several_models import drain
from tests.server.several_models import ENGINES, make_several, serving, several


def test_the_disk_cache_takes_a_quarter_of_its_own_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before the first start, which makes the folder."""
    volume = tmp_path / "volume"
    volume.mkdir()
    free = {tmp_path: 4000, volume: 400}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    for own, expected in ((None, 1000), (volume / "prefix", 100)):
        engine = EngineConfig(cache_dir=tmp_path / "cache" / "specdec", kv_disk_folder=own)
        assert with_disk_cache(Config(engine=engine)).engine.kv_disk_bytes == expected


@pytest.mark.parametrize(("free", "expected"), [(4000, 500), (1 << 40, 2 << 30)])
def test_several_engines_share_the_space_of_one(
    free: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    engines = {name: EngineConfig(cache_dir=tmp_path) for name in ("fim", "writer")}
    found = with_disk_cache(Config(engines=engines)).engines
    assert [engine.kv_disk_bytes for engine in found.values()] == [expected, expected]


def test_status_shows_which_models_take_requests(tmp_path: Path) -> None:
    keys, key_file = tmp_path / "keys.yaml", tmp_path / "key"
    key_file.write_text(make_key(keys, "me", admin=True))
    with several(keys_file=keys) as server:
        assert drain(server, {"authorization": f"Bearer {key_file.read_text()}"}, "fim") == 0
        words = ["status", "--server", f"127.0.0.1:{server.grpc_port}", "--key-file", str(key_file)]
        shown = CliRunner().invoke(cli, words).stdout.splitlines()
        found = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    assert shown[0] == "state     chat is ready, fim takes no requests now"
    assert (found["info"]["target"], found["ready"]) == (CHAT, {"chat": True, "fim": False})


def test_status_does_not_wait_for_the_last_model() -> None:
    engines = ENGINES | {"fim": {"target": "crash", "threads": 1}}
    with running_serving(serving(make_several(engines), give_up_after=50), wait=False) as server:
        words = ["status", "--server", f"127.0.0.1:{server.grpc_port}"]
        assert server.comes_to(lambda: CliRunner().invoke(cli, words).exit_code == 0)
