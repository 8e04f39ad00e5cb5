"""The target's first layers as its drafter."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from scipy.stats import chisquare
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fakes import all_outcomes, decode, joint_law, loaded_dice, softmax
from slipstream import Draft, InputError, SamplingParams, SpeculativeDecoding
from slipstream.cli.main import cli
from slipstream.drafters import CascadeDrafter, Drafter, SuffixDrafter
from slipstream.drafters.early_exit import EarlyExitDrafter
from slipstream.models.exit_head import ExitHead
from slipstream.models.llama import LlamaModel
from slipstream.sampling import Sampler
from slipstream.verify import RULES
from test_llama import TOKENS, ours, theirs

PROMPT = [5, 6, 7]


def target(vocab: int = 40, weights: str = "fp32") -> LlamaModel:
    """Five layers of which the last three change little, so that two of them draft well but not perfectly."""
    sizes: dict[str, Any] = {"vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        reference = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in reference.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    return ours(reference, weights)


@pytest.mark.parametrize("weights", ["fp64", "fp32", "fp16", "int8"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_greedy_answers_are_those_of_plain_decoding(weights: str, k: int, kernels: str) -> None:
    model = target(weights=weights)
    settings = {"max_new_tokens": 50, "ignore_eos": True}
    plain = SpeculativeDecoding(model).complete([PROMPT], **settings)[0]
    fast = SpeculativeDecoding(model, "early-exit:2", k=k).complete([PROMPT], **settings)[0]
    assert fast.tokens == plain.tokens
    assert 0 < fast.stats.accepted < fast.stats.drafted


def test_sampled_answers_follow_the_target(kernels: str) -> None:
    model = target(vocab=4)
    prompt, samples = [1, 2, 3], 1500
    speculative = SpeculativeDecoding(model, "early-exit:2", k=3, temperature=1.0, ignore_eos=True, max_new_tokens=2)
    outputs = [speculative.complete([prompt], seed=seed)[0] for seed in range(samples)]
    counts = Counter(output.tokens for output in outputs)
    expected = {}
    for pair in itertools.product(range(4), repeat=2):
        first = model.forward(prompt, model.new_cache(), 1)[0].double().softmax(-1)
        second = model.forward([*prompt, pair[0]], model.new_cache(), 1)[0].double().softmax(-1)
        expected[pair] = samples * float(first[pair[0]] * second[pair[1]])
    likely = {pair: e for pair, e in expected.items() if e >= 5}
    observed, wanted = [counts[p] for p in likely], list(likely.values())
    rest = samples - sum(wanted)
    if rest > 1e-6:
        observed, wanted = [*observed, samples - sum(observed)], [*wanted, rest]
    assert chisquare(observed, wanted).pvalue > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("kind", ["bare", "headed", "copied, then drawn", "drawn, then drawn"])
def test_joint_law_by_enumeration(kind: str, k: int, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4. Every way that draft, acceptance and sampling can fall: bare layers, an exit head, members of a cascade."""
    model, prompt = target(vocab=3, weights="fp64"), [1, 2, 1]
    torch.manual_seed(1)
    head = ExitHead(2, torch.rand(32) + 0.5, torch.randn(4, 32), torch.randn(32, 4) / 8) if kind == "headed" else None
    copier = SuffixDrafter(min_probability=0, factor=1)

    def drafter() -> Drafter:
        if kind == "copied, then drawn":
            return CascadeDrafter([copier, EarlyExitDrafter(model, 2)], min_confidence=0.2)
        if kind == "drawn, then drawn":
            return CascadeDrafter([EarlyExitDrafter(model, 2), EarlyExitDrafter(model, 3)], min_confidence=0.6)
        return EarlyExitDrafter(model, 2, head)

    def program(dice: Any) -> tuple[int, ...]:
        with monkeypatch.context() as loaded:
            loaded_dice(loaded, dice)
            return tuple(decode(model, drafter(), prompt, k=k, rule=rule, max_new_tokens=3, temperature=1.0)[0])

    law = all_outcomes(program)
    expected = joint_law(lambda tokens: model.forward(tokens, model.new_cache(), 1)[0], prompt, 3, softmax)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert law == pytest.approx(expected, abs=1e-9)


def test_the_verification_goes_on_from_the_drafts_states(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    model = target()
    runs: list[tuple[int, int, int]] = []
    run = LlamaModel._run

    def recorded(self: LlamaModel, x: Any, span: Any, num_logits: int) -> Any:
        runs.append((len(x), span.first, span.last))
        return run(self, x, span, num_logits)

    monkeypatch.setattr(LlamaModel, "_run", recorded)
    cache = model.new_cache()
    model.forward(PROMPT, cache, 1)
    for token in (8, 9):
        model.exit_early([token], cache, 2)
    model.forward([8, 9, 10], cache, 3)
    assert runs == [(3, 0, 5), (1, 0, 2), (1, 0, 2), (1, 0, 2), (3, 2, 5)]


@pytest.mark.parametrize("then", [[8, 9, 10], [8, 9], [8, 30, 31], [30], [30, 31, 32, 33]])
def test_what_was_drafted_changes_no_logit(then: list[int], kernels: str) -> None:
    """Whether the tokens fed are those that were drafted, some of them, or others."""
    model = ours(theirs("qwen3, window"))
    plain, drafted = model.new_cache(), model.new_cache()
    for cache in (plain, drafted):
        model.forward(TOKENS[:20], cache, 1)
    for token in (8, 9):
        model.exit_early([token], drafted, 1)
    expected, got = model.forward(then, plain, len(then)), model.forward(then, drafted, len(then))
    assert torch.allclose(got, expected, rtol=0, atol=0 if kernels == "native" else 1e-5)
    more = [cache.length for cache in (plain, drafted)]
    assert more == [20 + len(then)] * 2
    assert torch.allclose(model.forward([1], drafted, 1), model.forward([1], plain, 1), atol=1e-5)


def test_a_cache_that_is_cut_forgets_what_was_drafted() -> None:
    model = target()
    cache = model.new_cache()
    model.forward(PROMPT, cache, 1)
    model.exit_early([8], cache, 2)
    cache.truncate(2)
    assert cache.ahead is None
    expected = model.forward([5, 6, 8], model.new_cache(), 1)
    assert torch.allclose(model.forward([8], cache, 1), expected, atol=1e-5)


def test_a_cache_that_grows_keeps_what_was_drafted() -> None:
    model = ours(theirs("llama 2"))
    tokens = [token % 80 for token in range(300)]
    plain, drafted = model.new_cache(), model.new_cache()
    for cache in (plain, drafted):
        model.forward(tokens[:255], cache, 1)
    for token in tokens[255:258]:
        model.exit_early([token], drafted, 2)
    expected, got = (model.forward(tokens[255:259], cache, 4) for cache in (plain, drafted))
    assert torch.allclose(got, expected, atol=1e-5)


MIXED = [["suffix", "early-exit:2"], ["early-exit:2", "suffix"], ["suffix", "early-exit:1", "early-exit:2"]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("members", MIXED)
@pytest.mark.parametrize("k", [1, 4, "adaptive"])
def test_early_exits_go_on_from_other_drafts(members: list[str], k: Any, temperature: float, kernels: str) -> None:
    """In a cascade they were asked at the beginning of a draft only, and what came in between was read twice."""
    model, settings = target(), {"max_new_tokens": 60, "ignore_eos": True, "temperature": temperature, "seed": 3}
    prompt = [5, 6, 7, 8, 9, 5, 6, 7]
    plain = SpeculativeDecoding(model, bit_exact=kernels == "native").complete([prompt], **settings)[0]
    spec = SpeculativeDecoding(model, members, k, bit_exact=kernels == "native")
    fast = spec.complete([prompt], **settings)[0]
    if temperature == 0 or kernels == "native":
        assert fast.tokens == plain.tokens
    if k == 4:
        assert all(fast.stats.drafted_by.get(name) for name in members[-1:])


def test_an_early_exit_reads_what_others_drafted() -> None:
    model = target()
    fresh, session = (EarlyExitDrafter(model, 2).start(Sampler(SamplingParams(), 3, (), 0)) for _ in range(2))
    for one in (fresh, session):
        cache = model.new_cache()
        model.forward(PROMPT[:-1], cache, 1)
        one.share(cache)
    three = fresh.draft(PROMPT, 3).tokens
    assert session.draft(PROMPT, 1).tokens == three[:1]
    assert session.draft_after(PROMPT, three[:1], 1).tokens == three[1:2]
    assert session.draft_after(PROMPT, [9, 9], 2).tokens != ()  # others' tokens in the place of its own
    assert session.draft_after(PROMPT, three[:2], 1).tokens == three[2:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_behind_a_drafted_token_ends_the_draft(temperature: float) -> None:
    """The answer failed, though plain decoding never comes there."""
    model = target(weights="fp64")
    plain = SpeculativeDecoding(model).complete([PROMPT], max_new_tokens=12, ignore_eos=True)[0].tokens

    def only(tokens: Any, logits: torch.Tensor) -> torch.Tensor:
        said = tuple(tokens[len(PROMPT) :])
        masked = torch.full_like(logits, -float("inf"))
        if said == plain[: len(said)] and len(said) < len(plain):
            masked[plain[len(said)]] = 0.0
            masked[(plain[len(said)] + 1) % 40] = -40.0  # a way into a dead end, which is never taken
        return masked

    settings = {"max_new_tokens": 12, "ignore_eos": True, "temperature": temperature, "logits_processors": [only]}
    spec = SpeculativeDecoding(model, "early-exit:2", k=4)
    spec.drafter.start, begin = lambda sampler: Blind(begin(sampler)), spec.drafter.start
    output = spec.complete([PROMPT], **settings, seed=1)[0]
    assert output.tokens == plain
    assert output.stats.rounds_by_end["vocabulary"] > 0


class Blind:
    """A session as it is, whose first token of each draft is another drafter's wrong one."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def draft(self, tokens: Any, k: int) -> Any:
        return self._session.draft_after(tokens, [0], k - 1) if k > 1 else Draft()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("early-exit:0", "early-exit:0 does not fit tiny: of its 5 layers use 1 to 4"),
        ("early-exit:5", "early-exit:5 does not fit tiny: of its 5 layers use 1 to 4"),
        ("early-exit:", "'early-exit:' names no number of layers; write for example early-exit:8"),
        ("early-exit:two", "'early-exit:two' names no number of layers"),
    ],
)
def test_numbers_of_layers_that_do_not_fit(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpeculativeDecoding(target(), name)


@pytest.mark.parametrize("command", ["", "generate", "bench", "plan"])
def test_numbers_of_layers_are_checked_before_weights_are_read(
    command: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took minutes with a large model to be told."""
    monkeypatch.setattr(LlamaModel, "__init__", lambda *_args, **_more: pytest.fail("weights were read"))
    if not command:
        with pytest.raises(InputError, match="of its 2 layers use 1 to 1"):
            SpeculativeDecoding(tiny_checkpoint, ["suffix", "early-exit:2"])
        return
    given = {"generate": ["-p", "a", "--draft"], "bench": ["--draft"], "plan": ["--drafts"]}[command]
    result = CliRunner().invoke(cli, [command, str(tiny_checkpoint), *given, "early-exit:2"], prog_name="slipstream")
    assert result.exit_code == 2, result.output
    assert "early-exit:2 does not fit" in result.stderr


def test_a_model_behind_the_adapter_cannot_exit_early() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=8, n_layer=3, n_head=2))
    with pytest.raises(InputError, match="needs the lean decoder"):
        SpeculativeDecoding(model, "early-exit:1")
