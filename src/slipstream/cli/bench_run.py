"""What ``bench`` does: check, load, measure, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from slipstream.cli.drafts import NONE, SUFFIX, is_model, members
from slipstream.cli.options import POLICIES, sampling_params
from slipstream.cli.pairs import check_room
from slipstream.cli.progress import follow
from slipstream.cli.run import INTERRUPTED
from slipstream.cli.screen import console, is_terminal, note, working
from slipstream.errors import InputError
from slipstream.measure import memory
from slipstream.measure.files import check_writable, write_whole

if TYPE_CHECKING:
    from slipstream.measure.bench import Bench, Contender, Measured
    from slipstream.measure.machine import Machine
    from slipstream.measure.peers import HFPeer, Peer, Server
    from slipstream.measure.prompts import BenchPrompt
    from slipstream.measure.summary import Summary
    from slipstream.models.base import Model
    from slipstream.models.load import Checkpoint
    from slipstream.speculative import SpeculativeDecoding
    from slipstream.types import SamplingParams

    Settings = dict[tuple[str, int | str], SpeculativeDecoding]

_TAKEN = ("target", "plain", SUFFIX)
_WIDTH = 120


@dataclass(frozen=True)
class BenchTask:
    """One call of ``bench``, as the user put it."""

    command: str
    model: str
    drafts: tuple[str, ...]
    ks: str
    rule: str
    prompts: str | None
    limit: int | None
    max_new_tokens: int
    repeats: int
    temperature: float
    ignore_eos: bool
    seed: int
    weights: str
    draft_weights: str
    device: str
    threads: int | None
    peers: tuple[str, ...]
    plot: str | None
    out: str | None
    as_json: bool
    no_color: bool

    @property
    def draft_models(self) -> dict[str, str]:
        """The draft models, by what reports call them: the last part of the path if that will do."""
        models = list(dict.fromkeys(m for draft in self.drafts for m in members(draft) if is_model(m)))
        short = [Path(d).name for d in models]
        clear = len(set(short)) == len(short) and not set(short) & set(_TAKEN)
        return dict(zip(short if clear else models, models, strict=True))


@dataclass(frozen=True)
class Plan:
    """A task whose words have been understood."""

    ks: tuple[int | str, ...]
    params: SamplingParams
    prompts: tuple[BenchPrompt, ...]
    peers: tuple[Peer, ...]
    servers: tuple[Server, ...]


def run(task: BenchTask) -> int:
    """Do it; the exit code.

    Raises:
        InputError: before anything is loaded if it can be known by then.
    """
    from slipstream.measure.bench import Measured, measure

    plan = check(task)
    bench = _load(task, plan)
    measured = Measured()
    interrupted = False
    try:
        follow(measure(bench, measured), bench.steps, task.no_color)
    except KeyboardInterrupt:
        interrupted = True
    _deliver(task, bench, measured, interrupted)
    for name, why in measured.failures.items():
        click.echo(f"slipstream: {name} dropped out: {' '.join(why.split())}", err=True)
    if interrupted:
        return INTERRUPTED
    return 1 if measured.failures else 0


# --- checks -----------------------------------------------------------------------------------------------------------


def check(task: BenchTask) -> Plan:
    """Refuse what cannot work, before anything is loaded."""
    ks = _parse_ks(task.ks)
    _check_numbers(task)
    if NONE in task.drafts:
        raise InputError("--draft none is measured always, as plain decoding; leave it out")
    if len({members(draft) for draft in task.drafts}) < len(task.drafts):
        raise InputError("--draft names the same draft twice; leave one out")
    for option, name in (("--out", task.out), ("--plot", task.plot)):
        if name is not None:
            check_writable(option, name)
    names = ("max_new_tokens", "temperature", "ignore_eos", "seed")
    params = sampling_params({name: getattr(task, name) for name in names})

    from slipstream.measure.peers import Server, ServerPeer, check_hf_peers, parse_peers
    from slipstream.measure.plot import check_plot
    from slipstream.measure.prompts import read_prompts

    if task.plot is not None:
        check_plot(task.plot)
    peers = parse_peers(task.peers)
    check_hf_peers(peers, task.model, next(iter(task.draft_models.values()), None))
    prompts = read_prompts(task.prompts, task.limit)
    servers = [Server(peer) for peer in peers if isinstance(peer, ServerPeer)]
    return Plan(ks, params, tuple(prompts), tuple(peers), tuple(servers))


def _parse_ks(text: str) -> tuple[int | str, ...]:
    words = {word.strip() for word in text.split(",")}
    numbers = {word for word in words if word.isdecimal() and int(word) > 0}
    if words - numbers - {*POLICIES}:
        raise InputError(f"-k {text!r} is no list of numbers of draft tokens; write for example -k 1,2,4,8,adaptive")
    return (*sorted({int(word) for word in numbers}), *(name for name in POLICIES if name in words))


def _check_numbers(task: BenchTask) -> None:
    for option, value, least in (
        ("--repeat", task.repeats, 1),
        ("--limit", task.limit, 1),
        ("--threads", task.threads, 1),
        ("--max-new-tokens", task.max_new_tokens, 2),
    ):
        if value is not None and value < least:
            raise InputError(f"{option} {value} is too few to measure anything with; use {least} or more")


# --- loading ----------------------------------------------------------------------------------------------------------


class _Weights:
    """What has been loaded, and how much memory each took."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.bytes: dict[str, int] = {}

    @contextmanager
    def loading(self, key: str) -> Iterator[None]:
        before = memory.used_bytes(self._device)
        yield
        self.bytes[key] = max(0, memory.used_bytes(self._device) - before)

    def spare(self, *used: str) -> int:
        """Memory of everything that a contender with ``used`` could do without."""
        return sum(size for key, size in self.bytes.items() if key not in used)


def _load(task: BenchTask, plan: Plan) -> Bench:
    """Open all checkpoints, encode the prompts, and only then read weights."""
    from slipstream.measure.bench import Bench
    from slipstream.measure.prompts import encoded
    from slipstream.speculative import SpeculativeDecoding

    opened = _open(task)
    prompts = encoded(plan.prompts, opened["target"].tokenizer, task.model)
    check_room(prompts, opened["target"])
    weights = _Weights(task.device)
    loaded: dict[str, Model] = {}
    for label, checkpoint in opened.items():
        with working(f"Loading {checkpoint.name}", task.no_color), weights.loading(label):
            loaded[label] = checkpoint.load()
    check_room(prompts, loaded["target"])  # again: some say their limit only now
    hf = _load_transformers(task, plan, weights)
    plain, settings = SpeculativeDecoding(loaded["target"]), _settings(task, plan, loaded)
    # Before they get clocks: what runs may be another view of the weights than what was loaded.
    target = plain.target
    drafts = _draft_models(task, settings)
    contenders = _own(plain, settings, weights) + _peers(task, plan, target, (hf, weights))
    return Bench(target, drafts, tuple(contenders), tuple(prompts), plan.params, task.repeats)


def _open(task: BenchTask) -> dict[str, Checkpoint]:
    """The target and the draft models with everything checked that can be without reading weights."""
    import torch

    from slipstream.drafters import check_names
    from slipstream.models.load import Kinds, open_models

    if task.threads is not None:
        torch.set_num_threads(task.threads)
    kinds = Kinds(task.weights, task.draft_weights, task.device)
    with working(f"Opening {task.model}", task.no_color):
        target, drafts = open_models(task.model, task.draft_models.values(), kinds)
    check_names((name for draft in task.drafts for name in members(draft)), target)
    return {"target": target, **{label: drafts[path] for label, path in task.draft_models.items()}}


def _load_transformers(task: BenchTask, plan: Plan, weights: _Weights) -> dict[str, Any]:
    """The checkpoints that the peers need in transformers, once for each type of weights."""
    from slipstream.measure.peers import HFPeer, load_hf

    wanted = [name for p in plan.peers if isinstance(p, HFPeer) for name in _hf_keys(task, p)]
    loaded: dict[str, Any] = {}
    for key in dict.fromkeys(wanted):
        model, dtype = key.rsplit(" in ", 1)
        with working(f"Loading {key} for transformers", task.no_color), weights.loading(key):
            loaded[key] = load_hf(model, dtype, task.device)
    return loaded


def _hf_keys(task: BenchTask, peer: HFPeer) -> list[str]:
    """What a peer runs with: the target, and the first draft model if it is to assist."""
    drafts = list(task.draft_models.values())[:1] if peer.mode == "assisted" else []
    return [f"{model} in {peer.dtype}" for model in (task.model, *drafts)]


def _settings(task: BenchTask, plan: Plan, loaded: dict[str, Model]) -> Settings:
    """Every draft, by what reports call it, with every k."""
    from slipstream.speculative import SpeculativeDecoding

    found: Settings = {}
    for draft in task.drafts:
        labels = _labels(task, draft)
        parts = [loaded.get(label, label) for label in labels]
        for k in plan.ks:
            draft_model = parts if len(parts) > 1 else parts[0]
            found[",".join(labels), k] = SpeculativeDecoding(loaded["target"], draft_model, k, rule=task.rule)
    return found


def _labels(task: BenchTask, draft: str) -> list[str]:
    """What reports call the members of ``draft``."""
    labels = {path: label for label, path in task.draft_models.items()}
    return [labels.get(member, member) for member in members(draft)]


def _draft_models(task: BenchTask, settings: Settings) -> dict[str, Model]:
    """The draft models as they are used, by what reports call them."""
    from slipstream.measure.bench import model_drafters

    found: dict[str, Model] = {}
    for draft in task.drafts:
        labels = _labels(task, draft)
        spec = next(s for (label, _), s in settings.items() if label == ",".join(labels))
        models = [label for label in labels if is_model(label)]
        found |= {label: one.model for label, one in zip(models, model_drafters(spec.drafter) or [], strict=True)}
    return found


def _own(plain: SpeculativeDecoding, settings: Settings, weights: _Weights) -> list[Contender]:
    """Plain decoding, and all ``settings``."""
    from slipstream.measure.bench import Own
    from slipstream.measure.runs import PLAIN

    found: list[Contender] = [Own(plain, PLAIN, spare_bytes=weights.spare("target"))]
    for (label, k), spec in settings.items():
        name = f"{label} {k}" if isinstance(k, str) else f"{label} k={k}"
        found.append(Own(spec, name, draft=label, spare_bytes=weights.spare("target", *label.split(","))))
    return found


def _peers(task: BenchTask, plan: Plan, target: Model, others: tuple[dict[str, Any], _Weights]) -> list[Contender]:
    """transformers and servers, in the order in which they were named."""
    from slipstream.measure.peers import HFModels, HFPeer, Transformers

    hf, weights = others
    servers = {server.name: server for server in plan.servers}
    found: list[Contender] = []
    for peer in plan.peers:
        if not isinstance(peer, HFPeer):
            found.append(servers[peer.name])
            continue
        keys = _hf_keys(task, peer)
        draft = hf[keys[1]] if len(keys) > 1 else None
        models = HFModels(hf[keys[0]], draft, target.tokenizer, target.eos_token_ids, weights.spare(*keys))
        found.append(Transformers(peer, models, next(iter(task.draft_models), None)))
    return found


# --- measuring and reporting ------------------------------------------------------------------------------------------


def _deliver(task: BenchTask, bench: Bench, measured: Measured, interrupted: bool) -> None:
    """Tables, the document, and files. Files come last: what is on the screen is not lost with a full disk."""
    from slipstream.cli.bench_report import Report, show
    from slipstream.measure.document import document
    from slipstream.measure.machine import describe_machine
    from slipstream.measure.plot import save_plot

    summary = _summary(bench, measured)
    machine = describe_machine(bench.target.device)
    stream: TextIO = sys.stderr if task.as_json else sys.stdout
    options = {} if is_terminal(stream) else {"width": _WIDTH}
    show(Report(bench, measured, summary, machine, interrupted), console(stream, task.no_color, **options))
    text = json.dumps(document(bench, measured, summary, _about(task, bench, machine, interrupted)))
    if task.as_json:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    saved = []
    if task.out is not None:
        write_whole(Path(task.out), lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
        saved.append(task.out)
    if task.plot is not None and summary.overall:
        title = f"{Path(task.model).name}, {len(bench.prompts)} prompts, {machine.cpu}"
        write_whole(Path(task.plot), lambda path: save_plot(path, summary.overall, bench.contenders, title))
        saved.append(task.plot)
    if saved:
        click.echo(f"Saved {' and '.join(saved)}.", err=True)
    note(f"\nNext: {_next(task, bench, summary)}")


def _summary(bench: Bench, measured: Measured) -> Summary:
    from slipstream.measure.bench import Own
    from slipstream.measure.summary import summarise

    own = [c.name for c in bench.contenders if c.kind == Own.kind]
    return summarise(measured.runs, own, [c.name for c in bench.contenders if c.name not in own])


def _about(task: BenchTask, bench: Bench, machine: Machine, interrupted: bool) -> dict[str, Any]:
    """On what and how it was measured."""
    return {
        "command": task.command,
        "machine": asdict(machine),
        "target": {"name": task.model, "weights": _weights_of(bench.target, task.weights), "device": task.device},
        "drafts": {
            label: {"name": path, "weights": _weights_of(bench.drafts[label], task.draft_weights)}
            for label, path in task.draft_models.items()
        },
        "rule": task.rule,
        "prompt_source": task.prompts or "built-in",
        "interrupted": interrupted,
    }


def _weights_of(model: Model, asked: str) -> str:
    return str(getattr(model, "weights", asked))


def _next(task: BenchTask, bench: Bench, summary: Summary) -> str:
    """The command that uses what was found."""
    best = next((c for c in bench.contenders if c.name == summary.best and c.draft is not None), None)
    if best is None:
        return "try another draft or other -k; `slipstream models` lists what is here."
    draft = task.draft_models.get(str(best.draft), best.draft)
    return f'slipstream generate {task.model} --draft {draft} -k {best.k} --chat --prompt "..." --compare'
