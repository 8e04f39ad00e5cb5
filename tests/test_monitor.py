"""The monitor: one definition for every engine, resets, state, alarms, what is told to others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import metrics_of_tests as fake
from metrics_of_tests import History, Pages
from slipstream.cli.monitor import command
from slipstream.cli.monitor_report import document
from slipstream.errors import InputError, SlipstreamError
from slipstream.measure.expectation import Costs
from slipstream.measure.expectation import speed_up as expected_speed_up
from slipstream.monitor import drift
from slipstream.monitor.engines import ENGINES, counts, derive, detect, find, from_iterations, read
from slipstream.monitor.exposition import line, parse
from slipstream.monitor.scrape import Source
from slipstream.monitor.store import Kept, Store
from slipstream.monitor.stream import Expected, speed_up
from slipstream.monitor.types import Counts, Raw, Stream, conditional, rates
from slipstream.monitor.watch import Monitor, Options, Report

AT = [0.9, 0.8, 0.75, 0.7]


@pytest.fixture
def pages() -> Iterator[Pages]:
    with fake.serve() as found:
        yield found


# --- the text format --------------------------------------------------------------------------------------------------


def test_rounds_are_never_fewer_than_drafts() -> None:
    """By vLLM 0.32, four answers: the cap cut accepted tokens off, and 58 drafts seemed to be of 53 rounds."""
    seen = derive(Raw(generated=152, firsts=4, drafted=174, accepted=95, drafting_rounds=58))
    assert (seen.emitted, seen.rounds) == (148, 58)


def test_text_is_read_as_the_client_library_reads_it() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = (
        "# HELP a What it is.\n# TYPE a counter\na_total 3\n\n"
        'b{x="1",y="quote \\" slash \\\\ line \\n end"} -1.5e3 1700000000\n'
        'c_bucket{le="+Inf",} 7\nd{empty=""} NaN\ne{z="}"} +Inf\n' + fake.vllm(History().ran(10, 4, AT, answers=2))
    )
    theirs = {
        (s.name, tuple(sorted(s.labels.items()))): repr(float(s.value))
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    ours = {
        (name, tuple(sorted(s.labels.items()))): repr(float(s.value))
        for name, some in parse(text).samples.items()
        for s in some
    }
    assert ours == theirs
    assert parse(text).help["a"] == "What it is."


@pytest.mark.parametrize("text", ["<html>", 'a{b="c} 1', "a", "a{b=1} 2", "a x"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SlipstreamError, match="line 1"):
        parse(text)


def test_a_line_is_read_back() -> None:
    [sample] = parse(line("a", {"b": 'x"\\\n'}, 1.5)).of("a")
    assert (sample.labels, sample.value) == ({"b": 'x"\\\n'}, 1.5)


# --- engines ----------------------------------------------------------------------------------------------------------

WRITERS: dict[str, Callable[[History], str]] = {
    "vllm": fake.vllm,
    "sglang": fake.sglang,
    "tensorrt-llm": fake.tensorrt_llm,
    "llama.cpp": fake.llama_cpp,
    "slipstream": fake.slipstream,
}


def _between(write: Callable[[History], str], change: Callable[[History], History]) -> Counts:
    """What an engine's metrics say of a change."""
    history = History().ran(1000, 4, AT, answers=20, plain=50)
    before = parse(write(history))
    metrics = detect(before)
    assert metrics is not None
    first = read(metrics, before, 0.0)
    after = parse(write(change(history)))
    second = read(metrics, after, 10.0)
    [stream] = [s for s in second.raw if not s.drafter]
    return counts(second, after, stream, second.raw[stream].since(first.raw[stream]))


@pytest.mark.parametrize("engine", WRITERS)
def test_every_engine_says_the_same_of_the_same(engine: str) -> None:
    """Rounds without a draft count as rounds, the passes that read prompts do not."""
    found = _between(WRITERS[engine], lambda h: h.ran(500, 4, AT, answers=0, plain=0 if engine == "sglang" else 100))
    plain = 0 if engine == "sglang" else 100
    accepted = 450 + 360 + 270 + 189
    assert found.rounds == 500 + plain
    assert found.drafting_rounds == 500
    assert (found.drafted, found.accepted) == (2000, accepted)
    assert found.emitted == 500 + plain + accepted
    seen = rates(found)
    assert seen.acceptance == pytest.approx(accepted / 2000)
    assert seen.length == pytest.approx(1 + accepted / (500 + plain))
    assert seen.drafting == pytest.approx(500 / (500 + plain))
    if engine != "sglang":
        assert seen.at == pytest.approx({1: 0.9, 2: 0.8, 3: 0.75, 4: 0.7})
        assert found.seconds == pytest.approx(0.02 * 600)


def test_first_tokens_are_no_rounds() -> None:
    found = _between(fake.vllm, lambda h: h.ran(100, 2, [0.5], answers=30))
    assert (found.rounds, found.emitted) == (100, 100 + 50 + 25)


def test_llama_cpp_cannot_tell_reading_a_prompt_from_a_round() -> None:
    found = _between(fake.llama_cpp, lambda h: h.ran(100, 2, [0.5], answers=30))
    assert found.rounds == 130


def test_old_llama_cpp_tells_lengths_only() -> None:
    found = _between(lambda h: fake.llama_cpp(h, counters=False), lambda h: h.ran(100, 2, [0.5], answers=10))
    assert (found.rounds, found.drafted, found.accepted, found.drafting_rounds) == (110, None, None, None)
    assert rates(found).acceptance is None
    assert rates(found).length == pytest.approx((10 + 100 + 75) / 110)


@pytest.mark.parametrize("old", [False, True])
def test_old_sglang_tells_by_gauges_of_either_meaning(old: bool) -> None:
    """``spec_accept_rate`` once counted the bonus token; the help text tells which it is."""
    found = _between(lambda h: fake.sglang(h, counter=False, old=old), lambda h: h.ran(1000, 4, AT))
    assert found.rounds == pytest.approx(1000, rel=0.06)  # gauges hold for both stretches together
    assert rates(found).acceptance == pytest.approx((900 + 720 + 540 + 378) / 4000, rel=0.06)


def test_sglang_with_another_k_in_between() -> None:
    """Drafted tokens are those of the rounds since the last look with the k of now, never a negative number."""
    history = History().ran(1000, 4, AT)
    first = read(find("sglang"), parse(fake.sglang(history, k=7)), 0.0)
    after = parse(fake.sglang(history.ran(100, 3, AT), k=3))
    second = read(find("sglang"), after, 1.0)
    [stream] = second.raw
    assert counts(second, after, stream, second.raw[stream].since(first.raw[stream])).drafted == 300


def test_vllm_without_speculation_drafts_nothing() -> None:
    found = _between(lambda h: fake.vllm(h, speculation=False), lambda h: h.ran(0, 0, [], plain=500))
    assert (found.emitted, found.drafted, found.rounds) == (500, 0, 500)


def test_tensorrt_llms_iterations() -> None:
    spec = {"numDraftTokens": 8, "numAcceptedTokens": 5, "numRequestsWithDraftTokens": 2}
    entries = [{"specDecodingStats": spec, "inflightBatchingStats": {"numGenRequests": 3}, "numActiveRequests": 3}] * 10
    reading = from_iterations(entries, 0.0)
    found = derive(reading.raw[Stream()])
    assert (found.rounds, found.drafting_rounds, found.drafted, found.accepted) == (30, 20, 80, 50)
    assert not reading.cumulative
    with pytest.raises(InputError, match="list of iterations"):
        from_iterations({"a": 1}, 0.0)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {"specDecodingStats": 3},
        {"specDecodingStats": {"numDraftTokens": "x"}},
        {"specDecodingStats": {"numAcceptedTokens": float("nan")}},
        {"inflightBatchingStats": {"numGenRequests": []}},
        {"numActiveRequests": "many"},
    ],
)
def test_other_json_is_refused(entry: Any) -> None:
    """It was a traceback."""
    with pytest.raises(InputError, match="no list of iterations"):
        from_iterations([entry], 0.0)


def test_drafters_are_told_apart() -> None:
    history = History().ran(100, 4, AT)
    reading = read(find("slipstream"), parse(fake.slipstream(history, {"suffix": (300, 200), "tiny": (100, 90)})), 0.0)
    assert reading.raw[Stream(drafter="suffix")] == Raw(drafted=300, accepted=200)
    assert set(reading.raw) == {Stream(), Stream(drafter="suffix"), Stream(drafter="tiny")}
    assert reading.identity.target_version == "1"


def test_replicas_are_told_apart() -> None:
    text = fake.vllm(History().ran(10, 2, [0.5])) + fake.vllm(History().ran(20, 2, [0.5])).replace('"0"', '"1"', 99)
    reading = read(find("vllm"), parse(text), 0.0)
    assert {s.replica: raw.drafted for s, raw in reading.raw.items()} == {"0": 20, "1": 40}


def test_acceptance_at_a_position_with_drafts_of_several_lengths() -> None:
    """100 drafts, 40 of them with a second token: what is accepted at 2 is out of 40 x 0.5."""
    found = conditional(Counts(drafting_rounds=100, drafted_at={1: 100, 2: 40}, accepted_at={1: 50, 2: 10}))
    assert found == {1: 0.5, 2: 0.5}


def test_engines_have_different_marks() -> None:
    for engine, write in WRITERS.items():
        scrape = parse(write(History().ran(5, 2, [0.5])))
        assert [m.engine for m in ENGINES if any(scrape.has(mark) for mark in m.marks)] == [engine]
    assert detect(parse("python_info 1\n")) is None


def test_slipstreams_own_server_is_read() -> None:
    """The real metrics of ``slipstream serve``, fed with rounds: what the monitor derives is what was put in."""
    metrics = pytest.importorskip("slipstream.serve.metrics", reason="the server is not part of this build").Metrics(
        "1", "t", "d"
    )
    from slipstream.types import Round

    def played(drafted: int, accepted: int, sources: tuple[str, ...] = ()) -> Round:
        return Round(tuple(range(accepted + 1)), drafted, accepted, 0.0, 0.0, 0.0, sources=sources)

    def look() -> tuple[Any, Any]:
        scrape = parse(metrics.text().decode())
        return scrape, read(find("slipstream"), scrape, 0.0)

    metrics.round(played(0, 0), None, first=True)
    _, first = look()
    assert detect(look()[0]) is find("slipstream")
    for _ in range(3):
        metrics.round(played(3, 2, ("suffix", "d", "d")), None, first=False)
    metrics.round(played(0, 0), None, first=False)
    scrape, second = look()
    new = second.raw[Stream()].since(first.raw[Stream()])
    found = counts(second, scrape, Stream(), new)
    assert (found.rounds, found.drafting_rounds, found.drafted, found.accepted) == (4, 3, 9, 6)
    assert (found.emitted, found.k_zero) == (10, 1)
    assert (found.drafted_at, found.accepted_at[2]) == ({1: 3, 2: 3, 3: 3}, 3)
    assert second.raw[Stream(drafter="suffix")] == Raw(drafted=3, accepted=3)
    assert (second.identity.target, second.identity.draft) == ("t", "d")


# --- resets -----------------------------------------------------------------------------------------------------------


def test_a_counter_that_went_back_was_reset() -> None:
    before = Raw(drafted=100, accepted=50, accepted_at={1: 50})
    assert Raw(drafted=30, accepted=60, accepted_at={1: 60}).since(before).accepted == 60
    assert Raw(drafted=130, accepted=60, accepted_at={1: 49}).since(before).drafted == 130
    assert Raw(drafted=130, accepted=60, accepted_at={1: 60}).since(before, restarted=True).drafted == 130
    assert Raw(drafted=130, accepted=60, accepted_at={1: 60}).since(before) == Raw(
        drafted=30, accepted=10, accepted_at={1: 10}
    )


# --- the monitor ------------------------------------------------------------------------------------------------------


class Service:
    """A service and its monitor, look by look."""

    def __init__(self, pages: Pages, path: Path, write: Callable[..., str] = fake.vllm, **expected: Any) -> None:
        self.pages, self.path, self.write = pages, path, write
        self.options = Options(Expected(**expected), price=10.0)
        self.history = History()
        self.words: dict[str, Any] = {}
        self.now = 0.0
        self.open()

    def open(self) -> None:
        self.store = Store(str(self.path))
        self.monitor = Monitor(Source(self.pages.url), self.store, self.options)

    def look(self) -> Report:
        self.pages.answers["/metrics"] = self.write(self.history, **self.words)
        self.now += 15
        return self.monitor.look(self.now)

    def ran(self, looks: int, rounds: int = 100, k: int = 4, at: list[float] = AT, **more: Any) -> Report:
        for _ in range(looks):
            self.history.ran(rounds, k, at, **more)
            report = self.look()
        return report


def _kinds(report: Report) -> set[str]:
    return {alarm.kind for alarm, _ in report.alarms}


@pytest.fixture
def service(pages: Pages, tmp_path: Path) -> Service:
    return Service(pages, tmp_path / "state.sqlite")


def test_a_fall_is_alarmed_with_advice_and_what_it_costs(service: Service) -> None:
    service.look()
    assert service.ran(40).exit_code == 0
    report = service.ran(5, at=[0.7, 0.5, 0.5, 0.4])
    assert report.exit_code == 1
    assert {"acceptance-drift", "position-drift"} <= _kinds(report)
    alarm = next(a for a, _ in report.alarms if a.kind == "acceptance-drift")
    assert alarm.what.startswith("acceptance fell from 64% to about")
    assert "slipstream distill" in alarm.advice
    assert "longer" in alarm.cost
    assert "$" in alarm.cost
    report = service.ran(20, at=[0.7, 0.5, 0.5, 0.4])
    assert {a.position for a, _ in report.alarms if a.kind == "position-drift"} >= {1, 2, 3}
    assert "acceptance-drift" not in _kinds(service.ran(40))


def test_a_rise_is_told_and_no_failure(service: Service) -> None:
    service.look()
    service.ran(40, at=[0.6])
    report = service.ran(6, at=[0.95])
    assert _kinds(report) == {"acceptance-rise"}
    assert report.exit_code == 0


def test_speculation_silently_off(service: Service) -> None:
    service.look()
    service.ran(5)
    report = service.ran(12, rounds=0, plain=100)
    assert _kinds(report) == {"speculation-off"}
    assert "speculation-off" not in _kinds(service.ran(3))


def test_speculation_off_from_the_beginning_is_known_from_a_plan_only(pages: Pages, tmp_path: Path) -> None:
    for wanted, found in ((None, set()), (True, {"speculation-off"}), (False, set())):
        service = Service(pages, tmp_path / f"{wanted}.sqlite", speculation=wanted)
        service.words = {"speculation": False}
        service.look()
        assert _kinds(service.ran(12, rounds=0, plain=100)) == found


def test_slipstream_that_never_drafted_is_seen_too(pages: Pages, tmp_path: Path) -> None:
    """Its counters of draft tokens have no line before the first one."""
    service = Service(pages, tmp_path / "s.sqlite", fake.slipstream, speculation=True)
    service.look()
    [seen] = service.ran(12, rounds=0, plain=100).seen
    assert (seen.state.total.drafted, seen.state.total.emitted) == (0, 1200)
    assert "k-pinned" in _kinds(service.ran(1, rounds=0, plain=100))


def test_k_pinned_at_0(pages: Pages, tmp_path: Path) -> None:
    service = Service(pages, tmp_path / "s.sqlite", fake.slipstream)
    service.look()
    service.ran(3)
    assert "k-pinned" in _kinds(service.ran(30, rounds=1, plain=99))


def test_slower_than_without(pages: Pages, tmp_path: Path) -> None:
    """Drafts that cost half a step each and are accepted at 40 % lose, and the plan's costs say so."""
    costs = Costs.linear(0.5, 0.1)
    service = Service(pages, tmp_path / "s.sqlite", costs=costs)
    service.look()
    report = service.ran(20, at=[0.4])
    assert _kinds(report) == {"slowdown"}
    [alarm] = [a for a, _ in report.alarms]
    # 100 rounds a look: 40, 16, 6 and 2 accepted
    assert alarm.value == pytest.approx((1 + 0.4 + 0.16 + 0.06 + 0.02) / (0.5 * 4 + 1.4), rel=0.01)
    assert "no k pays" in alarm.advice


def test_rounds_without_a_draft_cost_a_plain_step() -> None:
    """Half of the rounds draft 4 tokens at c = 0.1 and b = 0.05 (1.6 plain steps), half none."""
    window = Counts(emitted=250, rounds=100, drafting_rounds=50, drafted=200, accepted=150)
    found = speed_up(window, Expected(costs=Costs.linear(0.1, 0.05)), None)
    assert found is not None
    assert found.value == pytest.approx(2.5 / (0.5 * 1.6 + 0.5))


def test_advice_names_the_best_k(pages: Pages, tmp_path: Path) -> None:
    costs = Costs.linear(0.1, 0.05)
    service = Service(pages, tmp_path / "s.sqlite", costs=costs)
    service.look()
    service.ran(40)
    report = service.ran(30, at=[0.6, 0.5, 0.1, 0.1])
    alarm = next(a for a, _ in report.alarms if a.kind == "acceptance-drift")
    assert "k = 2 is best" in alarm.advice
    assert '"num_speculative_tokens": 2' in alarm.advice
    assert f"{expected_speed_up([0.6, 0.5], costs):.2f}x" in alarm.advice


def test_measured_speed_up(pages: Pages, tmp_path: Path) -> None:
    service = Service(pages, tmp_path / "s.sqlite", plain_seconds=0.02)
    service.look()
    [seen] = service.ran(5).seen
    assert seen.speed_up is not None
    assert seen.speed_up.value == pytest.approx(1 + 4 * 0.63, abs=0.05)  # 0.02 s a round, and as many tokens as that


def test_target_updated_under_the_draft(pages: Pages, tmp_path: Path) -> None:
    """The published story: acceptance 68 % to 41 % after a target update. The version alone tells it at once."""
    service = Service(pages, tmp_path / "s.sqlite", fake.slipstream)
    service.look()
    assert not _kinds(service.ran(3))
    service.words = {"version": "2"}
    report = service.ran(1)
    assert _kinds(report) == {"version-mismatch"}
    service.open()
    assert _kinds(service.ran(1)) == {"version-mismatch"}
    service.monitor.relearn()
    assert not _kinds(service.ran(1))


def test_a_draft_that_says_what_it_was_trained_for(pages: Pages, tmp_path: Path) -> None:
    service = Service(pages, tmp_path / "s.sqlite", fake.slipstream)
    service.words = {"version": "2", "trained_for": "1"}
    assert _kinds(service.look()) == {"version-mismatch"}
    service.words = {"version": "2", "trained_for": "2"}
    assert not _kinds(service.look())


def test_models_other_than_the_plans(pages: Pages, tmp_path: Path) -> None:
    service = Service(pages, tmp_path / "s.sqlite", fake.slipstream, target="/models/big.gguf", draft="org/tiny")
    assert not _kinds(service.look())
    service.words = {"target": "bigger"}
    assert _kinds(service.look()) == {"version-mismatch"}


def test_a_restart_of_the_monitor_loses_nothing(service: Service) -> None:
    """Whether it is reopened at every look or never: the same totals, tests and alarms."""
    service.look()
    for _ in range(45):
        service.ran(1)
        service.store.close()
        service.open()
    report = service.ran(5, at=[0.7, 0.5, 0.5, 0.4])
    [seen] = report.seen
    assert seen.state.total.drafted == 50 * 400
    assert "acceptance-drift" in _kinds(report)


def test_a_restart_of_the_engine_loses_only_what_nobody_saw(service: Service) -> None:
    service.look()
    service.ran(10)
    service.history = History(started=2000.0)
    [seen] = service.ran(5).seen
    assert seen.state.total.drafted == 15 * 400
    assert seen.state.resets == 1


def test_a_counter_that_an_answer_leaves_out_is_not_counted_twice(service: Service) -> None:
    """Missing once, or NaN once, it was taken for new from its beginning."""
    service.look()
    service.ran(10)
    whole = service.write
    for gap in ("", "NaN", "+Inf"):

        def torn(h: History, gap: str = gap, **words: Any) -> str:
            lines = whole(h, **words).split("\n")
            wrong = [" ".join([*line.split(" ")[:-1], gap]) if "accepted_tokens" in line else line for line in lines]
            return "\n".join(line for line in wrong if not line.endswith(" "))

        service.write = torn
        service.ran(1)
        service.write = whole
        service.ran(1)
    [seen] = service.look().seen
    assert seen.state.total.drafted == 16 * 400
    assert seen.state.total.accepted == service.history.total_accepted
    assert seen.state.resets == 0
    json.dumps(document(service.look()), allow_nan=False)


def test_two_replicas_behind_one_address(pages: Pages, tmp_path: Path) -> None:
    """They answer in turns: each look was taken for a restart, and counted all of the other one's past."""
    service = Service(pages, tmp_path / "s.sqlite")
    now = time.time()
    replicas = [History(started=now - 9000), History(started=now - 5000), History(started=now - 7000)]
    for i, replica in enumerate(replicas):
        replica.ran(10_000 * (i + 1), 4, AT)
        service.history = replica
        service.look()
    for turn in range(30):
        service.history = replicas[turn % 3]
        report = service.ran(1)
        if turn == 10:
            service.store.close()
            service.open()
    [seen] = report.seen
    assert seen.state.total.drafted == 30 * 400
    assert seen.state.resets == 0
    assert report.exit_code == 0
    service.history = replicas[0] = History(started=now + 100)  # one of them begins anew
    [seen] = service.ran(1).seen
    assert (seen.state.total.drafted, seen.state.resets) == (31 * 400, 1)


def test_after_a_restart_a_stream_that_is_named_late_is_counted_from_its_beginning(service: Service) -> None:
    service.look()
    service.ran(10)
    service.history, service.words = History(started=2000.0), {"model": "other"}
    service.look()
    service.words = {}
    service.history.ran(5000, 4, AT)
    seen = next(s for s in service.look().seen if s.stream.model == "llama")
    assert seen.state.total.drafted == 10 * 400 + 5000 * 4


def test_a_stream_that_is_gone_has_no_alarms_and_streams_are_bounded(service: Service) -> None:
    """A model that was taken off the engine kept its alarm for ever."""
    service.look()
    service.ran(40)
    assert service.ran(6, at=[0.2]).exit_code == 1
    service.words = {"model": "next"}
    service.ran(2)
    assert not _kinds(service.ran(1))
    for i in range(250):
        service.words = {"model": f"m{i}"}
        report = service.look()
    assert len(report.seen) == 200


def test_a_receiver_that_is_dead_does_not_keep_others_from_hearing(pages: Pages, tmp_path: Path) -> None:
    """The first message that did not arrive held up all that were behind it."""
    service = Service(pages, tmp_path / "s.sqlite")
    service.options = Options(webhooks=("http://127.0.0.1:9/hook", pages.url + "/hook"))
    service.open()
    service.look()
    service.ran(5)
    report = service.ran(12, rounds=0, plain=100)
    assert "127.0.0.1:9/hook cannot be told" in (report.undelivered or "")
    assert [path for path, _ in pages.posted] == ["/hook"]
    service.ran(1)
    assert [path for path, _ in pages.posted] == ["/hook", "/hook"]
    assert len(service.store.unsent(service.monitor.service)) == 2


def test_a_full_disk_ends_no_watch(pages: Pages, tmp_path: Path) -> None:
    """It ended the monitor with the code of an alarm. Alarms are told meanwhile, and nothing is lost."""
    service = Service(pages, tmp_path / "s.sqlite")
    service.look()
    service.ran(40)
    size = service.store._db.execute("PRAGMA page_count").fetchone()[0]
    service.store._db.execute(f"PRAGMA max_page_count={size}")
    problems = [service.ran(1).problem for _ in range(40)]
    assert "the monitor's state cannot be written (database or disk is full)" in problems
    report = service.ran(6, at=[0.2])
    assert report.problem
    assert "acceptance-drift" in _kinds(report)
    assert report.exit_code == 1
    service.store._db.execute("PRAGMA max_page_count=1000000")
    service.ran(1, at=[0.2])
    service.store.close()
    service.open()
    report = service.ran(1, at=[0.2])
    assert report.seen[0].state.total.drafted == 88 * 400
    assert (report.problem, "acceptance-drift" in _kinds(report)) == (None, True)


def test_a_state_that_is_damaged_is_refused(tmp_path: Path, pages: Pages) -> None:
    path = tmp_path / "s.sqlite"
    service = Service(pages, path)
    service.look()
    service.store._db.execute("UPDATE service SET state = 'x'")
    service.store.close()
    with pytest.raises(InputError, match="is damaged"):
        service.open()


def test_what_is_kept_is_bounded(pages: Pages, tmp_path: Path) -> None:
    service = Service(pages, tmp_path / "s.sqlite")
    service.store = Store(str(service.path), Kept(days=100 / 86_400, samples=5))
    service.monitor = Monitor(Source(pages.url), service.store, service.options)
    service.look()
    service.ran(20)
    times = [time for time, _, _ in service.store.samples(pages.url + "/metrics")]
    assert len(times) == 5
    service.now += 1000
    service.look()
    assert service.store.samples(pages.url + "/metrics") == []


def test_alarms_are_told_as_alertmanager_tells_them(pages: Pages, tmp_path: Path) -> None:
    service = Service(pages, tmp_path / "s.sqlite")
    hooks = (pages.url + "/hook", pages.url + "/api/v2/alerts")
    service.options = Options(webhooks=hooks)
    service.open()
    service.look()
    service.ran(5)
    pages.refuse = True
    report = service.ran(12, rounds=0, plain=100)
    assert "tried again" in (report.undelivered or "")
    assert pages.posted == []
    pages.refuse = False
    service.store.close()
    service.open()  # what could not be told is not forgotten
    report = service.look()
    assert report.undelivered is None
    assert [path for path, _ in pages.posted] == ["/hook", "/api/v2/alerts"]
    message = json.loads(pages.posted[0][1])
    assert (message["version"], message["status"]) == ("4", "firing")
    [alert] = message["alerts"]
    assert alert["labels"]["alertname"] == "SlipstreamSpeculationOff"
    assert alert["labels"]["severity"] == "critical"
    assert {"summary", "description", "cost"} == set(alert["annotations"])
    [api] = json.loads(pages.posted[1][1])
    assert "endsAt" not in api
    service.ran(1)
    ended = json.loads(pages.posted[2][1])
    assert ended["status"] == "resolved"
    assert ended["alerts"][0]["fingerprint"] == alert["fingerprint"]
    assert "endsAt" in json.loads(pages.posted[3][1])[0]


def test_an_engine_that_went_away(service: Service) -> None:
    service.look()
    service.ran(2)
    del service.pages.answers["/metrics"]
    service.write = lambda h: ""  # nothing to serve
    codes = []
    for _ in range(3):
        service.pages.answers.pop("/metrics", None)
        service.now += 15
        report = service.monitor.look(service.now)
        codes.append((report.exit_code, _kinds(report)))
    assert codes[:2] == [(3, set()), (3, set())]
    assert codes[2] == (1, {"unreachable"})
    service.write = fake.vllm
    assert service.ran(1).exit_code == 0


def test_metrics_of_nobody_are_refused(pages: Pages, tmp_path: Path) -> None:
    pages.answers["/metrics"] = "python_info 1\n"
    with pytest.raises(InputError, match="name it with --engine"):
        Monitor(Source(pages.url), Store(":memory:"), Options()).look(0.0)


def test_models_are_asked_for_where_metrics_do_not_name_them(pages: Pages) -> None:
    pages.answers["/metrics"] = fake.vllm(History(), model="served-name")
    pages.answers["/v1/models"] = json.dumps({"data": [{"id": "served-name", "root": "/models/target"}]})
    assert Source(pages.url).look().reading.identity.target == "/models/target"


# --- the command ------------------------------------------------------------------------------------------------------


def _call(*words: str) -> Any:
    return CliRunner().invoke(command, list(words), standalone_mode=False)


def test_from_cron(pages: Pages, tmp_path: Path) -> None:
    """Each call looks once; the state knows the look before, and the exit code says whether all is well."""
    history = History()
    words = ("--url", pages.url, "--once", "--json", "--state", str(tmp_path / "s.sqlite"))
    codes = []
    for _ in range(45):
        pages.answers["/metrics"] = fake.vllm(history.ran(100, 4, AT))
        codes.append(_call(*words).return_value)
    for _ in range(5):
        pages.answers["/metrics"] = fake.vllm(history.ran(100, 4, [0.6, 0.5, 0.5]))
        found = _call(*words)
    assert codes[0] == 3
    assert set(codes[1:]) == {0}
    assert found.return_value == 1
    document = json.loads(found.stdout)
    assert document["engine"] == "vllm"
    assert {alarm["kind"] for alarm in document["alarms"]} >= {"acceptance-drift"}
    [stream] = document["streams"]
    assert stream["tests"]["all"]["usual"] == pytest.approx(0.63, abs=0.01)


def test_without_a_terminal_it_says_a_line_a_look(pages: Pages) -> None:
    pages.answers["/metrics"] = fake.vllm(History().ran(100, 4, AT))
    found = _call("--url", pages.url, "--looks", "2", "--interval", "0.05", "--state", ":memory:")
    assert found.return_value == 3
    assert len(found.stdout.splitlines()) == 2


def test_a_plan_says_what_to_expect(pages: Pages) -> None:
    from importlib.resources import files

    from slipstream.monitor.expected import from_plan
    from slipstream.plan import load

    plan = str(files("slipstream.data") / "plan.example.json")
    expected = from_plan(load(plan))
    assert (expected.acceptance, expected.k, expected.speculation) == (0.72, 4.0, True)
    assert expected.at == {1: 0.74, 2: 0.76, 3: 0.77, 4: 0.78}
    assert expected.costs is not None
    assert expected.costs.v(5) == pytest.approx(0.0535 / 0.049)
    pages.answers["/metrics"] = fake.slipstream(History().ran(100, 4, AT), target="target-7b").replace(
        "tiny", "draft-0.5b"
    )
    found = _call("--url", pages.url, "--plan", plan, "--once", "--json", "--state", ":memory:")
    assert json.loads(found.stdout)["alarms"] == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "--url"),
        (("--url", "engine:8000"), "is no address"),
        (("--url", "http://x", "--engine", "tgi"), "is not known"),
        (("--url", "http://x", "--tolerance", "2"), "--tolerance"),
        (("--url", "http://x", "--interval", "0"), "--interval"),
        (("--url", "http://x", "--webhook", "mail"), "--webhook"),
        (("--url", "http://x", "--plan", "none.json"), "cannot be read"),
        (("--url", "http://x", "--state", "/proc/none/s"), "--state"),
        (("--url", "http://x", "--state", ":memory:", "--listen", "9109x"), "--listen"),
    ],
)
def test_what_cannot_be_used_is_refused(words: tuple[str, ...], part: str) -> None:
    found = _call(*words)
    assert isinstance(found.exception, InputError)
    assert part in str(found.exception)


def test_the_terminal_view(service: Service) -> None:
    import io

    from slipstream.cli.monitor_report import Board

    service.look()
    service.ran(40)
    report = service.ran(5, at=[0.7, 0.5, 0.5, 0.4])
    stream = io.StringIO()
    with Board(stream, no_color=True, live=False) as board:
        board.show(report)
    assert "acceptance fell from 64%" in " ".join(stream.getvalue().split())
    assert "llama/0" in stream.getvalue()


def test_a_detector_is_read_back_as_it_was() -> None:
    test = drift.start(drift.Settings(learn=1000))
    for i in range(40):
        test = drift.step(test, 100 + 20 * (i % 3), 200)
    for _ in range(3):
        test = drift.step(test, 60, 200)
    again = drift.restore(json.loads(json.dumps(test.document())))
    assert drift.step(again, 70, 200).evidence == drift.step(test, 70, 200).evidence
