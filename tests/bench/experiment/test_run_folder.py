"""A run's folder: one experiment, one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.experiment.run_folder import open_run
from server.experiment.folder import Manifest
from server.experiment.records import ExperimentError, Record, RecordWriter
from tests.bench.experiment.plays import STARTED, plan


def manifest(**facts: str) -> Manifest:
    return Manifest(config=plan(), started=STARTED, facts=facts)


def test_attempts_are_counted_and_the_beginning_is_kept(tmp_path: Path) -> None:
    for attempt in range(3):
        later = manifest().model_copy(update={"started": f"2026-12-0{attempt + 1}T00:00:00+00:00"})
        with open_run(tmp_path, later if attempt else manifest()) as folder:
            assert folder.attempt == attempt
            assert folder.manifest.started == STARTED
            assert [record.request for record in folder.log.records] == [str(i) for i in range(attempt)]
            folder.write([Record(str(attempt), "off", 1.0)])


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        open_run(tmp_path, manifest()),
        pytest.raises(ExperimentError, match=r"another process runs this experiment"),
        open_run(tmp_path, manifest()),
    ):
        pass
    with open_run(tmp_path, manifest()):
        pass


def test_another_server_is_another_experiment(tmp_path: Path) -> None:
    with open_run(tmp_path, manifest(target="small")):
        pass
    with (
        pytest.raises(ExperimentError, match=r"facts.target was 'small' and is 'large'"),
        open_run(tmp_path, manifest(target="large")),
    ):
        pass
    with (
        pytest.raises(ExperimentError, match=r"facts.draft was None and is 'x'"),
        open_run(tmp_path, manifest(target="small", draft="x")),
    ):
        pass


def test_records_of_nobody_knows_what(tmp_path: Path) -> None:
    RecordWriter(tmp_path).close()
    with (
        pytest.raises(ExperimentError, match=r"contains records, but no manifest.json"),
        open_run(tmp_path, manifest()),
    ):
        pass


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExperimentError, match=r"give another folder with --out"),
        open_run(tmp_path / "file", manifest()),
    ):
        pass
