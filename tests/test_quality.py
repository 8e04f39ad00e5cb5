"""pass@1: what is run, in what it is run, and what may be said of two ways."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import byte_tokenizer, save_checkpoint
from slipstream.cli.main import cli
from slipstream.measure.quality import Problem, compare, mcnemar, program, score, statement
from slipstream.measure.sandbox import _INSIDE, Bounds, has_no_network, run_program

ADD = Problem(
    "t/0",
    'import math\n\ndef add(a, b):\n    """Add."""\n',
    "add",
    "def check(candidate):\n    assert candidate(1, 2) == 3\n",
)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("    return a + b\n", "passed"),
        ("```python\ndef add(a, b):\n    return a + b\n```", "passed"),
        ("Here it is:\n```\ndef add(a, b):\n    return int(math.fsum((a, b)))", "passed"),
        ("```python\nx = 1\n```\nand\n```python\ndef add(a, b):\n    return a + b  # longer\n```", "passed"),
        (
            "```python\ndef add(a, b):\n    return a + b\n```\n```python\n# for example\nassert add(1, 2) == 3\n```",
            "passed",
        ),
        ("    return a - b\n", "failed"),
        ("I cannot do that.", "failed"),
        ("", "failed"),
    ],
)
def test_answers_become_programs(answer: str, outcome: str) -> None:
    assert run_program(program(ADD, answer)) == outcome


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("while True: pass", "timed out"),
        ("import sys; sys.exit(0)", "failed"),
        ("import os; os._exit(0)", "failed"),
        ("print('passed')", "passed"),
        ("x = bytearray(10**10)", "failed"),
        ("open('big', 'wb').write(b'x' * (1 << 22))", "failed"),
        ("import socket; socket.socket()", "failed"),
        ("import urllib.request as u; u.urlopen('http://localhost:1')", "failed"),
        ("import os; assert not os.listdir('.')", "passed"),
        ("import os; assert 'SLIPSTREAM_CACHE' not in os.environ", "passed"),
        ("import time; time.sleep(60)", "timed out"),
        ("raise SystemExit", "failed"),
        ("import os; os.fork()", "failed"),
        ("import os; assert os.system('true') == 0", "failed"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "failed"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', ''], start_new_session=True)", "failed"),
        ("import tempfile; tempfile.TemporaryFile().write(b'x')", "passed"),
        ("import os; open('a', 'w').close(); os.rename('a', 'b'); os.remove('b')", "passed"),
        ("open('/dev/null', 'w').write('x')", "passed"),
        ("\ud800", "failed"),
    ],
)
def test_programs_are_kept_within_bounds(code: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", "x")
    slow = outcome == "timed out"
    assert run_program(code, Bounds(seconds=1.5 if slow else 20)) == outcome


def test_files_outside_the_folder_stay_as_they_are(tmp_path: Path) -> None:
    """An answer of a model could overwrite, move or delete whatever its user may."""
    (tmp_path / "mine").write_text("mine")
    for code in ("open({!r}, 'w')", "open({!r}, 'ab').write(b'x')", "import os; os.remove({!r})"):
        assert run_program(code.format(str(tmp_path / "mine"))) == "failed"
    assert run_program(f"import os; os.rename({str(tmp_path / 'mine')!r}, 'yours')") == "failed"
    assert run_program(f"import shutil; shutil.rmtree({str(tmp_path)!r})") == "failed"
    assert run_program(f"assert open({str(tmp_path / 'mine')!r}).read() == 'mine'") == "passed"


def test_what_a_program_started_does_not_outlive_it(tmp_path: Path) -> None:
    sign = tmp_path / "alive"
    later = f"import time; time.sleep(1); open({str(sign)!r}, 'w')"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {later!r}])"
    run_program(code)
    import time

    time.sleep(1.8)
    assert not sign.exists()


@pytest.mark.skipif(not has_no_network(), reason="this system gives ordinary users no network namespaces")
def test_there_is_no_network_even_for_other_programs() -> None:
    code = "assert open('/proc/net/route').read().count('\\n') <= 1"
    assert run_program(code) == "passed"


def test_scores_have_intervals_near_the_edges_too() -> None:
    assert (score([]).low, score([]).high) == (0.0, 1.0)
    none, all_ = score([False] * 20), score([True] * 20)
    assert none.low == pytest.approx(0, abs=1e-12)
    assert 0.1 < none.high < 0.2
    assert all_.low == pytest.approx(1 - none.high)
    half = score([True, False] * 50)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-3)


def test_comparisons_are_paired() -> None:
    first = {str(i): i < 10 for i in range(20)}
    assert compare(first, first).p == 1
    assert compare(first, first).alike
    worse = {str(i): i < 2 for i in range(20)}
    found = compare(first, worse)
    assert (found.only_first, found.only_second, found.difference) == (8, 0, -0.4)
    assert found.p == pytest.approx(2 / 2**8)
    assert not found.alike
    assert found.high < 0
    assert mcnemar(3, 3) == 1
    assert mcnemar(0, 0) == 1
    assert mcnemar(1, 9) == pytest.approx(2 * 11 / 2**10)


def test_what_is_said() -> None:
    same = compare({"a": True}, {"a": True})
    assert "exactly the problems" in statement(same, 1)
    first, second = ({str(i): i % 3 > n for i in range(30)} for n in (0, 1))
    assert "more than chance" in statement(compare(first, second), 30)
    assert "statistically, speculation is the target" in statement(compare({"a": True}, {"a": False}), 1)


def test_a_program_ends_though_nobody_is_left_to_end_it() -> None:
    """One that slept went on for ever if the command that had started it was killed."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _INSIDE, "1", str(1 << 30)], input=b"word\nimport time\ntime.sleep(600)\n"
    )
    assert done.returncode == -signal.SIGALRM


@pytest.mark.parametrize("seconds", ["0", "nan", "inf", "1e300"])
def test_limits_of_time_without_a_meaning(seconds: str) -> None:
    """Beyond what systems know as a time it was a traceback."""
    result = CliRunner().invoke(cli, ["quality", "nothing", "--seconds", seconds])
    assert result.exit_code == 2
    assert "--seconds" in result.stderr


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    target = save_checkpoint(tmp_path / "t", byte_tokenizer(), max_position_embeddings=2048)
    draft = save_checkpoint(tmp_path / "d", byte_tokenizer(), seed=1, max_position_embeddings=2048)
    args = ["quality", str(target), "--draft", str(draft), "--limit", "2", "-n", "8", "--weights", "fp32"]
    result = CliRunner().invoke(cli, [*args, "--draft-weights", "fp32", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["pass@1"]) == {"target", "speculative", "draft alone"}
    assert found["pass@1"]["target"]["count"] == 2
    assert found["speculative_against_target"]["same_answers"] == 1.0
    assert all(entry["how"].startswith("measured here") for entry in found["pass@1"].values())
    assert not list((tmp_path / "cache" / ".work").glob("*"))
