"""The gate: keys, limits, sizes, sources, time; configuration files. An application of a few lines stands behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from slipstream import InputError
from slipstream.serve.config import read_config
from slipstream.serve.gate import Gate, GateSettings, loopback_hosts
from slipstream.serve.keys import (
    VARIABLE,
    Key,
    KeyRing,
    bearer,
    hash_of,
    keys_of_environment,
    keys_of_tables,
    new_key,
)
from slipstream.serve.limits import Allowance, Meter, Window
from slipstream.serve.metrics import Metrics
from slipstream.serve.visits import current

ROUTE = "/v1/completions"


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- limits -----------------------------------------------------------------------------------------------------------


def test_never_more_than_the_limit_in_any_minute() -> None:
    """A bucket that refills lets through twice the limit in its first minute; a window does not."""
    clock = Clock()
    meter = Meter(Allowance(requests_per_minute=5), clock)
    let_in = []
    for _ in range(1200):
        if meter.enter() is None:
            let_in.append(clock.now)
            meter.leave()
        clock.now += 0.25
    assert len(let_in) >= 20
    for start in let_in:
        assert sum(start <= other < start + 60 for other in let_in) <= 5


def test_the_time_to_wait_is_long_enough_and_no_longer() -> None:
    clock = Clock()
    meter = Meter(Allowance(requests_per_minute=2), clock)
    assert meter.enter() is None
    clock.now += 10
    assert meter.enter() is None
    refusal = meter.enter()
    assert refusal is not None
    assert refusal.seconds == 50
    clock.now += 49.9
    assert meter.enter() is not None
    clock.now += 0.2
    assert meter.enter() is None


def test_tokens_are_counted_as_they_come() -> None:
    clock = Clock()
    meter = Meter(Allowance(tokens_per_minute=100), clock)
    assert meter.enter() is None
    meter.spend(60)
    assert meter.enter() is None
    meter.spend(80)  # over it, which those that were let in may be
    refusal = meter.enter()
    assert refusal is not None
    assert "100 tokens a minute" in refusal.message
    assert 59 <= refusal.seconds <= 60
    clock.now += refusal.retry_after
    assert meter.enter() is None


def test_so_many_at_a_time() -> None:
    meter = Meter(Allowance(concurrent=2))
    assert meter.enter() is None
    assert meter.enter() is None
    assert meter.enter() is not None
    meter.leave()
    assert meter.enter() is None


def test_a_window_stays_small() -> None:
    clock = Clock()
    window = Window(10**9, clock)
    for _ in range(10_000):
        window.add(1)
        clock.now += 0.01
        window.wait()
    assert len(window._parts) <= 62
    assert window._sum == pytest.approx(6000, abs=110)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_new_key_is_found_by_its_hash_only() -> None:
    secret, hashed = new_key()
    (key,) = keys_of_tables([{"name": "a", "hash": hashed}], Allowance())
    ring = KeyRing([key])
    assert ring.find(secret.encode()) is key
    assert ring.find(hashed.encode()) is None
    assert ring.find(secret[:-1].encode()) is None
    assert ring.find(b"") is None
    assert secret not in repr(ring.keys)
    assert new_key()[0] != secret


def test_all_keys_are_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("slipstream.serve.keys.hmac.compare_digest", compare)
    ring = KeyRing(Key(str(i), bytes.fromhex(hash_of(str(i))[7:])) for i in range(5))
    found = ring.find(b"0")
    assert found is not None
    assert found.name == "0"
    assert len(compared) == 5


def test_keys_of_the_environment() -> None:
    a, b = hash_of("a"), hash_of("b")
    keys = keys_of_environment({VARIABLE: f"x={a}, y={b}\n"}, Allowance(concurrent=3))
    assert [key.name for key in keys] == ["x", "y"]
    assert keys[0].allowance.concurrent == 3
    assert keys_of_environment({}, Allowance()) == []


def test_a_key_that_was_written_instead_of_its_hash_is_not_repeated() -> None:
    secret, _ = new_key()
    for read in (
        lambda: keys_of_environment({VARIABLE: f"x={secret}"}, Allowance()),
        lambda: keys_of_environment({VARIABLE: secret}, Allowance()),
        lambda: keys_of_tables([{"name": "x", "hash": secret}], Allowance()),
    ):
        with pytest.raises(InputError) as caught:
            read()
        assert secret not in str(caught.value)
        assert secret[-20:] not in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "fragment"),
    [
        ([{"name": "x", "hash": hash_of("a"), "rpm": 5}], "unknown setting 'rpm'"),
        ([{"name": "x", "hash": hash_of("a"), "concurrent": 0}], "concurrent = 0"),
        ([{"name": "x", "hash": hash_of("a"), "tokens_per_minute": "5"}], "tokens_per_minute = '5'"),
        ([{"name": "x", "hash": hash_of("a"), "concurrent": True}], "concurrent = True"),
        ([{"name": "x y", "hash": hash_of("a")}], "no usable name"),
        ([{"hash": hash_of("a")}], "no usable name"),
        (["x"], "no table"),
    ],
)
def test_keys_that_cannot_be_used(tables: list[Any], fragment: str) -> None:
    with pytest.raises(InputError, match="number 1") as caught:
        keys_of_tables(tables, Allowance())
    assert fragment in str(caught.value)


@pytest.mark.parametrize(("names", "secrets"), [("aa", "xy"), ("ab", "xx")])
def test_two_keys_that_are_alike(names: str, secrets: str) -> None:
    tables = [{"name": n, "hash": hash_of(s)} for n, s in zip(names, secrets, strict=True)]
    with pytest.raises(InputError, match="two API keys"):
        KeyRing(keys_of_tables(tables, Allowance()))


def test_bearer() -> None:
    assert bearer(b"Bearer abc") == b"abc"
    assert bearer(b"bearer  abc ") == b"abc"
    for nothing in (None, b"", b"Bearer", b"Bearer ", b"Basic abc"):
        assert bearer(nothing) is None


# --- configuration ----------------------------------------------------------------------------------------------------


@click.command()
@click.argument("target")
@click.option("--port", type=int, default=8000)
@click.option("--rate", type=click.FloatRange(0, 1), default=1.0)
@click.option("--weights", type=click.Choice(["auto", "int8"]), default="auto")
@click.option("--stream-pace", is_flag=True)
@click.option("--allow-host", "hosts", multiple=True)
@click.option("--config", is_eager=True, expose_value=False)
def example(**options: Any) -> None:
    """What a configuration is for in these tests."""


def config(folder: Path, text: str) -> Any:
    (folder / "serve.toml").write_text(text, encoding="utf-8")
    return read_config(str(folder / "serve.toml"), example.params)


def test_a_configuration(tmp_path: Path) -> None:
    text = 'target = "m"\nport = 1\nrate = 1\nstream_pace = true\nallow-host = ["a", "b"]\n[[keys]]\nname = "x"\n'
    read = config(tmp_path, text)
    assert read.options == {"target": "m", "port": 1, "rate": 1, "stream_pace": True, "hosts": ["a", "b"]}
    assert read.keys == ({"name": "x"},)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("prot = 1", "unknown setting 'prot'; did you mean 'port'?"),
        ("[server]\nport = 1", "unknown setting 'server'"),
        ('config = "x"', "unknown setting 'config'"),
        ("hosts = []", "unknown setting 'hosts'"),
        ('port = "1"', "port = '1' has the wrong type; give a whole number"),
        ("port = true", "port = True has the wrong type"),
        ("port = 1.5", "port = 1.5 has the wrong type"),
        ("stream-pace = 1", "stream-pace = 1 has the wrong type; give true or false"),
        ("rate = 2", "rate = 2 cannot be used"),
        ('weights = "int9"', "weights = 'int9' cannot be used"),
        ("allow-host = [1]", "allow-host = 1 has the wrong type"),
        ("stream-pace = true\nstream_pace = true", "stream-pace twice"),
        ("keys = 3", "keys is no list of tables"),
        ("port = ", "is not TOML"),
    ],
)
def test_a_configuration_that_cannot_be_used(tmp_path: Path, text: str, fragment: str) -> None:
    with pytest.raises(InputError) as caught:
        config(tmp_path, text)
    assert fragment in str(caught.value)


def test_no_configuration_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_config(str(tmp_path / "none.toml"), example.params)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8"):
        read_config(str(tmp_path / "bytes.toml"), example.params)


# --- the gate ---------------------------------------------------------------------------------------------------------


class Behind:
    """The application behind the gate: says what it was given, slowly if asked to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message.get("body", b"")
        self.bodies.append(body)
        stream = body == b"stream"
        kind = b"text/event-stream" if stream else b"text/plain"
        try:
            if body == b"fail":
                raise RuntimeError("the secret prompt")
            if body == b"wait":
                await self.go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
            if stream:
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
                await self.go_on.wait()
            await send({"type": "http.response.body", "body": b"done", "more_body": False})
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def gate(behind: Any = None, metrics: Metrics | None = None, **settings: Any) -> Gate:
    return Gate(behind or Behind(), GateSettings(**settings), metrics or Metrics())


def ask(
    app: Any,
    *,
    method: str = "POST",
    path: str = ROUTE,
    content: Any = b"{}",
    base: str = "http://here",
    **headers: str,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, base + path, content=content, headers=named)

    return asyncio.run(run())


def refused(response: httpx.Response, status: int, code: str) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert response.headers["x-request-id"]
    return str(error["message"])


def ring(**allowance: Any) -> tuple[str, KeyRing]:
    secret, hashed = new_key()
    return secret, KeyRing(keys_of_tables([{"name": "me", "hash": hashed, **allowance}], Allowance()))


def test_without_keys_everybody_may_ask() -> None:
    assert ask(gate()).text == "done"


def test_a_key_is_needed() -> None:
    secret, keys = ring()
    app = gate(keys=keys)
    assert refused(ask(app), 401, "invalid_api_key").startswith("no API key")
    response = ask(app, authorization="Bearer wrong")
    assert "wrong" not in refused(response, 401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert ask(app, authorization=f"Bearer {secret}").status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_what_needs_no_key(path: str) -> None:
    assert ask(gate(keys=ring()[1]), method="GET", path=path, content=b"").status_code == 200


@pytest.mark.parametrize(
    "path", ["/metrics", "/v1/models", "/openapi.json", "/anything", "//health", "/health/", "/HEALTH", "/%2e/health"]
)
def test_what_needs_one(path: str) -> None:
    assert ask(gate(keys=ring()[1]), method="GET", path=path, content=b"").status_code == 401


def test_metrics_may_be_open() -> None:
    app = gate(keys=ring()[1], open_metrics=True)
    assert ask(app, method="GET", path="/metrics", content=b"").status_code == 200


def test_a_refused_key_is_not_read_to() -> None:
    """Whoever has no key cannot make the server hold a body."""
    behind = Behind()
    read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 1000

    assert ask(gate(behind, keys=ring()[1]), content=parts()).status_code == 401
    assert read <= 1
    assert not behind.bodies


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_have_a_limit(declared: bool) -> None:
    behind = Behind()

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b"x" * 10

    content: Any = b"x" * 110 if declared else parts()
    assert "100 bytes" in refused(ask(gate(behind, body_bytes=100), content=content), 413, "body_too_large")
    assert not behind.bodies
    assert ask(gate(behind, body_bytes=100), content=b"x" * 100).status_code == 200
    assert behind.bodies == [b"x" * 100]


def test_a_body_comes_whole_whatever_its_parts() -> None:
    behind = Behind()

    async def parts() -> AsyncIterator[bytes]:
        for part in (b"a", b"", b"bc", b"d"):
            yield part

    ask(gate(behind), content=parts())
    assert behind.bodies == [b"abcd"]


def test_a_body_that_does_not_come() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    refused(ask(gate(body_seconds=0.05), content=parts()), 408, "body_too_slow")


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    behind = Behind()
    response = ask(gate(behind, timeout=0.05), content=b"wait")
    refused(response, 503, "timeout")
    assert response.headers["retry-after"]
    assert behind.cancelled == 1


def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    behind = Behind()
    response = ask(gate(behind, timeout=0.05), content=b"stream")
    first, second = response.text.strip().split("\n\n")
    assert first == "data: 1"
    assert json.loads(second.removeprefix("data: "))["error"]["code"] == "timeout"
    assert behind.cancelled == 1


def test_a_client_that_leaves_is_no_failure() -> None:
    """What is behind the gate may give up by itself, which must not look as if the server was cancelled."""

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    metrics = Metrics()
    app = gate(behind, metrics=metrics)

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": []}
        await app(scope, lambda: asyncio.sleep(0, {"type": "http.request"}), lambda message: asyncio.sleep(0))

    asyncio.run(run())
    assert 'status="499"} 1.0' in metrics.text().decode()
    assert app._running == 0


def test_a_failure_tells_nothing_to_the_client() -> None:
    assert "secret" not in refused(ask(gate(), content=b"fail"), 500, "internal_error")


def together(
    app: Any, contents: Sequence[bytes], check: Callable[[list[httpx.Response]], None], **headers: str
) -> None:
    """The last one asks while the others, which wait, are in the works."""

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            waiting = [asyncio.create_task(client.post(ROUTE, content=c, headers=headers)) for c in contents[:-1]]
            await asyncio.sleep(0.05)
            last = await client.post(ROUTE, content=contents[-1], headers=headers)
            app.app.go_on.set()
            return [*await asyncio.gather(*waiting), last]

    check(asyncio.run(run()))


def test_overload() -> None:
    def check(responses: list[httpx.Response]) -> None:
        assert [r.status_code for r in responses] == [200, 200, 503]
        refused(responses[-1], 503, "overloaded")
        assert responses[-1].headers["retry-after"] == "1"

    app = gate(at_once=2)
    together(app, [b"wait", b"wait", b"{}"], check)
    assert ask(app).status_code == 200  # places are given back


def test_limits_of_a_key() -> None:
    secret, keys = ring(concurrent=1, requests_per_minute=2)
    headers = {"authorization": f"Bearer {secret}"}

    def check(responses: list[httpx.Response]) -> None:
        assert [r.status_code for r in responses] == [200, 429]
        refused(responses[-1], 429, "rate_limit_exceeded")

    app = gate(keys=keys)
    together(app, [b"wait", b"{}"], check, **headers)
    assert ask(app, **headers).status_code == 200
    late = ask(app, **headers)
    assert "2 requests a minute" in refused(late, 429, "rate_limit_exceeded")
    assert 55 <= int(late.headers["retry-after"]) <= 60


def test_places_are_given_back_whatever_happens() -> None:
    app = gate(at_once=1, timeout=0.05)
    for content in (b"fail", b"wait", b"stream", b"{}") * 2:
        ask(app, content=content)
    assert app._running == 0
    assert app._everybody.running == 0


def test_one_key_does_not_take_from_another() -> None:
    secrets = [new_key() for _ in range(2)]
    tables = [{"name": f"k{i}", "hash": h, "requests_per_minute": 1} for i, (_, h) in enumerate(secrets)]
    app = gate(keys=KeyRing(keys_of_tables(tables, Allowance())))
    codes = [ask(app, authorization=f"Bearer {s}").status_code for s, _ in secrets * 2]
    assert codes == [200, 200, 429, 429]


def test_not_ready() -> None:
    app = Gate(Behind(), GateSettings(), Metrics(), ready=lambda: "it is shutting down")
    response = ask(app)
    assert "shutting down" in refused(response, 503, "unavailable")
    assert response.headers["retry-after"]
    assert ask(app, method="GET", path="/health", content=b"").status_code == 200


# --- where from -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["http://localhost:8000", "http://127.0.0.1:8000", "http://[::1]:8000"])
def test_names_of_this_machine(base: str) -> None:
    assert ask(gate(hosts=loopback_hosts("127.0.0.1")), base=base).status_code == 200


@pytest.mark.parametrize("base", ["http://evil.example", "http://localhost.evil.example:8000", "http://127.0.0.1.x"])
def test_a_name_that_was_made_to_point_here(base: str) -> None:
    """A page whose own name resolves to 127.0.0.1 is of the same origin as the server, as far as a browser knows."""
    behind = Behind()
    refused(ask(gate(behind, hosts=loopback_hosts("127.0.0.1")), base=base), 403, "unknown_host")
    assert not behind.bodies


def test_pages_of_other_sites_may_not_ask() -> None:
    """A page can send a form to any server without asking; it could have this one work for nothing."""
    behind = Behind()
    app = gate(behind, origins=("https://good.example",))
    refused(ask(app, origin="https://evil.example"), 403, "unknown_origin")
    refused(ask(app, origin="null"), 403, "unknown_origin")
    refused(ask(app, origin="http://[here"), 403, "unknown_origin")
    assert not behind.bodies
    assert ask(app, origin="http://here").status_code == 200
    assert ask(app, origin="https://good.example").status_code == 200


# --- request ids, counts ----------------------------------------------------------------------------------------------


def test_request_ids() -> None:
    assert ask(gate(), x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    made = {ask(gate()).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for odd in ("two words", "x" * 200, "a\tb"):
        assert len(ask(gate(), x_request_id=odd).headers["x-request-id"]) == 32


def test_what_is_behind_knows_who_asks() -> None:
    secret, keys = ring()
    seen = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current.get())
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    ask(gate(behind, keys=keys), authorization=f"Bearer {secret}", x_request_id="r1")
    (visit,) = seen
    assert (visit.id, visit.key, visit.status) == ("r1", "me", 204)
    assert current.get() is None


def test_requests_are_counted() -> None:
    metrics = Metrics()
    app = gate(metrics=metrics, body_bytes=10)
    ask(app)
    ask(app, content=b"x" * 11)
    ask(app, method="GET", path="/some/thing", content=b"")
    text = metrics.text().decode()
    for line in (
        'slipstream_http_requests_total{endpoint="/v1/completions",method="POST",status="200"} 1.0',
        'slipstream_http_requests_total{endpoint="/v1/completions",method="POST",status="413"} 1.0',
        'slipstream_http_requests_total{endpoint="other",method="GET",status="200"} 1.0',
        'slipstream_refused_requests_total{reason="body_too_large"} 1.0',
    ):
        assert line in text
