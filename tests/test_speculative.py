"""SpeculativeDecoding: what goes in, what comes out, text, streams, seeds, statistics."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import (
    INF,
    ForcedDrafter,
    RecurrentModel,
    RefusingModel,
    Spelling,
    TableModel,
    always_wrong,
    constant_law,
    greedy,
    oracle,
    random_law,
    scripted_law,
    wrong_at,
)
from slipstream import InputError, ModelError, Output, SamplingParams, SpeculativeDecoding, Stream, load_model
from slipstream.drafters import NoDrafter, SuffixDrafter, VocabularyDrafter

V = 12
LAW = random_law(V, seed=1)
PROMPT = [3, 1, 4]
ANSWER = greedy(LAW, PROMPT, 60)
SEQUENCE = [*PROMPT, *ANSWER]


def toy(**settings: Any) -> TableModel:
    return TableModel(LAW, V, **settings)


def spec_of(target: Any = None, draft: Any = "suffix", k: int = 4, **settings: Any) -> SpeculativeDecoding:
    return SpeculativeDecoding(toy() if target is None else target, draft, k, **settings)


def same(a: Output, b: Output) -> bool:
    """Equal in everything but how it was made."""
    return (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)


def scripted(script: Sequence[int], tokenizer: Any = None, vocab: int = V, **settings: Any) -> TableModel:
    return TableModel(scripted_law(script, vocab, prompt_length=1), vocab, tokenizer=tokenizer, **settings)


# --- a tiny real checkpoint -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path) -> Any:
    return load_model(tiny_checkpoint, weights="fp64")


@pytest.fixture(scope="module")
def draft(tiny_draft_checkpoint: Path) -> Any:
    return load_model(tiny_draft_checkpoint, weights="fp64")


@pytest.fixture(scope="module")
def bare(tiny_checkpoint: Path) -> Any:
    """transformers' own module, with nothing around it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float64).eval()


def test_the_ten_lines_of_the_documentation(target: Any, draft: Any) -> None:
    tokenizer = target.tokenizer
    spec = SpeculativeDecoding(
        draft_model=draft, target_model=target, k=4, temperature=0.7, top_p=0.9, rejection_sampling=True
    )
    given = tokenizer("the cat", return_tensors="pt")
    ids = spec.generate(**given, max_new_tokens=16)
    assert ids.dtype == torch.long
    assert ids[0, : given["input_ids"].shape[1]].tolist() == given["input_ids"][0].tolist()
    assert ids.shape[0] == 1
    assert ids.shape[1] <= given["input_ids"].shape[1] + 16
    pieces = list(spec.stream("Write a haiku", max_new_tokens=12, seed=1))
    assert all(isinstance(p.text, str) and len(p.tokens) == len(p.origins) for p in pieces)
    outputs = spec.complete(
        ["a prompt", [1, 2, 3]], SamplingParams(max_new_tokens=12, seed=7, stop=["\n\n"], logprobs=5)
    )
    assert [o.prompt_tokens for o in outputs] == [tuple(tokenizer("a prompt")["input_ids"]), (1, 2, 3)]
    for output in outputs:
        assert output.finish_reason in ("stop", "length")
        assert len(output.tokens) == len(output.origins) == len(output.logprobs or ()) == output.stats.emitted
        assert all(len(entry.top) == 5 for entry in output.logprobs or ())


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("drafting", ["model", "suffix", None])
def test_generate_is_what_transformers_generates(target: Any, draft: Any, bare: Any, drafting: Any, k: int) -> None:
    """Greedy, one prompt and a left-padded batch; rows that end early are padded on the right."""
    tokenizer = target.tokenizer
    tokenizer.padding_side = "left"
    spec = SpeculativeDecoding(target, draft if drafting == "model" else drafting, k)
    for prompt in ("the cat and the hat", ["the cat", "a much longer text in the air", "x"]):
        given = tokenizer(prompt, return_tensors="pt", padding=True)
        expected = bare.generate(**given, max_new_tokens=24, do_sample=False)
        assert torch.equal(spec.generate(**given, max_new_tokens=24), expected)


def test_generate_pads_rows_that_end_early() -> None:
    script = [1, 2, 9, 5, 5, 5, 5, 5]
    law = scripted_law(script, V, prompt_length=1)
    model = TableModel(lambda tokens: law(tokens) if tokens[0] == 0 else LAW(tokens), V, eos=(9,))
    ids = spec_of(model, oracle([0, *script])).generate(torch.tensor([[0], [3]]), max_new_tokens=6)
    row = greedy(LAW, [3], 6, eos=[9])
    assert ids.tolist()[0] == [0, 1, 2, 9, 9, 9, 9][: ids.shape[1]]
    assert ids.tolist()[1][: 1 + len(row)] == [3, *row]
    padded = spec_of(model, oracle([0, *script]), tokenizer=Padding()).generate(
        torch.tensor([[0], [3]]), max_new_tokens=6
    )
    assert padded.tolist()[0][4:] == [7] * (padded.shape[1] - 4)


class Padding(Spelling):
    pad_token_id = 7

    def __init__(self) -> None:
        super().__init__([*"abcdefghijkl"])


@pytest.mark.parametrize(
    "ids", [torch.tensor([PROMPT]), torch.tensor(PROMPT), [PROMPT], PROMPT, torch.tensor([PROMPT], dtype=torch.int32)]
)
def test_generate_takes_rows_or_one_row(ids: Any) -> None:
    assert spec_of().generate(ids, max_new_tokens=5).tolist() == [[*PROMPT, *ANSWER[:5]]]


def test_generate_takes_what_a_tokenizer_gives_without_tensors(target: Any) -> None:
    """Lists of ids were welcome, and a list of their mask was not."""
    spec = SpeculativeDecoding(target, "suffix")
    for prompt in ("the cat", ["the cat", "the cat"]):
        lists, tensors = target.tokenizer(prompt), target.tokenizer(prompt, return_tensors="pt")
        assert torch.equal(spec.generate(**lists, max_new_tokens=5), spec.generate(**tensors, max_new_tokens=5))


def test_generate_skips_padding_wherever_it_is() -> None:
    ids = torch.tensor([[0, 0, *PROMPT], [*PROMPT, 0, 0], [0, *PROMPT, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
    out = spec_of().generate(ids, mask, max_new_tokens=6)
    assert torch.equal(out[:, :5], ids)
    assert out[:, 5:].tolist() == [ANSWER[:6]] * 3
    assert torch.equal(spec_of().generate(ids, mask.bool(), max_new_tokens=6), out)


def test_generate_several_samples_of_each_prompt() -> None:
    out = spec_of().generate(torch.tensor([PROMPT, PROMPT[::-1]]), max_new_tokens=8, temperature=1.0, n=3, seed=1)
    assert out.shape == (6, 11)
    assert out[:, :3].tolist() == [PROMPT] * 3 + [PROMPT[::-1]] * 3
    assert len({tuple(row) for row in out[:3].tolist()}) == 3


@pytest.mark.parametrize("new", [0, 1])
def test_generate_almost_nothing(new: int) -> None:
    out = spec_of().generate(torch.tensor([PROMPT]), max_new_tokens=new)
    assert out.tolist() == [SEQUENCE[: 3 + new]]


@pytest.mark.parametrize(
    ("ids", "mask", "word"),
    [
        (torch.tensor([[1.0, 2.0]]), None, "input_ids"),
        (torch.tensor(3), None, "input_ids"),
        ([[1, 2], [3]], None, "input_ids"),
        ({"input_ids": [[1, 2]]}, None, "input_ids"),
        ("the cat", None, "input_ids"),
        (None, None, "input_ids"),
        ([[1, 2]], [[1], [1, 1]], "attention_mask"),
        (torch.zeros(1, 2, 3, dtype=torch.long), None, "input_ids"),
        (torch.tensor([[1, 2]]), torch.ones(1, 3), "attention_mask"),
        (torch.tensor([[1, 2]]), torch.ones(2, 2), "attention_mask"),
        (torch.tensor([[1, 2]]), torch.zeros(1, 2), "empty"),
        (torch.empty(1, 0, dtype=torch.long), None, "empty"),
        (torch.tensor([[1, V]]), None, f"token id {V}"),
        (torch.tensor([[1, -100]]), None, "token id -100"),
    ],
)
def test_generate_refuses_what_is_no_batch_of_prompts(ids: Tensor, mask: Tensor | None, word: str) -> None:
    with pytest.raises(InputError, match=word):
        spec_of().generate(ids, mask)


# --- models and drafts ------------------------------------------------------------------------------------------------


def test_models_may_be_paths(target: Any, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    expected = SpeculativeDecoding(load_model(tiny_checkpoint), None).complete("the cat", max_new_tokens=12)[0]
    for path in (tiny_checkpoint, str(tiny_checkpoint)):
        spec = SpeculativeDecoding(path, type(path)(tiny_draft_checkpoint), k=3)
        assert spec.tokenizer is not None
        assert same(spec.complete("the cat", max_new_tokens=12)[0], expected)


def test_models_may_be_bare_transformers_models(target: Any, bare: Any) -> None:
    """As target, as draft, or both; a tokenizer is needed only where text goes in or out."""
    plain = SpeculativeDecoding(target, None).complete("the cat and", max_new_tokens=20)[0]
    ids = list(plain.prompt_tokens)
    for spec in (
        SpeculativeDecoding(bare, None),
        SpeculativeDecoding(bare, bare),
        SpeculativeDecoding(target, bare),
        SpeculativeDecoding(bare, target),
        SpeculativeDecoding(bare, "suffix", 8),
    ):
        assert spec.complete(ids, max_new_tokens=20)[0].tokens == plain.tokens
    spec = SpeculativeDecoding(bare, bare, tokenizer=target.tokenizer)
    output = spec.complete("the cat and", max_new_tokens=20)[0]
    assert same(output, plain)
    assert output.stats.acceptance_rate == 1
    with pytest.raises(InputError, match="tokenizer"):
        SpeculativeDecoding(bare, None).complete("the cat")
    assert SpeculativeDecoding(bare, None).complete(ids, max_new_tokens=3)[0].text == ""


def test_a_tokenizer_of_ones_own_wins(target: Any) -> None:
    letters = Spelling([*"abcdefghijkl"])
    assert spec_of(toy(tokenizer=target.tokenizer), tokenizer=letters).complete("db", max_new_tokens=4)[0].text != ""
    assert spec_of(toy(tokenizer=target.tokenizer), tokenizer=letters).tokenizer is letters


def test_kinds_of_drafts() -> None:
    assert isinstance(spec_of(draft=None).drafter, NoDrafter)
    assert isinstance(spec_of(draft="suffix").drafter, SuffixDrafter)
    forced = ForcedDrafter(lambda tokens, k: ())
    assert spec_of(draft=forced).drafter is forced
    for made in (None, "suffix", forced, toy(), TableModel(random_law(V, 7), V)):
        assert spec_of(draft=made).complete(PROMPT, max_new_tokens=30)[0].tokens == tuple(ANSWER[:30])


@pytest.mark.parametrize("wrong", [5, object(), [1], True, torch.zeros(9, 9), torch.zeros(9).numpy(), TableModel])
def test_what_is_no_model_is_refused(wrong: Any) -> None:
    """The repr of an array or of a module filled the screen, and comparing an array with a name was an error."""
    with pytest.raises(InputError, match=r"target_model= is a .{,80}; use"):
        SpeculativeDecoding(wrong, None)
    with pytest.raises(InputError, match=r"draft_model= is a .{,80}; use"):
        SpeculativeDecoding(toy(), wrong)


@pytest.mark.parametrize("wrong", [5, "path/to/tokenizer", {}])
def test_what_is_no_tokenizer_is_refused(wrong: Any) -> None:
    """It was found when the first text went in or out."""
    with pytest.raises(InputError, match="tokenizer= is a"):
        spec_of(tokenizer=wrong)


def test_paths_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    for target, draft in ((tmp_path / "no", None), (toy(), tmp_path / "no"), (toy(), str(tmp_path / "no"))):
        with pytest.raises(InputError, match=str(tmp_path / "no")):
            SpeculativeDecoding(target, draft)


def test_a_draft_with_another_tokenizer(target: Any, other_tokenizer_checkpoint: Path) -> None:
    """V2. As many ids, in another order: accepted by a comparison of sizes, and every draft rejected from then on."""
    other = SpeculativeDecoding(target, other_tokenizer_checkpoint)
    assert isinstance(other.drafter, VocabularyDrafter)


@pytest.mark.parametrize("sizes", [(100, 128), (128, 100)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies(sizes: tuple[int, int], temperature: float) -> None:
    """V1. Embeddings of one tokenizer, padded to different sizes, were refused, or failed on an id of the padding."""
    draft_size, target_size = sizes
    law = random_law(target_size, seed=3, order=1, spread=3.0)
    model = TableModel(lambda tokens: law(tokens).index_fill(0, torch.tensor(target_size - 1), 7.5), target_size)
    draft = TableModel(random_law(draft_size, seed=4), draft_size)
    settings = {"max_new_tokens": 60, "temperature": temperature, "seed": 3}
    output = SpeculativeDecoding(model, draft, 3).complete([1, 2], **settings)[0]
    assert target_size - 1 in output.tokens
    assert output.stats.drafted > 0
    if temperature == 0:
        assert output.tokens == SpeculativeDecoding(model, None).complete([1, 2], **settings)[0].tokens


def test_a_target_that_cannot_roll_back_is_refused_by_name_before_any_pass() -> None:
    """C3, the clear refusal."""
    target = RefusingModel(LAW, V, name="Windy-1B")
    with pytest.raises(InputError, match="Windy-1B"):
        spec_of(target).complete(PROMPT)
    assert target.calls == []


def test_a_target_that_replays() -> None:
    """C3, the whole way."""
    plain = spec_of(RecurrentModel(V), None).complete(PROMPT, max_new_tokens=30)[0]
    for draft in ("suffix", always_wrong([*PROMPT, *plain.tokens], V), RecurrentModel(V), RecurrentModel(V, seed=3)):
        assert same(spec_of(RecurrentModel(V), draft).complete(PROMPT, max_new_tokens=30)[0], plain)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [-1, 1.5, True, "4", None, math.nan])
def test_k_must_be_a_count(k: Any) -> None:
    with pytest.raises(InputError, match="k="):
        SpeculativeDecoding(toy(), "suffix", k)


@pytest.mark.parametrize("k", [0, 1, 100])
def test_any_count_will_do(k: int) -> None:
    assert spec_of(k=k).complete(PROMPT, max_new_tokens=20)[0].tokens == tuple(ANSWER[:20])


def test_an_unknown_rule_is_refused_at_once() -> None:
    """Found only in the first round, after the models had been loaded and the prompt had been read."""
    with pytest.raises(InputError, match="rule"):
        SpeculativeDecoding(toy(), "suffix", rule="blocks")


@pytest.mark.parametrize("given", [{"do_sample": True}, {"temperatur": 1.0}, {"max_length": 5}, {"k": 3}])
def test_unknown_names_are_refused(given: dict[str, Any]) -> None:
    (name,) = given
    if name != "k":
        with pytest.raises(InputError, match=f"{name}.*max_new_tokens"):
            SpeculativeDecoding(toy(), None, **given)
    spec = spec_of()
    for call in (
        lambda: spec.complete(PROMPT, **given),
        lambda: spec.stream(PROMPT, **given),
        lambda: spec.generate([PROMPT], **given),
    ):
        with pytest.raises(InputError, match=f"{name}.*max_new_tokens"):
            call()


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": True},
        {"max_new_tokens": -1},
        {"stop_token_ids": [V]},
        {"logit_bias": {V: 1.0}},
        {"stop": None},
        {"n": 2},
        {"stop": ["needs a tokenizer"]},
    ],
)
def test_bad_values_are_refused_before_anything_is_computed(given: dict[str, Any]) -> None:
    (name,) = given
    target = toy()
    spec = spec_of(target)
    for call in (
        lambda: spec.complete(PROMPT, **given),
        lambda: spec.complete(PROMPT, SamplingParams(**given)),
        lambda: spec.stream(PROMPT, **given),
    ):
        with pytest.raises(InputError, match=name):
            call()
    if name != "stop":
        with pytest.raises(InputError, match=name):
            spec_of(**given)
    assert target.calls == []


def test_params_of_a_call_win_over_those_of_the_constructor() -> None:
    spec = spec_of(max_new_tokens=7, temperature=1.0, seed=3)
    assert len(spec.complete(PROMPT)[0].tokens) == 7
    assert len(spec.complete(PROMPT, max_new_tokens=5)[0].tokens) == 5
    assert len(spec.complete(PROMPT, SamplingParams(max_new_tokens=4))[0].tokens) == 4
    assert len(spec.complete(PROMPT, SamplingParams(max_new_tokens=4), max_new_tokens=3)[0].tokens) == 3
    assert spec.generate([PROMPT], max_new_tokens=2).shape == (1, 5)


def test_fields_that_are_not_given_fall_back_to_the_constructor() -> None:
    """SamplingParams(seed=7) reset the temperature and the length that the constructor had been given."""
    spec = spec_of(temperature=1.5, seed=3, max_new_tokens=20)
    greedy_answer = tuple(ANSWER[:20])
    assert spec.complete(PROMPT)[0].tokens != greedy_answer
    for output in spec.complete(PROMPT, SamplingParams(top_k=5)), spec.complete(PROMPT, SamplingParams(seed=3)):
        assert len(output[0].tokens) == 20
        assert output[0].tokens != greedy_answer
    assert spec.complete(PROMPT, SamplingParams(seed=3))[0].tokens == spec.complete(PROMPT)[0].tokens
    assert spec.complete(PROMPT, SamplingParams(temperature=0.0))[0].tokens == greedy_answer
    assert spec.complete(PROMPT, temperature=0.0)[0].tokens == greedy_answer


def test_greedy_is_the_default() -> None:
    assert spec_of().complete(PROMPT, max_new_tokens=20)[0].tokens == tuple(ANSWER[:20])
    assert spec_of(rejection_sampling=True).complete(PROMPT, max_new_tokens=20)[0].tokens == tuple(ANSWER[:20])
    assert len(spec_of().complete(PROMPT)[0].tokens) == SamplingParams().max_new_tokens


def test_no_rejection_sampling_and_a_temperature_contradict_each_other() -> None:
    for make in (
        lambda: spec_of(rejection_sampling=False, temperature=0.7),
        lambda: spec_of(rejection_sampling=False).complete(PROMPT, temperature=0.7),
        lambda: spec_of(rejection_sampling=False).stream(PROMPT, SamplingParams(temperature=0.7)),
    ):
        with pytest.raises(InputError, match=r"rejection_sampling=False.*temperature=0\.7"):
            make()
    output = spec_of(rejection_sampling=False).complete(PROMPT, max_new_tokens=20)[0]
    assert output.tokens == tuple(ANSWER[:20])


@pytest.mark.parametrize("wrong", [0, 1, "yes"])
def test_rejection_sampling_is_yes_or_no(wrong: Any) -> None:
    """0 is not False: it passed, and was ignored."""
    with pytest.raises(InputError, match="rejection_sampling="):
        spec_of(rejection_sampling=wrong)


@pytest.mark.parametrize("wrong", [{"seed": 1}, "seed", 7])
def test_what_is_no_params_is_refused(wrong: Any) -> None:
    for call in (spec_of().complete, spec_of().stream):
        with pytest.raises(InputError, match="params= is a"):
            call(PROMPT, wrong)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_in_every_form(target: Any) -> None:
    spec = SpeculativeDecoding(target, "suffix", max_new_tokens=6)
    chat = [{"role": "user", "content": "the cat"}]
    ids = target.tokenizer("the cat")["input_ids"]
    rendered = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    text, tokens, tensor, messages = spec.complete(["the cat", ids, torch.tensor(ids), chat])
    assert same(text, tokens)
    assert same(text, tensor)
    assert list(messages.prompt_tokens) == rendered
    for single, expected in (("the cat", text), (ids, text), (chat, messages)):
        (alone,) = spec.complete(single)
        assert same(alone, expected)
        assert same(spec.stream(single).finish(), expected)
    assert same(spec.complete(torch.tensor(ids))[0], text)
    assert same(spec.stream(torch.tensor([ids])).finish(), text)
    for numbers in (list(torch.tensor(ids)), list(torch.tensor(ids).numpy())):
        (alone,) = spec.complete(numbers)
        assert same(alone, text)
    assert len(spec.complete([torch.tensor([5]), torch.tensor([6])])) == 2
    assert spec.complete([]) == []


def test_a_chat_template_applies_once(target: Any) -> None:
    """Text that a template had rendered got a second BOS from the tokenizer."""
    chat = [{"role": "user", "content": "the cat"}]
    rendered = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    spec = SpeculativeDecoding(target, "suffix", max_new_tokens=6)
    a, b = spec.complete([chat, rendered])
    assert a.prompt_tokens == b.prompt_tokens
    assert a.prompt_tokens.count(target.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("prompt", [b"the cat", {"input_ids": [1, 2]}, {"role": "user", "content": "the cat"}, 5, None])
def test_what_is_no_prompt_is_refused(target: Any, prompt: Any) -> None:
    """Of what a tokenizer returns, the names of its fields were taken for prompts and answered."""
    spec = SpeculativeDecoding(target, "suffix", max_new_tokens=2)
    for call in (spec.complete, spec.stream, lambda given: spec.complete(["the cat", given])):
        with pytest.raises(InputError, match="neither"):
            call(prompt)
    with pytest.raises(InputError, match="neither"):
        spec.complete(target.tokenizer(["the cat"]))
    with pytest.raises(InputError, match=r"unpack it: generate\(\*\*tokenizer"):
        spec.generate(target.tokenizer("the cat", return_tensors="pt"))


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    model = toy(tokenizer=Spelling([*"abcdefghijkl"]))
    with pytest.raises(InputError, match="empty"):
        spec_of(model).stream(prompt)
    with pytest.raises(InputError, match="empty"):
        spec_of(model).complete([PROMPT, prompt])
    assert model.calls == []


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(InputError, match=r"61 tokens.*at most 60"):
        spec_of(toy(limit=60)).complete(SEQUENCE[:61])


# --- limits and ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 5])
def test_at_the_context_limit(k: int) -> None:
    """X1. Same length and reason as plain decoding, from k + 1 before the limit to the limit itself."""
    limit = 30
    for length in range(limit - k - 1, limit + 1):
        for draft in (oracle(SEQUENCE), always_wrong(SEQUENCE, V), toy(limit=limit), toy(limit=limit - 2)):
            target = toy(limit=limit)
            output = spec_of(target, draft, k).complete(SEQUENCE[:length])[0]
            assert output.tokens == tuple(SEQUENCE[length:limit])
            assert output.finish_reason == "length"
            assert max((call.start + call.count for call in target.calls), default=0) < limit


@pytest.mark.parametrize("k", range(1, 9))
def test_every_length(k: int) -> None:
    """S5. Delivered = counted = streamed = plain."""
    for new in range(2 * k + 3):
        for draft in (oracle(SEQUENCE), always_wrong(SEQUENCE, V)):
            spec = spec_of(draft=draft, k=k)
            output = spec.complete(PROMPT, max_new_tokens=new)[0]
            assert output.tokens == tuple(ANSWER[:new])
            assert (output.stats.emitted, output.finish_reason) == (new, "length")
            pieces = list(spec.stream(PROMPT, max_new_tokens=new))
            assert tuple(t for p in pieces for t in p.tokens) == output.tokens
            assert tuple(o for p in pieces for o in p.origins) == output.origins


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("at", range(11))
def test_eos_at_every_slot(at: int, k: int) -> None:
    """S1. Ends exactly there, in the output and in the stream."""
    script = [*[1, 2] * 10][:at] + [9] + [4] * 20
    model = scripted(script, Spelling([*"abcdefghijkl"], special=[9]), eos=(9,))
    for draft in (oracle([0, *script]), always_wrong([0, *script], V), None):
        stream = spec_of(model, draft, k).stream([0], max_new_tokens=25)
        pieces = list(stream)
        assert [t for p in pieces for t in p.tokens] == script[: at + 1]
        assert "".join(p.text for p in pieces) == stream.output.text == ("bc" * 10)[:at]
        assert stream.output.finish_reason == "stop"
        assert stream.output.tokens[-1] == 9
        assert next(stream, None) is None


@pytest.mark.parametrize(
    ("eos", "stop_ids", "ignore", "length"),
    [
        ((), (), False, 12),
        ((5,), (), False, 3),
        ([5], (), False, 3),
        ((7, 5), (), False, 3),
        ((7,), (), False, 6),
        ((7,), (5,), False, 3),
        ((5, 7), (), True, 12),
        ((5,), (7,), True, 6),
        ((), (7,), False, 6),
    ],
)
def test_kinds_of_ends(eos: Any, stop_ids: Any, ignore: bool, length: int) -> None:
    """S6. None, one id, a list of ids; and ignore_eos, which leaves stop_token_ids in force."""
    script = [1, 2, 5, 3, 4, 7, 1, 2, 3, 4, 1, 2]
    for draft in (None, oracle([0, *script]), always_wrong([0, *script], V)):
        output = spec_of(scripted(script, eos=eos), draft).complete(
            [0], max_new_tokens=12, stop_token_ids=stop_ids, ignore_eos=ignore
        )[0]
        assert output.tokens == tuple(script[:length])
        assert output.finish_reason == ("length" if length == 12 else "stop")


def test_an_end_in_the_prompt_ends_nothing() -> None:
    model = TableModel(LAW, V, eos=(PROMPT[-1],))
    assert len(spec_of(model).complete(PROMPT, max_new_tokens=5)[0].tokens) >= 1


def test_the_draft_wants_to_end_and_the_target_does_not() -> None:
    """S2."""
    model = TableModel(constant_law([0.3, 0.6, *[0.1 / 7] * 7, 0.0, 0.0, 0.0]), V, eos=(9,))
    output = spec_of(model, ForcedDrafter(lambda tokens, k: [9] * k)).complete([0], max_new_tokens=20)[0]
    assert (output.tokens, output.finish_reason) == ((1,) * 20, "length")


@pytest.mark.parametrize(("stop_at", "tokens", "reason"), [(3, 3, "stop"), (5, 5, "stop"), (6, 5, "length")])
def test_a_cap_and_a_stop_inside_one_block(stop_at: int, tokens: int, reason: str) -> None:
    """S4. Of a block of 6 accepted tokens, a cap of 5 and a stop: the first that matches wins."""
    script = [1] * (stop_at - 1) + [9] + [2] * 10
    for draft in (oracle([0, *script]), None):
        output = spec_of(scripted(script, eos=(9,)), draft, k=6).complete([0], max_new_tokens=5)[0]
        assert (len(output.tokens), output.finish_reason) == (tokens, reason)
        assert output.stats.emitted == tokens


PIECES = Spelling([*"abcdefg", "\n", "ab", "c\n\nd", "<eos>", "zz"], special=[10])


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (["d"], "abc", 4),
        (["cd"], "ab", 4),  # inside one block or across two, as k has it
        (["fabc"], "abcde", 9),
        (["\n\n"], "abcdefabc", 9),  # inside one token's text
        (["c\n\nd"], "abcdefab", 9),
        (["d\n"], "abcdefabc\n\n", 10),  # begins inside one token
        (["x", "g", "efab"], "abcd", 8),
        (["nothing"], "abcdefabc\n\nd\ng", 12),
        (["a"], "", 1),
    ],
)
def test_stop_strings_wherever_blocks_end(stop: list[str], text: str, count: int, k: int) -> None:
    """S3. A stop string that two rounds share was missed, or a part of it was already streamed."""
    script = [0, 1, 2, 3, 4, 5, 0, 1, 9, 7, 6, 10]  # a b c d e f a b "c\n\nd" "\n" g <eos>
    sequence = [11, *script]
    plain = None
    for draft in (None, oracle(sequence), always_wrong(sequence, V), wrong_at(sequence, V, range(k + 1)), "suffix"):
        stream = spec_of(scripted(script, PIECES, eos=(10,)), draft, k).stream([11], max_new_tokens=40, stop=stop)
        pieces = [p.text for p in stream]
        output = stream.output
        plain = plain or output
        assert same(output, plain)
        assert "".join(pieces) == output.text
        assert output.finish_reason == "stop"
        assert not any(s in output.text for s in stop)
    assert plain is not None
    assert (plain.text, len(plain.tokens)) == (text, count)


# --- text in a stream -------------------------------------------------------------------------------------------------

TEXT = "e\N{COMBINING ACUTE ACCENT}\N{GRINNING FACE} 日本 é\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}!"
BYTES = Spelling([*(bytes([i]) for i in range(256)), "<eos>"], special=[256])


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_a_stream_holds_whole_characters_wherever_blocks_end(k: int) -> None:
    """J3. One byte a token: over all k and offsets, blocks end at every byte of every character."""
    script = [*TEXT.encode(), 256]
    sequence = [65, *script]
    for slots in ([k], [0], *([s, k] for s in range(k))):
        model = scripted(script, BYTES, vocab=257, eos=(256,))
        stream = spec_of(model, wrong_at(sequence, 257, slots), k).stream([65], max_new_tokens=100)
        pieces = [p.text for p in stream]
        assert "".join(pieces) == stream.output.text == TEXT
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("cap", range(1, len(TEXT.encode())))
def test_a_stream_cut_at_every_byte(cap: int) -> None:
    """J3. What an answer holds when its length is up is flushed, in the stream and in the output."""
    script = [*TEXT.encode(), 256]
    model = scripted(script, BYTES, vocab=257, eos=(256,))
    stream = spec_of(model, oracle([65, *script]), 3).stream([65], max_new_tokens=cap)
    pieces = [p.text for p in stream]
    expected = TEXT.encode()[:cap].decode(errors="replace")
    assert "".join(pieces) == stream.output.text == expected
    cancelled = spec_of(model, oracle([65, *script]), 3).stream([65], max_new_tokens=100)
    said = ""
    while len(cancelled.output.tokens) < cap:
        said += next(cancelled).text
    cancelled.close()
    tokens = len(cancelled.output.tokens)
    assert cancelled.output.text == TEXT.encode()[:tokens].decode(errors="replace")
    assert cancelled.output.text.startswith(said)


def test_text_is_decoded_as_the_tokenizer_does(target: Any, draft: Any) -> None:
    spec = SpeculativeDecoding(target, draft, max_new_tokens=60, temperature=1.0)
    for seed in range(6):
        stream = spec.stream("the cat", seed=seed)
        text = "".join(p.text for p in stream)
        output = stream.output
        kept = output.tokens[:-1] if output.finish_reason == "stop" else output.tokens
        assert text == output.text == target.tokenizer.decode(kept, skip_special_tokens=True)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_whole_answer_in_pieces() -> None:
    stream = spec_of(draft=toy()).stream(PROMPT, max_new_tokens=23)
    assert isinstance(stream, Iterator)
    pieces = list(stream)
    assert tuple(t for p in pieces for t in p.tokens) == stream.output.tokens == tuple(ANSWER[:23])
    assert [len(p.tokens) for p in pieces] == [1, 5, 5, 5, 5, 2]
    assert pieces[0].origins == ("bonus",)
    assert pieces[1].origins == ("accepted",) * 4 + ("bonus",)
    assert stream.stats == stream.output.stats


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_stream_that_is_closed_leaves_everything_reusable(target: Any, draft: Any, after: int) -> None:
    """C4. Closed, dropped, or stopped by Ctrl-C: the next request runs as from a fresh start."""
    spec = SpeculativeDecoding(target, draft, k=3, max_new_tokens=20)
    expected = SpeculativeDecoding(target, None).complete("the cat", max_new_tokens=20)[0]
    closed, dropped = spec.stream("the hat"), spec.stream("the hat")
    for _ in range(after):
        next(closed), next(dropped)
    closed.close()
    assert closed.output.finish_reason is None
    assert next(closed, None) is None
    assert len(closed.output.tokens) == closed.output.stats.emitted
    closed.close()
    del dropped
    assert same(spec.complete("the cat")[0], expected)


def test_closing_a_finished_stream_changes_nothing() -> None:
    stream = spec_of(toy(tokenizer=Spelling([*"abcdefghijkl"]))).stream(PROMPT, max_new_tokens=9)
    before = stream.finish()
    stream.close()
    assert same(stream.output, before)
    assert stream.output.finish_reason == "length"


def test_ctrl_c_inside_a_pass(target: Any, draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SpeculativeDecoding(target, draft, k=3, max_new_tokens=20)
    expected = SpeculativeDecoding(target, None).complete("the cat", max_new_tokens=20)[0]
    for model in (target, draft):
        stream = spec.stream("the cat")
        next(stream), next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(model, "_head", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        stream.close()
        said = stream.output
        assert said.tokens == expected.tokens[: len(said.tokens)]
        assert expected.text.startswith(said.text)
        assert same(spec.complete("the cat")[0], expected)


def _interrupt(*_: Any) -> Tensor:
    raise KeyboardInterrupt


def test_streams_side_by_side_do_not_disturb_each_other(target: Any, draft: Any) -> None:
    spec = SpeculativeDecoding(target, draft, k=3, max_new_tokens=20, temperature=1.0)
    prompts = ["the cat", "the hat", "a"]
    alone = [spec.complete(p, seed=i)[0] for i, p in enumerate(prompts)]
    streams: list[Stream] = [spec.stream(p, seed=i) for i, p in enumerate(prompts)]
    running = list(streams)
    while running:
        running = [s for s in running if next(s, None) is not None]
    for stream, expected in zip(streams, alone, strict=True):
        assert same(stream.output, expected)


def test_many_samples_cannot_be_streamed() -> None:
    with pytest.raises(InputError, match=r"n=2.*complete"):
        spec_of(temperature=1.0).stream(PROMPT, n=2)


# --- seeds, samples, batches ------------------------------------------------------------------------------------------


def test_seeds() -> None:
    """R1. The same seed gives the same tokens, whatever was called before; other seeds give others."""
    spec = spec_of(draft=TableModel(random_law(V, 7), V), temperature=1.0, max_new_tokens=20)
    first = {seed: spec.complete(PROMPT, seed=seed)[0].tokens for seed in range(10)}
    assert len(set(first.values())) >= 9
    torch.manual_seed(99)
    spec.complete([5, 5])
    for seed in reversed(range(10)):
        assert spec.complete(PROMPT, seed=seed)[0].tokens == first[seed]
        assert spec.stream(PROMPT, seed=seed).finish().tokens == first[seed]
    assert spec.complete([[5, 5], PROMPT], seed=4)[1].tokens == first[4]


def test_without_a_seed_the_global_generator_decides() -> None:
    """With a number for k; an adaptive one follows the clock unless the request itself has a seed."""
    spec = spec_of(temperature=1.0, max_new_tokens=20, k=4)
    torch.manual_seed(5)
    first = [spec.complete(PROMPT)[0].tokens for _ in range(3)]
    torch.manual_seed(5)
    assert [spec.complete(PROMPT)[0].tokens for _ in range(3)] == first
    assert len(set(first)) == 3


def test_what_needs_no_randomness_takes_none() -> None:
    """Greedy or seeded answers moved torch's global generator on, and with it whatever else the user draws."""
    before = torch.random.get_rng_state()
    spec_of().complete(PROMPT, max_new_tokens=5)
    spec_of(temperature=1.0, seed=3).complete(PROMPT, max_new_tokens=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_samples_of_one_prompt() -> None:
    """R4. All samples of a seeded request were the same one."""
    spec = spec_of(draft=TableModel(random_law(V, 7), V), temperature=1.0, max_new_tokens=20)
    for seed in (None, 0, 7):
        outputs = spec.complete([PROMPT, PROMPT[::-1]], n=4, seed=seed)
        assert [o.index for o in outputs] == [0, 1, 2, 3] * 2
        assert [o.prompt_tokens for o in outputs] == [tuple(PROMPT)] * 4 + [tuple(PROMPT[::-1])] * 4
        assert len({o.tokens for o in outputs[:4]}) == 4
        assert all(len(o.tokens) == 20 and max(o.tokens) < V for o in outputs)
    assert spec.complete(PROMPT, n=4, seed=7)[0].tokens == spec.complete(PROMPT, seed=7)[0].tokens
    assert [o.tokens for o in spec.complete(PROMPT, n=2, seed=7)] == [
        o.tokens for o in spec.complete(PROMPT, n=4, seed=7)[:2]
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_list_of_prompts_over_disjoint_alphabets(temperature: float) -> None:
    """R3. Rows of a batch took each other's tokens, ends or caches."""
    size, count = 5, 8
    vocab = size * count
    inner = random_law(vocab, seed=2, order=1)

    def within(law: Any) -> Any:
        """Only symbols of the last token's alphabet; the last of each alphabet ends."""

        def one(tokens: Sequence[int]) -> Tensor:
            alphabet = tokens[-1] // size
            row = torch.full((vocab,), -INF, dtype=torch.float64)
            row[alphabet * size : (alphabet + 1) * size] = law(tokens)[alphabet * size : (alphabet + 1) * size]
            return row

        return one

    ends = [alphabet * size + size - 1 for alphabet in range(0, count, 2)]
    law, other = within(inner), within(random_law(vocab, seed=3, order=1))

    def uneven(tokens: Sequence[int], k: int) -> list[int]:
        extended = list(tokens)
        for _ in range((7 * len(tokens) + tokens[0]) % (k + 1)):
            extended.append(int(other(extended).argmax()))
        return extended[len(tokens) :]

    def spec(draft: Any) -> SpeculativeDecoding:
        model = TableModel(law, vocab, eos=tuple(ends))
        return SpeculativeDecoding(model, draft, 5, temperature=temperature, max_new_tokens=24, seed=6)

    prompts = [[alphabet * size, alphabet * size + 1] for alphabet in range(count)]
    for draft in (ForcedDrafter(uneven), TableModel(other, vocab)):
        outputs = spec(draft).complete(prompts)
        assert len({len(o.tokens) for o in outputs}) > 1
        for alphabet, output in enumerate(outputs):
            assert {t // size for t in output.tokens} == {alphabet}
            (alone,) = spec(draft).complete(prompts[alphabet])
            assert same(alone, output)
            assert alone.origins == output.origins
            assert (alone.stats.drafted, alone.stats.accepted) == (output.stats.drafted, output.stats.accepted)


def test_the_first_of_two_identical_requests_does_not_disturb_the_second() -> None:
    """D5. The first one's rejections damaged what the second one was verified against."""
    sessions = iter([always_wrong(SEQUENCE, V), oracle(SEQUENCE)])

    class InTurn(NoDrafter):
        def start(self, sampler: Any) -> Any:
            return next(sessions)

    first, second = spec_of(draft=InTurn()).complete([PROMPT, PROMPT], max_new_tokens=12)
    assert first.tokens == second.tokens == tuple(ANSWER[:12])
    assert first.stats.accepted < second.stats.accepted == second.stats.drafted


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.5}])
@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_are_those_of_teacher_forcing(
    tiny_checkpoint: Path, tiny_draft_checkpoint: Path, k: int, settings: dict[str, Any]
) -> None:
    """R2. A corrected token had the log-probability of the rejected one, or of the slot after it."""
    target, draft = load_model(tiny_checkpoint, weights="fp32"), load_model(tiny_draft_checkpoint)
    defaults = {"ignore_eos": True, "max_new_tokens": 40, "logprobs": 5, **settings}
    plain = SpeculativeDecoding(target, None, **defaults).complete("the cat and the hat")[0]
    # Random greedy models hardly ever agree: there, every slot in turn is wrong.
    forced = wrong_at([*plain.prompt_tokens, *plain.tokens], 300, range(4))
    output = SpeculativeDecoding(target, draft if settings else forced, k, **defaults).complete("the cat and the hat")[
        0
    ]
    assert set(output.origins) == ({"bonus"} if k == 0 else {"accepted", "corrected", "bonus"})
    tokens = [*output.prompt_tokens, *output.tokens]
    logits = target.forward(tokens, target.new_cache(), len(tokens))
    scores = torch.log_softmax(logits[len(output.prompt_tokens) - 1 : -1].double(), dim=-1)
    assert output.logprobs is not None
    for entry, token, row in zip(output.logprobs, output.tokens, scores, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        best = row.topk(5)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_are_of_the_unprocessed_target() -> None:
    output = spec_of(draft=oracle(SEQUENCE)).complete(PROMPT, max_new_tokens=10, logprobs=1, logit_bias={0: -INF})[0]
    tokens = list(PROMPT)
    for entry in output.logprobs or ():
        scores = torch.log_softmax(LAW(tokens), -1)
        assert entry.logprob == pytest.approx(float(scores[entry.token]), abs=1e-12)
        assert entry.top == ((int(scores.argmax()), pytest.approx(float(scores.max()), abs=1e-12)),)
        tokens.append(entry.token)


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (3, 3), (V + 5, V)])
def test_how_many_alternatives(count: int, kept: int) -> None:
    output = spec_of().complete(PROMPT, max_new_tokens=9, logprobs=count)[0]
    assert [len(entry.top) for entry in output.logprobs or ()] == [kept] * 9
    assert spec_of().complete(PROMPT, max_new_tokens=9)[0].logprobs is None


def test_logprobs_end_with_the_answer() -> None:
    script = [1, 2, 9, 4, 4, 4]
    output = spec_of(scripted(script, eos=(9,)), oracle([0, *script])).complete([0], logprobs=1)[0]
    assert [entry.token for entry in output.logprobs or ()] == [1, 2, 9]


# --- statistics, limits of the draft, bad numbers ---------------------------------------------------------------------


def test_statistics_of_a_scripted_run() -> None:
    """T1, as a user sees it: reading the prompt yields the first token, then 4, 2, 0 accepted, then an end."""
    script = [5, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 9, *[4] * 9]
    forced = wrong_at([0, 0, *script], V, [4, 2, 0, 4])
    law = scripted_law(script, V, prompt_length=2)
    output = spec_of(TableModel(law, V, eos=(9,)), forced, 4).complete([0, 0], max_new_tokens=40)[0]
    assert output.tokens == tuple(script[:12])
    stats = output.stats
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (5, 16, 8, 12)
    assert stats.accepted_per_position == (3, 3, 1, 1)
    assert stats.drafted_per_position == (4, 4, 4, 4)
    assert stats.acceptance_rate == 0.5
    assert stats.mean_accepted_length == 12 / 5
    assert output.origins == (
        "bonus",
        *["accepted"] * 4,
        "bonus",
        *["accepted"] * 2,
        "corrected",
        "corrected",
        *["accepted"] * 2,
    )


def test_times_of_an_answer() -> None:
    stats = spec_of(draft=toy()).complete(PROMPT, max_new_tokens=20)[0].stats
    assert 0 < stats.first_token_seconds < stats.total_seconds
    assert stats.tokens_per_second == pytest.approx(20 / stats.total_seconds)
    assert stats.seconds_per_token == pytest.approx((stats.total_seconds - stats.first_token_seconds) / 19)


@pytest.mark.parametrize("limit", [1, 3, 4, 10, 33])
def test_the_draft_is_never_consulted_past_its_own_limit(limit: int) -> None:
    """X2. The model asserts it."""
    output = spec_of(draft=toy(limit=limit)).complete(PROMPT, max_new_tokens=40)[0]
    assert output.tokens == tuple(ANSWER[:40])
    assert (output.stats.drafted > 0) == (limit > len(PROMPT))


@pytest.mark.parametrize("value", [math.nan, INF])
def test_a_draft_that_breaks_down_is_left_out_with_one_warning(value: float) -> None:
    draft = TableModel(lambda tokens: LAW(tokens) + (value if len(tokens) > 9 else 0), V, name="shaky")
    with pytest.warns(UserWarning, match="shaky") as caught:
        output = spec_of(draft=draft).complete(PROMPT, max_new_tokens=40)[0]
    assert len(caught) == 1
    assert output.tokens == tuple(ANSWER[:40])


@pytest.mark.parametrize("draft", [None, "suffix", oracle(SEQUENCE)])
def test_a_target_that_breaks_down_is_an_error_that_names_the_position(draft: Any) -> None:
    target = TableModel(lambda tokens: LAW(tokens) * (math.nan if len(tokens) == 14 else 1), V)
    spec = spec_of(target, draft)
    stream = spec.stream(PROMPT)
    with pytest.raises(ModelError, match="position 14 "):
        stream.finish()
    # What came before it can be read.
    assert stream.output.tokens == tuple(ANSWER[: len(stream.output.tokens)])
    assert stream.output.finish_reason is None


def test_many_requests_leave_nothing_behind(target: Any, draft: Any) -> None:
    """M1. 200 requests, in turn accepted and rejected as a whole; tensors and caches return to the start."""
    plain = SpeculativeDecoding(target, None).complete([1, 2, 3], max_new_tokens=5, ignore_eos=True)[0]
    sequence = [1, 2, 3, *plain.tokens]
    specs = [
        SpeculativeDecoding(target, draft_model, 3, max_new_tokens=5, ignore_eos=True)
        for draft_model in (oracle(sequence), always_wrong(sequence, 300), target, draft)
    ]

    def some(count: int) -> None:
        for i in range(count):
            assert specs[i % 4].complete([1, 2, 3])[0].tokens == plain.tokens

    def alive() -> tuple[int, int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        return len(tensors), sum(t.untyped_storage().nbytes() for t in tensors)

    some(8)
    before = alive()
    some(200)
    assert alive() == before
