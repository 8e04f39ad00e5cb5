"""Draft models that can say only some of the ids they read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import byte_tokenizer, save_checkpoint
from fakes import (
    INF,
    Law,
    TableModel,
    all_outcomes,
    constant_law,
    decode,
    greedy,
    joint_law,
    loaded_dice,
    random_law,
    softmax,
)
from slipstream import Draft, InputError, SamplingParams, SpeculativeDecoding, load_model
from slipstream.drafters import ModelDrafter, NoDrafter, VocabularyDrafter
from slipstream.models.reduced import cut_output_layer
from slipstream.sampling import Sampler
from tokenizers_of_tests import of_tokens

LAW = random_law(4, seed=31, order=1, spread=1.5)


def reduced(law: Law, ids: Sequence[int], vocab: int, **settings: Any) -> TableModel:
    """A model that reads ``vocab`` ids and has rows for ``ids`` only."""
    model = TableModel(lambda tokens: law(tokens)[list(ids)], len(ids), embedding=vocab, **settings)
    model.output_ids = torch.tensor(ids)  # type: ignore[attr-defined]
    return model


def sampler(**params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), 1, (), 0)


# --- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 2}, {"logit_bias": {3: -INF, 1: -INF}}])
@pytest.mark.parametrize("k", [1, 2])
def test_joint_law_by_enumeration(k: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """V3, D4. Two of four ids, in another order; where the request forbids both, nothing is drafted."""
    given = {"temperature": 1.0, **settings}

    def program(dice: Any) -> tuple[int, ...]:
        with monkeypatch.context() as loaded:
            loaded_dice(loaded, dice)
            drafter = ModelDrafter(reduced(random_law(4, seed=32, order=1), [3, 1], 4), 4)
            return tuple(decode(TableModel(LAW, 4), drafter, [0], k=k, max_new_tokens=3, **given)[0])

    law, one = all_outcomes(program), sampler(**given)
    process = softmax if not settings else lambda logits, tokens: one.probs(logits[None], tokens)[0]
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    for sequence, probability in joint_law(LAW, [0], 3, process).items():
        assert law.get(sequence, 0.0) == pytest.approx(probability, abs=1e-12), sequence


def test_accepted_where_the_choice_has_a_row() -> None:
    """V3. The target's own law behind ten of a hundred ids: accepted just where the target's choice is one of them."""
    law = random_law(100, seed=5, order=3, spread=0.5)
    few = [7, 93, 11, 2, 50, 64, 20, 31, 88, 45]

    def mostly_few(tokens: Sequence[int]) -> Tensor:
        row = law(tokens)
        row[few] += 0.4
        return row

    expected = greedy(mostly_few, [2], 60)
    drafter = ModelDrafter(reduced(mostly_few, few, 100), 100)
    answer, rounds = decode(TableModel(mostly_few, 100), drafter, [2], k=1, max_new_tokens=60)
    assert answer == expected
    at = 0
    for one in rounds:
        assert one.num_drafted == 0 or (one.num_accepted == 1) == (expected[at] in few)
        at += len(one.tokens)
    assert 0.2 < sum(r.num_accepted for r in rounds) / len(rounds) < 1


def test_forbidden_rows_end_a_draft_without_a_warning() -> None:
    draft = ModelDrafter(reduced(LAW, [0, 2], 4), 4).start(sampler(logit_bias={0: -INF, 2: -INF})).draft([1], 3)
    assert draft == Draft(ended="vocabulary")


def test_rows_beyond_the_targets_ids_are_never_drafted() -> None:
    """V1."""
    model = reduced(constant_law([0.1, 0.1, 0.1, 0.1, 0.3, 0.3]), [5, 1, 4], 6)
    draft = ModelDrafter(model, 4).start(sampler(temperature=1.0)).draft([1, 2], 3)
    assert draft.tokens == (1, 1, 1)
    assert draft.probs is not None
    assert draft.probs.shape == (3, 4)
    assert draft.confidence == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("way", ["shared tokens", "strings"])
def test_together_with_another_tokenizer(way: Any) -> None:
    ours, theirs = of_tokens(["a", "b", "ab"], ["a b"]), of_tokens(["ba", "b", "a", "c"], ["b a"])
    target = TableModel(random_law(3, 1), 3, tokenizer=ours)
    drafter = VocabularyDrafter(reduced(random_law(4, 2), [3, 2, 1], 4, tokenizer=theirs), target, way)
    expected = greedy(target.law, [0, 1], 40)
    answer, rounds = decode(target, drafter, [0, 1], k=3, max_new_tokens=40)
    assert answer == expected
    assert sum(r.num_accepted for r in rounds) > 0


# --- checkpoints ------------------------------------------------------------------------------------------------------

IDS = [10, 2, 3, 299, 150, 77, 78, 79]


@pytest.fixture
def cut(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    cut_output_layer(tiny_checkpoint, IDS, tmp_path / "cut")
    return tmp_path / "cut"


def test_a_cut_checkpoint_has_the_rows_of_the_original(tiny_checkpoint: Path, cut: Path) -> None:
    whole, few = (load_model(folder, weights="fp32") for folder in (tiny_checkpoint, cut))
    assert few.output_ids.tolist() == IDS  # type: ignore[attr-defined]
    assert (few.vocab_size, few.embedding_size) == (len(IDS), 300)
    left, right = (m.forward([5, 6, 7], m.new_cache(), 3) for m in (whole, few))
    assert torch.allclose(left[:, IDS], right, atol=1e-6)
    assert few.tokenizer("a the")["input_ids"] == whole.tokenizer("a the")["input_ids"]  # type: ignore[misc]
    assert [p.name for p in cut.parent.iterdir()] == ["cut"], "something was left beside it"


def test_a_cut_draft_changes_no_answer(tiny_checkpoint: Path, cut: Path) -> None:
    target: Any = load_model(tiny_checkpoint, weights="fp32")
    plain, _ = decode(target, NoDrafter(), [5, 6], max_new_tokens=40)
    spec = SpeculativeDecoding(target, load_model(cut, weights="fp32"), k=3)
    assert spec.complete([5, 6], max_new_tokens=40)[0].tokens == tuple(plain)
    assert spec.complete([5, 6], max_new_tokens=40, temperature=1.0, seed=1)[0].stats.drafted > 0


def test_tied_embeddings_are_untied(tmp_path: Path) -> None:
    tied = save_checkpoint(tmp_path / "tied", byte_tokenizer(), tie_word_embeddings=True)
    cut_output_layer(tied, IDS, tmp_path / "cut")
    whole, few = (load_model(folder, weights="fp32") for folder in (tied, tmp_path / "cut"))
    left, right = (m.forward([5, 6, 7], m.new_cache(), 1) for m in (whole, few))
    assert torch.allclose(left[:, IDS], right, atol=1e-6)


def test_a_target_must_be_able_to_say_everything(cut: Path) -> None:
    with pytest.raises(InputError, match="can say only 8 of the 300 ids"):
        SpeculativeDecoding(cut)


def changed(folder: Path, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """The checkpoint with some of its tensors replaced or taken out."""
    file = folder / "model.safetensors"
    kept = {name: t for name, t in {**load_file(file), **tensors}.items() if t is not None}
    save_file(kept, file, metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, **(config or {})}))
    return folder


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        (None, "draft_vocab_size 8, but no tensor d2t"),
        (torch.zeros(7, dtype=torch.long), r"d2t of shape \(7,\) .* has 8 rows"),
        (torch.zeros(8), r"float32, but its output layer has 8 rows, and each needs one integer"),
        (torch.tensor([0, 0, 0, 0, 0, 0, 0, 300]), "has the id 307, but ids go from 0 to 299"),
        (torch.tensor([-1, 0, 0, 0, 0, 0, 0, 0]), "has the id -1, but"),
        (torch.tensor([1, 0, 0, 0, 0, 0, 0, 0]), "has the id 1 twice"),
    ],
)
def test_maps_that_do_not_fit(cut: Path, d2t: Tensor | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.llama.LlamaModel.__init__", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(InputError, match=said) as error:
        load_model(changed(cut, d2t=d2t))
    assert str(cut) in str(error.value)


def test_offsets_as_eagle_has_them(cut: Path) -> None:
    """Sorted ids, offsets that grow, no t2d."""
    changed(cut, d2t=torch.tensor([0, 0, 1, 1, 5, 5, 5, 100]), t2d=None)
    assert load_model(cut).output_ids.tolist() == [0, 1, 3, 4, 9, 10, 11, 107]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ids", "said"),
    [([], "ids is empty"), ([1, 300], "the id 300, but"), ([-1], "the id -1"), ([4, 5, 4], "the id 4 twice")],
)
def test_ids_to_cut_to_are_checked(tiny_checkpoint: Path, tmp_path: Path, ids: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        cut_output_layer(tiny_checkpoint, ids, tmp_path / "cut")
    assert not list(tmp_path.iterdir())


def test_folders_to_cut_are_checked(tiny_checkpoint: Path, cut: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, target, said in (
        (tiny_checkpoint, cut, "exists already"),
        (cut, tmp_path / "again", "8 rows of output for 300 ids already"),
        (tmp_path / "empty", tmp_path / "x", "cannot be read"),
    ):
        with pytest.raises(InputError, match=said):
            cut_output_layer(source, [1, 2], target)


def test_a_cut_that_fails_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        cut_output_layer(tiny_checkpoint, [1, 2], tmp_path / "cut")
    assert not list(tmp_path.iterdir())
