"""Each engine's own metrics, and how the counts of ``types`` follow from them.

Names and meanings were looked up in each engine's sources and documentation on ``CHECKED``. What an engine does not
count is derived where the others imply it: every round emits its accepted tokens and one more, so

    emitted = accepted + rounds

and an engine that counts tokens and accepted tokens tells its rounds, the ones without a draft included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from slipstream.errors import InputError
from slipstream.monitor.exposition import Sample, Scrape
from slipstream.monitor.types import Counts, Identity, Raw, Reading, Stream

#: When names and meanings were looked up.
CHECKED = "2026-11-30"


@dataclass(frozen=True)
class Metrics:
    """An engine's metric names by what they count; empty if it has no such metric. The page and the rules read it
    too.
    """

    engine: str
    versions: str
    """Those that the names were checked against."""
    marks: tuple[str, ...]
    """Metrics that only this engine has."""
    drafted: str = ""
    accepted: str = ""
    drafting_rounds: str = ""
    rounds: str = ""
    generated: str = ""
    """All tokens, those that reading a prompt yields included."""
    firsts: str = ""
    """Answers that have begun (or ended): each had one token that no round emitted."""
    seconds: str = ""
    """Decode time of answers; or whole time, where ``first_seconds`` is the time until the first token."""
    first_seconds: str = ""
    drafted_at: str = ""
    accepted_at: str = ""
    position: str = "position"
    """The label that holds the position."""
    first_position: int = 0
    k: str = ""
    """A gauge: draft tokens in each round now. Where drafts are not counted, drafted = rounds x k."""
    running: str = ""
    k_zero: str = ""
    """Rounds for which the engine itself chose to draft nothing."""
    model: tuple[str, ...] = ("model_name",)
    """Labels that name the model, the first that is there."""
    replica: tuple[str, ...] = ()
    drafter: str = ""
    """The label of ``drafted`` and ``accepted`` that names the drafter."""
    notes: tuple[str, ...] = ()
    """What its figures mean other than those of ``types``; for the documentation."""
    switch: str = ""
    """How to make it show them."""


VLLM = Metrics(
    engine="vllm",
    versions="0.9 to 0.33",
    marks=("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:spec_decode_num_drafts_total"),
    drafted="vllm:spec_decode_num_draft_tokens_total",
    accepted="vllm:spec_decode_num_accepted_tokens_total",
    drafting_rounds="vllm:spec_decode_num_drafts_total",
    generated="vllm:generation_tokens_total",
    firsts="vllm:time_to_first_token_seconds_count",
    seconds="vllm:request_decode_time_seconds_sum",
    accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    running="vllm:num_requests_running",
    replica=("engine",),
    notes=(
        "its `num_drafts` leaves out rounds without a draft, so its logged mean acceptance length is that of drafting "
        "rounds only; rounds here are generated tokens less first tokens less accepted ones",
        "it counts accepted tokens by position but not drafted ones: with n-gram or suffix drafts of varying length, "
        "acceptance at later positions is a lower bound",
        "decode time is added when an answer ends, tokens when they come",
        "without `--speculative-config` there are no such metrics at all",
    ),
    switch="always on; not with --disable-log-stats",
)

SGLANG = Metrics(
    engine="sglang",
    versions="0.5.6 to 0.5.23",
    marks=("sglang:generation_tokens_total", "sglang:num_running_reqs"),
    rounds="sglang:spec_verify_calls_total",
    generated="sglang:generation_tokens_total",
    firsts="sglang:num_requests_total",
    k="sglang:spec_num_steps",
    running="sglang:num_running_reqs",
    replica=("dp_rank",),
    notes=(
        "it has one cumulative counter for speculation, verification calls; accepted tokens are generated tokens less "
        "first tokens less calls, drafted tokens are calls times the steps in force",
        "its gauges `spec_accept_length` and `spec_accept_rate` are those of the last few batches; `spec_accept_rate` "
        "was accepted tokens with the bonus token over draft tokens before it became accepted over proposed drafts, "
        "which the metric's help text tells; both are used only where counters are missing",
        "with `--speculative-eagle-topk` above 1 drafts are trees: acceptance is then accepted tokens over steps, not "
        "over tree nodes",
        "its counters move when an answer ends",
        "there is no acceptance by position",
    ),
    switch="--enable-metrics",
)

TENSORRT_LLM = Metrics(
    engine="tensorrt-llm",
    versions="1.0 to 1.2.1 (JSON statistics), later (Prometheus counters, main of 2026-11)",
    marks=("trtllm_request_success_total", "trtllm_generation_tokens_total", "trtllm_num_requests_running"),
    drafted="trtllm_spec_decode_num_draft_tokens_total",
    accepted="trtllm_spec_decode_num_accepted_tokens_total",
    generated="trtllm_generation_tokens_total",
    firsts="trtllm_request_success_total",
    seconds="trtllm_request_decode_time_seconds_sum",
    drafted_at="trtllm_spec_decode_drafted_tokens_total",
    accepted_at="trtllm_spec_decode_accepted_tokens_total",
    position="token_position",
    running="trtllm_num_requests_running",
    notes=(
        "counters by position are added when an answer ends and need `return_perf_metrics: true`; the others are "
        "added each iteration and need `enable_iter_perf_stats: true`; those by position are used where there are both",
        "1.0 to 1.2 have no such counters; their `/metrics` is a JSON list of iterations that each reader takes away, "
        "so the monitor must be its only reader",
    ),
    switch="return_perf_metrics: true, enable_iter_perf_stats: true; /prometheus/metrics",
)

LLAMA_CPP = Metrics(
    engine="llama.cpp",
    versions="b9993 (no speculation counters), b11434 (with them; they came in August 2026)",
    marks=("llamacpp:tokens_predicted_total", "llamacpp:n_decode_total"),
    drafted="llamacpp:spec_decode_num_draft_tokens_total",
    accepted="llamacpp:spec_decode_num_accepted_tokens_total",
    drafting_rounds="llamacpp:spec_decode_num_drafts_total",
    generated="llamacpp:tokens_predicted_total",
    seconds="llamacpp:tokens_predicted_seconds_total",
    accepted_at="llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
    running="llamacpp:requests_processing",
    model=("model",),
    notes=(
        "it does not count answers, so the pass that reads a prompt is counted as a round: lengths are a little low "
        "where answers are short",
        "counters move when an answer ends",
        "builds without the counters tell tokens and passes only: length is tokens over slots in passes, and "
        "acceptance cannot be told (each answer's own `timings` has it)",
    ),
    switch="--metrics",
)

SLIPSTREAM = Metrics(
    engine="slipstream",
    versions="0.1",
    marks=("slipstream_info", "slipstream_rounds_total"),
    drafted="slipstream_draft_tokens_total",
    accepted="slipstream_accepted_tokens_total",
    drafting_rounds="slipstream_drafts_total",
    rounds="slipstream_round_draft_tokens_count",
    generated="slipstream_generated_tokens_total",
    firsts="slipstream_time_to_first_token_seconds_count",
    drafted_at="slipstream_draft_tokens_per_position_total",
    accepted_at="slipstream_accepted_tokens_per_position_total",
    seconds="slipstream_answer_seconds_sum",
    first_seconds="slipstream_time_to_first_token_seconds_sum",
    first_position=1,
    running="slipstream_running",
    k_zero="slipstream_round_draft_tokens_bucket",
    model=(),
    drafter="drafter",
    notes=(
        "it counts draft tokens and accepted ones by drafter and by position, and rounds by their number of draft "
        "tokens, without the pass that reads the prompt",
        "decode time is added when an answer ends, the time until the first token when that comes",
    ),
    switch="always on",
)

#: In the order in which ``auto`` tries them.
ENGINES = (SLIPSTREAM, VLLM, SGLANG, TENSORRT_LLM, LLAMA_CPP)


def find(name: str) -> Metrics:
    """An engine by name.

    Raises:
        InputError: there is none.
    """
    for metrics in ENGINES:
        if metrics.engine == name:
            return metrics
    raise InputError(f"--engine {name!r} is not known; use auto or one of {', '.join(m.engine for m in ENGINES)}")


def detect(scrape: Scrape) -> Metrics | None:
    """Whose metrics these are; None if nobody's."""
    return next((m for m in ENGINES if any(scrape.has(mark) for mark in m.marks)), None)


def read(metrics: Metrics, scrape: Scrape, time: float) -> Reading:
    """Sums of every stream in an answer."""
    raw: dict[Stream, Raw] = {}
    k: dict[Stream, float] = {}
    for stream, some in _split(metrics, scrape).items():
        raw[stream] = _raw(metrics, some)
        raw |= _by_drafter(metrics, stream, some)
        if metrics.k and (now := some.get(metrics.k)):
            k[stream] = max(s.value for s in now)
    return Reading(
        engine=metrics.engine,
        time=time,
        raw=raw,
        k=k,
        started=_sum(scrape.of("process_start_time_seconds")),
        identity=_identity(scrape),
        running=_sum(scrape.of(metrics.running)),
        blind=metrics is LLAMA_CPP and not scrape.has(metrics.drafted),
    )


def counts(reading: Reading, scrape: Scrape | None, stream: Stream, new: Raw) -> Counts:
    """What ``new``, added to the sums of a stream since the last look, means.

    Args:
        reading: this look.
        scrape: what it was read from, if it was a text.
        stream: one of ``reading.raw``.
        new: of ``Raw.since``.
    """
    if reading.blind:
        return Counts(emitted=new.generated, rounds=new.rounds, seconds=new.seconds)
    found = derive(new, reading.k.get(stream))
    if reading.engine == SGLANG.engine and scrape is not None and new.rounds is None:
        return _from_gauges(scrape, found)
    return found


def derive(new: Raw, k: float | None = None) -> Counts:
    """What is not counted follows from what is.

    >>> derive(Raw(generated=110, firsts=10, drafted=80, accepted=60)).rounds
    40
    """
    drafted, accepted, drafting = new.drafted, new.accepted, new.drafting_rounds
    if new.drafted_at:  # counted together with what was accepted there
        drafted, accepted = sum(new.drafted_at.values()), sum(new.accepted_at.values())
        drafting = new.drafted_at.get(1) if drafting is None else drafting
    emitted = None if new.generated is None else max(0, new.generated - (new.firsts or 0))
    rounds = new.rounds
    if accepted is None and emitted is not None and rounds is not None:
        accepted = max(0, emitted - rounds)
    if drafted is None and rounds is not None and k is not None:
        drafted, drafting = rounds * k, rounds
    if rounds is None and emitted is not None:
        # What a cap cuts off was accepted all the same: short answers would seem to have fewer rounds than drafts.
        rounds = max(0, emitted - (accepted or 0), drafting or 0)
    if emitted is None and rounds is not None and accepted is not None:
        emitted = rounds + accepted
    silent = (
        new.rounds is None or drafting == 0
    )  # no metrics of drafts at all, or a counter of drafts that stands still
    if drafted is None and new.generated is not None and silent:
        drafted, accepted, drafting = 0, 0, 0
    return Counts(
        emitted, rounds, drafting, drafted, accepted, new.drafted_at, new.accepted_at, new.seconds, new.k_zero
    )


def _split(metrics: Metrics, scrape: Scrape) -> dict[Stream, dict[str, list[Sample]]]:
    """Samples by stream (drafters together) and metric."""
    found: dict[Stream, dict[str, list[Sample]]] = {}
    for name in (*_names(metrics), *_GAUGES.get(metrics.engine, ())):
        for sample in scrape.of(name):
            found.setdefault(_stream(metrics, sample.labels), {}).setdefault(name, []).append(sample)
    return _joined(found)


def _joined(found: dict[Stream, dict[str, list[Sample]]]) -> dict[Stream, dict[str, list[Sample]]]:
    """A metric whose labels say less than others' (no replica) is part of the one stream that it can be of."""
    full = {s for s in found if s.model or s.replica}
    for partial in list(found):
        owners = [s for s in full if s != partial and _covers(partial, s)]
        if len(owners) == 1:
            for name, samples in found.pop(partial).items():
                found[owners[0]].setdefault(name, []).extend(samples)
            full.discard(partial)
    return found


def _covers(partial: Stream, other: Stream) -> bool:
    pairs = ((partial.model, other.model), (partial.replica, other.replica))
    return all(not a or a == b for a, b in pairs) and partial != other


def _stream(metrics: Metrics, labels: Mapping[str, str]) -> Stream:
    def first(names: Iterable[str]) -> str:
        return next((labels[n] for n in names if labels.get(n)), "")

    return Stream(first(metrics.model), first(metrics.replica))


def _by_drafter(metrics: Metrics, stream: Stream, some: Mapping[str, list[Sample]]) -> dict[Stream, Raw]:
    """Draft tokens and accepted ones of each drafter, where there are several; nothing else is told of one."""
    sums: dict[str, list[float]] = {}
    for i, name in enumerate((metrics.drafted, metrics.accepted)):
        for sample in some.get(name, ()) if metrics.drafter else ():
            sums.setdefault(sample.labels.get(metrics.drafter, ""), [0.0, 0.0])[i] += sample.value
    if len(sums) < 2:
        return {}
    return {replace(stream, drafter=name or "?"): Raw(drafted=d, accepted=a) for name, (d, a) in sums.items()}


def _names(metrics: Metrics) -> list[str]:
    roles = ("drafted", "accepted", "drafting_rounds", "rounds", "generated", "firsts", "seconds", "first_seconds")
    every = [getattr(metrics, role) for role in (*roles, "drafted_at", "accepted_at", "k", "k_zero")]
    return [name for name in dict.fromkeys(every) if name]


def _raw(metrics: Metrics, some: Mapping[str, list[Sample]]) -> Raw:
    def total(name: str) -> float | None:
        return _sum(some.get(name, ()))

    def by_position(name: str) -> dict[int, float]:
        sums: dict[int, float] = {}
        for sample in some.get(name, ()):
            label = sample.labels.get(metrics.position, "")
            if label.isdigit():
                place = int(label) - metrics.first_position + 1
                sums[place] = sums.get(place, 0.0) + sample.value
        return dict(sorted(sums.items()))

    whole, until_first = total(metrics.seconds), total(metrics.first_seconds)
    return Raw(
        drafted=total(metrics.drafted),
        accepted=total(metrics.accepted),
        drafting_rounds=total(metrics.drafting_rounds),
        rounds=_slots(some) if metrics is LLAMA_CPP else total(metrics.rounds),
        generated=total(metrics.generated),
        firsts=total(metrics.firsts),
        seconds=whole - until_first if whole is not None and until_first is not None else whole,
        k_zero=_sum(s for s in some.get(metrics.k_zero, ()) if s.labels.get("le") in ("0", "0.0")),
        drafted_at=by_position(metrics.drafted_at),
        accepted_at=by_position(metrics.accepted_at),
    )


def _sum(samples: Iterable[Sample]) -> float | None:
    values = [s.value for s in samples]
    return sum(values) if values else None


# --- where counters are missing ---------------------------------------------------------------------------------------

_LENGTH, _RATE = "sglang:spec_accept_length", "sglang:spec_accept_rate"
_BUSY, _PASSES = "llamacpp:n_busy_slots_per_decode", "llamacpp:n_decode_total"
_GAUGES = {SGLANG.engine: (_LENGTH, _RATE), LLAMA_CPP.engine: (_BUSY, _PASSES)}


def _slots(some: Mapping[str, list[Sample]]) -> float | None:
    """Of a llama.cpp without counters of drafts: slots in passes, added up."""
    busy, passes = _sum(some.get(_BUSY, ())), _sum(some.get(_PASSES, ()))
    return None if busy is None or passes is None or some.get(LLAMA_CPP.drafted) else busy * passes


def _from_gauges(scrape: Scrape, found: Counts) -> Counts:
    """Of an SGLang without its counter, from gauges that hold for the latest batches."""
    length, rate = _mean(scrape.of(_LENGTH)), _mean(scrape.of(_RATE))
    if not length or length < 1:
        return found
    rounds = (found.emitted or 0.0) / length
    accepted, drafted = rounds * (length - 1), None
    if rate:
        with_bonus = "accepted tokens" in scrape.help.get(_RATE, "")
        drafted = rounds * (length / rate - 1) if with_bonus else accepted / rate
    return replace(found, rounds=rounds, drafting_rounds=rounds, drafted=drafted, accepted=accepted)


def _mean(samples: Sequence[Sample]) -> float | None:
    return sum(s.value for s in samples) / len(samples) if samples else None


# --- TensorRT-LLM's list of iterations --------------------------------------------------------------------------------


def from_iterations(iterations: object, time: float) -> Reading:
    """What TensorRT-LLM's ``/metrics`` says: a list of iterations since it was last asked.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(iterations, list) or not all(map(_is_iteration, iterations)):
        raise InputError("the metrics are JSON, but no list of iterations; give the address of Prometheus' metrics")
    drafted = accepted = drafting = rounds = 0.0
    for entry in iterations:
        spec: dict[str, Any] = entry.get("specDecodingStats") or {}
        batch: dict[str, Any] = entry.get("inflightBatchingStats") or {}
        drafted += spec.get("numDraftTokens") or 0
        accepted += spec.get("numAcceptedTokens") or 0
        drafting += spec.get("numRequestsWithDraftTokens") or 0
        rounds += batch.get("numGenRequests") or spec.get("numRequestsWithDraftTokens") or 0
    raw = Raw(drafted, accepted, min(drafting, rounds), rounds)
    running = float((iterations[-1].get("numActiveRequests") or 0) if iterations else 0)
    return Reading(TENSORRT_LLM.engine, time, {Stream(): raw}, cumulative=False, running=running)


def _is_iteration(entry: object) -> bool:
    """Whether it is an object, and what is read of it are objects of finite numbers."""
    if not isinstance(entry, dict):
        return False
    parts = [entry.get(name) or {} for name in ("specDecodingStats", "inflightBatchingStats")]
    if not all(isinstance(part, dict) for part in parts):
        return False
    read = [parts[0].get(name) for name in _SPECULATIVE]
    read += [parts[1].get("numGenRequests"), entry.get("numActiveRequests")]
    return all(value is None or (isinstance(value, int | float) and isfinite(value)) for value in read)


_SPECULATIVE = ("numDraftTokens", "numAcceptedTokens", "numRequestsWithDraftTokens")


# --- which models -----------------------------------------------------------------------------------------------------

#: Metrics whose labels say which models run: name, then label by field of ``Identity``.
_INFO: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "slipstream_info",
        {
            "target": "target",
            "target_version": "target_version",
            "draft": "draft",
            "draft_version": "draft_version",
            "trained_for": "draft_trained_for",
            "engine_version": "version",
        },
    ),
    ("trtllm_model_config_info", {"target": "model"}),
    ("trtllm_speculative_config_info", {"draft": "draft_model"}),
)


def _identity(scrape: Scrape) -> Identity:
    known: dict[str, str] = {}
    for name, labels in _INFO:
        for sample in scrape.of(name):
            known |= {f: sample.labels[label] for f, label in labels.items() if sample.labels.get(label)}
    if "target" not in known:
        names = {s.labels["model_name"] for some in scrape.samples.values() for s in some if s.labels.get("model_name")}
        if len(names) == 1:
            known["target"] = names.pop()
    return Identity(**known)
