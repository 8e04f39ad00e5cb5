"""The server over HTTP: a real one, asked by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel, ValidationError

from conftest import save_checkpoint
from fakes import TableModel, random_law
from serving import AGAIN, BROKEN, NAME, Served, parrot_engine, parrot_tokenizer, served, wait_for
from slipstream import SamplingParams, SpeculativeDecoding
from slipstream.drafters import ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.seats import Limits
from slipstream.serve.api.schema import ChatRequest, CompletionRequest

TEXT = "  the cat, the cat and\n\tthe café in the \N{GRINNING FACE}日本語 e\N{COMBINING DIAERESIS} hat "
#: A text that repeats itself, so that copies are accepted.
LONG = "and the cat in the hat and the cat in the hat and the dog " * 3


@pytest.fixture(scope="module")
def parrot() -> Iterator[Served]:
    """A server of the model that says what it is told."""
    with served(parrot_engine()) as server:
        yield server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served"), parrot_tokenizer(), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def library(checkpoint: Path) -> SpeculativeDecoding:
    return SpeculativeDecoding(checkpoint, "suffix")


@pytest.fixture(scope="module")
def random_model(library: SpeculativeDecoding) -> Iterator[Served]:
    """A server of a real, random model."""
    with served(library.engine(Limits(memory=1 << 26))) as server:
        yield server


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def post(server: Served, path: str, body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def events(response: httpx.Response) -> list[Any]:
    """The documents of a stream, which has to end well."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def streamed(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The document that a stream's chunks add up to, without what names each request."""
    chunks = events(post(server, path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for chunk in chunks:
        if chunk.get("speculation"):
            whole["speculation"] = chunk["speculation"]
        if chunk["usage"] is not None:
            assert chunk is chunks[-1]
            whole["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            known = choices.setdefault(choice["index"], {"index": choice["index"], "finish_reason": None})
            assert known["finish_reason"] is None, "something after the end"
            _add(known, choice)
    whole["choices"] = [choices[i] for i in sorted(choices)]
    return whole


def _add(known: dict[str, Any], choice: dict[str, Any]) -> None:
    known["finish_reason"] = choice["finish_reason"]
    for name, logprobs in (choice["logprobs"] or {}).items():
        if logprobs is not None:
            known.setdefault("logprobs", {}).setdefault(name, []).extend(logprobs)
    if "text" in choice:
        known["text"] = known.get("text", "") + choice["text"]
        return
    message = known.setdefault("message", {"content": "", "calls": []})
    delta = choice["delta"]
    message["content"] += delta.get("content") or ""
    for call in delta.get("tool_calls", []):
        if "id" in call:
            assert call["index"] == len(message["calls"])
            message["calls"].append([call["function"]["name"], ""])
        message["calls"][call["index"]][1] += call["function"]["arguments"]


def whole(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The document of a request that is not streamed, in the same form."""
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    document = response.json()
    made: dict[str, Any] = {"usage": document["usage"]}
    if "speculation" in document:
        made["speculation"] = document["speculation"]
    made["choices"] = []
    for choice in document["choices"]:
        known = {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        if choice["logprobs"] is not None:
            known["logprobs"] = {k: v for k, v in choice["logprobs"].items() if v is not None}
        if "text" in choice:
            known["text"] = choice["text"]
        else:
            calls = choice["message"].get("tool_calls", [])
            known["message"] = {
                "content": choice["message"]["content"] or "",
                "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in calls],
            }
        made["choices"].append(known)
    return made


def both(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The document of a request, streamed and not: the same."""
    one, other = whole(server, path, body), streamed(server, path, body)
    for made in (one, other):
        if body.get("speculation", {}).get("k") is None:  # which is then chosen by the clock
            made["usage"].pop("completion_tokens_details")
        if "speculation" in made:
            made["speculation"].pop("speed_up")
    assert one == other
    return one


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3, None])
def test_chat_says_all_of_it(parrot: Served, k: int | None) -> None:
    """J3. Spaces, emoji, combining accents, across blocks of every length; no broken character in any chunk."""
    body: dict[str, Any] = {"messages": user(TEXT), "speculation": {"k": k}}
    made = both(parrot, "/v1/chat/completions", body)
    assert made["choices"] == [{"index": 0, "finish_reason": "stop", "message": {"content": TEXT, "calls": []}}]
    for chunk in events(post(parrot, "/v1/chat/completions", {**body, "stream": True})):
        assert "\N{REPLACEMENT CHARACTER}" not in json.dumps(chunk, ensure_ascii=False)
    tokens = len(parrot_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]) + 1
    assert made["usage"]["completion_tokens"] == tokens
    assert made["usage"]["total_tokens"] == tokens + made["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "stop", ["cat and", "\N{GRINNING FACE}", "日", " hat", ["dog", "the caf"], "\N{COMBINING DIAERESIS} "]
)
@pytest.mark.parametrize("k", [0, 2, 7])
def test_nothing_comes_after_a_stop_string(parrot: Served, stop: Any, k: int) -> None:
    """S3 over HTTP."""
    made = both(parrot, "/v1/chat/completions", {"messages": user(TEXT), "stop": stop, "speculation": {"k": k}})
    at = min(TEXT.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in TEXT)
    assert made["choices"][0]["message"]["content"] == TEXT[:at]
    assert made["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_length(parrot: Served, most: int) -> None:
    """S5 over HTTP, in all spellings."""
    for name in ("max_tokens", "max_completion_tokens"):
        made = both(parrot, "/v1/chat/completions", {"messages": user(TEXT), name: most})
        assert made["usage"]["completion_tokens"] == most
        assert made["choices"][0]["finish_reason"] == "length"


def test_completions_of_several_prompts(parrot: Served) -> None:
    """In their order, whoever ends first; as text and as ids; with the prompts before them."""
    prompts = ["a" * 40 + AGAIN, "b" + AGAIN, "c" * 20 + AGAIN]
    ids = [parrot_tokenizer()(p)["input_ids"] for p in prompts]
    for given in (prompts, ids):
        made = both(parrot, "/v1/completions", {"prompt": given, "max_tokens": 64, "n": 2, "echo": True})
        texts = [p + p[:-1] for p in prompts for _ in range(2)]
        assert [c["text"] for c in made["choices"]] == texts
        assert made["usage"]["prompt_tokens"] == sum(map(len, ids))
    one = both(parrot, "/v1/completions", {"prompt": ids[0], "max_tokens": 3})
    assert one["choices"][0] == {"index": 0, "finish_reason": "length", "text": "aaa"}


def test_echo_alone(parrot: Served) -> None:
    made = both(parrot, "/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True})
    assert made["choices"][0] == {"index": 0, "finish_reason": "length", "text": TEXT}


# --- parameters -------------------------------------------------------------------------------------------------------

STOPS = list(range(100, 140))
PARAMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "seeded": ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
    "negative seed": ({"seed": -7, "temperature": 1.3}, {"temperature": 1.3, "seed": -7}),
    "top_p": ({"seed": 1, "top_p": 0.5}, {"temperature": 1.0, "seed": 1, "top_p": 0.5}),
    "top_k": ({"seed": 1, "top_k": 3}, {"temperature": 1.0, "seed": 1, "top_k": 3}),
    "top_k -1": ({"seed": 1, "top_k": -1}, {"temperature": 1.0, "seed": 1}),
    "min_p": ({"seed": 1, "min_p": 0.3}, {"temperature": 1.0, "seed": 1, "min_p": 0.3}),
    "frequency": ({"temperature": 0, "frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    "presence": ({"temperature": 0, "presence_penalty": 2}, {"presence_penalty": 2.0}),
    "repetition": ({"temperature": 0, "repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "bias": ({"temperature": 0, "logit_bias": {"70": 100}}, {"logit_bias": {70: 100.0}}),
    "min_tokens": ({"seed": 3, "min_tokens": 20}, {"temperature": 1.0, "seed": 3, "min_new_tokens": 20}),
    "ignore_eos": ({"seed": 4, "ignore_eos": True}, {"temperature": 1.0, "seed": 4, "ignore_eos": True}),
    "stop ids": ({"seed": 5, "stop_token_ids": STOPS}, {"temperature": 1.0, "seed": 5, "stop_token_ids": STOPS}),
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_mean_what_they_mean_in_the_library(
    random_model: Served, library: SpeculativeDecoding, name: str
) -> None:
    """P1, P4, R1 over HTTP: none is dropped, none is misread."""
    asked, meant = PARAMS[name]
    made = both(random_model, "/v1/completions", {"prompt": "the cat", "max_tokens": 30, **asked})
    (expected,) = library.complete("the cat", SamplingParams(max_new_tokens=30, **meant))
    assert made["choices"][0]["text"] == expected.text
    assert made["choices"][0]["finish_reason"] == expected.finish_reason
    if name not in ("greedy", "seeded", "top_k -1"):
        plain = whole(random_model, "/v1/completions", {"prompt": "the cat", "max_tokens": 30, "temperature": 0})
        seeded = {"prompt": "the cat", "max_tokens": 30, "seed": asked.get("seed", 0)}
        assert made["choices"][0]["text"] not in (
            plain["choices"][0]["text"],
            whole(random_model, "/v1/completions", seeded)["choices"][0]["text"] if name != "negative seed" else None,
        )


def test_samples_of_one_prompt_differ_and_repeat(random_model: Served) -> None:
    """R1, R4."""
    body = {"messages": user("hello"), "n": 4, "seed": 11, "max_tokens": 12}
    made = both(random_model, "/v1/chat/completions", body)
    texts = [c["message"]["content"] for c in made["choices"]]
    assert len(set(texts)) == 4
    assert [c["message"]["content"] for c in whole(random_model, "/v1/chat/completions", body)["choices"]] == texts
    greedy = whole(random_model, "/v1/chat/completions", {"messages": user("hello"), "n": 3, "temperature": 0})
    assert len({c["message"]["content"] for c in greedy["choices"]}) == 1
    without = {"messages": user("hello"), "max_tokens": 12}
    assert len({json.dumps(whole(random_model, "/v1/chat/completions", without)["choices"]) for _ in range(4)}) > 1


@pytest.mark.parametrize("stop", [None, "e"])
def test_logprobs_are_the_targets(random_model: Served, library: SpeculativeDecoding, stop: str | None) -> None:
    """R2 over HTTP: teacher-forced scoring gives the same for accepted, corrected and bonus tokens."""
    body = {"prompt": LONG, "max_tokens": 25, "seed": 2, "logprobs": 3, "speculation": {"k": 4}, "stop": stop}
    choice = both(random_model, "/v1/completions", body)["choices"][0]
    found, text = choice["logprobs"], choice["text"]
    (expected,) = library.complete(
        LONG,
        SamplingParams(max_new_tokens=25, seed=2, temperature=1.0, logprobs=3, stop=() if stop is None else ("e",)),
    )
    target = library.target
    prompt = expected.prompt_tokens
    scores = torch.log_softmax(
        target.forward([*prompt, *expected.tokens[:-1]], target.new_cache(), len(expected.tokens)).float(), dim=-1
    )
    count = len(found["tokens"])
    assert count in (len(expected.tokens), len(expected.tokens) - 1)
    for i in range(count):
        assert found["token_logprobs"][i] == pytest.approx(float(scores[i, expected.tokens[i]]), abs=1e-4)
        assert sorted(found["top_logprobs"][i].values(), reverse=True) == pytest.approx(
            scores[i].topk(len(found["top_logprobs"][i])).values.tolist(), abs=1e-4
        )
        assert 0 <= found["text_offset"][i] <= len(text)
    assert len({len(top) for top in found["top_logprobs"]}) == 1
    assert found["text_offset"] == sorted(found["text_offset"])


def test_logprobs_of_chats(parrot: Served) -> None:
    """Bytes of all tokens add up to the text, characters in several tokens included; not a byte of the stop string."""
    for stop, text in ((None, TEXT), ("日本", TEXT[: TEXT.index("日本")])):
        body = {"messages": user(TEXT), "logprobs": True, "top_logprobs": 2, "stop": stop, "speculation": {"k": 3}}
        choice = both(parrot, "/v1/chat/completions", body)["choices"][0]
        content = choice["logprobs"]["content"]
        said = b"".join(bytes(entry["bytes"]) for entry in content)
        assert said.decode(errors="ignore") == text
        assert all(entry["logprob"] == pytest.approx(0, abs=1e-5) for entry in content)
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
    without = both(parrot, "/v1/chat/completions", {"messages": user("ab"), "logprobs": True})["choices"][0]
    assert [entry["top_logprobs"] for entry in without["logprobs"]["content"]] == [[], []]


# --- speculation ------------------------------------------------------------------------------------------------------


def test_logprobs_of_nothing(parrot: Served) -> None:
    """A stream of no token said nothing of log-probabilities, as if none had been asked for."""
    for most in (0, 1):
        made = both(parrot, CHAT, {"messages": user(""), "max_tokens": most, "logprobs": True, "n": 2})
        assert [choice["logprobs"] for choice in made["choices"]] == [{"content": []}] * 2


def test_usage_counts_drafts(parrot: Served) -> None:
    made = both(parrot, "/v1/chat/completions", {"messages": user(LONG), "speculation": {"k": 4, "statistics": True}})
    details, said = made["usage"]["completion_tokens_details"], made["speculation"]
    assert details["accepted_prediction_tokens"] == said["accepted"] > 20
    assert details["rejected_prediction_tokens"] == said["drafted"] - said["accepted"]
    assert sum(said["drafted_per_position"]) == said["drafted"] == sum(map(sum, said["drafted_per_round"]))
    assert sum(said["accepted_per_position"]) == said["accepted"] == said["accepted_by"]["suffix"]
    assert len(said["drafted_per_round"][0]) == said["rounds"]
    assert max(said["drafted_per_round"][0]) <= 4


def test_speculation_can_be_switched_off(parrot: Served) -> None:
    body = {"messages": user(LONG), "speculation": {"enabled": False, "statistics": True}}
    made = whole(parrot, "/v1/chat/completions", body)
    assert made["speculation"]["drafted"] == 0
    assert made["choices"][0]["message"]["content"] == LONG
    assert "speculation" not in whole(parrot, "/v1/chat/completions", {"messages": user("a")})


def test_speed_up_is_estimated(random_model: Served) -> None:
    body = {"prompt": LONG, "max_tokens": 60, "temperature": 0, "speculation": {"k": 4, "statistics": True}}
    for _ in range(3):
        said = whole(random_model, "/v1/completions", body)["speculation"]
    assert 0 < said["speed_up"] < 20


@pytest.mark.parametrize("stop", [None, "hat and the d"])
def test_tokens_of_a_stream_say_where_they_come_from(parrot: Served, stop: str | None) -> None:
    body = {"messages": user(LONG), "speculation": {"k": 3, "tokens": True}, "stream": True, "stop": stop}
    text, shares = "", []
    for chunk in events(post(parrot, "/v1/chat/completions", body)):
        text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
        if "speculation" in chunk:
            shares += chunk["speculation"]["tokens"]
            assert "".join(t["text"] for t in shares) == text
            assert 0 <= chunk["speculation"]["drafted"] <= 3
    assert "".join(t["text"] for t in shares) == text == (LONG if stop is None else LONG[: LONG.index(stop)])
    assert {t["origin"] for t in shares} >= {"accepted", "bonus"}
    assert all((t["source"] == "suffix") == (t["origin"] == "accepted") for t in shares)


@pytest.mark.parametrize("drafter", ["suffix", "model", "none"])
def test_prediction_is_copied_from(drafter: str) -> None:
    """OpenAI's predicted outputs: most of the answer comes from there, but not what differs; the answer is the same."""
    said = "".join(chr(ord("a") + (i * i * 7 + i // 3) % 26) for i in range(120))
    predicted = said[:60] + "#" + said[61:]
    engine = parrot_engine(None if drafter == "suffix" else NoDrafter())
    if drafter == "model":
        engine = parrot_engine(ModelDrafter(TableModel(random_law(300, seed=1), 300), 300))
    with served(engine) as server:
        body = {"messages": user("^" + said[::-1]), "speculation": {"statistics": True}}
        plain = whole(server, "/v1/chat/completions", body)
        body["speculation"]["k"] = 4  # with toys, drafts do not pay
        fast = whole(server, "/v1/chat/completions", {**body, "prediction": {"type": "content", "content": predicted}})
        parts = [{"type": "text", "text": predicted[:50]}, {"type": "text", "text": predicted[50:]}]
        again = whole(server, "/v1/chat/completions", {**body, "prediction": {"type": "content", "content": parts}})
    assert plain["choices"][0]["message"]["content"] == said
    assert plain["choices"] == fast["choices"] == again["choices"]
    for made in (fast, again):
        assert made["speculation"]["accepted_by"]["suffix"] > 80 > plain["speculation"]["accepted"]
        assert made["speculation"]["rounds"] < 40


# --- structure --------------------------------------------------------------------------------------------------------


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]
    good: bool


def test_json_schema_by_the_client(random_model: Served) -> None:
    client = random_model.client()
    for seed in range(3):
        done = client.chat.completions.parse(
            model=NAME, messages=user("A pet."), response_format=Pet, seed=seed, max_completion_tokens=400
        )
        assert isinstance(done.choices[0].message.parsed, Pet)
        assert done.choices[0].finish_reason == "stop"


def test_other_structures(random_model: Served) -> None:
    body = {"messages": user("x"), "seed": 1, "max_tokens": 300}
    made = both(random_model, "/v1/chat/completions", {**body, "guided_regex": "(yes|no)!{2,3}"})
    assert made["choices"][0]["message"]["content"].rstrip("!") in ("yes", "no")
    grammar = 'start: "(" start ")" | "x"'
    made = both(random_model, "/v1/chat/completions", {**body, "guided_grammar": grammar, "temperature": 0.5})
    text = made["choices"][0]["message"]["content"]
    if made["choices"][0]["finish_reason"] == "stop":
        assert text == "(" * text.count("(") + "x" + ")" * text.count(")")
    made = both(random_model, "/v1/chat/completions", {**body, "response_format": {"type": "json_object"}})
    text = made["choices"][0]["message"]["content"]
    assert text.startswith("{")
    if made["choices"][0]["finish_reason"] == "stop":
        json.loads(text)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, "two"]}}}
    made = both(
        random_model, "/v1/completions", {"prompt": "x", "seed": 2, "max_tokens": 50, "response_format": schema}
    )
    assert json.loads(made["choices"][0]["text"]) in (1, "two")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "What it does.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
STRICT_TOOL = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pâris"}}\n</tool_call>'


@pytest.mark.parametrize("k", [0, 1, 4])
def test_tool_calls_are_found(parrot: Served, k: int) -> None:
    """J2 over HTTP."""
    body = {"messages": user(f"Well. {CALL}\n{CALL}"), "tools": TOOLS, "speculation": {"k": k}}
    choice = both(parrot, "/v1/chat/completions", body)["choices"][0]
    arguments = '{"city": "Pâris"}'
    assert choice["message"] == {"content": "Well.", "calls": [["weather", arguments]] * 2}
    assert choice["finish_reason"] == "tool_calls"
    text = both(parrot, "/v1/chat/completions", {**body, "tool_choice": "none"})["choices"][0]
    assert text["message"] == {"content": f"Well. {CALL}\n{CALL}", "calls": []}
    assert text["finish_reason"] == "stop"


def test_tools_by_the_client(parrot: Served) -> None:
    """A call, the tool's answer, and the model's answer to that, as the client sends and reads them."""
    client = parrot.client()
    messages = user(CALL)
    done = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS)
    message = done.choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.name == "weather"
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "warm"}]
    messages += user("It is warm.")
    with client.chat.completions.stream(model=NAME, messages=messages, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "It is warm."


def test_calls_of_strict_tools_follow_their_schemas(parrot: Served) -> None:
    """Whatever the model would have written; text around them stays its own. Refused until now."""
    body = {"messages": user(f"Well. {CALL}\n{CALL}!"), "tools": [STRICT_TOOL], "temperature": 0}
    message = both(parrot, "/v1/chat/completions", body)["choices"][0]["message"]
    assert message["content"].startswith("Well.")
    assert message["calls"] == [["weather", '{"city": "Paris"}']] * 2
    message = both(parrot, "/v1/chat/completions", {**body, "messages": user("Nothing to call.")})["choices"][0]
    assert message["message"] == {"content": "Nothing to call.", "calls": []}


def test_tools_of_pydantic_by_the_client(parrot: Served) -> None:
    """The client makes them strict, so all of them were refused."""
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        days: int

    call = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
    tools, client = [openai.pydantic_function_tool(Weather)], parrot.client()
    for text in (call, call.replace("3", "true")):
        asked = {"model": NAME, "messages": user(text), "tools": tools, "temperature": 0, "max_tokens": 120}
        (made,) = client.chat.completions.parse(**asked).choices[0].message.tool_calls
        found = made.function.parsed_arguments
        assert isinstance(found, Weather)
        assert found.city == "Rome"


@pytest.mark.parametrize("tool", ["strict", "loose"])
def test_no_second_call_where_there_may_be_one(parrot: Served, tool: str) -> None:
    tools = [STRICT_TOOL] if tool == "strict" else TOOLS
    body = {"messages": user(f"{CALL} and {CALL}"), "tools": tools, "parallel_tool_calls": False, "max_tokens": 200}
    message = both(parrot, "/v1/chat/completions", {**body, "temperature": 0})["choices"][0]["message"]
    city = "Paris" if tool == "strict" else "Pâris"
    assert message["calls"] == [["weather", json.dumps({"city": city}, ensure_ascii=False)]]


@pytest.mark.parametrize("text", ["Well.", CALL])
def test_a_schema_is_for_answers_and_calls_stay_possible(parrot: Served, text: str) -> None:
    """A response_format beside tools had made every call impossible, without a word."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["Yes", "No"]}}}
    body = {"messages": user(text), "tools": TOOLS, "response_format": schema, "temperature": 0}
    message = both(parrot, "/v1/chat/completions", body)["choices"][0]["message"]
    if text == CALL:
        assert [name for name, _ in message["calls"]] == ["weather"]
    else:
        assert json.loads(message["content"]) in ("Yes", "No")


@pytest.mark.parametrize("parameters", [{}, {"properties": {"a": {"type": "integer"}}}, None])
def test_forced_arguments_are_an_object(random_model: Served, parameters: Any) -> None:
    """A schema that does not say so let any JSON through, which is no call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": user("x"), "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        made = whole(random_model, "/v1/chat/completions", {**body, "seed": seed, "max_tokens": 600})["choices"][0]
        if made["finish_reason"] != "length":
            (call,) = made["message"]["calls"]
            assert isinstance(json.loads(call[1]), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_forced_tool_calls(random_model: Served, choice: Any) -> None:
    """A random model that has to call does, with arguments that follow the schema."""
    body = {"messages": user("x"), "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    made = both(random_model, "/v1/chat/completions", {**body, "seed": 3, "max_tokens": 300})
    (call,) = made["choices"][0]["message"]["calls"]
    assert call[0] in (("weather", "time") if choice == "required" else ("time",))
    assert json.loads(call[1])["city"] in ("Paris", "Rome")
    assert made["choices"][0]["finish_reason"] == "tool_calls"


# --- the official client ----------------------------------------------------------------------------------------------


def test_client_sync(parrot: Served) -> None:
    client = parrot.client()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    done = client.completions.create(model=NAME, prompt=f"hello{AGAIN}", max_tokens=20, logprobs=1)
    assert done.choices[0].text == "hello"
    assert done.choices[0].logprobs.text_offset == [0, 2, 3, 4][: len(done.choices[0].logprobs.tokens)]
    pieces = client.completions.create(model=NAME, prompt=f"hello{AGAIN}", max_tokens=20, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "hello"
    chat = client.chat.completions.create(model=NAME, messages=user(TEXT), logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.content == TEXT
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens is not None
    stream = client.chat.completions.create(
        model=NAME, messages=user(TEXT), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens


def test_client_async(parrot: Served) -> None:
    """R3 over HTTP: many at once, each gets its own."""

    async def ask(client: Any, i: int) -> None:
        text = f"{'abcdefgh'[i % 8] * (5 + i)} {i}"
        if i % 2:
            done = await client.chat.completions.create(model=NAME, messages=user(text), n=2)
            assert [c.message.content for c in done.choices] == [text] * 2
            return
        stream = await client.chat.completions.create(model=NAME, messages=user(text), stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == text

    async def all_of_them() -> None:
        async with openai.AsyncOpenAI(base_url=parrot.v1, api_key="none", max_retries=0) as client:
            await asyncio.gather(*(ask(client, i) for i in range(40)))

    asyncio.run(all_of_them())
    parrot.quiet()


def test_client_gets_errors_as_exceptions(parrot: Served) -> None:
    client = parrot.client()
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=user("a"))
    with pytest.raises(openai.BadRequestError, match="store") as refused:
        client.chat.completions.create(model=NAME, messages=user("a"), store=True)
    assert refused.value.param == "store"


# --- refusals ---------------------------------------------------------------------------------------------------------

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content is"),
    (CHAT, {"stop": ["a", 1]}, "stop.1 is"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"nam": "f"}}}, "tool_choice.function.name"),
    (CHAT, {"prediction": {"type": "content", "content": "ab" * 2000}}, "prediction has 4000 tokens"),
    *((CHAT, {name: value}, name) for name, value in [
        ("foo", 1), ("audio", {}), ("functions", []), ("function_call", "auto"), ("metadata", {}), ("store", True),
        ("reasoning_effort", "low"), ("service_tier", "flex"), ("modalities", ["audio"]), ("verbosity", "low"),
        ("web_search_options", {}), ("echo", True), ("best_of", 3), ("prompt", "a"),
        ("n", 0), ("n", 17), ("n", "2"), ("seed", 2**63), ("temperature", -1), ("temperature", 2.5), ("top_p", 0),
        ("top_k", -2), ("min_p", 1.5), ("logit_bias", {"a": 1}), ("logit_bias", {"5": 200}), ("logit_bias", {"300": 1}),
        ("frequency_penalty", 3), ("presence_penalty", "1"), ("repetition_penalty", 0), ("max_tokens", -1),
        ("max_tokens", 5000), ("stop", ""), ("stop", ["a"] * 17), ("stop", [1]), ("stop_token_ids", [300]),
        ("top_logprobs", 2), ("stream_options", {"include_usage": True}), ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}), ("guided_regex", "["), ("guided_grammar", "start: x"),
        ("tools", [{"type": "function"}]), ("tools", [*TOOLS, TOOLS[0]]), ("tool_choice", "required"),
        ("messages", []), ("messages", "hi"), ("messages", [{"role": "bot", "content": "a"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]),
        ("messages", [{"role": "user"}]), ("messages", [{"role": "user", "content": "a", "name": "b"}]),
        ("messages", [{"role": "tool", "content": "a"}]), ("speculation", {"k": 99}), ("speculation", {"depth": 1}),
        ("speculation", {"enabled": False, "k": 2}), ("speculation", {"tokens": True}),
        ("prediction", {"type": "file", "content": "a"}), ("min_tokens", 2000), ("user", 5), ("stream", "yes"),
    ]),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
    (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
    (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x is not known"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages.0.name is not supported"),
    (CHAT, {"store": True}, "should be false"), (CHAT, {"messages": user("a" * 3000)}, "messages"),
    (TEXTS, {"best_of": True}, "best_of"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools.0.function.parameters"),
    (CHAT, {"tools": [STRICT_TOOL], "min_tokens": 3}, "min_tokens"),
    (CHAT, {"tools": [STRICT_TOOL], "guided_regex": "a"}, "tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
    (CHAT, {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"prediction": {"type": "content", "content": "a"}, "speculation": {"enabled": False}}, "prediction"),
    (TEXTS, {"prompt": ""}, "prompt"), (TEXTS, {"prompt": []}, "prompt"), (TEXTS, {"prompt": [300]}, "prompt"),
    (TEXTS, {"prompt": [[1], []]}, "prompt"), (TEXTS, {"prompt": ["a"] * 17}, "n"), (TEXTS, {"suffix": "b"}, "suffix"),
    (TEXTS, {"echo": True, "logprobs": 1}, "echo"), (TEXTS, {"logprobs": 21}, "logprobs"),
    (TEXTS, {"messages": user("a")}, "messages"), (TEXTS, {"prompt": "a" * 3000}, "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "name"), REFUSED, ids=[f"{p[4:8]} {json.dumps(b)[:60]}" for p, b, _ in REFUSED]
)
def test_refused_by_name(parrot: Served, path: str, body: dict[str, Any], name: str) -> None:
    """What cannot be done as asked is not done in another way."""
    base: dict[str, Any] = {"messages": user("a")} if path == CHAT else {"prompt": "a|"}
    for more in ({}, {"stream": True}):
        if "stream" in name or (name == "speculation" and "tokens" in body["speculation"]):
            more = {}
        response = post(parrot, path, {**base, **more, **body})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert name in error["message"] or name in error["param"], error
        assert error["param"], error
        assert "\n" not in error["message"]
        assert len(error["message"]) < 500
    parrot.quiet()


def test_what_is_done_anyway_may_be_said(parrot: Served) -> None:
    """Null is no value; neither is what would be the case without it."""
    body = {"messages": user("ab"), "store": False, "modalities": ["text"], "service_tier": "auto", "audio": None,
            "functions": None, "tools": [], "tool_choice": "auto", "user": "me", "n": None, "stop": None,
            "response_format": {"type": "text"}, "logprobs": False, "stream": False}  # fmt: skip
    assert whole(parrot, CHAT, body)["choices"][0]["message"]["content"] == "ab"


def test_numbers_of_json(parrot: Served) -> None:
    """4.0 is 4, as the OpenAPI document has it; 4.5 is no number of tokens."""
    body = {"messages": user("abcdefgh"), "max_tokens": 4.0, "n": 1.0, "speculation": {"k": 2.0}}
    assert whole(parrot, CHAT, body)["usage"]["completion_tokens"] == 4
    assert whole(parrot, TEXTS, {"prompt": [1.0, 30.0], "max_tokens": 1})["usage"]["prompt_tokens"] == 2
    assert post(parrot, CHAT, {**body, "max_tokens": 4.5}).status_code == 400
    assert post(parrot, CHAT, {**body, "max_tokens": True}).status_code == 400


def test_health_is_told_to_balancers_that_only_want_the_head(parrot: Served) -> None:
    for path in ("/health", "/ready"):
        response = httpx.head(parrot.url + path)
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000, b'{"messages": NaN}', b"null"])
def test_what_is_no_request(parrot: Served, body: bytes) -> None:
    response = httpx.post(parrot.url + CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_body_that_is_not_said_to_be_json(parrot: Served) -> None:
    """As curl sends it, if not told otherwise: it was said to be no JSON object, which it is."""
    response = httpx.post(parrot.url + CHAT, content=b'{"messages": []}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_lone_surrogates_are_refused(parrot: Served) -> None:
    for body in (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [], "\\ud800": 1}'):
        response = httpx.post(parrot.url + CHAT, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]


COUNT = 50_000
MANY = {f"x{i}": 1 for i in range(COUNT)}
FLOODS: list[tuple[str, dict[str, Any], str]] = [
    (TEXTS, {"prompt": [{}] * COUNT}, "prompt.0 is not usable"),
    (TEXTS, {"prompt": [[{}] * COUNT]}, "prompt.0.0 is not usable"),
    (TEXTS, {"prompt": "a", **MANY}, "x0 is not known here"),
    (TEXTS, {"prompt": "a", "logit_bias": dict.fromkeys(MANY, "")}, "logit_bias is"),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * 3}] * 9_000}, "messages.0.content.0"),
    (CHAT, {"messages": [MANY]}, "messages.0.x0 is not known"),
    (CHAT, {"messages": [], "tools": [{}] * 128}, "messages is"),
]


@pytest.mark.parametrize(("path", "body", "said"), FLOODS, ids=[said for _, _, said in FLOODS])
def test_a_body_full_of_faults_is_told_the_first(parrot: Served, path: str, body: dict[str, Any], said: str) -> None:
    """Each bad item was an error of its own: four megabytes of them took gigabytes, and held all others up for long."""
    model = CompletionRequest if path == TEXTS else ChatRequest
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    assert found.value.error_count() < 300
    response = post(parrot, path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(said)


def test_a_long_name_is_not_repeated(parrot: Served) -> None:
    error = post(parrot, TEXTS, {"prompt": "a", "x" * 10_000: 1}).json()["error"]
    assert error["message"] == f"{'x' * 100} is not known here; leave it out"


def test_paths_and_methods(parrot: Served) -> None:
    for path, status in [("/nothing", 404), ("/v1/models/other", 404), (CHAT, 405)]:
        response = httpx.get(parrot.url + path)
        assert response.status_code == status
        assert response.json()["error"]["message"]
    assert httpx.get(parrot.url + "/health").json() == {"status": "ok"}
    assert httpx.get(parrot.url + "/ready").json() == {"status": "ready"}


# --- failures ---------------------------------------------------------------------------------------------------------


def test_broken_request_fails_alone(parrot: Served) -> None:
    """NaN where one answer is to go on: its own client is told, before or within its stream; others notice nothing."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=parrot.url, timeout=60) as client:
            bodies = [
                {"messages": user("abc" * 20 + (BROKEN if i % 3 == 0 else "")), "stream": i % 2 == 0} for i in range(12)
            ]
            responses = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        for i, response in enumerate(responses):
            if i % 3:
                assert response.status_code == 200
                assert "abc" in response.text.replace('"', "")
            elif i % 2:
                assert response.status_code == 500
                assert response.json()["error"]["code"] == "model_error"
            else:
                last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
                assert last["error"]["code"] == "model_error"

    asyncio.run(ask())
    assert post(parrot, CHAT, {"messages": user(BROKEN), "stream": True}).status_code == 500
    parrot.quiet()
    assert post(parrot, CHAT, {"messages": user("fine")}).json()["choices"][0]["message"]["content"] == "fine"


def test_a_request_that_cannot_begin_fails_alone() -> None:
    """What the engine could not even begin, for whatever reason, took the generation thread with it."""

    class Picky(SuffixDrafter):
        def start(self, sampler: Any) -> Any:
            if sampler.params.seed == 13:
                raise RuntimeError("not this one")
            return super().start(sampler)

    with served(parrot_engine(Picky())) as server:
        for stream in (False, True):
            response = post(server, CHAT, {"messages": user("a"), "seed": 13, "stream": stream})
            assert response.status_code == 500
            assert "not this one" not in response.text
        assert post(server, CHAT, {"messages": user("fine")}).json()["choices"][0]["message"]["content"] == "fine"
        server.quiet()


@pytest.mark.parametrize("pace", [False, True])
def test_a_model_without_a_tokenizer(tmp_path: Path, pace: bool) -> None:
    """Ids in, nothing but counts out. Streams broke off in the middle, and refusals told where the model lies."""
    for file in save_checkpoint(tmp_path, parrot_tokenizer()).glob("*token*"):
        file.unlink()
    with served(SpeculativeDecoding(tmp_path, "suffix").engine(Limits(memory=1 << 22)), pace=pace) as server:
        body = {"prompt": [5] * 20, "max_tokens": 40, "temperature": 0, "speculation": {"k": 5, "statistics": True}}
        made = streamed(server, TEXTS, body)
        assert made["choices"] == [{"index": 0, "finish_reason": "length", "text": ""}]
        assert made["speculation"]["accepted"] > 0
        assert (made["speculation"]["speed_up"] is not None) == (
            whole(server, TEXTS, body)["speculation"]["speed_up"] is not None
        )
        predicted = {"type": "content", "content": "a"}
        for more in ({"logprobs": 1}, {"stop": "a"}, {"echo": True}, {"prompt": "a"}, {"guided_regex": "a"},
                     {"prediction": predicted}, {"speculation": {"tokens": True}, "stream": True}):  # fmt: skip
            response = post(server, TEXTS, {**body, **more})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"].partition(".")[0] in more
            assert str(tmp_path) not in response.text
        server.quiet()


def test_dead_end_of_a_grammar_is_the_clients_fault(parrot: Served) -> None:
    body = {"messages": user("ab"), "guided_grammar": 'start: "a" dead | "c"\ndead: dead "x"'}
    response = post(parrot, CHAT, body)
    assert response.status_code == 400
    assert "forbidden" in response.json()["error"]["message"]


def test_crash_of_the_generation_thread() -> None:
    """Whoever waits is told, nobody new is let in, and the server ends, saying so."""
    engine = parrot_engine()
    with served(engine) as server:
        step = engine.step

        def breaking() -> Any:
            if any("crash" in parrot_tokenizer().decode(job.tokens) for job in engine._running):
                raise MemoryError("no more")
            return step()

        engine.step = breaking  # type: ignore[method-assign]
        server.server.crash = lambda: None  # type: ignore[method-assign]
        server.service.crashed = lambda: setattr(server.server, "failed", True)
        assert post(server, CHAT, {"messages": user("fine")}).status_code == 200
        response = post(server, CHAT, {"messages": user("crash")})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "crashed"
        wait_for(lambda: server.server.failed)
        assert httpx.get(server.url + "/ready").status_code == 503
        assert httpx.get(server.url + "/health").status_code == 200
        response = post(server, CHAT, {"messages": user("fine")})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1


def test_failing_observer_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("on_"):
                raise RuntimeError("observer")
            raise AttributeError(name)

    with served(parrot_engine(), [Broken()]) as server:
        assert both(server, CHAT, {"messages": user("ab")})["choices"][0]["message"]["content"] == "ab"
    assert "on_begin" in caplog.text


# --- observers --------------------------------------------------------------------------------------------------------


class Log:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any, Any]] = []

    def on_begin(self, call: Any) -> None:
        self.told.append(("begin", call, None))

    def on_tokens(self, call: Any, tokens: Any) -> None:
        self.told.append(("tokens", call, tokens))

    def on_end(self, call: Any, end: Any) -> None:
        self.told.append(("end", call, end))


def test_observers_see_every_token_and_every_end() -> None:
    log = Log()
    with served(parrot_engine(), [log]) as server:
        done = post(server, CHAT, {"messages": user(LONG), "n": 2, "user": "me", "speculation": {"k": 3}}).json()
        post(server, CHAT, {"messages": user("a" + BROKEN)})
        post(server, CHAT, {"messages": user("a"), "foo": 1})
        server.quiet()
    first = [entry for entry in log.told if entry[1].id == done["id"]]
    assert first[0][0] == "begin"
    assert [kind for kind, _, _ in first].count("end") == 1
    assert first[-1][0] == "end"
    call, end = first[-1][1], first[-1][2]
    assert (call.endpoint, call.user, len(call.requests)) == ("chat", "me", 2)
    assert end.outcome == "finished"
    for index, output in enumerate(end.outputs):
        rounds = [t for kind, _, t in first if kind == "tokens" and t.index == index]
        assert tuple(token for t in rounds for token in t.round.tokens) == output.tokens
        assert "".join(t.piece.text for t in rounds) == output.text == LONG
        assert sum(t.round.num_accepted for t in rounds) == output.stats.accepted > 0
        assert [t.at for t in rounds] == sorted(t.at for t in rounds)
    outcomes = [end.outcome for kind, _, end in log.told if kind == "end"]
    assert outcomes == ["finished", "failed"]
