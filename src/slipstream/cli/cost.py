"""``slipstream cost``."""

from __future__ import annotations

from typing import Any

import click

_EXAMPLES = """\b
Examples:
  slipstream cost --requests-per-day 1e6 --servers 4 --price 5.20 --speed-up 2.1 --training 600
  slipstream cost --requests-per-day 1e6 --tokens-per-second 900 --server runpod-h100 \\
      --acceptance 0.49 --trained-acceptance 0.72 --draft-cost 0.1 --row-cost 0.03 --training 600 --html cost.html
  slipstream cost --from result.json --requests-per-day 5000 --price 0.35
  slipstream cost --plan plan.json --requests-per-day 5000 --price 0.35
  slipstream cost --list-prices

Every figure says how it was obtained: measured, predicted from others, or assumed (an option or a default).
"""


@click.command("cost", epilog=_EXAMPLES)
@click.option("--from", "measured", metavar="FILE", help="What `slipstream bench --out FILE` measured.")
@click.option("--plan", metavar="FILE", help="What `slipstream plan` found, at its batch.")
@click.option("--contender", metavar="NAME", help="Which of its rows; default: its best.")
@click.option("--requests-per-day", type=float, metavar="R", help="The load.")
@click.option("--tokens-per-request", type=float, metavar="N", help="Tokens of an answer (default: 250).")
@click.option(
    "--servers", type=int, metavar="N", help="Servers that are just used up by this load without speculation."
)
@click.option("--tokens-per-second", type=float, metavar="T", help="Throughput of a server without speculation.")
@click.option("--speed-up", type=float, metavar="S", help="Throughput with speculation / without.")
@click.option("--acceptance", type=float, metavar="A", help="Predict the speed-up from this acceptance and the costs.")
@click.option("--trained-acceptance", type=float, metavar="A", help="Acceptance after training the draft.")
@click.option("--draft-cost", type=float, metavar="C", help="A draft step, in plain target steps.")
@click.option(
    "--row-cost", type=float, metavar="B", help="Each further token of a verification, in plain target steps."
)
@click.option("-k", type=int, metavar="K", help="Draft tokens in a round (default: the best).")
@click.option("--price", type=float, metavar="DOLLARS", help="Of a server-hour.")
@click.option("--server", metavar="NAME", help="Take the price from the price table.")
@click.option("--prices", metavar="FILE", help="A price table of your own (TOML, as --list-prices names it).")
@click.option(
    "--utilisation", type=float, metavar="U", help="Share of a server that is planned to be used (default: 1)."
)
@click.option("--spare", type=int, default=0, metavar="N", help="Servers beyond need (default: 0).")
@click.option("--training", type=float, metavar="DOLLARS", help="To train the draft once.")
@click.option("--target-training", type=float, metavar="DOLLARS", help="To train the target instead, for comparison.")
@click.option("--retrain-months", type=float, metavar="M", help="Train the draft again after M months.")
@click.option("--list-prices", is_flag=True, help="Show the price table and end.")
@click.option("--html", metavar="FILE", help="Save a page to forward.")
@click.option("--plot", metavar="FILE", help="Draw what the savings depend on, as .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(**options: Any) -> int:
    """Tell what a service costs with and without speculation, and what the savings depend on."""
    from slipstream.cli.cost_run import CostTask, run

    return run(CostTask(**options))
