"""What the documentation says: its examples run, its links lead somewhere, and the public names are what they are."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]
MODULES = [found.name for found in pkgutil.walk_packages(slipstream.__path__, "slipstream.")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_on_a_page(page: Path) -> None:
    assert doctest.testfile(str(page), module_relative=False, encoding="utf-8").failed == 0


@pytest.mark.parametrize("name", ["slipstream", *MODULES])
def test_examples_in_a_module(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_public_names() -> None:
    assert slipstream.__all__ == [
        "Draft",
        "InputError",
        "ModelError",
        "Output",
        "Piece",
        "Round",
        "SamplingParams",
        "SlipstreamError",
        "SpeculativeDecoding",
        "Stats",
        "Stream",
        "TokenLogprob",
        "Verdict",
        "load_model",
    ]
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        slipstream.nothing  # noqa: B018
