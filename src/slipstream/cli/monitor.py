"""``slipstream monitor``."""

from __future__ import annotations

from typing import Any

import click

_EXAMPLES = """\b
Examples:
  slipstream monitor --url http://localhost:8000/metrics
  slipstream monitor --url http://engine:8000 --plan plan.json --webhook http://alertmanager:9093/api/v2/alerts
  slipstream monitor --url http://engine:8000 --once --json          # from cron
  slipstream monitor --url http://engine:8000 --listen :9109         # for Prometheus
  slipstream monitor --rules rules.yml --dashboard dashboard.json    # for a Prometheus that scrapes the engine itself

Engines: vllm, sglang, tensorrt-llm, llama.cpp, slipstream.
Exit codes: 0 all is well, 1 an alarm goes on, 2 the input cannot be used, 3 nothing can be told (yet).
"""


@click.command("monitor", epilog=_EXAMPLES)
@click.option("--url", metavar="URL", help="Of the engine's metrics, or of the engine.")
@click.option("--engine", default="auto", metavar="NAME", help="Whose metrics they are (default: auto).")
@click.option("--key", metavar="KEY", envvar="SLIPSTREAM_MONITOR_KEY", help="API key, if the metrics want one.")
@click.option("--plan", metavar="FILE", help="What `slipstream plan` wrote: expected acceptance, costs, models.")
@click.option("--acceptance", type=float, metavar="A", help="Expected acceptance (default: the plan's, else learned).")
@click.option("--plain-ms", type=float, metavar="MS", help="A token without speculation, for the speed-up.")
@click.option("--price", type=float, metavar="DOLLARS", help="An hour of all that serves this, for what alarms cost.")
@click.option("--no-speculation", is_flag=True, help="Drafting is meant to be off.")
@click.option("--interval", type=float, default=15.0, metavar="S", help="Seconds between looks (default: 15).")
@click.option("--once", is_flag=True, help="Look once and end; the state knows the look before.")
@click.option("--looks", type=int, metavar="N", help="End after N looks.")
@click.option("--state", metavar="FILE", help="Where the state is kept (default: your state folder).")
@click.option("--keep-days", type=float, default=30.0, metavar="D", help="Keep samples and past alarms D days (30).")
@click.option("--relearn", is_flag=True, help="What is seen from now on is usual.")
@click.option(
    "--false-alarm-every", type=float, default=1e7, metavar="N", help="Draft tokens between false alarms (1e7)."
)
@click.option("--tolerance", type=float, default=0.03, metavar="T", help="A fall by so much is none (default: 0.03).")
@click.option("--learn", type=float, default=10_000, metavar="N", help="Draft tokens to learn from first (10000).")
@click.option("--webhook", multiple=True, metavar="URL", help="Tell alarms here, as Alertmanager's webhook or API.")
@click.option("--listen", metavar="HOST:PORT", help="Serve the figures to Prometheus.")
@click.option("--rules", metavar="FILE", help="Write alert rules for Prometheus, and end.")
@click.option("--dashboard", metavar="FILE", help="Write a dashboard for Grafana, and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document a look on stdout.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR.")
def command(**options: Any) -> int:
    """Watch an engine's acceptance, and tell when it changes, costs more than it gains, or is silently off."""
    from slipstream.cli.monitor_run import MonitorTask, run

    return run(MonitorTask(**options))
