"""The command line: what it prints where, its exit codes, and one sentence for each input that cannot be used."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from conftest import byte_tokenizer, save_checkpoint
from slipstream import InputError, Output, Piece, SamplingParams, SpeculativeDecoding, Stats, Verdict, load_model
from slipstream import verify as verification
from slipstream.cli import answer, demo, prompt, run, screen
from slipstream.cli.main import COMMANDS, cli
from slipstream.cli.report import Report, sentence
from slipstream.verify import verify

PROGRAM = "from slipstream.cli.main import main; main()"
ESCAPE = "\x1b"


def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args], input=stdin, prog_name="slipstream")


def spawn(*args: object, **options: Any) -> subprocess.Popen[bytes]:
    """The program in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, *map(str, args)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options)


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can go on for a while."""
    folder = tmp_path_factory.mktemp("long")
    return save_checkpoint(folder, byte_tokenizer(), max_position_embeddings=100_000)


@pytest.fixture
def never_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded before the options were checked")

    monkeypatch.setattr("slipstream.models.load.open_checkpoint", refuse)


class Terminal(io.StringIO):
    """A stream that somebody watches."""

    def isatty(self) -> bool:
        return True


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [["--help"], ["generate", "--help"], ["models", "--help"], ["demo", "--help"], ["models"]]
)
def test_help_is_light(args: list[str]) -> None:
    code = (
        "import sys\nfrom slipstream.cli.main import cli\n"
        f"try: cli.main({args!r})\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy'} & sys.modules.keys()\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_bare_call_shows_the_commands() -> None:
    result = invoke()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"  slipstream {name}" in result.stdout


# --- what cannot be used ------------------------------------------------------------------------------------------


def refused(result: Result, *fragments: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("slipstream: ")
    for fragment in fragments:
        assert fragment in line


@pytest.mark.usefixtures("never_loads")
@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", " \n"], "prompt is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "two prompts"),
        (["--prompt", "a", "-"], "two prompts"),
        (["extra", "--prompt-file", "b"], "two prompts"),
        (["extra"], "one argument too many"),
        (["--prompt-file", "/no/such/file"], "'/no/such/file'"),
        (["-p", "a", "-k", "-1"], "-k -1"),
        (["-p", "a", "-k", "many"], "'many' is no number of draft tokens; use adaptive, halving or a number"),
        (["-p", "a", "--plot", "a.txt"], "neither a .png nor a .svg"),
        (["-p", "a", "--plot", "/no/such/folder/a.svg"], "/no/such/folder/a.svg"),
        (["-p", "a", "--rule", "blocks"], "'blocks'"),
        (["-p", "a", "--top-p", "0"], "top_p=0"),
        (["-p", "a", "--top-p", "1.5"], "top_p=1.5"),
        (["-p", "a", "--temperature", "-0.1"], "temperature=-0.1"),
        (["-p", "a", "--top-k", "-2"], "top_k=-2"),
        (["-p", "a", "--min-p", "2"], "min_p=2"),
        (["-p", "a", "--max-new-tokens", "-1"], "max_new_tokens=-1"),
        (["-p", "a", "--weights", "fp12"], "'fp12'"),
        (["-p", "a", "--draft-weights", "fp12"], "'fp12'"),
        (["-p", "a", "--threads", "0"], "--threads 0"),
        (["-p", "a", "--threads", "100000000"], "1 to 1024"),
        (["-p", "a", "--compare", "--draft", "none"], "--compare"),
        (["-p", "a", "--draft", "suffix,"], "--draft 'suffix,'"),
        (["-p", "a", "--draft", "suffix,ngram"], "twice"),
        (["-p", "a", "--compare", "-k", "0"], "--compare"),
        (["-p", "a", "--svg", "/no/such/folder/a.svg"], "/no/such/folder/a.svg"),
        (["-p", "a", "--svg", "/"], "is a folder"),
        (["-p", "a", "--no-such-option"], "--no-such-option"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(args: list[str], fragment: str) -> None:
    refused(invoke("generate", "model", *args), fragment)


@pytest.mark.usefixtures("never_loads")
def test_picture_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It showed after minutes of work, as a traceback."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(invoke("generate", "model", "-p", "a", "--svg", tmp_path / "a.svg"), "a.svg", "cannot be written")


@pytest.mark.usefixtures("never_loads")
def test_bad_prompt_files(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    refused(invoke("generate", "model", "--prompt-file", latin), "latin.txt", "not UTF-8", "byte 3")
    refused(invoke("generate", "model", "--prompt-file", tmp_path), str(tmp_path))
    refused(invoke("generate", "model", stdin=b"\xff"), "standard input", "not UTF-8")
    refused(invoke("generate", "model", stdin=""), "prompt is empty")


def test_no_prompt_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(InputError, match="--prompt TEXT"):
        prompt.read_prompt(None, None, None)


def test_unknown_command_and_missing_model() -> None:
    refused(invoke("genrate"), "genrate")
    refused(invoke("generate"), "MODEL")


def test_bad_models(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.gguf").write_bytes(b"NOPE" * 100)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    mamba = tmp_path / "mamba"
    mamba.mkdir()
    mamba.joinpath("config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    cases = {
        tmp_path / "missing": "missing",
        tmp_path / "empty": "config.json",
        tmp_path / "other.gguf": "other.gguf",
        tmp_path / "cut.gguf": "cut.gguf",
        mamba: "mamba",
    }
    for path, fragment in cases.items():
        refused(invoke("generate", path, "-p", "a"), fragment)
        refused(invoke("generate", tiny_checkpoint, "-p", "a", "--draft", path), fragment)


def test_no_such_gpu(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    refused(invoke("generate", tiny_checkpoint, "-p", "a", "--device", "cuda"), "cuda")
    refused(invoke("generate", tiny_checkpoint, "-p", "a", "--device", "toaster"), "toaster")


@pytest.fixture
def unreadable_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading any weights fails the test."""
    from slipstream.models.llama import LlamaModel

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("weights were read before the input was checked")

    monkeypatch.setattr(LlamaModel, "__init__", refuse)


@pytest.mark.usefixtures("unreadable_weights")
def test_prompt_and_tokenizers_are_checked_before_weights_are_read(
    tiny_checkpoint: Path, stranger_checkpoint: Path
) -> None:
    """A user waited for a large model to load only to read that the prompt was too long, or the draft a stranger."""
    too_long = invoke("generate", tiny_checkpoint, "-p", "a" * 400)
    stranger = invoke("generate", tiny_checkpoint, "-p", "a", "--draft", stranger_checkpoint)
    assert (too_long.exit_code, stranger.exit_code) == (2, 2)


def test_prompt_longer_than_the_context(tiny_checkpoint: Path) -> None:
    refused(invoke("generate", tiny_checkpoint, "-p", "x" * 300), "301 tokens", "256")


def test_draft_with_another_tokenizer(tiny_checkpoint: Path, other_tokenizer_checkpoint: Path) -> None:
    result = invoke("generate", tiny_checkpoint, "-p", "a", "--draft", other_tokenizer_checkpoint, "-n", 8)
    assert result.exit_code == 0


def test_chat_without_a_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    folder = save_checkpoint(tmp_path / "plain", tokenizer)
    refused(invoke("generate", folder, "-p", "a", "--chat"), "no chat template")


def test_template_that_takes_no_system_message(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    folder = save_checkpoint(tmp_path / "strict", tokenizer)
    refused(invoke("generate", folder, "-p", "a", "--system", "b"), "no system")
    assert invoke("generate", folder, "-p", "a", "--chat", "-n", 1).exit_code == 0


def test_argument_that_is_not_utf_8(tiny_checkpoint: Path) -> None:
    """Python hands such bytes on as halves of surrogate pairs, which no tokenizer takes."""
    refused(invoke("generate", tiny_checkpoint, "-p", os.fsdecode(b"caf\xe9")), "not Unicode")


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["suffix", "ngram", "none", "model", "suffix,model"])
def test_answer_is_the_library_s(draft: str, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    draft = draft.replace("model", str(tiny_draft_checkpoint))
    args = ("--max-new-tokens", 30, "--ignore-eos", "--draft", draft, "-k", 3)
    result = invoke("generate", tiny_checkpoint, "--prompt", "the cat and the cat", *args)
    spec = SpeculativeDecoding(target_model=load_model(tiny_checkpoint))
    (expected,) = spec.complete("the cat and the cat", max_new_tokens=30, ignore_eos=True)
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == expected.text.rstrip("\n")
    assert ESCAPE not in result.output
    for figure in ("time per token", "throughput", "first-token latency", "peak memory"):
        assert figure in result.stderr
    assert ("acceptance rate" in result.stderr) == (draft != "none")


def test_compare_shows_both_and_the_table(tiny_checkpoint: Path) -> None:
    result = invoke("generate", tiny_checkpoint, "-p", "and the and the", "-n", 20, "--ignore-eos", "--compare")
    assert result.exit_code == 0
    for figure in ("speed-up", "mean accepted length", "acceptance rate", "peak memory"):
        assert figure in result.stderr
    assert "Both answers are identical: 20 tokens." in result.stderr
    assert len(result.stdout) % 2 == 0
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:]


def test_json_is_one_document(tiny_checkpoint: Path) -> None:
    args = ("-p", "the the", "-n", 12, "--ignore-eos", "--compare", "--json", "-k", 2)
    result = invoke("generate", tiny_checkpoint, *args)
    (line,) = result.stdout.splitlines()
    document = json.loads(line)
    assert document["k"] == 2
    assert document["draft"] == "suffix"
    assert document["rule"] == "block"
    assert document["identical"] is True
    assert document["split_at"] is None
    assert document["interrupted"] is False
    assert document["speed_up"] > 0
    assert len(document["answer"]["tokens"]) == len(document["answer"]["origins"]) == 12
    assert document["answer"]["tokens"] == document["plain"]["tokens"]
    assert document["answer"]["stats"]["emitted"] == 12
    assert document["answer"]["finish_reason"] == "length"
    assert document["answer"]["peak_memory_bytes"] > 1_000_000
    assert document["sampling"]["max_new_tokens"] == 12


def test_every_round_is_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """k as asked for and as drafted, why drafts ended, who drafted, and a picture of it."""
    picture = tmp_path / "k.svg"
    args = ("-p", "the the", "-n", 30, "--ignore-eos", "--json", "--plot", picture)
    assert json.loads(invoke("generate", tiny_checkpoint, *args).stdout)["k"] == "adaptive"
    result = invoke("generate", tiny_checkpoint, "--draft", tiny_checkpoint, "-k", "halving", *args)
    document = json.loads(result.stdout)
    assert document["k"] == "halving"
    rounds, stats = document["answer"]["rounds"], document["answer"]["stats"]
    assert (rounds[0]["k"], rounds[0]["ended"]) == (0, None)
    assert sum(r["drafted"] for r in rounds) == stats["drafted"] == sum(stats["drafted_by"].values()) > 0
    assert sum(r["accepted"] for r in rounds) == stats["accepted"] == sum(stats["accepted_by"].values())
    assert all(len(r["sources"]) == r["drafted"] <= r["k"] for r in rounds)
    assert [Path(name).name for name in stats["drafted_by"]] == [tiny_checkpoint.name]
    assert f"mean {stats['mean_k']:.1f}" in result.stderr
    assert "<svg" in picture.read_text()


def test_same_seed_same_answer(tiny_checkpoint: Path) -> None:
    def text(seed: int) -> str:
        return invoke(
            "generate", tiny_checkpoint, "-p", "the", "-n", 20, "-t", 1, "--seed", seed, "--ignore-eos"
        ).stdout

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(4)}) > 1


def test_no_token_asked_for(tiny_checkpoint: Path) -> None:
    result = invoke("generate", tiny_checkpoint, "-p", "the", "-n", 0)
    assert result.exit_code == 0
    assert result.stdout == ""


def test_prompt_from_stdin_and_file_are_the_same(tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfthe cat\r\n")
    asked = [("-p", "the cat"), ("--prompt-file", file)]
    texts = {invoke("generate", tiny_checkpoint, *a, "-n", 8).stdout for a in asked}
    texts |= {
        invoke("generate", tiny_checkpoint, *a, "-n", 8, stdin="the cat\n").stdout for a in ([], ["-"], ["-f", "-"])
    }
    assert len(texts) == 1


def test_chat_template_is_applied_once() -> None:
    tokenizer = byte_tokenizer()
    ids = prompt.Prompt("hi", chat=True, system="be kind").ids(tokenizer, "tiny")
    assert ids.count(tokenizer.bos_token_id) == 1
    text = tokenizer.decode(ids)
    assert text == "<s><|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_system_implies_chat(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[run.Task] = []
    monkeypatch.setattr(run, "run", lambda task: tasks.append(task) or 0)
    assert invoke("generate", tiny_checkpoint, "-p", "a", "--system", "b").exit_code == 0
    assert tasks[0].prompt == prompt.Prompt("a", chat=True, system="b")


# --- interruptions ------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_what_came_so_far(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def show(self: screen.Screen, parts: Any) -> None:
        shown.append(parts)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(screen.Screen, "show", show)
    result = invoke("generate", tiny_checkpoint, "-p", "the", "--ignore-eos", "--draft", "none", "--json")
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert document["interrupted"] is True
    assert len(document["answer"]["tokens"]) == 3
    assert document["answer"]["finish_reason"] is None
    assert "Interrupted" in result.stderr
    assert "time per token" in result.stderr


def test_ctrl_c_in_a_process_of_its_own(long_checkpoint: Path) -> None:
    args = ("-p", "the", "-n", 90_000, "--ignore-eos", "--draft", "none")
    process = spawn("generate", long_checkpoint, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Interrupted" in stderr
    assert b"Traceback" not in stderr


def test_reader_of_the_pipe_leaves(long_checkpoint: Path) -> None:
    args = ("-p", "the", "-n", 90_000, "--ignore-eos")
    process = spawn("generate", long_checkpoint, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert stderr == b""


@pytest.mark.skipif(os.name != "posix", reason="closes streams as a POSIX shell does")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_closed(tiny_checkpoint: Path, closed: str) -> None:
    """Python has None in their place."""
    command = [sys.executable, "-c", PROGRAM, "generate", str(tiny_checkpoint), "-p", "the", "-n", "3"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("args", [["models"], ["--help"], ["models", "--json"]])
def test_a_full_disk(args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        process = spawn(*args, stdout=full, stderr=subprocess.PIPE)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.decode().splitlines() == ["slipstream: cannot go on: No space left on device"]
    with Path("/dev/full").open("w") as full:
        process = spawn("genrate", stdout=subprocess.PIPE, stderr=full)
        stdout, _ = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, b"")


# --- colours ------------------------------------------------------------------------------------------------------


def test_terminal_is_coloured_with_a_legend(tiny_checkpoint: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm-256color", "NO_COLOR": ""}
    command = ["generate", str(tiny_checkpoint), "-p", "and the and the", "-n", "40", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | environment,
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # how Linux says that the other side is closed
            chunk = b""
        if not chunk:
            break
        output += chunk
    os.close(ours)
    assert process.wait() == 0
    assert ESCAPE.encode() in output
    assert screen.LEGEND["accepted"].encode() in output
    assert b"Next: " in output


@pytest.mark.parametrize("refusal", ["option", "variable", "dumb"])
def test_colours_can_be_refused(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1" if refusal == "variable" else "")
    monkeypatch.setenv("TERM", "dumb" if refusal == "dumb" else "xterm")
    stream = Terminal()
    shown = screen.Screen(stream, no_color=refusal == "option")
    shown.show([("a\x1b[31m", "accepted"), ("b", "bonus")])
    shown.end()
    assert stream.getvalue() == "a\N{SYMBOL FOR ESCAPE}[31mb\n"
    assert not shown.coloured


def test_a_model_cannot_send_control_sequences_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    screen.Screen(stream).show([("\x1b]0;title\x07", "accepted")])
    assert "\x1b]" not in stream.getvalue()


def test_a_pipe_gets_the_text_as_it_is() -> None:
    stream = io.StringIO()
    shown = screen.Screen(stream)
    shown.show([("a\x1b", "accepted"), ("b\n", "bonus")])
    shown.end()
    assert stream.getvalue() == "a\x1bb\n"


# --- which token a character came from ----------------------------------------------------------------------------


def test_characters_are_attributed_to_their_tokens() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("the é and", add_special_tokens=False)["input_ids"]
    splitter = answer.Splitter(tokenizer)
    origins = ("accepted", "accepted", "corrected", "bonus")[: len(ids)]
    assert len(ids) == 4
    piece = Piece(text="the é and", tokens=tuple(ids), origins=origins)
    assert splitter.split(piece) == [("the", "accepted"), (" ", "accepted"), ("é", "corrected"), (" and", "bonus")]


def test_text_that_lags_behind_keeps_its_origin() -> None:
    """A piece may hold back the beginning of a possible stop string; it comes with a later piece, if at all."""
    tokenizer = byte_tokenizer()
    the, cat = (
        tokenizer("the", add_special_tokens=False)["input_ids"],
        tokenizer("c", add_special_tokens=False)["input_ids"],
    )
    splitter = answer.Splitter(tokenizer)
    assert splitter.split(Piece("t", tuple(the), ("accepted",))) == [("t", "accepted")]
    assert splitter.split(Piece("hec", tuple(cat), ("bonus",))) == [("he", "accepted"), ("c", "bonus")]
    assert splitter.take("\N{REPLACEMENT CHARACTER}") == [("\N{REPLACEMENT CHARACTER}", "bonus")]


# --- reports ------------------------------------------------------------------------------------------------------


def some_answer(*tokens: int, seconds: float = 1.0, interrupted: bool = False) -> answer.Answer:
    stats = Stats(rounds=len(tokens), emitted=len(tokens), total_seconds=seconds)
    origins = ("bonus",) * len(tokens)
    output = Output((1,), tokens, "text", "length", origins, None, stats)
    return answer.Answer(output, (("text", "bonus"),), 1_000_000, interrupted)


@pytest.mark.parametrize(
    ("plain", "fast", "split_at"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 4, 3), 1), ((1, 2, 3), (1, 2), 2), ((), (1,), 0), ((), (), None)],
)
def test_where_two_answers_split(plain: tuple[int, ...], fast: tuple[int, ...], split_at: int | None) -> None:
    report = Report("m", "suffix", 4, True, some_answer(*fast), some_answer(*plain))
    assert report.split_at == split_at
    said = sentence(report)
    assert said is not None
    assert ("identical" in said) == (split_at is None)
    if split_at is not None:
        assert f"token {split_at}" in said


def test_what_is_said_of_sampled_and_of_interrupted_answers() -> None:
    one, two = some_answer(1, 2), some_answer(1, 3)
    assert "by chance" in str(sentence(Report("m", "suffix", 4, False, one, two)))
    assert sentence(Report("m", "suffix", 4, True, some_answer(1, interrupted=True), two)) is None
    assert sentence(Report("m", "suffix", 4, True, one)) is None


def test_speed_up_is_the_ratio_of_times_per_token() -> None:
    report = Report("m", "suffix", 4, True, some_answer(1, 2, 3, seconds=1.0), some_answer(1, 2, seconds=1.0))
    assert report.speed_up == pytest.approx(2.0)
    assert Report("m", "suffix", 4, True, some_answer(1), some_answer(1, 2)).speed_up is None


def test_svg_needs_no_network(tiny_checkpoint: Path, tmp_path: Path) -> None:
    picture = tmp_path / "answer.svg"
    args = ("-p", "and the and the <&>", "-n", 30, "--ignore-eos", "--compare", "--svg", picture)
    assert invoke("generate", tiny_checkpoint, *args).exit_code == 0
    drawing = picture.read_text(encoding="utf-8")
    ET.fromstring(drawing)
    text = drawing.replace("&#160;", " ")
    assert screen.LEGEND["accepted"] in text
    assert "speed-up" in text
    assert "url(http" not in text
    assert text.count("http") == text.count('xmlns="http')


# --- models and demo ----------------------------------------------------------------------------------------------


def test_models_lists_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    assert json.loads(invoke("models", "--json").stdout) == []
    assert "to be fetched" in invoke("models").stdout
    (tmp_path / "mine.gguf").write_bytes(b"GGUF" + bytes(1_999_996))
    (entry,) = json.loads(invoke("models", "--json").stdout)
    assert (entry["name"], entry["kind"], entry["bytes"]) == ("mine", "gguf", 2_000_000)
    assert "mine" in invoke("models").stdout
    assert "2 MB" in invoke("models").stdout


def test_fetch_of_an_unknown_name() -> None:
    refused(invoke("models", "fetch", "no-such-model"), "no-such-model", "smollm2-135m")


def test_fetch_prints_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, progress: Callable[[str], None]) -> Path:
        progress(f"downloading {name}")
        return Path("cache") / name

    monkeypatch.setattr("slipstream.models.registry.fetch", fetch)
    result = invoke("models", "fetch", "some-model")
    assert result.stdout.split() == [str(Path("cache") / "some-model")]
    assert result.stderr.splitlines() == ["downloading some-model"]


def test_demo_compares(long_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(demo, "MODEL", str(long_checkpoint))
    monkeypatch.setattr(demo, "fetch_shown", fetched.append)
    monkeypatch.setattr(demo, "PARAMS", {"max_new_tokens": 16, "ignore_eos": True})
    result = invoke("demo", "--json")
    assert result.exit_code == 0, result.exception
    assert fetched == [str(long_checkpoint)]
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["identical"] is True
    assert document["sampling"]["max_new_tokens"] == 16
    assert "speed-up" in result.stderr


def test_demo_checks_before_it_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch_shown", lambda name: pytest.fail("fetched"))
    refused(invoke("demo", "-k", "-3"), "-k -3")


def test_rule_reaches_the_decoder(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def watching(p: object, drafted: object, q: object, generator: object, rule: str) -> Verdict:
        seen.add(rule)
        return verify(p, drafted, q, generator, rule)

    monkeypatch.setattr("slipstream.decode.verify", watching)
    for args, rule in (((), "block"), (("--rule", "token"), "token"), (("--rule", "block"), "block")):
        seen.clear()
        assert invoke("generate", tiny_checkpoint, "-p", "the the", "-n", 8, "-t", 1, *args).exit_code == 0
        assert seen == {rule}


def test_options_keep_the_library_s_defaults() -> None:
    from slipstream.cli.options import RULES, sampling_params

    assert verification.RULES == RULES

    given = {"temperature": 0.5, "stop": ("x",), "ignore_eos": False, "k": 3, "top_p": None}
    assert sampling_params(given) == SamplingParams(temperature=0.5, stop=("x",))
