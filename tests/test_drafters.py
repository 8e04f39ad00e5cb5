"""Drafters by themselves: what they propose, what they were drawn from, and what they remember."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from fakes import Dice, ForcedDrafter, RecurrentModel, TableModel, all_outcomes, loaded_dice, random_law
from slipstream import Draft, InputError, SamplingParams, load_model
from slipstream.drafters import CascadeDrafter, ModelDrafter, NoDrafter, SuffixDrafter, make_drafter
from slipstream.models import linear
from slipstream.sampling import Sampler

V = 8
LAW = random_law(V, seed=3)


def sampler(stop_ids: Sequence[int] = (), seed: int = 0, prompt_length: int = 2, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), prompt_length, stop_ids, seed)


def model(**settings: Any) -> TableModel:
    return TableModel(LAW, V, **settings)


# --- names ------------------------------------------------------------------------------------------------------------


def test_what_a_user_may_write() -> None:
    target = model()
    assert isinstance(make_drafter(None, target), NoDrafter)
    for name in ("suffix", "ngram"):
        assert isinstance(make_drafter(name, target), SuffixDrafter)
    forced = ForcedDrafter(lambda tokens, k: ())
    assert make_drafter(forced, target) is forced
    made = make_drafter(model(name="small"), target)
    assert isinstance(made, ModelDrafter)
    assert (made.name, made.target_vocab_size) == ("small", V)


@pytest.mark.parametrize("draft", [5, True, "n-gram", object(), [], [object()], {}])
def test_anything_else_is_refused(draft: Any) -> None:
    with pytest.raises(InputError, match="draft_model="):
        make_drafter(draft, model())


# --- nothing ----------------------------------------------------------------------------------------------------------


def test_no_drafter_proposes_nothing() -> None:
    assert NoDrafter().start(sampler()).draft([1, 2, 3], 4) == Draft()


# --- a model ----------------------------------------------------------------------------------------------------------


def filters() -> list[dict[str, Any]]:
    return [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.6, "frequency_penalty": 0.5, "logit_bias": {2: 1.5}},
    ]


@pytest.mark.parametrize("params", filters())
def test_q_is_what_the_target_would_make_of_the_same_logits(params: dict[str, Any]) -> None:
    """D2. q was returned from before its filters, or one token behind in its history."""
    tokens = [1, 2, 5, 5]
    draft = ModelDrafter(model(), V).start(sampler(**params)).draft(tokens, 4)
    assert draft.probs is not None
    assert draft.probs.shape == (4, V)
    for i in range(4):
        before = [*tokens, *draft.tokens[:i]]
        expected = sampler(**params).probs(LAW(before)[None], before)[0]
        assert torch.equal(draft.probs[i], expected)
        assert draft.probs[i, draft.tokens[i]] > 0


@pytest.mark.parametrize("params", filters())
def test_tokens_are_drawn_from_the_q_that_is_returned(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """D2. Every way that two draws can fall: each pair of tokens has the probability that q gives it."""
    rows: dict[tuple[int, ...], Draft] = {}

    def program(dice: Dice) -> tuple[int, ...]:
        with monkeypatch.context() as patch:
            loaded_dice(patch, dice)
            draft = ModelDrafter(model(), V).start(sampler(**params)).draft([1, 2], 2)
        rows[draft.tokens] = draft
        return draft.tokens

    for tokens, probability in all_outcomes(program).items():
        q = rows[tokens].probs
        assert q is not None
        assert probability == pytest.approx(float(q[0, tokens[0]] * q[1, tokens[1]]), abs=1e-12)


def test_draws_follow_q() -> None:
    drafter = ModelDrafter(model(), V)
    q, counts = None, Counter()
    for seed in range(1500):
        draft = drafter.start(sampler(seed=seed, temperature=1.0)).draft([1, 2], 1)
        counts[draft.tokens[0]] += 1
        q = draft.probs
    expected = [1500 * p for p in q[0].tolist()]
    assert chisquare([counts[t] for t in range(V)], expected).pvalue > 1e-3


def test_a_greedy_draft_is_one_hot() -> None:
    draft = ModelDrafter(model(), V).start(sampler()).draft([1, 2], 3)
    tokens = [1, 2]
    for token in draft.tokens:
        assert token == int(LAW(tokens).argmax())
        tokens.append(token)
    assert draft.probs is None


@pytest.mark.parametrize("committed", [0, 1, 2, 3, 4])
def test_a_session_rolls_back_and_catches_up(committed: int) -> None:
    """After ``committed`` of 4 tokens stood and another one followed, the next draft is as a fresh session's."""
    draft_model = model()
    session = ModelDrafter(draft_model, V).start(sampler())
    first = session.draft([1, 2, 3], 4)
    tokens = [1, 2, 3, *first.tokens[:committed], (LAW([1, 2, 3, *first.tokens[:committed]]).argmin().item())]
    fed = draft_model.rows_fed
    again = session.draft(tokens, 4)
    assert again == ModelDrafter(model(), V).start(sampler()).draft(tokens, 4)
    # What it has seen already is not read again: one or two tokens to catch up with, and 3 of its own.
    assert draft_model.rows_fed - fed <= 2 + 3


def test_a_session_survives_rounds_in_which_it_was_not_asked() -> None:
    """Tokens that others had drafted meanwhile were taken for the ones that it had fed to its model itself."""
    session = ModelDrafter(RecurrentModel(V), V).start(sampler())
    own = session.draft([1, 2], 4).tokens
    for tokens in ([1, 2, *((t + 1) % V for t in own), 0, 3], [1, 2, own[0], *((t + 1) % V for t in own), 0, 3, 3]):
        assert session.draft(tokens, 3) == ModelDrafter(RecurrentModel(V), V).start(sampler()).draft(tokens, 3)
        session = ModelDrafter(RecurrentModel(V), V).start(sampler())
        session.draft([1, 2], 4)


@pytest.mark.parametrize("cascade", [False, True])
def test_a_session_may_read_the_end_of_a_prompt_and_all_of_it_later(cascade: bool) -> None:
    drafter: Any = ModelDrafter(RecurrentModel(V), V)
    nobody = ForcedDrafter(lambda _tokens, _k: ())
    session: Any = CascadeDrafter([nobody, drafter] if cascade else [drafter]).start(sampler(prompt_length=7))
    fresh = ModelDrafter(RecurrentModel(V), V)
    prompt, more = [1, 2, 3, 4, 5, 6, 7], [0, 3, 3]
    session.latest = 3
    assert session.draft(prompt, 4).tokens == fresh.start(sampler()).draft(prompt[-3:], 4).tokens
    assert session.draft([*prompt, *more], 4).tokens == fresh.start(sampler()).draft([*prompt[-3:], *more], 4).tokens
    session.latest = None
    assert session.draft([*prompt, *more], 4).tokens == fresh.start(sampler()).draft([*prompt, *more], 4).tokens
    assert session.draft([*prompt, *more, 1], 4).tokens == fresh.start(sampler()).draft([*prompt, *more, 1], 4).tokens


def test_sessions_do_not_share_anything() -> None:
    drafter = ModelDrafter(model(), V)
    one, two = drafter.start(sampler()), drafter.start(sampler())
    alone = ModelDrafter(model(), V).start(sampler()).draft([4, 4, 4], 3)
    one.draft([1, 2, 3], 3)
    assert two.draft([4, 4, 4], 3) == alone
    assert one.draft([1, 2, 3, 0, 0], 3) == ModelDrafter(model(), V).start(sampler()).draft([1, 2, 3, 0, 0], 3)


def test_drafting_ends_with_an_end() -> None:
    favourite = int(LAW([1, 2]).argmax())
    draft = ModelDrafter(model(), V).start(sampler(stop_ids=[favourite])).draft([1, 2], 5)
    assert draft.tokens == (favourite,)


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_context_limit_of_the_draft(limit: int) -> None:
    """X2. The model asserts that it is never fed a position at or above its limit; up to there it is used."""
    session = ModelDrafter(model(limit=limit), V).start(sampler())
    assert len(session.draft([1, 2, 3], 4).tokens) == max(0, min(4, limit - 3 + 1))


@pytest.mark.parametrize(("own", "wanted"), [(5, 8), (8, 5), (8, 8)])
def test_q_is_over_the_targets_ids(own: int, wanted: int) -> None:
    """V1. Ids that only one of the two has get q = 0."""
    draft = ModelDrafter(TableModel(random_law(own, 1), own), wanted).start(sampler(temperature=1.0)).draft([1, 2], 3)
    assert draft.probs is not None
    assert draft.probs.shape == (3, wanted)
    assert torch.allclose(draft.probs.sum(-1), torch.ones(3, dtype=torch.float64))
    assert not draft.probs[:, min(own, wanted) :].any()
    assert max(draft.tokens) < min(own, wanted)


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: ModelDrafter(model(), V), SuffixDrafter, NoDrafter])
def test_tokens_are_left_alone(make: Callable[[], Any]) -> None:
    tokens = [1, 2, 1, 2, 1]
    make().start(sampler()).draft(tokens, 3)
    assert tokens == [1, 2, 1, 2, 1]


@pytest.mark.real_weights
def test_coarse_arithmetic_is_only_for_drafts_that_bear_it(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's activations have outliers that 7 bits cannot hold: its drafts would be wrong more often than faster."""
    from slipstream.drafters import model as module

    monkeypatch.setattr(linear, "library", lambda: None)  # native kernels have no coarser arithmetic
    draft: Any = load_model(smollm2, weights="int8")
    assert module.for_drafting(draft) is draft
    monkeypatch.setattr(module, "_ENOUGH_OVERLAP", 0.5)
    assert module.for_drafting(draft) is not draft
    half: Any = load_model(smollm2, weights="fp16")
    assert module.for_drafting(half) is half


def test_the_sample_stays_within_a_draft_models_ids_and_context(tiny_draft_checkpoint: Path) -> None:
    """A tokenizer with more ids than the draft has rows, or a short context, broke the trial of coarse arithmetic."""
    from slipstream.drafters.model import for_drafting

    draft: Any = load_model(tiny_draft_checkpoint, weights="int8")
    for rows, positions in ((40, None), (300, 5), (0, 5)):
        draft.embedding_size, draft.max_positions = rows, positions
        assert for_drafting(draft).vocab_size == 300
