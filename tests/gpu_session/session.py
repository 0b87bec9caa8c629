"""Runs tasks as processes, stage by stage, under a budget of time; the report is also the state to continue from."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.child_python import die_with_parent
from tests.gpu_session.report import markdown

RESULT = "{json}"  # word of a command that stands for the file of its result
POLL_S = 0.1
TAIL = 2000  # last characters of a failed task's output that the report keeps
MOST_DEATHS = 40  # processes of one task that may die, each after some progress
MOST_STARTS = 3  # runs in which a task may be cut off
DONE = ("passed", "failed")


@dataclass(frozen=True, slots=True)
class Task:
    """A command. It may write its result, JSON, to the file `RESULT`, or print it.

    Exit code 0: passed; 1: failed. Any other code is a death: a task that has progressed is started again and continues
    from its file.
    """

    stage: str
    name: str
    command: Sequence[str]
    limit_s: float = 540.0
    needs: Sequence[str] = ()  # modules that it imports beyond torch, triton, numpy and transformers
    program: str = ""  # that must be on the PATH
    alone: bool = False  # whether it measures time, so that nothing may run beside it


class _Running:
    """A task's process, its output and its file."""

    def __init__(self, task: Task, folder: Path, state: dict[str, Any], environment: Mapping[str, str]) -> None:
        self.task, self._state = task, state
        stem = "".join(c if c.isalnum() else "-" for c in task.name)
        self._file, self._log = folder / f"{stem}.json", folder / f"{stem}.log"
        self._own_file = RESULT in task.command
        if state["starts"] == 1 or not self._own_file:
            self._file.unlink(missing_ok=True)
        elif not self._file.exists() and state["result"] is not None:  # the earlier run was on another machine
            self._file.write_text(json.dumps(state["result"]), encoding="utf-8")
        self._read = self._file.stat().st_mtime_ns if self._file.exists() else 0
        self.news = False  # whether the last poll found another result
        command = [str(self._file) if word == RESULT else word for word in task.command]
        self._before = json.dumps(state.get("result"))
        with self._log.open("wb") as log, (self._log if self._own_file else self._file).open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=dict(environment),
                start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        self.began = time.monotonic()

    def poll(self) -> int | None:
        """The exit code, or None while the process runs; takes over what its file says."""
        code = self._process.poll()
        self.news = False
        if self._file.exists() and (self._own_file or code is not None):
            changed = self._file.stat().st_mtime_ns
            # At the end in any case: the time of a file's last change is too coarse to show each change.
            if changed != self._read or code is not None:
                # A task that prints lines for people has no result, nor has a file that is being written.
                with contextlib.suppress(ValueError):
                    self._state["result"] = json.loads(self._file.read_text(encoding="utf-8"))
                    self._read, self.news = changed, True
        return code

    @property
    def progressed(self) -> bool:
        return json.dumps(self._state.get("result")) != self._before

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def tail(self) -> str:
        """The end of what the task printed: of its errors, else of its output."""
        files = [self._log] if self._own_file else [self._log, self._file]
        texts = (file.read_text(encoding="utf-8", errors="replace").strip() for file in files)
        return next(filter(None, texts), "")[-TAIL:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.poll()


class Session:
    """Runs ``tasks`` whose state in ``folder``/report.json is neither passed nor failed, in order of their stages.

    jobs: tasks at a time. budget_s: seconds after which running tasks are cut off; the next session starts them again.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        folder: Path,
        *,
        jobs: int = 1,
        budget_s: float | None = None,
        facts: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], Any] = print,
    ) -> None:
        self._tasks, self._folder, self._jobs, self._say = tasks, folder, jobs, say
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._environment = os.environ if environment is None else environment
        self._parts = folder / "parts"
        self._parts.mkdir(parents=True, exist_ok=True)
        self._file = folder / "report.json"
        self.report: dict[str, Any] = {"facts": {}, "runs": 0, "tasks": {}}
        if self._file.exists():
            self.report = json.loads(self._file.read_text(encoding="utf-8"))
        self.report["runs"] += 1
        self.report["facts"] |= facts or {}
        self._stopped = False

    def run(self) -> bool:
        """Returns whether every task passed or was skipped."""
        for stage in dict.fromkeys(task.stage for task in self._tasks):
            self._run_stage([task for task in self._tasks if task.stage == stage])
            self.save()
        states = [self._state(task)["status"] for task in self._tasks]
        return all(status in ("passed", "skipped") for status in states)

    def stop(self) -> None:
        """Cut off what runs, as if the budget were used up. Safe in a signal handler."""
        self._stopped = True

    def save(self) -> None:
        """Write report.json and report.md."""
        for name, text in (("report.json", json.dumps(self.report, indent=1)), ("report.md", markdown(self.report))):
            partial = self._folder / f"{name}.partial"
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(self._folder / name)

    def _over(self) -> bool:
        return self._stopped or (self._deadline is not None and time.monotonic() >= self._deadline)

    def _state(self, task: Task) -> dict[str, Any]:
        fresh = {"stage": task.stage, "status": "waiting", "seconds": 0.0, "starts": 0, "note": "", "result": None}
        state: dict[str, Any] = self.report["tasks"].setdefault(task.name, fresh)
        return state

    def _run_stage(self, tasks: Sequence[Task]) -> None:
        waiting = [task for task in tasks if self._state(task)["status"] not in DONE and self._can_run(task)]
        running: list[_Running] = []
        while running or (waiting and not self._over()):
            while waiting and not self._over() and len(running) < (1 if waiting[0].alone else self._jobs):
                running.append(self._start(waiting.pop(0)))
            for child in list(running):
                code = child.poll()
                if child.news:
                    self.save()
                if code is not None or self._over() or child.seconds > child.task.limit_s:
                    running.remove(child)
                    if self._ended(child, code):
                        waiting.insert(0, child.task)
                    self.save()
            time.sleep(POLL_S)

    def _can_run(self, task: Task) -> bool:
        state = self._state(task)
        missing = [name for name in task.needs if not self._has_module(name)]
        absent = task.program and shutil.which(task.program, path=self._environment.get("PATH")) is None
        if missing or absent:
            what = f"Python lacks {', '.join(missing)}: see --wheels" if missing else f"{task.program} is not installed"
            state |= {"status": "skipped", "note": what}
            self._say(f"{task.name}: skipped, {what}")
        return not (missing or absent)

    def _has_module(self, name: str) -> bool:
        return importlib.util.find_spec(name) is not None

    def _start(self, task: Task) -> _Running:
        state = self._state(task)
        state |= {"status": "unfinished", "starts": state["starts"] + 1}
        self.save()
        self._say(f"{task.name}: started")
        return _Running(task, self._parts, state, self._environment)

    def _ended(self, child: _Running, code: int | None) -> bool:
        """Judge a process that ended, or end it; returns whether its task is to be started again."""
        task, state = child.task, self._state(child.task)
        if code is None:
            late = child.seconds > task.limit_s
            child.kill()
            status, note = ("failed", f"took more than {task.limit_s:.0f} s") if late else ("unfinished", "cut off")
            if not late and state["starts"] >= MOST_STARTS and not child.progressed:
                status, note = "failed", f"cut off in {MOST_STARTS} runs"
        elif code in (0, 1):
            status, note = ("passed", "") if code == 0 else ("failed", child.tail())
        elif child.progressed and state["starts"] < MOST_DEATHS:
            self._say(f"{task.name}: died ({code}), continues with the next case")
            state["seconds"] += child.seconds
            return True
        else:
            status, note = "failed", f"died ({code}): {child.tail()}"
        state |= {"status": status, "note": note, "seconds": round(state["seconds"] + child.seconds, 1)}
        self._say(f"{task.name}: {status} after {child.seconds:.0f} s {note.splitlines()[-1] if note else ''}".rstrip())
        return False


def python(module: str, *words: str) -> list[str]:
    """The command that runs ``module`` with this Python, from the checkout."""
    return [sys.executable, "-W", "ignore", "-m", module, *words]
