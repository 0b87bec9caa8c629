"""The files in deploy/ fit the program: names, ports, flags, times."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import specdec
from server.observe.records import RequestRecord
from specdec.cli.serve import serve_command
from specdec.config import ServerConfig
from specdec.core.types import Delta, Finished, FinishReason, Request, SpeculationStats, Timings, Usage
from tests.server.http.harness import running
from tests.server.observe.metrics.scrape import Scrape

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\b(specdec_[a-z0-9_]+|process_[a-z_]+)")
LABELS = re.compile(r"\b(?:by|ignoring) \(([^)]*)\)|\{([^}]*)\}")
BUILT_IN = {"le", "instance", "job"}


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/specdec.json").read_text())
    return found


def queries() -> Iterator[str]:
    for panel in board()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    yield from (a["expr"] for a in board()["annotations"]["list"])
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


def test_every_query_uses_exported_metrics(exported: Scrape) -> None:
    names = exported.names()
    found = [name for query in queries() for name in METRIC.findall(query)]
    assert len(found) > 50
    assert not [name for name in found if name not in names]


def test_every_threshold_is_used_by_an_alert() -> None:
    thresholds = yaml.safe_load((DEPLOY / "prometheus/thresholds.yml").read_text())
    names = [rule["record"] for group in thresholds["groups"] for rule in group["rules"]]
    used = re.findall(r"specdec:\w+:\w+", (DEPLOY / "prometheus/alerts.yml").read_text())
    assert sorted(names) == sorted(used)


def test_the_documents_list_every_alert() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    text = (DEPLOY.parent / "docs/operations.md").read_text().split("## Alerts")[1].split("\n## ")[0]
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(re.findall(r"`(Specdec\w+)`", text)) == alerts, "list them in docs/operations.md"
    thresholds = yaml.safe_load((DEPLOY / "prometheus/thresholds.yml").read_text())
    documented = dict(re.findall(r"`(specdec:\w+:\w+)` ([\d.]+)", text))
    assert documented == {rule["record"]: rule["expr"] for group in thresholds["groups"] for rule in group["rules"]}


def test_the_documents_list_the_exported_metrics(exported: Scrape) -> None:
    text = (DEPLOY.parent / "docs/operations.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    listed = {re.sub(r"\{.*", "", name) for name in re.findall(r"`([^`]+)`", cells)}
    families = {name.removeprefix("specdec_") for name in exported.families if name.startswith("specdec_")}
    families = {name for name in families if not name.startswith("engine_process_")}
    assert {name.removesuffix("_total") for name in listed if not name.endswith("*")} - families == set()
    unlisted = families - {name.removesuffix("_total") for name in listed}
    assert not unlisted, "list them in docs/operations.md"


def test_every_label_of_a_query_is_one_of_its_metrics(exported: Scrape) -> None:
    labels: dict[str, set[str]] = {}
    for family in exported.families.values():
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for query in queries():
        known = BUILT_IN.union(*(labels[name] for name in METRIC.findall(query)))
        for grouped, selected in LABELS.findall(query):
            used_labels = (
                [part.strip() for part in grouped.split(",")] if grouped else re.findall(r"(\w+)\s*=~?", selected)
            )
            assert set(used_labels) <= known, query


def test_bug_cancelled_answers_raised_the_tokens_per_step() -> None:
    """Two tokens per step: in answers that end, and in those that their callers leave."""
    with running() as server:
        for ends in (True, False):
            record = RequestRecord(Request("r", (1,)), None, server.serving._observer.metrics, lambda record: None)
            for _ in range(4):
                record.saw(Delta("r", 0, [1, 2], "ab"))
            if ends:
                stats = SpeculationStats(num_steps=4, num_spec_steps=4)
                record.saw(Finished("r", 0, FinishReason.LENGTH, None, Usage(1, 0, 8), stats, Timings()))
            record.ended(ends)
        found = Scrape(server.client.get("/metrics").text)
    (panel,) = (panel for panel in board()["panels"] if panel["title"] == "Tokens per step of a sample")
    rates = re.findall(r"rate\((\w+)\{", panel["targets"][0]["expr"])
    tokens, steps = (sum(s.value for f in found.families.values() for s in f.samples if s.name == n) for n in rates)
    assert tokens / steps == 2


def test_queries_are_balanced_and_panels_do_not_overlap() -> None:
    for query in queries():
        for opening, closing in ("()", "[]", "{}"):
            assert query.count(opening) == query.count(closing), query
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def serve_flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_bug_the_documents_build_the_images_that_are_deployed() -> None:
    places = [*DEPLOY.rglob("*"), *(DEPLOY.parent / "docs").glob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in places if path.is_file()]
    built = {tag for text in texts for tag in re.findall(r"docker build \S.* -t (\S+) \.", text)}
    deployed = {tag for text in texts for tag in re.findall(r"image: (specdec\S*)", text)}
    assert built == deployed == {f"specdec:{specdec.__version__}", f"specdec-cluster:{specdec.__version__}"}


def known_flags() -> set[str]:
    return {flag for option in serve_command.params for flag in (*option.opts, *option.secondary_opts)}


def test_the_image_runs_the_server_without_root_and_has_a_health_check() -> None:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert sum(line.startswith("FROM ") for line in lines) == 2
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    (user,) = [line for line in last if line.startswith("USER ")]
    assert user.split()[1] not in ("0", "root")
    (check,) = [line for line in last if line.startswith("HEALTHCHECK ")]
    defaults = ServerConfig()
    assert f"127.0.0.1:{defaults.http_port}/livez" in check
    assert f"EXPOSE {defaults.grpc_port} {defaults.http_port}" in last
    (entry,) = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in last if line.startswith("ENTRYPOINT ")]
    (command,) = [json.loads(line.removeprefix("CMD ")) for line in last if line.startswith("CMD ")]
    assert entry[:4] == ["tini", "--", "specdec", "serve"]  # process 1 would ignore a SIGTERM until Python handles it
    assert any("apt-get install" in line and " tini " in line for line in last)
    assert serve_flags([*entry[2:], *command]) <= known_flags()
    root = DEPLOY.parent
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            assert all((root / source).exists() for source in line.split()[1:-1]), line


def test_installed_packages_are_pinned_by_hash() -> None:
    root = DEPLOY.parent
    lock = re.sub(r" *\\\n *", " ", (root / "requirements.lock").read_text())
    entries = [line for line in lock.splitlines() if line and not line.startswith("#")]
    assert len(entries) > 100
    for entry in entries:
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[^ ]+( ;.*?)?( --hash=sha256:[0-9a-f]{64})+", entry), entry[:80]
    makefile, dockerfile = (root / "Makefile").read_text(), (DEPLOY / "Dockerfile").read_text()
    for text in (makefile, dockerfile):
        (install,) = [line for line in text.splitlines() if "install" in line and "-r requirements.lock" in line]
        assert "--require-hashes" in install
        assert "extra-index-url" not in text
    assert all("==" in version for version in re.findall(r"torch[=><][^ ')]+", makefile))


def test_compose_names_existing_files_and_ports() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"specdec", "prometheus", "grafana"}
    assert serve_flags(services["specdec"]["command"]) <= known_flags()
    assert (DEPLOY / services["specdec"]["build"]["context"] / services["specdec"]["build"]["dockerfile"]).exists()
    for service in services.values():
        assert set(service.get("depends_on", [])) <= set(services)
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), port
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
    assert int(services["specdec"]["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_s + 5
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    ((target,),) = [config["targets"] for job in prometheus["scrape_configs"] for config in job["static_configs"]]
    assert target == f"specdec:{ServerConfig().http_port}"
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"


def unit() -> dict[str, str]:
    lines = (DEPLOY / "specdec.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_the_unit_leaves_the_engine_to_the_front_end() -> None:
    found = unit()
    assert int(found["TimeoutStopSec"]) > ServerConfig().drain_s + 5
    command = shlex.split(found["ExecStart"])
    assert command[1] == "serve"
    assert serve_flags(command) <= known_flags()
    assert found["KillMode"] == "mixed"  # the engine is ended by the front end, after the drain
    assert found["OOMPolicy"] == "continue"  # the front end restarts an engine that the kernel killed
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "LockPersonality", "RestrictSUIDSGID"):
        assert found[name] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "specdec.service").read_text().replace("/opt/specdec/bin/specdec", "/bin/true")
    (tmp_path / "specdec.service").write_text(text)
    found = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "specdec.service")], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
