"""Losses against a readable reference, their gradients against differences, and what the target says of outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from losses_of_tests import REFERENCES, ce
from slipstream.distill.losses import LOSSES, NAMES, cross_entropy
from slipstream.distill.teacher import Asking, Keeping, Targets
from slipstream.models.load import load_model


def logits(rows: int, size: int, seed: int) -> Tensor:
    return 2 * torch.randn(rows, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_what_its_reference_says(name: str) -> None:
    p, q = logits(6, 9, 0).log_softmax(-1), logits(6, 9, 1).log_softmax(-1)
    expected = [REFERENCES[name](a.exp().tolist(), b.exp().tolist()) for a, b in zip(p, q, strict=True)]
    assert LOSSES[name](p, q).tolist() == pytest.approx(expected, abs=1e-12)
    assert LOSSES[name](p, p).tolist() == pytest.approx([0.0] * 6, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_small_differences(name: str) -> None:
    p = logits(3, 5, 2).log_softmax(-1)
    given = logits(3, 5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](p, x.log_softmax(-1)), (given,))


def test_cross_entropy_counts_only_tokens_that_have_a_row() -> None:
    q, labels = logits(4, 5, 4).log_softmax(-1), torch.tensor([1, -1, 4, 0])
    expected = [0.0 if t < 0 else ce(row.exp().tolist(), t) for row, t in zip(q, labels.tolist(), strict=True)]
    assert cross_entropy(q, labels).tolist() == pytest.approx(expected, abs=1e-12)
    given = logits(4, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x.log_softmax(-1), labels), (given,))


def test_acceptance_has_a_gradient_where_total_variation_has_next_to_none() -> None:
    p = torch.tensor([[0.0, -30.0, -30.0]], dtype=torch.float64).log_softmax(-1)
    grads = {}
    for name in ("tv", "acceptance"):
        given = torch.tensor([[-12.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
        LOSSES[name](p, given.log_softmax(-1)).sum().backward()
        grads[name] = float(given.grad.norm())  # type: ignore[union-attr]
    assert grads["tv"] < 1e-4 < 0.5 < grads["acceptance"]


@pytest.mark.parametrize("name", LOSSES)
def test_outcomes_with_any_other_are_a_coarser_law(name: str) -> None:
    """The kept tokens and one outcome for all the others: the same loss as of the law lumped by hand."""
    p, q = logits(4, 7, 5).log_softmax(-1), logits(4, 7, 6).log_softmax(-1)
    best = p.topk(3, dim=1)
    rest = (1 - best.values.exp().sum(1, keepdim=True)).log()
    targets = Targets(torch.cat((best.values, rest), dim=1), best.indices)
    for i in range(4):
        kept = best.indices[i].tolist()
        lumped = [[float(x[i, j].exp()) for j in kept] for x in (p, q)]
        lumped = [[*row, 1 - sum(row)] for row in lumped]
        loss = LOSSES[name](targets.log_probs, targets.seen_by(q))[i]
        assert float(loss) == pytest.approx(REFERENCES[name](*lumped), abs=1e-9)


def test_every_name_is_a_loss() -> None:
    assert set(NAMES) == {*LOSSES, "ce"} == {*REFERENCES, "ce"}


# --- the target -------------------------------------------------------------------------------------------------------

IDS = list(range(5, 45))
POSITIONS = torch.tensor([0, 3, 17, 39])


def test_the_target_is_asked_about_the_rows_of_the_draft(tiny_checkpoint: Path, kernels: str) -> None:
    """Whether its output layer can be cut or not."""
    model: Any = load_model(tiny_checkpoint, weights="fp32")
    kept = torch.tensor([7, 2, 150, 299, 30])
    whole = model.forward(IDS, model.new_cache(), len(IDS))[POSITIONS].log_softmax(-1)
    asked = Asking(model, kept, 5)
    assert asked._limited == (kernels == "native")
    found = asked.targets(0, IDS, POSITIONS)
    assert torch.allclose(found.log_probs, whole[:, kept].log_softmax(-1), atol=1e-5)
    assert torch.allclose(Asking(model, None, 300).targets(0, IDS, POSITIONS).log_probs, whole, atol=1e-5)


def test_a_long_row_is_read_in_parts(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny_checkpoint, weights="fp32")
    whole = Asking(model, None, 300).targets(0, IDS, POSITIONS)
    monkeypatch.setattr("slipstream.distill.teacher._CHUNK", 7)
    parts = Asking(model, None, 300).targets(0, IDS, POSITIONS)
    assert torch.allclose(whole.log_probs, parts.log_probs, atol=1e-5)


def test_what_is_kept_is_what_was_said(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint, weights="fp32")
    asked = Asking(model, None, 300)
    said = asked.targets(1, IDS, POSITIONS)
    for fresh in (True, False):  # from the target, from the files of an earlier run
        keeping = Keeping(asked if fresh else None, tmp_path / "kept", (3, 40, 8), fresh=fresh)  # type: ignore[arg-type]
        for _ in range(2):
            found = keeping.targets(1, IDS, POSITIONS)
            assert found.rows is not None
            named = said.log_probs.gather(1, found.rows)
            assert torch.equal(named, said.log_probs.topk(8, dim=1).values)
            assert torch.equal(found.log_probs[:, :8], named)
            assert torch.allclose(found.log_probs.exp().sum(1), torch.ones(4), atol=1e-6)
