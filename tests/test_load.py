"""load_model: what it takes, which decoder it chooses, and what it refuses before anything expensive."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import byte_tokenizer
from gguf_files import tiny_model, tokenizer_metadata, write_gguf
from slipstream import InputError, load_model
from slipstream.models import load
from slipstream.models.huggingface import HuggingFaceModel
from slipstream.models.llama import LlamaModel

IDS = [5, 17, 250, 3, 99, 42, 42, 7]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither the user's model cache nor the hub's takes part in these tests."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def logits(model: Any) -> torch.Tensor:
    return model.forward(IDS, model.new_cache(), len(IDS))


def reference(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([IDS])).logits[0]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.linalg.vector_norm(got - expected) < 1e-5 * torch.linalg.vector_norm(expected)


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: entry for key, entry in value.items() if entry is not None}))


def refusal(path: Any, **arguments: Any) -> str:
    """The one-line message with which ``load_model`` refuses, before it has read any weights."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LlamaModel, "__init__", lambda *_, **__: pytest.fail("weights were read"))
        patched.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
        with pytest.raises(InputError) as caught:
            load_model(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# --- what it takes ---------------------------------------------------------------------------------------------------


def test_folder(folder: Path) -> None:
    """A Llama folder runs in our decoder, with transformers' logits, tokenizer and end tokens."""
    model = load_model(folder, weights="fp32")
    assert isinstance(model, LlamaModel)
    assert (model.name, model.eos_token_ids, model.vocab_size) == (str(folder), (3,), 300)
    assert_close(logits(model), reference(folder))
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer("a  b . é")["input_ids"], skip_special_tokens=True) == "a  b . é"


def test_sharded_folder(tmp_path: Path) -> None:
    """Large models come in several files and an index."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "m", max_shard_size="50KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    assert_close(logits(load_model(tmp_path / "m", weights="fp32")), reference(tmp_path / "m"))


def test_bin_weights(folder: Path) -> None:
    """Older checkpoints hold pickled weights; they are read without running what a pickle can carry."""
    from safetensors.torch import load_file

    expected = reference(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_close(logits(load_model(folder, weights="fp32")), expected)


def test_config_of_the_first_llama(folder: Path) -> None:
    """Old config.json files leave out what was then the only choice: heads, head size, rope base, tying."""
    expected = reference(folder)
    gone = ("head_dim", "rope_parameters", "attention_bias", "mlp_bias", "pretraining_tp", "tie_word_embeddings")
    edit(folder / "config.json", **dict.fromkeys(gone))
    assert_close(logits(load_model(folder, weights="fp32")), expected)


def test_gguf_file_and_name_in_the_cache(tmp_path: Path, own_cache: Path, folder: Path) -> None:
    """A path, and the same model by its name in the cache: as a file, and as a folder once there is one."""
    own_cache.mkdir()
    file = write_gguf(own_cache / "some-model.gguf", metadata=tokenizer_metadata(byte_tokenizer()))
    by_path, by_name = load_model(str(file)), load_model("some-model")
    assert torch.equal(logits(by_path), logits(by_name))
    assert by_name.name == "some-model"
    folder.rename(own_cache / "some-model")
    assert_close(logits(load_model("some-model", weights="fp32")), reference(own_cache / "some-model"))


def test_other_architectures_go_through_transformers(tmp_path: Path) -> None:
    """A GPT-2 has no place in our decoder; its logits are transformers' own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=7, bos_token_id=7)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    model = load_model(tmp_path / "gpt2", weights="fp32")
    assert isinstance(model, HuggingFaceModel)
    assert (model.name, model.eos_token_ids, model.tokenizer) == (str(tmp_path / "gpt2"), (7,), None)
    assert torch.equal(logits(model), reference(tmp_path / "gpt2"))
    assert logits(load_model(tmp_path / "gpt2", weights="bf16")).dtype == torch.bfloat16


def test_weights_and_device(folder: Path) -> None:
    """auto is fp32 on a CPU; bf16 gives bfloat16 logits; a device may be an object too."""
    assert logits(load_model(folder)).dtype == torch.float32
    assert logits(load_model(folder, weights="bf16", device=torch.device("cpu"))).dtype == torch.bfloat16


def test_passed_tokenizer_wins(folder: Path) -> None:
    """The checkpoint's own is not even read: it may be broken or of an unknown kind."""
    tokenizer = byte_tokenizer()
    (folder / "tokenizer.json").write_text("not json")
    assert load_model(folder, tokenizer=tokenizer).tokenizer is tokenizer


def test_folder_without_tokenizer(folder: Path) -> None:
    """A model that comes without a tokenizer runs on ids."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert load_model(folder).tokenizer is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 6], 4, (5, 6, 3)),
        (5, 4, (5, 3)),
        (None, 4, (4, 3)),
        (None, [4, 3], (4, 3)),
        (None, None, (3,)),
        ([3, 9], 9, (3, 9)),
    ],
)
def test_end_tokens(folder: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    """S6: the generation config's ids, else the config's, and always the tokenizer's own.

    Chat models list several, or kept their base model's in generation_config.json while the tokenizer has the real one.
    """
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=config)
    assert load_model(folder).eos_token_ids == expected


def test_end_tokens_of_the_adapter_are_found_the_same_way(tmp_path: Path) -> None:
    """Which decoder runs a model must not decide where its answers end."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, eos_token_id=7, bos_token_id=7)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    assert load_model(tmp_path / "gpt2").eos_token_ids == (7, 3)


def _put_in_hub_cache(folder: Path, hub: Path, name: str) -> None:
    """What the hub's client leaves behind when it has downloaded ``name``."""
    entry = hub / f"models--{name.replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, entry / "snapshots" / ("0" * 40))


def test_hub_model_that_was_downloaded_before(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads without a connection, under the hub's name."""
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked the network"))
    _put_in_hub_cache(folder, tmp_path / "hub", "someone/tiny")
    model = load_model("someone/tiny", weights="fp32")
    assert model.name == "someone/tiny"
    assert_close(logits(model), reference(folder))


def test_hub_model_is_checked_before_its_weights_are_downloaded(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is a few hundred bytes and says whether the gigabytes are of any use."""
    fetched: list[Any] = []

    def snapshot_download(name: str, *, local_files_only: bool = False, allow_patterns: Any = None, **_: Any) -> str:
        if local_files_only:
            raise FileNotFoundError
        fetched.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(load, "_check_hub_reachable", lambda name: None)
    load_model("someone/tiny")
    assert fetched[1:] == ["*.safetensors"]
    assert "*.json" in fetched[0]
    fetched.clear()
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "LlamaForSequenceClassification" in refusal("someone/tiny")
    assert len(fetched) == 1


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./missing", "/no/such/model", "~/no-such-model", "a/b/c", "model.gguf"])
def test_missing_path(name: str) -> None:
    """What can only be a path is not looked up on the hub."""
    message = refusal(name)
    assert name in message
    assert "does not exist" in message


def test_unknown_name_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence at once, not the hub client's half minute of retries and a traceback."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(load, "getproxies", dict)

    def no_network(*_: Any, **__: Any) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "create_connection", no_network)
    for name in ("someone/no-such-model", "no-such-model"):
        message = refusal(name)
        assert name in message
        assert "hub cannot be reached" in message
        assert "smollm2-135m" in message


def test_unknown_name_with_the_hub_switched_off() -> None:
    """HF_HUB_OFFLINE=1, which the test suite sets, is respected."""
    assert "hub cannot be reached" in refusal("someone/no-such-model")


def test_name_that_no_model_can_have() -> None:
    """The hub's client raises an error of its own for those."""
    assert "valid hub id" in refusal("what is this?")
    for name in ("x" * 300, "~no-such-user/model", "\0"):
        assert name in refusal(name)


def test_hub_errors_become_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private or misspelt repository, after the hub was reached."""

    def snapshot_download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        raise OSError("404 Client Error.\nRepository Not Found for url ...")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(load, "_check_hub_reachable", lambda name: None)
    message = refusal("someone/private")
    assert "someone/private" in message
    assert "404 Client Error" in message


def test_known_model_that_was_not_fetched() -> None:
    """The way out is a command of ours."""
    assert "slipstream models fetch smollm2-135m" in refusal("smollm2-135m")


def test_folder_that_is_no_model(tmp_path: Path, folder: Path) -> None:
    """Without config.json, with a broken one, with one that is no object."""
    assert "no config.json" in refusal(tmp_path)
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        assert str(folder / "config.json") in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": ["llama"]}, "type"),
        ({"model_type": 3}, "type"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [3]}, "architectures"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_key_value_heads": 3}, "heads"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"num_hidden_layers": 3}, r"lacks the tensor model.layers.2"),
        ({"head_dim": 4}, "q_proj"),
        ({"quantization_config": 3}, "config.json"),
    ],
)
def test_config_without_sense(folder: Path, changes: dict[str, Any], word: str) -> None:
    """Each ended in an error of Python or of torch, some of them only in the first pass."""
    edit(folder / "config.json", **changes)
    message = refusal(folder)
    assert str(folder) in message
    assert word in message


@pytest.mark.parametrize("changes", [{"hidden_act": "nope"}, {"rope_parameters": {"rope_type": "nope"}}])
def test_config_that_transformers_cannot_make_a_model_of(
    folder: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A KeyError of transformers, whose message is the key alone."""
    edit(folder / "config.json", **changes)
    with pytest.raises(InputError, match=r"cannot be loaded by transformers \(KeyError 'nope'\)"):
        load_model(folder)


@pytest.mark.parametrize("ids", ["x", [1, [2]], 1.5, True])
def test_end_tokens_that_are_no_ids(folder: Path, ids: Any) -> None:
    """A text was taken for an id that never comes."""
    edit(folder / "generation_config.json", eos_token_id=ids)
    assert "eos_token_id" in refusal(folder)


def test_name_that_is_missing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """An unset variable of the shell was taken for the current folder."""
    monkeypatch.chdir(folder)
    for name in ("", " "):
        assert "has no name" in refusal(name)


def test_link_to_nothing(tmp_path: Path) -> None:
    """Was looked for on the model hub; one that leads round in a circle too."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for link in ("loop", "gone"):
        assert "link to nothing" in refusal(tmp_path / link)


def test_weights_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    message = refusal(folder)
    assert str(folder / "model.safetensors") in message
    assert "Permission denied" in message


def test_folder_without_weights(folder: Path) -> None:
    """A clone without large-file support, or an interrupted download."""
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


def test_missing_shard(tmp_path: Path) -> None:
    """The index tells which file is missing; transformers would say so after the tokenizer and the other shards."""
    tiny_model().save_pretrained(tmp_path / "m", max_shard_size="50KB")
    gone = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    gone.unlink()
    assert str(gone) in refusal(tmp_path / "m")
    for index in ("{}", "[]", "", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}', '{"weight_map": []}'):
        (tmp_path / "m" / "model.safetensors.index.json").write_text(index)
        assert "index.json" in refusal(tmp_path / "m")


def test_truncated_safetensors(folder: Path) -> None:
    """Wherever it was cut, and also if it is a pointer of git's large-file storage in place of the weights."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 100, 2000, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        message = refusal(folder)
        assert str(file) in message
        assert "cut short" in message
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "damaged" in refusal(folder)


def test_damaged_bin(folder: Path) -> None:
    """The unpickler's own errors are many, and none names the file."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        load_model(folder)


def test_pickled_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    """A pickle can call anything when it is loaded; only tensors are accepted."""

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError):
        load_model(folder)
    assert not (tmp_path / "owned").exists()


def test_missing_tensor(folder: Path) -> None:
    """Weights of another model beside this config; pickled ones tell only when they are read."""
    from safetensors.torch import load_file

    edit(folder / "config.json", num_hidden_layers=3)
    assert "lacks the tensor model.layers.2" in refusal(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks the tensor model\.layers\.2"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "not a causal"]),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ["BertForMaskedLM"]),
        ({"model_type": "bert", "architectures": None}, ["Bert"]),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, ["t5", "encoder-decoder"]),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "taken back"]),
        ({"model_type": "no-such-type"}, ["no-such-type", "transformers"]),
        ({"model_type": None, "architectures": None}, ["type None"]),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}},
            ["'own'", "not run"],
        ),
    ],
)
def test_architectures_that_cannot_be_decoded(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    """Not causal, not to be rolled back, unknown, or in need of code that the checkpoint brings along."""
    edit(folder / "config.json", **changes)
    message = refusal(folder)
    for word in (str(folder), *words):
        assert word in message


def test_broken_tokenizer(folder: Path) -> None:
    """Named before the weights are read, with the way out."""
    (folder / "tokenizer.json").write_text("not json")
    message = refusal(folder)
    assert str(folder) in message
    assert "tokenizer=" in message


def test_unknown_weights(folder: Path) -> None:
    """The names that there are, before anything is looked up."""
    for weights in ("fp8", "FP32", "", None):
        assert "fp32, bf16, fp16, int8" in refusal(folder, weights=weights)


def test_weights_that_the_adapter_lacks(tmp_path: Path) -> None:
    """int8 needs our own layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    assert "'int8'" in refusal(tmp_path / "gpt2", weights="int8")


def test_devices_that_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU where there is none, a second one where there is one, and what is no device at all."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert "'cuda' is not available" in refusal(folder, device="cuda")
    assert "'meta' is not available" in refusal(folder, device="meta")
    for device in ("gpu", "cuda:x", "", 1.5):
        assert "is not a device" in refusal(folder, device=device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert "'cuda:3' does not exist" in refusal(folder, device="cuda:3")
    assert "'mps' is not available" in refusal(folder, device="mps")


@pytest.mark.real_weights
def test_smollm2_logits_equal_those_of_transformers(smollm2: Path) -> None:
    """The real weights, in float32: the tiny random models have neither 30 layers nor 9 heads."""
    model = load_model(smollm2, weights="fp32")
    assert isinstance(model, LlamaModel)
    assert model.tokenizer is not None
    assert 2 in model.eos_token_ids
    assert_close(logits(model), reference(smollm2))


def test_auto_is_packed_fp16_on_a_cpu(folder: Path) -> None:
    assert load_model(folder).weights == "fp16"


def test_without_packed_kernels_one_line_says_what_is_used_instead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processors have no FBGEMM: the model must run all the same, and the user must know."""
    monkeypatch.setattr("slipstream.models.linear.library", lambda: None)
    monkeypatch.setattr("slipstream.models.linear.packed_kernels", lambda: False)
    for asked in ("auto", "int8"):
        with pytest.warns(UserWarning, match="packed .* using fp32"):
            assert load_model(folder, weights=asked).weights == "fp32"
