"""Reading GGUF files: weights and logits against transformers, tokenizers, refusals, and the export as a folder."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType
from gguf.constants import GGML_QUANT_SIZES

from conftest import byte_tokenizer
from gguf_files import tiny_model, tokenizer_metadata, write_gguf
from slipstream import InputError, load_model
from slipstream.models import gguf as ours
from slipstream.models import registry
from slipstream.models.gguf import GGUFFile, export_folder

IDS = [5, 17, 250, 3, 99, 42, 42, 7]
TEXTS = (
    "Hello the world and then",
    " leading  double\n\nnew\tline ",
    "def f(x):\n    return x**2  # 1234567",
    "日本語 漢字 한국어",
    "emoji 👩‍👩‍👧 and 🎉",
    "<|im_start|>user\nhi<|im_end|>",
    "",
)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


def refusal(path: Path) -> str:
    """The message with which a file is refused when it is opened."""
    with pytest.raises(InputError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


# --- weights and configuration ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_the_model_that_was_written(tmp_path: Path, kind: str, tied: bool) -> None:
    """Guards the tensor names, the row order of Llama's queries and keys, Qwen's biases and norms, and tying."""
    model = tiny_model(kind, tie_word_embeddings=tied)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model), weights="fp32")
    got, expected = loaded.forward(IDS, loaded.new_cache(), len(IDS)), logits_of(model)
    assert torch.linalg.vector_norm(got - expected) < 1e-5 * torch.linalg.vector_norm(expected)


def test_llama_biases_are_put_in_order_too(tmp_path: Path) -> None:
    """The bias of a Llama query or key is a vector, which the code that reorders a matrix's rows could miss."""
    model = tiny_model("llama", attention_bias=True)
    opened = GGUFFile(write_gguf(tmp_path / "m.gguf", model))
    assert opened.config()["attention_bias"] is True
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.tensor(name), tensor), name


def _dequantisable() -> list[Kind]:
    found = []
    for kind in Kind:
        try:
            gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", _dequantisable(), ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantises(tmp_path: Path, kind: Kind) -> None:
    """Rows are joined before they are dequantised; that must not change a value, for any type and number of rows."""
    block, size = GGML_QUANT_SIZES[kind]
    columns = 256 if block > 1 else 96
    rng = np.random.default_rng(0)
    for rows in (24, 33):
        # small bytes, so that no scale is infinite
        raw = rng.integers(0, 60, (rows, columns // block * size), dtype=np.uint8)
        path = write_gguf(tmp_path / f"{rows}.gguf", tensors={"output.weight": (raw, kind)})
        expected = np.concatenate([gguf.dequantize(row, kind).reshape(1, columns) for row in raw])
        got = GGUFFile(path).tensor("lm_head.weight")
        assert got.dtype == torch.float32
        assert np.array_equal(got.numpy(), expected)


def test_quantised_model_equals_its_dequantised_weights(tmp_path: Path) -> None:
    """Queries and keys are reordered after dequantisation: a whole row moves with its blocks."""
    model = tiny_model()
    opened = GGUFFile(write_gguf(tmp_path / "m.gguf", model, kind=Kind.Q8_0))
    for name, tensor in model.state_dict().items():
        assert torch.allclose(opened.tensor(name), tensor, atol=0.02), name


def test_tensors_can_be_written_to(tmp_path: Path) -> None:
    """float32 tensors are views of the read-only file in gguf; torch warns of those, and writing to one crashes."""
    opened = GGUFFile(write_gguf(tmp_path / "m.gguf"))
    opened.tensor("model.norm.weight").mul_(2)


def test_unknown_tensor_is_a_key_error(tmp_path: Path) -> None:
    """The decoder asks for optional tensors and tells from KeyError that there are none."""
    opened = GGUFFile(write_gguf(tmp_path / "m.gguf", tiny_model(tie_word_embeddings=True)))
    for name in ("lm_head.weight", "model.layers.0.self_attn.q_norm.weight", "model.layers.7.mlp.up_proj.weight", "x"):
        with pytest.raises(KeyError):
            opened.tensor(name)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    """A file made for fewer layers than it states; the decoder's KeyError would not say of which file."""
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.block_count": 3})
    with pytest.raises(InputError, match=r"model\.layers\.2\.") as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def test_config_is_that_of_the_model(tmp_path: Path) -> None:
    """Numbers are those of config.json: 1e-06, not the 9.999999974752427e-07 that a float32 reads as."""
    model = tiny_model("qwen3", rms_norm_eps=1e-6)
    config = GGUFFile(write_gguf(tmp_path / "m.gguf", model)).config()
    stated = model.config.to_dict() | {"rope_theta": 10000.0, "architectures": ["Qwen3ForCausalLM"]}
    assert {key: stated[key] for key in config} == config


def test_sliding_window_makes_it_a_mistral(tmp_path: Path) -> None:
    """llama.cpp calls Mistral models llama; only a window tells that each layer has one."""
    metadata = {"llama.attention.sliding_window": 16}
    config = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=metadata)).config()
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


def _llama3_divisors(factor: float, low: float = 1.0) -> np.ndarray:
    """What the converter writes for head size 16, theta 500000: 1 for short waves, the factor for long ones."""
    found = []
    for pair in range(8):
        wave = 2 * np.pi * 500000 ** (2 * pair / 16)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / low:
            found.append(factor)
        else:
            smooth = (8192 / wave - low) / (4 - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


def test_llama3_rope_scaling_is_found_again(tmp_path: Path) -> None:
    """Llama 3.1 files hold divisors in place of the scaling's settings; without them long prompts go wrong quietly."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model(rope_parameters=rope)
    divisors = {"rope_freqs.weight": (_llama3_divisors(32.0), Kind.F32)}
    path = write_gguf(tmp_path / "m.gguf", model, tensors=divisors)
    scaling = GGUFFile(path).config()["rope_scaling"]
    assert scaling == {key: value for key, value in rope.items() if key != "rope_theta"}
    loaded = load_model(path, weights="fp32")
    got = loaded.forward(IDS, loaded.new_cache(), len(IDS))
    assert torch.allclose(got, logits_of(model), rtol=1e-4, atol=1e-4)


def test_unknown_rope_divisors_are_refused(tmp_path: Path) -> None:
    """Divisors that Llama 3's rule does not give must not be taken for it."""
    divisors = {"rope_freqs.weight": (_llama3_divisors(8.0, low=2.0), Kind.F32)}
    path = write_gguf(tmp_path / "m.gguf", metadata={"llama.rope.freq_base": 500000.0}, tensors=divisors)
    assert "rotary frequencies" in refusal(path)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    """Both spellings of linear scaling, the present one and that of 2023."""
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    for metadata in (new, {"llama.rope.scale_linear": 4.0}):
        config = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=metadata)).config()
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


# --- files that cannot be used ---------------------------------------------------------------------------------------


def test_truncated_file_is_found_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a download stopped, opening says so, before weights are read and without an error of numpy or struct."""
    whole = write_gguf(tmp_path / "m.gguf", metadata=tokenizer_metadata(byte_tokenizer())).read_bytes()
    monkeypatch.setattr(ours.GGUFFile, "_read", lambda *_: pytest.fail("weights were read"))
    cut = tmp_path / "cut.gguf"
    # The writer pads the end, so the last tensor itself ends a little before it.
    for length in [*range(4, 400, 7), *range(400, len(whole) - 64, len(whole) // 60), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        assert "cut short" in refusal(cut), length


def test_header_of_rubbish(tmp_path: Path) -> None:
    """A damaged header must end in the same sentence, not in a crash or a loop over 2^60 strings."""
    rng = np.random.default_rng(0)
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "bad.gguf"
    for _ in range(40):
        damaged = bytearray(whole)
        at = int(rng.integers(8, 600))
        damaged[at : at + 8] = rng.bytes(8)
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):  # some damage is in a name or a number that reads as another one
            GGUFFile(path)


def test_damage_ends_in_one_sentence_or_in_a_model_that_runs(tmp_path: Path) -> None:
    """A number of heads or a shape that had changed showed as an error of torch, in the middle of the first pass."""
    rng = np.random.default_rng(1)
    whole = write_gguf(tmp_path / "m.gguf", metadata=tokenizer_metadata(byte_tokenizer())).read_bytes()
    path = tmp_path / "bad.gguf"
    ran = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[int(rng.integers(24, 700))] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):
            model = load_model(path, weights="fp32")
            model.forward([5, 6, 7], model.new_cache(), 1)
            ran += 1
    assert 0 < ran < 200


def test_not_a_gguf_file(tmp_path: Path) -> None:
    """Another file, an empty one, a folder, nothing at all: each is named for what it is."""
    other, empty = tmp_path / "other.gguf", tmp_path / "empty.gguf"
    other.write_bytes(b"PK\x03\x04 and so on")
    empty.write_bytes(b"")
    assert "not a GGUF file" in refusal(other)
    assert "not a GGUF file" in refusal(empty)
    assert "cannot be read" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "missing.gguf")


def test_other_versions_and_byte_orders(tmp_path: Path) -> None:
    """Files of version 1 have shorter counts, big-endian ones other numbers: both would be read as rubbish."""
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:4] + (1).to_bytes(4, "little") + path.read_bytes()[8:])
    assert "version 1" in refusal(path)
    assert "big-endian" in refusal(write_gguf(tmp_path / "big.gguf", endianess=gguf.GGUFEndian.BIG))


def test_unsupported_models(tmp_path: Path) -> None:
    """What would be read wrongly is refused: other families, mixtures of experts, parts, layers that differ."""
    path = tmp_path / "m.gguf"
    assert "'gemma3'" in refusal(write_gguf(path, metadata={"general.architecture": "gemma3"}))
    experts = {"blk.0.ffn_gate_inp.weight": (np.zeros((4, 64), np.float32), Kind.F32)}
    assert "blk.0.ffn_gate_inp.weight" in refusal(write_gguf(path, tensors=experts))
    assert "llama-gguf-split" in refusal(write_gguf(path, metadata={"split.count": 3}))
    assert "each layer" in refusal(write_gguf(path, metadata={"llama.attention.head_count_kv": [2, 1]}))
    assert "different sizes" in refusal(write_gguf(path, metadata={"llama.rope.dimension_count": 8}))
    assert "llama.block_count" in refusal(write_gguf(path, metadata={"llama.block_count": None}))
    assert "longrope" in refusal(write_gguf(path, metadata={"llama.rope.scaling.type": "longrope"}))
    assert "damaged" in refusal(write_gguf(path, metadata={"llama.embedding_length": "sixty-four"}))
    assert "damaged" in refusal(write_gguf(path, metadata={"llama.attention.head_count": 0}))


def test_type_that_gguf_cannot_dequantise(tmp_path: Path) -> None:
    """Found at open, not when the tensor's turn comes after a minute; the same for types newer than the package."""
    raw = {"output.weight": (np.zeros((4, 64), np.int8), Kind.I8)}
    path = write_gguf(tmp_path / "m.gguf", tensors=raw)
    assert "output.weight" in refusal(path)
    data = path.read_bytes()
    name = data.index(b"output.weight")
    at = name + len(b"output.weight") + 4 + 2 * 8
    path.write_bytes(data[:at] + (999).to_bytes(4, "little") + data[at + 4 :])
    assert "type 999" in refusal(path)


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_tokenizer_is_the_one_that_was_written(tmp_path: Path) -> None:
    """Same ids, same text back, same special tokens, same chat."""
    original = byte_tokenizer()
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=tokenizer_metadata(original))).tokenizer()
    assert read is not None
    assert read.get_vocab() == original.get_vocab()
    for text in TEXTS:
        ids = read(text)["input_ids"]
        assert ids == original(text)["input_ids"]
        assert read.decode(ids) == original.decode(ids) == "<s>" + text
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<s>", "<|im_end|>", "<pad>")
    chat = [{"role": "user", "content": "Hi"}]
    assert read.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)
    assert read.model_max_length == 256


def test_decoding_cleans_nothing_up(tmp_path: Path) -> None:
    """transformers' clean-up turns " ." into "." and would change what the model said."""
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=tokenizer_metadata(byte_tokenizer()))).tokenizer()
    assert read is not None
    text = "a , b . c ! do n't"
    assert read.decode(read(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["ab", "Ġ12345", "Ġ", "Ġx", "'LL", "ĊĊ", "y"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "'LL", "ĊĊ", "y"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "'LL", "ĊĊ", "y"]),
        ("llama-bpe", ["ab", "Ġ", "123", "45", "Ġ", "Ġx", "'LL", "ĊĊ", "y"]),
        ("tekken", ["ab", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "'LL", "ĊĊ", "y"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, expected: list[str]) -> None:
    """How text is cut before merging decides how numbers and contractions are read; each family has its own rule."""
    metadata = tokenizer_metadata(byte_tokenizer(), pre)
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=metadata)).tokenizer()
    assert read is not None
    pieces = read.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab 12345  x'LL\n\ny")
    found = [piece for piece, _ in pieces]
    if pre in ("gpt-2", "smollm"):  # GPT-2's rule knows small contractions only, and a newline is a space to it
        found = _joined(found, "'", "LL")
        found = _joined(found, "Ċ", "Ċ")
    assert found == expected


def _joined(pieces: list[str], left: str, right: str) -> list[str]:
    for i in range(len(pieces) - 1):
        if pieces[i : i + 2] == [left, right]:
            return [*pieces[:i], left + right, *pieces[i + 2 :]]
    return pieces


def test_special_and_padding_tokens(tmp_path: Path) -> None:
    """Control tokens are skipped on decoding, user-defined ones are not; rows of padding at the end are no tokens.

    GGUF files name the padding rows of the embedding, which a Hugging Face tokenizer does not have: the two would
    otherwise count as different tokenizers.
    """
    metadata = tokenizer_metadata(byte_tokenizer())
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<tool_call>", "  ", "[PAD277]", "[PAD278]"]
    metadata["tokenizer.ggml.token_type"] += [TokenType.USER_DEFINED] * 2 + [TokenType.UNUSED] * 2
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=metadata)).tokenizer()
    assert read is not None
    assert len(read) == size + 2
    ids = read("<|im_start|>x<tool_call>y  z<|im_end|>", add_special_tokens=False)["input_ids"]
    assert size in ids
    assert size + 1 in ids
    assert read.decode(ids, skip_special_tokens=True) == "x<tool_call>y  z"


def test_bos_follows_the_file_and_else_its_kind(tmp_path: Path) -> None:
    """Llama 3 files need not say that a text begins with BOS; Qwen's have a BOS token and do not use it."""
    for pre, stated, expected in (
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ):
        metadata = tokenizer_metadata(byte_tokenizer(), pre) | {"tokenizer.ggml.add_bos_token": stated}
        read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=metadata)).tokenizer()
        assert read is not None
        assert (read("x")["input_ids"][0] == read.bos_token_id) == expected
        assert len(read("x", add_special_tokens=False)["input_ids"]) == 1


def test_whole_pieces_are_taken_without_merging(tmp_path: Path) -> None:
    """Llama 3's vocabulary has words that its merges do not reach."""
    metadata = tokenizer_metadata(byte_tokenizer(), "llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("xyz")
    metadata["tokenizer.ggml.token_type"].append(TokenType.NORMAL)
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=metadata)).tokenizer()
    assert read is not None
    assert read("xyz", add_special_tokens=False)["input_ids"] == [len(read) - 1]


def _sentencepiece_metadata(prefix: bool | None = None) -> dict[str, Any]:
    words = ["▁", "▁h", "he", "el", "ell", "▁hell", "▁hello", "lo", "▁▁"]
    letters = [*"helo<>tx", "\n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * (len(tokens) - 259)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def test_sentencepiece(tmp_path: Path) -> None:
    """Merges come from the scores, a space before the text comes and goes, and what is no token becomes bytes."""
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=_sentencepiece_metadata())).tokenizer()
    assert read is not None
    tokens = read.convert_ids_to_tokens(read("hello  hé")["input_ids"])
    # "▁h" scores better than "he" and than the two spaces before the second h
    assert tokens == ["<s>", "▁hello", "▁", "▁h", "<0xC3>", "<0xA9>"]
    for text in ("hello", " hello", "hello  there", "日本\n🎉", "", "x\ty"):
        assert read.decode(read(text)["input_ids"], skip_special_tokens=True) == text


def test_sentencepiece_without_prefix(tmp_path: Path) -> None:
    """With ``add_space_prefix`` off, neither encoding nor decoding may touch the first space."""
    read = GGUFFile(write_gguf(tmp_path / "m.gguf", metadata=_sentencepiece_metadata(prefix=False))).tokenizer()
    assert read is not None
    assert read.convert_ids_to_tokens(read("hell")["input_ids"]) == ["<s>", "he", "l", "l"]
    assert read.decode(read(" hello")["input_ids"], skip_special_tokens=True) == " hello"


def test_unknown_tokenizers_are_refused_unless_another_is_passed(tmp_path: Path) -> None:
    """A guess would encode text in a way that the model was not trained on, which shows only as worse answers."""
    tokenizer = byte_tokenizer()
    unknown = tokenizer_metadata(tokenizer, "some-new-one")
    path = write_gguf(tmp_path / "m.gguf", metadata=unknown)
    with pytest.raises(InputError, match="some-new-one"):
        load_model(path)
    assert load_model(path, tokenizer=tokenizer).tokenizer is tokenizer
    for bad, word in (
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["q x"]}, "out of vocabulary"),
    ):
        with pytest.raises(InputError, match=word):
            GGUFFile(write_gguf(path, metadata=tokenizer_metadata(tokenizer) | bad)).tokenizer()


def test_file_without_tokenizer(tmp_path: Path) -> None:
    """A model without a vocabulary runs on ids."""
    assert load_model(write_gguf(tmp_path / "m.gguf")).tokenizer is None


def test_end_tokens(tmp_path: Path) -> None:
    """A file names one end token, a chat model ends with any of several: turns with one, texts with another."""
    metadata = tokenizer_metadata(byte_tokenizer())
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|endoftext|>", "<|eot_id|>"]
    metadata["tokenizer.ggml.token_type"] += [TokenType.CONTROL, TokenType.NORMAL]
    loaded = load_model(write_gguf(tmp_path / "m.gguf", metadata=metadata | {"tokenizer.ggml.eot_token_id": 2}))
    assert loaded.eos_token_ids == (3, 2, size)  # eos, eot, and <|endoftext|>; a normal token's text does not count


def test_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    """The gguf package's reader makes two arrays of each string: half a minute for 150,000 tokens and merges."""
    metadata = tokenizer_metadata(byte_tokenizer())
    extra = [f"token{i}" for i in range(150_000)]
    metadata["tokenizer.ggml.tokens"] += extra
    metadata["tokenizer.ggml.token_type"] += [int(TokenType.UNUSED)] * len(extra)
    metadata["tokenizer.ggml.merges"] += ["t h"] * 150_000
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    start = time.process_time()
    GGUFFile(path)
    assert time.process_time() - start < 3


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_exported_folder_is_the_same_model(tmp_path: Path, kind: str) -> None:
    """transformers and Slipstream load the folder, and both give the file's logits and tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model(kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # so that the export in bfloat16 loses nothing
    metadata = tokenizer_metadata(byte_tokenizer(), "qwen2" if kind == "qwen2" else "llama-bpe")
    text_end = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"].append("<|endoftext|>")  # transformers adds it to every Qwen tokenizer
    metadata["tokenizer.ggml.token_type"].append(TokenType.CONTROL)
    path = write_gguf(tmp_path / "m.gguf", model, metadata=metadata)
    folder = export_folder(path, tmp_path / "deep" / "folder")
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits_of(exported), logits_of(model))
    assert exported.generation_config.eos_token_id == [3, text_end]
    from_file, from_folder = load_model(path), load_model(folder)
    assert from_file.eos_token_ids == from_folder.eos_token_ids == (3, text_end)
    read, again = from_file.tokenizer, AutoTokenizer.from_pretrained(folder)
    assert read is not None
    assert read.get_vocab() == again.get_vocab()
    for text in (*TEXTS, "12345 e\u0301 I'LL"):
        ids = read(text)["input_ids"]
        assert again(text)["input_ids"] == ids
        assert again.decode(ids) == read.decode(ids)
    assert again.chat_template == read.chat_template
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_leaves_no_half_written_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there would be taken for complete by whoever comes next."""
    path = write_gguf(tmp_path / "m.gguf", metadata=tokenizer_metadata(byte_tokenizer()))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ours.GGUFFile, "tensor", interrupt)
        with pytest.raises(KeyboardInterrupt):
            export_folder(path, tmp_path / "folder")
    assert [found.name for found in tmp_path.iterdir()] == ["m.gguf"]
    export_folder(path, tmp_path / "folder")
    with pytest.raises(InputError, match="exists already"):
        export_folder(path, tmp_path / "folder")


@pytest.mark.real_weights
def test_smollm2_from_gguf_equals_its_folder(smollm2: Path) -> None:
    """The real file: the folder holds its weights rounded to bfloat16, and the same tokenizer."""
    from safetensors import safe_open
    from transformers import AutoTokenizer

    path = registry.cache_folder() / "smollm2-135m.gguf"
    if not path.is_file():
        pytest.skip("the cache holds SmolLM2-135M as a folder only")
    opened = GGUFFile(path)
    with safe_open(smollm2 / "model.safetensors", framework="pt") as folder:
        assert set(opened.tensor_names()) == set(folder.keys())
        for name in opened.tensor_names():
            assert torch.equal(opened.tensor(name).bfloat16(), folder.get_tensor(name)), name
    read, saved = opened.tokenizer(), AutoTokenizer.from_pretrained(smollm2)
    assert read is not None
    for text in (*TEXTS, "def main():\n    print('The quick brown fox, 12345 times')"):
        ids = read(text)["input_ids"]
        assert saved(text)["input_ids"] == ids
        assert read.decode(ids) == text
    assert set(opened.eos_token_ids()) >= {saved.eos_token_id}
