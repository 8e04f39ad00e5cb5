"""Many requests at once: each is answered as if it were alone, whatever comes, goes, fails or waits beside it."""

from __future__ import annotations

import gc
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from fakes import ForcedDrafter, TableModel, constant_law, greedy, greedy_of, joint_law, random_law, softmax
from slipstream import Draft, InputError, ModelError, Output, SamplingParams, SpeculativeDecoding
from slipstream.answers import Setting
from slipstream.controller import Adaptive, AdaptiveController, Fixed, Policy
from slipstream.drafters import CascadeDrafter, Drafter, EarlyExitDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.drafters.base import Read
from slipstream.engine import Engine
from slipstream.estimates import Costs
from slipstream.goodput import BatchController, Goodput, Offer, choose
from slipstream.lockstep import together
from slipstream.models.base import Item, forward_each
from slipstream.models.exit_head import Exit, ExitHead
from slipstream.models.native.build import library
from slipstream.prefix import BLOCK, PrefixCache
from slipstream.sampling import Sampler
from slipstream.seats import Limits, models_of
from slipstream.slots import QUANTUM, Arena, position_bytes
from slipstream.types import Event, Request
from test_exactness import real

needs_native = pytest.mark.skipif(library() is None, reason="no native kernels here")
V = 12
LAW = random_law(V, seed=1)


# --- runs -------------------------------------------------------------------------------------------------------------


def setting(target: Any, drafter: Drafter | None = None, policy: Policy | None = None, **more: Any) -> Setting:
    given = {"tokenizer": None, "rule": "block", "coupled": False, **more}
    return Setting(target, drafter or NoDrafter(), policy or Goodput(), **given)


def bytes_of(given: Setting, positions: int) -> int:
    """Memory for so many positions of toy models, and no prefixes."""
    return positions * (1 + len(models_of(given.drafter))) * position_bytes(given.target)


def request(prompt: Sequence[int], new: int = 12, k: int | None = None, reuse: bool = True, **params: Any) -> Request:
    return Request(tuple(prompt), SamplingParams(max_new_tokens=new, **params), k=k, reuse=reuse)


def finish(engine: Engine, most: int = 2000) -> dict[int, Event]:
    """Step until nothing is left; the last event of each request."""
    last: dict[int, Event] = {}
    for _ in range(most):
        if not engine.unfinished:
            break
        for event in engine.step():
            assert event.id not in last, "an event after the last one"
            if event.output is not None:
                last[event.id] = event
    assert not engine.unfinished
    assert_empty(engine)
    return last


def assert_empty(engine: Engine) -> None:
    assert all(not arena.slots for arena in engine.seats.arenas)
    assert not engine._running
    assert not engine._waiting


def alone(given: Setting, one: Request) -> Output:
    """What the decoder of a single request answers."""
    policy = given.policy if one.k is None else Fixed(one.k)
    if isinstance(policy, Goodput):
        policy = Adaptive(shared=False)
    own = Setting(given.target, given.drafter, policy, given.tokenizer, given.rule, given.coupled)
    decoder, answer = own.start(one.prompt, one.params, one.index)
    for r in decoder.rounds(one.prompt, answer.push):
        answer.add(r)
    return answer.output


def same(a: Output, b: Output) -> bool:
    """Equal bit for bit, log-probabilities included."""
    return (a.tokens, a.logprobs, a.text, a.finish_reason) == (b.tokens, b.logprobs, b.text, b.finish_reason)


def various(count: int, new: int = 14, **params: Any) -> list[Request]:
    """Prompts of all lengths, greedy and sampled ones in turn, each with its own settings."""
    made = []
    for i in range(count):
        prompt = [(7 * i + j * j + 3 * j) % 60 for j in range(1 + (i * 11) % 47)]
        sampled = {"temperature": 0.9, "seed": i, "top_p": 0.95} if i % 2 else {"repetition_penalty": 1.1}
        made.append(request(prompt, new + i % 5, **{**sampled, "logprobs": 2, **params}))
    return made


@pytest.fixture(scope="module")
def native() -> Any:
    return real("qwen2", weights="fp32")


@pytest.fixture(scope="module")
def native_draft() -> Any:
    return real("qwen2", seed=1, weights="fp32", num_hidden_layers=1)


NATIVE_DRAFTERS: dict[str, Callable[[Any, Any], Drafter]] = {
    "none": lambda target, draft: NoDrafter(),
    "model": lambda target, draft: ModelDrafter(draft, 60),
    "same model": lambda target, draft: ModelDrafter(target, 60),
    "suffix": lambda target, draft: SuffixDrafter(min_probability=0),
    "cascade": lambda target, draft: CascadeDrafter([SuffixDrafter(), ModelDrafter(draft, 60)], min_confidence=0.4),
    "early exit": lambda target, draft: EarlyExitDrafter(target, 1),
}


# --- as if alone ------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("k", [0, 3, None])
@pytest.mark.parametrize("kind", NATIVE_DRAFTERS)
def test_each_is_answered_as_by_the_decoder_of_one(native: Any, native_draft: Any, kind: str, k: int | None) -> None:
    given = setting(native, NATIVE_DRAFTERS[kind](native, native_draft))
    requests = [Request(r.prompt, r.params, k=k) for r in various(6)]
    outputs = Engine(given, Limits(memory=1 << 24, rows=16)).answers(requests)
    for one, output in zip(requests, outputs, strict=True):
        expected = alone(given, one)
        assert same(output, expected)
        if k is not None or one.params.seed is not None:
            assert output.origins == expected.origins
            assert (output.stats.drafted, output.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)


@needs_native
def test_company_changes_no_bit(native: Any, native_draft: Any) -> None:
    """Alone, in a busy batch, joined late, and after one that was cancelled."""
    given = setting(native, ModelDrafter(native_draft, 60))
    one, others = various(4)[3], various(9)[4:]
    (expected,) = Engine(given, Limits(memory=1 << 24)).answers([one])
    busy = Engine(given, Limits(memory=1 << 24, rows=24))
    ids = [busy.add(r) for r in others]
    for _ in range(4):
        busy.step()
    late = busy.add(one)
    busy.step()
    busy.abort(ids[0])
    after = busy.add(one)
    last = finish(busy)
    for found in (late, after):
        output = last[found].output
        assert output is not None
        assert same(output, expected)
        assert output.stats.drafted == expected.stats.drafted


@pytest.mark.parametrize("kind", ["right", "wrong", "model", "suffix", "cascade"])
@pytest.mark.parametrize("k", [1, 4, None])
def test_greedy_toy_models(kind: str, k: int | None) -> None:
    other = TableModel(random_law(V, 7), V)
    wrong = ForcedDrafter(lambda tokens, k: [(t + 1) % V for t in greedy_of(LAW)._propose(tokens, k)])
    drafters: dict[str, Drafter] = {
        "right": greedy_of(LAW),
        "wrong": wrong,
        "model": ModelDrafter(other, V),
        "suffix": SuffixDrafter(min_probability=0),
        "cascade": CascadeDrafter([SuffixDrafter(), ModelDrafter(other, V)], min_confidence=0.4),
    }
    prompts = [[i, *range(i)] for i in range(6)]
    outputs = Engine(setting(TableModel(LAW, V), drafters[kind])).answers([request(p, 30, k) for p in prompts])
    assert [list(o.tokens) for o in outputs] == [greedy(LAW, p, 30) for p in prompts]
    if kind == "right" and k is not None:
        assert all(o.stats.accepted == o.stats.drafted > 0 for o in outputs)


@pytest.mark.parametrize("kind", ["model", "suffix"])
def test_the_law_of_each_by_chi_square(kind: str) -> None:
    """In a batch of requests of other prompts and temperatures, without seeds, so that k is chosen over all."""
    target = random_law(3, 2, order=1)
    drafter: Drafter = ModelDrafter(TableModel(random_law(3, 5, order=1), 3), 3)
    if kind == "suffix":
        drafter = SuffixDrafter(min_probability=0)
    prompts, temperatures, count = [[1, 0, 1], [2, 2, 0, 2]], [1.0, 0.6], 500
    torch.manual_seed(3)
    requests = [request(prompts[i % 2], 3, temperature=temperatures[i % 2]) for i in range(2 * count)]
    costs = (Costs(1.0, fixed=True), Costs(1.0, fixed=True))
    goodput = Goodput(costs)
    goodput.took_draft(1, 0.1)
    outputs = Engine(setting(TableModel(target, 3), drafter, goodput), Limits(requests=8)).answers(requests)
    for at in range(2):
        mine = outputs[at::2]
        assert sum(o.stats.drafted for o in mine) > 0
        heat = temperatures[at]
        law = joint_law(target, prompts[at], 3, lambda logits, tokens, heat=heat: softmax(logits / heat, tokens))
        seen = Counter(o.tokens for o in mine)
        assert set(seen) <= set(law)
        pooled = [(seen[s], count * p) for s, p in law.items() if count * p >= 4]
        rest = (count - sum(a for a, _ in pooled), count - sum(b for _, b in pooled))
        observed, expected = zip(*[pair for pair in [*pooled, rest] if pair[1] > 1], strict=True)
        scale = sum(observed) / sum(expected)
        assert chisquare(observed, [e * scale for e in expected]).pvalue > 1e-3


def test_seeded_requests_repeat_whatever_k_the_batch_has() -> None:
    """k that is chosen by clocks and neighbours would have other random numbers meet the same tokens."""
    drafter = ModelDrafter(TableModel(random_law(V, 7), V), V)
    one = request([3, 1, 4], 30, temperature=1.0, seed=5)
    found = set()
    for company in (0, 3, 9):
        engine = Engine(setting(TableModel(LAW, V), drafter))
        requests = [request([i], 20) for i in range(company)]
        found.add(engine.answers([*requests, one])[-1].tokens)
    assert len(found) == 1


@needs_native
@pytest.mark.parametrize("draft", [None, "suffix", "model"])
def test_complete_answers_as_one_by_one(native: Any, native_draft: Any, draft: Any) -> None:
    spec = SpeculativeDecoding(native, native_draft if draft == "model" else draft, k=3, max_new_tokens=12, logprobs=1)
    prompts = [list(r.prompt) for r in various(5)]
    for params in ({}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "seed": 4, "n": 3}):
        outputs = spec.complete(prompts, **params)
        if "n" not in params:
            assert all(same(a, spec.complete(p, **params)[0]) for a, p in zip(outputs, prompts, strict=True))
        else:
            assert [o.index for o in outputs] == [0, 1, 2] * 5
            assert [o.prompt_tokens for o in outputs[::3]] == [tuple(p) for p in prompts]
            assert same(outputs[0], spec.complete(prompts[0], **{**params, "n": 1})[0])


# --- the pass over several sequences ----------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3"])
def test_rows_of_a_batch_have_the_bits_of_their_own_passes(family: str) -> None:
    model = real(family, weights="fp32")
    prompts = [[(i * j + j) % 60 for j in range(3 + 9 * i)] for i in range(4)]

    def items(caches: Sequence[Any]) -> list[Item]:
        return [Item(p, cache, wanted) for p, cache, wanted in zip(prompts, caches, (1, 3, 0, 30), strict=True)]

    one_by_one = [model.forward(i.tokens, i.cache, i.num_logits) for i in items([model.new_cache() for _ in prompts])]
    caches = [model.new_cache() for _ in prompts]
    together = model.forward_batch(items(caches))
    assert [len(t) for t in together] == [1, 3, 0, 30]
    assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=True))
    assert [cache.length for cache in caches] == [len(p) for p in prompts]


def passes_of(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, int] | None]]:
    """Rows and layers of each native pass from now on."""
    seen: list[tuple[int, tuple[int, int] | None]] = []
    forward = model._stack.forward

    def counted(x: Tensor, rows: Any, turns: Any, num_logits: int, layers: Any = None) -> Tensor:
        seen.append((len(x), layers))
        return forward(x, rows, turns, num_logits, layers)

    monkeypatch.setattr(model._stack, "forward", counted)
    return seen


@needs_native
def test_a_batch_goes_on_from_early_exits(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass, whatever has been drafted of it: these used to be verified one after the other."""
    caches = [native.new_cache() for _ in range(5)]
    fresh = [native.new_cache() for _ in range(5)]
    for cache in (*caches, *fresh):
        native.forward([9, 8, 7], cache, 0)
    native.exit_early([4, 5], caches[1], 1)
    native.exit_early([3, 6], caches[3], 1)
    native.exit_early([8], caches[4], 1)
    tokens = [[1, 2], [4, 5, 6], [7], [3, 5, 5], [9, 9]]
    wanted = [1, 3, 0, 2, 2]
    expected = [native.forward(t, c, n) for t, c, n in zip(tokens, fresh, wanted, strict=True)]
    seen = passes_of(native, monkeypatch)
    together = native.forward_batch([Item(t, c, n) for t, c, n in zip(tokens, caches, wanted, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(together, expected, strict=True))
    assert seen == [(8, (0, 1)), (11, (1, native.num_layers))]
    assert [c.length for c in caches] == [c.length for c in fresh]
    assert all(c.ahead is None for c in caches)


@needs_native
@pytest.mark.parametrize("headed", [False, True])
def test_early_exits_of_a_batch_have_the_bits_of_their_own_passes(native: Any, headed: bool) -> None:
    head = None
    if headed:
        width, generator = native._norm.shape[0], torch.Generator().manual_seed(5)
        down, up = (torch.randn(shape, generator=generator) for shape in ((4, width), (width, 4)))
        head = native.fit(ExitHead(1, torch.ones(width), down, up))
    caches, fresh = ([native.new_cache() for _ in range(4)] for _ in range(2))
    for tokens in ([[1, 2, 3], [4], [5, 6], [7]], [[9], [8], [7], [6]]):
        together = native.exit_early_batch([Item(t, c, 1) for t, c in zip(tokens, caches, strict=True)], 1, head)
        alone = [native.exit_early(t, c, 1, 1, head) for t, c in zip(tokens, fresh, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
        assert all(a.ahead.tokens == b.ahead.tokens for a, b in zip(caches, fresh, strict=True))
        assert all(torch.equal(a.ahead.states, b.ahead.states) for a, b in zip(caches, fresh, strict=True))


@needs_native
@pytest.mark.parametrize("draft", ["early-exit:1", "suffix,early-exit:1"])
def test_early_exits_of_all_requests_advance_together(native: Any, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests with k = 3: at most three passes of the first layers, and two to verify; answers stay plain's."""
    prompts = [[5 + i, 6, 7, 8 + i] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    plain = SpeculativeDecoding(native, None).engine(Limits(memory=1 << 22))
    expected = [o.tokens for o in plain.answers([Request(tuple(p), params) for p in prompts])]
    engine = SpeculativeDecoding(native, draft.split(","), k=3).engine(Limits(memory=1 << 22))
    ids = [engine.add(Request(tuple(p), params)) for p in prompts]
    seen = passes_of(native, monkeypatch)
    outputs: dict[int, Any] = {}
    while engine.unfinished:
        before = len(seen)
        outputs |= {e.id: e.output for e in engine.step() if e.output is not None}
        assert len(seen) - before <= 5
    assert [outputs[i].tokens for i in ids] == expected
    assert (4, (0, 1)) in seen


@needs_native
def test_an_early_exit_that_fails_is_one_failure(native: Any) -> None:
    def drafting(token: int, cache: Any) -> Any:
        return (yield Read(native, [token], cache, exit=leave))

    leave = Exit(1)
    caches = [native.new_cache() for _ in range(3)]
    steps = {i: drafting(token, cache) for i, (token, cache) in enumerate(zip((4, 10**6, 5), caches, strict=True))}
    found = together(steps, lambda key, read: True, lambda *_: None)
    assert isinstance(found[1], Exception)
    for i, token in ((0, 4), (2, 5)):
        assert torch.equal(found[i], native.exit_early([token], native.new_cache(), 1))
        assert caches[i].ahead.tokens == (token,)


def test_the_price_of_a_round_leaves_out_what_drafting_did() -> None:
    """With half of the layers run by the drafts, eight more tokens cost the target four rows."""
    costs = Costs(1.0, fixed=True)
    goodput = Goodput((costs, costs))
    goodput.left = 0.5
    asked: list[int] = []
    choose([[0.9, 0.9]] * 4, 0, lambda rows: asked.append(rows) or float(rows), None, (), 0.5)
    assert asked == [4, 4, 5, 6, 6, 6, 7, 8, 8]
    learned = Goodput()
    learned.left = 0.5
    learned.took(12, 1.0, begun=8)
    assert learned._verify._passes.keys() == {8}


def test_one_failing_pass_is_one_failure() -> None:
    def law(tokens: Sequence[int]) -> Tensor:
        if tokens[-1] == 5:
            raise RuntimeError("five")
        return LAW(tokens)

    model = TableModel(law, V)
    items = [Item([1, 2], model.new_cache(), 1), Item([3, 5], model.new_cache(), 1), Item([4], model.new_cache(), 1)]
    found = forward_each(model, items)
    assert isinstance(found[1], RuntimeError)
    assert [item.cache.length for item in items] == [2, 0, 1]


# --- memory -----------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("kind", ["none", "model", "cascade", "early exit"])
@pytest.mark.parametrize("positions", [128, 192])
def test_under_a_tiny_budget_every_request_finishes_as_it_would(
    native: Any, native_draft: Any, kind: str, positions: int
) -> None:
    drafter = NATIVE_DRAFTERS[kind](native, native_draft)
    given = setting(native, drafter)
    requests = [request(r.prompt, 70, k=3, seed=i, temperature=0.8) for i, r in enumerate(various(6))]
    memory = positions * (native.position_bytes + (native_draft.position_bytes if kind in ("model", "cascade") else 0))
    engine = Engine(given, Limits(memory=memory, rows=16, prefix=0))
    assert engine.seats.positions == positions
    preempted = []
    engine._preempt = lambda job, plan: (preempted.append(job.id), Engine._preempt(engine, job, plan))  # type: ignore
    outputs = engine.answers(requests)
    assert_empty(engine)
    assert bool(preempted) == (positions == 192)  # in 128 there is room for one only
    for one, output in zip(requests, outputs, strict=True):
        expected = alone(given, one)
        assert same(output, expected)
        assert output.stats.drafted == expected.stats.drafted


def test_the_oldest_keeps_its_place() -> None:
    """So that somebody always gets on; the youngest begins again, and is answered the same."""
    given = setting(TableModel(LAW, V))
    engine = Engine(given, Limits(memory=bytes_of(given, 640), prefix=0))
    preempted: list[int] = []
    engine._preempt = lambda job, plan: (preempted.append(job.id), Engine._preempt(engine, job, plan))  # type: ignore
    outputs = engine.answers([request([i], 450) for i in range(3)])
    assert preempted
    assert 1 not in preempted
    assert [list(o.tokens) for o in outputs] == [greedy(LAW, [i], 450) for i in range(3)]


def test_what_can_never_fit_is_refused_at_once() -> None:
    given = setting(TableModel(LAW, V))
    engine = Engine(given, Limits(memory=bytes_of(given, 128), prefix=0))
    with pytest.raises(InputError, match=r"up to 129 tokens.*128.*memory="):
        engine.add(request([1] * 100, 29))
    engine.add(request([1] * 100, 28))
    finish(engine)
    with pytest.raises(InputError, match=r"memory=1000.*at least"):
        Engine(given, Limits(memory=1000))


@pytest.mark.parametrize("seed", range(4))
def test_an_arena_loses_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are taken, grown, given back and written to in any order; what is in them stays, wherever they move."""
    monkeypatch.setattr("slipstream.slots._PIECE", 1000)
    dice = random.Random(seed)
    arena = Arena(real("llama", weights="fp64"), 640)
    held: list[tuple[Any, list[Tensor]]] = []
    for turn in range(250):
        what, size = dice.choices("tgfw", [3, 4, 1, 5])[0], dice.randint(1, 300)
        if what == "t":
            slot = arena.take(size, size + dice.randint(0, 100))
            assert (slot is None) == (size > arena.free + (0 if slot is None else slot.capacity))
            held += [] if slot is None else [(slot, [])]
        elif held:
            slot, written = dice.choice(held)
            if what == "g":
                fits = size <= slot.capacity + arena.free
                assert arena.grow(slot, size) == fits
            elif what == "f":
                arena.give_back(slot)
                held = [one for one in held if one[0] is not slot]
            else:
                for _ in range(min(size, slot.capacity - slot.cache.length)):
                    written.append(torch.rand_like(slot.cache.store[:, :, :, 0]))
                    slot.cache.store[:, :, :, slot.cache.length] = written[-1]
                    slot.cache.length += 1
        assert sum(slot.capacity for slot in arena.slots) <= arena.positions
        for slot, written in held:
            assert slot.cache.length == len(written)
            if written:
                assert torch.equal(slot.cache.store[:, :, :, : len(written)], torch.stack(written, dim=3)), turn


def test_a_slot_does_not_grow_by_itself(native: Any) -> None:
    slot = Arena(native, 128).take(10)
    assert slot is not None
    with pytest.raises(RuntimeError, match="64 positions"):
        native.forward([1] * 65, slot.cache, 1)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_long_prompt_stalls_nobody() -> None:
    """A prompt of 4,000 tokens in one piece is a pass that everybody waits for."""
    target = TableModel(LAW, V)
    engine = Engine(setting(target, ModelDrafter(TableModel(LAW, V), V), Fixed(2)), Limits(rows=64))
    long = engine.add(request([i * i % V for i in range(4000)], 3))
    engine.step()
    short = [engine.add(request([i, i + 1, i + 2], 12)) for i in range(4)]
    done: dict[int, int] = {}
    for step in range(1, 200):
        before = len(target.calls)
        for event in engine.step():
            if event.output is not None:
                done[event.id] = step
        assert sum(call.count for call in target.calls[before:]) <= 64 + 3 * 5
        if not engine.unfinished:
            break
    assert max(done[i] for i in short) <= 6
    assert 4000 / 64 <= done[long] <= 80


def test_short_prompts_are_read_beside_a_long_one() -> None:
    engine = Engine(setting(TableModel(LAW, V)), Limits(rows=32))
    engine.add(request([1] * 3000, 1))
    engine.step()
    short = engine.add(request([2] * 20, 1))
    assert any(event.id == short for _ in range(3) for event in engine.step())


class Visited(TableModel):
    """Somebody comes in the middle of its passes."""

    come: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, tokens: Sequence[int], cache: Any, num_logits: int) -> Tensor:
        self.come()
        return super().forward(tokens, cache, num_logits)


@pytest.mark.parametrize("rows", [6, 12, 64])
@pytest.mark.parametrize("length", [2, 4, 20, 40])
@pytest.mark.parametrize("drafter", ["none", "model"])
def test_a_short_prompt_hardly_waits_for_a_long_one(rows: int, length: int, drafter: str) -> None:
    """It waits for the pass that was on, and has two thirds of those that follow; each has so many rows at most.

    Prompts that are being read had equal shares of passes of 64 rows: a short one waited 13 to 16 times as long.
    """
    target = Visited(LAW, V)
    given = setting(target, ModelDrafter(TableModel(LAW, V), V) if drafter == "model" else None)
    engine = Engine(given, Limits(rows=rows, prefix=0))
    engine.add(request([i * i % V for i in range(4000)], 3))
    for _ in range(10):
        engine.step()
    short: list[int] = []

    def come() -> None:
        if not short:
            short.append(engine.add(request([1] * length, 3)))

    target.come = come  # type: ignore[method-assign]
    before = len(target.calls)
    while not any(event.id in short for event in engine.step()):
        assert len(target.calls) < before + 200
    read = sum(call.count for call in target.calls[before:])
    passes = 1 + math.ceil(length / (rows - rows // 3))
    assert read <= rows * passes
    assert engine.running == 2


def test_short_prompts_without_end_do_not_starve_a_long_one() -> None:
    engine = Engine(setting(TableModel(LAW, V)), Limits(rows=6, requests=8, prefix=0))
    long = engine.add(request([1] * 400, 1))
    for _ in range(400 // 2 + 1):
        while engine.unfinished < 8:
            engine.add(request([2] * 4, 1))
        if any(event.id == long for event in engine.step()):
            break
    else:
        pytest.fail("it has not been read")


def test_a_long_prompt_alone_has_all_rows() -> None:
    target = TableModel(LAW, V)
    Engine(setting(target), Limits(rows=6)).answers([request([1] * 601, 1)])
    assert [call.count for call in target.calls] == [6] * 100 + [1]


def test_prompts_have_as_many_rows_as_requests_are_decoding() -> None:
    """Where these make a pass long anyway, few rows for prompts would help nobody."""
    target = TableModel(LAW, V)
    engine = Engine(setting(target), Limits(rows=6))
    for i in range(20):
        engine.add(request([i % V], 300, k=0))
    engine.step()
    engine.add(request([2] * 400, 1))
    before = len(target.calls)
    engine.step()
    assert sum(call.count for call in target.calls[before:]) == 40


@needs_native
def test_a_pass_has_the_rows_of_a_prompt_that_the_kernels_gain_from(native: Any) -> None:
    """All of them while nobody has begun; beside answers so many for each that waits for its first token."""
    few, most = native.prompt_rows
    assert few < most < 64
    counting = Counting(native)
    engine = Engine(setting(counting), Limits(memory=1 << 24, prefix=0))

    def rows_of_a_step() -> int:
        before = counting.read
        engine.step()
        return counting.read - before

    engine.add(request([i % 60 for i in range(100)], 1))
    assert rows_of_a_step() == most
    engine.add(request([3] * 4, 200))
    assert rows_of_a_step() == most
    assert rows_of_a_step() == few + 1
    for start in range(3):
        engine.add(request([(start + i) % 60 for i in range(100)], 1))
    assert rows_of_a_step() == most + 1


@needs_native
def test_a_long_prompt_has_few_rows_even_alone(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while it is read waits for the pass that is on."""
    monkeypatch.setattr("slipstream.engine._SOON", 60)
    few, most = native.prompt_rows
    counting = Counting(native)
    engine = Engine(setting(counting), Limits(memory=1 << 24, prefix=0))
    engine.add(request([i % 60 for i in range(100)], 1))
    steps = []
    while engine.unfinished:
        before = counting.read
        engine.step()
        steps.append(counting.read - before)
    assert steps == [few] * 4 + [most] * 2 + [4]


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_warm_prefix_changes_nothing_but_the_work(native: Any, native_draft: Any, temperature: float) -> None:
    given = setting(native, ModelDrafter(native_draft, 60), Fixed(3))
    shared = [(i * i) % 60 for i in range(50)]
    ones = [request([*shared, i], 15, temperature=temperature, seed=i, logprobs=1) for i in range(3)]
    engine = Engine(given, Limits(memory=1 << 24))
    outputs = [engine.answers([one])[0] for one in ones]
    assert engine.seats.prefixes is not None
    assert engine.seats.prefixes.length([*shared, 9]) == 48
    for one, output in zip(ones, outputs, strict=True):
        expected = alone(given, one)
        assert same(output, expected)
        assert (output.stats.drafted, output.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)


class Counting:
    """A model that counts the tokens it reads."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: Sequence[int], cache: Any, num_logits: int) -> Tensor:
        self.read += len(tokens)
        return self._model.forward(tokens, cache, num_logits)

    def forward_batch(self, items: Sequence[Item]) -> list[Tensor]:
        self.read += sum(len(item.tokens) for item in items)
        return self._model.forward_batch(items)


@needs_native
def test_samples_of_one_prompt_read_it_once(native: Any) -> None:
    counting = Counting(native)
    spec = SpeculativeDecoding(counting, None, max_new_tokens=2, temperature=1.0)
    spec.complete([i % 60 for i in range(200)], n=5)
    assert counting.read == 200 + 5 + 4 * (200 - 192)


@needs_native
@pytest.mark.parametrize("off", ["request", "share", "engine"])
def test_prefixes_can_be_left_alone(native: Any, off: str) -> None:
    counting = Counting(native)
    engine = Engine(setting(counting), Limits(memory=1 << 24, prefix=0 if off == "engine" else 0.25))
    params = {"share": False} if off == "share" else {}
    for _ in range(2):
        engine.answers([request([i % 60 for i in range(40)], 1, reuse=off != "request", **params)])
    assert counting.read == 80
    engine.answers([request([i % 60 for i in range(40)], 1)])
    assert counting.read == 120  # and leave nothing


@needs_native
def test_rejected_tokens_are_never_kept(native: Any) -> None:
    """Of a draft that is always wrong, keys and values are in the cache until they are cut off."""
    wrong = ForcedDrafter(lambda tokens, k: [(tokens[-1] * 7 + 13 + i) % 60 for i in range(k)])
    given = setting(native, wrong, Fixed(4))
    engine = Engine(given, Limits(memory=1 << 24))
    (first,) = engine.answers([request(range(20), 60, logprobs=0)])
    longer = request([*range(20), *first.tokens[:50]], 10, logprobs=0)
    (warm,) = engine.answers([longer])
    assert same(warm, alone(given, longer))
    assert warm.tokens == first.tokens[50:]


def test_prefixes_are_bounded_and_the_oldest_go_first(native: Any) -> None:
    block = BLOCK * native.position_bytes
    prefixes = PrefixCache(6 * block)
    caches = {}
    for start in (0, 1, 2):
        tokens = [start] * (3 * BLOCK + 1)
        caches[start] = native.new_cache()
        native.forward(tokens, caches[start], 0)
        prefixes.keep(tokens, caches[start])
        assert prefixes.size <= prefixes.limit
    assert [prefixes.length([s] * 100) for s in (0, 1, 2)] == [0, 3 * BLOCK, 3 * BLOCK]
    filled = native.new_cache()
    filled.reserve(100)
    assert prefixes.fill([1] * 40, filled) == 2 * BLOCK == filled.length
    assert torch.equal(filled.store[:, :, :, : 2 * BLOCK], caches[1].store[:, :, :, : 2 * BLOCK])
    assert prefixes.length([1] * 2 * BLOCK) == BLOCK  # at least one token is left to be read
    assert prefixes.length([1] * (BLOCK - 1)) == 0


# --- k over the batch -------------------------------------------------------------------------------------------------


def test_k_falls_as_the_batch_fills() -> None:
    cost = lambda rows: max(8.0, float(rows))  # noqa: E731
    ks = [choose([[0.8] * 8] * n, 0, cost, lambda rows: 0.5) for n in (1, 2, 4, 8, 16)]
    assert [max(k) for k in ks] == sorted((max(k) for k in ks), reverse=True)
    assert max(ks[0]) >= 4
    assert ks[-1] == [0] * 16


def test_k_goes_to_those_whose_drafts_stand() -> None:
    good, bad = choose([[0.9] * 6, [0.2] * 6], 0, lambda rows: 1 + 0.15 * (rows - 1), None)
    assert good > bad


def test_the_best_of_all_ways_to_draft() -> None:
    """Against a search over everything."""
    import itertools

    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        rates = torch.rand(3, 3, generator=generator).tolist()
        a, b = torch.rand(2, generator=generator).tolist()

        def verify(rows: int, a: float = a, b: float = b) -> float:
            return 1 + a * rows + b * max(0, rows - 4)

        def rate(ks: Sequence[int], verify: Any = verify, rates: Any = rates) -> float:
            tokens = 3.0
            for some, k in zip(rates, ks, strict=True):
                reach = 1.0
                for r in some[:k]:
                    reach *= r
                    tokens += reach
            return tokens / verify(5 + sum(ks))

        best = max(itertools.product(range(4), repeat=3), key=rate)
        assert rate(choose(rates, 2, verify, None)) == pytest.approx(rate(best))


def test_a_draft_that_is_always_wrong_is_given_up_and_tried_again() -> None:
    """W1, in a batch."""
    wrong = ModelDrafter(TableModel(constant_law([1e-9] * (V - 1) + [1.0]), V), V)
    target = TableModel(constant_law([0.5, 0.5, *[1e-12] * (V - 2)]), V)
    goodput = Goodput((Costs(1.0, fixed=True), Costs(1.0, fixed=True)))
    outputs = Engine(setting(target, wrong, goodput)).answers([request([i], 200, temperature=1.0) for i in range(4)])
    for output in outputs:
        assert output.stats.accepted == 0
        assert 3 <= output.stats.drafted <= 40


def copied_texts(engine: Engine, count: int, new: int) -> list[Output]:
    """Answers that repeat the prompt over and over."""
    script = [1, 4, 2, 7, 5, 3, 8, 6]
    return engine.answers([request([0, *script, *script, script[0]], new) for _ in range(count)])


@pytest.mark.parametrize("count", [1, 8])
def test_copies_of_a_cascade_are_judged_by_themselves(count: int) -> None:
    """Copies cost no time. A draft model beside them that is always wrong took k, and the copies with it, to 0."""

    def law(tokens: Sequence[int]) -> Tensor:
        script = [1, 4, 2, 7, 5, 3, 8, 6]
        row = torch.full((V,), -20.0, dtype=torch.float64)
        row[script[(script.index(tokens[-1]) + 1) % 8] if len(tokens) % 40 else 1] = 0.0
        return row

    def outputs(*drafters: Drafter) -> list[Output]:
        goodput = Goodput((Costs(1.0, fixed=True), Costs(1.0, fixed=True)))
        drafter = drafters[0] if len(drafters) == 1 else CascadeDrafter(drafters)
        return copied_texts(Engine(setting(TableModel(law, V), drafter, goodput)), count, 200)

    wrong = ModelDrafter(TableModel(constant_law([1e-9] * (V - 1) + [1.0]), V), V)
    wrong.name = "wrong"
    copying, both = outputs(SuffixDrafter()), outputs(SuffixDrafter(), wrong)
    for alone_, cascade in zip(copying, both, strict=True):
        assert alone_.tokens == cascade.tokens
        assert cascade.stats.accepted_by["suffix"] >= 0.9 * alone_.stats.accepted
        assert cascade.stats.drafted_by.get("wrong", 0) <= 30
        assert cascade.stats.rounds <= 1.2 * alone_.stats.rounds


def test_where_arithmetic_is_the_limit_nobody_looks_for_copies() -> None:
    """Looking for copies that are never verified took time from every step of a large batch."""
    asked: Counter[int] = Counter()

    class Counting(SuffixDrafter):
        def start(self, sampler: Sampler) -> Any:
            session = super().start(sampler)
            draft = session.draft

            def counting(tokens: Sequence[int], k: int) -> Draft:
                asked[engine.running] += 1
                return draft(tokens, k)

            session.draft = counting  # type: ignore[method-assign]
            return session

    def law(tokens: Sequence[int]) -> Tensor:
        row = torch.full((V,), -20.0, dtype=torch.float64)
        row[(tokens[-1] + 1) % V] = 0.0
        return row

    for count in (2, 24):
        goodput = Goodput()
        for rows in range(1, 80):
            goodput.took(rows, max(8.0, float(rows)))
        engine = Engine(setting(TableModel(law, V), Counting(), goodput))
        goodput.took = lambda rows, seconds, begun=0: None  # type: ignore[method-assign]
        engine.answers([request([1, 2], 30) for _ in range(count)])
    assert asked[2] > 0
    assert asked[24] == 0


def test_drafts_do_not_seem_cheap_beside_prompts_that_are_read() -> None:
    """Beside 24 rows of prompts a pass took long anyway, so the first of a crowd drafted at the cost of the others."""
    goodput, offer = Goodput(), Offer([0.7] * 4)
    for rows in range(1, 80):
        goodput.took(rows, max(6.0, float(rows)))
        goodput.took_draft(rows, 1.0)
    ks = {}
    for reading in (0, 1, 20):
        controller = goodput.start(object(), "model", repeatable=False, isolated=True)
        assert isinstance(controller, BatchController)
        goodput.choose([controller], [offer], 24 if reading else 0, reading)
        ks[reading] = controller.k
    assert ks[0] >= ks[1] > 0
    assert ks[20] == 0


def test_a_draft_model_reads_no_prompts_where_it_would_not_draft() -> None:
    """Before a crowd had begun to answer, its drafts read the ends of all prompts, and were then asked for nothing."""
    read = {}
    for count in (2, 24):
        goodput, draft = Goodput(), TableModel(LAW, V)
        for rows in range(1, 80):
            goodput.took(rows, max(8.0, float(rows)))
            goodput.took_draft(rows, 1.0)
        assert goodput.pays_for(count) == (count == 2)
        engine = Engine(setting(TableModel(LAW, V), ModelDrafter(draft, V), goodput))
        goodput.took = lambda rows, seconds, begun=0: None  # type: ignore[method-assign]
        goodput.took_draft = lambda rows, seconds: None  # type: ignore[method-assign]
        for i in range(count):
            engine.add(request([i % V] * 40, 30))
        while not engine.step():
            pass
        read[count] = sum(call.count for call in draft.calls)
    assert read[2] > 0
    assert read[24] == 0


# --- ends -------------------------------------------------------------------------------------------------------------


def test_an_abort_takes_effect_with_the_next_step() -> None:
    engine = Engine(setting(TableModel(LAW, V)), Limits(requests=2))
    ids = [engine.add(request([i, 2], 50)) for i in range(4)]
    pieces = Counter(event.id for _ in range(5) for event in engine.step())
    assert pieces == {ids[0]: 5, ids[1]: 5}
    assert engine.abort(ids[0])
    assert engine.abort(ids[3])
    events = engine.step()
    ended = {event.id: event.output for event in events if event.output is not None}
    assert ended.keys() == {ids[0], ids[3]}
    assert ended[ids[0]].finish_reason is None
    assert list(ended[ids[0]].tokens) == greedy(LAW, [0, 2], 5)
    assert ended[ids[3]].tokens == ()
    assert not engine.abort(ids[0])
    last = finish(engine)
    assert [list(last[i].output.tokens) for i in ids[1:3]] == [greedy(LAW, [i, 2], 50) for i in (1, 2)]  # type: ignore


def test_an_abort_in_the_middle_of_a_step_takes_effect_in_it() -> None:
    engine = Engine(setting(TableModel(LAW, V)))
    ids: list[int] = []

    def aborting(tokens: Sequence[int], row: Tensor) -> Tensor:
        if len(tokens) == 5:
            assert engine.abort(ids[1])
        return row

    ids += [engine.add(request([1, 2], 8, logits_processors=[aborting])), engine.add(request([3, 4], 8))]
    pieces = Counter(event.id for _ in range(4) for event in engine.step() if event.piece is not None)
    assert pieces == {ids[0]: 4, ids[1]: 3}
    finish(engine)


class Breaks(ForcedDrafter):
    """Raises in the middle of one request."""

    def __init__(self, marked: int) -> None:
        def propose(tokens: Sequence[int], k: int) -> list[int]:
            if tokens[0] == marked and len(tokens) > 6:
                raise RuntimeError("the drafter broke")
            return greedy_of(LAW)._propose(tokens, k)

        super().__init__(propose)


@pytest.mark.parametrize("k", [0, 2, None])
@pytest.mark.parametrize("fault", ["nan", "processor", "drafter", "pass", "forbidden"])
def test_a_failure_is_of_one_request(fault: str, k: int | None) -> None:
    marked = 7

    def law(tokens: Sequence[int]) -> Tensor:
        if tokens[0] == marked and len(tokens) > 6:
            if fault == "pass":
                raise RuntimeError("the pass broke")
            if fault == "nan":
                return LAW(tokens) * float("nan")
        return LAW(tokens)

    def processor(tokens: Sequence[int], row: Tensor) -> Tensor:
        if len(tokens) <= 6:
            return row
        if fault == "forbidden":
            return row.fill_(-torch.inf)
        raise ValueError("the grammar broke")

    if fault == "drafter" and k != 2:
        return  # it might not be asked
    drafter = Breaks(marked) if fault == "drafter" else greedy_of(LAW)
    engine = Engine(setting(TableModel(law, V), drafter))
    broken = {"logits_processors": [processor]} if fault in ("processor", "forbidden") else {}
    ids = {p: engine.add(request([p, 1, 2], 20, k, **(broken if p == marked else {}))) for p in (3, marked, 9)}
    last = finish(engine)
    assert last[ids[3]].error is last[ids[9]].error is None
    for p in (3, 9):
        output = last[ids[p]].output
        assert output is not None
        assert list(output.tokens) == greedy(LAW, [p, 1, 2], 20)
    failed = last[ids[marked]]
    assert isinstance(failed.error, ModelError if fault in ("nan", "forbidden") else Exception)
    assert failed.error is not None
    assert failed.output is not None
    assert failed.output.finish_reason is None
    assert list(failed.output.tokens) == greedy(LAW, [marked, 1, 2], len(failed.output.tokens))


def test_the_first_failure_of_several_prompts_is_raised() -> None:
    target = TableModel(lambda tokens: LAW(tokens) * (float("nan") if tokens[0] == 2 and len(tokens) > 5 else 1), V)
    with pytest.raises(ModelError, match="position 6 "):
        SpeculativeDecoding(target, "suffix").complete([[1, 1], [2, 2], [3, 3]], max_new_tokens=20)
    gc.collect()
    assert target.live_caches() == []


def test_almost_nothing_and_bad_requests() -> None:
    engine = Engine(setting(TableModel(LAW, V, limit=20)))
    nothing = engine.add(request([1], 0))
    full = engine.add(request([1] * 20, 5))
    for wrong in (Request(()), Request((99,)), Request((1,) * 21), Request((1,), k=-1), request([1], temperature=-1)):
        with pytest.raises(InputError):
            engine.add(wrong)
    last = finish(engine)
    for one in (nothing, full):
        assert last[one].output.tokens == ()  # type: ignore[union-attr]
        assert last[one].output.finish_reason == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "limits",
    [{"requests": 0}, {"requests": None}, {"rows": 0}, {"rows": -5}, {"memory": 0}, {"memory": 1e9}, {"memory": True},
     {"prefix": 1.0}, {"prefix": -0.5}, {"prefix": math.nan}],
    ids=str,
)  # fmt: skip
def test_limits_with_which_nothing_would_ever_be_answered(limits: dict[str, Any]) -> None:
    """With requests=0 or rows=-5 an engine went round without end."""
    with pytest.raises(InputError, match=f"^{next(iter(limits))}="):
        Engine(setting(TableModel(LAW, V)), Limits(**limits))


def test_a_stop_string_without_text_is_refused() -> None:
    """It was dropped silently, and the answer went on."""
    engine = Engine(setting(TableModel(LAW, V)))
    with pytest.raises(InputError, match="no tokenizer"):
        engine.add(request([1], stop=("a",)))
    assert engine.unfinished == 0


def test_requests_are_added_and_aborted_from_other_threads() -> None:
    engine = Engine(setting(TableModel(LAW, V), greedy_of(LAW)), Limits(requests=5))
    added: list[tuple[int, int]] = []

    def client(number: int) -> None:
        for i in range(15):
            added.append((number, engine.add(request([number, i % V], 6))))
            if i % 5 == 4:
                engine.abort(added[-1][1])

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    last: dict[int, Event] = {}
    while any(t.is_alive() for t in threads) or engine.unfinished:
        for event in engine.step():
            assert event.id not in last
            if event.output is not None:
                last[event.id] = event
    assert sorted(last) == sorted(i for _, i in added) == list(range(1, 61))
    assert_empty(engine)
    for number, one in added:
        output = last[one].output
        assert output is not None
        assert output.prompt_tokens[0] == number
        assert list(output.tokens) == greedy(LAW, output.prompt_tokens, len(output.tokens))
        assert len(output.tokens) == 6 or output.finish_reason is None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 90), st.integers(0, 40), st.sampled_from([None, 0, 2])),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ACTIONS)
def test_any_schedule(actions: list[Any]) -> None:
    """Slots never leak, the budget is kept, every request ends exactly once and with its own tokens."""
    target, draft = TableModel(LAW, V), TableModel(random_law(V, 7), V)
    given = setting(target, ModelDrafter(draft, V))
    engine = Engine(given, Limits(memory=bytes_of(given, 3 * QUANTUM), requests=4, rows=16, prefix=0))
    requests: dict[int, Request] = {}
    last: dict[int, Event] = {}

    def step() -> None:
        for event in engine.step():
            assert event.id not in last
            assert event.error is None
            if event.output is not None:
                last[event.id] = event
        for arena in engine.seats.arenas:
            assert sum(slot.capacity for slot in arena.slots) <= 3 * QUANTUM
            assert all(slot.cache.length <= slot.capacity for slot in arena.slots)
        held = {id(slot) for job in engine._running for slot in job.slots}
        assert held == {id(slot) for arena in engine.seats.arenas for slot in arena.slots}
        assert all(not job.slots for job in engine._waiting)
        assert len(engine._running) <= 4

    for what, *details in actions:
        if what == "add":
            length, new, k = details
            one = request([length % V, *range(V)] * 9, new, k)
            one = Request(one.prompt[:length], one.params, k=k)
            requests[engine.add(one)] = one
        elif what == "abort":
            engine.abort(details[0])
        else:
            for _ in range(details[0]):
                step()
    for _ in range(3000):
        if not engine.unfinished:
            break
        step()
    assert_empty(engine)
    assert last.keys() == requests.keys()
    for number, one in requests.items():
        output = last[number].output
        assert output is not None
        assert list(output.tokens) == greedy(LAW, one.prompt, len(output.tokens))
        assert len(output.tokens) == one.params.max_new_tokens or output.finish_reason is None


# --- long prompts -----------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("kind", ["model", "cascade"])
@pytest.mark.parametrize("rows", [5, 64])
def test_what_a_draft_has_read_of_a_prompt_does_not_depend_on_company(
    native: Any, native_draft: Any, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end first, all of it later: q depends on that, and seeded requests are to repeat."""
    monkeypatch.setattr("slipstream.controller.BRIEF", 6)
    monkeypatch.setattr("slipstream.goodput.BRIEF", 6)
    monkeypatch.setattr(AdaptiveController, "_whole_pays", lambda self, _room, length: length > self._prompt + 5)
    given = setting(native, NATIVE_DRAFTERS[kind](native, native_draft))
    requests = [request(r.prompt, 20, seed=i, temperature=0.8) for i, r in enumerate(various(8))]
    engine = Engine(given, Limits(memory=2**26, rows=rows))
    ids = [engine.add(one) for one in requests]
    events = finish(engine)
    for i, one in zip(ids, requests, strict=True):
        output, expected = events[i].output, alone(given, one)
        assert output is not None
        assert same(output, expected)
        assert (output.stats.drafted, output.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)


# --- another draft ----------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("kinds", [("model", "other"), ("none", "model"), ("cascade", "suffix"), ("model", "none")])
@pytest.mark.parametrize("positions", [192, 4096])
def test_a_swap_leaves_those_who_are_here_with_their_draft(
    native: Any, native_draft: Any, kinds: tuple[str, str], positions: int
) -> None:
    """Each is answered as it would be alone with the draft that there was when it came: also after it was preempted."""
    other = real("qwen2", seed=5, weights="fp32", num_hidden_layers=1)
    made = {**NATIVE_DRAFTERS, "other": lambda target, draft: ModelDrafter(other, 60)}
    old, new = (setting(native, made[kind](native, native_draft)) for kind in kinds)
    requests = [request(r.prompt, 60, k=3, seed=i, temperature=0.8) for i, r in enumerate(various(8))]
    each = native.position_bytes + sum(m.position_bytes for m in models_of(old.drafter))
    engine = Engine(old, Limits(memory=positions * each, rows=16, prefix=0))
    preempted: list[int] = []
    engine._preempt = lambda job, plan: (preempted.append(job.id), Engine._preempt(engine, job, plan))  # type: ignore
    ids = [engine.add(one) for one in requests[:4]]
    events = [event for _ in range(6) for event in engine.step()]
    engine.swap(new.drafter)
    ids += [engine.add(one) for one in requests[4:]]
    outputs = {e.id: e.output for e in events if e.output is not None}
    outputs |= {i: event.output for i, event in finish(engine).items()}
    assert bool(preempted) == (positions == 192)
    for i, one in enumerate(requests):
        output, expected = outputs[ids[i]], alone(old if i < 4 else new, one)
        assert output is not None
        assert same(output, expected)
        assert (output.stats.drafted, output.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)


def test_the_law_across_a_swap_by_chi_square() -> None:
    """Requests of before and after, in one batch, unrelated drafts: one law."""
    law = random_law(3, seed=4)
    drafts = [ModelDrafter(TableModel(random_law(3, seed=s, spread=2.0), 3), 3) for s in (7, 8)]
    given = setting(TableModel(law, 3), drafts[0])
    engine = Engine(given, Limits(memory=bytes_of(given, 64 * 40)))
    counts: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(0)
    for turn in range(60):
        for _ in range(20):
            engine.add(request([0], 3, k=2, temperature=1.0))
        events = engine.step()
        engine.swap(drafts[(turn + 1) % 2])
        for _ in range(20):
            engine.add(request([0], 3, k=2, temperature=1.0))
        events += finish(engine).values()
        counts.update(e.output.tokens for e in events if e.output is not None)
    samples = sum(counts.values())
    assert samples == 60 * 40
    pooled = [(counts[s], samples * p) for s, p in joint_law(law, [0], 3, softmax).items() if samples * p >= 5]
    rest = (samples - sum(a for a, _ in pooled), samples - sum(b for _, b in pooled))
    observed, expected = zip(*[pair for pair in [*pooled, rest] if pair[1] > 1], strict=True)
    scale = sum(observed) / sum(expected)
    assert chisquare(observed, [e * scale for e in expected]).pvalue > 1e-3
