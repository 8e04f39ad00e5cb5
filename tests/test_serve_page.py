"""The page, in headless Chromium: what it shows, what it asks for, with which keys, on which screens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import byte_tokenizer, save_checkpoint
from processes import Server, until
from slipstream.serve import page as module
from slipstream.serve.keys import VARIABLE, hash_of

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)")
PHONE = {"width": 375, "height": 700}
DESKTOP = {"width": 1300, "height": 900}
SECRET = "a key for the page"


# --- without a browser ------------------------------------------------------------------------------------------------


def html() -> str:
    return module._html().decode()


def test_it_is_small_and_knows_no_other_host() -> None:
    assert len(html()) < 40_000
    assert "http://www.w3.org/2000/svg" in html()  # the name of a language, which nobody fetches
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html())
    assert not re.findall(r"<(?:link|img|script|iframe)[^>]+(?:src|href)=\"(?!data:)", html())


def test_nothing_is_interpreted() -> None:
    for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert dangerous not in html()
    assert not re.findall(r"\son[a-z]+=\"", html())  # no handlers in attributes, which the policy would not run
    assert not re.findall(r"\sstyle=\"", html())


def test_its_policy() -> None:
    policy = module.headers()["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2


# --- with one ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return save_checkpoint(folder, byte_tokenizer(), max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with Server(checkpoint, "--draft", f"suffix,{checkpoint}", "--weights", "fp32") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page that notes what it asks for and what goes wrong."""

    def __init__(self, browser: Any, url: str, size: dict[str, int] = DESKTOP, scheme: str = "light") -> None:
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page = browser.new_page(viewport=size, color_scheme=scheme)
        self.page.set_default_timeout(60_000)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.wrong.append(said.text))
        self.page.goto(url)

    def answer(self, mode: str = "speculative", tokens: int = 40, prompt: str = "abcabcabc") -> None:
        self.page.check(f"input[value={mode}]", force=True)
        self.page.fill("#prompt", prompt)
        self.page.fill("#most", str(tokens))
        self.page.select_option("#k", "3")
        self.page.click("#go")
        self.done()

    def done(self) -> None:
        self.page.wait_for_selector("body[data-busy=no]")

    def texts(self) -> list[str]:
        return [area.text_content() for area in self.page.query_selector_all(".text")]

    def count(self, selector: str) -> int:
        return len(self.page.query_selector_all(selector))

    def close(self) -> None:
        self.page.close()


@pytest.fixture
def opened(browser: Any, server: Server) -> Iterator[Watched]:
    watched = Watched(browser, server.url)
    yield watched
    watched.close()
    assert watched.wrong == []
    assert all(url.startswith((server.url, "data:")) for url in watched.asked), watched.asked


@needs_browser
def test_tokens_are_coloured_by_origin(opened: Watched, server: Server) -> None:
    opened.answer()
    assert opened.count(".text .accepted") > 10
    assert opened.count(".text .bonus") > 3
    given = {"messages": [{"role": "user", "content": "abcabcabc"}], "max_tokens": 40, "temperature": 0}
    answer = server.post("/v1/chat/completions", **given).json()
    assert opened.texts() == [answer["choices"][0]["message"]["content"]]
    titles = [t.get_attribute("title") for t in opened.page.query_selector_all(".text .accepted")]
    assert all(re.fullmatch(r"accepted, round \d+, k = [123]", title) for title in titles)


@needs_browser
def test_k_of_each_round(opened: Watched) -> None:
    opened.answer()
    bars = opened.page.query_selector_all(".rounds div")
    assert len(bars) > 5
    assert {bar.text_content() for bar in bars[:-1]} <= {"1", "2", "3"}
    drafted = sum(int(bar.text_content()) for bar in bars)
    assert opened.count(".rounds i") == drafted
    assert opened.count(".rounds i.on") == opened.count(".text .accepted") or opened.count(".rounds i.on") <= drafted
    assert re.search(r"accepted\s*\d+ %", opened.page.text_content(".figures"))
    assert re.fullmatch(r"\d+\.\d", opened.page.text_content(".rate > span"))


@needs_browser
def test_plain_has_no_colours(opened: Watched) -> None:
    opened.answer("plain")
    assert opened.count(".text .accepted, .text .bonus, .text .corrected") == 0
    assert opened.texts()[0]


@needs_browser
def test_side_by_side(opened: Watched) -> None:
    opened.answer("both")
    plain, fast = opened.texts()
    assert plain == fast
    assert re.match(r"Speculative: \d+\.\d\d times the speed of plain. The answers are identical", verdict(opened))
    boxes = [area.bounding_box() for area in opened.page.query_selector_all(".answer")]
    assert boxes[0]["y"] == boxes[1]["y"]


def verdict(opened: Watched) -> str:
    return opened.page.text_content("#verdict") or ""


@needs_browser
def test_keyboard(opened: Watched) -> None:
    """Without a mouse: to the prompt, type, choose, answer, stop."""
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#prompt")
    page.keyboard.press("Control+a")
    page.keyboard.type("abcabc")
    for _ in range(5):  # past the settings
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.querySelector('input[name=mode]:checked').value") == "both"
    page.keyboard.press("ArrowLeft")
    page.fill("#most", "7000")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".text span")
    page.keyboard.press("Escape")
    opened.done()
    assert page.is_hidden("#error")
    assert page.is_enabled("#go")


@needs_browser
def test_the_dashboard_lives(opened: Watched) -> None:
    opened.answer(tokens=200)
    until(lambda: (opened.page.text_content(".tile output") or "").endswith("%"))
    shown = [o.text_content() for o in opened.page.query_selector_all(".tile output")]
    assert float(shown[2]) > 0
    assert re.fullmatch(r"\d+ \+ \d+", shown[3])
    assert opened.page.text_content("#state") == "up"
    assert opened.count("#positions div") >= 3


@needs_browser
def test_errors_are_shown(opened: Watched) -> None:
    opened.page.fill("#most", "100000")
    opened.page.click("#go")
    opened.done()
    assert "max_tokens=100000" in opened.page.text_content("#error")
    opened.wrong.clear()  # the browser notes a 400 in its console


@needs_browser
def test_html_of_a_model_is_text(opened: Watched) -> None:
    page = opened.page
    page.evaluate("window.stolen = 0")
    page.evaluate(
        """() => { const a = new Answer("x", false); document.body.append(a.node);
        a.write("<img src=x onerror='stolen=1'><b>bold</b>", {tokens: [{text: "<img src=x onerror='stolen=1'>",
        origin: "accepted"}, {text: "<b>bold</b>", origin: "x onmouseover=1"}]}); }"""
    )
    assert page.evaluate("document.querySelectorAll('.text img, .text b').length") == 0
    assert page.evaluate("window.stolen") == 0


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Any, server: Server, scheme: str) -> None:
    opened = Watched(browser, server.url, scheme=scheme)
    page = opened.page

    def background() -> int:
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    assert (background() > 380) == (scheme == "light")
    for kind in ("accepted", "corrected", "bonus"):
        assert contrast(page, f".legend .{kind}") >= 4.5
    for selector in (".note", ".legend li", "#go", ".state", "label"):
        assert contrast(page, selector) >= 4.5, selector
    page.click("#theme")
    assert (background() > 380) == (scheme == "dark")
    page.reload()
    assert (background() > 380) == (scheme == "dark")
    opened.close()


def contrast(page: Any, selector: str) -> float:
    """Of text to what is behind it, as WCAG has it."""
    colours = page.evaluate(
        """(selector) => { let at = document.querySelector(selector); const ink = getComputedStyle(at).color;
        while (getComputedStyle(at).backgroundColor === "rgba(0, 0, 0, 0)") at = at.parentElement;
        return [ink, getComputedStyle(at).backgroundColor]; }""",
        selector,
    )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted(map(luminance, colours), reverse=True)
    return (high + 0.05) / (low + 0.05)


@needs_browser
def test_a_phone(browser: Any, server: Server) -> None:
    opened = Watched(browser, server.url, PHONE)
    opened.answer("both", tokens=60)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    first, second = [area.bounding_box() for area in page.query_selector_all(".answer")]
    assert second["y"] >= first["y"] + first["height"]
    for button in page.query_selector_all("button"):
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
    assert opened.wrong == []
    opened.close()


@needs_browser
def test_a_key(browser: Any, checkpoint: Path) -> None:
    keys = {VARIABLE: f"me={hash_of(SECRET)}"}
    with Server(checkpoint, "--draft", "none", "--weights", "fp32", env=keys) as server:
        opened = Watched(browser, server.url)
        opened.page.click("#go")
        opened.done()
        assert "API key" in opened.page.text_content("#error")
        opened.page.fill("#key", SECRET)
        opened.page.fill("#most", "20")
        opened.page.click("#go")
        opened.done()
        assert opened.page.is_hidden("#error")
        until(lambda: opened.page.text_content("#state") == "up")
        assert SECRET not in opened.page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
        opened.close()
