"""What every test may use: an offline hub, small random checkpoints on disk, and the one real model."""

from __future__ import annotations

import os
import signal

# Who is started in the background by a shell ignores Ctrl-C, and so do its children; some tests send it to theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports transformers or torch, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The models of most tests are so small that threads cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Models that are made in the test use these kernels."""
    from slipstream.models.native.build import library, why_not

    if request.param == "torch":
        monkeypatch.setattr("slipstream.models.linear.library", lambda: None)
    elif library() is None:
        pytest.skip(f"no native kernels here: {why_not()}")
    return str(request.param)


SPECIALS = ("<pad>", "<s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ("t h", "th e", "h e", "i n", "e r", "a n", "an d", "r e", "Ġ the", "Ġ a", "Ġ and", "Ġ in", "Ġ t", "Ã ©")


def byte_tokenizer(order: Callable[[list[str]], list[str]] = list) -> Any:
    """A byte-level BPE tokenizer of 274 ids: specials, the 256 bytes in ``order``, and a few merges.

    Like Llama's, it puts a BOS before a text, and so does its chat template.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    bytes_ = order(sorted(pre_tokenizers.ByteLevel.alphabet()))
    merged = [merge.replace(" ", "") for merge in MERGES]
    vocabulary = {token: i for i, token in enumerate((*SPECIALS, *bytes_, *merged))}
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_checkpoint(folder: Path, tokenizer: Any, *, seed: int = 0, **config: Any) -> Path:
    """Save a random Llama beside ``tokenizer``, with 300 rows: 26 more than there are ids, as real ones are padded."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # Wide enough that greedy answers are no constant; the usual 0.02 makes near-uniform logits.
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(sizes | config)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama (300 rows, context of 256) with a byte-level tokenizer and a chat template."""
    return save_checkpoint(tmp_path_factory.mktemp("tiny"), byte_tokenizer())


@pytest.fixture(scope="session")
def tiny_draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a second, smaller one with the same tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("draft")
    return save_checkpoint(folder, byte_tokenizer(), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="session")
def other_tokenizer_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one whose tokenizer has as many ids, but the bytes in reverse order."""
    tokenizer = byte_tokenizer(order=lambda tokens: tokens[::-1])
    return save_checkpoint(tmp_path_factory.mktemp("other"), tokenizer, seed=2)


@pytest.fixture(scope="session")
def stranger_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one whose tokenizer has no token in common with the others."""
    from tokenizers_of_tests import of_tokens

    return save_checkpoint(tmp_path_factory.mktemp("stranger"), of_tokens([f"x{i}" for i in range(290)]), seed=3)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M in the model cache; SLIPSTREAM_SKIP_REAL_WEIGHTS=1 skips instead of failing."""
    from slipstream.models import registry

    if (path := registry.resolve("smollm2-135m")) is not None:
        return path
    if os.environ.get("SLIPSTREAM_SKIP_REAL_WEIGHTS") == "1":
        pytest.skip("SmolLM2-135M is not in the model cache")
    pytest.fail("SmolLM2-135M is not in the model cache; run `slipstream models fetch smollm2-135m` (or `make test`)")
