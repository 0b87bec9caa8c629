"""The disk cache under real engines: tokens are those of a cold run, whatever was stored, damaged or flushed."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.path_identity import BatchConditions, run_conditions
from specdec.config import EngineConfig, KvDtype
from specdec.core.kv_cache import KvCacheManager, PagedTokens, extend_keys
from specdec.core.types import (
    MAX_QUEUED_REQUESTS,
    EngineLoad,
    Finished,
    Request,
    ResumeParams,
    SamplingParams,
    StoppingParams,
)
from specdec.engine import disk_cache
from specdec.engine.build import warm_up
from specdec.engine.disk_cache import DiskCache, open_disk_cache
from specdec.engine.engine import Engine
from specdec.engine.page_files import PageFiles
from specdec.engine.scheduler import Scheduler
from specdec.errors import QueueFullError
from tests.engine.test_every_drafter import every_parts
from tests.engine.tiny_engine import run_all, tiny_engine, tiny_parts, tokens_of

PAGES = 40


def engine_on(
    folder: Path,
    kv_dtype: KvDtype = "auto",
    room: int = 64 << 20,
    pages: int = PAGES,
    queued: int = MAX_QUEUED_REQUESTS,
) -> Engine:
    """An engine that was just started, with its disk cache in ``folder``."""
    parts = tiny_parts(kv_dtype=kv_dtype)
    for tensor in parts.decoder.pool.tensors.page_bytes():  # type: ignore[attr-defined]
        tensor[:] = 1  # the memory is that of the engine before
    config = parts.config.model_copy(update={"kv_disk_bytes": room, "kv_disk_folder": folder})
    kv = KvCacheManager(pages, prefix_cache=True)
    info = dataclasses.replace(parts.info, max_context=min(parts.info.max_context, pages * 64 - 64))
    disk = open_disk_cache(config, info, kv, parts.decoder)
    return Engine(dataclasses.replace(parts, config=config, info=info, kv=kv, disk=disk, max_queued_requests=queued))


def request(name: str, length: int, salt: str = "", seed: int = 1, temperature: float = 0.0) -> Request:
    """A prompt whose beginning all prompts of ``seed`` share."""
    tokens = random.Random(seed).choices(range(1, 300), k=length)
    return Request(
        name, tuple(tokens), SamplingParams(seed=7, temperature=temperature),
        StoppingParams(max_tokens=6, ignore_eos=True),
        cache_salt=salt,
    )  # fmt: skip


def answer(engine: Engine, asked: Request) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt's came from the cache."""
    events = run_all(engine, [asked])
    (end,) = [event for event in events if isinstance(event, Finished)]
    return tokens_of(events, asked.request_id), end.usage.cached_tokens


def cold(asked: Request, kv_dtype: KvDtype = "auto") -> list[int]:
    return answer(tiny_engine(tiny_parts(kv_dtype=kv_dtype)), asked)[0]


def until(met: Callable[[], bool]) -> None:
    """Wait for what a thread of the engine does."""
    end_s = time.monotonic() + 30
    while not met():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prefix"


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_a_restarted_engine_has_the_full_pages_of_prompts_and_answers(folder: Path, kv_dtype: KvDtype) -> None:
    asked = request("a", 300, temperature=1.0)
    engine = engine_on(folder, kv_dtype)
    assert answer(engine, asked) == (cold(asked, kv_dtype), 0)
    engine.close()
    engine = engine_on(folder, kv_dtype)
    assert answer(engine, asked) == (cold(asked, kv_dtype), 256)
    load = engine.load()
    assert (load.disk_pages_read, load.disk_pages_missed) == (4, {})
    longer = request("b", 400, temperature=1.0)
    assert answer(engine, longer) == (cold(longer, kv_dtype), 300)  # from memory, with the last page in part
    engine.close()


def test_a_salt_another_model_and_another_type_find_nothing(folder: Path) -> None:
    engine = engine_on(folder)
    answer(engine, request("a", 300, "tenant"))
    engine.close()
    for salt, kv_dtype, cached in (
        ("", "auto", 0),
        ("other", "auto", 0),
        ("tenant", "int8", 0),
        ("tenant", "auto", 256),
    ):
        engine = engine_on(folder, kv_dtype)  # type: ignore[arg-type]
        assert answer(engine, request("a", 300, salt))[1] == cached
        engine.flush_cache() if cached else None
        engine.close()


def test_engines_beside_it_leave_the_disk_cache_alone(folder: Path) -> None:
    """The warm-up and `specdec verify` run on the same parts with page numbers of their own."""
    engine, asked = engine_on(folder), request("a", 300)
    warm_up(dataclasses.replace(engine._parts, drafters=every_parts().drafters), 0.05)
    assert answer(engine, asked) == (cold(asked), 0)
    engine.close()
    engine = engine_on(folder)
    run_conditions(engine._parts, BatchConditions("alone"), [asked])
    assert engine._kv.cached_tokens(asked.prompt_ids, "") == 0  # nothing was loaded into these pages
    assert answer(engine, asked) == (cold(asked), 256)
    engine.close()


def test_pages_are_read_where_no_thread_can_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_on(folder), request("a", 300)
    answer(engine, asked)
    engine.close()
    engine = engine_on(folder)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert answer(engine, asked) == (cold(asked), 256)
    engine.close()


def test_a_flush_erases_the_disk_too(folder: Path) -> None:
    engine, asked = engine_on(folder), request("a", 300)
    answer(engine, asked)
    engine.close()
    engine = engine_on(folder)
    engine.submit(asked)  # its pages are being read
    engine.flush_cache()
    assert not list(folder.glob("*/*.page*"))
    assert tokens_of(run_all(engine, []), "a") == cold(asked)
    engine.flush_cache()
    engine.close()
    engine = engine_on(folder)
    assert answer(engine, asked) == (cold(asked), 0)
    engine.close()


def test_a_flush_waits_for_one_page_of_a_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_on(folder), request("a", 300)
    answer(engine, asked)
    engine.close()
    engine = engine_on(folder)
    reads, begun, go_on = [], threading.Event(), threading.Event()
    read = PageFiles.read

    def slow(files: PageFiles, key: bytes, into: bytearray) -> None:
        reads.append(key)
        begun.set()
        assert go_on.wait(30)
        read(files, key, into)

    monkeypatch.setattr(PageFiles, "read", slow)
    engine.submit(asked)
    assert begun.wait(30)
    flush = threading.Thread(target=engine.flush_cache)
    flush.start()
    while not engine._parts.disk._dropping.is_set():  # type: ignore[union-attr]
        time.sleep(0.001)
    go_on.set()
    flush.join(30)
    assert len(reads) == 1
    assert tokens_of(run_all(engine, []), "a") == cold(asked)
    until(lambda: engine.load().disk_pages_written == 4)
    engine._kv.flush()
    assert answer(engine, asked) == (cold(asked), 256)  # later loads read again
    engine.close()


def test_a_flush_after_a_close_waits_for_no_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_on(folder), [request("a", 300), request("b", 300, "x")]
    for each in asked:
        answer(engine, each)
    engine.close()
    engine, go_on, read = engine_on(folder), threading.Event(), PageFiles.read

    def slow(*args: Any) -> None:
        assert go_on.wait(30)
        read(*args)

    monkeypatch.setattr(PageFiles, "read", slow)
    for each in asked:
        engine.submit(each)
    engine.close()
    flush = threading.Thread(target=engine.flush_cache, daemon=True)
    flush.start()
    go_on.set()
    flush.join(10)
    assert not flush.is_alive()


def test_pages_in_use_are_kept_when_the_oldest_make_room(folder: Path) -> None:
    """Pages are found through those before them: without the first ones the others are lost."""
    engine = engine_on(folder)
    room = 100 * engine._parts.disk._files.record_bytes  # type: ignore[union-attr]
    engine.close()
    engine = engine_on(folder, room=room)
    for number in range(60):
        own = request(f"r{number}", 200, seed=number).prompt_ids
        answer(
            engine,
            dataclasses.replace(request(f"r{number}", 128), prompt_ids=(*request("system", 128).prompt_ids, *own)),
        )
        while not engine._parts.disk._pending.empty():  # type: ignore[union-attr]
            time.sleep(0.001)
    engine.close()
    engine = engine_on(folder, room=room)
    assert answer(engine, request("system", 140))[1] == 128
    engine.close()


def _lost_to_a_full_disk(engine: Engine, start: Request, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _no_space)
        answer(engine, start)
        until(engine._parts.disk._pending.empty)  # type: ignore[union-attr]
        until(lambda: engine.load().disk_pages_missed["write_error"] == 2)


def _lost_to_a_flush(engine: Engine, start: Request, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are in use, so they stay in memory."""
    monkeypatch.setattr(disk_cache, "WRITE_SHARE", 1.0)
    engine.submit(dataclasses.replace(start, stopping=StoppingParams(max_tokens=250, ignore_eos=True)))
    engine.step()
    until(lambda: bool(engine.step()) and engine.load().disk_pages_written >= 2)
    assert engine.flush_cache() == 0
    run_all(engine, [])


def _lost_beside_a_copy(engine: Engine, start: Request, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a flush, which erases the first page while the second one is copied."""
    disk = engine._parts.disk
    assert disk is not None
    places = disk._places
    erased: list[int] = []

    def flushed(page: int, buffer: bytearray) -> Any:
        if disk._written == 1 and not erased:
            erased.append(page)
            disk.erase()
        return places(page, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_places", flushed)
        answer(engine, start)
        until(lambda: bool(erased))


def _lost_with_the_folder(engine: Engine, start: Request, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(engine, start)
    until(lambda: engine.load().disk_pages_written == 2)
    shutil.rmtree(folder)


@pytest.mark.parametrize("lost", [_lost_to_a_full_disk, _lost_to_a_flush, _lost_beside_a_copy, _lost_with_the_folder])
def test_bug_pages_that_left_the_disk_are_written_again_before_those_behind_them(
    folder: Path, lost: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in memory, as those of a system prompt do, and others are found through them."""
    monkeypatch.setattr(disk_cache, "RETRY_S", 0.0)
    start, end = request("start", 140), request("end", 200, seed=2)
    longer = dataclasses.replace(start, request_id="longer", prompt_ids=start.prompt_ids + end.prompt_ids)
    engine = engine_on(folder)
    lost(engine, start, folder, monkeypatch)
    append, written, keys = PageFiles.append, list[bytes](), list[bytes]()

    def noting(files: PageFiles, key: bytes, *rest: Any) -> None:
        append(files, key, *rest)
        written.append(key)

    monkeypatch.setattr(PageFiles, "append", noting)
    assert answer(engine, longer)[1] >= 128
    engine.close()
    extend_keys(keys, longer.prompt_ids, "", 5)
    assert [key for key in written if key in keys] == [key for key in keys if key in written]
    engine = engine_on(folder)
    assert answer(engine, longer) == (cold(longer), 320)
    engine.close()


def test_a_page_that_made_room_for_others_is_not_written_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else prompts that the disk cannot hold together would replace each other with every page of their answers."""
    monkeypatch.setattr(disk_cache, "WRITE_SHARE", 1.0)
    engine = engine_on(folder)
    room = 5 * engine._parts.disk._files.record_bytes  # type: ignore[union-attr]
    engine.close()
    engine = engine_on(folder, room=room)
    for seed in range(4):
        asked = request(f"r{seed}", 250, seed=seed)
        engine.submit(dataclasses.replace(asked, stopping=StoppingParams(max_tokens=190, ignore_eos=True)))
    while engine.has_work():
        engine.step()
        until(engine._parts.disk._pending.empty)  # type: ignore[union-attr]
    engine.close()
    assert engine.load().disk_pages_written == 4 * ((250 + 190 - 1) // 64)


def test_a_resumed_answer_is_read_from_disk_with_its_prompt(folder: Path) -> None:
    engine, asked = engine_on(folder), request("a", 100)
    asked = dataclasses.replace(asked, stopping=StoppingParams(max_tokens=260, ignore_eos=True))
    tokens, _ = answer(engine, asked)
    engine.close()
    engine = engine_on(folder)
    resume = ResumeParams(tuple(tokens[:240]), None, engine.info().numeric_fingerprint)
    rest, _ = answer(engine, dataclasses.replace(asked, resume=resume))
    assert rest == tokens[240:]
    assert engine.load().disk_pages_read == (100 + 240 - 1) // 64
    engine.close()


def test_what_was_evicted_comes_back_from_disk(folder: Path) -> None:
    engine, first = engine_on(folder, pages=8), request("first", 300)
    answer(engine, first)
    engine.close()
    engine = engine_on(folder, pages=8)
    for number in range(3):  # each needs most of the memory
        answer(engine, request(f"other {number}", 400, seed=number + 2))
    assert answer(engine, first) == (cold(first), 256)
    assert engine.load().disk_pages_read == 4
    engine.close()


def test_a_prompt_that_memory_holds_keeps_no_page(folder: Path) -> None:
    engine, asked = engine_on(folder), request("a", 300)
    for _ in range(2):
        answer(engine, asked)
    assert engine.load().free_pages == PAGES
    engine.close()


def test_pages_that_are_read_leave_one_to_each_running_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, first = engine_on(folder, pages=8), request("first", 300)
    answer(engine, first)
    engine.close()
    engine, go_on, read = engine_on(folder, pages=8), threading.Event(), PageFiles.read

    def slow(*args: Any) -> None:
        assert go_on.wait(30)
        read(*args)

    monkeypatch.setattr(PageFiles, "read", slow)
    engine.submit(request("runs", 253, seed=2))
    events = engine.step()
    engine.submit(first)
    for _ in range(20):
        events += engine.step()  # its answer needs a fifth page
    go_on.set()
    events += run_all(engine, [])
    assert [event.usage.preemptions for event in events if isinstance(event, Finished)] == [0, 0]
    engine.close()


def test_prompts_that_begin_alike_read_their_beginning_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart under load. Two end differently and read that part themselves; another salt reads it all."""
    ends = [request(f"end {seed}", 130, seed=seed).prompt_ids for seed in (2, 3)]
    start = request("start", 256)
    alike = [
        *(dataclasses.replace(start, request_id=f"{number}", prompt_ids=(*start.prompt_ids, 5)) for number in range(4)),
        *(dataclasses.replace(start, request_id=f"end {i}", prompt_ids=start.prompt_ids + ends[i]) for i in range(2)),
    ]
    alike.append(dataclasses.replace(alike[0], request_id="salted", cache_salt="other"))
    engine = engine_on(folder)
    run_all(engine, alike)
    engine.close()
    engine, go_on, read = engine_on(folder), threading.Event(), PageFiles.read

    def waits(files: PageFiles, key: bytes, into: bytearray) -> None:
        go_on.wait()
        read(files, key, into)

    monkeypatch.setattr(PageFiles, "read", waits)
    for asked in alike:
        engine.submit(asked)
    held = engine._kv.n_total - engine._kv.n_free
    go_on.set()
    events = run_all(engine, [])
    assert held == 4 + 4  # and not 4 for each
    assert [tokens_of(events, asked.request_id) for asked in alike] == [cold(asked) for asked in alike]
    assert engine.load().disk_pages_read == 4 + 2 + 2 + 4
    assert engine.load().disk_pages_missed == {}
    engine.close()


def test_bug_requests_whose_pages_are_read_wait_until_the_queue_has_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits for the pages of the other, which begins alike. It reads no more pages before it is queued."""
    start, end = request("start", 256), request("end", 130, seed=2)
    longer = dataclasses.replace(start, request_id="longer", prompt_ids=start.prompt_ids + end.prompt_ids)
    engine = engine_on(folder)
    run_all(engine, [longer])
    engine.close()
    engine = engine_on(folder)
    engine.submit(dataclasses.replace(start, prompt_ids=(*start.prompt_ids, 5)))
    engine.submit(longer)
    with monkeypatch.context() as full:
        full.setattr(Scheduler, "is_full", True)
        while engine.load().disk_pages_read < 4:
            assert engine.step() == []
        assert engine.step() == []
        assert engine.load().disk_pages_read == 4
    events = run_all(engine, [])
    assert {event.request_id for event in events if isinstance(event, Finished)} == {"start", "longer"}
    engine.close()


def test_a_read_that_fails_unexpectedly_is_not_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(f"{number}", 300) for number in range(3)]
    engine = engine_on(folder)
    run_all(engine, asked[:1])
    engine.close()
    engine = engine_on(folder)

    def fails(*args: object) -> None:
        raise RuntimeError("the cable fell out")

    monkeypatch.setattr(PageFiles, "read", fails)
    events = run_all(engine, asked)
    assert [tokens_of(events, each.request_id) for each in asked] == [cold(asked[0])] * 3
    engine.close()


def test_a_request_that_is_refused_reads_and_evicts_nothing(folder: Path) -> None:
    engine, first, other = engine_on(folder, pages=8), request("first", 300), request("other", 400, seed=2)
    answer(engine, first)
    engine.close()
    engine = engine_on(folder, pages=8, queued=1)
    answer(engine, other)  # fills most of the memory
    cached = engine._kv.cached_tokens(other.prompt_ids, "")
    engine.submit(request("waits", 10, seed=3))
    with pytest.raises(QueueFullError):
        engine.submit(first)
    assert engine._kv.cached_tokens(other.prompt_ids, "") == cached > 300
    run_all(engine, [])
    assert engine.load().disk_pages_read == 0
    engine.close()


def test_a_prompt_is_computed_if_too_many_requests_wait_for_the_disk(folder: Path) -> None:
    engine, asked = engine_on(folder), [request(f"{seed}", 300, seed=seed) for seed in (1, 2)]
    for each in asked:
        answer(engine, each)
    engine.close()
    engine = engine_on(folder, queued=1)
    engine.submit(asked[0])
    engine.submit(asked[1])
    engine.abort(asked[0].request_id)
    assert tokens_of(run_all(engine, []), asked[1].request_id) == cold(asked[1])
    assert engine.load().prefix_hit_tokens == 0
    engine.close()


def publish(kv: KvCacheManager, seq: PagedTokens) -> None:
    kv.admit(seq)
    seq.n_computed = 69
    kv.publish(seq)


class EvictedWhileCopied:
    """Memory of one tensor. The page of ``seq`` leaves the cache while the writer copies it, and becomes that of
    ``other`` if there is one."""

    shape = (2, PAGES, 8)

    def __init__(self, kv: KvCacheManager, seq: PagedTokens, other: PagedTokens | None) -> None:
        self._kv, self._seq, self._other, self.copied = kv, seq, other, threading.Event()

    def __getitem__(self, at: object) -> NDArray[np.uint8]:
        if not self.copied.is_set():
            self._kv.release(self._seq)
            self._kv.flush()
            if self._other is not None:
                publish(self._kv, self._other)
            self.copied.set()
        return np.ones((2, 8), np.uint8)


@pytest.mark.parametrize("other", [None, PagedTokens(range(9, 79), "")])
def test_a_page_that_is_evicted_while_it_is_copied_is_not_stored(folder: Path, other: PagedTokens | None) -> None:
    kv, seq = KvCacheManager(PAGES, prefix_cache=True), PagedTokens(range(70), "")
    memory = EvictedWhileCopied(kv, seq, other)
    files = PageFiles(folder, "f" * 32, 16, 1 << 20)
    disk = DiskCache(files, kv, [memory])  # type: ignore[list-item]
    publish(kv, seq)
    assert memory.copied.wait(60)
    disk.close()
    stored = [] if other is None else other.page_keys[:1]
    assert [key in files for key in stored] == [True] * len(files)
    load = disk.added_to(EngineLoad())
    assert (load.disk_pages_written, load.disk_pages_missed) == (len(stored), {"evicted": 1})


def _no_space(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, "full")


def _damage(change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    """Change the third page of `request("a", 300)` and those behind it."""
    keys: list[bytes] = []
    extend_keys(keys, request("a", 300).prompt_ids, "", 4)

    def damage(folder: Path) -> None:
        for key in keys[2:]:
            (path,) = folder.glob(f"*/{key.hex()}.page*")
            data = bytearray(path.read_bytes())
            change(data)
            path.write_bytes(data)

    return damage


def _flip(data: bytearray) -> None:
    data[len(data) * 5 // 8] ^= 4


@pytest.mark.parametrize(
    ("damage", "cached", "causes"),
    [
        (_damage(_flip), 128, {"damaged"}),
        (_damage(lambda data: data.__delitem__(slice(len(data) // 2, None))), 128, set()),
        (_damage(lambda data: data.clear()), 128, set()),
        (shutil.rmtree, 0, set()),
        (lambda folder: (folder.rename(folder.with_name("away")), folder.write_text("a file")), 0, {"off"}),
        (lambda folder: [each.chmod(0o777) for each in folder.iterdir()], 0, {"off"}),
    ],
    ids=["flipped", "cut off", "emptied", "removed", "no folder", "open to others"],
)
def test_damage_is_a_miss(folder: Path, damage: Callable[[Path], None], cached: int, causes: set[str]) -> None:
    engine, asked = engine_on(folder), request("a", 300)
    answer(engine, asked)
    engine.close()
    damage(folder)
    engine = engine_on(folder)
    assert answer(engine, asked) == (cold(asked), cached)
    assert set(engine.load().disk_pages_missed) == causes
    engine.close()


def test_files_that_vanish_while_the_engine_runs_are_a_miss(folder: Path) -> None:
    engine, asked = engine_on(folder), request("a", 300)
    answer(engine, asked)
    engine.close()
    engine = engine_on(folder)
    shutil.rmtree(folder)
    assert answer(engine, asked) == (cold(asked), 0)
    assert engine.load().disk_pages_missed["unreadable"] == 1
    engine.close()


def test_a_full_disk_and_a_second_engine_cost_nothing_but_the_pages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = engine_on(folder), request("a", 300)
    second = engine_on(folder)
    assert answer(second, asked) == (cold(asked), 0)
    assert second.load().disk_pages_missed == {"off": 1}
    second.close()
    monkeypatch.setattr(os, "pwrite", _no_space)
    assert answer(engine, asked) == (cold(asked), 0)
    engine.close()
    load = engine.load()
    assert (load.disk_pages_written, load.disk_pages_missed) == (0, {"write_error": 4})


def test_a_close_ends_in_time_and_the_next_engine_may_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, append = engine_on(folder), PageFiles.append

    def slow(files: PageFiles, *args: Any) -> None:
        time.sleep(0.2)
        append(files, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PageFiles, "append", slow)
        patch.setattr(disk_cache, "DRAIN_S", 0.3)
        answer(engine, request("a", 400))
        began_s = time.monotonic()
        engine.close()
        assert time.monotonic() - began_s < 0.2 * 6
        engine._parts.disk._writer.join()  # type: ignore[union-attr]
    load = engine.load()
    assert load.disk_pages_written + load.disk_pages_missed["evicted"] == 6
    assert load.disk_pages_missed["evicted"] > 0
    engine = engine_on(folder)
    assert engine.load().disk_pages_missed == {}
    engine.close()


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    parts = tiny_parts()
    assert EngineConfig().kv_disk_bytes is None
    for room in (None, 0):
        config = parts.config.model_copy(update={"kv_disk_bytes": room, "kv_disk_folder": tmp_path})
        assert open_disk_cache(config, parts.info, KvCacheManager(PAGES, prefix_cache=True), parts.decoder) is None
    assert not list(tmp_path.iterdir())


steps = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 430), st.sampled_from(["", "x"]), st.integers(1, 3)),
    st.sampled_from([("flush",), ("restart",), ("preempt",), ("abort",)]),
)


@settings(max_examples=25)
@given(st.lists(steps, min_size=2, max_size=10), st.sampled_from([1 << 20, 64 << 20]))
def test_tokens_are_those_of_a_cold_run_in_any_order_of_events(actions: list, room: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="specdec-disk-"))
    engine, asked = engine_on(folder, room=room, pages=9), {}
    events = []
    try:
        for number, (kind, *details) in enumerate(actions):
            if kind == "ask":
                length, salt, seed = details
                asked[f"r{number}"] = request(f"r{number}", length, salt, seed, temperature=0.8)
                engine.submit(asked[f"r{number}"])
            elif kind == "flush":
                engine.flush_cache()
            elif kind == "restart":
                events += run_all(engine, [])
                engine.close()
                engine = engine_on(folder, room=room, pages=9)
            elif kind == "preempt":
                engine.preempt_newest()
            elif asked:
                name = next(reversed(asked))
                if engine.abort(name):
                    del asked[name]
            for _ in range(3):
                events += engine.step() if engine.has_work() else []
        events += run_all(engine, [])
        engine.close()
    finally:
        shutil.rmtree(folder)
    for name, one in asked.items():
        assert tokens_of(events, name) == cold(one)


PROMPTS = 8  # asked in turn until the kill
_SERVES = """
import itertools, sys
from pathlib import Path
from tests.engine.test_disk_cache import PROMPTS, answer, engine_on, request
engine = engine_on(Path(sys.argv[1]))
print("open", flush=True)
for number in itertools.count():
    answer(engine, request(f"{number}", 400, seed=int(sys.argv[2]) + number % PROMPTS, temperature=0.8))
"""


@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=(pytest.mark.slow, pytest.mark.timeout(7200)))])
def test_after_kills_at_random_moments_tokens_are_those_of_a_cold_run(folder: Path, kills: int) -> None:
    chance, cached = random.Random(11), 0
    for first in range(0, PROMPTS * kills, PROMPTS):
        words = [sys.executable, "-c", _SERVES, str(folder), str(first)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            with suppress(subprocess.TimeoutExpired):
                process.wait(chance.random() / 2)
            process.kill()
        engine = engine_on(folder)
        assert "off" not in engine.load().disk_pages_missed
        prompts = [request(f"{seed}", 400, seed=seed, temperature=0.8) for seed in range(first, first + PROMPTS)]
        found = [answer(engine, asked)[0] for asked in prompts]
        cached += engine.load().disk_pages_read
        engine.close()
        assert found == [cold(asked) for asked in prompts]
    assert cached
