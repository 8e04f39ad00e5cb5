"""Alarms for others: what Alertmanager takes, and what it sends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from slipstream.monitor.scrape import opener
from slipstream.monitor.types import Alarm

_NEVER = "0001-01-01T00:00:00Z"
_SECONDS = 10.0
#: An address with this path is Alertmanager's own; others get what Alertmanager sends to webhooks.
API = "/api/v2/alerts"


def labels(alarm: Alarm, service: str, engine: str) -> dict[str, str]:
    """What names an alarm; empty ones are left out, as Prometheus does."""
    found = {
        "alertname": "Slipstream" + "".join(word.capitalize() for word in alarm.kind.split("-")),
        "service": service,
        "engine": engine,
        "severity": alarm.severity,
        "model": alarm.stream.model,
        "replica": alarm.stream.replica,
        "drafter": alarm.stream.drafter,
        "position": "" if alarm.position is None else str(alarm.position),
    }
    return {name: value for name, value in found.items() if value}


def notes(alarm: Alarm) -> dict[str, str]:
    """What is to be read."""
    return {"summary": alarm.what, "description": alarm.advice, "cost": alarm.cost}


def entry(alarm: Alarm, service: str, engine: str, started: float, ended: float | None) -> dict[str, Any]:
    """One alert; times in seconds since 1970."""
    named = labels(alarm, service, engine)
    return {
        "status": "firing" if ended is None else "resolved",
        "labels": named,
        "annotations": notes(alarm),
        "startsAt": _time(started),
        "endsAt": _NEVER if ended is None else _time(ended),
        "generatorURL": service,
        "fingerprint": sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16],
    }


def body(url: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """What to post to ``url``: Alertmanager's list of alerts, or its webhook message (version 4)."""
    if urlsplit(url).path.rstrip("/").endswith(API):
        wanted = ("labels", "annotations", "startsAt", "endsAt", "generatorURL")
        alerts = [{name: e[name] for name in wanted if e[name] != _NEVER} for e in entries]
        return json.dumps(alerts)
    firing = any(e["status"] == "firing" for e in entries)
    message = {
        "version": "4",
        "groupKey": f"slipstream:{entries[0]['labels']['service']}",
        "truncatedAlerts": 0,
        "status": "firing" if firing else "resolved",
        "receiver": "slipstream",
        "groupLabels": {"service": entries[0]["labels"]["service"]},
        "commonLabels": _common([e["labels"] for e in entries]),
        "commonAnnotations": _common([e["annotations"] for e in entries]),
        "externalURL": "",
        "alerts": list(entries),
    }
    return json.dumps(message)


def post(url: str, text: str) -> str | None:
    """Send; None if it arrived, else why not."""
    request = Request(url, text.encode(), {"Content-Type": "application/json"})
    try:
        with opener(url).open(request, timeout=_SECONDS):
            return None
    except HTTPError as error:
        error.close()
        return f"it answers {error.code} {error.reason}"
    except (URLError, OSError, HTTPException) as error:
        return str(getattr(error, "reason", error))


def _common(some: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for name, value in some[0].items() if all(other.get(name) == value for other in some)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
