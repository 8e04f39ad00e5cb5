"""Exports: what each engine is told, why, what it cannot do, and that Kubernetes takes the objects."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from click.testing import CliRunner

from processes import free_port
from slipstream.cli.export import command
from slipstream.errors import InputError
from slipstream.export import llama_cpp, sglang, tensorrt_llm, vllm
from slipstream.export.choices import choose, schedule
from slipstream.export.kubernetes import Cluster, label, objects
from slipstream.export.types import Export, Support, Target
from slipstream.export.write import EXPORTERS, documents, words
from slipstream.plan import BatchPoint, Estimate, Plan, Sampling, load
from slipstream.yaml_text import Noted, dump, plain

PLAN_FILE = str(files("slipstream.data") / "plan.example.json")
MODEL, SUFFIX, CASCADE, EARLY = "models/draft-0.5b", "suffix", "suffix,models/draft-0.5b", "early-exit:8"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return load(PLAN_FILE)


def _with(plan: Plan, draft: str | None, k: int = 4, **asked: Any) -> Plan:
    """The plan with another recommendation."""
    action: Any = "speculate" if draft else "plain"
    verdict = replace(plan.verdict, draft=draft, k=k if draft else 0, action=action)
    return replace(plan, verdict=verdict, asked=replace(plan.asked, **asked))


def _options(export: Export) -> dict[str, str]:
    """Values by option."""
    found: dict[str, str] = {}
    for argument in export.arguments:
        name = argument.words[0]
        for word in argument.words[1:]:
            if word.startswith("--") and not word.startswith("--{"):
                name = word
            else:
                found[name] = word
    return found


def _speculative(export: Export) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(_options(export)["--speculative-config"])
    return config


# --- vLLM -------------------------------------------------------------------------------------------------------------


def test_vllm_runs_the_draft_model_with_k_by_batch_size(plan: Plan) -> None:
    export = vllm.export(plan, Target(draft_revision="v3"))
    assert _speculative(export) == {
        "method": "draft_model",
        "model": MODEL,
        "revision": "v3",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 15, 4], [16, 31, 1], [32, 32, 0]],
    }
    options = _options(export)
    assert (options["--dtype"], options["--max-num-seqs"], options["--max-model-len"]) == ("float16", "32", "32768")
    reason = export.arguments[-1].why
    assert "1.92x [1.80-2.03], predicted" in reason
    assert "acceptance 0.72 (measured here" in reason
    assert "16-31: 1, at 16 requests: 1.02x" in reason


def test_vllm_learned_things_version_by_version(plan: Plan) -> None:
    drawn = _with(plan, MODEL, sampling=Sampling(temperature=0.7))
    new = _speculative(vllm.export(drawn, Target(version="0.32.0")))
    assert (new["rejection_sample_method"], new["draft_sample_method"]) == ("block", "probabilistic")
    assert any("runner V2" in note for note in vllm.export(drawn, Target(version="0.32.0")).notes)
    by_token = vllm.export(_with(drawn, MODEL, rule="token"), Target(version="0.32.0"))
    assert _speculative(by_token)["rejection_sample_method"] == "standard"
    assert not any("runner V2" in note for note in by_token.notes)
    middle = vllm.export(drawn, Target(version="v0.25.1"))
    assert "rejection_sample_method" not in _speculative(middle)
    assert any("0.32" in note for note in middle.notes)
    older = vllm.export(drawn, Target(version="0.20.0"))
    assert "num_speculative_tokens_per_batch_size" not in _speculative(older)
    assert any("does not pay from 16 requests" in note for note in older.notes)
    oldest = vllm.export(plan, Target(version="0.14.0"))
    assert _speculative(oldest)["method"] == "ngram"
    assert any("run draft models" in note for note in oldest.notes)
    newer = vllm.export(plan, Target(version="0.99"))
    assert any("newer than 0.33.0" in warning for warning in newer.warnings)
    for wrong in ("0.5.0", "latest", "1;2"):
        with pytest.raises(InputError):
            vllm.export(plan, Target(version=wrong))


def test_vllm_copies_by_ngrams_or_suffixes(plan: Plan) -> None:
    copies = _with(plan, SUFFIX)
    assert _speculative(vllm.export(copies, Target()))["method"] == "ngram"
    export = vllm.export(copies, Target(copies="suffix"))
    assert _speculative(export) == {
        "method": "suffix",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 31, 4], [32, 32, 0]],
    }
    assert any("arctic-inference" in note for note in export.notes)


def test_plain_decoding_is_exported_plainly(plan: Plan) -> None:
    for engine, exporter in EXPORTERS.items():
        export = exporter(_with(plan, None), Target())
        text = " ".join(words(export, "f")) + "".join(export.files.values())
        if engine == "llama.cpp":
            assert "--spec-type none" in text
        else:
            assert "specul" not in text
        assert export.draft is None


# --- what an engine cannot do -----------------------------------------------------------------------------------------


def test_a_cascade_becomes_its_better_member_or_stays_one(plan: Plan) -> None:
    cascade = _with(plan, CASCADE)
    export = vllm.export(cascade, Target())
    assert _speculative(export)["model"] == MODEL
    assert any("one drafter at a time" in note and "1.92x" in note for note in export.notes)
    options = _options(llama_cpp.export(cascade, Target()))
    assert options["--spec-type"] == "ngram-simple,draft-simple"


@pytest.mark.parametrize("engine", EXPORTERS)
def test_early_exit_has_no_counterpart(plan: Plan, engine: str) -> None:
    export = EXPORTERS[engine](_with(plan, EARLY), Target())
    assert any("early exit" in note for note in export.notes)
    assert any(f"next best draft of the plan, {MODEL} at k = 4" in note for note in export.notes)
    assert export.draft is not None
    alone = replace(_with(plan, EARLY), candidates=())
    assert EXPORTERS[engine](alone, Target()).draft is None


def test_int8_weights_are_slipstreams_own(plan: Plan) -> None:
    packed = replace(plan, target=replace(plan.target, weights="int8"))
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        assert any("quantised before" in note for note in EXPORTERS[engine](packed, Target()).notes)
    assert words(llama_cpp.export(packed, Target()), "f")[2] == "target-7b-q8_0.gguf"


def test_what_acceptance_to_expect_under_the_engines_own_rule(plan: Plan) -> None:
    drawn = _with(plan, MODEL, sampling=Sampling(temperature=1.0))
    exact = replace(plan.acceptance[1], sampling=Sampling(temperature=1.0), rate=Estimate(0.61, "measured here"))
    export = llama_cpp.export(replace(drawn, acceptance=(*plan.acceptance, exact)), Target())
    assert any("expect about 0.61" in note for note in export.notes)


# --- SGLang, TensorRT-LLM, llama.cpp ----------------------------------------------------------------------------------


def test_sglang(plan: Plan) -> None:
    export = sglang.export(plan, Target(tensor_parallel=2))
    options = _options(export)
    assert options["--speculative-algorithm"] == "STANDALONE"
    assert (options["--speculative-num-steps"], options["--speculative-num-draft-tokens"]) == ("4", "5")
    assert options["--speculative-eagle-topk"] == "1"
    assert options["--tp-size"] == "2"
    assert "--enable-metrics" in words(export, "f")
    assert any("from 16 requests at a time on" in note for note in export.notes)
    copies = _options(sglang.export(_with(plan, SUFFIX), Target()))
    assert (copies["--speculative-algorithm"], copies["--speculative-num-draft-tokens"]) == ("NGRAM", "5")


def test_tensorrt_llms_schedule_changed_its_meaning(plan: Plan) -> None:
    """Up to 1.2 a key is the smallest batch of a k, from 1.3 on the largest; before 1.2 there is none."""

    def config(version: str) -> dict[str, Any]:
        export = tensorrt_llm.export(plan, Target(version=version))
        found: dict[str, Any] = yaml.safe_load(export.files["trtllm.yaml"])["speculative_config"]
        return found

    assert config("1.3.0")["draft_len_schedule"] == {15: 4, 31: 1}
    assert config("1.2.1")["draft_len_schedule"] == {1: 4, 16: 1, 32: 0}
    old = config("1.0.0")
    assert "draft_len_schedule" not in old
    assert old["max_concurrency"] == 31
    assert (old["decoding_type"], old["speculative_model_dir"]) == ("DraftTarget", MODEL)
    assert config("1.3.0")["speculative_model"] == MODEL
    assert "--extra_llm_api_options" in words(tensorrt_llm.export(plan, Target(version="1.0.0")), "f")


def test_llama_cpp(plan: Plan) -> None:
    export = llama_cpp.export(plan, Target(target="t.gguf", max_requests=4))
    options = _options(export)
    assert (options["-m"], options["--spec-draft-model"]) == ("t.gguf", "draft-0.5b-q8_0.gguf")
    assert (options["--spec-type"], options["--spec-draft-n-max"]) == ("draft-simple", "4")
    assert str(4 * 32768) in words(export, "f")
    [make] = [note for note in export.notes if "convert_hf_to_gguf" in note]
    assert "--outtype q8_0" in make


def test_llama_cpp_before_it_was_mended(plan: Plan) -> None:
    """Builds up to b10027 abort (an assertion) where a draft model's pass verifies more rows than there are slots."""
    old = llama_cpp.export(plan, Target(version="b10027", max_requests=2))
    assert _options(old)["--parallel"] == "10"
    assert any("aborts" in warning for warning in old.warnings)
    new = llama_cpp.export(plan, Target(version="b10028", max_requests=2))
    assert (_options(new)["--parallel"], new.warnings) == ("2", ())
    copies = llama_cpp.export(_with(plan, SUFFIX), Target(version="b10027", max_requests=2))
    assert (_options(copies)["--parallel"], copies.warnings) == ("2", ())


# --- schedules --------------------------------------------------------------------------------------------------------


def test_a_schedule_has_no_gaps_and_holds_up_to_the_next_point(plan: Plan) -> None:
    def gain(value: float) -> Estimate:
        return Estimate(value, "predicted from costs")

    batches = tuple(BatchPoint(b, MODEL, k, gain(s)) for b, k, s in ((4, 3, 1.5), (16, 1, 1.1), (64, 0, 1.0)))
    plan = replace(plan, batches=batches, asked=replace(plan.asked, batch=4))
    found = schedule(plan, plan.draft, 3, 100)
    assert [(a, b, k) for a, b, k, _ in found] == [(1, 15, 3), (16, 63, 1), (64, 100, 0)]
    assert schedule(plan, plan.draft, 3, 8) == ()
    assert choose(plan, "vllm", Target(max_requests=20)).ks == (3, 1)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", EXPORTERS)
def test_the_script_says_what_the_command_is(plan: Plan, engine: str, tmp_path: Path) -> None:
    """Run with a program that prints its arguments: the same words, whatever quotes and blanks are in them."""
    export = EXPORTERS[engine](plan, Target(target="my models/it's $HOME.gguf"))
    for name, text in documents(plan, export).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    printer = tmp_path / "bin" / export.program
    printer.parent.mkdir()
    printer.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n', encoding="utf-8")
    printer.chmod(0o755)
    environment = os.environ | {"PATH": f"{printer.parent}:{os.environ['PATH']}"}
    ran = subprocess.run(["sh", "launch.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == words(export, str(tmp_path))[1:]
    for argument in export.arguments:
        if argument.why:
            assert argument.why.split()[0] in (tmp_path / "launch.sh").read_text(encoding="utf-8")


def test_yaml_with_comments_is_yaml() -> None:
    value = {
        "a": Noted({"b": [1, "x: y", None, True]}, "why: because"),
        "text": "one\ntwo\n",
        "no end": "one\n\n  two",
        "list": [{"k": [[1, 2], {}]}, [], "#no comment"],
        "yes": "no",
        "on": {"off": None},
        1: "number",
        "2": "text",
    }
    assert yaml.safe_load(dump(value)) == plain(value)


@pytest.mark.parametrize("text", ["0.33.0", "v0.33.0", "0.33.0.post1", "0.33"])
def test_versions(text: str) -> None:
    assert Support("x", "0.1", "0.33.0", "").find(text)[2] == ()


def test_a_version_may_say_how_it_was_built(plan: Plan) -> None:
    """As the CPU build of vLLM calls itself; it was refused."""
    export = vllm.export(plan, Target(version="0.32.0+cpu"))
    assert (export.version, export.image) == ("0.32.0", "vllm/vllm-openai:v0.32.0")


@pytest.mark.parametrize("engine", list(EXPORTERS))
def test_what_an_engine_does_not_take_is_said(plan: Plan, engine: str) -> None:
    """--tensor-parallel, --memory-share, --copies and revisions did nothing with some engines, and nothing said so."""
    plan = replace(plan, target=replace(plan.target, device="cuda"))
    given = {
        "tensor_parallel": "7",
        "memory_share": "0.37",
        "copies": "suffix",
        "target_revision": "rev-t",
        "draft_revision": "rev-d",
    }
    for name, value in given.items():
        typed: Any = {"tensor_parallel": 7, "memory_share": 0.37}.get(name, value)
        for draft in (MODEL, SUFFIX):
            if name == ("draft_revision" if draft == SUFFIX else "copies"):
                continue  # of no meaning there for anybody
            export = EXPORTERS[engine](_with(plan, draft), Target(**{name: typed}))
            reasons = [a.why for a in export.arguments if name == "tensor_parallel"]
            config = [json.dumps(yaml.safe_load(text)) for text in export.files.values()]
            text = "\n".join([*words(export, "f"), *config, *reasons])
            said = any(f"--{name.replace('_', '-')} has no effect with {engine}" in note for note in export.notes)
            assert (value in text) != said, (name, draft)


@pytest.mark.parametrize("name", ["it's $(here) and `there`", "a;b&c|d", 'quoted "twice" \\ \u00e9', "a: b # c"])
@pytest.mark.parametrize("engine", list(EXPORTERS))
def test_odd_names_are_names_everywhere(plan: Plan, engine: str, name: str, tmp_path: Path) -> None:
    """In the script, in config files, in Kubernetes' objects and in the commands of the README."""
    target, draft = f"{name} t.gguf", f"{name} d.gguf"
    plan = replace(_with(plan, MODEL), target=replace(plan.target, model=target))
    export = EXPORTERS[engine](plan, Target(target=target, draft=draft))
    for file, text in documents(plan, export).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    program = tmp_path / export.program
    program.write_text('#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done\n', encoding="utf-8")
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["sh", tmp_path / "launch.sh"], capture_output=True, env=path, check=True)
    assert ran.stdout.decode().split("\0")[:-1] == words(export, str(tmp_path))[1:]
    told = ran.stdout.decode() + "".join(
        json.dumps(yaml.safe_load(t), ensure_ascii=False) for t in export.files.values()
    )
    assert target in told or json.dumps(target, ensure_ascii=False)[1:-1] in told
    assert any(name in told for name in (draft, json.dumps(draft)[1:-1], json.dumps(draft, ensure_ascii=False)[1:-1]))
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    [audit] = [line for line in readme.splitlines() if line.startswith("slipstream audit")]
    assert shlex.split(audit)[2] == target
    cluster = Cluster("llm", 1, 2, 1, 1, None, "1Gi", "main", "main")
    for text in objects(plan, export, cluster).values():
        yaml.safe_load(text)


@pytest.mark.parametrize(
    ("image", "wanted"),
    [
        ("registry:5000/team/vllm:v1", {"name": "registry:5000/team/vllm", "newTag": "v1"}),
        ("registry:5000/team/vllm", {"name": "registry:5000/team/vllm", "newTag": "latest"}),
        ("vllm", {"name": "vllm", "newTag": "latest"}),
        ("vllm@sha256:0a", {"name": "vllm", "digest": "sha256:0a"}),
    ],
)
def test_images_are_named_as_kustomize_has_them(plan: Plan, image: str, wanted: Any) -> None:
    """A registry's port was taken for a tag, and an image without one had no name."""
    cluster = Cluster("llm", 1, 2, 1, 1, image, "1Gi", "main", "main")
    overlay = objects(plan, vllm.export(plan, Target()), cluster)["kubernetes/overlays/example/kustomization.yaml"]
    assert yaml.safe_load(overlay)["images"] == [wanted]


def test_the_command_writes_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "deploy"
    run = CliRunner().invoke(
        command, [PLAN_FILE, "--engine", "vllm", "--out", str(out), "--kubernetes", "--json"], standalone_mode=False
    )
    assert run.return_value == 0, run.output
    document = json.loads(run.stdout)
    assert document["command"][:3] == ["vllm", "serve", "models/target-7b"]
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == document["files"]
    assert os.access(out / "launch.sh", os.X_OK)
    assert load(str(out / "plan.json")) == load(PLAN_FILE)
    more = ["--target", "/w/t", "--draft", "/w/d", "--force"]
    CliRunner().invoke(command, [PLAN_FILE, "--engine", "vllm", "--out", str(out), *more], standalone_mode=False)
    named = load(str(out / "plan.json"))
    assert (named.target.model, named.draft and named.draft.members[0].model) == ("/w/t", "/w/d")
    again = CliRunner().invoke(command, [PLAN_FILE, "--engine", "vllm", "--out", str(out)], standalone_mode=False)
    assert isinstance(again.exception, InputError)
    assert "--force" in str(again.exception)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--name", "Bad_Name"), "--name"),
        (("--storage", "200 GB"), "--storage"),
        (("--storage", "0"), "--storage"),
        (("--replicas", "0"), "--replicas"),
        (("--nodes", "3", "--tensor-parallel", "4"), "does not divide"),
        (("--memory-share", "2"), "--memory-share"),
        (("--version", "0.1"), "older than"),
    ],
)
def test_what_cannot_be_used_is_refused(more: tuple[str, ...], part: str, tmp_path: Path) -> None:
    run = CliRunner().invoke(
        command, [PLAN_FILE, "--engine", "vllm", "--out", str(tmp_path / "o"), *more], standalone_mode=False
    )
    assert isinstance(run.exception, InputError)
    assert part in str(run.exception)
    assert not (tmp_path / "o").exists()


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def _cluster(**changes: Any) -> Cluster:
    usual = Cluster("llm", 2, 8, 1, 1, None, "200Gi", "abc", "refs/pr/7")
    return replace(usual, **changes)


def _objects(plan: Plan, engine: str, cluster: Cluster) -> dict[str, Any]:
    export = EXPORTERS[engine](plan, Target(tensor_parallel=cluster.accelerators))
    return {name: yaml.safe_load(text) for name, text in objects(plan, export, cluster).items()}


#: What the operators' own schemas ask for at least.
_CUSTOM: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "PodMonitor": ("monitoring.coreos.com/v1", ("selector", "podMetricsEndpoints")),
    "PrometheusRule": ("monitoring.coreos.com/v1", ("groups",)),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", ("replicas", "leaderWorkerTemplate", "rolloutStrategy")),
}


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("engine", EXPORTERS)
def test_kubernetes_takes_every_object(plan: Plan, engine: str, nodes: int) -> None:
    import kubernetes_validate

    if nodes > 1 and engine in ("tensorrt-llm", "llama.cpp"):
        with pytest.raises(InputError, match="--nodes"):
            _objects(plan, engine, _cluster(nodes=2, accelerators=2))
        return
    found = _objects(plan, engine, _cluster(nodes=nodes, accelerators=nodes))
    kinds = set()
    for name, document in found.items():
        kind = document["kind"]
        kinds.add(kind)
        if kind in _CUSTOM:
            version, needed = _CUSTOM[kind]
            assert document["apiVersion"] == version
            assert set(needed) <= set(document["spec"]), name
        elif kind != "Kustomization":
            kubernetes_validate.validate(document, "1.33", strict=True)
    pods = "Deployment" if nodes == 1 else "LeaderWorkerSet"
    assert {pods, "Service", "PodMonitor", "PrometheusRule", "ConfigMap", "PersistentVolumeClaim"} <= kinds
    for template in _templates(found):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p"} | template["metadata"],
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, "1.33", strict=True)


def _templates(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for document in found.values():
        if document["kind"] == "Deployment":
            yield document["spec"]["template"]
        if document["kind"] == "LeaderWorkerSet":
            template = document["spec"]["leaderWorkerTemplate"]
            yield from (template["leaderTemplate"], template["workerTemplate"])


def test_kubernetes_would_refuse_a_wrong_object() -> None:
    import kubernetes_validate

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}},
            "1.33",
            strict=True,
        )


def test_target_and_draft_roll_together(plan: Plan) -> None:
    """Another draft version is another pod template, and the pod fetches both before the engine starts."""
    one = _objects(plan, "vllm", _cluster())["kubernetes/base/deployment.yaml"]["spec"]
    two = _objects(plan, "vllm", _cluster(draft_revision="v2"))["kubernetes/base/deployment.yaml"]["spec"]
    assert one["template"] != two["template"]
    assert one["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    script = one["template"]["spec"]["initContainers"][0]["command"][-1]
    assert "hf download models/target-7b --revision abc" in script
    assert f"hf download {MODEL} --revision refs/pr/7" in script
    labels = one["template"]["metadata"]["labels"]
    assert (labels["slipstream.dev/target-version"], labels["slipstream.dev/draft-version"]) == ("abc", "refs-pr-7")
    assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", label("-x" * 60 + "/"))


def test_pods_are_added_where_drafting_stops_to_gain(plan: Plan) -> None:
    scaler = objects(plan, vllm.export(plan, Target()), _cluster())["kubernetes/base/autoscaler.yaml"]
    assert "at 16 requests at a time drafting still gains (1.02x" in " ".join(re.sub(r"\n *#", "", scaler).split())
    metric = yaml.safe_load(scaler)["spec"]["metrics"][0]["pods"]
    assert metric["target"]["averageValue"] == "16"
    recorded = _objects(plan, "vllm", _cluster())["kubernetes/base/rules.yaml"]["spec"]["groups"][-1]["rules"]
    assert recorded == [
        {"record": metric["metric"]["name"], "expr": "sum by (namespace, pod) (vllm:num_requests_running)"}
    ]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_the_overlay(plan: Plan, tmp_path: Path) -> None:
    for name, text in objects(plan, tensorrt_llm.export(plan, Target()), _cluster()).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    folder = tmp_path / "kubernetes" / "overlays" / "example"
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    documents_ = list(yaml.safe_load_all(built.stdout))
    assert {d["metadata"]["namespace"] for d in documents_} == {"llm"}
    assert "HorizontalPodAutoscaler" in {d["kind"] for d in documents_}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_exported_rules(plan: Plan, tmp_path: Path) -> None:
    rule = _objects(plan, "sglang", _cluster())["kubernetes/base/rules.yaml"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule["spec"]), encoding="utf-8")
    assert (
        subprocess.run(["promtool", "check", "rules", str(tmp_path / "rules.yml")], capture_output=True).returncode == 0
    )


# --- llama.cpp itself -------------------------------------------------------------------------------------------------

LLAMA_SERVER = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
llama = pytest.mark.skipif(LLAMA_SERVER is None, reason="no llama-server on PATH or in LLAMA_SERVER")


@llama
@pytest.mark.parametrize("draft", [MODEL, SUFFIX, CASCADE, None])
def test_llama_servers_help_has_every_flag(plan: Plan, draft: str | None) -> None:
    assert LLAMA_SERVER is not None
    told = subprocess.run([LLAMA_SERVER, "--help"], capture_output=True, text=True).stdout
    export = llama_cpp.export(_with(plan, draft), Target())
    for word in words(export, "f"):
        if word.startswith("-"):
            assert re.search(rf"(^|[ ,]){re.escape(word)}([ ,]|$)", told, re.MULTILINE), word
    types = _options(export)["--spec-type"].split(",")
    [line] = [line for line in told.splitlines() if "--spec-type none" in line]
    assert set(types) <= set(line.split()[1].split(","))


@llama
@pytest.mark.real_weights
@pytest.mark.parametrize("draft", [MODEL, SUFFIX])
def test_llama_server_starts_with_the_exported_flags_and_answers(
    plan: Plan, draft: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gguf = _smollm2_gguf(smollm2, tmp_path_factory)
    built = subprocess.run([str(LLAMA_SERVER), "--version"], capture_output=True, text=True)
    number = re.search(r"version: (\d+)", built.stderr + built.stdout)
    # Builds without git say 0; they get what is safe for the oldest one that is known.
    version = number[1] if number and int(number[1]) else llama_cpp.SUPPORT.oldest
    target = Target(version, str(gguf), str(gguf), max_requests=1, port=free_port(), host="127.0.0.1")
    small = replace(_with(plan, draft), target=replace(plan.target, max_positions=512, threads=1))
    export = llama_cpp.export(small, target)
    assert LLAMA_SERVER is not None
    log = tmp_path_factory.mktemp("log") / "log"
    with log.open("wb") as stream:
        server = subprocess.Popen([LLAMA_SERVER, *words(export, "f")[1:]], stdout=stream, stderr=subprocess.STDOUT)
        try:
            _wait(export.port, server, log)
            answer = _ask(export.port)
            assert answer["content"]
            if draft == MODEL:  # the target is its own draft
                assert answer["timings"]["draft_n_accepted"] > 0
            from slipstream.monitor.scrape import Source

            reading = Source(f"http://127.0.0.1:{export.port}").look().reading
            assert reading.engine == "llama.cpp"
            assert sum(raw.generated or 0 for raw in reading.raw.values()) >= 16
        finally:
            server.terminate()
            server.wait(20)


def _smollm2_gguf(folder: Path, factory: pytest.TempPathFactory) -> Path:
    from gguf import GGMLQuantizationType
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import gguf_files

    path = factory.getbasetemp() / "smollm2.gguf"
    if not path.exists():
        metadata = gguf_files.tokenizer_metadata(AutoTokenizer.from_pretrained(folder), pre="smollm")
        model = AutoModelForCausalLM.from_pretrained(folder)
        gguf_files.write_gguf(path, model, kind=GGMLQuantizationType.F16, metadata=metadata)
    return path


def _wait(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace")[-2000:])


def _ask(port: int) -> dict[str, Any]:
    body = json.dumps({"prompt": "Once upon a time", "n_predict": 24, "temperature": 0}).encode()
    request = Request(f"http://127.0.0.1:{port}/completion", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
        return answer
