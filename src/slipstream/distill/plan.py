"""What a plan says of target and draft: the pair that is to be retrained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import InputError
from slipstream.plan import FORMAT


@dataclass(frozen=True)
class Planned:
    """A pair."""

    target: str
    draft: str
    """A draft model."""


def read_plan(file: Path) -> Planned:
    """The target of a plan, and the draft model that it recommends, or else the first one that it looked at.

    Raises:
        InputError: the file cannot be read, is no plan, or has no draft model in it.
    """
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        if plan.get("format", FORMAT) != FORMAT:
            raise ValueError(f"its format is {plan['format']!r}, and this version reads format {FORMAT}")
        target, chosen = str(plan["target"]["model"]), plan["verdict"]["draft"]
        drafts = sorted(plan["drafts"], key=lambda draft: draft["name"] != chosen)
        models = [m["model"] for d in drafts for m in d["members"] if m["kind"] == "model"]
    except OSError as error:
        raise InputError(f"--from-plan {str(file)!r} cannot be read ({error.strerror}); give a plan.json") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"--from-plan {str(file)!r} is no plan that can be read ({error}); make it with slipstream plan"
        ) from error
    if not models or not isinstance(models[0], str):
        raise InputError(f"--from-plan {str(file)!r} has no draft model to train; make a plan with one, or use --init")
    return Planned(target, models[0])
