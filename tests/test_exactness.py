"""The whole decoder follows the target: token for token where it is greedy, in law where it samples."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from fakes import (
    INF,
    Dice,
    ForcedDrafter,
    Law,
    TableModel,
    Watched,
    all_outcomes,
    always_wrong,
    decode,
    greedy,
    greedy_of,
    joint_law,
    loaded_dice,
    oracle,
    random_law,
    softmax,
    wrong_at,
)
from slipstream import Draft, ModelError, load_model
from slipstream.drafters import CascadeDrafter, Drafter, ModelDrafter, NoDrafter, SuffixDrafter, SuffixStore
from slipstream.models.llama import LlamaModel
from slipstream.sampling import Sampler
from slipstream.types import SamplingParams
from slipstream.verify import RULES

KS = [0, 1, 2, 3, 5, 8]
DRAFTERS = ["same model", "random model", "oracle", "always wrong", "suffix", "cascade"]

# --- greedy, toy models -----------------------------------------------------------------------------------------------

V = 20
PROMPT = [3, 1, 4, 1, 5]


def drafter_of(kind: str, target: Any, random: Any, sequence: Sequence[int]) -> Drafter:
    made: dict[str, Callable[[], Drafter]] = {
        "same model": lambda: ModelDrafter(target, target.vocab_size),
        "random model": lambda: ModelDrafter(random, target.vocab_size),
        "oracle": lambda: oracle(sequence),
        "always wrong": lambda: always_wrong(sequence, target.vocab_size),
        "suffix": lambda: SuffixDrafter(min_probability=0),
        "cascade": lambda: CascadeDrafter(
            [SuffixDrafter(), ModelDrafter(random, target.vocab_size)], min_confidence=0.4
        ),
    }
    return made[kind]()


@pytest.mark.parametrize("k", [*KS, 16])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_toy_models(kind: str, k: int) -> None:
    """G1."""
    for seed in range(2):
        law = random_law(V, seed, order=1 + seed % 2)
        expected = greedy(law, PROMPT, 50)
        target, random = TableModel(law, V), TableModel(random_law(V, seed + 10), V)
        answer, rounds = decode(
            target, drafter_of(kind, target, random, [*PROMPT, *expected]), PROMPT, k=k, max_new_tokens=50
        )
        assert answer == expected
        accepted, drafted = sum(r.num_accepted for r in rounds), sum(r.num_drafted for r in rounds)
        if k and kind in ("same model", "oracle"):
            assert accepted == drafted > 0
        if k and kind == "always wrong":
            assert accepted == 0 < drafted


def test_three_way_control() -> None:
    """G2. Plain, with a draft that is always rejected, and with one that is always right."""
    law = random_law(V, seed=5)
    expected = greedy(law, PROMPT, 40)
    plain, rounds = decode(TableModel(law, V), NoDrafter(), PROMPT, max_new_tokens=40)
    rejected, _ = decode(TableModel(law, V), always_wrong([*PROMPT, *expected], V), PROMPT, max_new_tokens=40)
    right, fewer = decode(TableModel(law, V), oracle([*PROMPT, *expected]), PROMPT, max_new_tokens=40)
    assert plain == rejected == right == expected
    assert len(rounds) == 40
    assert len(fewer) == 1 + 8


# --- greedy, real architectures ---------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 16
CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **more: LlamaConfig(**{**SIZES, **more}),
    "qwen2": lambda **more: Qwen2Config(**{**SIZES, **more}),
    "qwen3": lambda **more: Qwen3Config(**{**SIZES, "head_dim": 8, **more}),
    "mistral": lambda **more: MistralConfig(**{**SIZES, "sliding_window": WINDOW, "head_dim": 8, **more}),
}


def real(family: str, seed: int = 0, weights: str = "fp64", **more: Any) -> LlamaModel:
    """A tiny random model of an architecture, from transformers' own initialisation."""
    config = CONFIGS[family](**more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = AutoModelForCausalLM.from_config(config).state_dict()
    return LlamaModel(config.to_dict(), state.__getitem__, name=family, weights=weights)


@pytest.fixture(scope="module", params=CONFIGS)
def architecture(request: pytest.FixtureRequest) -> tuple[LlamaModel, LlamaModel, list[int], list[int]]:
    """Target, random draft, prompt, and what plain decoding, replayed from nothing for each token, answers."""
    target, draft = real(request.param), real(request.param, seed=1, num_hidden_layers=1)
    prompt = [7, 11, 13, 11, 13, 17, 11]
    return target, draft, prompt, replayed(target, prompt, 18)


def replayed(model: LlamaModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding with no cache to go wrong."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.forward(tokens, model.new_cache(), 1)[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_real_architectures(architecture: Any, kind: str, k: int) -> None:
    """G1, and the cache after each round: as long as it must be, and at the end as a fresh replay would fill it."""
    target, random, prompt, expected = architecture
    watched = Watched(target)
    drafter = drafter_of(kind, target, random, [*prompt, *expected])
    answer, _ = decode(watched, drafter, prompt, k=k, max_new_tokens=len(expected))
    assert answer == expected
    cache, fresh = watched.caches[0], target.new_cache()
    committed = [*prompt, *answer][:-1]
    assert cache.length == len(committed)
    target.forward(committed, fresh, 1)
    # The next pass gives the same logits from both.
    left, right = target.forward([5, 6], cache, 2), target.forward([5, 6], fresh, 2)
    assert torch.allclose(left, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_sliding_window_with_a_rejection_every_round(k: int) -> None:
    """C2. A rejected token had pushed a key out of the window that was needed again."""
    target = real("mistral", seed=3)
    prompt = [7, 11, 13]
    expected = replayed(target, prompt, 4 * WINDOW)
    answer, rounds = decode(
        target, wrong_at([*prompt, *expected], 60, range(k)), prompt, k=k, max_new_tokens=len(expected)
    )
    assert answer == expected
    assert all(r.num_accepted < r.num_drafted for r in rounds[1:] if r.num_drafted == k)
    unwindowed = replayed(real("mistral", seed=3, sliding_window=None), prompt, 4 * WINDOW)
    assert unwindowed != expected, "the window hides nothing here"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_that_drafts_for_itself_is_always_accepted(family: str, temperature: float) -> None:
    """C1. Anything stale or shifted in a cache, or a q that is not the one sampled from, shows up as a rejection."""
    target = real(family, weights="fp32", initializer_range=0.2)
    answer, rounds = decode(
        target, ModelDrafter(target, 60), [5, 6], k=4, max_new_tokens=200, temperature=temperature, top_p=0.95, seed=1
    )
    assert len(answer) == 200
    assert [r.num_accepted for r in rounds] == [r.num_drafted for r in rounds]
    assert len(rounds) == 1 + 40


@pytest.mark.parametrize("weights", ["bf16", "fp16", "int8"])
def test_a_split_in_low_precision_is_at_a_small_gap(weights: str) -> None:
    """G3. In low precision a pass over several rows rounds differently from one over a single row: near-ties turn."""
    target = real("llama", weights=weights, initializer_range=0.3)
    draft = real("llama", weights=weights, initializer_range=0.3, num_hidden_layers=1)
    tolerance = {"bf16": 0.04, "fp16": 1e-4, "int8": 1e-4}[weights]
    for start in range(2):
        prompt = [start, 11, 13]
        plain, _ = decode(target, NoDrafter(), prompt, max_new_tokens=40)
        answer, _ = decode(target, ModelDrafter(draft, 60), prompt, k=4, max_new_tokens=40)
        assert gap_at_split(target, prompt, plain, answer) <= tolerance


def gap_at_split(target: Any, prompt: Sequence[int], plain: Sequence[int], answer: Sequence[int]) -> float:
    """How far apart the two likeliest tokens are where two answers part, relative to the largest logit; 0 if never."""
    split = next((i for i, (a, b) in enumerate(zip(plain, answer, strict=True)) if a != b), None)
    if split is None:
        return 0.0
    logits = target.forward([*prompt, *plain[:split]], target.new_cache(), 1)[0].float()
    first, second = logits.topk(2).values.tolist()
    print(f"split at token {split}: the two likeliest are {first - second:.2g} apart")  # noqa: T201 - shown on failure
    return (first - second) / float(logits.abs().max())


@pytest.mark.real_weights
@pytest.mark.parametrize(("weights", "tolerance"), [("fp32", 0.0), pytest.param("int8", 1e-3, marks=pytest.mark.slow)])
def test_greedy_real_weights(smollm2: Path, weights: str, tolerance: float) -> None:
    """SmolLM2-135M copies a text: the same answer in float32, and in 8 bits a split at a near-tie at most (G3)."""
    target: Any = load_model(smollm2, weights=weights)
    text = "Repeat: The small grey cat sat on the warm stone wall and looked at the birds in the old apple tree."
    messages = [{"role": "user", "content": text}]
    prompt = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    plain, rounds = decode(target, NoDrafter(), prompt, max_new_tokens=20)
    answer, fewer = decode(target, SuffixDrafter(min_probability=0), prompt, k=6, max_new_tokens=20)
    assert gap_at_split(target, prompt, plain, answer) <= tolerance
    assert len(fewer) < len(rounds)


# --- sampling: the exact law ------------------------------------------------------------------------------------------

THREE_TARGET = random_law(3, seed=21, order=1, spread=1.5)
THREE_DRAFT = random_law(3, seed=22, order=1, spread=1.5)


def model_drafter(law: Law = THREE_DRAFT, vocab: int = 3) -> Drafter:
    return ModelDrafter(TableModel(law, vocab), 3)


def two_ids(tokens: Sequence[int]) -> Tensor:
    """A draft that lacks the target's last id."""
    return random_law(2, seed=23, order=1)([min(tokens[-1], 1)])


def five_ids(tokens: Sequence[int]) -> Tensor:
    """A draft with two ids more than the target has."""
    return random_law(5, seed=24, order=1)(tokens)


def store_of(*documents: Sequence[int]) -> SuffixStore:
    store = SuffixStore()
    for document in documents:
        store.add(document)
    return store


def soft_argmax(tokens: Sequence[int], k: int) -> Draft:
    """A drafter of a third party that copies, and says so with explicit one-hot rows."""
    drafted = greedy_of(THREE_DRAFT).draft(tokens, k).tokens
    return Draft(drafted, torch.eye(3, dtype=torch.float64)[list(drafted)])


#: Every kind of draft: q sampled, q one-hot, q with ids missing, lengths that change with what is drafted.
LAW_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": model_drafter,
    "same model": lambda: model_drafter(THREE_TARGET),
    "greedy model": lambda: greedy_of(THREE_DRAFT),
    "explicit one-hot": lambda: ForcedDrafter(soft_argmax),
    "always the same symbol": lambda: ForcedDrafter(lambda tokens, k: [0] * k),
    "suffix": lambda: SuffixDrafter(min_probability=0),
    "store": lambda: SuffixDrafter(store_of([1, 2, 0, 2, 2], [2, 1, 1, 0]), min_probability=0),
    "copied, then drawn": lambda: CascadeDrafter(
        [SuffixDrafter(min_probability=0, factor=1), model_drafter()], min_confidence=0.2
    ),
    "drawn, then copied": lambda: CascadeDrafter(
        [SuffixDrafter(min_probability=0), model_drafter()], min_confidence=0.3
    ),
    "copied, then fewer ids": lambda: CascadeDrafter(
        [SuffixDrafter(min_probability=0, factor=1), model_drafter(two_ids, 2)], min_confidence=0.2
    ),
    "fewer ids": lambda: model_drafter(two_ids, 2),
    "more ids": lambda: model_drafter(five_ids, 5),
}


def prompt_for(kind: str) -> list[int]:
    """One with something to copy for those who copy."""
    return [1, 2, 1] if kind == "suffix" or "copied" in kind else [1]


#: Settings that change q, P or both, and what they make of a row of logits; None: the sampler itself, tested elsewhere.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 0.7, "top_k": 2},
    "nucleus": {"temperature": 1.4, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    "bias": {"logit_bias": {0: -INF, 1: 0.8}},
}


def processed(settings: dict[str, Any], prompt_length: int) -> Callable[[Tensor, list[int]], Tensor]:
    """Logits of one position to the target's distribution there."""
    if settings == {"temperature": 1.0}:
        return softmax
    sampler = Sampler(SamplingParams(**settings), prompt_length, (), 0)
    return lambda logits, tokens: sampler.probs(logits[None], tokens)[0]


def exact_law(drafter: Callable[[], Drafter], prompt: list[int], patch: Any, **settings: Any) -> dict[Any, float]:
    """Law of the answers, over everything that draft, acceptance and sampling may draw."""

    def program(dice: Dice) -> tuple[int, ...]:
        with patch.context() as loaded:
            loaded_dice(loaded, dice)
            return tuple(decode(TableModel(THREE_TARGET, 3), drafter(), prompt, **settings)[0])

    return all_outcomes(program)


def assert_same_law(law: dict[Any, float], expected: dict[Any, float]) -> None:
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    for sequence, probability in expected.items():
        assert law.get(sequence, 0.0) == pytest.approx(probability, abs=1e-12), sequence


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", LAW_DRAFTERS)
def test_joint_law_of_three_tokens_by_enumeration(
    kind: str, k: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4. Every way that draft, acceptance and sampling can fall, through the whole decoder; exact to 1e-12."""
    prompt = prompt_for(kind)
    law = exact_law(LAW_DRAFTERS[kind], prompt, monkeypatch, k=k, rule=rule, max_new_tokens=3, temperature=1.0)
    assert_same_law(law, joint_law(THREE_TARGET, prompt, 3, softmax))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["model", "greedy model", "copied, then drawn"])
def test_joint_law_with_processors_by_enumeration(
    kind: str, settings: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2, P1, P4. A draft was verified with the distribution from before its filters, or with a history one short."""
    given = {"temperature": 1.0, **SETTINGS[settings]}
    prompt = prompt_for(kind)
    law = exact_law(LAW_DRAFTERS[kind], prompt, monkeypatch, k=2, rule=rule, max_new_tokens=3, **given)
    assert_same_law(law, joint_law(THREE_TARGET, prompt, 3, processed(given, len(prompt))))


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_where_drafting_stops_early(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that dropped a token because of its own probability would bias the law; stopping after it does not."""

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        drafted = greedy_of(THREE_DRAFT).draft(tokens, k).tokens
        end = next((i + 1 for i, t in enumerate(drafted) if t == 0), k)
        return list(drafted[:end])

    settings = {"k": 3, "rule": rule, "max_new_tokens": 3, "temperature": 1.0}
    law = exact_law(lambda: ForcedDrafter(propose), [1], monkeypatch, **settings)
    assert_same_law(law, joint_law(THREE_TARGET, [1], 3, softmax))


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_with_an_end(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1, sampled. Answers that end early have the probability of their tokens, however they were drafted."""
    settings = {"k": 2, "rule": rule, "max_new_tokens": 3, "temperature": 1.0, "stop_ids": [2]}
    law = exact_law(model_drafter, [1], monkeypatch, **settings)
    expected: dict[tuple[int, ...], float] = Counter()
    for sequence, probability in joint_law(THREE_TARGET, [1], 3, softmax).items():
        end = sequence.index(2) + 1 if 2 in sequence else 3
        expected[sequence[:end]] += probability
    assert set(law) == set(expected)
    assert_same_law(law, expected)


def test_joint_law_with_a_draft_that_breaks_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the draft's logits half-way through a draft: what was drawn before it is verified as it was drawn."""

    def breaking(tokens: Sequence[int]) -> Tensor:
        return THREE_DRAFT(tokens) * (float("nan") if len(tokens) >= 2 else 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        law = exact_law(lambda: model_drafter(breaking), [1], monkeypatch, k=2, max_new_tokens=3, temperature=1.0)
    assert_same_law(law, joint_law(THREE_TARGET, [1], 3, softmax))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["model", "greedy model"])
def test_joint_law_where_the_target_breaks_down(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer ends in the error as often as in plain decoding, and all others keep their probability.

    The block rule looks at later positions to decide on earlier ones, so NaN at one of them could have an effect.
    """
    stuck = (2, 1)

    def breaking(tokens: Sequence[int]) -> Tensor:
        return THREE_TARGET(tokens) * (float("nan") if tuple(tokens[1:]) == stuck else 1)

    def program(dice: Dice) -> tuple[int, ...]:
        with monkeypatch.context() as loaded:
            loaded_dice(loaded, dice)
            settings = {"k": 2, "rule": rule, "max_new_tokens": 4, "temperature": 1.0}
            try:
                return tuple(decode(TableModel(breaking, 3), LAW_DRAFTERS[kind](), [1], **settings)[0])
            except ModelError:
                return stuck

    expected: dict[tuple[int, ...], float] = Counter()
    for sequence, probability in joint_law(THREE_TARGET, [1], 4, softmax).items():
        expected[stuck if sequence[: len(stuck)] == stuck else sequence] += probability
    law = all_outcomes(program)
    assert set(law) <= set(expected)
    assert_same_law(law, expected)


# --- sampling: real random numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rule", "coupled"),
    [
        ("model", "block", False),
        ("model", "token", False),
        ("greedy model", "block", False),
        ("suffix", "block", False),
        ("copied, then drawn", "block", False),
        ("drawn, then copied", "block", False),
        ("model", "block", True),
        ("drawn, then copied", "block", True),
    ],
)
def test_joint_law_of_three_tokens_by_chi_square(kind: str, rule: str, coupled: bool) -> None:
    """D4. With the real random numbers: a generator that draws twice the same, or shares draws, shows up here."""
    prompt = prompt_for(kind)
    drafter, samples = LAW_DRAFTERS[kind](), 1000
    settings = {"k": 2, "rule": rule, "max_new_tokens": 3, "temperature": 1.0, "coupled": coupled}
    counts = Counter(
        tuple(decode(TableModel(THREE_TARGET, 3), drafter, prompt, seed=seed, **settings)[0]) for seed in range(samples)
    )
    expected = joint_law(THREE_TARGET, prompt, 3, softmax)
    assert set(counts) <= set(expected)
    observed = [counts[sequence] for sequence in expected]
    assert chisquare(observed, [samples * p for p in expected.values()]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("kind", "sources"),
    [
        ("copied, then drawn", {("suffix", "toy", "suffix")}),
        ("drawn, then copied", {("toy", "suffix", "toy"), ("toy", "toy", "suffix")}),
    ],
)
def test_the_cascades_of_the_laws_mix_drafts(kind: str, sources: set[tuple[str, ...]]) -> None:
    """Or the laws above would be of something else."""
    found = set()
    for seed in range(30):
        sampler = Sampler(SamplingParams(temperature=1.0), 3, (), seed)
        draft = LAW_DRAFTERS[kind]().start(sampler).draft(prompt_for(kind), 3)
        assert draft.probs is not None
        found.add(draft.sources)
    assert found >= sources


@pytest.mark.parametrize("kind", DRAFTERS)
def test_coupled_answers_do_not_depend_on_the_draft(kind: str) -> None:
    """Random numbers that belong to positions: the seeded answer is plain decoding's, whatever draft and rule."""
    law = random_law(V, seed=3)
    settings = {"max_new_tokens": 40, "temperature": 1.0, "top_p": 0.95, "seed": 8, "coupled": True}
    plain, _ = decode(TableModel(law, V), NoDrafter(), PROMPT, **settings)
    target, random = TableModel(law, V), TableModel(random_law(V, seed=4), V)
    for k, rule in ((1, "block"), (3, "token"), (3, "block"), (8, "block")):
        drafter = drafter_of(kind, target, random, [*PROMPT, *plain])
        answer, rounds = decode(target, drafter, PROMPT, k=k, rule=rule, **settings)
        assert answer == plain
        if kind in ("same model", "oracle"):
            assert all(r.num_accepted == r.num_drafted for r in rounds)


def test_one_generator_over_a_long_answer_by_chi_square() -> None:
    """Successive tokens of one long answer: pairs follow the target's transitions."""
    answer, rounds = decode(
        TableModel(THREE_TARGET, 3), model_drafter(), [1], k=3, max_new_tokens=2000, temperature=1.0, seed=11
    )
    assert 0.2 < sum(r.num_accepted for r in rounds) / sum(r.num_drafted for r in rounds) < 0.98
    pairs = Counter(pairwise(answer))
    for first in range(3):
        row = torch.softmax(THREE_TARGET([first]), -1).tolist()
        observed = [pairs[(first, second)] for second in range(3)]
        assert chisquare(observed, [sum(observed) * p for p in row]).pvalue > 1e-3
