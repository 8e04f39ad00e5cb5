"""Where text is shown: in colours on a terminal, as it is in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from slipstream.types import Origin

    #: A stretch of an answer, and where its token came from.
    Part = tuple[str, Origin | None]
else:
    Part = tuple

#: Blue and orange stay apart for every kind of colour blindness, and the attributes tell them apart without colours.
STYLES = {"accepted": "#2f8fd0", "corrected": "underline #d86a00", "bonus": "bold"}
LEGEND = {"accepted": "accepted from the draft", "corrected": "corrected", "bonus": "bonus"}

# A model may write control characters; on a terminal they would be obeyed.
_VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {0x7F: 0x2421}


def wants_colour(stream: TextIO | None, no_color: bool) -> bool:
    """Whether ``stream`` is a terminal that may be coloured."""
    refused = no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not refused and is_terminal(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody watches ``stream``."""
    return stream is not None and stream.isatty()


def console(stream: TextIO, no_color: bool, **options: Any) -> Console:
    """A rich console that colours only what ``wants_colour``."""
    from rich.console import Console

    coloured = wants_colour(stream, no_color)
    return Console(
        file=stream,
        force_terminal=coloured,
        no_color=not coloured,
        highlight=False,
        emoji=False,
        markup=False,
        **options,
    )


def next_step(*words: str) -> None:
    """Say on stderr what to run next: ``slipstream`` and these words."""
    import shlex

    import click

    click.echo(f"Next: slipstream {shlex.join(words)}", err=True)


@contextmanager
def working(doing: str, no_color: bool) -> Iterator[None]:
    """Say on a terminal what is being done, as long as it is."""
    if not is_terminal(sys.stderr):
        yield
        return
    with console(sys.stderr, no_color).status(doing):
        yield


def styled(parts: Sequence[Part]) -> Text:
    """An answer in the colours of its tokens' origins."""
    from rich.text import Text

    text = Text()
    for part, origin in parts:
        text.append(part.translate(_VISIBLE), STYLES[origin] if origin else None)
    return text


def legend(counts: dict[Origin, int]) -> Text:
    """What the colours mean, and how many tokens had each."""
    from rich.text import Text

    entries = [Text.assemble((f"{LEGEND[o]}: {n}", STYLES[o])) for o, n in counts.items()]
    return Text("   ").join(entries)


class Screen:
    """Shows an answer as it comes.

    Args:
        stream: None shows nothing.
        no_color: no colours even on a terminal.
        by_origin: colour by origin; a plain answer has nothing to tell apart.
    """

    def __init__(self, stream: TextIO | None, no_color: bool = False, by_origin: bool = True) -> None:
        self._stream = stream
        self._terminal = is_terminal(stream)
        self._console = None
        if stream is not None and by_origin and wants_colour(stream, no_color):
            self._console = console(stream, no_color)
        self._open_line = False

    @property
    def coloured(self) -> bool:
        """Whether origins can be seen, so that a legend is due."""
        return self._console is not None

    def show(self, parts: Sequence[Part]) -> None:
        """Append to the answer."""
        if self._stream is None or not parts:
            return
        if self._console is not None:
            self._console.print(styled(parts), end="", soft_wrap=True)
        else:
            text = "".join(text for text, _ in parts)
            self._stream.write(text.translate(_VISIBLE) if self._terminal else text)
        self._stream.flush()
        self._open_line = not parts[-1][0].endswith("\n")

    def end(self) -> None:
        """Finish the last line."""
        if self._stream is not None and self._open_line:
            self._stream.write("\n")
            self._stream.flush()
        self._open_line = False


def note(sentence: str) -> None:
    """Say something on stderr to whoever watches; nothing if nobody does."""
    if is_terminal(sys.stderr):
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
