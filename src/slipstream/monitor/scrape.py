"""Reading an engine over HTTP."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from slipstream.errors import InputError, SlipstreamError
from slipstream.monitor.engines import TENSORRT_LLM, Metrics, detect, find, from_iterations, read
from slipstream.monitor.exposition import Scrape, parse
from slipstream.monitor.types import Identity, Reading

AUTO = "auto"
_SECONDS = 10.0
_MOST_BYTES = 32 * 2**20
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Look:
    """What an engine said."""

    reading: Reading
    scrape: Scrape | None
    """None if it said it in JSON."""


class Source:
    """Where an engine's metrics are.

    Args:
        url: of the metrics, or of the engine.
        engine: its name, or ``auto``.
        key: an API key, if the metrics want one.

    Raises:
        InputError: no address, or no such engine.
    """

    def __init__(self, url: str, engine: str = AUTO, key: str | None = None) -> None:
        self.url = check_url("--url", url)
        self.base = urlunsplit(urlsplit(self.url)._replace(path="", query="", fragment=""))
        self._metrics: Metrics | None = None if engine == AUTO else find(engine)
        self._opener = opener(self.url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._known: tuple[float | None, Identity] | None = None

    def look(self) -> Look:
        """Ask.

        Raises:
            SlipstreamError: it does not answer, or answers something else than metrics.
            InputError: these are nobody's metrics.
        """
        moment = time.time()
        text = self._get(self.url)
        if text.lstrip().startswith(("[", "{")):
            return self._named(Look(from_iterations(_json(text), moment), None))
        scrape = parse(text)
        metrics = self._metrics or detect(scrape)
        if metrics is None:
            raise InputError(
                f"the metrics at {self.url} are of no engine that is known; name it with --engine, or correct the "
                "address"
            )
        return self._named(Look(read(metrics, scrape, moment), scrape))

    def _named(self, look: Look) -> Look:
        """With the models that the engine names elsewhere; asked again when the engine was started again."""
        started = look.reading.started
        if self._known is None or started is None or self._known[0] != started:
            self._known = (started, self._identify(look.reading))
        known, said = self._known[1], look.reading.identity
        fields = {name: value for name, value in vars(known).items() if value is not None}
        own = {name: value for name, value in vars(said).items() if value is not None}
        return replace(look, reading=replace(look.reading, identity=Identity(**(own | fields))))

    def _identify(self, reading: Reading) -> Identity:
        """Which models run, where the engine has an address for it."""
        with suppress(SlipstreamError, KeyError, IndexError, TypeError, AttributeError):
            return _IDENTITIES[reading.engine](self)
        return Identity()

    def json(self, path: str) -> Any:
        """What the engine answers at a path of its own.

        Raises:
            SlipstreamError: it does not.
        """
        return _json(self._get(self.base + path))

    def _get(self, url: str) -> str:
        request = Request(url, headers=self._headers)
        try:
            with self._opener.open(request, timeout=_SECONDS) as response:
                body: bytes = response.read(_MOST_BYTES)
        except HTTPError as error:
            error.close()
            raise SlipstreamError(f"{url} answers {error.code} {error.reason}{_hint(error.code)}") from None
        except (URLError, OSError, HTTPException) as error:
            raise SlipstreamError(f"{url} does not answer ({getattr(error, 'reason', error)})") from None
        return body.decode("utf-8", errors="replace")


def check_url(option: str, url: str) -> str:
    """An address of metrics; one without a path gets ``/metrics``.

    >>> check_url("--url", "http://engine:8000")
    'http://engine:8000/metrics'

    Raises:
        InputError: it is none.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{option} {url!r} is no address; write http://HOST:PORT/metrics")
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/metrics", fragment=""))


def opener(url: str) -> OpenerDirector:
    """Proxies are for servers elsewhere."""
    return build_opener(ProxyHandler({})) if urlsplit(url).hostname in _LOCAL else build_opener()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SlipstreamError(f"the engine answers with broken JSON ({error})") from None


def _hint(code: int) -> str:
    if code in (401, 403):
        return "; give its key with --key"
    if code in (404, 501):
        elsewhere = f"TensorRT-LLM: {TENSORRT_LLM.switch}"
        return f"; metrics may be off (llama.cpp: --metrics, SGLang: --enable-metrics), or elsewhere ({elsewhere})"
    return ""


# --- which models -----------------------------------------------------------------------------------------------------


def _vllm(source: Source) -> Identity:
    served = source.json("/v1/models")["data"][0]
    return Identity(target=served.get("root") or served["id"])


def _sglang(source: Source) -> Identity:
    said = source.json("/get_server_info")
    return Identity(
        target=said.get("model_path"),
        target_version=said.get("revision"),
        draft=said.get("speculative_draft_model_path"),
        draft_version=said.get("speculative_draft_model_revision"),
        engine_version=said.get("version"),
    )


def _llama_cpp(source: Source) -> Identity:
    said = source.json("/props")
    return Identity(target=said.get("model_path"), engine_version=said.get("build_info"))


_IDENTITIES = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp}
