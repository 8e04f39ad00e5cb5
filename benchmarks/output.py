"""How a benchmark ends: its document is one line of JSON, kept in a file if one was asked for, and printed last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.measure.document import tidy
from slipstream.measure.files import write_whole


def publish(document: Any, out: Path | None) -> None:
    """Write ``document`` to ``out`` whole, and print it."""
    text = json.dumps(tidy(document))
    if out is not None:
        write_whole(out, lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
    print(text)
