"""Small tokenizers of the kinds that models have, trained in a moment on a text of this repository."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PROSE = (Path(__file__).parents[1] / "benchmarks" / "texts" / "prose.txt").read_text(encoding="utf-8")
CODE = "def mean(values):\n    if not values:\n        return 0.0\n    return sum(values) / len(values)\n\n\n" * 3
TEXT = PROSE + CODE + "潮汐是海平面的升降现象。你好 世界。 Привет, мир! naïve café — 🎉👩‍👩‍👧 don't 3.14159\r\n"
SPLIT = r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def wrapped(tokenizer: Any, *, eos: str | None = None, **more: Any) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, clean_up_tokenization_spaces=False, **more
    )


@functools.cache
def gpt2_like(size: int = 420) -> Any:
    """Byte-level BPE with GPT-2's splitting and <|endoftext|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return wrapped(tokenizer, eos="<|endoftext|>")


@functools.cache
def qwen_like(size: int = 700) -> Any:
    """Byte-level BPE with a splitting of its own, NFC, chat tokens and an added token that is no special one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(_regex(SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|fim|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return wrapped(tokenizer, eos="<|im_end|>", chat_template=template)


def _regex(pattern: str) -> Any:
    from tokenizers import Regex

    return Regex(pattern)


@functools.cache
def llama2_like(size: int = 300) -> Any:
    """SentencePiece BPE with byte fallback as Llama 2 has it: a space before everything, no splitting, a BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator([PROSE], trainers.BpeTrainer(vocab_size=size, show_progress=False))
    learned = _model(tokenizer)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    vocabulary = {token: i for i, token in enumerate([*specials, *learned["vocab"]])}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learned["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrapped(made, eos="</s>", bos_token="<s>", unk_token="<unk>")


@functools.cache
def unigram_like(size: int = 260) -> Any:
    """SentencePiece Unigram with byte fallback and a space before the first word only."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=size, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([PROSE], trainer)
    pieces = [(piece, score) for piece, score in _model(tokenizer)["vocab"] if piece != "<unk>"]
    specials = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{n:02X}>", 0.0) for n in range(256))]
    made = Tokenizer(models.Unigram([*specials, *pieces], 0, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrapped(made, eos="</s>", unk_token="<unk>")


def of_tokens(tokens: Sequence[str], merges: Sequence[str] = ()) -> Any:
    """A byte-level tokenizer of just these tokens, for laws that are enumerated."""
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split()) for m in merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return wrapped(made)


def _model(tokenizer: Any) -> Any:
    import json

    return json.loads(tokenizer.to_str())["model"]


KINDS = {"gpt2": gpt2_like, "qwen": qwen_like, "llama2": llama2_like, "unigram": unigram_like}
