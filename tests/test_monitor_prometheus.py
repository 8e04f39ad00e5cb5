"""The rules, the dashboard and the exporter, with Prometheus itself; skipped where it is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import metrics_of_tests as fake
from metrics_of_tests import History, Pages
from processes import free_port
from slipstream.monitor.alarms import KINDS
from slipstream.monitor.engines import ENGINES, derive
from slipstream.monitor.exporter import Exporter, text
from slipstream.monitor.rules import alerts, dashboard, expressions, groups, rules
from slipstream.monitor.scrape import Source
from slipstream.monitor.store import Store
from slipstream.monitor.types import Raw
from slipstream.monitor.watch import Monitor, Options, Report

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
AT = [0.9, 0.8, 0.75, 0.7]


@pytest.fixture
def pages() -> Iterator[Pages]:
    with fake.serve() as found:
        yield found


def _report(pages: Pages, fall: bool = True) -> Report:
    history, monitor = History(), Monitor(Source(pages.url), Store(":memory:"), Options())
    for i in range(50):
        pages.answers["/metrics"] = fake.vllm(history.ran(100, 4, [0.6, 0.5] if fall and i > 44 else AT))
        report = monitor.look(float(i))
    return report


def test_the_exporters_text_is_prometheus_own(pages: Pages) -> None:
    report = _report(pages)
    found = {f.name: f for f in text_string_to_metric_families(text(report))}
    [drafted] = found["slipstream_monitor_drafted_tokens"].samples
    assert drafted.value == 49 * 400
    assert drafted.labels["model"] == "llama"
    assert found["slipstream_monitor_drafted_tokens"].type == "counter"
    alarms = {s.labels["kind"]: s.value for s in found["slipstream_monitor_alarm"].samples}
    assert set(alarms) == set(KINDS)
    assert alarms["acceptance-drift"] == 1
    assert alarms["slowdown"] == 0
    assert len(found["slipstream_monitor_position_acceptance_rate"].samples) == 4


def test_rules_are_the_yaml_that_they_are_meant_to_be() -> None:
    assert yaml.safe_load(rules()) == {"groups": groups()}


def test_the_dashboard_asks_only_for_what_there_is(pages: Pages) -> None:
    recorded = {rule["record"] for group in groups() for rule in group["rules"] if "record" in rule}
    exported = {s.name for f in text_string_to_metric_families(text(_report(pages))) for s in f.samples}
    optional = {"slipstream_monitor_speed_up"}
    board = json.loads(json.dumps(dashboard()))
    asked = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    for expr in asked:
        assert any(name in expr for name in recorded | exported | optional), expr
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
    assert board["templating"]["list"][0]["type"] == "datasource"


@pytest.mark.parametrize("metrics", ENGINES, ids=lambda m: m.engine)
def test_promql_derives_what_the_monitor_derives(metrics: Any) -> None:
    """Every role that ``derive`` gives a number for has an expression, from the engine's own names only."""
    found = expressions(metrics, "5m")
    whole = Raw(drafted=8, accepted=4, drafting_rounds=2, rounds=3, generated=8, firsts=1)
    told = derive(whole)
    for role in ("drafted", "accepted", "rounds", "emitted"):
        assert getattr(told, role) is not None
        assert role in found


@promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules(), encoding="utf-8")
    checked = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _series(name: str, labels: str, values: str) -> dict[str, str]:
    return {"series": f"{name}{{{labels}}}", "values": values}


@promtool
def test_promtool_finds_a_fall_and_a_silent_stop(tmp_path: Path) -> None:
    """A day at 70 %, then 40 %; one that stops drafting; one that goes on: no alarm."""
    inputs = []
    for job, accepted in (("falls", "0+350x300 105200+200x60"), ("stays", "0+350x360")):
        who = f'job="{job}",instance="{job}:1",model_name="m"'
        inputs += [
            _series("vllm:spec_decode_num_draft_tokens_total", who, "0+500x360"),
            _series("vllm:spec_decode_num_accepted_tokens_total", who, accepted),
            _series("vllm:spec_decode_num_drafts_total", who, "0+125x360"),
            _series("vllm:generation_tokens_total", who, "0+550x360"),
            _series("vllm:time_to_first_token_seconds_count", who, "0+5x360"),
        ]
    who = 'job="stops",instance="stops:1",model_name="m"'
    inputs += [
        _series("vllm:spec_decode_num_draft_tokens_total", who, "0+500x300 150000x60"),
        _series("vllm:spec_decode_num_accepted_tokens_total", who, "0+350x300 105000x60"),
        _series("vllm:spec_decode_num_drafts_total", who, "0+125x300 37500x60"),
        _series("vllm:generation_tokens_total", who, "0+550x360"),
        _series("vllm:time_to_first_token_seconds_count", who, "0+5x360"),
    ]
    drift, off = alerts()[0], alerts()[1]

    def fired(rule: dict[str, Any], job: str, value: str) -> dict[str, Any]:
        engine = {"engine": "vllm", "job": job, "instance": f"{job}:1", "model_name": "m"}
        said = {k: _filled(v, engine, value) for k, v in rule["annotations"].items()}
        return {"exp_labels": engine | rule["labels"], "exp_annotations": said}

    checks = [
        {"eval_time": "24h", "alertname": drift["alert"], "exp_alerts": []},
        {"eval_time": "26h", "alertname": drift["alert"], "exp_alerts": [fired(drift, "falls", "40%")]},
        {"eval_time": "24h", "alertname": off["alert"], "exp_alerts": []},
        {"eval_time": "26h", "alertname": off["alert"], "exp_alerts": [fired(off, "stops", "3.27k")]},
    ]
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "5m",
        "tests": [{"interval": "5m", "input_series": inputs, "alert_rule_test": checks}],
    }
    (tmp_path / "rules.yml").write_text(rules().replace('"1m"', '"5m"'), encoding="utf-8")  # as little work as shows it
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    found = subprocess.run(["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def _filled(template: str, labels: dict[str, str], value: str) -> str:
    for name, label in labels.items():
        template = template.replace(f"{{{{ $labels.{name} }}}}", label)
    return template.replace("{{ $value | humanizePercentage }}", value).replace("{{ $value | humanize }}", value)


@prometheus
def test_prometheus_scrapes_exporter_and_engine(pages: Pages, tmp_path: Path) -> None:
    """A real Prometheus: the exporter's alarm fires as an alert, and the engine's own metrics give its acceptance."""
    exporter = Exporter("127.0.0.1:0")
    exporter.show(_report(pages))
    history = History().ran(1000, 4, AT)
    pages.answers["/metrics"] = fake.vllm(history)
    port = free_port()
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": "monitor", "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}]},
            {"job_name": "engine", "static_configs": [{"targets": [f"127.0.0.1:{pages.port}"]}]},
        ],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (tmp_path / "rules.yml").write_text(rules().replace('"1m"', '"200ms"'), encoding="utf-8")
    with _running(tmp_path, port):
        ask = _asker(port)
        assert _until(lambda: ask('slipstream_monitor_alarm{kind="acceptance-drift"}') == ["1"])
        firing = 'ALERTS{alertname="SlipstreamMonitorAcceptanceDrift",alertstate="firing"}'
        assert _until(lambda: ask(firing) == ["1"])
        assert _until(lambda: ask("up") == ["1", "1"])

        def acceptance() -> bool:
            pages.answers["/metrics"] = fake.vllm(history.ran(100, 4, AT))
            found = ask("slipstream:acceptance:5m")
            return bool(found) and abs(float(found[0]) - 0.6345) < 0.01

        assert _until(acceptance)
    exporter.close()


class _running:  # noqa: N801 (reads as a verb)
    """A Prometheus in a folder."""

    def __init__(self, folder: Path, port: int) -> None:
        words = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        self._words = [*words, f"--web.listen-address=127.0.0.1:{port}"]
        self._log = folder / "log"

    def __enter__(self) -> None:
        self._file = self._log.open("wb")
        self._process = subprocess.Popen(self._words, stdout=self._file, stderr=subprocess.STDOUT)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._file.close()


def _asker(port: int) -> Callable[[str], list[str]]:
    def ask(query: str) -> list[str]:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={quote(query)}", timeout=5) as response:
            return [entry["value"][1] for entry in json.load(response)["data"]["result"]]

    return ask


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return True
        except OSError:
            pass
        time.sleep(0.2)
    return False
