"""Tool calls in text: the same whatever pieces it comes in."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.calling import NOTHING, forced_call, free_call, tags_of
from slipstream.serve.tools import Arguments, Called, CallParser, Found, Said, Style, style_of

NAMES = ("weather", "add")
CALL = '{"name": "weather", "arguments": {"city": "P\\u00e4ris \\"}{\\\\", "days": [1, {"a": 2}]}}'
ADD = '{"name": "add", "arguments": {}}'
ARGUMENTS = '{"city": "P\\u00e4ris \\"}{\\\\", "days": [1, {"a": 2}]}'


def assembled(found: Sequence[Found]) -> tuple[str, list[tuple[str, str]]]:
    """All text, and all calls."""
    said, calls = "", []
    for one in found:
        if isinstance(one, Said):
            said += one.text
        elif isinstance(one, Called):
            calls.append([one.name, ""])
        else:
            calls[-1][1] += one.text
    return said, [(name, arguments) for name, arguments in calls]


def parse(style: Style, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(style, NAMES)
    found = [one for piece in pieces for one in parser.push(piece)] + parser.flush()
    assert parser.push("") == []
    said, calls = assembled(found)
    assert parser.calls == len(calls)
    return said, calls


HERMES: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "one": (f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    "text before": (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>", "Let me see.", [("weather", ARGUMENTS)]),
    "two": (
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{ADD}</tool_call>",
        "",
        [("weather", ARGUMENTS), ("add", "{}")],
    ),
    "text behind": (f"<tool_call>{ADD}</tool_call> done", " done", [("add", "{}")]),
    "no closing tag": (f"<tool_call>{ADD}", "", [("add", "{}")]),
    "other order": ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    "arguments as text": ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "", [("add", "{}")]),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "parameters": ('<tool_call>{"name": "add", "parameters": {"x": 1}}</tool_call>', "", [("add", '{"x": 1}')]),
    "more fields": ('<tool_call>{"name": "add", "arguments": {}, "id": {"a": "}"}}</tool_call>', "", [("add", "{}")]),
    "plain": ("a <b> </tool_call> {x}  \n", "a <b> </tool_call> {x}  \n", []),
    "nearly a tag": ("x <tool_cal", "x <tool_cal", []),
    "unknown tool": ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    "bad escape": (
        '<tool_call>{"name": "a\\qd", "arguments": {}}',
        '<tool_call>{"name": "a\\qd", "arguments": {}}',
        [],
    ),
    "escaped name": ('<tool_call>{"name": "a\\u0064d", "arguments": {}}', "", [("add", "{}")]),
    "no object": ("<tool_call>\nhello</tool_call>", "<tool_call>\nhello</tool_call>", []),
    "no JSON": ("<tool_call>{name}</tool_call>!", "<tool_call>{name}</tool_call>!", []),
    "a list": ('<tool_call>[{"name": "add"}]</tool_call>', '<tool_call>[{"name": "add"}]</tool_call>', []),
    "cut in the name": ('hm <tool_call>{"name": "ad', 'hm <tool_call>{"name": "ad', []),
    "cut in arguments": ('<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", '{"a": "x')]),
    "only spaces": (" \n ", " \n ", []),
    "empty": ("", "", []),
}
LLAMA3: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "one": ('{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "tagged": ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "two": (
        '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"b": 2}}',
        "",
        [("add", "{}"), ("add", '{"b": 2}')],
    ),
    "text": ("Hello {there}", "Hello {there}", []),
    "call behind text": ('So: {"name": "add", "parameters": {}}', 'So: {"name": "add", "parameters": {}}', []),
    "other JSON": ('{"answer": 42}', '{"answer": 42}', []),
    "unknown tool": (' {"name": "rm", "parameters": {}} x', ' {"name": "rm", "parameters": {}} x', []),
    "text behind": ('{"name": "add", "parameters": {}} ok', "ok", [("add", "{}")]),
    "spaces": ("  ", "  ", []),
    "half a tag": ("<|pyth", "<|pyth", []),
}
CASES = [("hermes", name, *case) for name, case in HERMES.items()]
CASES += [("llama3", name, *case) for name, case in LLAMA3.items()]


@pytest.mark.parametrize(("style", "name", "text", "said", "calls"), CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_calls_are_found_wherever_the_text_is_cut(style: Style, name: str, text: str, said: Any, calls: Any) -> None:
    """J2. Pieces of every size from every place, and all of it at once."""
    expected = (text if said is None else said, calls)
    assert parse(style, [text]) == expected
    for size in range(1, 9):
        for first in range(size):
            pieces = [text[:first], *(text[i : i + size] for i in range(first, len(text), size))]
            assert parse(style, pieces) == expected, (size, first)


@given(
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<tool",
                "_call>",
                CALL,
                ADD,
                "{",
                "}",
                '"',
                "\\",
                "\n",
                " ",
                ";",
                "x",
                "<|python_tag|>",
                '{"name": "add", "parameters": ',
                "[",
                "é",
            ]
        ),
        max_size=12,
    ),
    st.sampled_from(["hermes", "llama3"]),
    st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_any_text_gives_the_same_in_any_pieces(parts: list[str], style: Style, seed: int) -> None:
    text = "".join(parts)
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(style, pieces) == parse(style, [text])


def test_arguments_stream_as_they_come() -> None:
    parser = CallParser("hermes", NAMES)
    seen = [parser.push(char) for char in f"<tool_call>{CALL}</tool_call>"]
    parts = [one for found in seen for one in found if isinstance(one, Arguments)]
    assert len(parts) == len(ARGUMENTS)
    assert json.loads("".join(part.text for part in parts))["days"] == [1, {"a": 2}]


def test_style_comes_from_the_template() -> None:
    assert style_of(None) is None
    assert style_of("{{ messages }}") is None
    assert style_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert style_of('{% if tools %}{"name": x, "parameters": y}{% endif %}') == "llama3"
    assert style_of("{% if tools %}[TOOL_CALLS]{% endif %}") is None


@pytest.mark.parametrize("style", ["hermes", "llama3"])
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_are_calls(style: Style, several: bool) -> None:
    """A random model that has to call writes calls that are found, with arguments that follow their schemas."""
    from conftest import byte_tokenizer
    from fakes import TableModel, decode, random_law
    from slipstream.drafters import SuffixDrafter
    from slipstream.grammar import Grammars

    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", 'a"b']}, "days": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tokenizer = byte_tokenizer()
    rules = forced_call(style, {"weather": schema, "add": NOTHING}, tags_of(tokenizer), several=several)
    grammar = Grammars(tokenizer, 300, [3]).lark(rules)
    for seed in range(4):
        answer, _ = decode(
            TableModel(random_law(300, seed), 300),
            SuffixDrafter(min_probability=0),
            [5],
            k=3,
            temperature=1.0,
            stop_ids=[3],
            max_new_tokens=400,
            logits_processors=[grammar.processor(1)],
            seed=seed,
        )
        said, calls = parse(style, [tokenizer.decode(answer, skip_special_tokens=True)])
        whole = answer[-1] == 3
        assert whole or several
        assert said == "" or not whole
        assert calls
        for name, arguments in calls if whole else calls[:-1]:
            given_ = json.loads(arguments)
            assert given_ == {} if name == "add" else given_["city"] in ("Paris", 'a"b')


def tagged_tokenizer(tagged: bool) -> Any:
    """Of bytes; ``tagged``: with tokens for the tags of calls and thoughts, shown as text, as Qwen's has."""
    from transformers import AddedToken

    from conftest import byte_tokenizer

    tokenizer = byte_tokenizer()
    if tagged:
        tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


def ids_of(tokenizer: Any, text: str, *, spelled: bool) -> list[int]:
    """Ids of a text; ``spelled``: without tokens that are tags."""
    found: list[int] = []
    for piece in re.split("(?<=<)", text) if spelled else [text]:
        found += tokenizer(piece, add_special_tokens=False)["input_ids"]
    return found


STRICT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA_GOOD = '{"name": "add", "parameters": {"a": 1}}'
FREE: list[tuple[Style, bool, str, bool | None]] = [
    ("hermes", True, "", True),
    ("hermes", True, "Hello < {world}", True),
    ("hermes", True, "<think>hm</think> so", True),
    ("hermes", True, "x <tool_cal", True),
    ("hermes", True, "x <tool_call>", False),
    ("hermes", True, GOOD, True),
    ("hermes", True, f"Well. {GOOD} and\n{GOOD}\n<think>x</think>", True),
    ("hermes", True, GOOD[:-3], False),
    ("hermes", True, "<tool_call> hello", None),
    ("hermes", True, 'x <tool_call>\n{"name": "rm"', None),
    ("hermes", True, '<tool_call>\n{"name": "add", "arguments": {"b"', None),
    ("hermes", True, '<tool_call>\n{"name": "add", "arguments": {}', None),
    ("hermes", False, f"<think>hm</think> {GOOD} <think>x</think> ok <tool", True),
    ("hermes", False, f"{GOOD}\n{GOOD}", None),
    ("hermes", False, f"{GOOD}<think>x<tool_call>", None),
    ("llama3", True, "", True),
    ("llama3", True, "Hello {world}", True),
    ("llama3", True, " < 3", True),
    ("llama3", True, "  <", True),
    ("llama3", True, "<|python", None),
    ("llama3", True, LLAMA_GOOD, True),
    ("llama3", True, f"{LLAMA_GOOD}; {LLAMA_GOOD}", True),
    ("llama3", False, f"{LLAMA_GOOD};", None),
    ("llama3", True, '{"answer"', None),
    ("llama3", True, '\n{"name"', None),
    ("llama3", True, '{"name": "add", "parameters": {"a": "', None),
]


@pytest.mark.parametrize("tokens", ["bytes", "spelled", "tags"])
@pytest.mark.parametrize(("style", "several", "text", "ends"), FREE)
def test_where_a_call_may_come(style: Style, several: bool, text: str, ends: bool | None, tokens: str) -> None:
    """Text is free; a call of a strict tool cannot become anything else. ``ends``: the answer may end there.

    llguidance takes tokens such as ``<tool_call>`` for no text: forced calls had to spell the tag out.
    """
    from slipstream.grammar import Grammars

    tokenizer = tagged_tokenizer(tokens != "bytes")
    rules = free_call(style, {"add": STRICT}, tags_of(tokenizer), several=several)
    mask = Grammars(tokenizer, 300, [3]).lark(rules).processor(0)
    bits = mask.allowed(ids_of(tokenizer, text, spelled=tokens == "spelled"))
    assert (None if bits is None else bool(bits[0] >> 3 & 1)) == ends
    if ends and text:  # what is let pass is found
        _, calls = parse(style, [text])
        assert all(json.loads(arguments) == {"a": 1} for _, arguments in calls)


@pytest.mark.parametrize("several", [True, False])
def test_a_forced_call_has_the_tokens_of_its_tags(several: bool) -> None:
    from slipstream.grammar import Grammars

    tokenizer = tagged_tokenizer(True)
    rules = forced_call("hermes", {"add": STRICT}, tags_of(tokenizer), several=several)
    mask = Grammars(tokenizer, 300, [3]).lark(rules).processor(0)
    for spelled in (True, False):
        assert mask.allowed(ids_of(tokenizer, GOOD, spelled=spelled)) is not None
        assert (mask.allowed(ids_of(tokenizer, f"{GOOD}\n{GOOD}", spelled=spelled)) is not None) == several


@pytest.mark.parametrize(("style", "call"), [("hermes", GOOD), ("llama3", LLAMA_GOOD)])
@pytest.mark.parametrize("tagged", [True, False])
def test_an_answer_with_a_schema_or_calls(style: Style, call: str, tagged: bool) -> None:
    from slipstream.grammar import Grammars

    tokenizer = tagged_tokenizer(tagged)
    rules = free_call(style, {"add": STRICT}, tags_of(tokenizer), several=True, answer={"enum": ["yes", "no"]})
    mask = Grammars(tokenizer, 300, [3]).lark(rules).processor(0)
    for text, allowed in ((call, True), ('"yes"', True), ("yes", False), (f'"yes"{call}', False), (f"x{call}", False)):
        assert (mask.allowed(ids_of(tokenizer, text, spelled=False)) is not None) == allowed, text
