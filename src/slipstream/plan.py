"""``plan.json``: what ``slipstream plan`` found and recommends, for the commands that act on it.

``load`` is the one way in, ``save`` the one way out. Every figure is a ``Estimate``: a number, how it was obtained
("measured here", "predicted from", "assumed"), and its 95 % interval where it has one. docs/plan-schema.md describes
each field; ``slipstream/data/plan.schema.json`` says the same as a JSON Schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from slipstream.errors import InputError
from slipstream.fields import from_json, to_json
from slipstream.measure.files import write_whole

#: Raised when a reader would have to change; fields may be added without.
FORMAT: Final = 1
KIND: Final = "slipstream plan"

#: Draft tokens, and requests at a time, that no engine goes beyond.
_MOST = 65_536
#: Those of ``slipstream.verify``, which would import torch.
RULES = ("block", "token")
Objective = Literal["latency", "throughput"]
Action = Literal["speculate", "plain"]
#: Why: drafting pays; acceptance is below break-even; answers are too short for the draft's prompt to be earned back;
#: at this batch arithmetic is the limit; the draft does not fit; above this request rate plain
#: decoding is faster; no draft could be used at all.
Reason = Literal["pays", "acceptance", "short answers", "batch", "memory", "load", "no draft"]
AdviceKind = Literal["fine-tune the draft", "larger draft", "smaller target", "smaller draft", "other"]
MemberKind = Literal["model", "suffix", "early-exit"]


@dataclass(frozen=True)
class Estimate:
    """A number and where it comes from."""

    value: float
    how: str
    """Begins with "measured here", "predicted from" or "assumed"."""
    low: float | None = None
    """95 % interval over prompts, where there is one."""
    high: float | None = None


@dataclass(frozen=True)
class Target:
    """The model whose answers are wanted."""

    model: str
    weights: str
    device: str
    threads: int | None = None
    """CPU threads within an operation; None on an accelerator."""
    max_positions: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class Member:
    """One part of a draft; several are a cascade, the preferred one first."""

    kind: MemberKind
    model: str | None = None
    """Of a "model": what --draft took, a path, a cached name or a hub id."""
    weights: str | None = None
    layers: int | None = None
    """Of an "early-exit": how many of the target's layers."""


@dataclass(frozen=True)
class Draft:
    """A draft that was looked at."""

    name: str
    """What the other parts of the plan call it; what ``--draft`` takes."""
    members: tuple[Member, ...]
    failed: str | None = None
    """Why it dropped out; None if it did not."""


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Asked:
    """What the plan is for."""

    objective: Objective
    batch: int
    """Requests that are answered at the same time."""
    max_new_tokens: int
    rule: str
    sampling: Sampling
    prompts: int
    prompts_from: str
    categories: Mapping[str, int]
    """Number of prompts by category."""
    requests_per_second: Estimate | None = None
    prompt_tokens: Estimate | None = None
    """Mean."""
    answer_tokens: Estimate | None = None
    """Mean."""
    latency_budget_seconds: Estimate | None = None
    """What an answer may take, if that was said."""


@dataclass(frozen=True)
class Advice:
    """Something that would help more, or help at all."""

    kind: AdviceKind
    what: str
    speed_up: Estimate | None = None
    """What it would bring."""


@dataclass(frozen=True)
class Verdict:
    """The answer."""

    action: Action
    draft: str | None
    """Name of one of ``drafts``; None for plain decoding."""
    k: int
    """Draft tokens in a round; 0 for plain decoding."""
    reason: Reason
    sentence: str
    speed_up: Estimate
    """Plain time / time of the recommended way (of an answer for "latency", of a token of all requests together for
    "throughput"); 1 for plain decoding."""
    margin: Estimate
    """Speed-up of the best draft at its best k, less 1: how far the decision is from going the other way."""
    acceptance: Estimate | None = None
    """accepted / drafted at that k."""
    break_even: Estimate | None = None
    """The constant acceptance above which that draft gains anything."""
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One draft with one k at one batch size; times in seconds."""

    draft: str
    k: int
    batch: int
    speed_up: Estimate
    """Of the time per token after the first, the draft's reading of the prompt included."""
    whole_answer: Estimate
    """Of whole answers, the target's reading of the prompt included."""
    tokens_per_round: Estimate
    acceptance: Estimate | None
    """accepted / drafted; None where nothing is drafted."""
    seconds_per_token: Estimate
    draft_seconds: float
    """Of ``seconds_per_token``: drafting. Predicted from the same."""
    verify_seconds: float
    """Of ``seconds_per_token``: verification."""
    prompt_seconds: float
    """Of ``seconds_per_token``: the draft's reading of the prompt, spread over an answer."""
    categories: Mapping[str, Estimate] = field(default_factory=dict)
    """``speed_up`` by category."""


@dataclass(frozen=True)
class Acceptance:
    """How a draft fares, however long it is."""

    draft: str
    rule: str
    """"block", "token", "greedy draft" or "exact match"."""
    sampling: Sampling
    rate: Estimate
    """Of a first draft token: mean of sum min(P, q) over the answers."""
    positions: tuple[Estimate, ...] = ()
    """At position 1, 2, ... of a draft, given that the ones before were accepted."""
    categories: Mapping[str, Estimate] = field(default_factory=dict)
    """``rate`` by category."""


@dataclass(frozen=True)
class Costs:
    """What passes take, in seconds, behind a context as usual answers have it."""

    plain_step: Estimate
    verify: Mapping[int, Estimate]
    """A verification of a draft of k tokens, by k + 1: target's pass, sampling, accept rule."""
    draft: str | None = None
    """The draft whose costs these are."""
    draft_step: Estimate | None = None
    """A draft token."""
    draft_call: Estimate | None = None
    """A draft, however long."""
    draft_prompt_token: Estimate | None = None
    """The draft's reading of a token of the prompt."""
    prompt_token: Estimate | None = None
    """The target's."""


@dataclass(frozen=True)
class BatchPoint:
    """The best k of the recommended (else the best) draft where so many requests are answered at the same time.

    0 where it gains too little. The speed-up is that of the objective, as in the verdict.
    """

    batch: int
    draft: str
    k: int
    speed_up: Estimate


@dataclass(frozen=True)
class LoadCurve:
    """Latency L = C1 / (1 - rate C2)."""

    idle_seconds: Estimate
    """C1: of a request that is alone."""
    capacity_seconds: Estimate
    """C2: 1 / the most requests a second."""


@dataclass(frozen=True)
class Load:
    """Latency under load with and without."""

    plain: LoadCurve
    speculative: LoadCurve
    crossing_rate: Estimate | None
    """Requests a second above which plain decoding is faster; None if it never is."""
    batch: int | None = None
    """Requests that a full server answers at a time: C2 is for so many."""


@dataclass(frozen=True)
class Checked:
    """Predicted and measured speed-up of the time per token."""

    category: str
    predicted: Estimate
    measured: Estimate
    error: float
    """predicted / measured - 1."""


@dataclass(frozen=True)
class Validation:
    """A short real run of the recommended way."""

    draft: str
    k: int
    overall: Checked
    within: bool
    """Whether the prediction is within 10 % of the measurement."""
    categories: tuple[Checked, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that ``slipstream plan`` found."""

    created: str
    """UTC, ISO 8601."""
    slipstream: str
    """Version of the package."""
    target: Target
    drafts: tuple[Draft, ...]
    asked: Asked
    verdict: Verdict
    candidates: tuple[Candidate, ...]
    acceptance: tuple[Acceptance, ...]
    costs: tuple[Costs, ...]
    batches: tuple[BatchPoint, ...] = ()
    load: Load | None = None
    validation: Validation | None = None
    memory_bytes: Estimate | None = None
    """Most memory that target and best draft need."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kind: Literal["slipstream plan"] = KIND
    format: Literal[1] = FORMAT

    @property
    def draft(self) -> Draft | None:
        """The recommended one; None for plain decoding."""
        return next((d for d in self.drafts if d.name == self.verdict.draft), None)

    @property
    def candidate(self) -> Candidate | None:
        """The recommended draft at the recommended k and the batch that was asked for; None for plain decoding."""
        wanted = (self.verdict.draft, self.verdict.k, self.asked.batch)
        return next((c for c in self.candidates if (c.draft, c.k, c.batch) == wanted), None)

    def accepted(self, draft: str) -> Acceptance | None:
        """How ``draft`` fares under the rule and the sampling that were asked for; None if that is not known."""
        wanted = (draft, self.asked.rule, self.asked.sampling)
        return next((a for a in self.acceptance if (a.draft, a.rule, a.sampling) == wanted), None)


def load(path: str) -> Plan:
    """The plan in a file.

    Raises:
        InputError: no such file, no plan, or one of another format; one sentence names the field.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"the plan {path!r} cannot be read ({error.strerror}); give what `slipstream plan` wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path!r} is not JSON ({error}); give what `slipstream plan` wrote") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InputError(f"{path!r} is no plan; give what `slipstream plan` wrote")
    if found.get("format") != FORMAT:
        raise InputError(
            f"{path!r} is a plan of format {found.get('format')!r}, and this version reads format {FORMAT}; make it "
            "anew with `slipstream plan`"
        )
    plan: Plan = from_json(Plan, found, repr(path))
    _check(plan, repr(path))
    names = {d.name for d in plan.drafts}
    if plan.verdict.action == "speculate" and (plan.verdict.draft not in names or plan.verdict.k < 1):
        raise InputError(f"{path!r} recommends a draft that it does not describe; make it anew with `slipstream plan`")
    return plan


def _check(plan: Plan, where: str) -> None:
    """Refuse numbers that no plan has, before anybody counts with them."""
    if plan.asked.rule not in RULES:
        raise InputError(f"{where}: asked.rule is {plan.asked.rule!r}; use {' or '.join(map(repr, RULES))}")
    for name, value, least in (("verdict.k", plan.verdict.k, 0), ("asked.batch", plan.asked.batch, 1)):
        if not least <= value <= _MOST:
            raise InputError(f"{where}: {name} is {value}; use a number from {least} to {_MOST}")
    for costs in plan.costs:
        if wrong := [one.value for one in (costs.plain_step, *costs.verify.values()) if not one.value > 0]:
            raise InputError(f"{where}: a pass of {costs.draft or 'the target'} takes {wrong[0]:g} s; use more than 0")


def save(plan: Plan, path: str) -> None:
    """Write ``plan`` to a file, at once or not at all."""
    text = json.dumps(to_json(plan), indent=1) + "\n"
    write_whole(Path(path), lambda partial: partial.write_text(text, encoding="utf-8"))
