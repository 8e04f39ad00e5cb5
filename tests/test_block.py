"""The block rule: the joint law of what it lets through, how many tokens that is, and that no nearly right rule passes.

Everything here is computed in closed form: over every draft, and for each draft over every number of accepted tokens
with its probability. Targets and drafts depend on the whole history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream import Verdict
from slipstream.verify import RULES, accept_probs, block_probs, block_weights, residual, verify

Rows = dict[tuple[int, ...], Tensor]
#: (target_probs, drafted, draft_probs or None) -> P(num_accepted = 0..k), and the weight of P in each residual.
Rule = Callable[[Tensor, Tensor, "Tensor | None"], tuple[list[float], list[float]]]


#: Weight of P beside which q is nothing: the residual is P.
ALL_OF_P = 1e18


# --- tables -----------------------------------------------------------------------------------------------------------


def prefixes(vocab: int, length: int) -> Iterator[tuple[int, ...]]:
    """All of at most ``length`` tokens."""
    return (prefix for n in range(length + 1) for prefix in product(range(vocab), repeat=n))


def table(vocab: int, length: int, seed: int, spread: float = 1.5, zeros: float = 0.0) -> Rows:
    """A random distribution behind each prefix; about a share ``zeros`` of it impossible."""
    generator = torch.Generator().manual_seed(seed)
    found: Rows = {}
    for prefix in prefixes(vocab, length):
        logits = spread * torch.randn(vocab, generator=generator, dtype=torch.float64)
        absent = torch.rand(vocab, generator=generator) < zeros
        absent[int(torch.randint(vocab, (), generator=generator))] = False
        found[prefix] = torch.softmax(logits.masked_fill(absent, -math.inf), -1)
    return found


def one_hot(vocab: int, token: int) -> Tensor:
    return torch.eye(vocab, dtype=torch.float64)[token]


@dataclass(frozen=True)
class Pair:
    """A target and a draft: the rows of P and q behind each prefix, and where drafting stops (at depth k at last)."""

    target: Rows
    draft: Rows
    k: int
    ends: frozenset[tuple[int, ...]] = frozenset()

    @property
    def vocab(self) -> int:
        return len(self.target[()])

    def drafts(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every draft with its probability."""
        paths = [((), 1.0)]
        while paths:
            prefix, probability = paths.pop()
            if len(prefix) == self.k or prefix in self.ends:
                yield prefix, probability
                continue
            for token, q in enumerate(self.draft[prefix].tolist()):
                if q > 0:
                    paths.append(((*prefix, token), probability * q))

    def arrays(self, drafted: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """P (n+1, V), the tokens (n,), q (n, V)."""
        n = len(drafted)
        target = torch.stack([self.target[drafted[:i]] for i in range(n + 1)])
        q = [self.draft[drafted[:i]] for i in range(n)]
        return target, torch.tensor(drafted, dtype=torch.long), torch.stack(q) if q else target[:0]

    def plain(self, prefix: tuple[int, ...]) -> Tensor:
        """Joint law of the tokens behind ``prefix`` up to the (k+1)-th, one axis a token."""
        row = self.target[prefix]
        if len(prefix) == self.k:
            return row
        shape = [-1] + [1] * (self.k - len(prefix))
        return row.reshape(shape) * torch.stack([self.plain((*prefix, t)) for t in range(self.vocab)])


def pair(vocab: int, k: int, seed: int, spread: float = 1.5, zeros: float = 0.0) -> Pair:
    return Pair(table(vocab, k, seed, 1.5, zeros), table(vocab, k - 1, seed + 1000, spread, zeros), k)


def copying(vocab: int, k: int, seed: int) -> Pair:
    """A draft that copies: one token behind each prefix."""
    rows = {p: one_hot(vocab, int(row.argmax())) for p, row in table(vocab, k - 1, seed).items()}
    return Pair(table(vocab, k, seed + 1), rows, k)


def mixed(vocab: int, k: int, seed: int) -> Pair:
    """A draft that copies behind about half of the prefixes, and samples behind the others."""
    rows = table(vocab, k - 1, seed)
    generator = torch.Generator().manual_seed(seed)
    for prefix, row in rows.items():
        if torch.rand((), generator=generator) < 0.5:
            rows[prefix] = one_hot(vocab, int(row.argmax()))
    return Pair(table(vocab, k, seed + 1), rows, k)


# --- rules in closed form ---------------------------------------------------------------------------------------------


def longest(passes: Sequence[float]) -> list[float]:
    """P(the largest i that passes = 0..k), if i = 1..k passes independently with ``passes``; 0 always does."""
    return [p * math.prod(1 - later for later in passes[i:]) for i, p in enumerate([1.0, *passes])]


def shortest(passes: Sequence[float]) -> list[float]:
    """P(as many pass as there are before the first that fails = 0..k)."""
    return [math.prod(passes[:i]) * (1 - p) for i, p in enumerate([*passes, 0.0])]


def block(target: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[list[float], list[float]]:
    weights = block_weights(target, drafted, q)
    return longest(block_probs(target, q, weights)), weights


def token(target: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[list[float], list[float]]:
    return shortest(accept_probs(target, drafted, q).tolist()), [1.0] * (len(drafted) + 1)


def law(pair: Pair, rule: Rule, as_none: bool = False) -> Tensor:
    """Joint law of the round's tokens, followed by the target's own up to the (k+1)-th: (V,) * (k+1)."""
    total = torch.zeros_like(pair.plain(()))
    for drafted, probability in pair.drafts():
        target, tokens, q = pair.arrays(drafted)
        counts, weights = rule(target, tokens, None if as_none else q)
        for i, p in enumerate(counts):
            row = target[i] if i == len(drafted) else residual(target[i], q[i], weights[i])
            row = (row / row.sum()).reshape([-1] + [1] * (pair.k - i))
            behind = [torch.ones((), dtype=torch.float64)] * pair.vocab
            if i < pair.k:
                behind = [pair.plain((*drafted[:i], t)) for t in range(pair.vocab)]
            total[drafted[:i]] += probability * p * row * torch.stack(behind)
    return total


def mean_accepted(pair: Pair, rule: Rule, as_none: bool = False) -> float:
    """Expected number of accepted tokens."""
    total = 0.0
    for drafted, probability in pair.drafts():
        target, tokens, q = pair.arrays(drafted)
        counts, _ = rule(target, tokens, None if as_none else q)
        total += probability * sum(i * p for i, p in enumerate(counts))
    return total


def papers_mean(pair: Pair) -> float:
    """Expected number of accepted tokens by the paper's formula, sum over i of E[p_i], in plain Python."""
    total = 0.0

    def go(prefix: tuple[int, ...], probability: float, p: float) -> None:
        nonlocal total
        if len(prefix) == pair.k:
            return
        for x in range(pair.vocab):
            q = float(pair.draft[prefix][x])
            if q > 0:
                following = min(1.0, p * float(pair.target[prefix][x]) / q)
                total += probability * q * following
                go((*prefix, x), probability * q, following)

    go((), 1.0, 1.0)
    return total


# --- the law ----------------------------------------------------------------------------------------------------------

SIZES = [(3, 1), (3, 2), (3, 3), (3, 4), (4, 2), (4, 3)]


def assert_exact(pair: Pair, rule: Rule = block, **given: bool) -> None:
    off = (law(pair, rule, **given) - pair.plain(())).abs().max()
    assert off < 1e-12, f"off by {off:.2g}"


@pytest.mark.parametrize("spread", [0.3, 1.5, 4.0])
@pytest.mark.parametrize(("vocab", "k"), [*SIZES, pytest.param(4, 4, marks=pytest.mark.slow)])
def test_joint_law(vocab: int, k: int, spread: float) -> None:
    for seed in range(2):
        assert_exact(pair(vocab, k, seed, spread))


@pytest.mark.parametrize(("vocab", "k"), SIZES)
def test_joint_law_with_impossible_tokens(vocab: int, k: int) -> None:
    """Ids that only one of the two models has, or that a filter removed from one of them."""
    for seed in range(3):
        assert_exact(pair(vocab, k, seed, zeros=0.4))


@pytest.mark.parametrize("as_none", [True, False])
@pytest.mark.parametrize(("vocab", "k"), SIZES)
def test_joint_law_of_copied_tokens(vocab: int, k: int, as_none: bool) -> None:
    assert_exact(copying(vocab, k, seed=5), as_none=as_none)


@pytest.mark.parametrize(("vocab", "k"), SIZES)
def test_joint_law_of_drafts_that_copy_here_and_sample_there(vocab: int, k: int) -> None:
    for seed in range(3):
        assert_exact(mixed(vocab, k, seed))


def test_joint_law_where_the_length_depends_on_what_was_drafted() -> None:
    """A drafter that is not sure enough of the next token stops: known before that token is drawn."""
    full = pair(3, 3, seed=8)
    for ends in ([()], [(1,)], [(0,), (2, 1)], [(2,), (0, 0), (0, 1), (1, 2)]):
        assert_exact(Pair(full.target, full.draft, 3, frozenset(ends)))


def test_dropping_a_drawn_token_because_of_its_probability_is_not_exact() -> None:
    """The enumeration sees the fault: drafts that never hold an unlikely token are not drafts from q."""
    full = pair(3, 2, seed=8)

    def dropping(target: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[list[float], list[float]]:
        assert q is not None
        sure = int((q.gather(1, drafted.unsqueeze(1)).squeeze(1) > 0.3).long().cumprod(0).sum())
        counts, weights = block(target[: sure + 1], drafted[:sure], q[:sure])
        nothing = [0.0] * (len(drafted) - sure)
        weights[sure] = ALL_OF_P
        return [*counts, *nothing], [*weights, *nothing]

    assert (law(full, dropping) - full.plain(())).abs().max() > 1e-3


def test_joint_law_of_a_draft_that_is_the_target() -> None:
    target = table(3, 3, seed=4)
    same = Pair(target, {p: row for p, row in target.items() if len(p) < 3}, 3)
    assert_exact(same)
    assert mean_accepted(same, block) == pytest.approx(3, abs=1e-12)


@pytest.mark.parametrize("nudge", [1e-15, 1e-9, 1e-5])
def test_joint_law_of_a_draft_that_is_nearly_the_target(nudge: float) -> None:
    """R_i and 1 - p_i are both near 0 then, and h_i is their ratio."""
    target = table(3, 3, seed=4)
    draft = {p: row + nudge * torch.tensor([1.0, -1.0, 0.0]) for p, row in target.items() if len(p) < 3}
    assert_exact(Pair(target, draft, 3))


def test_the_token_rule_by_the_same_enumeration() -> None:
    for seed in range(3):
        assert_exact(pair(3, 3, seed), token)


# --- how many ---------------------------------------------------------------------------------------------------------

MAKERS = {
    "soft": lambda vocab, k, seed: pair(vocab, k, seed, spread=0.5 + seed % 4),
    "zeros": lambda vocab, k, seed: pair(vocab, k, seed, zeros=0.4),
    "mixed": mixed,
    "copying": copying,
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("vocab", "k"), [(3, 1), (3, 2), (3, 3), (4, 2)])
def test_never_fewer_than_the_token_rule_and_as_many_as_the_paper_says(vocab: int, k: int, kind: str) -> None:
    for seed in range(12):
        one = MAKERS[kind](vocab, k, seed)
        mean = mean_accepted(one, block)
        assert mean == pytest.approx(papers_mean(one), abs=1e-12)
        assert mean >= mean_accepted(one, token) - 1e-12


def test_for_every_beginning_of_a_draft_it_stands_at_least_as_often_as_under_the_token_rule() -> None:
    """Given x_1..x_i, P(at least i stand) is p_i, and the product of min(1, P/q) is never larger than that."""
    for seed in range(200):
        target, q = random_rows(6, 5, seed), random_rows(5, 5, seed + 500)
        drafted = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)
        weights = block_weights(target, drafted, q)
        assert bool((rows(weights[1:]) >= accept_probs(target, drafted, q).cumprod(0) - 1e-15).all())


def test_more_than_the_token_rule_where_it_can_be() -> None:
    gains = [mean_accepted(one, block) - mean_accepted(one, token) for one in (pair(3, 3, s) for s in range(5))]
    assert min(gains) > 0.005
    # One token is one token, and a copied one is decided by P alone.
    for one in (pair(4, 1, seed=1), copying(3, 3, seed=1)):
        assert mean_accepted(one, block) == pytest.approx(mean_accepted(one, token), abs=1e-12)


@pytest.mark.parametrize("as_none", [True, False])
def test_copied_tokens_pass_exactly_as_under_the_token_rule(as_none: bool) -> None:
    """For each draft the number of accepted tokens has the same law, not only the same mean."""
    for seed in range(50):
        target = random_rows(6, 4, seed)
        drafted = torch.tensor([(seed * 7 + 3 * i) % 4 for i in range(5)])
        q = None if as_none else torch.eye(4, dtype=torch.float64)[drafted]
        assert block(target, drafted, q)[0] == pytest.approx(token(target, drafted, q)[0], abs=1e-12)


# --- rules that are nearly right --------------------------------------------------------------------------------------


def nearly(
    *,
    passes: Callable[[float, float], float] = lambda r, p: r / (r + 1 - p) if p < 1 else 1.0,
    carry: Callable[[float], float] = lambda ratio: min(1.0, ratio),
    weigh: bool = True,
    first: bool = False,
    shift: int = 0,
) -> Rule:
    """A copy of the block rule, from its formulas, with one thing changed.

    Args:
        passes: (R_i, p_i) to h_i, for i < k.
        carry: what p_{i-1} P/q becomes.
        weigh: whether the residual is of p_i P, not of P.
        first: accept the tokens before the first block that fails, not the longest that passes.
        shift: how many positions R_i is off.
    """

    def rule(target: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[list[float], list[float]]:
        assert q is not None
        p = [1.0]
        for i, x in enumerate(drafted.tolist()):
            p.append(carry(p[-1] * float(target[i, x] / q[i, x])))
        h = p[1:]
        for i in range(1, len(drafted)):
            h[i - 1] = passes(float((p[i] * target[i + shift] - q[i + shift]).clamp(min=0).sum()), p[i])
        return shortest(h) if first else longest(h), p if weigh else [1.0] * len(p)

    return rule


WRONG: dict[str, Rule] = {
    "h_i = p_i": nearly(passes=lambda r, p: p),
    "h_i = R_i, not renormalised": nearly(passes=lambda r, p: r),
    "h_i = R_i / (R_i + 1)": nearly(passes=lambda r, p: r / (r + 1)),
    "h_i = R_i / (1 - p_i)": nearly(passes=lambda r, p: min(1.0, r / (1 - p)) if p < 1 else 1.0),
    "the residual of P instead of p_i P": nearly(weigh=False),
    "up to the first that fails, in reading order": nearly(first=True),
    "R_i at the position before": nearly(shift=-1),
    "p_i is not carried on": nearly(carry=lambda ratio: min(1.0, ratio) ** 0.5),
}


def test_the_copy_is_the_rule() -> None:
    for seed in range(3):
        assert_exact(pair(3, 3, seed), nearly())


@pytest.mark.parametrize("name", WRONG)
def test_a_rule_that_is_nearly_right_is_caught(name: str) -> None:
    one = pair(3, 3, seed=2)
    assert (law(one, WRONG[name]) - one.plain(())).abs().max() > 1e-3


# --- verify() draws with these probabilities --------------------------------------------------------------------------


def rows(given: object) -> Tensor:
    return torch.tensor(given, dtype=torch.float64)


def random_rows(count: int, vocab: int, seed: int, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(spread * torch.randn(count, vocab, generator=generator, dtype=torch.float64), -1)


class Numbers:
    """Stands in for ``torch.rand``."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = iter(values)

    def __call__(self, size: Sequence[int], **rest: object) -> Tensor:
        shape = torch.Size(size)
        return torch.tensor([next(self._values) for _ in range(shape.numel())], dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_verify_takes_the_longest_block_that_passes(seed: int, soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """verify() itself: blocks that pass by a hair, others that fail by one; each token at both ends of its share."""
    k, vocab, weighed = 3, 3, 0
    target, q = random_rows(k + 1, vocab, seed), random_rows(k, vocab, seed + 40)
    for drafted, passing in product(product(range(vocab), repeat=k), product([True, False], repeat=k)):
        given = q if soft else None
        weights = block_weights(target, torch.tensor(drafted), given)
        h = block_probs(target, given, weights)
        u = [p - 1e-12 if ok else p for p, ok in zip(h, passing, strict=True)]
        if max(u) >= 1 or min(u) < 0:
            continue  # a block that cannot fail, or cannot pass
        count = max((i + 1 for i in range(k) if passing[i]), default=0)
        row = target[count]
        if count < k:
            row = (weights[count] * row - (q[count] if soft else one_hot(vocab, drafted[count]))).clamp(min=0)
            weighed += count > 0 and weights[count] < 1
        ends = (row / row.sum()).cumsum(0)
        for next_token in range(vocab):
            start = float(ends[next_token - 1]) if next_token else 0.0
            if ends[next_token] - start > 1e-9:
                for point in (start + 1e-12, float(ends[next_token]) - 1e-12):
                    monkeypatch.setattr(torch, "rand", Numbers([*u, point]))
                    assert verify(target, drafted, given, None, rule="block") == Verdict(count, next_token)
    assert weighed >= 3


def test_by_hand() -> None:
    """The example of docs/verification.md: two symbols, P = (1/3, 2/3), q = (2/3, 1/3), two tokens."""
    target = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64).repeat(3, 1)
    q = torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64).repeat(2, 1)
    for drafted, p, h in [
        ([0, 0], (1, 1 / 2, 1 / 4), (0, 1 / 4)),
        ([0, 1], (1, 1 / 2, 1), (0, 1)),
        ([1, 0], (1, 1, 1 / 2), (1, 1 / 2)),
        ([1, 1], (1, 1, 1), (1, 1)),
    ]:
        weights = block_weights(target, torch.tensor(drafted), q)
        assert weights == pytest.approx(p, abs=1e-15)
        assert block_probs(target, q, weights) == pytest.approx(h, abs=1e-15)
    one = Pair(dict.fromkeys(prefixes(2, 2), target[0]), dict.fromkeys(prefixes(2, 1), q[0]), 2)
    assert mean_accepted(one, token) == pytest.approx(10 / 9, abs=1e-12)
    assert mean_accepted(one, block) == pytest.approx(11 / 9, abs=1e-12)


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [True, False])
def test_where_the_target_is_greedy_both_rules_say_the_same(soft: bool) -> None:
    for seed in range(100):
        wanted = torch.randint(3, (6,), generator=torch.Generator().manual_seed(seed))
        drafted = torch.randint(3, (5,), generator=torch.Generator().manual_seed(seed + 1000))
        drafted[: seed % 6] = wanted[: seed % 6]
        target = torch.eye(3, dtype=torch.float32)[wanted]
        q = torch.eye(3, dtype=torch.float32)[drafted] if soft else None
        verdicts = {verify(target, drafted, q, torch.Generator().manual_seed(s), r) for s in (1, 2) for r in RULES}
        assert len(verdicts) == 1


@pytest.mark.parametrize("as_none", [True, False])
@pytest.mark.parametrize("stuck", [(0,), (1,), (0, 1), (2, 2), (1, 0, 2)])
def test_a_target_that_can_go_no_further_there(stuck: tuple[int, ...], as_none: bool) -> None:
    """A row of NaN is reached exactly as often as in plain decoding, and all other answers keep their probability.

    With the block rule a later position has its say in whether an earlier token stands, so this is not for free. Where
    the row is reached, the test goes on with the row that is hidden by the NaN: the law must be as if it were there.
    """
    one, depth = copying(3, 3, seed=3) if as_none else pair(3, 3, seed=3), len(stuck)
    if as_none:
        one.draft.update({stuck[:i]: one_hot(3, stuck[i]) for i in range(depth)})
    reached = 0

    def hiding(target: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[list[float], list[float]]:
        nonlocal reached
        if tuple(drafted[:depth].tolist()) != stuck:
            return block(target, drafted, q)
        reached += 1
        target = target.clone()
        target[depth] = target[depth + 2 :] = math.nan
        counts, weights = block(target, drafted, q)
        assert not any(counts[depth + 1 :])
        weights[depth] = ALL_OF_P
        return counts, weights

    assert_exact(one, hiding, as_none=as_none)
    assert reached


@pytest.mark.parametrize("soft", [True, False])
def test_nothing_stands_behind_a_row_of_nan(soft: bool) -> None:
    target, q = random_rows(5, 4, seed=1), random_rows(4, 4, seed=2) if soft else None
    target[2] = math.nan
    for seed in range(200):
        verdict = verify(target, [0, 1, 2, 3], q, torch.Generator().manual_seed(seed), rule="block")
        assert verdict.num_accepted <= 2
    target[2] = random_rows(1, 4, seed=3)[0]
    target[4] = math.nan
    assert all(map(math.isfinite, block_probs(target, q, block_weights(target, torch.tensor([0, 1, 2, 3]), q))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tiny", [1e-30, 1e-38, 1e-45, 1e-300])
def test_tiny_probabilities(tiny: float, dtype: torch.dtype) -> None:
    """P or q may underflow: no NaN, no h outside of [0, 1], nothing impossible accepted."""
    small = torch.tensor([[tiny, 1 - tiny, 0]], dtype=dtype).repeat(4, 1)
    large = torch.tensor([[1 - tiny, tiny, 0]], dtype=dtype).repeat(3, 1)
    for target, q in ((small, large), (torch.cat([large, large[:1]]), small[:3]), (small, small[:3])):
        for drafted in product([0, 1, 2], repeat=3):
            tokens = torch.tensor(drafted)
            for given in (q, None):
                weights = block_weights(target, tokens, given)
                h = block_probs(target, given, weights)
                assert all(0 <= p <= 1 for p in (*h, *weights))
                if 2 in drafted:
                    assert max(weights[drafted.index(2) + 1 :]) == 0
                verdict = verify(target, tokens, given, torch.Generator().manual_seed(1))
                assert target[verdict.num_accepted, verdict.next_token] > 0


def test_rows_in_float32_are_exact_to_their_rounding() -> None:
    one = pair(3, 3, seed=6)

    def rounded(target: Tensor, drafted: Tensor, q: Tensor | None) -> tuple[list[float], list[float]]:
        assert q is not None
        return block(target.float(), drafted, q.float())

    assert (law(one, rounded) - one.plain(())).abs().max() < 1e-6


def test_a_token_of_probability_zero_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passing on u <= h lets an impossible block through when u is exactly 0."""
    target = torch.tensor([[0, 0.5, 0.5], [1, 0, 0], [1, 0, 0]], dtype=torch.float64)
    for q in (None, torch.tensor([[1, 0, 0], [1, 0, 0]], dtype=torch.float64)):
        monkeypatch.setattr(torch, "rand", Numbers([0.0, 0.0, 0.0]))
        assert verify(target, [0, 0], q, None, rule="block").num_accepted == 0
