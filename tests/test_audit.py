"""The exactness audit: its laws against the sampler's, its evidence, its decoders, its verdicts, its command."""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch

from serving import served
from slipstream import InputError, SamplingParams, SpeculativeDecoding, load_model
from slipstream.answers import Setting
from slipstream.audit.endpoint import EndpointEngine
from slipstream.audit.engines import CallableEngine, SlipstreamEngine, TransformersEngine
from slipstream.audit.evidence import ChainBet, PairBet, RankBet, Wealth, detectable, holm, samples_for
from slipstream.audit.law import LawTable, ModelScorer, cells, distribution, processed
from slipstream.audit.laws import LawCheck, LawPlan, Pool
from slipstream.audit.reference import FAULTS, ReferenceDecoder
from slipstream.audit.report import to_html
from slipstream.audit.run import (
    Audit,
    Control,
    Report,
    load_state,
    prepare,
    prepare_pairs,
    run_control,
    single_findings,
    verdict,
)
from slipstream.audit.suite import Settings, law_plans
from slipstream.audit.toy import ToyModel
from slipstream.audit.types import Answer, EngineError, Finding, Refusing
from slipstream.cli.main import cli
from slipstream.controller import make_policy
from slipstream.drafters import make_drafter
from slipstream.engine import Engine
from slipstream.goodput import Goodput
from slipstream.sampling import Sampler
from slipstream.seats import Limits

TARGET, DRAFT = ToyModel(), ToyModel(seed=1, likeness=0.4)
PROMPT = (1, 2, 3)
COARSE = Settings(variation=0.4, contexts=1)
EVERY_PARAMETER = {
    "temperature": 0.6,
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.1,
    "repetition_penalty": 1.7,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "logit_bias": {3: 1.5, 4: -100.0},
    "min_new_tokens": 9,
}


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [*[(name,) for name in EVERY_PARAMETER], tuple(EVERY_PARAMETER)], ids=str)
def test_the_audit_s_own_processing_agrees_with_the_sampler(names: tuple[str, ...]) -> None:
    params = SamplingParams(**{"temperature": 1.0} | {name: EVERY_PARAMETER[name] for name in names})
    for answer in ((), (3,), (3, 3, 5), (1, 4, 4, 2)):
        row = TARGET.logits(PROMPT, answer)[-1]
        sampler = Sampler(params, len(PROMPT), TARGET.eos_token_ids, 0)
        theirs = sampler.probs(torch.from_numpy(row.copy())[None], [*PROMPT, *answer])[0].numpy()
        ours = distribution(processed(row, PROMPT, answer, params, TARGET.eos_token_ids), params)
        assert np.abs(ours - theirs).max() < 1e-12


def test_cells_hold_all_probability_and_know_what_must_not_occur() -> None:
    params = SamplingParams(temperature=1.0, top_k=3)
    law = cells(TARGET.logits(PROMPT, ())[0], params, (), 1e-3)
    assert sum(law.probs) == pytest.approx(1, abs=1e-12)
    assert len(law.ids) == 3
    assert all(c >= p for c, p in zip(law.ceilings, law.probs, strict=True))
    assert {law.of(t) for t in range(12)} == {0, 1, 2, 4}
    assert law.of(12) == law.of(-1) == law.of(10**6) == 4


def test_a_token_on_a_filter_s_border_may_occur() -> None:
    """Two logits closer than the tolerance: rounding decides which of them top_k keeps."""
    row = np.array([2.0, 1.0, 1.0 - 1e-5, 0.0])
    assert cells(row, SamplingParams(temperature=1.0, top_k=2), (), 1e-3).of(2) == 2
    assert cells(row, SamplingParams(temperature=1.0, top_k=2), (), 1e-6).of(2) == 3


# --- evidence ---------------------------------------------------------------------------------------------------------


def exact_answers(count: int, seed: int, params: SamplingParams) -> list[tuple[int, ...]]:
    """Drawn from the law itself, by numpy."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(count):
        answer: tuple[int, ...] = ()
        while len(answer) < params.max_new_tokens and answer[-1:] != TARGET.eos_token_ids:
            row = TARGET.logits(PROMPT, answer)[-1]
            law = distribution(processed(row, PROMPT, answer, params, TARGET.eos_token_ids), params)
            answer = (*answer, int(rng.choice(12, p=law)))
        out.append(answer)
    return out


def test_a_bet_is_a_fair_game_under_the_claim() -> None:
    """Whatever was seen before, the expected factor of every bet is at most 1."""
    law = cells(TARGET.logits(PROMPT, ())[0], SamplingParams(temperature=1.0), (), 0.0)
    probs = distribution(TARGET.logits(PROMPT, ())[0], SamplingParams(temperature=1.0))
    chain, ranks = ChainBet(), RankBet()
    rng = random.Random(0)
    for _ in range(200):
        token = rng.choice((0, 0, 1, 5))
        chain.factor((), law, token)
        ranks.factor(law, token)
    for bet in (lambda t: copied(chain).factor((), law, t), lambda t: copied(ranks).factor(law, t)):
        assert sum(probs[t] * math.exp(bet(t)) for t in range(12)) <= 1 + 1e-6


def copied(bet: Any) -> Any:
    from copy import deepcopy

    return deepcopy(bet)


def test_a_pair_bet_is_a_fair_game_if_both_laws_are_one() -> None:
    bet = PairBet()
    for our, their in (("a", "b"), ("a", "a"), ("a", "b"), ("c", "b")):
        bet.factor(our, their)
    one, other = copied(bet).factor("a", "b"), copied(bet).factor("b", "a")
    assert (math.exp(one) + math.exp(other)) / 2 == pytest.approx(1)
    assert one > 0 > other


def test_false_alarms_are_as_rare_as_stated_however_often_one_looks() -> None:
    """200 runs of 300 answers with a look after each, at 5 %: Ville's inequality allows 10."""
    params = SamplingParams(temperature=0.8, top_k=4, max_new_tokens=2)
    answers = exact_answers(60_000, 1, params)
    table = LawTable(TARGET, PROMPT, params, 0.0)
    alarms = 0
    for start in range(0, len(answers), 300):
        bet, wealth = ChainBet(), Wealth()
        for answer in answers[start : start + 300]:
            for i, law in enumerate(table.along(answer)):
                wealth.add(bet.factor(answer[:i], law, answer[i]))
        alarms += wealth.p_value <= 0.05
    assert alarms <= 10


@pytest.mark.parametrize("kind", ["to the likeliest", "to the rarest", "split"])
def test_the_stated_power_is_reached(kind: str) -> None:
    """As many answers as ``samples_for`` says find a total variation of 0.2 in 90 of 100 runs, whatever its shape."""
    params = SamplingParams(temperature=0.8, top_k=4)
    law = cells(TARGET.logits(PROMPT, ())[0], params, (), 0.0)
    p = np.array(law.probs[:4])
    shift = {"to the likeliest": [1, 0, 0, 0], "to the rarest": [0, 0, 0, 1], "split": [0.5, 0, 0.5, 0]}[kind]
    gains = np.array(shift, dtype=float)
    losses = (gains == 0) * p
    wrong = p + 0.2 * gains - 0.2 * losses / losses.sum()
    assert np.abs(wrong - p).sum() / 2 == pytest.approx(0.2)
    assert wrong.min() >= 0
    samples = samples_for(0.2, 3, 1e-4)
    assert detectable(samples, 1.5 * math.log1p(samples / 20), 1e-4) <= 0.2
    rng, found = np.random.default_rng(0), 0
    for _ in range(100):
        bet, wealth = ChainBet(), Wealth()
        for token in rng.choice(4, size=samples, p=wrong):
            wealth.add(bet.factor((), law, law.ids[token]))
        found += wealth.p_value <= 1e-4
    assert found >= 90


def test_holm() -> None:
    assert holm([0.001, 0.5, 0.02, 0.013], 0.05) == [True, False, True, True]
    assert holm([0.02, 0.03], 0.03) == [False, False]
    assert holm([], 0.05) == []


# --- the reference decoder and the controls ---------------------------------------------------------------------------


def test_the_correct_decoder_passes_all_tests() -> None:
    control = run_control(None, Settings())
    assert control == Control(None, True, control.samples, "")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_published_fault_is_caught(fault: str) -> None:
    control = run_control(fault, Settings(seed=3))
    assert control.as_it_must
    assert control.found_by


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(InputError, match="argmax-soft-q"):
        ReferenceDecoder(TARGET, DRAFT, fault="none")


@pytest.mark.parametrize("fault", ["argmax-soft-q", "wrong-token", "inverted-ratio", "no-residual", "unfiltered-q"])
def test_faults_of_sampling_do_not_show_in_greedy_answers(fault: str) -> None:
    """So it takes the tests of laws to catch them."""
    right, wrong = ReferenceDecoder(TARGET, DRAFT), ReferenceDecoder(TARGET, DRAFT, fault=fault)
    params = SamplingParams(max_new_tokens=20)
    assert wrong.complete([PROMPT], params, [0])[0].tokens == right.complete([PROMPT], params, [0])[0].tokens


# --- engines ----------------------------------------------------------------------------------------------------------


def audit_of(engine: Any, scorer: Any, settings: Settings = COARSE) -> list[Finding]:
    singles = single_findings(engine, scorer, settings)
    audit = prepare(engine, scorer, settings)
    while audit.step():
        pass
    return [*singles, *audit.findings()]


@pytest.mark.parametrize(
    ("draft", "rule", "k"),
    [
        ("suffix", "block", 4),
        (DRAFT, "block", 4),
        (DRAFT, "token", 4),
        (["suffix", DRAFT], "block", 2),
        (None, "token", 0),
    ],
    ids=["suffix", "model-block", "model-token", "cascade", "plain"],
)
def test_slipstream_passes(draft: Any, rule: str, k: int) -> None:
    engine = SlipstreamEngine(SpeculativeDecoding(TARGET, draft, k=k, rule=rule))
    findings = audit_of(engine, TARGET)
    assert verdict(findings, []) == "exact within power", [f for f in findings if f.result != "pass"]
    assert all(f.result == "pass" for f in findings)


class Bent(SlipstreamEngine):
    """Slipstream whose answers are changed on their way."""

    def __init__(self, bend: Any, honours: frozenset[str] | None = None) -> None:
        super().__init__(SpeculativeDecoding(TARGET, DRAFT))
        self._bend = bend
        if honours is not None:
            self.honours = honours

    def complete(self, prompts: Any, params: SamplingParams, seeds: Any) -> list[Answer]:
        return [self._bend(answer, params) for answer in super().complete(prompts, params, seeds)]


@pytest.mark.parametrize(
    ("bend", "test"),
    [
        (lambda a, p: replace(a, tokens=a.tokens[:-1]), "lengths"),
        (lambda a, p: replace(a, usage=a.usage + 1), "lengths"),
        (lambda a, p: replace(a, finish_reason="tired"), "lengths"),
        (lambda a, p: replace(a, text=a.text + (p.stop[0] if p.stop else "")), "stop strings"),
        (lambda a, p: replace(a, tokens=(*a.tokens, 0)) if p.stop_token_ids else a, "stop ids"),
        (lambda a, p: replace(a, logprobs=tuple(x - 0.1 for x in a.logprobs or ()) or None), "logprobs"),
        (lambda a, p: replace(a, logprobs=(*(a.logprobs or ())[:-1], math.nan) if a.logprobs else None), "logprobs"),
        (lambda a, p: replace(a, counters=replace(a.counters, accepted=a.counters.drafted + 1)), "counters"),
        (lambda a, p: replace(a, tokens=(0, *a.tokens[1:])) if p.temperature == 0 else a, "greedy parity"),
    ],
    ids=["cut", "usage", "reason", "stop", "stop-id", "logprobs", "logprobs-nan", "counters", "greedy"],
)
def test_what_one_answer_shows(bend: Any, test: str) -> None:
    findings = single_findings(Bent(bend), TARGET, COARSE)
    assert test in [f.name for f in findings if f.result == "fault"]


def test_one_seed_for_all_and_one_answer_for_n() -> None:
    class Deaf(SlipstreamEngine):
        def complete(self, prompts: Any, params: SamplingParams, seeds: Any) -> list[Answer]:
            ask = super().complete
            return [a for p in prompts for a in ask([p], replace(params, n=1), [0]) * params.n]

    findings = single_findings(Deaf(SpeculativeDecoding(TARGET, DRAFT)), TARGET, COARSE)
    assert {f.name for f in findings if f.result == "fault"} >= {"seeds", "n"}


def test_a_parameter_that_is_ignored_throughout() -> None:
    class Deaf(SlipstreamEngine):
        def complete(self, prompts: Any, params: SamplingParams, seeds: Any) -> list[Answer]:
            return super().complete(prompts, replace(params, top_p=1.0), seeds)

    findings = audit_of(Deaf(SpeculativeDecoding(TARGET, DRAFT)), TARGET)
    assert {f.name.split(":")[0] for f in findings if f.result == "fault"} == {"top_p"}


def test_what_an_engine_does_not_take_is_not_tested() -> None:
    engine = Bent(lambda a, p: replace(a, logprobs=None, counters=None), frozenset({"temperature"}))
    findings = single_findings(engine, TARGET, COARSE)
    skipped = {f.name for f in findings if f.result == "skipped"}
    assert skipped == {
        "greedy parity, repetition_penalty",
        "stop ids",
        "stop strings",
        "seeds",
        "isolation",
        "n",
        "logprobs",
        "counters",
    }
    assert [p.name for p in law_plans(TARGET, engine, COARSE)] == ["prompt 1", "temperature"]


class NearlyToy(ToyModel):
    """The toy target with its two likeliest tokens 4e-4 apart, and the order of the two turned."""

    def row(self, tokens: Any) -> Any:
        row = super().row(tokens).copy()
        first, second = np.argsort(-row)[:2]
        row[first] = row[second] - 4e-4
        return row


class TiedToy(NearlyToy):
    """The same, with the likeliest token in front by as much."""

    def row(self, tokens: Any) -> Any:
        row = super().row(tokens).copy()
        first, second = np.argsort(-row)[:2]
        row[second] = row[first] + 4e-4
        return row


def test_a_tie_is_no_fault_and_a_gap_is() -> None:
    """Both logits are shown."""
    engine = SlipstreamEngine(SpeculativeDecoding(NearlyToy()))
    for tolerance, result in ((1e-3, "pass"), (1e-5, "fault")):
        settings = replace(COARSE, tolerance=tolerance)
        (found,) = [f for f in single_findings(engine, TiedToy(), settings) if f.name == "greedy parity"]
        assert found.result == result
        assert "(logit " in found.detail


def test_a_callable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_engine.py").write_text(
        "def complete(prompt, params, seed):\n    return [seed % 5] * params['max_new_tokens']\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    engine = CallableEngine("own_engine:complete")
    assert engine.honours == {"temperature"}
    assert engine.complete([(1,)], SamplingParams(max_new_tokens=3), [7])[0].tokens == (2, 2, 2)
    assert "fault" in {f.result for f in audit_of(engine, TARGET)}
    for name in ("own_engine:nothing", "nothing_here:complete", "own_engine"):
        with pytest.raises(InputError, match="MODULE:FUNCTION"):
            CallableEngine(name)


@pytest.mark.parametrize("mode", ["assisted", "lookup"])
def test_transformers_takes_the_parameters_that_are_asked_for(mode: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from slipstream.models.huggingface import HuggingFaceModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=16, **sizes, initializer_range=0.5, eos_token_id=15, bos_token_id=None)
    torch.manual_seed(0)
    target, assistant = (LlamaForCausalLM(config).eval() for _ in range(2))
    engine = TransformersEngine(
        target, assistant if mode == "assisted" else None, 3 if mode == "lookup" else 0, 3, (15,)
    )
    scorer = ModelScorer(HuggingFaceModel(target))
    params = SamplingParams(temperature=0.7, top_k=2, logit_bias={3: 2.0}, min_new_tokens=3, max_new_tokens=4)
    check = LawCheck(LawPlan("all", (1, 2, 1, 2, 1), params, 40), scorer, 1e-3, Pool())
    check.ask(engine, 40, 0)
    assert not check.violations
    assert not check.impossible


def test_what_transformers_refuses_aloud_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assisted generation of 4.57 has no minimum length, and says so: the whole audit ended with its exception."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).eval()
    generate = target.generate

    def refuse(**given: Any) -> Any:
        if given["generation_config"].min_new_tokens:
            raise ValueError("no minimum length here")
        return generate(**given)

    monkeypatch.setattr(target, "generate", refuse)
    engine = TransformersEngine(target, lookup=3)
    assert isinstance(engine, Refusing)
    engine.probe()
    assert engine.unsupported == {"min_new_tokens": "no minimum length here"}
    assert engine.honours == TransformersEngine.honours - {"min_new_tokens"}


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_transformers_that_fails_whatever_is_asked_is_a_finding(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every parameter was said to be refused, and the audit ended with a traceback."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).eval()

    def fail(**_: Any) -> Any:
        raise kind("always")

    monkeypatch.setattr(target, "generate", fail)
    engine = TransformersEngine(target, lookup=3)
    with pytest.raises(EngineError, match="always"):
        engine.probe()
    assert engine.honours == TransformersEngine.honours
    assert single_findings(engine, TARGET, COARSE)[0].result == "fault"


class Handler(BaseHTTPRequestHandler):
    """The toy target behind OpenAI's interface; the server's ``ids`` says whether it returns token ids."""

    def do_GET(self) -> None:
        server: Any = self.server
        self.reply({"data": [{"id": "toy", "owned_by": "llamacpp" if server.llama else "somebody"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        if server.strict and "return_token_ids" in asked:
            self.send_error(400)
            return
        if server.dead:
            self.send_error(503)
            return
        server.asked.append(asked)
        for name, code in server.failing.items():
            if asked.get(name, SamplingParams.__dataclass_fields__[name].default) not in (0, 1.0, None):
                server.dead = server.mortal
                self.send_error(code)
                return
        if server.llama:
            self.reply(self.as_llama_cpp(asked))
            return
        names = {"min_tokens": "min_new_tokens", "max_tokens": "max_new_tokens"}
        known = SamplingParams.__dataclass_fields__
        given = {names.get(k, k): v for k, v in asked.items() if names.get(k, k) in known}
        given["logit_bias"] = {int(k): v for k, v in given.get("logit_bias", {}).items()}
        outputs = server.decoding.complete(tuple(asked["prompt"]), SamplingParams(**given))
        choices = [self.choice(output) for output in outputs]
        self.reply({"choices": choices, "usage": {"completion_tokens": len(choices[0].get("token_ids", ()))}})

    def choice(self, output: Any) -> dict[str, Any]:
        server: Any = self.server
        kept = [t for t in output.tokens if t != 11]
        choice: dict[str, Any] = {"text": output.text, "finish_reason": output.finish_reason}
        choice["logprobs"] = {"token_logprobs": [None if server.mute else p.logprob for p in output.logprobs or ()]}
        if server.ids:
            choice["token_ids"] = kept
        return choice

    def as_llama_cpp(self, asked: Any) -> dict[str, Any]:
        server: Any = self.server
        assert self.path == "/completion"
        names = {"n_predict": "max_new_tokens", "repeat_penalty": "repetition_penalty"}
        given = {names.get(k, k): v for k, v in asked.items()}
        given = {k: v for k, v in given.items() if k in SamplingParams.__dataclass_fields__}
        given["logprobs"] = asked["n_probs"] or None
        given["logit_bias"] = dict(asked["logit_bias"])
        (output,) = server.decoding.complete(tuple(asked["prompt"]), SamplingParams(**given))
        kept = [t for t in output.tokens if t != 11]
        stop = "limit" if output.finish_reason == "length" else "eos"
        told = [{"id": t, "logprob": p.logprob} for t, p in zip(kept, output.logprobs or (), strict=False) if t != 7]
        return {
            "content": output.text,
            "tokens": kept,
            "stop_type": stop,
            "tokens_predicted": len(kept),
            "completion_probabilities": told if asked["n_probs"] else [],
        }

    def reply(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quietly."""


@pytest.fixture
def server() -> Any:
    made: Any = HTTPServer(("127.0.0.1", 0), Handler)
    made.decoding, made.ids, made.strict, made.asked = SpeculativeDecoding(TARGET, DRAFT), True, False, []
    made.llama, made.failing, made.mortal, made.dead, made.mute = False, {}, False, False, False
    thread = Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def test_an_endpoint_that_returns_token_ids(server: Any) -> None:
    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}", TARGET.eos_token_ids)
    params = SamplingParams(temperature=0.9, top_k=4, logit_bias={11: 4.0}, min_new_tokens=2, max_new_tokens=8)
    own = SlipstreamEngine(server.decoding)
    for seed in range(5):
        (heard,), (wanted,) = engine.complete([PROMPT], params, [seed]), own.complete([PROMPT], params, [seed])
        assert (heard.tokens, heard.text, heard.finish_reason) == (wanted.tokens, wanted.text, wanted.finish_reason)
    assert server.asked[-1]["min_tokens"] == 2
    assert server.asked[-1]["logit_bias"] == {"11": 4.0}
    # A server may have other defaults, so filters that are off are said to be off.
    assert (server.asked[-1]["top_p"], server.asked[-1]["min_p"]) == (1.0, 0.0)


def test_an_endpoint_that_does_not_tell_log_probabilities(server: Any) -> None:
    """A null for each was a TypeError."""
    server.mute = True
    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}", TARGET.eos_token_ids)
    (found,) = [f for f in single_findings(engine, TARGET, COARSE) if f.name == "logprobs"]
    assert found.result == "skipped"


def test_an_endpoint_that_refuses_further_wishes_is_asked_without(server: Any) -> None:
    server.strict = True
    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}/v1")
    assert engine.complete([PROMPT], SamplingParams(max_new_tokens=2), [0])[0].text is not None


@pytest.mark.parametrize("right", [True, False])
def test_texts_beside_a_reference(server: Any, right: bool) -> None:
    """An engine that tells no token ids is compared by its texts: one that is right, one with a filter."""
    server.ids = False
    engine: Any = EndpointEngine(f"http://127.0.0.1:{server.server_port}")
    assert engine.complete([PROMPT], SamplingParams(max_new_tokens=2), [0])[0].tokens is None
    engine = Bent(lambda a, p: replace(a, tokens=None))
    asked = engine.complete
    if not right:
        engine.complete = lambda prompts, params, seeds: asked(prompts, replace(params, top_k=1), seeds)
    plain = SlipstreamEngine(SpeculativeDecoding(TARGET))
    audit = prepare_pairs(engine, plain, TARGET, COARSE)
    while audit.step():
        pass
    assert (
        {f.result for f in audit.findings()} == {"pass"} if right else {"fault"} <= {f.result for f in audit.findings()}
    )


def test_llama_cpp_is_asked_in_its_own_words(server: Any) -> None:
    """Its own defaults (40 tokens, top_p 0.95, min_p 0.05, filters before the temperature) would be another law."""
    server.llama = True
    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}", TARGET.eos_token_ids)
    params = SamplingParams(temperature=0.9, repetition_penalty=1.4, logit_bias={11: 4.0}, max_new_tokens=8)
    own = SlipstreamEngine(server.decoding)
    for seed in range(5):
        (heard,), (wanted,) = engine.complete([PROMPT], params, [seed]), own.complete([PROMPT], params, [seed])
        assert (heard.tokens, heard.text, heard.finish_reason) == (wanted.tokens, wanted.text, wanted.finish_reason)
    sent = server.asked[-1]
    assert (sent["top_k"], sent["top_p"], sent["min_p"]) == (0, 1.0, 0.0)
    assert sent["samplers"].index("temperature") < sent["samplers"].index("top_k")
    assert not engine.honours & {"frequency_penalty", "min_new_tokens"}
    # It leaves out some tokens' log-probabilities: the others must not be taken for theirs.
    asked = SamplingParams(temperature=1.0, max_new_tokens=30, logprobs=1)
    heard, wanted = (e.complete([PROMPT], asked, [1])[0] for e in (engine, own))
    assert heard.tokens is not None
    assert heard.logprobs is not None
    assert wanted.logprobs is not None
    assert 7 in heard.tokens
    for token, said, right in zip(heard.tokens, heard.logprobs, wanted.logprobs, strict=True):
        assert said is None if token in (7, 11) else said == pytest.approx(right)
    (found,) = [f for f in single_findings(engine, TARGET, COARSE) if f.name == "logprobs"]
    assert found.result == "pass"


def test_what_a_server_refuses_aloud_is_not_tested_and_what_it_breaks_at_is_a_fault(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM refuses min_p with drafts (400), and died of top_k (500)."""
    server.ids, server.failing = True, {"min_p": 400}
    words = ("toy", "--url", f"http://127.0.0.1:{server.server_port}", "--tv", "0.4", "--minutes", "0.0001", "--json")
    run_command(monkeypatch, *words)
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["min_p"]["result"] == "skipped"
    assert "HTTP 400" in found["min_p"]["detail"]
    assert "answers" not in found
    server.failing, server.mortal = {"repetition_penalty": 500}, True
    assert run_command(monkeypatch, *words) == 1
    told = capsys.readouterr().out
    assert "HTTP 500" in "".join(f["detail"] for f in json.loads(told)["findings"] if f["result"] == "fault")
    server.dead = server.mortal = False
    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}", TARGET.eos_token_ids)
    findings = single_findings(engine, TARGET, COARSE)
    assert findings[-1].name == "answers"
    assert "HTTP 500" in findings[-1].detail
    assert verdict(findings, []) == "fault found"


def test_an_endpoint_is_asked_several_things_at_a_time(server: Any) -> None:
    """Else no batch would ever be tested."""
    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}", TARGET.eos_token_ids)
    together = Barrier(3, timeout=60)
    ask = engine._post
    engine._post = lambda body: (together.wait(), ask(body))[1]  # type: ignore[method-assign]
    answers = engine.complete([PROMPT] * 3, SamplingParams(max_new_tokens=2), [0, 1, 2])
    assert len({a.tokens for a in answers}) == 1


def test_no_server() -> None:
    with pytest.raises(InputError, match="reached"):
        EndpointEngine("http://127.0.0.1:9")
    with pytest.raises(InputError, match="http://HOST:PORT"):
        EndpointEngine("localhost:80")


def test_an_endpoint_with_strange_replies(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was a traceback: a list, no choices, more than one answer, numbers for objects, texts for numbers."""
    from slipstream.audit.types import EngineError

    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}", TARGET.eos_token_ids)
    one = {"text": "a", "finish_reason": "length", "token_ids": [1]}
    for reply, said in (
        ([], "not with an object"),
        ("ok", "not with an object"),
        ({}, "0 answers"),
        ({"choices": []}, "0 answers"),
        ({"choices": [one, one]}, "2 answers"),
        ({"choices": [3]}, "cannot be read"),
        ({"choices": {"a": 1}}, "cannot be read"),
        ({"choices": [one], "usage": 3}, "cannot be read"),
        ({"choices": [one | {"logprobs": {"token_logprobs": ["x"]}}]}, "cannot be read"),
        ({"choices": [one], "speculation": {"rounds": 1}}, "cannot be read"),
    ):
        monkeypatch.setattr(Handler, "do_POST", lambda self, reply=reply: self.reply(reply))
        with pytest.raises(EngineError, match=said):
            engine.complete([PROMPT], SamplingParams(max_new_tokens=1, logprobs=1), [0])


@pytest.mark.parametrize("code", [401, 403, 404])
def test_an_address_or_model_that_is_wrong_is_no_fault(server: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's name that a server does not know was called a fault of the engine."""

    def refuse(handler: Handler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.send_error(code)

    monkeypatch.setattr(Handler, "do_POST", refuse)
    with pytest.raises(InputError, match=rf"HTTP {code}.*look at address, key and \?model=NAME"):
        EndpointEngine(f"http://127.0.0.1:{server.server_port}").probe()


def test_a_server_that_fails_from_the_start_is_in_the_report(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a sentence, without document, page and controls."""
    server.dead = True
    url = f"http://127.0.0.1:{server.server_port}"
    assert run_command(monkeypatch, "toy", "--url", url, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    broken = [f for f in document["findings"] if f["result"] == "fault"]
    assert {f["name"] for f in broken} == {"answers"}
    assert all("HTTP 503" in f["detail"] for f in broken)


def test_a_reference_that_fails_is_no_fault_of_the_engine(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = EndpointEngine(f"http://127.0.0.1:{server.server_port}")

    class Dead(EndpointEngine):
        def complete(self, *_: Any) -> list[Answer]:
            raise EngineError("HTTP 500")

    from slipstream.audit.run import failure
    from slipstream.audit.types import ComparisonError, EngineError

    dead = Dead(f"http://127.0.0.1:{server.server_port}")
    audit = prepare_pairs(good, dead, TARGET, COARSE)
    with pytest.raises(ComparisonError) as error:
        audit.step()
    assert failure(error.value).result == "undecided"


def test_the_endpoint_has_its_time(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    from slipstream.audit.types import EngineError

    engine = EndpointEngine(f"http://127.0.0.1:{server.server_port}", seconds=0.2)
    over = Event()
    monkeypatch.setattr(Handler, "do_POST", lambda self: over.wait(60))
    with pytest.raises(EngineError, match="timed out"):
        engine.complete([PROMPT], SamplingParams(max_new_tokens=1), [0])
    over.set()


#: Through the server; the other combinations of drafter, rule and k take minutes.
QUICK = {
    ("server", "suffix", "block", 4),
    ("server", "model", "token", 1),
    ("server", "model", "block", "adaptive"),
    ("server", "cascade", "block", 4),
    ("server", "early-exit:1", "token", "adaptive"),
}
EVERY_WAY = itertools.product(
    ("library", "server"), ("suffix", "model", "cascade", "early-exit:1"), ("token", "block"), (1, 4, 8, "adaptive")
)


@pytest.mark.parametrize(
    ("way", "draft", "rule", "k"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in EVERY_WAY],
)
def test_slipstream_passes_in_every_way(
    way: str, draft: str, rule: str, k: Any, tiny_checkpoint: Path, tiny_draft_checkpoint: Path
) -> None:
    """The server is asked over HTTP, several requests at a time."""
    model = load_model(tiny_checkpoint, weights="fp32")
    small = load_model(tiny_draft_checkpoint, weights="fp32")
    drafts: dict[str, Any] = {"model": small, "cascade": ["suffix", small]}
    given = drafts.get(draft, draft)
    if way == "library":
        engine: Any = SlipstreamEngine(SpeculativeDecoding(model, given, k=k, rule=rule))
        findings = audit_of(engine, ModelScorer(model))
    else:
        policy = Goodput() if k == "adaptive" else make_policy(k)
        setting = Setting(model, make_drafter(given, model), policy, model.tokenizer, rule, False)
        with served(Engine(setting, Limits(memory=1 << 31))) as running:
            engine = EndpointEngine(running.url, model.eos_token_ids)
            engine.probe()
            assert not engine.unsupported
            findings = audit_of(engine, ModelScorer(model))
    bad = [f for f in findings if f.result != "pass"]
    assert not bad
    assert {"counters", "logprobs", "isolation", "stop strings"} <= {f.name for f in findings}


# --- runs, reports ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    decoder = ReferenceDecoder(TARGET, DRAFT)

    def fresh() -> Audit:
        return prepare(decoder, TARGET, COARSE)

    whole, first, second = fresh(), fresh(), fresh()
    for _ in range(30):
        whole.step()
    for _ in range(12):
        first.step()
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"key": {"a": 1}, **first.state()}), encoding="utf-8")
    second.restore(load_state(path, {"a": 1}) or {})
    for _ in range(18):
        second.step()
    assert second.state() == whole.state()
    assert second.findings() == whole.findings()
    with pytest.raises(InputError, match="another audit"):
        load_state(path, {"a": 2})
    path.write_text("nothing", encoding="utf-8")
    with pytest.raises(InputError, match="not a state"):
        load_state(path, {"a": 1})
    assert load_state(tmp_path / "none", {}) is None


def test_verdicts() -> None:
    def findings(*results: Any) -> list[Finding]:
        return [Finding("name", "claim", result, "why") for result in results]

    good, bad = Control(None, True, 1, ""), Control("no-residual", False, 1, "")
    assert verdict(findings("pass", "skipped"), [good]) == "exact within power"
    assert verdict(findings("pass", "fault", "undecided"), [good]) == "fault found"
    assert verdict(findings("pass", "undecided"), [good]) == "not decided"
    assert verdict(findings("pass"), [good, bad]) == "not decided"
    assert verdict(findings("skipped"), [good]) == "not decided"
    assert verdict([], []) == "not decided"


def test_the_page_shows_what_was_found_and_escapes_it() -> None:
    found = Finding(
        "a<b",
        "claim",
        "fault",
        "why & where",
        10,
        1e-9,
        "total variation 0.1",
        ({"token": "5", "observed": 0.5, "expected": 0.25, "n": 10},),
    )
    report = Report(
        "engine <1>", "toy", "fault found", (found,), (Control("no-residual", True, 9, "x"),), COARSE, 1.0, 10
    )
    page = to_html(report)
    for part in ("fault found", "a&lt;b", "why &amp; where", "0.5000", "0.2500", "engine &lt;1&gt;", "caught"):
        assert part in page
    assert report.exit_code == 1
    assert json.loads(json.dumps(report.document()))["exit_code"] == 1


# --- the command ------------------------------------------------------------------------------------------------------


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code; the controls, which have tests of their own, are left out."""
    monkeypatch.setattr("slipstream.audit.run.run_controls", lambda settings, progress: [Control(None, True, 1, "")])
    with pytest.raises(SystemExit) as exit_:
        cli.main(["audit", *words], prog_name="slipstream")
    return int(exit_.value.code or 0)


def test_the_command_says_exact_and_saves_a_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, state = tmp_path / "audit.html", tmp_path / "state.json"
    words = ("toy", "--draft", "toy", "--tv", "0.4", "--json", "--html", str(page), "--resume", str(state))
    assert run_command(monkeypatch, *words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "exact within power"
    assert document["controls"][0]["as_it_must"]
    assert "exact within power" in page.read_text(encoding="utf-8")
    # All was collected, so going on asks for nothing further.
    assert run_command(monkeypatch, *words) == 0
    assert json.loads(capsys.readouterr().out)["answers"] == document["answers"]


def test_the_command_finds_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stuck.py").write_text("def complete(prompt, params, seed):\n    return [0]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "toy", "--callable", "stuck:complete") == 1
    told = capsys.readouterr().out
    assert "fault found" in told
    assert "look first at weights" in told


def test_a_callable_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenVINO GenAI's pipeline raised an error of its own on sampled requests only; that was a traceback."""
    (tmp_path / "frail.py").write_text(
        "def complete(prompt, params, seed):\n    return [0] * params['max_new_tokens'] if seed == 0 else 1 / 0\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "toy", "--callable", "frail:complete") == 1
    assert "the engine failed: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "TypeError"),
        ("return 5", "TypeError"),
        ("return '123'", "it returned a str, not a list of ids"),
        ("return [1.5] * params['max_new_tokens']", "TypeError"),
        ("return [None]", "TypeError"),
        ("return [[1, 2]]", "TypeError"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("return {1: 2}", "it returned a dict"),
        ("return []", "an end before the asked length"),
        ("return [10**30] * params['max_new_tokens']", "outside of the vocabulary"),
        ("return [-1] * params['max_new_tokens']", "outside of the vocabulary"),
        ("return [0] * 1000", "1000 tokens where at most"),
    ],
)
def test_a_callable_that_returns_something_else(
    body: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no list of ids was a traceback, 1.5 was taken for 1, and a call of exit() ended the audit."""
    name = f"odd{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def complete(prompt, params, seed):\n    {body}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ("toy", "--callable", f"{name}:complete", "--minutes", "0.05", "--json")
    assert run_command(monkeypatch, *words) == 1
    document = json.loads(capsys.readouterr().out)
    assert any(said in f["detail"] for f in document["findings"] if f["result"] == "fault")


@pytest.mark.parametrize("honours", ["'temperature'", "('temprature',)", "3", "{'top_p': 1}"])
def test_a_callable_with_strange_honours(
    honours: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name alone was taken for its letters, and a slip of the pen meant that nothing was tested."""
    name = f"says{abs(hash(honours))}"
    text = f"def complete(prompt, params, seed):\n    return [0]\n\n\ncomplete.honours = {honours}\n"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if honours == "'temperature'":
        assert CallableEngine(f"{name}:complete").honours == {"temperature"}
    else:
        with pytest.raises(InputError, match="is no parameter; use temperature"):
            CallableEngine(f"{name}:complete")


def test_a_killed_run_leaves_what_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state was written at the end only."""
    state = tmp_path / "state.json"
    (tmp_path / "killed.py").write_text(
        "import os, signal\nfrom pathlib import Path\n\n"
        "def complete(prompt, params, seed):\n"
        f"    if Path({str(state)!r}).exists():\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [int.from_bytes(os.urandom(1)) % 11 for _ in range(params['max_new_tokens'])]\n",
        encoding="utf-8",
    )
    code = (
        "import slipstream.audit.run as r, slipstream.cli.audit_run as a\n"
        "r.run_controls = lambda s, p: [r.Control(None, True, 1, '')]\n"
        "r.Audit.has_fault = lambda self: False\n"
        "a._SAVE_SECONDS = 0.0\n"
        "from slipstream.cli.main import main\nmain()\n"
    )
    words = ["audit", "toy", "--callable", "killed:complete", "--resume", str(state)]
    ended = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, check=False, timeout=600)
    assert ended.returncode == -signal.SIGKILL
    kept = json.loads(state.read_text(encoding="utf-8"))
    assert sum(check["samples"] for check in kept["checks"].values()) > 0
    state.write_text(json.dumps(kept | {"checks": {"prompt 1": {}}}), encoding="utf-8")
    (tmp_path / "killed.py").write_text("def complete(prompt, params, seed):\n    return [0]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, *words[1:]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_the_command_without_time_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(monkeypatch, "toy", "--minutes", "0.0001") == 3


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "give TARGET"),
        (("--url", "http://127.0.0.1:9"), "--reference-url"),
        (("toy", "--url", "http://127.0.0.1:9", "--callable", "a:b"), "two engines"),
        (("toy", "--engine", "transformers"), "no transformers model"),
        (("toy", "--minutes", "0"), "--minutes"),
        (("toy", "--tv", "2"), "--tv"),
        (("toy", "--alpha", "0"), "--alpha"),
        (("toy", "--tolerance", "-1"), "--tolerance"),
        (("toy", "-k", "-1"), "-k"),
        (("toy", "--skip", "topp"), "--skip"),
        (("toy", "--html", "/nowhere/at/all.html"), "--html"),
    ],
)
def test_input_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str
) -> None:
    assert run_command(monkeypatch, *words) == 2
    assert part in capsys.readouterr().err
