"""What is worth an alarm, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slipstream.measure.expectation import best
from slipstream.measure.expectation import speed_up as expected_speed_up
from slipstream.monitor import drift
from slipstream.monitor.stream import ALL, Expected, SpeedUp, Watched, speed_up
from slipstream.monitor.types import Alarm, Identity, Stream, rates

#: Every kind of alarm: what it means, and how urgent it is. Rules and dashboards are made from it too.
KINDS = {
    "acceptance-drift": ("acceptance has fallen", "critical"),
    "position-drift": ("acceptance at one position has fallen", "warning"),
    "acceptance-rise": ("acceptance has risen: a larger k may pay", "info"),
    "speculation-off": ("tokens are generated, and none is drafted", "critical"),
    "k-pinned": ("the engine chooses to draft nothing in nearly all rounds", "warning"),
    "slowdown": ("speculation makes answers slower", "critical"),
    "version-mismatch": ("target and draft do not belong together", "critical"),
    "unreachable": ("the metrics cannot be read", "warning"),
}
#: Tokens without a draft after which speculation is off, and the share of rounds below which k is pinned.
OFF_TOKENS, PINNED_SHARE, PINNED_ROUNDS = 1000.0, 0.02, 500.0
#: How speculation is switched off, and how k is set, by engine.
SWITCH_OFF = {
    "slipstream": "restart `slipstream serve` with `-k 0`",
    "vllm": "restart without `--speculative-config`",
    "sglang": "restart without `--speculative-algorithm`",
    "tensorrt-llm": "restart without `speculative_config`",
    "llama.cpp": "restart with `--spec-type none` and without `--spec-draft-model`",
}
SET_K = {
    "slipstream": "`-k {k}`",
    "vllm": '`"num_speculative_tokens": {k}` in `--speculative-config`',
    "sglang": "`--speculative-num-steps {k} --speculative-num-draft-tokens {next}`",
    "tensorrt-llm": "`max_draft_len: {k}`",
    "llama.cpp": "`--spec-draft-n-max {k}`",
}


@dataclass(frozen=True)
class Context:
    """What an alarm's advice depends on beside the stream."""

    engine: str
    expected: Expected
    identity: Identity
    price: float | None = None
    """Dollars an hour of everything that serves this."""


def find(stream: Stream, state: Watched, context: Context) -> Iterator[Alarm]:
    """The alarms of one stream as it is now."""
    yield from _drift(stream, state, context)
    if stream.drafter:
        return  # of one drafter only its draft tokens are counted
    pinned = _pinned(stream, state, context)
    if pinned is not None:
        yield pinned
    elif (off := _off(stream, state, context)) is not None:
        yield off
    gain = speed_up(state.window, context.expected, state.tests.get(ALL))
    if gain is not None and gain.high < 1 and (state.window.drafted or 0) > 0:
        yield _slowdown(stream, state, context, gain)


# --- acceptance -------------------------------------------------------------------------------------------------------


def _drift(stream: Stream, state: Watched, context: Context) -> Iterator[Alarm]:
    for name, test in state.tests.items():
        if test.learned is None or test.recent is None:
            continue
        position = None if name == ALL else int(name)
        where = "acceptance" if position is None else f"acceptance at position {position}"
        if test.fallen:
            yield Alarm(
                kind="acceptance-drift" if position is None else "position-drift",
                stream=stream,
                what=f"{where} fell from {test.learned.rate:.0%} to about {test.recent:.0%}",
                advice=_advice(state, context),
                cost=_cost(state, context, state.tests.get(ALL, test)),
                severity=KINDS["acceptance-drift" if position is None else "position-drift"][1],
                position=position,
                value=test.recent,
                expected=test.learned.rate,
            )
        elif test.risen and position is None:
            yield Alarm(
                kind="acceptance-rise",
                stream=stream,
                what=f"{where} rose from {test.learned.rate:.0%} to about {test.recent:.0%}",
                advice="Plan anew, since a larger k may pay now: `slipstream plan`; then accept this as usual "
                "with --relearn.",
                cost="nothing is lost; something may be gained",
                severity=KINDS["acceptance-rise"][1],
                value=test.recent,
                expected=test.learned.rate,
            )


def _advice(state: Watched, context: Context) -> str:
    """What to do about a fall: what may have changed, another k, training, switching off."""
    target = context.identity.target or context.expected.target or "TARGET"
    draft = context.expected.draft or context.identity.draft or "DRAFT"
    parts = [
        "See whether the target's weights, the chat template or the requests changed at that time.",
        _k_advice(state, context),
        "Train the draft on what the service answers now: "
        f"`slipstream distill {target} --init {draft} --capture DIR --out NEW`.",
        f"If it is to stay as it is, accept it as usual with --relearn; to do without drafts, {_off_way(context)}.",
    ]
    return " ".join(part for part in parts if part)


def _k_advice(state: Watched, context: Context) -> str:
    """The best k at today's acceptance, by the plan's costs; else what the positions say."""
    seen = rates(state.window)
    at = tuple(seen.at[j] for j in sorted(seen.at)) or ((seen.acceptance,) * 8 if seen.acceptance is not None else ())
    if not at:
        return ""
    if context.expected.costs is not None:
        choice = best(at, context.expected.costs)
        if choice.k == 0:
            return "At this acceptance no k pays: switch drafting off until the draft is trained anew."
        gain = expected_speed_up(at[: choice.k], context.expected.costs)
        best_k = _set_k(context, choice.k)
        return f"At this acceptance k = {choice.k} is best ({gain:.2f}x by the plan's costs): {best_k}."
    low = next((j for j, a in enumerate(at, start=1) if a < 0.5), None)
    if low is not None and low > 1:
        return f"From position {low} on less than half is accepted: lower k to {low - 1}, {_set_k(context, low - 1)}."
    return "Lower k; `slipstream plan` says which is best, and `--plan` lets this monitor say so."


def _set_k(context: Context, k: int) -> str:
    return SET_K.get(context.engine, "k = {k}").replace("{k}", str(k)).replace("{next}", str(k + 1))


def _off_way(context: Context) -> str:
    return SWITCH_OFF.get(context.engine, "switch speculation off")


def _cost(state: Watched, context: Context, test: drift.Detector) -> str:
    """What the fall costs as long as it lasts."""
    seen = rates(state.window)
    if test.learned is None or seen.length is None or seen.acceptance is None or seen.k is None:
        return "not known: the engine tells no rounds"
    usual = 1 + seen.k * test.learned.rate
    now = 1 + seen.k * (test.recent if test.recent is not None else seen.acceptance)
    slower = max(0.0, usual / now - 1)
    words = f"at this k, {now:.2f} tokens a round instead of {usual:.2f}: each token takes about {slower:.0%} longer"
    if context.price is not None:
        words += f", which is ${context.price * 24 * slower:,.0f} a day of servers at ${context.price:,.2f} an hour"
    return words


# --- no drafts, no gain -----------------------------------------------------------------------------------------------


def _off(stream: Stream, state: Watched, context: Context) -> Alarm | None:
    wanted = context.expected.speculation
    if wanted is False or not (wanted or state.drafted_before) or state.silent < OFF_TOKENS:
        return None
    return Alarm(
        kind="speculation-off",
        stream=stream,
        what=f"the last {state.silent:,.0f} tokens were generated without a single draft token",
        advice="Look at the engine's start-up log for why it does not draft (a draft that did not load, a sampling "
        "parameter or feature that disables it, a batch-size limit), and at its command line: "
        "`slipstream export` writes it. If that is meant to be, say so with --no-speculation.",
        cost=_lost(state),
        severity=KINDS["speculation-off"][1],
        value=0.0,
    )


def _pinned(stream: Stream, state: Watched, context: Context) -> Alarm | None:
    window = state.window
    if context.expected.speculation is False or not window.rounds or window.rounds < PINNED_ROUNDS:
        return None
    zeros = window.k_zero
    share = 1 - zeros / window.rounds if zeros is not None else rates(window).drafting
    if share is None or share >= PINNED_SHARE or (zeros is None and not window.drafted):
        return None
    return Alarm(
        kind="k-pinned",
        stream=stream,
        what=f"only {share:.1%} of the last {window.rounds:,.0f} rounds had a draft",
        advice="The engine finds that drafting does not pay at this load and acceptance, or copies find nothing "
        "to copy. Compare with `slipstream plan` at this batch size; if it agrees, switch drafting off and give "
        f"the draft's memory back: {_off_way(context)}. If not, train the draft: `slipstream distill`.",
        cost=_lost(state) + "; the draft still occupies memory",
        severity=KINDS["k-pinned"][1],
        value=share,
    )


def _lost(state: Watched) -> str:
    usual = state.tests.get(ALL)
    if usual is None or usual.learned is None or not state.total.rounds:
        return "what drafting gained is lost"
    length = rates(state.total).length or 1.0
    return f"before, a round gave {length:.2f} tokens on average; now it gives 1"


def _slowdown(stream: Stream, state: Watched, context: Context, gain: SpeedUp) -> Alarm:
    slower = 1 / gain.value - 1
    extra = ""
    if context.price is not None:
        extra = f", ${context.price * 24 * slower:,.0f} a day of servers at ${context.price:,.2f} an hour"
    return Alarm(
        kind="slowdown",
        stream=stream,
        what=f"speed-up is {gain.value:.2f}x ({gain.how})",
        advice=f"{_k_advice(state, context)} Or switch drafting off: {_off_way(context)}.",
        cost=f"each token takes about {slower:.0%} longer than without drafts{extra}",
        severity=KINDS["slowdown"][1],
        value=gain.value,
        expected=1.0,
    )


# --- versions ---------------------------------------------------------------------------------------------------------


def mismatches(before: Identity | None, now: Identity, context: Context) -> Iterator[Alarm]:
    """Alarms of models that do not belong together.

    Args:
        before: what the engine ran when the draft was last changed; None at the first look.
        now: what it runs.
        context: with what the plan says.
    """
    expected = context.expected
    if now.trained_for and now.target_version and now.trained_for != now.target_version:
        yield _mismatch(f"the draft was trained for target {now.trained_for}, and {now.target_version} runs")
    for role, wanted, runs in (("target", expected.target, now.target), ("draft", expected.draft, now.draft)):
        if wanted and runs and not _alike(wanted, runs):
            yield _mismatch(f"the plan's {role} is {wanted}, and the engine runs {runs}")
    if before is not None and _changed(before, now) and _same_draft(before, now):
        what = f"the target changed from {_version(before)} to {_version(now)}, and the draft is the one of before"
        yield _mismatch(what)


def _mismatch(what: str) -> Alarm:
    return Alarm(
        kind="version-mismatch",
        stream=Stream(),
        what=what,
        advice="Deploy target and draft together (the exported Kubernetes objects carry both versions), watch "
        "acceptance over the next thousands of draft tokens, and train the draft on the new target: "
        "`slipstream distill`. If they do belong together, say so with --relearn.",
        cost="answers stay exact; acceptance, and with it the speed-up, may fall",
        severity=KINDS["version-mismatch"][1],
    )


def _changed(before: Identity, now: Identity) -> bool:
    return (before.target, before.target_version) != (now.target, now.target_version) and bool(
        before.target or before.target_version
    )


def _same_draft(before: Identity, now: Identity) -> bool:
    return bool(now.draft) and (before.draft, before.draft_version) == (now.draft, now.draft_version)


def _version(identity: Identity) -> str:
    return "@".join(part for part in (identity.target, identity.target_version) if part) or "?"


def _alike(one: str, other: str) -> bool:
    """Whether two names may be of one model: places differ, and files say how their weights are held.

    >>> _alike("org/model-7b", "/weights/model-7b-q8_0.gguf"), _alike("org/model-7b", "org/model-70b")
    (True, False)
    """
    a, b = (
        name.rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf").lower() for name in (one, other)
    )
    shorter, longer = sorted((a, b), key=len)
    return longer == shorter or longer.startswith((f"{shorter}-", f"{shorter}.", f"{shorter}_"))


def unreachable(reason: str, failures: int) -> Alarm:
    """The engine's metrics could not be read several times."""
    return Alarm(
        kind="unreachable",
        stream=Stream(),
        what=f"the metrics could not be read {failures} times in a row ({reason})",
        advice="See whether the engine runs and serves its metrics at this address.",
        cost="nothing is watched meanwhile",
        severity=KINDS["unreachable"][1],
    )


def at_rest(alarm: Alarm) -> Alarm:
    """The alarm as it is told when it is over."""
    return replace(alarm, what=f"over: {alarm.what}")
