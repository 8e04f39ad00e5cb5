"""From what the server does to metrics, logs, limits and captures: one observer for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from slipstream.serve.capture import Capture, Record
from slipstream.serve.metrics import Metrics
from slipstream.serve.observers import Call, End, Tokens
from slipstream.serve.service import Service
from slipstream.serve.visits import Visit, current
from slipstream.types import Output


def visit_of(call: Call) -> Visit | None:
    """The HTTP request that a call came with."""
    visit: Visit | None = call.state.get("visit")
    return visit


class Accounts:
    """Charges tokens to API keys, and tells logs what came of a request. To be the first of the observers."""

    def __init__(self, *, texts: bool = False) -> None:
        self._texts = texts

    def on_begin(self, call: Call) -> None:
        """Its prompts are charged."""
        visit = call.state["visit"] = current.get()
        if visit is None:
            return
        visit.call, visit.user = call.id, call.user
        visit.prompt_tokens += call.prompt_tokens
        if visit.meter is not None:
            visit.meter.spend(call.prompt_tokens)

    def on_tokens(self, call: Call, tokens: Tokens) -> None:
        """So are its answers, as they come."""
        visit, done = visit_of(call), tokens.round
        if visit is None:
            return
        if visit.first_token_seconds is None:
            visit.first_token_seconds = tokens.at - visit.began
        visit.completion_tokens += len(done.tokens)
        visit.drafted += done.num_drafted
        visit.accepted += done.num_accepted
        if visit.meter is not None:
            visit.meter.spend(len(done.tokens))

    def on_end(self, call: Call, end: End) -> None:
        """How it ended, for the log."""
        visit = visit_of(call)
        if visit is None:
            return
        visit.finish_reasons = [finish_of(output, end) for output in end.outputs]
        if self._texts:
            visit.texts = {"asked": dict(call.body), "answers": [output.text for output in end.outputs if output]}


def finish_of(output: Output | None, end: End) -> str:
    """How one answer ended: "stop", "length", "aborted" or "failed"."""
    if output is not None and output.finish_reason is not None:
        return output.finish_reason
    return "failed" if end.outcome == "failed" else "aborted"


@dataclass
class _Times:
    """Of one answer."""

    tokens: int = 0
    first: float = 0.0
    verified: float = 0.0
    """When its latest tokens were verified, and sent."""
    sent: float = 0.0


@dataclass
class _Step:
    at: float = 0.0
    answers: int = 0


class Counts:
    """Feeds the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._step = _Step()

    def on_begin(self, call: Call) -> None:
        """A request for answers."""
        visit = visit_of(call)
        call.state["came"] = visit.began if visit is not None else call.began
        call.state["times"] = [_Times() for _ in call.requests]
        self._metrics.began(call.prompt_tokens, _key(call))

    def on_tokens(self, call: Call, tokens: Tokens) -> None:
        """A round of one of them."""
        times, done = call.state["times"][tokens.index], tokens.round
        self._metrics.round(done, _key(call), first=times.tokens == 0)
        self._count_step(tokens.at)
        count = len(done.tokens)
        if not count:
            return
        if times.tokens == 0:
            times.first = tokens.at
            self._metrics.first_token(tokens.at - call.state["came"])
            self._metrics.tokens("verified", count - 1, 0.0)
        else:
            self._metrics.tokens("verified", count, tokens.at - times.verified)
        times.tokens += count
        times.verified = tokens.at

    def on_sent(self, call: Call, index: int, count: int) -> None:
        """``count`` tokens of a stream went out."""
        times, now = call.state["times"][index], perf_counter()
        if times.sent:
            self._metrics.tokens("sent", count, now - times.sent)
        else:
            self._metrics.tokens("sent", count - 1, 0.0)
        times.sent = now

    def on_end(self, call: Call, end: End) -> None:
        """All of them are over."""
        came: float = call.state["came"]
        for times, output in zip(call.state["times"], end.outputs, strict=True):
            seconds = (times.verified or end.at) - came
            first = times.first - came if times.tokens else None
            self._metrics.ended(finish_of(output, end), times.tokens, seconds, first)

    def _count_step(self, at: float) -> None:
        """Rounds of one step have the same time."""
        if at != self._step.at:
            if self._step.answers:
                self._metrics.step(self._step.answers)
            self._step = _Step(at)
        self._step.answers += 1


def _key(call: Call) -> str | None:
    visit = visit_of(call)
    return visit.key if visit is not None else None


@dataclass
class Captured:
    """Hands answers that were finished to a capture."""

    capture: Capture
    model: str
    text_of: Callable[[tuple[int, ...]], str]
    _now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))

    def on_begin(self, call: Call) -> None:
        """Nothing to keep yet."""

    def on_tokens(self, call: Call, tokens: Tokens) -> None:
        """Nor here."""

    def on_end(self, call: Call, end: End) -> None:
        """Keep the answers that came to their own end."""
        if end.outcome != "finished" or call.body.get("store") is False:
            return
        for index, output in enumerate(end.outputs):
            if output is not None and output.finish_reason is not None:
                self.capture.offer(self._record(call, index, output))

    def _record(self, call: Call, index: int, output: Output) -> Record:
        params = call.requests[index].params
        about = {
            "id": call.id,
            "index": index,
            "time": self._now().isoformat(timespec="seconds"),
            "model": self.model,
        }
        return {
            **about,
            **self._asked(call, index),
            "answer": output.text,
            "finish_reason": output.finish_reason,
            "prompt_tokens": len(output.prompt_tokens),
            "completion_tokens": len(output.tokens),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "drafted_tokens": output.stats.drafted,
            "accepted_tokens": output.stats.accepted,
        }

    def _asked(self, call: Call, index: int) -> Record:
        if call.endpoint == "chat":
            kept = ("messages", "tools", "response_format")
            return {name: call.body[name] for name in kept if call.body.get(name) is not None}
        return {"prompt": self.text_of(call.requests[index].prompt)}


def state_of(service: Service, capture: Capture | None) -> Callable[[], Mapping[str, float]]:
    """What the gauges show."""

    def state() -> dict[str, float]:
        engine = service.engine
        arena, prefixes = engine.seats.arenas[0], engine.seats.prefixes
        running = engine.running
        out: dict[str, Any] = {
            "running": running,
            "waiting": max(0, service.pending - running),
            "cache_positions": arena.positions,
            "cache_positions_used": arena.positions - arena.free,
            "draining": float(service.draining),
        }
        if prefixes is not None:
            out |= {"prefix_bytes": prefixes.limit, "prefix_bytes_used": prefixes.size}
            out["prefix_tokens"] = prefixes.taken
        if capture is not None:
            out["capture_running"] = float(capture.stopped is None)
        return out

    return state
