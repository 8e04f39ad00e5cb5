"""Each drafter, alone and in cascades, through the public classes: the same answers as without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import byte_tokenizer, save_checkpoint
from slipstream import Draft, Output, SpeculativeDecoding, load_model
from slipstream.drafters import (
    Drafter,
    ModelDrafter,
    SuffixDrafter,
    SuffixStore,
    VocabularyDrafter,
    make_drafter,
)
from slipstream.models.reduced import cut_output_layer
from slipstream.verify import RULES

TEXTS = ["the and the and the hen", "  Ein süßes 🐈 猫です。\n\n\tand", "a"]
BASE: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}


class Models:
    """Tiny random checkpoints, loaded: a target of three layers, and drafts of every sort."""

    def __init__(self, folder: Path) -> None:
        tokenizer, reverse = byte_tokenizer(), byte_tokenizer(order=lambda tokens: tokens[::-1])
        save_checkpoint(folder / "target", tokenizer, num_hidden_layers=3)
        save_checkpoint(folder / "draft", tokenizer, seed=1, num_hidden_layers=1)
        save_checkpoint(folder / "other", reverse, seed=2, num_hidden_layers=1)
        cut_output_layer(folder / "target", [*range(0, 300, 3)], folder / "few")
        self.target, self.draft, self.other, self.few = (
            load_model(folder / name, weights="fp32") for name in ("target", "draft", "other", "few")
        )
        self.prompts = [self.target.tokenizer(text)["input_ids"] for text in TEXTS]  # type: ignore[misc]
        self._made: dict[str, Drafter] = {}
        self._plain: dict[str, Output] = {}

    def drafter(self, kind: str) -> Drafter:
        """Made once: requests have sessions of their own."""
        if kind not in self._made:
            self._made[kind] = make_drafter(DRAFTERS[kind](self), self.target)
        return self._made[kind]

    def plain(self, prompt: Sequence[int], **settings: Any) -> Output:
        """What plain decoding answers."""
        key = repr((prompt, settings))
        if key not in self._plain:
            (self._plain[key],) = SpeculativeDecoding(self.target).complete([prompt], **BASE | settings)
        return self._plain[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("drafters"))


class Own:
    """A third party's: repeats the last token, without a gate, a confidence or anything else."""

    name = "own"

    def start(self, sampler: object) -> Own:
        return self

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        return Draft((tokens[-1],) * k)


def stored(models: Models) -> SuffixDrafter:
    store = SuffixStore()
    for seed in range(3):
        store.add(
            SpeculativeDecoding(models.target).complete([models.prompts[0]], seed=seed, temperature=1.0)[0].tokens
        )
    return SuffixDrafter(store, min_probability=0)


def shared(models: Models) -> VocabularyDrafter:
    return VocabularyDrafter(models.other, models.target, "shared tokens")


DRAFTERS: dict[str, Callable[[Models], Any]] = {
    "model": lambda m: m.draft,
    "same model": lambda m: ModelDrafter(m.target, m.target.vocab_size),
    "few ids": lambda m: m.few,
    "suffix": lambda m: SuffixDrafter(min_probability=0),
    "store": stored,
    "early exit": lambda m: "early-exit:2",
    "two tokenizers": lambda m: m.other,
    "shared tokens": shared,
    "own": lambda m: Own(),
    "suffix, model": lambda m: ["suffix", m.draft],
    "suffix, early exits": lambda m: ["suffix", "early-exit:1", "early-exit:2"],
    "model, suffix": lambda m: [m.draft, "suffix"],
    "suffix, few ids": lambda m: ["suffix", m.few],
    "suffix, two tokenizers": lambda m: ["suffix", m.other, m.draft],
    "two suffixes, own": lambda m: ["suffix", "ngram", Own()],
    "store, early exit, shared": lambda m: [stored(m), "early-exit:2", shared(m)],
}
every = pytest.mark.parametrize("kind", DRAFTERS)
#: Settings that change what is chosen, or when it ends, and need no luck.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "presence_penalty": -0.3},
    "no repeats": {"no_repeat_ngram_size": 2},
    "one choice": {"temperature": 5.0, "top_k": 1},
    "nearly greedy": {"temperature": 1e-4, "min_p": 1.0},
    "bias": {"logit_bias": {5: -float("inf"), 60: 3.0}},
    "stops": {"stop": ["the", "é", "q"], "min_new_tokens": 3},
    "one token": {"max_new_tokens": 1},
    "logprobs": {"logprobs": 2},
}


@every
@pytest.mark.parametrize("k", [1, 4, "halving", "adaptive"])
def test_answers_are_those_of_plain_decoding(kind: str, k: Any, models: Models) -> None:
    """G1, P1, P4, S3, V3, V4, R2: whatever drafts, and however much; two requests by the same object."""
    spec = SpeculativeDecoding(models.target, models.drafter(kind), k)
    for number, (name, settings) in enumerate(SETTINGS.items()):
        prompt = models.prompts[number % 3]
        expected = models.plain(prompt, **settings)
        output = spec.complete([prompt], **BASE | settings)[0]
        assert (output.tokens, output.text) == (expected.tokens, expected.text), name
        assert output.finish_reason == expected.finish_reason
        if output.logprobs is not None:
            ours, theirs = ([entry.logprob for entry in o.logprobs] for o in (output, expected))
            assert ours == pytest.approx(theirs, abs=1e-5)
        stats = output.stats
        assert sum(stats.drafted_by.values()) == stats.drafted >= stats.accepted == sum(stats.accepted_by.values())
        assert set(stats.rounds_by_end) <= {"limit", "confidence", "controller", "no match", "vocabulary"}
        assert stats.emitted == len(output.tokens)


@every
def test_a_batch_is_answered_as_one_by_one(kind: str, models: Models) -> None:
    """R3, C4: beside others, behind a request that was given up half-way, and next to one that shares nothing."""
    spec = SpeculativeDecoding(models.target, models.drafter(kind), 3, **BASE)
    stream = spec.stream(models.prompts[0])
    next(stream)
    next(stream)
    stream.close()
    prompts = [*models.prompts, models.prompts[0][:1], models.prompts[1]]
    expected = [models.plain(prompt).tokens for prompt in prompts]
    for share in (True, False):
        assert [output.tokens for output in spec.complete(prompts, share=share)] == expected
    adaptive = SpeculativeDecoding(models.target, models.drafter(kind), **BASE)
    assert [output.tokens for output in adaptive.complete(prompts)] == expected


@every
@pytest.mark.parametrize("rule", RULES)
def test_a_seed_repeats_an_answer(kind: str, rule: str, models: Models) -> None:
    """R1, R4. A store that grows is another draft, so its request leaves nothing."""
    spec = SpeculativeDecoding(models.target, models.drafter(kind), rule=rule, temperature=1.0, share=False)
    found = [spec.complete([models.prompts[0]], seed=seed, **BASE)[0].tokens for seed in (*range(10), *range(3))]
    assert found[:3] == found[10:]
    assert len(set(found[:10])) >= 9
    assert len({o.tokens for o in spec.complete([models.prompts[0]], n=4, seed=1, **BASE)}) == 4


@every
@pytest.mark.parametrize("k", [1, 5])
def test_at_the_context_limit(kind: str, k: int, models: Models) -> None:
    """X1, X2. Target and drafts have 256 positions; with two tokenizers the draft's ids are of another number."""
    spec = SpeculativeDecoding(models.target, models.drafter(kind), k)
    for length in (256 - k - 1, 255, 256):
        prompt = (models.prompts[0] * 80)[:length]
        expected = models.plain(prompt)
        output = spec.complete([prompt], **BASE)[0]
        assert (output.tokens, output.finish_reason) == (expected.tokens, expected.finish_reason)


@every
def test_a_drafter_has_a_file_a_name_and_the_interface(kind: str, models: Models) -> None:
    spec = SpeculativeDecoding(models.target, models.drafter(kind), 2)
    assert spec.drafter.name
    file = Path(sys.modules[type(spec.drafter).__module__].__file__ or "")
    assert file.parent.name == "drafters" or kind == "own"
    stream = spec.stream(models.prompts[0], **BASE)
    stream.finish()
    assert all(r.k >= r.num_drafted and (r.ended is None) == (r.k == 0) for r in stream.rounds)
    assert torch.is_grad_enabled()
