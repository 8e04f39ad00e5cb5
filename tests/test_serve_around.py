"""A server as it is run: a configuration, keys, limits, logs, metrics, captures, kill -9."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from openai import OpenAI

from conftest import byte_tokenizer, save_checkpoint
from processes import Server, capture_files, until
from slipstream.cli.main import cli
from slipstream.serve.keys import VARIABLE, hash_of, new_key
from test_serve_metrics import Read, samples

SECRET, HASH = new_key()
LIMITED, LIMITED_HASH = new_key()
PROMPT = "a text that must not be in any log"
MAIL = "ann@example.org"

HOOK = """
def redact(record):
    return None if "drop me" in str(record) else {**record, "redacted": True}
"""
CONFIG = """
target = {target!r}
draft = "suffix"
weights = "fp32"
name = "tiny"
stream-pace = true
max-body = "20KB"
max-prompt = 200
max-n = 3
cors-origin = ["https://good.example"]
capture = {chats!r}
capture_redact = "hook_of_tests:redact"

[[keys]]
name = "me"
hash = "{hash}"

[[keys]]
name = "limited"
hash = "{limited}"
requests_per_minute = 3
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 20  # of which transformers would tell on stderr, among the log's lines
    return save_checkpoint(folder, tokenizer, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path) -> Iterator[Server]:
    (folder / "hook_of_tests.py").write_text(HOOK, encoding="utf-8")
    text = CONFIG.format(target=str(checkpoint), chats=str(folder / "chats"), hash=HASH, limited=LIMITED_HASH)
    (folder / "serve.toml").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with Server("--config", folder / "serve.toml", env={"PYTHONPATH": path}) as server:
        yield server


def ask(server: Server, secret: str = SECRET, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    given = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0} if path == "/v1/completions" else {}
    headers = {"Authorization": f"Bearer {secret}", **body.pop("headers", {})}
    return server.post(path, headers=headers, **(given | body))


def metrics(server: Server) -> Read:
    read = Read.__new__(Read)
    read.samples = samples(server.get("/metrics", Authorization=f"Bearer {SECRET}").text)
    return read


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


# --- keys and limits --------------------------------------------------------------------------------------------------


def test_a_key_is_needed(server: Server) -> None:
    assert error(server.post(prompt="a"), 401)["code"] == "invalid_api_key"
    assert error(server.get("/metrics"), 401)
    assert error(server.get("/v1/models"), 401)
    assert ask(server).status_code == 200
    assert server.get("/").status_code == server.get("/health").status_code == server.get("/ready").status_code == 200


def test_limits_of_a_key(server: Server) -> None:
    codes = [ask(server, LIMITED).status_code for _ in range(4)]
    assert codes == [200, 200, 200, 429]
    late = ask(server, LIMITED)
    assert error(late, 429)["type"] == "rate_limit_error"
    assert 1 <= int(late.headers["retry-after"]) <= 60
    assert ask(server).status_code == 200


def test_sizes(server: Server) -> None:
    assert error(ask(server, prompt="x" * 20_000), 413)
    assert "200 allowed" in error(ask(server, prompt="x" * 1000), 400)["message"]
    assert error(ask(server, n=4), 400)["param"] == "n"


def test_a_request_can_do_nothing_but_generate(server: Server, checkpoint: Path) -> None:
    assert error(ask(server, model=str(checkpoint)), 404)["code"] == "model_not_found"
    for field in ("chat_template", "draft_model", "trust_remote_code", "logits_processors", "prompt_file"):
        assert field in error(ask(server, **{field: "/etc/passwd"}), 400)["message"]
    unknown = error(ask(server, prompt=[10**6]), 400)
    assert unknown["param"] == "prompt"
    assert str(checkpoint) not in unknown["message"]
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}
    chat = ask(server, path="/v1/chat/completions", messages=[{"role": "user", "content": [image]}])
    assert chat.status_code == 400


def test_where_from(server: Server) -> None:
    assert error(ask(server, headers={"Host": "evil.example"}), 403)["code"] == "unknown_host"
    assert error(ask(server, headers={"Origin": "https://evil.example"}), 403)["code"] == "unknown_origin"


def test_other_sites_by_name(server: Server) -> None:
    asked = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(server.url + "/v1/completions", headers=asked)
    assert preflight.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-credentials" not in preflight.headers
    other = httpx.options(server.url + "/v1/completions", headers={**asked, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    answer = ask(server, headers={"Origin": "https://good.example"})
    assert answer.headers["access-control-allow-origin"] == "https://good.example"


# --- logs, metrics, captures ------------------------------------------------------------------------------------------


def test_logs(server: Server) -> None:
    response = ask(server, headers={"X-Request-Id": "known-1"}, user="ann")
    assert response.headers["x-request-id"] == "known-1"
    (line,) = until(lambda: [one for one in server.log() if one["request_id"] == "known-1"])
    usage = response.json()["usage"]
    assert (line["key"], line["status"], line["finish_reasons"], line["user"]) == ("me", 200, ["length"], "ann")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["answer_id"] == response.json()["id"]


def test_no_log_has_what_people_wrote(server: Server) -> None:
    for wrong in ({"temperature": 3}, {"stop": [PROMPT] * 20}, {"logit_bias": {PROMPT: 1}}, {PROMPT: 1}):
        assert ask(server, **wrong).status_code == 400
    ask(server, headers={"X-Request-Id": "last-1"})
    until(lambda: [one for one in server.log() if one["request_id"] == "last-1"])
    text = "\n".join(server.lines)
    assert PROMPT not in text
    assert SECRET not in text
    assert all(json.loads(line)["time"] for line in server.lines)


def test_metrics(server: Server) -> None:
    before = metrics(server)
    usages = [ask(server, max_tokens=40, prompt="abcabcabcabc", n=2).json()["usage"] for _ in range(3)]
    after = metrics(server)

    def gain(name: str, **labels: str) -> float:
        return sum(
            value - before.samples.get((at, given), 0.0)
            for (at, given), value in after.samples.items()
            if at == f"slipstream_{name}" and labels.items() <= dict(given).items()
        )

    details = [usage["completion_tokens_details"] for usage in usages]
    accepted = sum(d["accepted_prediction_tokens"] for d in details)
    assert gain("generated_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 240
    assert gain("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert gain("accepted_tokens_total", drafter="suffix") == accepted
    assert gain("accepted_tokens_per_position_total") == accepted
    drafted = sum(d["rejected_prediction_tokens"] for d in details) + accepted
    assert gain("draft_tokens_total") == gain("draft_tokens_per_position_total") == drafted > 0
    assert gain("round_draft_tokens_sum") == drafted
    assert gain("generated_tokens_total", origin="accepted") == accepted
    assert gain("answers_total", finish="length") == 6
    assert gain("time_to_first_token_seconds_count") == gain("answer_seconds_count") == 6
    assert gain("inter_token_seconds_count", at="verified") == 240 - 6
    assert gain("batch_answers_sum") > gain("batch_answers_count") > 0
    assert gain("key_tokens_total", key="me") == gain("generated_tokens_total") + gain("prompt_tokens_total")
    assert gain("prefix_tokens_total") >= 0
    assert after("running") == after("waiting") == after("cache_positions_used") == 0


def streamed(server: Server, **body: Any) -> tuple[str, list[dict[str, Any]]]:
    given = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": True} | body
    headers = {"Authorization": f"Bearer {SECRET}"}
    with httpx.stream("POST", server.url + "/v1/completions", json=given, headers=headers, timeout=60) as response:
        assert response.status_code == 200, response.read()
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data.pop() == "[DONE]"
    chunks = [json.loads(one) for one in data]
    return "".join(c["choices"][0]["text"] for c in chunks if c["choices"]), chunks


def test_a_paced_stream_has_the_same_text(server: Server) -> None:
    asked: dict[str, Any] = {"prompt": "abcabcabcabc", "max_tokens": 60, "speculation": {"k": 4}}
    before = metrics(server)
    text, chunks = streamed(server, **asked)
    assert text == ask(server, **asked).json()["choices"][0]["text"]
    after = metrics(server)
    rounds = after("rounds_total") - before("rounds_total")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert rounds < 2 * 60  # of both answers, so some brought several tokens
    sent = after("inter_token_seconds_count", at="sent") - before("inter_token_seconds_count", at="sent")
    assert sent == 59


def test_where_tokens_come_from(server: Server) -> None:
    text, chunks = streamed(server, prompt="abcabcabcabc", max_tokens=60, speculation={"tokens": True, "k": 3})
    about = [chunk["speculation"] for chunk in chunks if "speculation" in chunk]
    rounds = [one for one in about if "drafted" in one]
    tokens = [token for one in about for token in one["tokens"]]
    assert len(tokens) == 60
    assert "".join(token["text"] for token in tokens) == text
    accepted = [token for token in tokens if token["origin"] == "accepted"]
    assert len(accepted) == sum(one["accepted"] for one in rounds) > 0
    assert {token["source"] for token in accepted} == {"suffix"}
    assert len(rounds) + len(accepted) in (60, 61)  # one more where the last round was cut off
    assert all(one["accepted"] <= one["drafted"] <= one["k"] <= 3 for one in rounds)


def test_captures(server: Server, folder: Path) -> None:
    ask(server, prompt="keep this one", user="ann")
    ask(server, prompt="drop me, says the hook")
    ask(server, prompt="left out", store=False)
    chat = [{"role": "user", "content": f"mail of {MAIL}"}]
    answer = ask(server, path="/v1/chat/completions", messages=chat, max_tokens=5, temperature=0).json()

    def found() -> list[dict[str, Any]]:
        return [record for record in capture_files(folder / "chats") if record.get("messages") == chat]

    (record,) = until(found)
    assert record["answer"] == answer["choices"][0]["message"]["content"]
    assert (record["id"], record["completion_tokens"], record["redacted"]) == (
        answer["id"],
        answer["usage"]["completion_tokens"],
        True,
    )
    records = capture_files(folder / "chats")
    (kept,) = [r for r in records if r.get("prompt", "").endswith("keep this one")]
    assert kept["finish_reason"] == "length"
    assert not [r for r in records if "drop me" in str(r) or "left out" in str(r)]
    assert all(name not in record for name in ("key", "user") for record in records)


# --- when it breaks ---------------------------------------------------------------------------------------------------


def test_kill_9_and_restart(checkpoint: Path, tmp_path: Path) -> None:
    """Clients that try again complete, and what was captured before is whole."""
    with Server(checkpoint, "--weights", "fp32", "--capture", tmp_path / "chats", "--name", "tiny") as server:
        client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=20, timeout=120)

        def complete(number: int) -> Any:
            return client.completions.create(
                model="tiny", prompt=f"number {number}", max_tokens=300, temperature=0, extra_body={"ignore_eos": True}
            )

        before = [complete(n) for n in range(3)]
        until(lambda: len(capture_files(tmp_path / "chats")) == 3)
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(complete, n) for n in range(4)]
            time.sleep(0.1)
            server.kill()
            server.start()
            after = [one.result() for one in running]
    assert [a.choices[0].text for a in after[:3]] == [b.choices[0].text for b in before]
    assert all(a.usage.completion_tokens == 300 for a in after)
    assert len(capture_files(tmp_path / "chats")) >= 7


# --- before anything is loaded ----------------------------------------------------------------------------------------


@pytest.fixture
def never_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded before the options were checked")

    monkeypatch.setattr("slipstream.models.load.open_checkpoint", refuse)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli, ["serve", *map(str, args)], prog_name="slipstream")


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('target = "m"\nprot = 1', "unknown setting 'prot'; did you mean 'port'?"),
        ('target = "m"\ntimeout = "1"', "timeout = '1' has the wrong type"),
        ('target = "m"\nmax-body = "much"', "--max-body 'much' is no size"),
        ('target = "m"\nlog-format = "xml"', "log-format = 'xml' cannot be used"),
        ('target = "m"\ncors-origin = ["good.example"]', "--cors-origin 'good.example' is no origin"),
        ('target = "m"\ncors-origin = ["*"]', "--cors-origin '*' is no origin"),
        ('target = "m"\n[[keys]]\nname = "a"\nhash = "x"', "[[keys]] number 1 has no hash"),
        ('target = "m"\ncapture = "/proc/nothing"', "--capture /proc/nothing cannot be used"),
        ('target = "m"\ncapture-rate = 0', "capture-rate = 0 cannot be used"),
        ('target = "m"\ntimeout = nan', "timeout = nan cannot be used"),
        ('target = "m"\nk = -1', "-k -1"),
        ("port = 1", "TARGET"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path: Path, text: str, fragment: str) -> None:
    (tmp_path / "serve.toml").write_text(text, encoding="utf-8")
    result = invoke("--config", tmp_path / "serve.toml")
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert fragment in result.stderr


@pytest.mark.usefixtures("never_loads")
def test_keys_of_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"me={SECRET}")
    result = invoke("m")
    assert result.exit_code == 2
    assert VARIABLE in result.stderr
    assert SECRET not in result.stderr


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('target = "m"\nmax-body = "much"', encoding="utf-8")
    result = invoke("other", "--config", tmp_path / "serve.toml", "--max-body", "1KB")
    assert result.exit_code == 2
    assert "other" in result.stderr
    assert "much" not in result.stderr


def test_a_new_key() -> None:
    result = invoke("--new-key")
    assert result.exit_code == 0
    key, hashed = (line.split()[1] for line in result.stdout.splitlines())
    assert hash_of(key) == hashed
    assert key not in result.stderr
