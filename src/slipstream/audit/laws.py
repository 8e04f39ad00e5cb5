"""Tests of laws: many short answers to one prompt against what the target says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.audit.evidence import ChainBet, PairBet, RankBet, Wealth, detectable
from slipstream.audit.law import Cells, LawTable, Scorer
from slipstream.audit.types import Answer, ComparisonError, Engine, EngineError, Finding, Prompt
from slipstream.types import SamplingParams

#: Joint laws of this many first tokens are tested, and of whole answers.
JOINTS = (1, 2, 3)
#: Positions that are tested over all prompts together: the first, the second to fourth, later ones.
_PLACES = ("first token", "tokens 2 to 4", "later tokens")


@dataclass(frozen=True)
class LawPlan:
    """One test: a prompt, parameters, and how many answers it wants."""

    name: str
    prompt: Prompt
    params: SamplingParams
    samples: int
    detects: str | None = None
    """If given, what the number of answers was chosen for; else a total variation is stated."""


@dataclass
class Pool:
    """Bets over all plans together on the ranks of tokens, one for each of ``_PLACES``."""

    bets: list[RankBet] = field(default_factory=lambda: [RankBet() for _ in _PLACES])
    wealth: list[Wealth] = field(default_factory=lambda: [Wealth() for _ in _PLACES])
    tokens: list[int] = field(default_factory=lambda: [0] * len(_PLACES))

    def take(self, laws: Sequence[Cells], answer: Sequence[int]) -> None:
        """Learn one answer."""
        for i, (law, token) in enumerate(zip(laws, answer, strict=True)):
            place = 0 if i == 0 else 1 if i < 4 else 2
            self.wealth[place].add(self.bets[place].factor(law, token))
            self.tokens[place] += 1

    def findings(self, alpha: float) -> list[Finding]:
        """One for each place."""
        return [self._finding(place, alpha) for place in range(len(_PLACES))]

    def _finding(self, place: int, alpha: float) -> Finding:
        bet, wealth = self.bets[place], self.wealth[place]
        rows = [
            {"token": f"likeliest {r + 1}" if r < 9 else "others", "observed": o / n, "expected": e / n}
            for r, (o, e) in enumerate(zip(bet.seen, bet.expected, strict=True))
            if e > 0 and (n := self.tokens[place])
        ]
        return Finding(
            name=f"ranks, {_PLACES[place]}",
            hypothesis="tokens of each rank come as often as the target says, over all prompts together",
            result=_result(wealth, alpha, enough=True),
            detail=_odds(wealth),
            samples=self.tokens[place],
            p_value=wealth.p_value,
            table=tuple(rows),
        )


class LawCheck:
    """Collects the answers to one plan."""

    def __init__(self, plan: LawPlan, scorer: Scorer, tolerance: float, pool: Pool) -> None:
        assert isinstance(plan.prompt, tuple)
        self.plan = plan
        self.samples = 0
        self.violations: Counter[str] = Counter()
        """Answers that end where they must not; one is a fault."""
        self.impossible: Counter[str] = Counter()
        self.origins: list[Counter[str]] = [Counter() for _ in range(plan.params.max_new_tokens)]
        self._table = LawTable(scorer, plan.prompt, plan.params, tolerance)
        self._ends = {*self._table.eos, *plan.params.stop_token_ids}
        self._vocab = scorer.vocab_size
        self._bet = ChainBet()
        self._pool = pool
        self.wealth = [Wealth() for _ in (*JOINTS, None)]

    @property
    def complete(self) -> bool:
        """Whether the planned number of answers is there."""
        return self.samples >= self.plan.samples

    def ask(self, engine: Engine, count: int, seed: int) -> None:
        """Take ``count`` further answers, with seeds from ``seed`` on."""
        groups = -(-count // self.plan.params.n)
        seeds = [seed + i for i in range(groups)]
        for answer in engine.complete([self.plan.prompt] * groups, self.plan.params, seeds):
            self.take(answer)

    def take(self, answer: Answer) -> None:
        """Learn one answer."""
        self.samples += 1
        tokens = self._checked(answer)
        if not tokens:
            return
        laws = self._table.along(tokens)
        self._pool.take(laws, tokens)
        for i, (law, token) in enumerate(zip(laws, tokens, strict=True)):
            if law.of(token) == len(law.ids) + 1:
                self.impossible[f"token {token} at position {i + 1}, which must not occur there"] += 1
            factor = self._bet.factor(tokens[:i], law, token)
            for joint, wealth in zip((*JOINTS, len(tokens)), self.wealth, strict=True):
                if i < joint:
                    wealth.add(factor)
        for counter, origin in zip(self.origins, answer.origins, strict=False):
            counter[origin] += 1

    def _checked(self, answer: Answer) -> tuple[int, ...]:
        """The tokens up to the end of the answer, after a look at whether it ends where it must."""
        tokens, params = answer.tokens or (), self.plan.params
        stops = [i for i, t in enumerate(tokens) if t in self._ends and i + 1 >= params.min_new_tokens]
        if len(tokens) > params.max_new_tokens:
            self.violations[f"{len(tokens)} tokens where at most {params.max_new_tokens} were asked for"] += 1
        if stops and stops[0] + 1 < len(tokens):
            self.violations["tokens after one that ends the answer"] += 1
        if not stops and len(tokens) < params.max_new_tokens:
            self.violations["an end before the asked length, without a token that ends the answer"] += 1
        if any(not 0 <= t < self._vocab for t in tokens):
            self.violations["an id outside of the vocabulary"] += 1
            return ()
        end = stops[0] + 1 if stops else params.max_new_tokens
        merged = self._table.eos
        return tuple(merged[0] if t in merged else t for t in tokens[:end])

    def p_values(self) -> list[float]:
        """Of the joint laws of the first 1, 2, 3 and all tokens; 0 for the last if an answer ended at a wrong place."""
        found = [wealth.p_value for wealth in self.wealth]
        return [*found[:-1], 0.0] if self.violations else found

    def findings(self, alpha: float) -> list[Finding]:
        """One for each joint law."""
        names = [*(f"first {j} tokens" if j > 1 else "first token" for j in JOINTS), "whole answers"]
        return [self._finding(i, name, alpha) for i, name in enumerate(names)]

    def _finding(self, index: int, what: str, alpha: float) -> Finding:
        depth = (*JOINTS, self.plan.params.max_new_tokens)[index]
        p_value = self.p_values()[index]
        seen = self.violations + self.impossible if index == len(JOINTS) else Counter()
        broken = "; ".join(f"{n} times {text}" for text, n in seen.most_common(3))
        cost = self._bet.cost(depth, self._table.known)
        variation = detectable(self.samples, cost, alpha)
        result = _result(self.wealth[index], alpha, self.complete)
        return Finding(
            name=f"{self.plan.name}: {what}",
            hypothesis=f"the joint law of the {what} is the target's"
            if depth > 1
            else "the first token's law is the target's",
            result="fault" if p_value <= alpha else result,
            detail=broken or _odds(self.wealth[index]),
            samples=self.samples,
            p_value=p_value,
            detects=self.plan.detects or f"total variation {variation:.2f}",
            table=tuple(self._worst(depth)),
            more={"total_variation": variation, "positions": [dict(c) for c in self.origins]},
        )

    def _worst(self, depth: int, rows: int = 6) -> list[dict[str, Any]]:
        """Where observed and expected differ most, of the places with at most ``depth`` - 1 tokens before."""
        found = []
        for before, seen in self._bet.counts.items():
            law, total = self._table.known.get(before), sum(seen.values())
            if law is None or len(before) >= depth or total < 10:
                continue
            per_cell: Counter[int] = Counter()
            for token, n in seen.items():
                per_cell[law.of(token)] += n
            labels = [*map(str, law.ids), "others", "impossible"]
            for cell, (label, p) in enumerate(zip(labels, law.probs, strict=True)):
                o = per_cell[cell]
                if o or p:
                    gap = abs(o - total * p) / max(total * p * (1 - p), 0.25) ** 0.5
                    row = {"behind": list(before), "token": label, "n": total, "observed": o / total, "expected": p}
                    found.append((gap, {**row, "deviations": round(gap, 1)}))
        found.sort(key=lambda pair: -pair[0])
        return [row for _, row in found[:rows]]

    def state(self) -> dict[str, Any]:
        """What is needed to go on later."""
        return {
            "samples": self.samples,
            "wealth": [[w.now, w.peak] for w in self.wealth],
            "violations": dict(self.violations),
            "impossible": dict(self.impossible),
            "origins": [dict(c) for c in self.origins],
            "counts": [[list(before), list(seen.items())] for before, seen in self._bet.counts.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.samples = state["samples"]
        self.wealth = [Wealth(*pair) for pair in state["wealth"]]
        self.violations = Counter(state["violations"])
        self.impossible = Counter(state["impossible"])
        self.origins = [Counter(c) for c in state["origins"]]
        self._bet.counts = {tuple(before): dict(seen) for before, seen in state["counts"]}
        for before, seen in self._bet.counts.items():
            self._table.along((*before, next(iter(seen))))  # their laws, which reports need


class PairCheck:
    """The texts of two engines beside each other, where token ids or the target's logits are not to be had."""

    def __init__(self, plan: LawPlan, reference: Engine) -> None:
        self.plan = plan
        self.samples = 0
        self.wealth = [Wealth()]
        self._bet = PairBet()
        self._reference = reference

    @property
    def complete(self) -> bool:
        """Whether the planned number of answers is there."""
        return self.samples >= self.plan.samples

    def ask(self, engine: Engine, count: int, seed: int) -> None:
        """Take ``count`` further pairs."""
        prompts = [self.plan.prompt] * count
        ours = engine.complete(prompts, self.plan.params, [seed + i for i in range(count)])
        try:
            theirs = self._reference.complete(prompts, self.plan.params, [2**30 + seed + i for i in range(count)])
        except EngineError as error:
            raise ComparisonError(f"{self._reference.name}: {error}") from error
        for our, their in zip(ours, theirs, strict=True):
            self.samples += 1
            tokens = our.tokens is not None and their.tokens is not None
            self.wealth[0].add(self._bet.factor(_outcome(our, tokens), _outcome(their, tokens)))

    def p_values(self) -> list[float]:
        """Of the hypothesis that both follow one law."""
        return [self.wealth[0].p_value]

    def findings(self, alpha: float) -> list[Finding]:
        """The one finding."""
        kinds = len(self._bet.ours.keys() | self._bet.theirs.keys())
        # Two samples tell half of what one sample against a known law tells.
        variation = detectable(self.samples // 2, (kinds - 1) / 2, alpha)
        rows = [
            {"token": repr(text), "observed": self._bet.ours.get(text, 0) / self.samples, "expected": n / self.samples}
            for text, n in Counter(self._bet.theirs).most_common(6)
        ]
        finding = Finding(
            name=f"{self.plan.name}: beside the reference",
            hypothesis=f"texts follow the law of {self._reference.name}",
            result=_result(self.wealth[0], alpha, self.complete),
            detail=_odds(self.wealth[0]),
            samples=self.samples,
            p_value=self.wealth[0].p_value,
            detects=self.plan.detects or f"total variation {variation:.2f}",
            table=tuple(rows),
            more={"total_variation": variation},
        )
        return [finding]

    def state(self) -> dict[str, Any]:
        """What is needed to go on later."""
        bet, wealth = self._bet, self.wealth[0]
        return {"samples": self.samples, "wealth": [wealth.now, wealth.peak], "ours": bet.ours, "theirs": bet.theirs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.samples, self.wealth = state["samples"], [Wealth(*state["wealth"])]
        self._bet = PairBet(dict(state["ours"]), dict(state["theirs"]))


def _outcome(answer: Answer, by_tokens: bool) -> str:
    return repr(answer.tokens) if by_tokens else f"{answer.text} [{answer.finish_reason}]"


def _result(wealth: Wealth, alpha: float, enough: bool) -> Any:
    if wealth.p_value <= alpha:
        return "fault"
    return "pass" if enough else "undecided"


def _odds(wealth: Wealth) -> str:
    return f"a bettor against it turned 1 into at most {2.718281828 ** min(wealth.peak, 300):.3g}"
