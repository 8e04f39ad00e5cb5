"""Kubernetes objects for an export: a kustomize base, an overlay, and a variant over several machines."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InputError
from slipstream.export.types import Document, Export
from slipstream.export.write import words
from slipstream.monitor.engines import ENGINES
from slipstream.monitor.rules import dashboard, groups
from slipstream.plan import Plan
from slipstream.yaml_text import Noted, comment, dump

_CONFIG, _WEIGHTS = "/config", "/weights"
_NAMESPACE_LABEL = "slipstream.dev"
#: Requests in progress, whatever the engine calls them; what the autoscaler goes by.
RUNNING = "slipstream_requests_running"


@dataclass(frozen=True)
class Cluster:
    """How the service is to stand in a cluster."""

    name: str
    replicas: int
    max_replicas: int
    nodes: int
    accelerators: int
    """Of one replica."""
    image: str | None
    storage: str
    target_revision: str
    draft_revision: str
    accelerator: str = "nvidia.com/gpu"


def check_name(name: str) -> None:
    """Refuse what Kubernetes would.

    Raises:
        InputError: it is no DNS label of at most 40 characters.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise InputError(f"--name {name!r} cannot name Kubernetes objects; use small letters, digits and hyphens")


def check_storage(size: str) -> None:
    """Refuse a size that Kubernetes would.

    Raises:
        InputError: it is no quantity.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:[KMGTPE]i?|k)?", size)
    if found is None or not float(found[1]):
        raise InputError(f"--storage {size!r} is no size; write one such as 200Gi")


def objects(plan: Plan, export: Export, cluster: Cluster) -> dict[str, str]:
    """Files by name, under ``kubernetes/``."""
    base = {
        "service.yaml": service(cluster),
        "weights.yaml": weights(cluster),
        "podmonitor.yaml": pod_monitor(export, cluster),
        "rules.yaml": prometheus_rule(export, cluster),
        "dashboard.yaml": dashboard_map(cluster),
    }
    if cluster.nodes > 1:
        base["leaderworkerset.yaml"] = leader_worker_set(plan, export, cluster)
    else:
        base["deployment.yaml"] = deployment(plan, export, cluster)
        base["autoscaler.yaml"] = autoscaler(plan, export, cluster)
        base["disruption.yaml"] = disruption(cluster)
    if export.files:
        base["config.yaml"] = config_map(export, cluster)
    listed = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": sorted(base)}
    found = {f"kubernetes/base/{name}": _file(document) for name, document in base.items()}
    found["kubernetes/base/kustomization.yaml"] = _file(listed)
    found["kubernetes/overlays/example/kustomization.yaml"] = _file(overlay(export, cluster))
    return found


def _file(document: Document) -> str:
    head = "\n".join(comment("Written by `slipstream export`; change it in an overlay.")) + "\n"
    return head + dump(document)


def _meta(cluster: Cluster, name: str = "") -> Document:
    return {"name": f"{cluster.name}{name}", "labels": _labels(cluster)}


def _labels(cluster: Cluster) -> Document:
    return {"app.kubernetes.io/name": cluster.name, "app.kubernetes.io/managed-by": "slipstream-export"}


def _selector(cluster: Cluster) -> Document:
    return {"app.kubernetes.io/name": cluster.name}


def _versions(export: Export, cluster: Cluster) -> Document:
    """Labels of a pod: a change of either version is a change of the pod, so that both roll together."""
    found = {f"{_NAMESPACE_LABEL}/target-version": label(cluster.target_revision)}
    if export.draft:
        found[f"{_NAMESPACE_LABEL}/draft-version"] = label(cluster.draft_revision)
    return found


def label(text: str) -> str:
    """``text`` as the value of a label.

    >>> label("refs/pr/7")
    'refs-pr-7'
    """
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-._") or "none"


def deployment(plan: Plan, export: Export, cluster: Cluster) -> Document:
    """The pods."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(cluster),
        "spec": {
            "replicas": cluster.replicas,
            "selector": {"matchLabels": _selector(cluster)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": Noted(
                    {"maxUnavailable": 0, "maxSurge": 1},
                    "a new pod, with target and draft of one version each, answers before an old one goes",
                ),
            },
            "progressDeadlineSeconds": 3600,
            "template": {
                "metadata": {
                    "labels": _labels(cluster) | _versions(export, cluster),
                    "annotations": _reasons(plan, export),
                },
                "spec": _pod(export, cluster, _command(export)),
            },
        },
    }


def _command(export: Export) -> list[str]:
    """The command as it is in the engine's image."""
    program, *rest = words(export, _CONFIG)
    return [export.image_program or program, *rest]


def _reasons(plan: Plan, export: Export) -> Document:
    """Where a pod's options come from."""
    return {
        f"{_NAMESPACE_LABEL}/plan": f"{plan.created}: {plan.verdict.sentence}",
        f"{_NAMESPACE_LABEL}/checked": export.checked,
    }


def _pod(export: Export, cluster: Cluster, command: list[str]) -> Document:
    return {
        "initContainers": [_fetch(export, cluster)],
        "containers": [_container(export, cluster, command)],
        "terminationGracePeriodSeconds": Noted(120, "answers in progress are finished"),
        "volumes": _volumes(export, cluster),
    }


def _volumes(export: Export, cluster: Cluster) -> list[Document]:
    found: list[Document] = [
        {"name": "weights", "persistentVolumeClaim": {"claimName": f"{cluster.name}-weights"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]
    if export.files:
        found.append({"name": "config", "configMap": {"name": f"{cluster.name}-config"}})
    return found


def _fetch(export: Export, cluster: Cluster) -> Document:
    """Has target and draft in the versions that belong together before the engine starts."""
    wanted = [(export.target, cluster.target_revision)]
    if export.draft:
        wanted.append((export.draft, cluster.draft_revision))
    return {
        "name": "weights",
        "image": cluster.image or export.image,
        "command": ["sh", "-ec", "\n".join(_wanted(export, name, revision) for name, revision in wanted) + "\n"],
        "workingDir": _WEIGHTS,
        "env": [{"name": "HF_HOME", "value": _WEIGHTS}],
        "volumeMounts": [{"name": "weights", "mountPath": _WEIGHTS}],
    }


def _wanted(export: Export, name: str, revision: str) -> str:
    """A shell line: a path in the volume is there, or a name of a hub is fetched in its version."""
    path = shlex.quote(name)
    if export.engine == "llama.cpp":
        return f"test -e {path} || {{ echo {shlex.quote(f'put {name} into the volume of weights')} >&2; exit 1; }}"
    return f"test -e {path} || hf download {path} --revision {shlex.quote(revision)}"


def _container(export: Export, cluster: Cluster, command: list[str]) -> Document:
    each = max(1, cluster.accelerators // cluster.nodes)
    accelerators = {} if export.cpu_only else {cluster.accelerator: str(each)}
    mounts = [{"name": "weights", "mountPath": _WEIGHTS}, {"name": "shm", "mountPath": "/dev/shm"}]
    if export.files:
        mounts.append({"name": "config", "mountPath": _CONFIG})
    ready = {"httpGet": {"path": export.health, "port": "http"}}
    return {
        "name": "engine",
        "image": cluster.image or export.image,
        "command": command,
        "workingDir": _WEIGHTS,
        "env": [
            {"name": "HF_HOME", "value": _WEIGHTS},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
            *({"name": name, "value": value} for name, value in export.environment.items()),
        ],
        "ports": [{"name": "http", "containerPort": export.port}],
        "startupProbe": ready | {"periodSeconds": 10, "failureThreshold": 180},
        "readinessProbe": ready | {"periodSeconds": 5, "failureThreshold": 3},
        "livenessProbe": ready | {"periodSeconds": 15, "failureThreshold": 6, "timeoutSeconds": 5},
        "resources": {
            "requests": {"cpu": "4", "memory": "16Gi"} | accelerators,
            **({"limits": accelerators} if accelerators else {}),
        },
        "volumeMounts": mounts,
    }


def service(cluster: Cluster) -> Document:
    """Where the pods are reached."""
    selector = _selector(cluster)
    if cluster.nodes > 1:
        selector |= {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(cluster),
        "spec": {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }


def weights(cluster: Cluster) -> Document:
    """The volume that target and draft are kept in; shared, so that a new pod need not fetch them again."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(cluster, "-weights"),
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": cluster.storage}}},
    }


def config_map(export: Export, cluster: Cluster) -> Document:
    """The engine's config files."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(cluster, "-config"),
        "data": dict(export.files),
    }


def autoscaler(plan: Plan, export: Export, cluster: Cluster) -> Document:
    """More pods where each has more requests than drafting pays for."""
    most, why = _requests_a_pod(plan, export)
    metric = {
        "type": "Pods",
        "pods": {
            "metric": Noted({"name": RUNNING}, "recorded in rules.yaml; needs an adapter of custom metrics"),
            "target": Noted({"type": "AverageValue", "averageValue": str(most)}, why),
        },
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": _meta(cluster),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": cluster.name},
            "minReplicas": cluster.replicas,
            "maxReplicas": cluster.max_replicas,
            "metrics": [metric],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        },
    }


def _requests_a_pod(plan: Plan, export: Export) -> tuple[int, str]:
    """The largest batch at which drafting still gains, and the reason."""
    gains = [b for b in plan.batches if b.k > 0 and b.speed_up.value > 1]
    if not gains or (export.draft is None and plan.verdict.k == 0):
        return max([plan.asked.batch, *(b.batch for b in plan.batches)]), "the largest batch that the plan looked at"
    best = max(gains, key=lambda b: b.batch)
    why = f"at {best.batch} requests at a time drafting still gains ({best.speed_up.value:.2f}x, {best.speed_up.how})"
    if plan.load and plan.load.crossing_rate:
        rate = plan.load.crossing_rate
        why += f"; from {rate.value:.3g} requests a second and server on plain decoding is faster ({rate.how})"
    return best.batch, why


def disruption(cluster: Cluster) -> Document:
    """Some pods stay when machines are drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _meta(cluster),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _selector(cluster)}},
    }


def leader_worker_set(plan: Plan, export: Export, cluster: Cluster) -> Document:
    """Replicas of several machines each (needs the LeaderWorkerSet controller)."""
    command = _command(export)
    leader, worker = _several(export, command)
    spec = _pod(export, cluster, leader)
    other = _pod(export, cluster, worker)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        del other["containers"][0][probe]
    metadata = {"labels": _labels(cluster) | _versions(export, cluster), "annotations": _reasons(plan, export)}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _meta(cluster),
        "spec": {
            "replicas": cluster.replicas,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "leaderWorkerTemplate": {
                "size": cluster.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"metadata": metadata, "spec": spec},
                "workerTemplate": {"metadata": metadata, "spec": other},
            },
        },
    }


def _several(export: Export, command: list[str]) -> tuple[list[str], list[str]]:
    """Commands of leader and workers.

    Raises:
        InputError: the engine is not spread over machines this way.
    """
    text = shlex.join(command)
    address, size, index = "$LWS_LEADER_ADDRESS", "$LWS_GROUP_SIZE", "$LWS_WORKER_INDEX"
    if export.engine == "vllm":
        leader = f"ray start --head --port=6379 && exec {text} --distributed-executor-backend ray"
        return ["sh", "-ec", leader], ["sh", "-ec", f"exec ray start --block --address={address}:6379"]
    if export.engine == "sglang":
        both = f"exec {text} --nnodes {size} --node-rank {index} --dist-init-addr {address}:20000"
        return ["sh", "-ec", both], ["sh", "-ec", both]
    raise InputError(
        f"--nodes above 1 is written for vllm and sglang; spread {export.engine} with its own launcher (mpirun, or "
        f"--rpc)"
    )


def pod_monitor(export: Export, cluster: Cluster) -> Document:
    """Has Prometheus (its operator) read every pod, with the versions as labels."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _meta(cluster),
        "spec": {
            "selector": {"matchLabels": _selector(cluster)},
            "podTargetLabels": [f"{_NAMESPACE_LABEL}/target-version", f"{_NAMESPACE_LABEL}/draft-version"],
            "podMetricsEndpoints": [{"port": "http", "path": export.metrics, "interval": "15s"}],
        },
    }


def prometheus_rule(export: Export, cluster: Cluster) -> Document:
    """The monitor's rules, and what the autoscaler goes by."""
    running = next(m.running for m in ENGINES if m.engine == export.engine)
    scaling = {
        "name": "slipstream-scaling",
        "rules": [{"record": RUNNING, "expr": f"sum by (namespace, pod) ({running})"}],
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": _meta(cluster),
        "spec": {"groups": [*groups(), scaling]},
    }


def dashboard_map(cluster: Cluster) -> Document:
    """The dashboard, where Grafana's sidecar finds it."""
    meta = _meta(cluster, "-dashboard")
    meta["labels"] = meta["labels"] | {"grafana_dashboard": "1"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta,
        "data": {"speculative-decoding.json": json.dumps(dashboard(), indent=1) + "\n"},
    }


def _image(image: str) -> tuple[str, Document]:
    """An image's name, and its version as kustomize has it.

    >>> _image("registry:5000/vllm:v1"), _image("registry:5000/vllm")
    (('registry:5000/vllm', {'newTag': 'v1'}), ('registry:5000/vllm', {'newTag': 'latest'}))
    """
    name, at, digest = image.partition("@")
    folder, slash, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{folder}{slash}{last}", {"digest": digest} if at else {"newTag": tag or "latest"}


def overlay(export: Export, cluster: Cluster) -> Document:
    """An example of what an environment changes: image, size, names."""
    patches: list[Any] = []
    if cluster.nodes == 1:
        patch = [{"op": "replace", "path": "/spec/minReplicas", "value": cluster.replicas}]
        target = {"kind": "HorizontalPodAutoscaler", "name": cluster.name}
        patches.append({"target": target, "patch": dump(patch)})
    name, change = _image(cluster.image or export.image)
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "llm",
        "resources": ["../../base"],
        "images": [{"name": name, **change}],
        **({"patches": patches} if patches else {}),
    }
