"""What is learned from: reading, copies, splits, leakage, ids, rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import byte_tokenizer
from slipstream import InputError
from slipstream.distill.documents import Document, apart, given_split, read_documents, split
from slipstream.distill.tokens import Encoded, cut, encode_documents, frequent_ids, pack

LINE = "a line that is long enough to tell, number {}"


def text(name: str, numbers: Any, group: str = "") -> Document:
    return Document(name, "c", group or name, text="\n".join(LINE.format(n) for n in numbers))


def many(count: int, category: str = "c") -> list[Document]:
    return [
        Document(f"{category}{i}", category, f"{category}{i // 2}", text=LINE.format(f"{category}{i}"))
        for i in range(count)
    ]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_folders_files_and_categories(tmp_path: Path) -> None:
    for file in ("a/one.py", "a/b/two.py", "b.py", ".git/x.py", "c.txt"):
        (tmp_path / "src" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / file).write_text(f"text of {file}")
    (tmp_path / "src/binary.py").write_bytes(b"\xff\xfe\0")
    (tmp_path / "alone.txt").write_text("alone")
    found = read_documents([f"code={tmp_path}/src", f"{tmp_path}/alone.txt"], "*.py")
    assert [(d.category, Path(d.group).name, d.text) for d in found] == [
        ("code", "a", "text of a/b/two.py"),
        ("code", "a", "text of a/one.py"),
        ("code", "b.py", "text of b.py"),
        ("alone", "alone.txt", "alone"),
    ]


def lines(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(row) if not isinstance(row, str) else row for row in rows))
    return file


def test_json_lines(tmp_path: Path) -> None:
    ask = {"role": "user", "content": "what?"}
    say = {"role": "assistant", "content": "that"}
    file = lines(
        tmp_path,
        {"messages": [ask, say], "category": "chat"},
        {"messages": [ask], "answer": "this", "finish_reason": "stop"},
        {"prompt": "why?"},
        {"prompt": "once upon", "answer": " a time"},
        {"text": "some text"},
        {"turns": ["one", "two"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "at?"}]}]},
        {"messages": [{"role": "assistant", "content": None}], "answer": "", "finish_reason": "stop"},
        '{"text": "cut o',
    )
    found = read_documents([str(file)])
    assert [d.answered for d in found] == [True, True, False, True, True, False, False]
    assert found[0].category == "chat"
    assert found[1].messages[-1] == {"role": "assistant", "content": "this"}
    assert (found[3].prompt, found[3].text) == ("once upon", " a time")
    assert [m["content"] for m in found[5].messages] == ["one"]
    assert found[0].group == found[1].group == found[6].group != found[2].group, "one question, one side"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (['{"text": 1', '{"text": "a"}'], "line 1 of .* is not JSON"),
        (["[1]"], "line 1 of .* is not a JSON object"),
        ([{"nothing": 1}], "line 1 of .* has no usable text or messages"),
        ([{"messages": []}], "no usable text or messages"),
        ([{"messages": [{"role": "user", "content": 3}]}], "no usable text or messages"),
        ([""], "holds no text"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_documents([str(lines(tmp_path, *rows))])


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for source, said in (
        ("nowhere", "neither a file nor a folder"),
        (f"{tmp_path}/latin", r"not UTF-8 text \(byte 3\)"),
    ):
        with pytest.raises(InputError, match=said):
            read_documents([source])


# --- splitting --------------------------------------------------------------------------------------------------------


def test_groups_stay_together_and_every_category_is_measured() -> None:
    found = split([*many(40, "x"), *many(40, "y")], 0.2, seed=1)
    sides = [{d.group for d in side} for side in (found.training, found.validation)]
    assert not sides[0] & sides[1]
    assert {d.category for d in found.validation} == {"x", "y"}
    assert len(found.validation) == 16
    again = split([*many(40, "y"), *many(40, "x")], 0.2, seed=1)
    assert {d.id for d in again.validation} == {d.id for d in found.validation}, "the order does not matter"
    assert {d.id for d in split(many(40), 0.2, seed=2).validation} != {d.id for d in split(many(40), 0.2).validation}


def test_the_same_text_in_another_folder_is_split_in_the_same_way(tmp_path: Path) -> None:
    """Figures of the same corpus at two places were of other held-out text, and could not be compared."""
    found = []
    for place in ("here", "there/and/further"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        for i in range(40):
            (folder / f"module_{i}.py").write_text(f"# the module with the number {i}\n" * (1 + i % 3))
        found.append([Path(d.id).name for d in split(read_documents([str(folder)]), 0.2).validation])
    assert found[0] == found[1]
    assert 4 <= len(found[0]) <= 12


def test_copies_count_once() -> None:
    found = split([*many(10), text("again", [], "g"), Document("again", "c", "g", text=LINE.format("c3") + "\n")], 0.3)
    assert found.copies == 2
    assert "again" not in {d.id for side in (found.training, found.validation) for d in side}


def test_a_document_that_others_hold_for_the_most_part_is_no_test() -> None:
    licence = range(100, 110)
    documents = [text(f"d{i}", [i, *licence]) for i in range(10)] + [text(f"own{i}", [1000 + i]) for i in range(10)]
    found = split(documents, 0.4, seed=3)
    assert found.validation
    assert all(d.id.startswith("own") for d in found.validation)
    assert len(found.training) + len(found.validation) == 20


def chat(name: str, question: str, answer: str = "") -> Document:
    one = Document(name, "c", question, messages=({"role": "user", "content": question},))
    return one.answer_with(answer) if answer else one


def test_questions_may_begin_alike_but_answers_may_not() -> None:
    """All that comes to a service may hold the same instructions; they are not what is measured."""
    instructions = "\n".join(LINE.format(n) for n in range(20))
    different = [chat(f"d{i}", f"{instructions}\n{i}", LINE.format(1000 + i)) for i in range(10)]
    found = split(different, 0.3)
    assert len(found.validation) >= 3
    open_ones = [chat(f"d{i}", f"{instructions}\n{i}") for i in range(10)]
    assert len(split(open_ones, 0.3).validation) >= 3
    with pytest.raises(InputError, match="too alike"):
        split([chat(f"d{i}", f"{instructions}\n{i}", LINE.format(1)) for i in range(10)], 0.3)


def test_answers_that_came_later_do_not_leak() -> None:
    ours, theirs = (
        [chat("a", "one", LINE.format(1))],
        [chat("b", "two", LINE.format(1)), chat("c", "x", LINE.format(2))],
    )
    training, validation = apart(ours, theirs)
    assert [d.id for d in training] == ["a", "b"]
    assert [d.id for d in validation] == ["c"]


def test_empty_documents_only() -> None:
    with pytest.raises(InputError, match="all 3 documents of the data are empty"):
        split([Document(f"{i}", "c", f"{i}", text=" ") for i in range(3)], 0.1)


def test_a_text_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(InputError, match=r"d1: .*not Unicode text"):
        encode_documents([Document("d1", "c", "g", text="half \ud83d")], byte_tokenizer(), 300, "t")


def test_given_validation_data_that_leaks_is_refused() -> None:
    training = many(6)
    with pytest.raises(InputError, match="c2 of the validation data occurs in the training data"):
        given_split(training, [text("other", [77]), training[2]])
    with pytest.raises(InputError, match="half of the validation data occurs"):
        given_split([text("a", [1, 2])], [text("half", [1, 3])])
    found = given_split(training, [text("other", [77]), text("third", [78])])
    assert len(found.validation) == 2


@pytest.mark.parametrize("documents", [many(1), many(2), [text(f"d{i}", range(9)) for i in range(8)]])
def test_too_little_to_split(documents: list[Document]) -> None:
    with pytest.raises(InputError, match="too few"):
        split(documents, 0.1)


# --- ids --------------------------------------------------------------------------------------------------------------


def test_of_a_conversation_only_answers_count() -> None:
    tokenizer = byte_tokenizer()
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "you"},
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": "and"},
    ]
    (found,) = encode_documents([Document("d", "c", "g", messages=tuple(chat))], tokenizer, 300, "tiny")
    assert (
        tokenizer.decode([i for i, w in zip(found.ids, found.written, strict=True) if w])
        == "you<|im_end|>\nand<|im_end|>\n"
    )
    assert tuple(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)) == found.ids


def test_of_a_continued_prompt_only_the_answer_counts() -> None:
    tokenizer = byte_tokenizer()
    (found,) = encode_documents([Document("d", "c", "g", text=" and", prompt="the")], tokenizer, 300, "tiny")
    assert tokenizer.decode([i for i, w in zip(found.ids, found.written, strict=True) if w]) == " and"
    assert tokenizer.decode(found.ids) == "<s>the and"


def test_a_model_without_a_template_takes_no_conversations() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    chat = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    with pytest.raises(InputError, match="no chat template"):
        encode_documents([Document("d", "c", "g", messages=chat)], tokenizer, 300, "tiny")
    with pytest.raises(InputError, match="has no tokenizer"):
        encode_documents([], None, 300, "tiny")
    with pytest.raises(InputError, match="d holds ids that tiny cannot be fed"):
        encode_documents([Document("d", "c", "g", text="abc")], tokenizer, 5, "tiny")


def encoded(*ids: int, written: tuple[bool, ...] = ()) -> Encoded:
    return Encoded(str(ids), "c", ids, written or (True,) * len(ids))


def test_rows_hold_every_document_once_and_score_within_documents() -> None:
    some = [encoded(1, 2, 3), encoded(4, 5), encoded(6, 7, 8, 9, written=(False, False, True, True))]
    rows = pack(some, 4, seed=0)
    assert rows.ids.shape == rows.labels.shape == rows.scored.shape == (2, 4)
    pairs = [
        (int(a), int(b))
        for a, b, s in zip(rows.ids.ravel(), rows.labels.ravel(), rows.scored.ravel(), strict=True)
        if s
    ]
    assert sorted(pairs) == [(1, 2), (2, 3), (4, 5), (7, 8), (8, 9)]
    stream = [*rows.ids.ravel().tolist(), int(rows.labels[-1, -1])]
    assert sorted(i for i in stream if i) == list(range(1, 10))
    assert not pack(some, 4, seed=0).ids.equal(pack(some, 4, seed=3).ids)


def test_windows_are_taken_evenly() -> None:
    some = [encoded(*range(100)), encoded(*range(20))]
    whole = cut(some, 10, 1000)
    assert [len(w.ids) for w in whole] == [11] * 9 + [10] + [11] + [10]
    assert sum(w.count for w in whole) == 99 + 19
    few = cut(some, 10, 40)
    assert [sum(w.count for w in few if w.document == d.document) for d in some] == [40, 10]


def test_frequent_ids_always_hold_the_special_ones() -> None:
    some = [encoded(5, 5, 5, 7, 7, 9), encoded(3, 3, 3, 3, written=(False,) * 4)]
    assert frequent_ids(some, 4, [0, 99]) == [0, 5, 7, 99]
    assert frequent_ids(some, 100, [0]) == [0, 5, 7, 9]
