"""Which holder a key belongs to, and how changes of the file take effect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from server.auth import keys as key_ring
from server.auth.file_watch import FileWatch
from server.auth.keys import KeyRing
from server.auth.principal import ANYBODY, Principal
from server.errors import PermissionDeniedError, UnauthenticatedError
from specdec.core.types import Request, SpeculationParams
from specdec.errors import ConfigError
from tests.server.auth.key_files import make_key


def ring(path: Path) -> KeyRing:
    """One that looks at its file at every call."""
    return KeyRing(path, FileWatch([path], every_s=0))


async def test_each_key_belongs_to_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = {name: make_key(path, name, f"t-{name}") for name in ("a", "b", "c")}
    found = ring(path)
    for name, key in keys.items():
        principal = await found.find(key)
        assert (principal.name, principal.tenant) == (name, f"t-{name}")
    for wrong in ("", "sd-", keys["a"][:-1], keys["a"] + "x", keys["a"].swapcase(), "\ud800"):
        with pytest.raises(UnauthenticatedError, match="unknown key"):
            await found.find(wrong)


async def test_a_changed_file_takes_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    first = make_key(path, "a")
    found = ring(path)
    second = make_key(path, "b")
    assert (await found.find(second)).name == "b"
    path.write_text(path.read_text().replace("tenant: team", "tenant: moved"))
    assert (await found.find(first)).tenant == "moved"
    good = path.read_text()
    path.write_text("- {name: a}")
    assert (await found.find(first)).tenant == "moved"  # a bad file changes nothing
    assert "0.tenant" in caplog.text
    os.unlink(path)
    assert (await found.find(first)).name == "a"
    assert "cannot be read" in caplog.text
    path.write_text(good.replace("name: a", "name: c"))
    assert (await found.find(first)).name == "c"
    path.write_text("[]\n# end of keys\n")  # revokes all
    for key in (first, second):
        with pytest.raises(UnauthenticatedError):
            await found.find(key)


async def test_bug_a_truncated_file_revokes_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    keys = [make_key(path, name) for name in ("a", "b", "c")]
    whole = path.read_text()
    errors: Counter[str] = Counter()
    found = KeyRing(path, FileWatch([path], every_s=0.0), errors)
    before = [await found.find(key) for key in keys]
    for cut in range(len(whole)):
        path.write_text(whole[:cut])
        assert [await found.find(key) for key in keys] == before, whole[:cut]
    assert errors == {"keys": len(whole)}
    assert caplog.records[-1].levelname == "ERROR"
    path.write_text(whole.replace("name: a", "name: z"))
    assert (await found.find(keys[0])).name == "z"


async def test_bug_calls_that_are_running_go_on_while_a_changed_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, go_on = tmp_path / "keys.yaml", threading.Event()
    key, parse = make_key(path, "a"), key_ring._parse
    found = ring(path)
    later = make_key(path, "b")

    def parse_later(text: str, of: Path) -> list[key_ring.KeyEntry]:
        assert go_on.wait(30)
        return parse(text, of)

    monkeypatch.setattr(key_ring, "_parse", parse_later)
    first, second = (asyncio.create_task(found.find(each)) for each in (later, key))
    await asyncio.sleep(0.01)
    assert not first.done()
    first.cancel()  # its client has left; the file is loaded all the same
    assert (await second).name == "a"
    go_on.set()
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(UnauthenticatedError):
                assert (await found.find(later)).name == "b"
                break
            await asyncio.sleep(0.01)


async def test_bug_a_load_whose_call_has_left_does_not_bring_back_former_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun, go_on = tmp_path / "keys.yaml", threading.Event(), threading.Event()
    keys, parse = [make_key(path, name) for name in ("a", "b")], key_ring._parse
    found, former = ring(path), path.read_text()

    def parse_later(text: str, of: Path) -> list[key_ring.KeyEntry]:
        entries = parse(text, of)
        if not begun.is_set():
            begun.set()
            assert go_on.wait(30)
        return entries

    load, loaded = KeyRing._load, []
    monkeypatch.setattr(KeyRing, "_load", lambda self: loaded.append(load(self)))
    monkeypatch.setattr(key_ring, "_parse", parse_later)
    path.write_text("# changed\n" + former)
    first = asyncio.create_task(found.find(keys[1]))
    assert await asyncio.to_thread(begun.wait, 30)
    first.cancel()
    path.write_text(former[: former.index("- name: b")] + "# end of keys\n")
    second = asyncio.create_task(found.find(keys[0]))
    await asyncio.sleep(0.05)  # it loads the newest file, or waits for the former load
    go_on.set()
    assert (await second).name == "a"
    async with asyncio.timeout(30):
        while len(loaded) < 2:
            await asyncio.sleep(0.01)
    with pytest.raises(UnauthenticatedError):
        await found.find(keys[1])


async def test_any_entries_of_a_file_without_the_mark_can_be_deleted_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys = [make_key(path, name) for name in ("a", "b", "c")]
    by_hand = path.read_text().removesuffix("# end of keys\n")
    path.write_text(by_hand)
    found = ring(path)
    path.write_text("")  # an editor that empties the file before it writes
    assert (await found.find(keys[2])).name == "c"
    path.write_text(by_hand[: by_hand.index("- name: b")])
    assert (await found.find(keys[0])).name == "a"
    for key in keys[1:]:
        with pytest.raises(UnauthenticatedError):
            await found.find(key)


def test_a_ring_starts_with_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="specdec keys new"):
        KeyRing(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(tmp_path / "none")


def test_the_file_is_polled(tmp_path: Path) -> None:
    path, now = tmp_path / "f", [0.0]
    path.write_text("1")
    watch = FileWatch([path, tmp_path / "never"], every_s=1.0, clock=lambda: now[0])
    path.write_text("22")
    assert not watch.changed()  # too soon to look
    now[0] = 1.0
    assert (watch.changed(), watch.changed()) == (True, False)
    now[0] = 2.0
    assert not watch.changed()
    path.unlink()
    now[0] = 3.0
    assert watch.changed()


def test_scoped_names_of_tenants_never_collide() -> None:
    one, two = Principal("k", "a"), Principal("l", "a.b")
    texts = ["", "x", "b/x", "/x", "a/x"]
    scoped_texts = [p.scoped(text) for p in (one, two) for text in texts]
    assert len(set(scoped_texts)) == len(scoped_texts)
    assert [ANYBODY.scoped(text) for text in texts] == texts
    own = one.scope_request(Request("id", (1,), cache_salt="s", session="e", priority=3))
    assert (own.request_id, own.cache_salt, own.session, own.priority) == ("a/id", "a/s", "e", 3)


def test_a_key_can_be_limited_to_some_indexes() -> None:
    def indexes_of(principal: Principal, requested: tuple[str, ...] | None) -> tuple[str, ...] | None:
        request = Request("id", (1,), speculation=SpeculationParams(indexes=requested))
        return principal.scope_request(request).speculation.indexes

    assert indexes_of(Principal("k", "a"), None) is None
    assert indexes_of(Principal("k", "a"), ("x",)) == ("x",)
    bound, none = Principal("k", "a", indexes=("x", "y")), Principal("k", "a", indexes=())
    assert indexes_of(bound, None) == ("x", "y")
    assert indexes_of(bound, ("y",)) == ("y",)
    assert indexes_of(none, None) == ()
    for principal, requested in ((bound, ("y", "z")), (none, ("x",))):
        with pytest.raises(PermissionDeniedError, match=r"speculation\.indexes: this key may not use"):
            indexes_of(principal, requested)
