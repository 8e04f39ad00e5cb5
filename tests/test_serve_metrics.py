"""Metrics: raw counts, in a format that Prometheus reads, and queries in the documentation that name what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.serve.metrics import GAUGES, Metrics
from slipstream.types import Round

DOCS = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")


def done(drafted: int, accepted: int, *, tokens: int | None = None, sources: tuple[str, ...] | None = None) -> Round:
    sources = ("suffix",) * drafted if sources is None else sources
    return Round(
        tokens=(1,) * (accepted + 1 if tokens is None else tokens),
        num_drafted=drafted,
        num_accepted=accepted,
        draft_seconds=0.0,
        verify_seconds=0.0,
        total_seconds=0.0,
        k=drafted,
        sources=sources,
    )


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Read:
    """Metrics as somebody who scrapes them sees them."""

    def __init__(self, metrics: Metrics) -> None:
        self.samples = samples(metrics.text().decode())

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples.get((f"slipstream_{name}", tuple(sorted(labels.items()))), 0.0)


def filled() -> Metrics:
    """Each method was called."""
    metrics = Metrics("1.0", "target", "draft")
    metrics.http("GET", "/metrics", 200, 0.1)
    metrics.refused("overloaded")
    metrics.began(10, "me")
    metrics.round(done(0, 0), "me", first=True)
    metrics.round(done(4, 2, sources=("suffix", "suffix", "/models/small", "/models/small")), "me", first=False)
    metrics.round(done(1, 1), None, first=False)
    metrics.round(done(0, 0), None, first=False)
    metrics.first_token(0.2)
    metrics.tokens("verified", 4, 0.1)
    metrics.tokens("sent", 1, 0.02)
    metrics.ended("stop", 7, 1.0, 0.2)
    metrics.step(3)
    metrics.captured("written")
    state: dict[str, float] = dict.fromkeys(GAUGES, 1.0) | {"prefix_tokens": 32}
    metrics.watch(lambda: state)
    return metrics


def test_rounds() -> None:
    read = Read(filled())
    assert read("rounds_total") == 4
    assert read("drafts_total") == 2
    assert read("draft_tokens_total", drafter="suffix") == 3
    assert read("draft_tokens_total", drafter="small") == 2  # without its folder
    assert read("accepted_tokens_total", drafter="suffix") == 3
    assert read("accepted_tokens_total", drafter="small") == 0
    assert [read("draft_tokens_per_position_total", position=str(p)) for p in (1, 2, 3, 4, 5)] == [2, 1, 1, 1, 0]
    assert [read("accepted_tokens_per_position_total", position=str(p)) for p in (1, 2, 3)] == [2, 1, 0]
    origins = {origin: read("generated_tokens_total", origin=origin) for origin in ("accepted", "corrected", "bonus")}
    assert origins == {"accepted": 3, "corrected": 1, "bonus": 3}
    assert read("key_tokens_total", key="me") == 14
    assert read("key_tokens_total", key="") == 3


def test_k_leaves_the_first_round_out() -> None:
    read = Read(filled())
    assert read("round_draft_tokens_count") == 3
    assert read("round_draft_tokens_sum") == 5
    assert read("round_draft_tokens_bucket", le="0.0") == 1


def test_between_tokens_of_a_burst_is_nothing() -> None:
    read = Read(filled())
    assert read("inter_token_seconds_count", at="verified") == 4
    assert read("inter_token_seconds_sum", at="verified") == pytest.approx(0.1)
    assert read("inter_token_seconds_bucket", at="verified", le="0.0") == 3
    assert read("inter_token_seconds_count", at="sent") == 1


def test_an_answer() -> None:
    read = Read(filled())
    assert read("answers_total", finish="stop") == 1
    assert read("answer_seconds_sum") == 1.0
    assert read("time_per_output_token_seconds_sum") == pytest.approx(0.8 / 6)
    assert read("time_to_first_token_seconds_sum") == pytest.approx(0.2)


def test_labels_are_bounded() -> None:
    """Whoever asks for many paths must not fill the memory, or Prometheus'."""
    metrics = Metrics()
    for number in range(100):
        metrics.http(f"M{number}", f"/path/{number}", 404, 0.0)
    read = Read(metrics)
    assert read("http_requests_total", method="other", endpoint="other", status="404") == 100
    assert len([name for name, _ in read.samples if name == "slipstream_http_requests_total"]) == 1


def test_the_state_is_read_when_somebody_asks() -> None:
    metrics = Metrics()
    state: dict[str, float] = {"running": 1}
    metrics.watch(lambda: state)
    assert Read(metrics)("running") == 1
    state["running"] = 5
    assert Read(metrics)("running") == 5


def test_a_server_has_its_own_registry() -> None:
    one, other = Metrics(), Metrics()
    one.refused("x")
    assert Read(other)("refused_requests_total", reason="x") == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_has_nothing_to_object() -> None:
    text = filled().text()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def names(metrics: Metrics) -> set[str]:
    return {name for name, _ in samples(metrics.text().decode()) if not name.endswith("_created")}


def test_the_documentation_names_what_there_is() -> None:
    there = names(filled())
    for name in set(re.findall(r"slipstream_[a-z_]+", DOCS)):
        assert name in there or f"{name}_bucket" in there, name
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in there}
    for name in families:
        assert name in DOCS, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_its_queries_are_promql(tmp_path: Path) -> None:
    (block,) = re.findall(r"```promql\n(.*?)```", DOCS, re.DOTALL)
    queries: list[str] = []
    for line in block.splitlines():
        if line.startswith("  "):
            queries[-1] += line
        elif line and not line.startswith("#"):
            queries.append(line)
    assert len(queries) > 10
    rules = "".join(f"  - record: q{i}\n    expr: {query!r}\n" for i, query in enumerate(queries))
    (tmp_path / "rules.yml").write_text(f"groups:\n- name: docs\n  rules:\n{rules}", encoding="utf-8")
    checked: Any = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
