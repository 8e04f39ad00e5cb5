"""What speculation saves: the published example, whole servers, where figures come from, and inputs without sense."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slipstream import InputError
from slipstream.cli.main import cli
from slipstream.economics import (
    HOURS_A_MONTH,
    Service,
    break_even_speed_up,
    payback_days,
    read_prices,
    throughput_for,
    tornado,
    verdict,
)

CHATBOT = ("--requests-per-day", "1e6", "--servers", "4", "--price", "5.20")
PREDICTED = ("--draft-cost", "0.1", "--row-cost", "0.03", "-k", "4")


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli, ["cost", *map(str, args)], prog_name="slipstream")


def document(*args: object) -> dict[str, Any]:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def chatbot(**changes: Any) -> Service:
    service = Service(1e6, 250, 5.20, throughput_for(4, 1e6, 250, 1.0), 2.1)
    return replace(service, **changes)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_published_example() -> None:
    """1M requests a day on 4 servers at 5.20 dollars: 2.1 x makes 2 of them, 20.80 dollars an hour become 10.40."""
    found = verdict(chatbot(training=600.0))
    assert (found.plain.servers, found.speculative.servers) == (4, 2)
    assert (found.plain.an_hour, found.speculative.an_hour) == pytest.approx((20.80, 10.40))
    assert found.saved_a_month == pytest.approx(10.40 * HOURS_A_MONTH)
    assert found.plain.a_million_tokens == pytest.approx(20.80 * 24 / 250)
    assert found.payback_days == pytest.approx(600 / (10.40 * 24))
    assert payback_days(15_000, found.saved_an_hour) == pytest.approx(25 * 600 / (10.40 * 24))


def test_servers_are_whole_and_spare_ones_are_paid_too() -> None:
    service = chatbot(spare=1)
    assert (service.servers(1.0), service.servers(2.0), service.servers(1.99), service.servers(100)) == (5, 3, 4, 2)
    assert chatbot(utilisation=0.5).servers(1.0) == 8


def test_money_is_saved_from_the_first_server_that_is_not_needed() -> None:
    """4 servers fully used: 3 do from 4/3 x on. Retraining for two servers' price needs three servers less."""
    assert break_even_speed_up(chatbot()) == pytest.approx(4 / 3)
    monthly = 5.20 * HOURS_A_MONTH
    assert break_even_speed_up(chatbot(training=2 * monthly, retraining_months=1)) == pytest.approx(4.0)
    assert break_even_speed_up(chatbot(training=3.1 * monthly, retraining_months=1)) is None
    assert break_even_speed_up(chatbot(requests_a_day=1000.0)) is None
    assert break_even_speed_up(chatbot(spare=1)) == pytest.approx(4 / 3)
    for saving in (4 / 3 + 1e-6, 2.0):
        assert verdict(chatbot(speed_up=saving)).net_a_month > 0
    assert verdict(chatbot(speed_up=4 / 3 - 1e-6)).net_a_month == 0


def test_training_pays_by_what_it_saves_beyond_the_untrained_draft() -> None:
    found = verdict(chatbot(untrained_speed_up=1.4, training=600.0, retraining_months=2))
    assert (found.untrained.servers, found.speculative.servers) == (3, 2)
    assert found.payback_days == pytest.approx(600 / (5.20 * 24))
    assert found.net_a_month == pytest.approx(10.40 * HOURS_A_MONTH - 300)
    assert verdict(chatbot(untrained_speed_up=2.0, training=600.0)).payback_days is None
    assert verdict(chatbot(untrained_speed_up=2.0)).payback_days == 0


def test_the_tornado_is_what_each_input_alone_would_change() -> None:
    service = chatbot()
    swings = tornado(service)
    assert [s.width for s in swings] == sorted((s.width for s in swings), reverse=True)
    by_name = {s.name: s for s in swings}
    assert by_name["price an hour"].net_high == pytest.approx(1.2 * verdict(service).net_a_month)
    assert by_name["speed-up"].net_low == pytest.approx(verdict(chatbot(speed_up=2.1 * 0.8)).net_a_month)
    assert by_name["utilisation"].high == 1.0


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"requests_a_day": 0.0}, "requests a day is 0"),
        ({"price": -1.0}, "price is -1"),
        ({"speed_up": float("nan")}, "speed up is nan"),
        ({"speed_up": 1e-320}, "use a number above 0"),
        ({"price": 1e308}, "at most 1e"),
        ({"training": float("nan")}, "training of the draft cannot cost nan"),
        ({"retraining_months": float("inf")}, "every inf months"),
        ({"utilisation": 1.2}, "utilisation of 1.2"),
        ({"spare": -1}, "-1 spare"),
        ({"retraining_months": 0.0}, "every 0 months"),
    ],
)
def test_services_without_a_meaning(change: dict[str, Any], fragment: str) -> None:
    with pytest.raises(InputError, match=fragment):
        chatbot(**change)


# --- prices -----------------------------------------------------------------------------------------------------------


def test_every_price_has_a_date_and_a_source() -> None:
    for price in read_prices().values():
        assert price.dollars > 0
        assert price.date[:2] == "20"
        assert len(price.date) == 10
        assert price.source
        assert price.what


def test_a_price_table_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('[[server]]\nname="mine"\nwhat="a box"\ndollars=0.5\ndate="2026-01-01"\nsource="invoice"\n')
    found = document(*CHATBOT[:4], "--speed-up", 2, "--prices", file, "--server", "mine")
    assert found["inputs"]["price of a server-hour"] == {
        "value": 0.5,
        "how": "assumed: price table, a box, 2026-01-01, invoice",
    }
    file.write_text('[[server]]\nname="mine"\n')
    assert "has no what" in invoke("--list-prices", "--prices", file).stderr
    file.write_text("[[server")
    assert "cannot be read" in invoke("--list-prices", "--prices", file).stderr


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_published_example_on_the_command_line() -> None:
    result = invoke(*CHATBOT, "--speed-up", 2.1, "--training", 600, "--target-training", 15000)
    assert result.exit_code == 0
    for part in ("4 servers become 2", "$20.80", "$10.40", "2.4 days", "60.1 days, 25 x the draft's price", "1.33x"):
        assert part in result.stdout


def test_a_draft_trained_from_49_to_72_percent() -> None:
    found = document(*CHATBOT, *PREDICTED, "--acceptance", 0.49, "--trained-acceptance", 0.72, "--training", 600)
    bills = found["bills"]
    assert list(bills) == ["plain", "draft as it is", "trained draft"]
    for name, alpha in (("draft as it is", 0.49), ("trained draft", 0.72)):
        expected = (1 - alpha**5) / (1 - alpha) / (4 * 0.1 + 1 + 4 * 0.03)
        assert bills[name]["speed_up"] == pytest.approx(expected)
    assert [b["servers"] for b in bills.values()] == [4, 4, 3]
    alpha = found["results"]["break_even_acceptance"]["value"]
    assert (1 - alpha**5) / (1 - alpha) == pytest.approx(4 * 0.1 + 1 + 4 * 0.03)


def test_a_measured_speed_up_stays_the_anchor_of_what_training_brings() -> None:
    options = (*CHATBOT, *PREDICTED, "--acceptance", 0.49, "--trained-acceptance", 0.72)
    predicted, anchored = document(*options), document(*options, "--speed-up", 1.2)
    ratio = predicted["bills"]["trained draft"]["speed_up"] / predicted["bills"]["draft as it is"]["speed_up"]
    assert anchored["bills"]["trained draft"]["speed_up"] == pytest.approx(1.2 * ratio)


def test_every_figure_says_how_it_was_obtained() -> None:
    found = document(*CHATBOT, *PREDICTED, "--acceptance", 0.6)
    origins = [*found["inputs"].values(), *found["bills"].values(), *found["results"].values(), *found["tornado"]]
    assert all(entry["how"].startswith(("measured", "predicted from", "assumed")) for entry in origins)


def test_what_bench_measured_is_what_is_added_up(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    overall = {
        "plain": {"total_tokens_per_second": 10.0, "whole_answer_speed_up": {"median": 1.0}},
        "draft k=4": {
            "whole_answer_speed_up": {"median": 1.8},
            "acceptance": {"rate": 0.7},
            "cost_ratio": {"median": 0.2},
        },
    }
    passes = {"target": [{"rows": n, "v": {"median": 1 + 0.1 * (n - 1)}} for n in (1, 5)]}
    bench = {"format": 1, "overall": overall, "best": "draft k=4", "passes": passes, "machine": {"cpu": "a chip"}}
    file.write_text(json.dumps(bench))
    found = document("--from", file, "--requests-per-day", 8640, "--price", 1)
    how = "measured: draft k=4 in result.json (a chip)"
    assert found["inputs"]["speed-up"] == {"value": 1.8, "how": how}
    assert found["inputs"]["tokens a second, plain"] == {"value": 10.0, "how": how}
    assert found["bills"]["plain"]["servers"] == 3  # 25 tokens a second
    assert found["results"]["break_even_acceptance"]["value"] == pytest.approx(0.3)
    assert "one request at a time" in found["notes"][0]
    assert "no contender 'other'" in invoke("--from", file, "--contender", "other", *CHATBOT).stderr
    file.write_text("[]")
    assert "no bench document" in invoke("--from", file, *CHATBOT).stderr


def test_a_page_to_forward(tmp_path: Path) -> None:
    page, picture = tmp_path / "cost.html", tmp_path / "cost.svg"
    result = invoke(*CHATBOT, "--speed-up", 2.1, "--html", page, "--plot", picture)
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert "4 servers become 2" in text
    assert "<svg" in text
    assert "http://" not in text.split("<svg")[0]
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_it_says_no_where_nothing_is_saved() -> None:
    small = invoke("--requests-per-day", 100, "--tokens-per-second", 900, "--price", 2, "--speed-up", 2)
    assert "saves nothing here: no server less is needed" in small.stdout
    dear = invoke(*CHATBOT, "--speed-up", 2.1, "--training", 1e6, "--retrain-months", 1)
    assert "retraining costs more than is saved" in dear.stdout


def test_it_says_what_a_slow_draft_costs() -> None:
    """It said that no server less was needed where twice as many were."""
    assert "4 servers would become 8, for $15,184 a month more." in invoke(*CHATBOT, "--speed-up", 0.5).stdout


def test_a_predicted_speed_up_names_its_k() -> None:
    found = document(*CHATBOT, "--acceptance", 0.72, "--draft-cost", 0.07, "--row-cost", 0.01, "-k", 4)["inputs"]
    assert found["speed-up"]["value"] == pytest.approx(2.18, abs=0.005)
    assert found["speed-up"]["how"].endswith("at k = 4")


def test_retraining_that_no_saving_pays_for() -> None:
    """Servers were counted down one by one, for ever where there were many."""
    service = Service(1e15, 250, 1e-9, 1.0, 2.0, training=1e15, retraining_months=1e-9)
    assert break_even_speed_up(service) is None
    assert break_even_speed_up(chatbot(training=1e6, retraining_months=1.0)) is None
    assert break_even_speed_up(chatbot(training=4000.0, retraining_months=1.0)) == pytest.approx(2.0)


@pytest.mark.parametrize("text", ["server = 5", "server = [1, 2]", "[server]\nname = 'a'", "server = 'x'", ""])
def test_price_tables_of_another_layout(tmp_path: Path, text: str) -> None:
    """Each was a traceback, but for the empty one."""
    (tmp_path / "prices.toml").write_text(text)
    result = invoke("--list-prices", "--prices", tmp_path / "prices.toml")
    assert result.exit_code == 2
    assert "no [[server]] tables" in result.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"machine": "x"},
        {"contenders": [{}]},
        {"contenders": None},
        {"passes": {"target": [{"rows": 1}]}},
        {"passes": {"target": [{"rows": "x", "v": {"median": 1}}]}},
    ],
)
def test_measurements_that_were_changed_by_hand(tmp_path: Path, change: dict[str, Any]) -> None:
    """Each was a traceback."""
    row = {"whole_answer_speed_up": {"median": 2.0}, "total_tokens_per_second": 9.0}
    found = {"format": 1, "best": "suffix k=4", "overall": {"plain": row, "suffix k=4": row}} | change
    (tmp_path / "result.json").write_text(json.dumps(found))
    result = invoke("--from", tmp_path / "result.json", *CHATBOT)
    assert result.exit_code == 2
    assert "was changed by hand" in result.stderr


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        ((), "the load is missing"),
        ((*CHATBOT, "--acceptance", 0.5, "--draft-cost", 0.1, "--row-cost", -0.2), "a further row of -0.2"),
        ((*CHATBOT, *PREDICTED[:4], "-k", 10**8, "--acceptance", 0.5), "-k 100000000"),
        (("--requests-per-day", 1), "the price is missing"),
        (CHATBOT, "the speed-up is missing"),
        ((*CHATBOT, "--server", "runpod-h100", "--speed-up", 2), "--price and --server"),
        ((*CHATBOT[:4], "--server", "none", "--speed-up", 2), "'none' is not in the price table"),
        ((*CHATBOT, "--tokens-per-second", 5, "--speed-up", 2), "--servers and --tokens-per-second"),
        ((*CHATBOT[:2], *CHATBOT[4:], "--speed-up", 2), "what a server can do is missing"),
        ((*CHATBOT, "--acceptance", 0.5), "gives no speed-up"),
        ((*CHATBOT, "--acceptance", 1.5, *PREDICTED), "acceptance of 1.5"),
        ((*CHATBOT, "--draft-cost", 0.1), "belong together"),
        ((*CHATBOT, *PREDICTED[:4], "-k", 0, "--acceptance", 0.5), "-k 0"),
        ((*CHATBOT, "--speed-up", 2, "--trained-acceptance", 0.5), "needs the acceptance of now"),
        ((*CHATBOT, "--speed-up", 2, "--from", "/no/such/file"), "'/no/such/file'"),
        ((*CHATBOT, "--speed-up", 2, "--html", "/no/such/folder/a.html"), "--html"),
        ((*CHATBOT, "--speed-up", 2, "--plot", "a.bmp"), "--plot 'a.bmp'"),
        ((*CHATBOT, "--speed-up", 2, "--servers", 0), "0 servers"),
        ((*CHATBOT, "--speed-up", 2, "--utilisation", 0), "utilisation of 0"),
        ((*CHATBOT, "--speed-up", 2, "--target-training", "nan"), "training of the target cannot cost nan"),
        ((*CHATBOT, "--speed-up", 2, "--target-training", -1), "training of the target cannot cost -1"),
    ],
)
def test_what_cannot_be_added_up(args: tuple[object, ...], fragment: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert fragment in line
