"""What `specdec serve` completes in its configuration."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.cli.serve import with_disk_cache
from specdec.config import Config, EngineConfig


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
