"""Pages on disk: what is read is what was written for the same tokens, or nothing, whatever happened to the files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.kv_cache import page_key, root_key
from specdec.engine import page_files
from specdec.engine.page_files import DamagedPageError, PageFiles

PAYLOAD, MODEL, OTHER = 396, "ab" * 16, "cd" * 16
ROOM = 1 << 16
FILES = f"*/*{page_files._SUFFIX}"


def page(number: int, salt: str = "") -> bytes:
    return page_key(root_key(salt), [number] * 64)


def content(each: bytes) -> bytes:
    return random.Random(each).randbytes(PAYLOAD)


def write(files: PageFiles, each: bytes, in_use: Container[bytes] = ()) -> None:
    buffer = files.buffer()
    files.payload(buffer)[:] = content(each)
    files.append(each, buffer, in_use)


def readable(files: PageFiles, each: bytes) -> bool:
    """Whether the page can be read; wrong content fails the test."""
    buffer = files.buffer()
    try:
        files.read(each, buffer)
    except (KeyError, OSError, DamagedPageError):
        assert each not in files
        return False
    assert bytes(files.payload(buffer)) == content(each)
    return True


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="specdec-pages-"))
    yield path
    shutil.rmtree(path)


def opened(folder: Path, fingerprint: str = MODEL, room: int = ROOM) -> PageFiles:
    return PageFiles(folder, fingerprint, PAYLOAD, room)


pages = st.builds(page, st.integers(0, 30), st.sampled_from(["", "x"]))
accidents = st.sampled_from(["none", "cut", "flip", "extend", "swap"])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(pages, max_size=12), accidents, st.randoms()), min_size=1, max_size=4))
def test_any_damage_between_runs_costs_pages_and_nothing_else(runs: list) -> None:
    folder = Path(tempfile.mkdtemp(prefix="specdec-pages-"))
    sound = True
    try:
        for batch, accident, chance in runs:
            files = opened(folder)
            for each in batch:
                write(files, each)
                assert readable(files, each)
            written = set(batch)
            files.close()
            stored = sorted(folder.glob(FILES))
            if stored and accident != "none":
                sound = False
                damage(chance.choice(stored), accident, chance)
            files = opened(folder)
            for number in range(31):
                for salt in ("", "x"):
                    found = readable(files, page(number, salt))
                    assert found or not sound or page(number, salt) not in written
            files.close()
    finally:
        shutil.rmtree(folder)


def damage(path: Path, accident: str, chance: random.Random) -> None:
    """Change a file as a crash, a bad disk or a stranger might."""
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    if accident == "cut":
        del data[at:]
    elif accident == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif accident == "extend":
        data += bytes(chance.randrange(1000))
    else:
        half = len(data) // 2
        data[half:], data[:half] = data[:half], data[half:]
    path.write_bytes(data)


def test_the_record_of_another_page_is_not_read(folder: Path) -> None:
    files, other = opened(folder), page(1, "x")
    write(files, page(1))
    assert readable(files, page(1))
    assert other not in files
    files._path(page(1)).rename(files._path(other))
    files._keys[other] = None
    assert not readable(files, other)
    files.close()


def test_another_model_finds_nothing_and_the_oldest_pages_make_room(folder: Path) -> None:
    first = opened(folder)
    for number in range(40):
        write(first, page(number))
    first.close()
    second = opened(folder, OTHER, room=ROOM // 2)
    assert not any(readable(second, page(number)) for number in range(40))
    for number in range(100, 300):
        write(second, page(number))
    assert [path.name for path in (folder / MODEL).iterdir()] == ["lock"]
    total = sum(path.stat().st_size for path in folder.glob(FILES))
    assert total == second.n_bytes <= ROOM // 2
    kept = [number for number in range(100, 300) if readable(second, page(number))]
    assert kept == list(range(300 - len(kept), 300))


def test_a_lower_bound_is_kept_from_the_start(folder: Path) -> None:
    files = opened(folder, room=64 * ROOM)
    for number in range(200):
        write(files, page(number))
    assert files.n_bytes > ROOM
    files.close()
    files = opened(folder)
    assert files.n_bytes == sum(path.stat().st_size for path in folder.glob(FILES)) <= ROOM
    write(files, page(1))
    assert readable(files, page(1))
    files.close()


def test_a_bound_below_two_pages_is_refused_with_what_they_need(folder: Path) -> None:
    files = opened(folder)
    files.close()
    size = files.record_bytes
    with pytest.raises(ValueError, match=f"two pages need {2 * size} bytes on disk, so {2 * size - 1} are too few"):
        opened(folder, room=2 * size - 1)
    opened(folder, room=2 * size).close()


def test_folders_and_files_of_others_are_left_alone(folder: Path) -> None:
    """`kv_disk_folder` may be any folder, such as the user's own."""
    document, notes = folder / "Documents" / "thesis.pages", folder / OTHER / "notes.pages"
    for path in (document, notes):
        path.parent.mkdir()
        path.write_bytes(bytes(ROOM))
    files = opened(folder)
    for number in range(200):
        write(files, page(number))
    assert (document.stat().st_size, notes.stat().st_size) == (ROOM, ROOM)
    assert [path.name for path in document.parent.iterdir()] == ["thesis.pages"]
    assert ROOM // 2 < files.n_bytes <= ROOM
    files.close()


def test_pages_of_a_former_layout_are_removed(folder: Path) -> None:
    for fingerprint in (MODEL, OTHER):
        opened(folder, fingerprint).close()
        for name in ("0000000001.pages", f"{page(1).hex()}.page5"):
            (folder / fingerprint / name).write_bytes(bytes(1000))
    files = opened(folder)
    assert (len(files), list((folder / MODEL).glob("*.page*"))) == (0, [])
    for number in range(200):
        write(files, page(number))
    assert not list((folder / OTHER).glob("*.page*"))
    assert files.n_bytes == sum(path.stat().st_size for path in folder.glob(FILES))
    files.close()


def test_files_are_private_and_belong_to_one_process(folder: Path) -> None:
    files = opened(folder)
    write(files, page(1))
    modes = {path.stat().st_mode & 0o777 for path in (folder / MODEL).iterdir()}
    assert modes == {0o600}
    assert (folder / MODEL).stat().st_mode & 0o777 == 0o700
    with pytest.raises(BlockingIOError):
        opened(folder)
    files.close()
    (folder / MODEL).chmod(0o755)
    with pytest.raises(PermissionError):
        opened(folder)


def test_erased_pages_are_gone_for_good(folder: Path) -> None:
    files = opened(folder)
    for number in range(50):
        write(files, page(number, "x" * (number % 2)))
    files.erase()
    assert not list(folder.glob(FILES))
    assert (len(files), files.n_bytes) == (0, 0)
    write(files, page(7))
    files.close()
    files = opened(folder)
    assert [number for number in range(50) if readable(files, page(number))] == [7]


def test_a_full_disk_leaves_what_was_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, real = opened(folder), os.pwrite
    write(files, page(1))

    def half(descriptor: int, data: bytes, offset: int) -> int:
        real(descriptor, bytes(data)[: len(data) // 2], offset)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="full"):
        write(files, page(2))
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, bytes(data)[:9], offset))
    with pytest.raises(OSError, match="only 9 of"):
        write(files, page(2))
    monkeypatch.undo()
    assert page(2) not in files
    write(files, page(3))
    files.close()
    files = opened(folder)
    assert [number for number in range(5) if readable(files, page(number))] == [1, 3]


def test_bug_a_folder_that_was_removed_meanwhile_is_made_again(folder: Path) -> None:
    """What is computed from then on is on disk at the next start."""
    files = opened(folder)
    for number in range(3):
        write(files, page(number))
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        write(files, page(3))
    write(files, page(3))
    assert [number for number in range(4) if page(number) in files] == [3]
    assert files.n_bytes == files.record_bytes
    write(files, page(0))
    with pytest.raises(BlockingIOError):  # it is owned like the former one
        opened(folder)
    files.close()
    assert [each.stat().st_mode & 0o777 for each in (folder, folder / MODEL)] == [0o700, 0o700]
    files = opened(folder)
    assert [number for number in range(4) if readable(files, page(number))] == [0, 3]
    files.close()


def write_until_killed(folder: Path) -> int:
    """The id of a child process that writes pages without end."""
    child = os.fork()
    if child:
        return child
    try:
        files = opened(folder)
        for number in range(10**9):
            write(files, page(number % 200, "xy"[number // 7 % 2]))
    finally:
        os._exit(1)


@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_killed_while_it_writes_leaves_only_whole_pages(folder: Path, kills: int) -> None:
    chance, found = random.Random(3), 0
    for _ in range(kills):
        writer = write_until_killed(folder)
        time.sleep(chance.random() * 0.02)
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        files = opened(folder)
        found += sum(readable(files, page(number, salt)) for number in range(200) for salt in "xy")
        files.close()
    assert found


def test_a_damaged_page_is_forgotten_and_its_next_copy_outlives_it(folder: Path) -> None:
    files = opened(folder)
    write(files, page(0))
    (first,) = folder.glob(FILES)
    first.write_bytes(first.read_bytes()[:-1] + b"\0")
    assert not readable(files, page(0))
    assert not first.exists()
    for number in range(1, 20):
        write(files, page(number))
    write(files, page(0))
    fresh = 20
    while page(19) in files:
        assert readable(files, page(0))
        write(files, page(fresh))
        fresh += 1
    files.close()


def test_pages_in_use_outlive_older_and_newer_ones_and_a_restart(folder: Path) -> None:
    files, in_use = opened(folder), {page(0), page(7)}
    for number in range(400):
        write(files, page(number), in_use)
        if number % 16 == 0:  # the next start reads the order from times of files, of which many writes share one
            time.sleep(0.012)
    files.close()
    files = opened(folder)
    for number in range(400, 450):
        write(files, page(number))
    assert all(readable(files, each) for each in in_use)
    assert files.n_bytes == sum(path.stat().st_size for path in folder.glob(FILES)) <= ROOM
    files.close()


def test_erased_pages_leave_no_open_file(folder: Path) -> None:
    files = opened(folder)
    write(files, page(0))
    files.erase()
    targets = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    pages = [target for target in targets if str(folder) in target and page_files._SUFFIX in target]
    assert not pages  # else its space would not be free
    write(files, page(0))
    assert readable(files, page(0))
    files.close()
