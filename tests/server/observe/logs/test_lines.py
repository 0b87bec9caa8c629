"""Log lines: one per record, whatever it contains."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.observe.logs import JsonLines, TextLines, configure_logs
from tests.server.observe.logs.capture import format_one, logged


@given(
    st.text(), st.dictionaries(st.text(min_size=1).filter(lambda t: t not in ("time", "level", "logger")), st.text())
)
def test_any_text_is_one_json_line(message: str, fields: dict[str, str]) -> None:
    line = format_one(message.replace("%", "%%"), **fields)
    assert line | fields == line
    assert "\n" not in json.dumps(line)


@given(st.text())
def test_no_text_writes_control_characters_to_a_terminal(value: str) -> None:
    record = logging.LogRecord("l", logging.INFO, "f", 1, "m", (), None)
    record.fields = {"given": value}
    line = TextLines().format(record)
    assert not [c for c in line if (ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160 or c in "\u2028\u2029"]


def test_text_from_callers_cannot_control_a_terminal() -> None:
    """C1 controls act like an escape and a letter: U+009B starts a sequence."""
    sent = "a\x1b[2J\x7f\x85\x9b31m\u2028b"
    record = logging.LogRecord("l", logging.INFO, "f", 1, "m", (), None)
    record.fields = {"given": sent}
    formatted = TextLines().format(record), JsonLines().format(record)
    for line in formatted:
        assert line.isprintable()
    assert json.loads(formatted[1])["given"] == sent  # unchanged for readers of the JSON
    assert r"\x9b31m" in formatted[0]


def test_exceptions_are_part_of_their_line() -> None:
    with logged() as lines:
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("x").exception("went wrong")
        (line,) = lines.all
    assert line["message"] == "went wrong"
    assert "ValueError: broken" in line["exception"]
    assert line["level"] == "error"


def test_a_reader_that_stops_loses_lines_and_blocks_no_caller() -> None:
    """As a log shipper that hangs, `| less`, or Ctrl-S in a terminal."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 16)
    with os.fdopen(writing, "w") as stream, logged(), os.fdopen(reading) as reader:
        configure_logs("json", logging.INFO, stream)
        logger = logging.getLogger("x")

        def write() -> None:
            for n in range(2000):
                logger.info("line %d", n)

        caller = Thread(target=write, daemon=True)
        caller.start()
        caller.join(timeout=10)
        assert not caller.is_alive()
        found = [reader.readline() for _ in range(100)]  # room again
        for n in range(3):
            logger.info("again %d", n)
        stream.close()
        found += reader
    messages = [json.loads(line)["message"] for line in found]
    reason = "log lines were lost, because the output was not read"
    [at] = [n for n, message in enumerate(messages) if message == f"{2000 - n} {reason}"]
    assert messages[:at] == [f"line {n}" for n in range(at)]
    assert messages[at + 1 :] == ["again 0", "again 1", "again 2"]


def test_a_long_line_is_cut_where_the_reader_stops() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 16)
    with os.fdopen(writing, "w") as stream, logged(), os.fdopen(reading) as reader:
        configure_logs("json", logging.INFO, stream)
        text = "é" * 14_000

        def write() -> None:
            for _ in range(5):
                logging.getLogger("x").info(text)

        caller = Thread(target=write, daemon=True)
        caller.start()
        caller.join(timeout=10)
        assert not caller.is_alive()
        found = [reader.readline(), reader.readline()]
        logging.getLogger("x").info(text)
        stream.close()
        found += reader
    assert [json.loads(line)["message"] for line in found[:2] + found[-1:]] == [text] * 3
    *_, cut, warning, last = found
    assert len(cut) < len(last)
    assert json.loads(warning)["message"] == "3 log lines were lost, because the output was not read"


@pytest.mark.parametrize(("encoding", "letter"), [("latin-1", "\U0001f600"), ("utf-8", "\udcff"), ("utf-8", "a")])
def test_bug_characters_that_are_escaped_were_longer_than_a_pipe_takes(encoding: str, letter: str) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    stream = io.TextIOWrapper(os.fdopen(writing, "wb"), encoding, "backslashreplace", line_buffering=True)
    with stream, logged(), os.fdopen(reading, "rb"):
        configure_logs("json", logging.INFO, stream)
        caller = Thread(target=logging.getLogger("x").info, args=(letter * 15_000,), daemon=True)
        caller.start()
        caller.join(timeout=5)
        assert not caller.is_alive()


def test_a_terminal_gets_text_and_other_outputs_json() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, is_json in ((Terminal(), False), (io.StringIO(), True)):
        with logged():
            configure_logs("auto", logging.INFO, stream)
            logging.getLogger("x").info("hello", extra={"fields": {"a": 1.5, "b": "two words"}})
            logging.getLogger("x").debug("not asked for")
        text = stream.getvalue()
        assert text.count("\n") == 1
        if is_json:
            assert json.loads(text)["a"] == 1.5
        else:
            assert text.endswith("INFO x: hello a=1.5 b='two words'\n")
