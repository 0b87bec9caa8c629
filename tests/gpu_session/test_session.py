"""A session goes on after failures, cut-offs and deaths, continues where it stopped, and names the smallest shape."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from tests.gpu_session import twins
from tests.gpu_session.__main__ import KERNELS, main, plan
from tests.gpu_session.session import RESULT, Session, Task
from tests.gpu_session.wheels import PACKAGES, ROOT, unpack


def script(text: str, *words: str) -> list[str]:
    return [sys.executable, "-c", text, *words]


# Counts in its file, one per start, and dies at 2: a task that continues from its file gets past that.
COUNTING = """
import json, os, pathlib, sys
file = pathlib.Path(sys.argv[1])
done = json.loads(file.read_text())["done"] if file.exists() else 0
file.write_text(json.dumps({"done": done + 1}))
os.utime(file, ns=(1, 1))  # changes may share a time
if done < 2: os.kill(os.getpid(), 9)
"""
FOREVER = "import time\nwhile True: time.sleep(1)"


def run(folder: Path, *tasks: Task, **options: Any) -> dict[str, Any]:
    session = Session(tasks, folder, say=lambda _: None, **options)
    session.run()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report["tasks"]


def test_it_goes_on_after_a_failure(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        Task("checks", "bad", script("import sys; print('what went wrong'); sys.exit(1)")),
        Task("checks", "dies", script("import os; os.abort()")),
        Task("checks", "absent", script(""), program="no-such-sanitizer"),
        Task("checks", "needy", script(""), needs=["no_such_module"]),
        Task("benches", "good", script('print("[3]")'), alone=True),
    )
    assert {name: task["status"] for name, task in found.items()} == {
        "bad": "failed", "dies": "failed", "absent": "skipped", "needy": "skipped", "good": "passed",
    }  # fmt: skip
    assert found["good"]["result"] == [3]
    assert found["bad"]["note"] == "what went wrong"
    assert "no-such-sanitizer" in found["absent"]["note"]
    assert "no_such_module" in found["needy"]["note"]
    assert "| checks | dies | failed |" in (tmp_path / "report.md").read_text()


def test_what_passed_is_not_run_again_and_what_was_skipped_is(tmp_path: Path) -> None:
    count = tmp_path / "count"
    once = Task("checks", "once", script(f"open({str(count)!r}, 'a').write('x')"))
    late = Task("checks", "late", script(""), needs=["no_such_module"])
    run(tmp_path, once, late)
    found = run(tmp_path, once, Task("checks", "late", script("")))
    assert count.read_text() == "x"
    assert found["late"]["status"] == "passed"


def test_a_task_that_dies_continues_from_its_file(tmp_path: Path) -> None:
    found = run(tmp_path, Task("twins", "counting", script(COUNTING, RESULT)))
    assert found["counting"]["status"] == "passed"
    assert found["counting"]["result"] == {"done": 3}


def test_a_report_alone_is_enough_to_continue(tmp_path: Path) -> None:
    """A next run may be on another machine, to which only the report was copied."""
    here, there = tmp_path / "here", tmp_path / "there"
    step = "import sys, time; open(sys.argv[1], 'w').write('[1]'); time.sleep(999)"
    session = Session([Task("a", "long", script(step, RESULT))], here, say=lambda _: None)
    tasks = session.report["tasks"]
    with mock.patch.object(time, "sleep", side_effect=lambda _: tasks["long"]["result"] and session.stop()):
        session.run()
    there.mkdir()
    shutil.copy(here / "report.json", there)
    found = run(there, Task("a", "long", script(CONTINUED, RESULT)))
    assert (found["long"]["status"], found["long"]["result"]) == ("passed", [1, 2])


def test_a_used_up_budget_cuts_off_and_the_next_run_finishes(tmp_path: Path) -> None:
    slow, after = Task("a", "slow", script(FOREVER)), Task("b", "after", script(""))
    found = run(tmp_path, slow, after, budget_s=0.5)
    assert (found["slow"]["status"], found["after"]["status"]) == ("unfinished", "waiting")
    found = run(tmp_path, Task("a", "slow", script("")), after)
    assert (found["slow"]["status"], found["after"]["status"]) == ("passed", "passed")


def test_a_task_over_its_own_limit_fails(tmp_path: Path) -> None:
    found = run(tmp_path, Task("a", "slow", script(FOREVER), limit_s=0.5))
    assert found["slow"]["status"] == "failed"
    assert "more than" in found["slow"]["note"]


KILLED = """
import pathlib, sys
from tests.gpu_session.session import RESULT, Session, Task
case = "import sys, time; open(sys.argv[1], 'w').write('[1]'); time.sleep(999)"
tasks = [Task("a", "first", [sys.executable, "-c", ""]), Task("b", "long", [sys.executable, "-c", case, RESULT])]
session = Session(tasks, pathlib.Path(sys.argv[1]))
session.run()
"""
CONTINUED = "import json, sys; assert json.load(open(sys.argv[1])) == [1]; open(sys.argv[1], 'w').write('[1, 2]')"


def test_a_killed_session_leaves_nothing_running_and_is_continued(tmp_path: Path) -> None:
    session = subprocess.Popen(script(KILLED, str(tmp_path)), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    assert [session.stdout.readline() for _ in range(3)][-1] == "long: started\n"
    part = tmp_path / "parts" / "long.json"
    while not part.exists() or part.read_text() != "[1]":
        time.sleep(0.02)
    (child,) = psutil.Process(session.pid).children()
    session.kill()
    session.wait()
    child.wait()
    report = json.loads((tmp_path / "report.json").read_text())["tasks"]
    assert (report["first"]["status"], report["long"]["status"]) == ("passed", "unfinished")
    after = run(tmp_path, Task("a", "first", script("")), Task("b", "long", script(CONTINUED, RESULT)))
    assert (after["first"]["starts"], after["long"]["starts"]) == (1, 2)
    assert (after["long"]["status"], after["long"]["result"]) == ("passed", [1, 2])


def test_a_signal_writes_the_report(tmp_path: Path) -> None:
    session = Session([Task("a", "slow", script(FOREVER))], tmp_path, say=lambda _: None)
    with mock.patch.object(time, "sleep", side_effect=lambda _: session.stop()):
        assert not session.run()
    assert json.loads((tmp_path / "report.json").read_text())["tasks"]["slow"]["status"] == "unfinished"


def broken(case: int, how: str, device: torch.device) -> twins.Cases:
    """Six cases of growing shape, of which those from ``case`` on are wrong in one way."""
    for size in range(1, 7):
        calls: list[int] = []

        def launch(twin: bool, size: int = size, calls: list[int] = calls) -> dict[str, torch.Tensor]:
            calls.append(0)
            out = torch.ones(size)
            if not twin and size >= case:
                if how == "value":
                    out[-1] = 1.5
                elif how == "nan":
                    out[-1] = torch.nan
                elif how == "scratch":
                    out[-1] += len(calls) * 1e-6
                elif how == "dies":
                    if size == case:
                        os._exit(9)
                else:
                    raise RuntimeError("planted")
            return {"out": out}

        yield twins.Case(f"size {size}", launch)


@pytest.mark.parametrize(
    ("how", "words"),
    [("value", "differs from its twin"), ("nan", "inf"), ("scratch", "filled with NaN"), ("raises", "planted")],
)
def test_the_smallest_shape_that_fails_is_named(tmp_path: Path, how: str, words: str) -> None:
    file = tmp_path / "kernel.json"
    with mock.patch.dict(twins.KERNELS, {"planted": lambda device: broken(4, how, device)}):
        assert not twins.run_cases("planted", torch.device("cpu"), file)
    report = json.loads(file.read_text())
    assert (report["passed"], report["failed"]) == (3, 3)
    assert report["smallest_failing"]["shape"] == "size 4"
    assert words in report["smallest_failing"]["message"]


def test_a_case_that_kills_the_process_is_named_and_the_others_run(tmp_path: Path) -> None:
    text = (
        "import sys; from unittest import mock; from tests.gpu_session import twins; "
        "from tests.gpu_session.test_session import broken; "
        "twins.KERNELS['planted'] = lambda device: broken(5, 'dies', device); "
        "sys.argv = ['twins', 'planted', '--json', sys.argv[1]]; sys.exit(twins.main())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = run(tmp_path, Task("twins", "planted", script(text, RESULT)), environment=environment)["planted"]
    assert found["status"] == "failed"
    assert [case["status"] for case in found["result"]["cases"]] == ["passed"] * 4 + ["failed", "passed"]
    assert "| planted | size 5 | the process died or hung |" in (tmp_path / "report.md").read_text()


def test_every_kernel_has_twins_and_every_task_of_a_gpu_its_stage() -> None:
    assert set(KERNELS) == set(twins.KERNELS)
    tasks = plan(True, 100)
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names)
    stages = list(dict.fromkeys(task.stage for task in tasks))
    assert stages == ["self-test", "twins", "sanitizer", "poison", "verify", "benches", "engine", "tests"]
    assert all(task.alone for task in tasks if task.stage in ("benches", "engine"))


def test_an_unknown_stage_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--stage", "no-such"])
    assert "no-such" in capsys.readouterr().err


def test_twins_import_only_what_torch_brings() -> None:
    """Kernels are checked also where no wheel was carried along."""
    text = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in BLOCKED: raise ModuleNotFoundError(name, name=name)\n"
        f"BLOCKED = {sorted(name.replace('-', '_') for name in PACKAGES if name not in ('psutil', 'pygments'))!r}\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import tests.gpu_session.twins, bench.kernels.attention\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script(text), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LOADED = """
import importlib, json, sys
for module in sys.argv[1:]: importlib.import_module(module)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
TRIED = {"grpc_tools"}  # packages that grpc imports where they are installed


def with_their_needs(packages: Iterable[str]) -> set[str]:
    """Names of installed packages and of all that they require."""
    found, waiting = set(), list(packages)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            with contextlib.suppress(PackageNotFoundError):
                waiting += [re.split(r"[^\w.-]", need)[0] for need in requires(name) or [] if "extra ==" not in need]
    return found


def test_tasks_import_only_what_is_on_the_machine_or_among_the_wheels() -> None:
    modules = ("bench.engine_session", "bench.path_identity", "bench.kernels.kernel_bench", "tests.gpu_session.models")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script(LOADED, *modules), env=environment, capture_output=True, text=True, check=True)
    there = with_their_needs(("torch", "triton", "numpy", "transformers")) | {name.lower() for name in PACKAGES}
    owners = packages_distributions()
    loaded = {module: owners[module] for module in json.loads(done.stdout) if module in owners}
    missing = {
        module
        for module, packages in loaded.items()
        if not there.intersection(package.lower().replace("_", "-") for package in packages)
    }
    assert missing - TRIED - {"specdec"} == set()


def test_only_missing_packages_are_unpacked(tmp_path: Path) -> None:
    for name, member in (
        ("absent_package-1.0-py3-none-any.whl", "absent_package/__init__.py"),
        ("namespace_part-1.0-py3-none-any.whl", "google/namespace_part.py"),
        ("torch-9.9-py3-none-any.whl", "torch/__init__.py"),
        ("grpcio-999.0-cp310-abi3-linux_x86_64.whl", "grpc/__init__.py"),
        ("other_python-1.0-cp27-cp27m-linux_x86_64.whl", "other_python.py"),
    ):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(member, "")
    site = tmp_path / "site"
    taken = unpack(tmp_path, site)
    assert [name.split("-")[0] for name in taken] == ["absent_package", "grpcio", "namespace_part"]
    assert (site / "absent_package" / "__init__.py").exists()
