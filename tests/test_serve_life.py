"""A server's life: clients that go away, many at once, fuzz, signals, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import save_checkpoint
from serving import Served, parrot_engine, parrot_tokenizer, served, wait_for
from slipstream import InputError, SpeculativeDecoding
from slipstream.models.version import version_of
from slipstream.monitor.scrape import Source
from slipstream.seats import Limits
from slipstream.serve.service import Options, Service

CHAT = "/v1/chat/completions"


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    return save_checkpoint(folder, parrot_tokenizer(), max_position_embeddings=100_000)


@pytest.fixture(scope="module")
def endless(checkpoint: Path) -> Iterator[Served]:
    """A server of a random model, whose answers are as long as is asked for."""
    decoding = SpeculativeDecoding(checkpoint, "suffix")
    with served(decoding.engine(Limits(memory=1 << 27, requests=4))) as server:
        yield server


LONG = {"messages": user("go on"), "max_tokens": 50_000, "ignore_eos": True, "speculation": {"enabled": False}}


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_ends_the_request_at_once(endless: Served, stream: bool) -> None:
    """Within one round of being noticed, wherever the client was; the place in memory is free again."""
    seen: list[int] = []

    async def go_away() -> None:
        async with httpx.AsyncClient(base_url=endless.url, timeout=30) as client:
            if stream:
                async with client.stream("POST", CHAT, json={**LONG, "stream": True}) as response:
                    async for line in response.aiter_lines():
                        seen.append(len(line))
                        if len(seen) > 5:
                            return
            with pytest.raises(httpx.ReadTimeout):
                await client.post(CHAT, json=LONG, timeout=1.0)

    asyncio.run(go_away())
    endless.quiet(5)


def test_disconnect_while_waiting_in_the_queue(endless: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(endless.url + CHAT, json={**LONG, "n": 10}, timeout=1.0)
    endless.quiet(5)


def test_disconnect_before_the_first_chunk(endless: Served) -> None:
    """All places are taken, so the stream has not begun."""
    with endless_requests(endless, 4):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(endless.url + CHAT, json={**LONG, "stream": True}, timeout=0.5)
        wait_for(lambda: endless.service.pending == 4)
    endless.quiet(5)


@contextmanager
def endless_requests(server: Served, count: int) -> Iterator[None]:
    over = threading.Event()

    def ask() -> None:
        with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=30) as response:
            for _ in response.iter_lines():
                if over.is_set():
                    return

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.service.pending == count)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(10)


@pytest.mark.parametrize("lane", [0, 1])
def test_short_texts_do_not_wait_while_a_long_one_is_encoded(lane: int) -> None:
    """Four megabytes took ten seconds, only to be refused, and nobody's prompt was encoded meanwhile."""
    texts, blocked = Service(parrot_engine(), Options("toy")).texts, threading.Event()
    busy = texts._threads[lane].submit(blocked.wait)

    async def encode() -> None:
        if lane:
            assert len(await texts.encode("short")) == 6
            assert await texts.encode_chat([{"role": "user", "content": "short"}])
            assert len(await texts.plain("short")) == 5
        for text in () if lane else ("a" * 100_000,):
            assert len(await texts.plain(text)) == 100_000
            with pytest.raises(InputError, match="reads at most"):
                await texts.encode(text)
            with pytest.raises(InputError, match="reads at most"):
                await texts.encode_chat([{"role": "user", "content": "a"}], [{"description": text}])

    try:
        asyncio.run(encode())
        assert not busy.done()
    finally:
        blocked.set()
        texts.close()


def test_too_many_are_told_to_come_back(endless: Served) -> None:
    with (
        served(
            endless.service.engine.__class__(endless.service.engine.setting, Limits(memory=1 << 26, requests=2)),
            max_queue=1,
        ) as server,
        endless_requests(server, 3),
    ):
        response = httpx.post(server.url + CHAT, json=LONG, timeout=10)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "overloaded"


# --- many -------------------------------------------------------------------------------------------------------------


def test_soak() -> None:
    """A few hundred requests of 24 clients: disconnects, bad bodies, stops, streams; none lost, mixed or unfinished."""
    from soak import Parrot, soak

    with served(parrot_engine(requests=8), max_queue=1000) as server:
        done = asyncio.run(soak(server.url, Parrot(), requests=300, clients=24, seed=1))
        server.quiet()
    assert done.sent == 300
    assert done.faults == []
    assert min(done.counts.values()) > 10
    assert sum(done.counts.values()) == 300


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_fuzz_from_the_openapi_document(checkpoint: Path, mode: str) -> None:
    """Whatever the document allows, and whatever it does not: no 5xx but 503, and answers as the document has them."""
    import hypothesis
    import schemathesis
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    settings = hypothesis.settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    engine = SpeculativeDecoding(checkpoint, "suffix").engine(Limits(memory=1 << 17))
    with served(engine, max_tokens=8) as server:
        schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
        said: Counter[int] = Counter()

        def check(case: Any) -> None:
            response = case.call(timeout=60)
            said[response.status_code] += bool(case.body)
            assert response.status_code < 500 or response.status_code == 503, (response.text, case.body)
            if response.status_code >= 400:
                assert response.json()["error"]["message"], case.body
            # Fields that contradict each other, and what does not fit, no schema can tell.
            case.validate_response(response, excluded_checks=[positive_data_acceptance])

        for result in schema.get_all_operations():
            operation = result.ok()
            if mode == "negative" and not list(operation.body):
                continue
            wanted = schemathesis.GenerationMode(mode)
            settings(hypothesis.given(case=operation.as_strategy(generation_mode=wanted))(check))()
        server.quiet()
    if mode == "positive":  # most were refused before the engine saw them, so that faults behind that did not show
        assert said[200] > 20, said


# --- a process --------------------------------------------------------------------------------------------------------

PROGRAM = "from slipstream.cli.main import main; main()"


class Process:
    """``slipstream serve`` as a process of its own."""

    def __init__(self, checkpoint: Path, *options: str, program: str = PROGRAM) -> None:
        command = [sys.executable, "-c", program, "serve", str(checkpoint), "--port", "0", "--memory", "64MB", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        wait_for(lambda: self._port() is not None or self.process.poll() is not None, 120)
        assert self._port() is not None, "".join(self.log)
        self.url = f"http://127.0.0.1:{self._port()}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def _port(self) -> str | None:
        found = re.search(r"running on http://127\.0\.0\.1:(\d+)", "".join(self.log))
        return None if found is None else found[1]

    def end(self, seconds: float) -> int:
        return self.process.wait(seconds)


@contextmanager
def process(checkpoint: Path, *options: str, program: str = PROGRAM) -> Iterator[Process]:
    made = Process(checkpoint, *options, program=program)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        made.reader.join()
        made.process.stderr.close()


def test_sigterm_drains(checkpoint: Path) -> None:
    """What is in the works is finished, what is new is sent away, and the exit code is 0."""
    with process(checkpoint) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        body = {**LONG, "max_tokens": 1500, "stream": True}
        with client.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(server.url + "/ready").status_code == 503)
            refused = httpx.post(server.url + CHAT, json=LONG)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx.get(server.url + "/health").status_code == 200
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.end(20) == 0


def test_draining_has_an_end(checkpoint: Path) -> None:
    with process(checkpoint, "--drain-seconds", "0.5") as server:
        with httpx.stream("POST", server.url + CHAT, json={**LONG, "stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.end(20) == 0


def test_crash_ends_the_process(checkpoint: Path) -> None:
    """A process that cannot generate does not stay, so that whoever watches it starts another."""
    program = (
        "from slipstream.engine import Engine\n"
        "step, count = Engine.step, 0\n"
        "def breaking(self):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count > 5: raise MemoryError('no more')\n"
        "    return step(self)\n"
        "Engine.step = breaking\n" + PROGRAM
    )
    with process(checkpoint, program=program) as server:
        assert httpx.post(server.url + CHAT, json=LONG, timeout=60).status_code == 500
        assert server.end(20) == 1


def test_port_that_is_taken(checkpoint: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-c", PROGRAM, "serve", str(checkpoint), "--port", port, "--memory", "64MB"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert f"--port {port} (Address already in use)" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "lots"], "--memory 'lots' is no size"),
        (["--tls-cert", "a.pem"], "belong together"),
        (["--tls-cert", "a.pem", "--tls-key", "b.pem"], "'a.pem' is not a file"),
        (["--tls-cert", __file__, "--tls-key", __file__], "give a certificate and its key"),
        (["--tls-cert", "", "--tls-key", ""], "'' is not a file"),
        (["--host", "256.1.1.1"], "cannot listen on --host 256.1.1.1 --port 8000"),
        (["--host", "192.0.2.1", "--port", "0"], "cannot listen on --host 192.0.2.1"),
        (["--allow-host", "name:8000"], "--allow-host 'name:8000' is no name"),
        (["--allow-host", "https://name"], "is no name of a host"),
        (["--capture", ""], "--capture '' names no folder"),
        (["--capture", "chats", "--capture-size", "0"], "keep nothing"),
        (["--max-body", "0"], "--max-body 0 lets no request in"),
        (["--capture-rate", "0.5"], "--capture-rate is about --capture DIR"),
        (["--capture-redact", "a:b"], "--capture-redact is about --capture DIR"),
        (["--memory", "1KB"], "memory=750 bytes"),
        (["--memory", "0"], "memory=0 leaves no room"),
        (["--timeout", "nan"], "'nan' is not a finite number"),
        (["--drain-seconds", "inf"], "'inf' is not a finite number"),
        (["--capture", "chats", "--capture-rate", "nan"], "'nan' is not a finite number"),
        (["--draft", "nothing-there"], "nothing-there"),
    ],
)
def test_options_that_cannot_be(checkpoint: Path, options: list[str], said: str) -> None:
    from click.testing import CliRunner

    from slipstream.cli.main import cli

    result = CliRunner().invoke(cli, ["serve", str(checkpoint), *options])
    assert result.exit_code == 2, result.output
    assert said in result.output


# --- another draft ----------------------------------------------------------------------------------------------------


def renewals(server: Process) -> dict[str, int]:
    text = httpx.get(server.url + "/metrics", timeout=30).text
    found = re.findall(r'slipstream_draft_renewals_total{outcome="(\w+)"} (\d+)', text)
    return {outcome: int(count) for outcome, count in found}


def versions(server: Process) -> tuple[str, str, str]:
    """Of target and draft, and of the target that the draft was trained for."""
    text = httpx.get(server.url + "/metrics", timeout=30).text
    [line] = [line for line in text.splitlines() if line.startswith("slipstream_info{")]
    label = dict(re.findall(r'(\w+)="([^"]*)"', line))
    return label["target_version"], label["draft_version"], label["draft_trained_for"]


def drafted(server: Process) -> tuple[str, Any]:
    """What is answered, and how the model's drafts fared."""
    body = {**LONG, "max_tokens": 60, "temperature": 0, "speculation": {"k": 3, "statistics": True}}
    document = httpx.post(server.url + CHAT, json=body, timeout=60).json()
    return document["choices"][0]["message"]["content"], document["speculation"]["acceptance_rate"]


def test_sighup_opens_the_draft_again(checkpoint: Path, tmp_path: Path) -> None:
    """The same folder, by then another model: who is there finishes with the old one, and answers stay the same.

    A folder that cannot be used leaves the old draft where it is.
    """
    target, draft, other = (tmp_path / name for name in ("target", "draft", "other"))
    shutil.copytree(checkpoint, target)
    save_checkpoint(draft, parrot_tokenizer(), seed=5, num_hidden_layers=1, max_position_embeddings=2048)
    exact = ("--weights", "fp32", "--draft-weights", "fp32")
    with process(target, "--draft", str(draft), *exact) as server:
        answer, before = drafted(server)
        assert renewals(server) == {"renewed": 0, "failed": 0}
        assert versions(server) == (version_of(checkpoint), version_of(draft), "")
        old = version_of(draft)
        body = {**LONG, "max_tokens": 900, "temperature": 0, "stream": True, "speculation": {"k": 3}}
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            draft.rename(other)
            shutil.copytree(checkpoint, draft)
            server.process.send_signal(signal.SIGHUP)
            wait_for(lambda: renewals(server)["renewed"] == 1, 60)
            wait_for(lambda: versions(server) == (version_of(checkpoint), version_of(checkpoint), ""), 60)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert drafted(server) == (answer, pytest.approx(1.0, abs=0.05))  # the target itself
        assert before < 0.5
        (draft / "model.safetensors").write_bytes(b"broken")
        for number in (1, 2):
            server.process.send_signal(signal.SIGHUP)
            wait_for(lambda number=number: renewals(server)["failed"] == number, 60)  # type: ignore[misc]
        assert versions(server)[1] == version_of(checkpoint)  # what runs, not what lies there
        assert drafted(server) == (answer, pytest.approx(1.0, abs=0.05))
        told = [line for line in server.log if "could not be opened again" in line]
        assert len(told) == 2
        assert "Traceback" not in "".join(server.log)
        shutil.rmtree(draft)
        other.rename(draft)
        target.rename(tmp_path / "what runs")  # another target there is none that runs: SIGHUP is about the draft
        save_checkpoint(target, parrot_tokenizer(), seed=9, max_position_embeddings=100_000)
        assert version_of(target) != version_of(checkpoint)
        (draft / "distill.json").write_text(json.dumps({"target": {"version": "of another"}}))
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: renewals(server)["renewed"] == 2, 60)
        wait_for(lambda: versions(server) == (version_of(checkpoint), old, "of another"), 60)
        seen = Source(f"{server.url}/metrics").look().reading.identity  # the monitor's alarm goes by these
        assert (seen.trained_for, seen.target_version) == ("of another", version_of(checkpoint))
        assert drafted(server) == (answer, before)
        server.process.send_signal(signal.SIGTERM)
        assert server.end(30) == 0


def test_sighup_without_a_draft_that_could_change(checkpoint: Path) -> None:
    with process(checkpoint, "--draft", "suffix") as server:
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: any("no draft to open again" in line for line in server.log))
        assert httpx.get(server.url + "/ready").status_code == 200


def test_a_terminal_that_is_closed_ends_the_server(checkpoint: Path) -> None:
    """SIGHUP says so too; it is no wish for another draft, and nobody could stop the server any more."""
    import fcntl
    import os
    import termios

    master, slave = os.openpty()
    command = [sys.executable, "-c", PROGRAM, "serve", str(checkpoint), "--port", "0", "--memory", "64MB"]
    found = subprocess.Popen(
        command,
        stdin=slave,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    assert found.stderr is not None
    with found:
        for line in found.stderr:
            if "running on http" in line:
                break
        os.close(master)
        assert found.wait(60) == 0
