"""Whether two models can work together, told from configurations and tokenizers: no weights, no generation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from slipstream.errors import InputError
from slipstream.measure.engines import Combination, Facts, that_apply
from slipstream.measure.footprint import Load, Need, as_text, experts, need, peak, quantised_bits, step_bytes
from slipstream.models.describe import Description
from slipstream.models.vocabulary import measure_sharing, pair_vocabularies

Level = Literal["ok", "warning", "blocker"]
Kind = Literal["identical", "padded", "same family", "different", "unknown"]
#: What memory is listed for.
WEIGHTS = ("fp32", "bf16", "fp16", "int8")
#: From this share of the smaller vocabulary on the same id with the same text, two vocabularies are of one family.
_FAMILY = 0.95
_SHOWN = 5
#: Beyond this share of a machine's memory, a warning.
_TIGHT = 0.85
#: A draft of more than this share of the target's bytes can hardly pay.
_LARGE_DRAFT = 0.5
#: Entries of a draft's config.json that limit how many tokens it drafts at once.
_BLOCK_SIZES = ("block_size", "num_speculative_tokens", "n_predict")
_CHAT = (
    {"role": "user", "content": "What is a tide?"},
    {"role": "assistant", "content": "The rise and fall of the sea."},
    {"role": "user", "content": "And at night?"},
)


@dataclass(frozen=True)
class Finding:
    """One verdict line."""

    level: Level
    topic: str
    what: str
    do: str = ""
    how: str = "measured here: read from the files"


@dataclass(frozen=True)
class Setting:
    """What the pair is to do, and on what."""

    context: int
    batch: int
    k: int
    weights: str
    draft_weights: str
    on_cpu: bool
    memory: int | None
    """Bytes that there are; None if nobody knows."""
    memory_how: str
    text: str
    """Like what is to be written: vocabularies are compared by it."""


@dataclass(frozen=True)
class Vocabulary:
    """Two vocabularies, id by id."""

    kind: Kind
    target_ids: int = 0
    draft_ids: int = 0
    target_rows: int = 0
    draft_rows: int = 0
    same: int = 0
    """Ids with the same text in both."""
    shared: int = 0
    """Ids with a counterpart in the other vocabulary, at whatever place."""
    mass: float = 0.0
    """Share of the ids of the text, as the target spells it, that the draft can propose."""
    differing: tuple[tuple[int, str, str], ...] = ()
    """The first ids that both have and that stand for different texts: id, target's text, draft's."""
    num_differing: int = 0
    last_differing: int = -1
    """The highest such id; -1 if there is none."""
    obstacle: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found."""

    findings: tuple[Finding, ...]
    vocabulary: Vocabulary | None
    needs: dict[str, tuple[Need, Need | None]]
    """By kind of weights: the target's and the draft's."""
    predicted_peak: int
    """Bytes, at the chosen weights."""
    engines: tuple[Combination, ...] = field(default=())

    @property
    def blocked(self) -> bool:
        """Whether the pair cannot be used as asked."""
        return any(f.level == "blocker" for f in self.findings)


def examine(
    target: Description, draft: Description | None, setting: Setting, table: Sequence[Combination] = ()
) -> Diagnosis:
    """Everything that can be told about a target, and about a pair if there is a draft."""
    findings = [*_rollback("target", target), *_target_ids(target), *_target_context(target, setting)]
    vocabulary, engines = None, []
    if draft is not None:
        vocabulary = compare(target, draft, setting.text)
        findings += [*_rollback("draft", draft), *_vocabulary(vocabulary)]
        findings += [*_special_tokens(target, draft), *_chat_template(target, draft)]
        findings += [*_draft_context(target, draft, setting), *_block_size(draft, setting)]
        findings += _dtypes(target, draft, setting)
        engines = that_apply(_facts(target, draft, vocabulary, setting), list(table))
    needs = {w: _needs(target, draft, setting, w, w) for w in WEIGHTS}
    chosen = _needs(target, draft, setting, setting.weights, setting.draft_weights)
    findings += _memory(peak(*chosen), setting, draft is not None)
    return Diagnosis(tuple(findings), vocabulary, needs, peak(*chosen), tuple(engines))


# --- vocabularies -----------------------------------------------------------------------------------------------------


def compare(target: Description, draft: Description, text: str) -> Vocabulary:
    """Two vocabularies id by id, and how much of ``text`` the draft can propose."""
    unknown = Vocabulary("unknown", target_rows=target.vocab_size, draft_rows=draft.vocab_size)
    if target.tokenizer is None or draft.tokenizer is None:
        return unknown
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    same = len(ours.items() & theirs.items())
    base = replace(unknown, target_ids=len(ours), draft_ids=len(theirs), same=same, shared=same)
    if ours == theirs:
        return replace(base, kind="identical" if target.vocab_size == draft.vocab_size else "padded", mass=1.0)
    unlike = _differing(ours, theirs)
    if not unlike:
        ids, known = target.tokenizer(text, add_special_tokens=False)["input_ids"], set(theirs.values())
        return replace(base, kind="same family", mass=sum(i in known for i in ids) / max(1, len(ids)))
    base = replace(
        base,
        kind="same family" if same >= _FAMILY * min(len(ours), len(theirs)) else "different",
        differing=tuple((i, *unlike[i]) for i in sorted(unlike)[:_SHOWN]),
        num_differing=len(unlike),
        last_differing=max(unlike),
    )
    try:
        sharing = measure_sharing(pair_vocabularies(target, draft), text)
    except InputError as error:
        return replace(base, kind="different", shared=0, obstacle=str(error))
    return replace(base, shared=sharing.shared, mass=sharing.of_text)


def _differing(ours: dict[str, int], theirs: dict[str, int]) -> dict[int, tuple[str, str]]:
    """Both texts of each id that has two."""
    only_ours = {token: text for text, token in ours.items() - theirs.items()}
    only_theirs = {token: text for text, token in theirs.items() - ours.items()}
    return {token: (only_ours[token], only_theirs[token]) for token in only_ours.keys() & only_theirs.keys()}


def _vocabulary(found: Vocabulary) -> Iterator[Finding]:
    topic = "vocabulary"
    counts = f"{found.same:,} of {found.target_ids:,} ids stand for the same text"
    if found.kind == "unknown":
        what = "a model has no tokenizer, so its ids are taken to mean what the other's mean"
        yield Finding("warning", topic, what, "put its tokenizer.json beside its config.json")
    elif found.kind == "identical":
        yield Finding("ok", topic, f"identical: {counts}, {found.target_rows:,} rows in both")
    elif found.kind == "padded":
        what = f"identical, padded to {found.target_rows:,} and {found.draft_rows:,} rows: missing ids have q = 0"
        yield Finding("ok", topic, what)
    elif found.obstacle is not None:
        yield Finding("blocker", topic, found.obstacle, "take a draft model of the target's family")
    elif not found.differing:
        what = f"same family: {counts}, none differs; the draft can propose {found.mass:.1%} of the text"
        yield Finding("ok", topic, what)
    else:
        first = "; ".join(f"id {i} is {ours!r} and {theirs!r}" for i, ours, theirs in found.differing[:2])
        what = f"{found.kind}: {counts}; {found.shared:,} have a counterpart, {found.mass:.1%} of the text; {first}"
        do = (
            "expect less acceptance, and work on the CPU for every draft; a draft with the target's tokenizer is better"
        )
        yield Finding("warning", topic, what, do)


# --- checks -----------------------------------------------------------------------------------------------------------


def _rollback(role: str, model: Description) -> Iterator[Finding]:
    if model.obstacle is not None:
        what, _, do = model.obstacle.rstrip(".").rpartition("; ")
        yield Finding("blocker", f"{role}'s cache", what or do, do if what else "choose another model")
    else:
        yield Finding("ok", f"{role}'s cache", "rejected tokens can be taken back")


def _target_ids(target: Description) -> Iterator[Finding]:
    """Nothing if every id of the tokenizer has a row, as it should be."""
    ids = max(target.tokenizer.get_vocab().values(), default=0) + 1 if target.tokenizer is not None else 0
    if ids > target.vocab_size:
        what = f"the target's tokenizer has ids up to {ids - 1:,}, and the target only {target.vocab_size:,} rows"
        yield Finding("warning", "tokenizer", what, "take the tokenizer that belongs to it, or avoid the ids beyond")


def _target_context(target: Description, setting: Setting) -> Iterator[Finding]:
    limit = target.max_positions
    if limit is not None and setting.context > limit:
        what = f"--context {setting.context:,} is beyond the target's {limit:,} positions"
        yield Finding("blocker", "context", what, f"use --context {limit} or less, or another target")
    else:
        within = f"the target's {limit:,} positions" if limit is not None else "positions without a limit"
        yield Finding("ok", "context", f"{setting.context:,} of {within}")


def _draft_context(target: Description, draft: Description, setting: Setting) -> Iterator[Finding]:
    limit = draft.max_positions
    if limit is not None and setting.context + setting.k > limit:
        what = f"the draft was made for {limit:,} positions: beyond them nothing is drafted"
        yield Finding("warning", "draft's context", what, "take a draft with a longer context for long texts")
    elif limit is not None and target.max_positions is not None and limit < target.max_positions:
        what = f"the draft ends at {limit:,} positions, the target at {target.max_positions:,}"
        yield Finding("ok", "draft's context", f"{what}; --context {setting.context:,} is within both")


def _special_tokens(target: Description, draft: Description) -> Iterator[Finding]:
    if target.tokenizer is None or draft.tokenizer is None:
        return
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    pairs = [(r, getattr(target.tokenizer, r, None), getattr(draft.tokenizer, r, None)) for r in roles]
    unlike = [f"{role} {ours!r} and {theirs!r}" for role, ours, theirs in pairs if ours != theirs]
    if set(target.eos_token_ids) != set(draft.eos_token_ids):
        unlike.append(f"end-of-sequence ids {list(target.eos_token_ids)} and {list(draft.eos_token_ids)}")
    if _adds_start(target.tokenizer) != _adds_start(draft.tokenizer):
        unlike.append("one of them puts a BOS before a text")
    if unlike:
        do = "nothing has to be done: the target's decide; where the draft's matter to it, acceptance is lower there"
        yield Finding("warning", "special tokens", f"target and draft differ in {'; '.join(unlike)}", do)
    else:
        yield Finding("ok", "special tokens", "BOS, EOS, padding and unknown are the same")


def _adds_start(tokenizer: Any) -> bool:
    """Whether a tokenizer puts something before a text."""
    with_specials, without = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (True, False))
    return bool(with_specials[:1] != without[:1])


def _chat_template(target: Description, draft: Description) -> Iterator[Finding]:
    ours, theirs = _rendered(target), _rendered(draft)
    topic = "chat template"
    if ours is None or theirs is None:
        missing = "neither model has" if ours is theirs else "the target has" if theirs is None else "the draft has"
        level: Level = "ok" if ours is theirs else "warning"
        do = "" if ours is theirs else "prefer a draft that was trained on the same chats; acceptance may be low"
        yield Finding(level, topic, f"{missing} a usable chat template", do)
    elif ours[1] == theirs[1]:
        yield Finding("ok", topic, f"both render a chat of {len(_CHAT)} messages to the same {len(ours[1])} ids")
    elif ours[0] == theirs[0]:
        yield Finding("ok", topic, "both render a chat to the same text, each in its own ids")
    else:
        at = next((i for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=False)) if a != b), 0)
        what = f"the two render a chat differently, from {ours[0][at : at + 24]!r} and {theirs[0][at : at + 24]!r} on"
        do = "nothing has to be done: the target's is used for both; a draft trained on it is accepted more often"
        yield Finding("warning", topic, what, do)


def _rendered(model: Description) -> tuple[str, list[int]] | None:
    """A chat as text and as ids; None without a template, or if it does not take these messages."""
    tokenizer: Any = model.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return None
    try:
        text = tokenizer.apply_chat_template(list(_CHAT), tokenize=False, add_generation_prompt=True)
    except Exception:  # whatever a template raises
        return None
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _block_size(draft: Description, setting: Setting) -> Iterator[Finding]:
    stated = [(name, draft.config.get(name)) for name in _BLOCK_SIZES]
    sizes = [(name, size) for name, size in stated if isinstance(size, int) and size > 0]
    for name, size in sizes:
        if size < setting.k:
            what = f"-k {setting.k} is more than the draft's {name} of {size}"
            yield Finding("blocker", "k", what, f"use -k {size} or less")
        else:
            yield Finding("ok", "k", f"-k {setting.k} is within the draft's {name} of {size}")
    if not sizes:
        yield Finding("ok", "k", f"the draft sets no limit to -k {setting.k}")


def _dtypes(target: Description, draft: Description, setting: Setting) -> Iterator[Finding]:
    topic = "weights"
    for role, model, weights in (("target", target, setting.weights), ("draft", draft, setting.draft_weights)):
        if stated := model.config.get("quantization_config"):
            yield _quantised(role, stated, setting)
        elif weights == "int8" and not (setting.on_cpu and model.ours):
            what = f"int8 is not available for the {role} {model.name} here"
            yield Finding("blocker", topic, what, "use fp16, bf16 or fp32")
        elif setting.on_cpu and weights == "bf16":
            what = f"bf16 on a CPU makes a pass over several rows of the {role} several times as dear as over one"
            yield Finding("warning", topic, what, "use fp16 or int8")
    yield from _sizes(target, draft, setting)


def _quantised(role: str, stated: Mapping[str, Any], setting: Setting) -> Finding:
    bits = quantised_bits(stated)
    method = f"{stated.get('quant_method', 'by a method without a name')}{f', {bits} bits' if bits else ''}"
    what = f"the {role} is quantised already ({method}) and runs as it is, in transformers' modules"
    if not setting.on_cpu:
        return Finding("ok", "weights", what)
    return Finding(
        "warning", "weights", what, "most of these need a GPU; on a CPU take the checkpoint it was made from"
    )


def _sizes(target: Description, draft: Description, setting: Setting) -> Iterator[Finding]:
    whole = step_bytes(target, setting.weights, setting.on_cpu)
    share = step_bytes(draft, setting.draft_weights, setting.on_cpu) / whole if whole else 0.0
    how = "predicted from the bytes that a step reads"
    if share > _LARGE_DRAFT:
        what = f"a draft step reads {share:.0%} of the bytes of a target step, so c is about {share:.2f} at best"
        lighter = "" if setting.draft_weights == "int8" or not draft.ours or not setting.on_cpu else ", or int8 for it"
        do = "the other way round it could gain" if share > 1 else f"take a smaller draft{lighter}"
        yield Finding("warning", "size", what, do, how)
    elif share:
        yield Finding("ok", "size", f"a draft step reads {share:.0%} of the bytes of a target step", how=how)
    if (found := experts(target)) is not None:
        used, there = found
        most = min(there, used * (setting.k + 1))
        what = f"a step reads {used} of {there} experts, a verification of {setting.k + 1} rows up to {most}"
        yield Finding("warning", "experts", what, "expect v(n) to rise with k: a small k, and measure the costs", how)


# --- memory and engines -----------------------------------------------------------------------------------------------


def _needs(
    target: Description, draft: Description | None, setting: Setting, weights: str, draft_weights: str
) -> tuple[Need, Need | None]:
    ours = need(target, weights, Load(setting.context, setting.batch, setting.k + 1, setting.on_cpu))
    if draft is None:
        return ours, None
    return ours, need(draft, draft_weights, Load(setting.context, setting.batch, 1, setting.on_cpu))


def _memory(predicted: int, setting: Setting, drafting: bool) -> Iterator[Finding]:
    kinds = f"{setting.weights} and {setting.draft_weights}" if drafting else setting.weights
    how = f"predicted from shapes, with {kinds} weights; {setting.memory_how}"
    if setting.memory is None:
        what = f"about {as_text(predicted)} are needed; what there is cannot be told here"
        yield Finding("warning", "memory", what, "say it with --memory", how)
        return
    what = f"about {as_text(predicted)} of {as_text(setting.memory)} are needed at most"
    if predicted > setting.memory:
        do = "use lighter weights, a shorter --context, a smaller --batch, or another machine"
        yield Finding("blocker", "memory", what, do, how)
    elif predicted > _TIGHT * setting.memory:
        yield Finding("warning", "memory", what, "leave room for what else runs; lighter weights help most", how)
    else:
        yield Finding("ok", "memory", what, how=how)


def _start(tokenizer: Any) -> int | None:
    """The id that a tokenizer puts before a text; None if it puts none."""
    return tokenizer("a")["input_ids"][0] if tokenizer is not None and _adds_start(tokenizer) else None


def _facts(target: Description, draft: Description, found: Vocabulary, setting: Setting) -> Facts:
    starts = [_start(m.tokenizer) for m in (target, draft)]
    return Facts(
        target_rows=target.vocab_size,
        draft_rows=draft.vocab_size,
        tokenizers_differ=found.num_differing > 0,
        texts_differ_from_5=found.last_differing >= 5,
        bos_differs=starts[0] != starts[1],
        can_roll_back=target.obstacle is None and draft.obstacle is None,
        batch=setting.batch,
        target_quantised=bool(target.config.get("quantization_config")),
        draft_quantised=bool(draft.config.get("quantization_config")),
    )
