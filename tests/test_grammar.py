"""Answers that follow a grammar: masked at every slot, exact, and only ever a function of the tokens so far."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import byte_tokenizer
from fakes import (
    INF,
    ForcedDrafter,
    TableModel,
    all_outcomes,
    always_wrong,
    decode,
    greedy,
    greedy_of,
    joint_law,
    loaded_dice,
    oracle,
    random_law,
)
from slipstream import InputError
from slipstream.answers import Setting
from slipstream.drafters import CascadeDrafter, Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.engine import Engine
from slipstream.errors import ForbiddenError
from slipstream.goodput import Goodput
from slipstream.grammar import Grammar, Grammars
from slipstream.seats import Limits
from slipstream.types import Request, SamplingParams
from slipstream.verify import RULES
from test_exactness import assert_same_law
from tokenizers_of_tests import of_tokens

PIECES = ["a", "b", "c", "ab", "x", "<eos>", "<end>"]
A, B, C, AB, X, EOS, END = range(7)
V = 8
"""One row more than there are tokens, as padded models have."""
TOKENIZER = of_tokens(PIECES, ["a b"])
MADE = Grammars(TOKENIZER, V, [EOS])
PROMPT = [X, A, B, A]
LAW = random_law(V, seed=1, order=1)


def legal(output: Sequence[int]) -> list[int]:
    """What may follow in (ab)*c, spelled out."""
    state = "even"
    for token in output:
        state = {
            ("even", A): "odd",
            ("odd", B): "even",
            ("even", AB): "even",
            ("even", C): "done",
        }.get((state, token), "none")
    return {"even": [A, AB, C], "odd": [B], "done": [EOS], "none": []}[state]


def masked_row(row: Tensor, output: Sequence[int]) -> Tensor:
    kept = torch.full_like(row, -INF)
    allowed = legal(output)
    kept[allowed] = row[allowed]
    return kept


def masked(tokens: Sequence[int], law: Callable[[Sequence[int]], Tensor] = LAW) -> Tensor:
    return masked_row(law(tokens), tokens[len(PROMPT) :])


def abc() -> Grammar:
    return MADE.regex("(ab)*c")


def settings(**more: Any) -> dict[str, Any]:
    return {"logits_processors": [abc().processor(len(PROMPT))], "stop_ids": [EOS], "max_new_tokens": 12, **more}


# --- the mask ---------------------------------------------------------------------------------------------------------


def test_mask_is_a_pure_function_of_the_tokens() -> None:
    """J1. Called in any order, with prefixes that were never accepted, it answers as one that was never called."""
    mask, rng = abc().processor(len(PROMPT)), random.Random(0)
    row = torch.zeros(V, dtype=torch.float64)
    for _ in range(400):
        output = [rng.choice(range(6)) for _ in range(rng.randrange(5))]
        if rng.random() < 0.6:
            output = []
            for _ in range(rng.randrange(8)):
                output.append(rng.choice(legal(output) or [A]))
        expected = masked_row(row, output) if output[-1:] != [EOS] else torch.full_like(row, -INF)
        assert mask([*PROMPT, *output], row).tolist() == expected.tolist(), output
        assert row.tolist() == [0.0] * V


def test_all_end_of_sequence_ids_end_it() -> None:
    mask = Grammars(TOKENIZER, V, [EOS, END, 7]).regex("a").processor(0)
    assert mask([A], torch.zeros(V)).isfinite().nonzero().flatten().tolist() == [EOS, END]


def test_dead_end_forbids_everything_and_is_left_again() -> None:
    """A matcher that has reported an error never works again; another branch of a draft must not suffer from it."""
    mask = MADE.lark('start: "a" dead | "b" "c"\ndead: dead "x"').processor(0)
    for _ in range(2):
        assert mask([A], torch.zeros(V)).isneginf().all()
        assert mask([B], torch.zeros(V)).isfinite().nonzero().flatten().tolist() == [C]


def test_dead_end_is_the_requests_own_fault() -> None:
    """It fails with an error that tells a too strict request from a broken model, and only if it is reached."""
    grammar = MADE.lark('start: "a" dead | "b" "c"\ndead: dead "x"')
    for wanted in (A, B):
        processors = [grammar.processor(1)]
        target = TableModel(lambda tokens, wanted=wanted: torch.eye(V, dtype=torch.float64)[wanted], V)
        given = {"k": 3, "logits_processors": processors, "stop_ids": [EOS]}
        if wanted == A:
            with pytest.raises(ForbiddenError):
                decode(target, NoDrafter(), [X], **given)
        else:
            assert decode(target, ForcedDrafter(lambda t, k: [A, X, X][:k]), [X], **given)[0] == [B, C, EOS]


@pytest.mark.parametrize(
    ("make", "given"),
    [
        ("regex", "["),
        ("regex", "(?=a)b"),
        ("regex", r"[^\s\S]"),
        ("lark", "start: foo"),
        ("lark", 'start: start "a"'),
        ("lark", ""),
        ("json", {"type": "foo"}),
        ("json", {"$ref": "http://127.0.0.1:1/schema.json"}),
        ("json", {"$ref": "file:///etc/passwd"}),
        ("json", {"type": "integer", "minimum": 5, "maximum": 3}),
        ("json", {"type": "array", "uniqueItems": True}),
    ],
)
def test_bad_grammar_is_refused_in_one_line(make: str, given: Any) -> None:
    with pytest.raises(InputError, match="cannot be used") as refused:
        getattr(MADE, make)(given)
    assert "\n" not in str(refused.value)
    assert "<state>" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_model_that_cannot_end_has_no_grammars() -> None:
    with pytest.raises(InputError, match="no end-of-sequence id"):
        Grammars(TOKENIZER, V, [])


def test_slow_tokenizer_is_refused() -> None:
    with pytest.raises(InputError, match="do not work with the model's tokenizer"):
        Grammars(object(), V, [EOS])


# --- the decoder ------------------------------------------------------------------------------------------------------


def illegal_at(sequence: Sequence[int], slot: int) -> ForcedDrafter:
    """Right, but for an illegal symbol at one slot; behind the end, symbols that would have been legal."""

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        right = [*sequence[len(tokens) : len(tokens) + k], *[A, B, C, AB] * k][:k]
        return [X if i == slot else t for i, t in enumerate(right)]

    return ForcedDrafter(propose)


def greedy_drafters(sequence: Sequence[int]) -> dict[str, Drafter]:
    model = ModelDrafter(TableModel(random_law(V, seed=7), V), V)
    return {
        "oracle": oracle(sequence),
        "wrong": always_wrong(sequence, 6),
        **{f"illegal at {slot}": illegal_at(sequence, slot) for slot in range(5)},
        "suffix": SuffixDrafter(min_probability=0),
        "model": model,
        "cascade": CascadeDrafter([SuffixDrafter(min_probability=0), model], min_confidence=0.2),
        "after illegal": CascadeDrafter([ForcedDrafter(lambda t, k: [X][:k]), model], min_confidence=0),
        "same law": ModelDrafter(TableModel(LAW, V), V),
    }


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_equals_the_masked_baseline(seed: int, k: int) -> None:
    """J1. Whatever is proposed, at every slot and past the end."""
    law = random_law(V, seed, order=2)
    expected = greedy(lambda tokens: masked(tokens, law), PROMPT, 12, eos=[EOS])
    assert X not in expected
    for name, drafter in greedy_drafters([*PROMPT, *expected]).items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer, rounds = decode(TableModel(law, V), drafter, PROMPT, k=k, **settings())
        assert answer == expected, name
        if name == "oracle":
            assert all(r.num_accepted == r.num_drafted or r is rounds[-1] for r in rounds)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["model", "copied", "illegal", "suffix", "cascade", "after illegal"])
def test_joint_law_under_a_grammar_by_enumeration(kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way that draft, acceptance and sampling can fall: the masked target's law to 1e-12."""
    draft = random_law(V, seed=7, order=1)
    drafters: dict[str, Callable[[], Drafter]] = {
        "model": lambda: ModelDrafter(TableModel(draft, V), V),
        "copied": lambda: greedy_of(LAW),
        "illegal": lambda: ForcedDrafter(lambda tokens, k: [A, X, B][:k]),
        "suffix": lambda: SuffixDrafter(min_probability=0),
        "cascade": lambda: CascadeDrafter(
            [SuffixDrafter(min_probability=0), ModelDrafter(TableModel(draft, V), V)], min_confidence=0.2
        ),
        "after illegal": lambda: CascadeDrafter(
            [ForcedDrafter(lambda t, k: [X][:k]), ModelDrafter(TableModel(draft, V), V)], min_confidence=0
        ),
    }

    def program(dice: Any) -> tuple[int, ...]:
        with monkeypatch.context() as loaded:
            loaded_dice(loaded, dice)
            given = settings(rule=rule, temperature=1.0, max_new_tokens=3, k=2)
            return tuple(decode(TableModel(LAW, V), drafters[kind](), PROMPT, **given)[0])

    def process(logits: Tensor, tokens: list[int]) -> Tensor:
        output = tokens[len(PROMPT) :]
        if not legal(output):  # behind the end, or never reached
            return torch.eye(V, dtype=torch.float64)[0]
        return torch.softmax(masked_row(logits, output), dim=-1)

    expected: dict[tuple[int, ...], float] = {}
    for sequence, probability in joint_law(LAW, PROMPT, 3, process).items():
        end = sequence.index(EOS) + 1 if EOS in sequence else 3
        if probability:
            expected[sequence[:end]] = expected.get(sequence[:end], 0.0) + probability
    law = all_outcomes(program)
    assert set(law) == set(expected)
    assert_same_law(law, expected)


# --- the engine -------------------------------------------------------------------------------------------------------


def test_requests_with_and_without_grammars_share_passes() -> None:
    """Each as alone: a mask belongs to one request, also to each of several samples of one prompt."""
    law = random_law(V, seed=3, order=1)
    model = TableModel(law, V, eos=[EOS])
    drafter = CascadeDrafter([SuffixDrafter(), ModelDrafter(TableModel(random_law(V, seed=9), V), V)])
    engine = Engine(Setting(model, drafter, Goodput(), None, "block", False), Limits(memory=1 << 28))

    def request(index: int, grammar: Grammar | None, k: int | None, **more: Any) -> Request:
        prompt = (*PROMPT, *([B] * index))
        processors = [] if grammar is None else [grammar.processor(len(prompt))]
        return Request(prompt, SamplingParams(max_new_tokens=20, logits_processors=processors, **more), k=k)

    grammar = abc()
    sampled = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6}]
    plan = [(i, g, k, s) for i, s in enumerate(sampled) for g in (grammar, None) for k in (0, 3, None)]
    outputs = engine.answers([request(i, g, k, **s) for i, g, k, s in plan])
    for (i, g, k, s), output in zip(plan, outputs, strict=True):
        (alone,) = Engine(engine.setting, Limits(memory=1 << 28)).answers([request(i, g, k, **s)])
        assert output.tokens == alone.tokens
        if g is not None and output.finish_reason == "stop":
            assert TOKENIZER.decode(output.tokens[:-1]).endswith("c")
        if g is not None:
            assert all(t in legal(output.tokens[:at]) for at, t in enumerate(output.tokens))


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_random_model_writes_json_to_a_schema(seed: int) -> None:
    """A byte-level vocabulary with merged tokens, which straddle the grammar's borders."""
    tokenizer = byte_tokenizer()
    made = Grammars(tokenizer, 300, [3]).json(SCHEMA, compact=True)
    law = random_law(300, seed, order=2)
    answer, _ = decode(
        TableModel(law, 300),
        SuffixDrafter(min_probability=0),
        [5, 6],
        k=4,
        temperature=1.0,
        stop_ids=[3],
        max_new_tokens=200,
        logits_processors=[made.processor(2)],
    )
    assert answer[-1] == 3
    found = json.loads(tokenizer.decode(answer[:-1]))
    assert found["kind"] in ("cat", "dog")
    assert 0 <= found["legs"] <= 9
