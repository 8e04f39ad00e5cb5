"""Pairs of models, told apart from configurations and tokenizers; and the memory they need, predicted and measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from conftest import byte_tokenizer, save_checkpoint
from slipstream import InputError
from slipstream.cli.main import cli
from slipstream.measure.doctor import Finding, Setting, compare, examine
from slipstream.measure.engines import CONDITIONS, Facts, read_combinations, that_apply
from slipstream.measure.footprint import Load, Need, cache_bytes, need, peak, step_bytes, together
from slipstream.measure.peak import Peak, Trial, measure_peak
from slipstream.models.describe import Description, describe, llama_shapes
from slipstream.models.huggingface import HuggingFaceModel
from slipstream.models.load import load_model
from slipstream.models.native.build import library
from tokenizers_of_tests import gpt2_like, qwen_like

LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


def bare(folder: Path, config: Any, tokenizer: Any = None, **changes: Any) -> Path:
    """A checkpoint without weights."""
    config.save_pretrained(folder)
    if changes:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def small(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 3,
    }
    return LlamaConfig(**(sizes | changes))


def setting(**changes: Any) -> Setting:
    given: dict[str, Any] = {
        "context": 1024,
        "batch": 1,
        "k": 4,
        "weights": "fp16",
        "draft_weights": "fp16",
        "on_cpu": True,
        "memory": 10**12,
        "memory_how": "memory assumed: --memory",
        "text": "The tide comes in, and the tide goes out.",
    }
    return Setting(**(given | changes))


def of(findings: tuple[Finding, ...], topic: str) -> Finding:
    (found,) = (f for f in findings if f.topic == topic)
    return found


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, args)], prog_name="slipstream")


@pytest.fixture(scope="module")
def pair_70b(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A 70B target and a 1B draft: configuration and tokenizer files only."""
    folder, tokenizer = tmp_path_factory.mktemp("pair"), byte_tokenizer()
    target = bare(folder / "llama-70b", LlamaConfig(**LLAMA_70B), tokenizer)
    return target, bare(folder / "llama-1b", LlamaConfig(**LLAMA_1B), tokenizer)


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Description, Description]:
    folder, tokenizer = tmp_path_factory.mktemp("small"), byte_tokenizer()
    draft = small(num_hidden_layers=1, hidden_size=16, intermediate_size=32)
    return (
        describe(str(bare(folder / "target", small(), tokenizer))),
        describe(str(bare(folder / "draft", draft, tokenizer))),
    )


# --- without weights --------------------------------------------------------------------------------------------------


def test_a_70b_pair_on_a_laptop(pair_70b: tuple[Path, Path]) -> None:
    target, draft = pair_70b
    result = invoke(target, "--draft", draft, "--device", "cuda", "--memory", 160, "--context", 8192, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["models"]["target"]["parameters"] == 70_553_706_496
    assert found["models"]["draft"]["parameters"] == 1_235_814_400
    assert not found["models"]["target"]["has_weights"]
    bf16 = found["memory"]["by_weights"]["bf16"]
    assert bf16["target"]["weights"] == 2 * 70_553_706_496
    assert bf16["target"]["cache"] == 2 * 80 * 8 * 128 * 8192 * 2
    assert invoke(target, "--draft", draft, "--memory", 100).exit_code == 1


def test_the_report_ends_with_verdict_lines(pair_70b: tuple[Path, Path]) -> None:
    target, draft = pair_70b
    result = invoke(target, "--draft", draft, "--memory", 100, "--engine", "transformers")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    (blocker,) = (line for line in lines if line.startswith("blocker"))
    assert "memory" in blocker
    assert "use lighter weights" in blocker
    assert "[predicted from shapes, with fp16 and int8 weights; memory assumed: --memory]" in blocker
    assert lines[-1].startswith("It cannot be used as asked. 1 blocker, ")


@pytest.mark.parametrize(
    "config",
    [
        small(),
        small(tie_word_embeddings=True, head_dim=16),
        small(attention_bias=True),
        Qwen2Config(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
        Qwen3Config(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8),
    ],
    ids=["llama", "tied", "biased", "qwen2", "qwen3"],
)
def test_shapes_without_weights_are_those_of_the_weights(config: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = llama_shapes(config.to_dict())
    if config.attention_bias if hasattr(config, "attention_bias") else False:
        wanted = {n: s for n, s in wanted.items() if not n.endswith("o_proj.bias")}
        found = {n: s for n, s in found.items() if not n.endswith("o_proj.bias")}
    assert found == wanted


def test_models_outside_the_family_are_counted_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    found = describe(str(bare(tmp_path / "gpt2", config)))
    assert (found.ours, found.obstacle, found.max_positions) == (False, None, 128)
    assert found.parameters > 300 * 32
    assert cache_bytes(found, 10, 4) == 2 * 2 * 32 * 10 * 4


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    for args, fragment in (((tmp_path,), "no-such-thing"), (("/no/such/folder",), "/no/such/folder")):
        result = invoke(*args)
        assert result.exit_code == 2
        assert fragment in result.stderr


def test_sizes_that_no_model_has(tmp_path: Path) -> None:
    """A model of -3 layers was said to need -12.6 MB of cache."""
    result = invoke(bare(tmp_path / "model", small(), byte_tokenizer(), num_hidden_layers=-3))
    assert result.exit_code == 2
    assert "num_hidden_layers -3" in result.stderr


# --- vocabularies -----------------------------------------------------------------------------------------------------


def test_identical_and_padded(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    a = describe(str(bare(tmp_path / "a", small(), tokenizer)))
    b = describe(str(bare(tmp_path / "b", small(vocab_size=320), tokenizer)))
    assert (compare(a, a, "x").kind, compare(a, b, "x").kind) == ("identical", "padded")
    assert compare(a, b, "x").mass == 1.0
    assert of(examine(a, b, setting()).findings, "vocabulary").level == "ok"


def test_a_later_model_of_the_family_has_more_tokens(tmp_path: Path) -> None:
    longer = byte_tokenizer()
    longer.add_tokens(["tide"])
    target = describe(str(bare(tmp_path / "a", small(), longer)))
    draft = describe(str(bare(tmp_path / "b", small(), byte_tokenizer())))
    found = compare(target, draft, "tide tide x")
    assert (found.kind, found.num_differing, found.target_ids - found.same) == ("same family", 0, 1)
    ids = longer("tide tide x", add_special_tokens=False)["input_ids"]
    assert found.mass == 1 - ids.count(longer.convert_tokens_to_ids("tide")) / len(ids)


def test_permuted_vocabularies_of_one_size(tmp_path: Path) -> None:
    reverse = byte_tokenizer(order=lambda tokens: tokens[::-1])
    target = describe(str(bare(tmp_path / "a", small(), byte_tokenizer())))
    draft = describe(str(bare(tmp_path / "b", small(), reverse)))
    found = compare(target, draft, "The tide.")
    ours, theirs = byte_tokenizer().get_vocab(), reverse.get_vocab()
    texts = {i: t for t, i in ours.items()}, {i: t for t, i in theirs.items()}
    unlike = [i for i in sorted(texts[0]) if texts[0][i] != texts[1][i]]
    assert found.kind == "different"
    assert (found.num_differing, found.last_differing) == (len(unlike), unlike[-1])
    assert found.differing == tuple((i, texts[0][i], texts[1][i]) for i in unlike[:5])
    assert found.mass == 1.0
    finding = of(examine(target, draft, setting()).findings, "vocabulary")
    assert finding.level == "warning"
    assert f"id {unlike[0]} is" in finding.what


def test_two_families_share_by_bytes_and_by_text(tmp_path: Path) -> None:
    target = describe(str(bare(tmp_path / "a", small(vocab_size=800), qwen_like())))
    draft = describe(str(bare(tmp_path / "b", small(vocab_size=500), gpt2_like())))
    found = compare(target, draft, "The tide comes in.")
    assert found.kind == "different"
    assert 256 < found.shared < found.draft_ids
    assert 0 < found.mass <= 1
    assert found.same < found.shared


def test_strangers_are_a_blocker(tmp_path: Path) -> None:
    from tokenizers_of_tests import of_tokens

    target = describe(str(bare(tmp_path / "a", small(), byte_tokenizer())))
    draft = describe(str(bare(tmp_path / "b", small(), of_tokens([f"x{i}" for i in range(290)]))))
    assert compare(target, draft, "The tide.").obstacle is not None
    assert examine(target, draft, setting()).blocked


def test_without_a_tokenizer_it_says_what_it_assumes(tmp_path: Path) -> None:
    target = describe(str(bare(tmp_path / "a", small(), byte_tokenizer())))
    draft = describe(str(bare(tmp_path / "b", small())))
    assert "taken to mean" in of(examine(target, draft, setting()).findings, "vocabulary").what


# --- the other checks -------------------------------------------------------------------------------------------------


def test_a_sound_pair(plain_pair: tuple[Description, Description]) -> None:
    found = examine(*plain_pair, setting())
    assert {f.level for f in found.findings} == {"ok"}
    assert not found.blocked


def test_chat_templates_that_render_differently(tmp_path: Path) -> None:
    other = byte_tokenizer()
    other.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    target = describe(str(bare(tmp_path / "a", small(), byte_tokenizer())))
    draft = describe(str(bare(tmp_path / "b", small(), other)))
    finding = of(examine(target, draft, setting()).findings, "chat template")
    assert finding.level == "warning"
    assert "'[What is a tide?]" in finding.what
    other.chat_template = None
    other.save_pretrained(tmp_path / "c")
    bare(tmp_path / "c", small())
    assert (
        "the target has" in of(examine(target, describe(str(tmp_path / "c")), setting()).findings, "chat template").what
    )


def test_special_tokens_that_differ(tmp_path: Path, plain_pair: tuple[Description, Description]) -> None:
    other: PreTrainedTokenizerFast = byte_tokenizer()
    other.eos_token = "<s>"
    draft = describe(str(bare(tmp_path / "b", small(eos_token_id=1), other)))
    finding = of(examine(plain_pair[0], draft, setting()).findings, "special tokens")
    assert finding.level == "warning"
    assert "eos_token '<|im_end|>' and '<s>'" in finding.what


def test_contexts(tmp_path: Path, plain_pair: tuple[Description, Description]) -> None:
    target, draft = plain_pair
    assert of(examine(target, draft, setting(context=4097)).findings, "context").level == "blocker"
    short = describe(str(bare(tmp_path / "short", small(max_position_embeddings=1024), byte_tokenizer())))
    assert of(examine(target, short, setting(context=1020)).findings, "draft's context").level == "ok"
    assert of(examine(target, short, setting(context=1021)).findings, "draft's context").level == "warning"


def test_recurrent_models_cannot_roll_back(tmp_path: Path, plain_pair: tuple[Description, Description]) -> None:
    config = MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4)
    recurrent = describe(str(bare(tmp_path / "mamba", config, byte_tokenizer())))
    found = examine(recurrent, None, setting())
    assert found.blocked
    line = of(found.findings, "target's cache")
    assert "MambaForCausalLM" in line.what
    assert "choose" not in line.what
    assert line.do.startswith("choose a model whose layers")
    assert of(examine(plain_pair[0], recurrent, setting()).findings, "draft's cache").level == "blocker"


def test_k_against_a_drafts_block(tmp_path: Path, plain_pair: tuple[Description, Description]) -> None:
    draft = describe(str(bare(tmp_path / "block", small(), byte_tokenizer(), block_size=4)))
    assert not examine(plain_pair[0], draft, setting(k=4)).blocked
    assert of(examine(plain_pair[0], draft, setting(k=5)).findings, "k").do == "use -k 4 or less"


def test_weights_and_devices(plain_pair: tuple[Description, Description]) -> None:
    target, draft = plain_pair
    assert (
        of(examine(target, draft, setting(draft_weights="int8", on_cpu=False)).findings, "weights").level == "blocker"
    )
    assert of(examine(target, draft, setting(weights="bf16")).findings, "weights").level == "warning"
    assert of(examine(target, target, setting()).findings, "size").level == "warning"
    assert of(examine(target, draft, setting()).findings, "size").level == "ok"


@pytest.mark.parametrize(
    ("stated", "bits", "low", "high"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4, 38e9, 42e9),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4, 38e9, 42e9),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, 70e9, 74e9),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4, 36e9, 42e9),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None}}},
            },
            8,
            70e9,
            74e9,
        ),
        ({"quant_method": "awq", "bits": "4", "group_size": math.inf, "w_bit": math.inf}, 4, 36e9, 42e9),
        ({"quant_method": "fp8", "bits": True}, 8, 70e9, 74e9),
    ],
)
def test_a_quantised_checkpoint_without_weights_needs_what_its_bits_say(
    tmp_path: Path, stated: dict[str, Any], bits: int, low: float, high: float
) -> None:
    """A 70B checkpoint of four bits was said to need 141 GB, so that a machine which it fits was refused."""
    target = bare(tmp_path / "t", LlamaConfig(**LLAMA_70B), byte_tokenizer(), quantization_config=stated)
    draft = bare(tmp_path / "d", LlamaConfig(**LLAMA_1B), byte_tokenizer())
    found = json.loads(invoke(target, "--draft", draft, "--device", "cuda", "--memory", 80, "--json").stdout)
    assert low < found["memory"]["by_weights"]["bf16"]["target"]["weights"] < high
    lines = {f["topic"]: f for f in found["findings"]}
    assert f"({stated['quant_method']}, {bits} bits)" in lines["weights"]["what"]
    assert lines["memory"]["level"] != "blocker"


def test_a_mixture_reads_the_experts_that_a_token_is_sent_to(tmp_path: Path) -> None:
    """Its draft's size was compared with all experts, of which a step reads a few."""
    config = MixtralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    target = describe(str(bare(tmp_path / "moe", config, byte_tokenizer())))
    everything = need(target, "bf16", Load(1, 1, 1, on_cpu=False)).weights
    idle = 2 * 6 * (3 * 32 * 64) * 2  # two layers, six experts of three matrices, two bytes
    assert step_bytes(target, "bf16", on_cpu=False) == pytest.approx(everything - idle, abs=2)
    draft = describe(str(bare(tmp_path / "draft", small(), byte_tokenizer())))
    found = of(
        examine(target, draft, setting(k=2, weights="bf16", draft_weights="bf16", on_cpu=False)).findings, "experts"
    )
    assert "2 of 8 experts, a verification of 3 rows up to 6" in found.what


def test_latent_attention_caches_its_latents(tmp_path: Path) -> None:
    """They were counted as keys and values of every head."""
    config = DeepseekV3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    model = describe(str(bare(tmp_path / "latent", config)))
    with torch.no_grad():
        cache = DeepseekV3ForCausalLM(config)(torch.arange(10)[None], use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert cache_bytes(model, 10, 4) == 4 * held


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("falcon", {}),
        ("falcon", {"multi_query": False}),
        ("gpt_bigcode", {}),
        ("gemma3_text", {}),
        ("gemma4_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32}),
        ("gemma4_text", {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}),
    ],
)  # fmt: skip
def test_caches_of_families_that_share_heads_or_whose_layers_differ(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    """One head for all counted as one for each, 71 times as much for Falcon 7B; Gemma 4 was a traceback."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 128, "vocab_size_per_layer_input": 64}
    sizes |= {"hidden_size_per_layer_input": 8, "sliding_window": 8} if "gemma" in kind else {}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16} if "gemma" in kind else {}
    config = CONFIG_MAPPING[kind](**(sizes | changes))
    model = HuggingFaceModel(AutoModelForCausalLM.from_config(config).float())
    cache = model.new_cache()
    model.forward(list(range(10)), cache, 1)
    kept = [t for layer in cache.past.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    held = 4 * sum(t.numel() for t in kept if isinstance(t, torch.Tensor))
    config.save_pretrained(tmp_path / "model")
    assert cache_bytes(describe(str(tmp_path / "model")), 10, 4) == held
    assert 10 * model.position_bytes == held


@pytest.mark.parametrize(("room", "level"), [(0.99, "blocker"), (1.01, "warning"), (2.0, "ok")])
def test_memory_against_what_there_is(plain_pair: tuple[Description, Description], room: float, level: str) -> None:
    needed = examine(*plain_pair, setting()).predicted_peak
    assert of(examine(*plain_pair, setting(memory=int(needed * room))).findings, "memory").level == level


def test_every_line_says_what_to_do_and_how_it_is_known(pair_70b: tuple[Path, Path]) -> None:
    found = json.loads(invoke(*pair_70b[:1], "--draft", pair_70b[1], "--memory", 1, "--json").stdout)
    for finding in found["findings"]:
        assert finding["how"].startswith(("measured", "predicted from", "assumed"))
        assert finding["do"] or finding["level"] == "ok"


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (("-k", 0), "-k 0"),
        (("--context", 0), "--context 0"),
        (("--memory", 0), "--memory 0"),
        (("--memory", "inf"), "--memory inf"),
        (("--engine", "none"), "'none'"),
        (("--text", "/no/such/text"), "/no/such/text"),
        (("--measure",), "has none"),
    ],
)
def test_options_without_a_meaning(pair_70b: tuple[Path, Path], args: tuple[object, ...], fragment: str) -> None:
    result = invoke(pair_70b[0], *args)
    assert result.exit_code == 2
    assert fragment in result.stderr


def test_a_tokenizer_with_more_ids_than_the_target_has_rows(tmp_path: Path) -> None:
    """Nothing was said, and the first text with such an id had no embedding."""
    target = describe(str(bare(tmp_path / "target", small(vocab_size=100), byte_tokenizer())))
    found = of(examine(target, None, setting()).findings, "tokenizer")
    assert found.level == "warning"
    assert "only 100 rows" in found.what


def test_layers_beside_a_whole_model_do_not_limit_k(
    tmp_path: Path, plain_pair: tuple[Description, Description]
) -> None:
    """Models that were trained to predict several tokens say with how many layers; as a draft they go on by passes."""
    folder = bare(tmp_path / "several", small(), byte_tokenizer(), num_nextn_predict_layers=1)
    assert not examine(plain_pair[0], describe(str(folder)), setting(k=4)).blocked


def test_drafts_that_are_not_one_model(plain_pair: tuple[Description, Description]) -> None:
    """`suffix` was looked for on the hub."""
    target, draft = (str(model.path) for model in plain_pair)
    assert invoke(target, "--draft", "suffix").exit_code == 0
    assert invoke(target, "--draft", "early-exit:1").exit_code == 0
    both = invoke(target, "--draft", f"suffix,{draft}")
    assert "identical" in both.stdout
    assert f"--drafts suffix+{draft}" in both.stderr
    for given, fragment in (
        ("early-exit:9", "of its 2 layers"),
        (f"{draft},{target}", "not one model"),
        ("none", "none"),
    ):
        result = invoke(target, "--draft", given)
        assert result.exit_code == 2
        assert fragment in result.stderr


# --- engines ----------------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> Facts:
    given: dict[str, Any] = {
        "target_rows": 300,
        "draft_rows": 300,
        "tokenizers_differ": False,
        "texts_differ_from_5": False,
        "bos_differs": False,
        "can_roll_back": True,
        "batch": 1,
        "target_quantised": False,
        "draft_quantised": False,
    }
    return Facts(**(given | changes))


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("combination = 5", "no [[combination]] tables"),
        ("combination = [1]", "no [[combination]] tables"),
        ("[combination]\nengine = 'x'", "no [[combination]] tables"),
        ("[[combination]]\nengine = 5\nwhen = 'always'", "engine = 5"),
        ("[[combination]]\nengine = 'x'\nwhen = []", "when = []"),
    ],
)
def test_tables_of_another_layout(tmp_path: Path, text: str, fragment: str) -> None:
    """Each was a traceback."""
    rest = "".join(f"\n{entry} = 'note'" for entry in ("severity", "what", "do", "date", "source"))
    (tmp_path / "engines.toml").write_text(text + rest)
    with pytest.raises(InputError) as raised:
        read_combinations(str(tmp_path / "engines.toml"))
    assert fragment in str(raised.value)


def test_every_combination_has_a_date_a_source_and_something_to_do() -> None:
    table = read_combinations()
    assert {row.engine for row in table} == {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "transformers"}
    for row in table:
        assert len(row.date) == 10
        assert row.do
        assert row.source


@pytest.mark.parametrize(
    ("change", "engines"),
    [
        ({}, set()),
        ({"draft_rows": 320}, {"vLLM"}),
        ({"draft_rows": 428}, {"vLLM"}),
        ({"draft_rows": 429}, {"vLLM", "llama.cpp"}),
        ({"tokenizers_differ": True, "texts_differ_from_5": True}, {"vLLM", "TensorRT-LLM", "llama.cpp"}),
        ({"can_roll_back": False}, {"llama.cpp", "transformers"}),
        ({"batch": 8}, {"TensorRT-LLM", "transformers"}),
        ({"bos_differs": True}, {"llama.cpp"}),
        ({"target_quantised": True}, {"SGLang"}),
        ({"target_quantised": True, "draft_quantised": True}, set()),
    ],
)
def test_engines_that_refuse_a_pair(change: dict[str, Any], engines: set[str]) -> None:
    rows = that_apply(facts(**change), read_combinations())
    assert {row.engine for row in rows if row.severity != "note"} == engines


def test_what_is_put_before_a_text_counts_not_the_name_of_a_bos(tmp_path: Path) -> None:
    target = describe(str(bare(tmp_path / "a", small(vocab_size=800), gpt2_like())))
    draft = describe(str(bare(tmp_path / "b", small(vocab_size=800), byte_tokenizer())))
    table = [row for row in read_combinations() if row.when == "BOS differs"]
    assert examine(target, draft, setting(), table).engines == tuple(table)
    assert examine(draft, draft, setting(), table).engines == ()
    nameless = gpt2_like.__wrapped__()
    nameless.bos_token = "<|im_start|>"
    named = describe(str(bare(tmp_path / "c", small(vocab_size=800), nameless)))
    assert examine(target, named, setting(), table).engines == ()


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "engines.toml"
    row = 'engine="mine"\nseverity="note"\nwhat="a"\ndo="b"\ndate="2026-01-01"\nsource="c"\n'
    file.write_text(f'[[combination]]\nwhen="always"\n{row}')
    assert [r.engine for r in read_combinations(str(file))] == ["mine"]
    for text, fragment in (
        (f'[[combination]]\nwhen="never"\n{row}', "'never'"),
        ('[[combination]]\nengine="mine"\n', "other entries"),
        ("[[", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=fragment):
            read_combinations(str(file))
    assert set(CONDITIONS) >= {r.when for r in read_combinations()}


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_that_the_decoder_holds(tmp_path: Path, weights: str, tied: bool) -> None:
    """Byte for byte, with native kernels; torch's packed formats do not tell their size."""
    if library() is None:
        pytest.skip("no native kernels here")
    folder = save_checkpoint(tmp_path / "m", byte_tokenizer(), hidden_size=64, tie_word_embeddings=tied)
    model: Any = load_model(folder, weights=weights)
    products = [p for layer in model._layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    held = sum(t.nbytes for p in (*products, model._head) for t in (p.weight, p.scale, p.bias) if t is not None)
    held += sum(v.nbytes for layer in model._layers for v in (layer.attention_norm, layer.mlp_norm))
    held += model._norm.nbytes + (model._table.nbytes if model._table is not None else 0)
    assert need(describe(str(folder)), weights, Load(16, 1, 5)).weights == held


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_what_the_decoder_says(tmp_path: Path, tied: bool) -> None:
    folder = save_checkpoint(tmp_path / "m", byte_tokenizer(), hidden_size=64, vocab_size=304, tie_word_embeddings=tied)
    model: Any = load_model(folder, weights="fp32")
    assert step_bytes(describe(str(folder)), "fp32", on_cpu=True) == model.weight_bytes


def test_a_cache_is_as_large_as_predicted(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", byte_tokenizer())
    model = load_model(folder, weights="fp16")
    cache: Any = model.new_cache()
    cache.reserve(256)
    assert cache.store.nbytes == cache_bytes(describe(str(folder)), 256, 4)
    assert need(describe(str(folder)), "fp16", Load(256, 3, 5)).cache == 3 * cache.store.nbytes


def test_models_of_a_cascade_are_all_held() -> None:
    """Only the largest was counted."""
    a, b = Need(10, 15, 3, 2), Need(20, 22, 1, 5)
    assert together([a, b]) == Need(weights=30, loading=32, cache=4, activations=5)
    assert together([a]) == a
    assert together([]) is None


def test_more_of_anything_needs_more_memory(plain_pair: tuple[Description, Description]) -> None:
    target, draft = plain_pair
    base = need(target, "fp16", Load(512, 1, 5))
    assert need(target, "fp32", Load(512, 1, 5)).weights > base.weights > need(target, "int8", Load(512, 1, 5)).weights
    assert need(target, "fp16", Load(1024, 1, 5)).cache == 2 * base.cache
    assert need(target, "fp16", Load(512, 64, 5)).activations > base.activations
    assert peak(base, need(draft, "fp16", Load(512, 1, 1))) > peak(base, None)


def test_the_measured_peak_is_near_the_predicted_one(tmp_path: Path) -> None:
    """Large enough that the weights, not the odd page, decide; long enough that the caches do their part.

    A batch was predicted and never measured: the line said ok whatever came out.
    """
    sizes = {"vocab_size": 60_000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    folder = save_checkpoint(tmp_path / "m", byte_tokenizer(), max_position_embeddings=4096, **sizes)
    model = describe(str(folder))
    predicted = peak(need(model, "fp16", Load(2048, 8, 5)), None)
    assert predicted > 1.5 * peak(need(model, "fp16", Load(2048, 1, 5)), None)
    found = measure_peak(Trial(((str(folder), "fp16"),), 2048, 4, batch=8))
    assert isinstance(found, Peak), found
    assert math.isclose(predicted, found.bytes, rel_tol=0.10)


def test_a_trial_that_fails_says_why() -> None:
    found = measure_peak(Trial((("/no/such/model", "fp16"),), 16, 4))
    assert isinstance(found, str)
    assert "/no/such/model" in found


@pytest.mark.real_weights
def test_measured_on_the_command_line(smollm2: Path) -> None:
    result = invoke(smollm2, "--measure", "--context", 256, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    predicted, measured = (found["memory"][f"{p}_peak"] for p in ("predicted", "measured"))
    assert math.isclose(predicted["value"], measured["bytes"], rel_tol=0.10)
    assert measured["how"] == "measured here"
