"""Counters of a server, in the words of Prometheus; ``docs/metrics.md`` gives the query of each rate.

Only raw counts are kept: a rate over any span of time, over all servers or one, is the quotient of two increases. For
acceptance over five minutes, and acceptance at position 2 given that 1 was accepted::

    increase(slipstream_accepted_tokens_total[5m]) / increase(slipstream_draft_tokens_total[5m])

    increase(slipstream_accepted_tokens_per_position_total{position="2"}[5m])
      / increase(slipstream_accepted_tokens_per_position_total{position="1"}[5m])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.serve.visits import bare
from slipstream.types import Round

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_K = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
_ROWS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
#: Paths with a label of their own; others would let callers make as many as they like.
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/health", "/ready", "/")
METHODS = ("GET", "POST", "OPTIONS", "HEAD")


_INFO = ("version", "target", "target_version", "draft", "draft_version", "draft_trained_for")


class Metrics:
    """What a server counts. Methods may be called from any thread."""

    def __init__(self, version: str = "", target: str = "", draft: str = "") -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slipstream_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
            return Histogram(f"slipstream_{name}", text, labels, buckets=tuple(buckets), registry=registry)

        self._info = Gauge("slipstream_info", "Always 1.", _INFO, registry=registry)
        self._labels = dict.fromkeys(_INFO, "") | {"version": version, "target": target, "draft": draft}
        self.runs({})
        self._http = counter("http_requests", "HTTP requests by status.", "method", "endpoint", "status")
        self._http_seconds = histogram(
            "http_request_seconds", "From a request's first byte to its response's last.", _LONG, "endpoint"
        )
        self._refused = counter("refused_requests", "Requests that the gate refused.", "reason")
        self._answers = counter("answers", "Answers that are over, by how they ended.", "finish")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generated_tokens", "Tokens of answers.", "origin")
        self._key_tokens = counter("key_tokens", "Tokens of prompts and answers by API key.", "key")
        self._rounds = counter("rounds", "Rounds: a draft, possibly empty, and its verification.")
        self._drafts = counter("drafts", "Drafts of at least one token.")
        self._drafted = counter("draft_tokens", "Draft tokens.", "drafter")
        self._accepted = counter("accepted_tokens", "Draft tokens that were accepted.", "drafter")
        self._drafted_at = counter("draft_tokens_per_position", "Draft tokens by position, from 1 on.", "position")
        self._accepted_at = counter("accepted_tokens_per_position", "Accepted ones by position.", "position")
        self._k = histogram("round_draft_tokens", "Draft tokens of each round after the first one of an answer.", _K)
        self._batch = histogram("batch_answers", "Answers that had a round in a step, for each step.", _ROWS)
        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _LONG)
        self._between = histogram(
            "inter_token_seconds",
            "Between tokens of an answer; 0 between those that came together. At: verified, or sent (after pacing).",
            (0.0, *_SHORT),
            "at",
        )
        self._each = histogram(
            "time_per_output_token_seconds", "Mean over an answer, the first token left out.", _SHORT
        )
        self._whole = histogram("answer_seconds", "From a request's arrival to the last token of an answer.", _LONG)
        self._capture = counter("captured_answers", "Answers for --capture, by what became of them.", "outcome")
        self._renewals = counter("draft_renewals", "How often the draft was opened again, and failed to be.", "outcome")
        for outcome in ("renewed", "failed"):
            self._renewals.labels(outcome)

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def http(self, method: str, path: str, status: int, seconds: float) -> None:
        """A response is over."""
        endpoint = path if path in ENDPOINTS else "other"
        self._http.labels(method if method in METHODS else "other", endpoint, str(status)).inc()
        self._http_seconds.labels(endpoint).observe(seconds)

    def refused(self, reason: str) -> None:
        """The gate did not let a request in."""
        self._refused.labels(reason).inc()

    # --- answers ------------------------------------------------------------------------------------------------------

    def began(self, prompt_tokens: int, key: str | None) -> None:
        """An answer was asked for."""
        self._prompt.inc(prompt_tokens)
        self._key_tokens.labels(key or "").inc(prompt_tokens)

    def round(self, done: Round, key: str | None, *, first: bool) -> None:
        """A round of an answer is done."""
        self._rounds.inc()
        if not first:
            self._k.observe(done.num_drafted)
        if done.num_drafted:
            self._drafts.inc()
        sources = done.sources or ("",) * done.num_drafted
        for position, drafter in enumerate(map(bare, sources[: done.num_drafted]), 1):
            self._drafted.labels(drafter).inc()
            self._drafted_at.labels(str(position)).inc()
            if position <= done.num_accepted:
                self._accepted.labels(drafter).inc()
                self._accepted_at.labels(str(position)).inc()
        for origin in done.origins:
            self._generated.labels(origin).inc()
        self._key_tokens.labels(key or "").inc(len(done.tokens))

    def first_token(self, seconds: float) -> None:
        """An answer's first token came so long after its request."""
        self._first.observe(seconds)

    def tokens(self, at: str, count: int, seconds: float) -> None:
        """``count`` tokens came together, ``seconds`` after the ones before; at: "verified" or "sent"."""
        gaps = self._between.labels(at)
        if count:
            gaps.observe(seconds)
        for _ in range(count - 1):
            gaps.observe(0.0)

    def ended(self, finish: str, tokens: int, seconds: float, first_token_seconds: float | None) -> None:
        """An answer is over: "stop", "length", "tool_calls", "aborted" or "failed"."""
        self._answers.labels(finish).inc()
        self._whole.observe(seconds)
        if tokens > 1 and first_token_seconds is not None:
            self._each.observe((seconds - first_token_seconds) / (tokens - 1))

    def step(self, answers: int) -> None:
        """In a step of the engine so many answers had a round."""
        self._batch.observe(answers)

    def captured(self, outcome: str) -> None:
        """What became of an answer that was to be captured."""
        self._capture.labels(outcome).inc()

    def renewed(self, outcome: str) -> None:
        """The draft was to be opened again: "renewed" or "failed"."""
        self._renewals.labels(outcome).inc()

    def runs(self, versions: Mapping[str, str]) -> None:
        """Labels of ``slipstream_info`` from now on; those that are not given stay."""
        self._labels |= versions
        self._info.clear()
        self._info.labels(**self._labels).set(1)

    # --- reading ------------------------------------------------------------------------------------------------------

    def watch(self, state: Callable[[], Mapping[str, float]]) -> None:
        """Report ``state()`` as gauges whenever somebody reads; its keys are those of ``GAUGES``."""
        self.registry.register(_Gauges(state))

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)


#: What the state of an engine is called outside; "prefix_tokens" is a counter.
GAUGES = {
    "running": "Requests that are being answered.",
    "waiting": "Requests that wait for a place.",
    "cache_positions": "Tokens that the target's cache has room for.",
    "cache_positions_used": "Tokens that have a place there.",
    "prefix_bytes": "Memory for prefixes that are kept.",
    "prefix_bytes_used": "Memory that kept prefixes occupy.",
    "draining": "1 while the server takes no more requests.",
    "capture_running": "1 while answers are being captured.",
}


class _Gauges(Collector):
    def __init__(self, state: Callable[[], Mapping[str, float]]) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        values: Mapping[str, Any] = self._state()
        for name, text in GAUGES.items():
            if name in values:
                yield GaugeMetricFamily(f"slipstream_{name}", text, value=values[name])
        if "prefix_tokens" in values:
            text = "Tokens of prompts that did not have to be read, since an earlier request had them."
            yield CounterMetricFamily("slipstream_prefix_tokens", text, value=values["prefix_tokens"])
