"""Several candidates for one position: the law of what comes out, and what trees are worth, by enumeration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from slipstream import InputError
from slipstream.tree import (
    Choice,
    Tree,
    candidate_probs,
    chain,
    depth,
    expected_accepted,
    expected_block,
    ranked_shares,
    sampled_shares,
    size,
    trees,
    verify_candidates,
    without_replacement,
)
from test_block import Numbers, Pair, block, mean_accepted, pair, random_rows, token

#: Every list of candidates, its probability, and the rows that it was drawn from.
Draws = Iterator[tuple[list[int], float, Tensor | None]]


def replaced(q: Tensor, count: int) -> Draws:
    """Independently, from the same q."""
    for candidates in product(range(len(q)), repeat=count):
        yield list(candidates), float(q[list(candidates)].prod()), q.repeat(count, 1)


def different(q: Tensor, count: int) -> Draws:
    for candidates in permutations(range(len(q)), count):
        rows = without_replacement(q, candidates)
        yield list(candidates), float(rows[range(count), list(candidates)].prod()), rows


def two_drafters(q: Tensor, count: int) -> Draws:
    """Each with a q of its own."""
    rows = random_rows(count, len(q), seed=77)
    for candidates in product(range(len(q)), repeat=count):
        yield list(candidates), float(rows[range(count), list(candidates)].prod()), rows


def likeliest(q: Tensor, count: int) -> Draws:
    yield q.topk(count).indices.tolist(), 1.0, None


def one_drawn_one_looked_up(q: Tensor, count: int) -> Draws:
    """The second is the likeliest of the others."""
    for first in range(len(q)):
        second = int(q.index_fill(0, torch.tensor([first]), 0).argmax())
        yield [first, second][:count], float(q[first]), torch.stack([q, torch.eye(len(q)).double()[second]])[:count]


def the_same_twice(q: Tensor, count: int) -> Draws:
    yield [1] * count, 1.0, None


WAYS: list[Callable[[Tensor, int], Draws]] = [
    replaced,
    different,
    two_drafters,
    likeliest,
    one_drawn_one_looked_up,
    the_same_twice,
]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_law_of_the_token(way: Callable[[Tensor, int], Draws], count: int) -> None:
    if way is one_drawn_one_looked_up and count > 2:
        return
    for seed in range(5):
        target, q = random_rows(2, 4, seed, spread=2)
        law = torch.zeros_like(target)
        for candidates, probability, rows in way(q, count):
            stands, rest = candidate_probs(target, candidates, rows)
            for candidate, p in zip(candidates, stands, strict=True):
                law[candidate] += probability * p
            law += probability * (1 - sum(stands)) * rest
        assert torch.allclose(law, target, rtol=0, atol=1e-12)


def test_wrong_rows_are_caught() -> None:
    """Candidates drawn without replacement, verified as though with."""
    target, q = random_rows(2, 4, seed=1, spread=2)
    law = torch.zeros_like(target)
    for candidates, probability, _ in different(q, 2):
        stands, rest = candidate_probs(target, candidates, q.repeat(2, 1))
        for candidate, p in zip(candidates, stands, strict=True):
            law[candidate] += probability * p
        law += probability * (1 - sum(stands)) * rest
    assert (law - target).abs().max() > 1e-3


@pytest.mark.parametrize("soft", [True, False])
def test_verify_draws_with_these_probabilities(soft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, q = random_rows(2, 4, seed=3)
    candidates = [2, 0]
    rows = without_replacement(q, candidates) if soft else None
    (first, second), rest = candidate_probs(target, candidates, rows)
    second /= 1 - first
    for u, choice in [
        ((first - 1e-12,), Choice(0, 2)),
        ((first, second - 1e-12), Choice(1, 0)),
    ]:
        monkeypatch.setattr(torch, "rand", Numbers(u))
        assert verify_candidates(target, candidates, rows, None) == choice
    ends = rest.cumsum(0)
    for last in range(4):
        if rest[last] > 0:
            monkeypatch.setattr(torch, "rand", Numbers((first, second, float(ends[last]) - 1e-12)))
            assert verify_candidates(target, candidates, rows, None) == Choice(None, last)


def test_no_candidates_is_plain_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_rows(1, 4, seed=3)[0]
    monkeypatch.setattr(torch, "rand", Numbers((0.0,)))
    assert verify_candidates(target, [], None, None) == Choice(None, 0)


def test_a_rejected_candidate_never_comes_out() -> None:
    target = random_rows(1, 4, seed=3)[0]
    for seed in range(100):
        choice = verify_candidates(target, [1, 2], None, torch.Generator().manual_seed(seed))
        assert choice.index is not None or choice.token not in (1, 2)


def test_inputs_are_unchanged_and_checked() -> None:
    target, q = random_rows(2, 4, seed=3)
    copies = target.clone(), q.clone()
    rows = without_replacement(q, [0, 1])
    verify_candidates(target, [0, 1], rows, None)
    assert torch.equal(target, copies[0])
    assert torch.equal(q, copies[1])
    with pytest.raises(InputError, match=r"\(2, 4\) do not fit 3 candidates"):
        verify_candidates(target, [0, 1, 2], rows, None)
    with pytest.raises(InputError, match="fewer than 3 possible"):
        without_replacement(torch.tensor([0.5, 0.5, 0, 0]), [0, 1, 2])


# --- what trees are worth ---------------------------------------------------------------------------------------------


def mean_over_texts(one: Pair, accepted: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    """Mean over all texts of the target of what ``accepted`` says of their first position."""
    total = 0.0
    for text in product(range(one.vocab), repeat=one.k):
        target = torch.stack([one.target[text[:i]] for i in range(one.k)])
        draft = torch.stack([one.draft[text[:i]] for i in range(one.k)])
        probability = float(one.plain(())[text].sum())
        if probability > 0:
            total += probability * float(accepted(target, draft, torch.tensor(text))[0])
    return total


def by_walking(one: Pair, tree: Tree, ranked: bool, prefix: tuple[int, ...] = ()) -> float:
    """Expected number of accepted tokens of a tree, over everything that its candidates may be."""
    if not tree:
        return 0.0
    total = 0.0
    draws = (likeliest if ranked else different)(one.draft[prefix], len(tree))
    for candidates, probability, rows in draws:
        stands, _ = candidate_probs(one.target[prefix], candidates, rows)
        for candidate, p, behind in zip(candidates, stands, tree, strict=True):
            if probability * p > 0:
                total += probability * p * (1 + by_walking(one, behind, ranked, (*prefix, candidate)))
    return total


@pytest.mark.parametrize("ranked", [True, False])
def test_trees_on_texts_of_the_target_are_worth_what_they_are_worth_in_decoding(ranked: bool) -> None:
    one = pair(3, 3, seed=4)
    for tree in (shape for nodes in (1, 2, 3, 4) for shape in trees(nodes) if depth(shape) <= 3):

        def accepted(target: Tensor, draft: Tensor, tokens: Tensor, tree: Tree = tree) -> Tensor:
            shares = ranked_shares(draft, tokens, 2) if ranked else sampled_shares(target, draft, tokens)
            return expected_accepted(tree, shares)

        assert mean_over_texts(one, accepted) == pytest.approx(by_walking(one, tree, ranked), abs=1e-12)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_chains_on_texts_of_the_target(zeros: float) -> None:
    for seed in range(3):
        one = pair(3, 3, seed, zeros=zeros)
        tokenwise = mean_over_texts(one, lambda p, q, x: expected_accepted(chain(3), sampled_shares(p, q, x)))
        assert tokenwise == pytest.approx(mean_accepted(one, token), abs=1e-12)
        blockwise = mean_over_texts(one, lambda p, q, x: expected_block(p, q, x, 3))
        assert blockwise == pytest.approx(mean_accepted(one, block), abs=1e-12)


def test_a_draft_that_is_the_target_or_one_hot() -> None:
    """Nothing is ever rejected, or there is no second candidate: shares stay numbers."""
    rows = random_rows(3, 4, seed=1)
    assert sampled_shares(rows, rows, torch.tensor([0, 1, 2])).tolist() == [[1, 1, 1], [0, 0, 0]]
    sure = torch.eye(4, dtype=torch.float64)[:3]
    shares = sampled_shares(rows, sure, torch.tensor([0, 2, 2]))
    assert torch.isfinite(shares).all()
    assert shares.tolist() == [[1, 0, 1], [0, 0, 0]]
    # In float32 the largest entry of a row may be a little more than 1.
    above = torch.tensor([[1.0000001, 1e-9, 0, 0]])
    assert 0 <= float(sampled_shares(rows[:1].float(), above, torch.tensor([1]))[1]) <= 1


def test_shapes() -> None:
    assert [len(trees(n)) for n in range(9)] == [1, 1, 2, 4, 9, 21, 51, 127, 323]  # Motzkin's numbers
    assert all(size(tree) == 6 for tree in trees(6))
    assert size(chain(3)) == depth(chain(3)) == 3
    assert sorted(depth(tree) for tree in trees(3)) == [2, 2, 2, 3]
    assert len(trees(3, 1)) == 1
    assert len(trees(3, 3)) == 5


def test_expected_accepted_by_hand() -> None:
    shares = torch.tensor([[1.0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.float64)
    two_then_one: Tree = (((),), ())
    assert expected_accepted(chain(3), shares).tolist() == [1, 0, 2, 1]
    assert expected_accepted(two_then_one, shares).tolist() == [1, 1, 2, 1]
    assert expected_accepted(((((),), ((),)),), shares).tolist()[:2] == [3, 0]
