"""One audit: all tests of one engine within a budget, beside the controls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

from slipstream.audit.evidence import Wealth, holm
from slipstream.audit.law import Scorer
from slipstream.audit.laws import LawCheck, PairCheck, Pool
from slipstream.audit.reference import FAULTS, ReferenceDecoder
from slipstream.audit.single import single_tests
from slipstream.audit.suite import Remembering, Settings, candidates, law_plans, pair_plans
from slipstream.audit.toy import ToyModel
from slipstream.audit.types import ComparisonError, Engine, EngineError, Finding
from slipstream.errors import InputError

EXACT, FAULT, UNDECIDED = "exact within power", "fault found", "not decided"
#: Name of the finding that an engine failed.
FAILED = "answers"
EXIT_CODES = {EXACT: 0, FAULT: 1, UNDECIDED: 3}
#: Answers between two looks.
_BATCH = 16
#: Total variation of the weakest published fault on the toy target, about.
_WEAKEST = 0.06
#: Called with what is being done and how much of it, 0 to 1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Control:
    """What became of one built-in decoder."""

    fault: str | None
    as_it_must: bool
    samples: int
    found_by: str


@dataclass(frozen=True)
class Report:
    """All that an audit found."""

    engine: str
    target: str
    verdict: str
    findings: tuple[Finding, ...]
    controls: tuple[Control, ...]
    settings: Settings
    seconds: float
    answers: int

    @property
    def exit_code(self) -> int:
        """0 exact within power, 1 fault found, 3 not decided."""
        return EXIT_CODES[self.verdict]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"kind": "slipstream-audit", "version": 1, "exit_code": self.exit_code, **asdict(self)}


class Audit:
    """The statistical tests of one engine, in turns, until all is clear or time is up.

    Args:
        checks: what to collect.
        pool: what all law checks bet on together; None if there are no token ids.
    """

    def __init__(
        self, engine: Engine, checks: Sequence[LawCheck | PairCheck], pool: Pool | None, settings: Settings
    ) -> None:
        self.checks = list(checks)
        self._engine, self._pool, self._settings = engine, pool, settings

    @property
    def samples(self) -> int:
        """Answers so far."""
        return sum(check.samples for check in self.checks)

    @property
    def share(self) -> float:
        """How much of the plan is done."""
        wanted = sum(check.plan.samples for check in self.checks)
        return sum(min(c.samples, c.plan.samples) for c in self.checks) / max(1, wanted)

    def step(self) -> bool:
        """A few answers for the check that has least of its plan; False if there is nothing left to ask."""
        check = min(self.checks, key=lambda one: one.samples / one.plan.samples)
        if check.complete or self.has_fault():
            return False
        count = min(_BATCH, check.plan.samples - check.samples)
        # Seeds of their own for every check and answer, also after a resumed run.
        seed = (self._settings.seed * 97 + self.checks.index(check)) * 1_000_000 + check.samples
        check.ask(self._engine, count, seed)
        return True

    def p_values(self) -> list[float]:
        """Of all hypotheses, in the order of ``findings``."""
        own = [p for check in self.checks for p in check.p_values()]
        return own + ([w.p_value for w in self._pool.wealth] if self._pool else [])

    def has_fault(self) -> bool:
        """Whether a hypothesis has fallen."""
        p_values = self.p_values()
        return min(p_values, default=1.0) <= self._settings.alpha / max(1, len(p_values))

    def findings(self) -> list[Finding]:
        """All of them, with what fell by Holm's rule called a fault."""
        p_values = self.p_values()
        each = self._settings.alpha / max(1, len(p_values))
        found = [f for check in self.checks for f in check.findings(each)]
        found += self._pool.findings(each) if self._pool else []
        falls = holm(p_values, self._settings.alpha)
        return [replace(f, result="fault") if fell else f for f, fell in zip(found, falls, strict=True)]

    def state(self) -> dict[str, Any]:
        """What is needed to go on later."""
        pool = None
        if self._pool is not None:
            bets = [[bet.seen, bet.expected] for bet in self._pool.bets]
            pool = {"bets": bets, "tokens": self._pool.tokens, "wealth": [[w.now, w.peak] for w in self._pool.wealth]}
        return {"checks": {check.plan.name: check.state() for check in self.checks}, "pool": pool}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        for check in self.checks:
            if check.plan.name in state["checks"]:
                check.restore(state["checks"][check.plan.name])
        if self._pool is not None and state["pool"] is not None:
            for bet, (seen, expected) in zip(self._pool.bets, state["pool"]["bets"], strict=True):
                bet.seen, bet.expected = seen, expected
            self._pool.tokens = state["pool"]["tokens"]
            self._pool.wealth = [Wealth(*pair) for pair in state["pool"]["wealth"]]


def prepare(engine: Engine, scorer: Scorer, settings: Settings) -> Audit:
    """The tests of laws for an engine whose target's logits are known."""
    pool = Pool()
    remembering = Remembering(scorer)
    plans = law_plans(remembering, engine, settings)
    return Audit(engine, [LawCheck(plan, remembering, settings.tolerance, pool) for plan in plans], pool, settings)


def prepare_pairs(engine: Engine, reference: Engine, scorer: Scorer | None, settings: Settings) -> Audit:
    """The comparison with a reference, where the target's logits or the engine's token ids are not to be had."""
    plans = pair_plans(scorer, settings)
    return Audit(engine, [PairCheck(plan, reference) for plan in plans], None, settings)


def single_findings(engine: Engine, scorer: Scorer, settings: Settings) -> list[Finding]:
    """The tests without statistics."""
    prompts = candidates(scorer, 3, settings.seed + 1)
    found: list[Finding] = []
    for test in single_tests(engine, scorer, prompts, settings.tolerance, settings.seed):
        try:
            found.append(test())
        except EngineError as error:
            return [*found, failure(error)]
    return found


def failure(error: EngineError) -> Finding:
    """What an engine's failing says: it was asked for nothing that it refuses; the reference's failing says nothing."""
    if isinstance(error, ComparisonError):
        return Finding(FAILED, "every request is answered", "undecided", f"the reference failed: {error}")
    return Finding(FAILED, "every request is answered", "fault", f"the engine failed: {error}")


def verdict(findings: Sequence[Finding], controls: Sequence[Control]) -> str:
    """A fault is a fault; exact is only what nothing is undecided of, with controls that did as they must."""
    results = {finding.result for finding in findings}
    if not all(control.as_it_must for control in controls):
        return UNDECIDED
    if "fault" in results:
        return FAULT
    return UNDECIDED if "undecided" in results or not results - {"skipped"} else EXACT


# --- controls ---------------------------------------------------------------------------------------------------------


def run_control(fault: str | None, settings: Settings, seconds: float = 60.0) -> Control:
    """Put the built-in decoder with one fault, or the correct one, to all tests, on the toy target.

    Args:
        seconds: of this process's time, at most.
    """
    target, draft = ToyModel(), ToyModel(seed=1, likeness=0.4)
    decoder = ReferenceDecoder(target, draft, fault=fault)
    if fault is not None:  # the weakest of them takes more answers than an engine is asked for
        settings = replace(settings, variation=min(settings.variation, _WEAKEST))
    findings = single_findings(decoder, target, settings)
    samples = 0
    if not any(f.result == "fault" for f in findings):
        audit = prepare(decoder, target, settings)
        until = process_time() + seconds  # a machine that is busy must not make a control fail
        while process_time() < until and audit.step():
            pass
        findings, samples = [*findings, *audit.findings()], audit.samples
    broken = [f.name for f in findings if f.result == "fault"]
    undecided = any(f.result == "undecided" for f in findings)
    as_it_must = bool(broken) if fault else not broken and not undecided
    return Control(fault, as_it_must, samples, broken[0] if broken else "")


def run_controls(settings: Settings, progress: Progress) -> list[Control]:
    """The correct decoder and every broken one."""
    out = []
    for i, fault in enumerate((None, *FAULTS)):
        progress(f"control: {fault or 'correct decoder'}", i / (len(FAULTS) + 1))
        out.append(run_control(fault, settings))
    return out


# --- resuming ---------------------------------------------------------------------------------------------------------


def load_state(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run left in ``path``; None if there is no such file.

    Raises:
        InputError: it belongs to another audit, or is none.
    """
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        same = state["key"] == dict(key)
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise InputError(f"--resume {str(path)!r} is not a state of an audit ({error}); give another file") from error
    if not same:
        raise InputError(f"--resume {str(path)!r} belongs to another audit; give the same options, or another file")
    return state
