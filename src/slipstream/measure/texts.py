"""What acceptance is measured on: prompts with their answers, the user's or the target's, and how drafts see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.drafters import CascadeDrafter, Drafter, EarlyExitDrafter, ModelDrafter, SuffixDrafter
from slipstream.drafters.base import Gate
from slipstream.drafters.vocabulary import StringSession, VocabularyDrafter
from slipstream.errors import InputError
from slipstream.measure.acceptance import Rule, Trail, joined, trail
from slipstream.measure.prompts import BenchPrompt
from slipstream.measure.replay import Start
from slipstream.models.base import Model, feed
from slipstream.sampling import Sampler
from slipstream.speculative import SpeculativeDecoding
from slipstream.types import Draft, DraftEnd, SamplingParams

#: The longest draft that is replayed.
MOST = 16
#: Rows of logits that become probabilities at a time, which bounds the memory.
_ROWS = 32
#: Prompts that are answered together.
_TOGETHER = 8


@dataclass(frozen=True)
class Text:
    """One prompt with its answer, as ids."""

    id: str
    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    own: bool
    """Whether the target gave the answer, with the sampling in question."""
    limited: bool
    """Whether it ended because it was long enough."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Both."""
        return self.prompt + self.answer


def given_answers(prompts: Sequence[BenchPrompt], tokenizer: Any, most: int) -> list[Text]:
    """The texts of those prompts that came with an answer."""
    found = []
    for p in prompts:
        if p.answer is None:
            continue
        ids = tuple(tokenizer(p.answer, add_special_tokens=False)["input_ids"])
        if len(ids) > 1:
            found.append(Text(p.id, p.category, p.ids, ids[:most], own=False, limited=len(ids) > most))
    return found


def groups(prompts: Sequence[BenchPrompt]) -> list[list[BenchPrompt]]:
    """Prompts without an answer, some at a time."""
    open_ = [p for p in prompts if p.answer is None]
    return [open_[i : i + _TOGETHER] for i in range(0, len(open_), _TOGETHER)]


def answered(target: Model, prompts: Sequence[BenchPrompt], params: SamplingParams) -> list[Text]:
    """The target's own answers, decoded plainly."""
    spec = SpeculativeDecoding(target, None, k=0)
    outputs = spec.complete([list(p.ids) for p in prompts], replace(params, n=1))
    return [
        Text(p.id, p.category, p.ids, o.tokens, own=True, limited=o.finish_reason == "length")
        for p, o in zip(prompts, outputs, strict=True)
    ]


# --- teacher-forced passes --------------------------------------------------------------------------------------------


def target_logits(target: Model, text: Text) -> Tensor:
    """The target's logits of each position of the answer, (n, V)."""
    return feed(target, text.tokens[:-1], target.new_cache(), len(text.answer))


def draft_logits(drafter: Any, text: Text) -> Tensor | None:
    """A draft model's logits over the target's ids, (n, V); None of a drafter that has none for a whole text."""
    if isinstance(drafter, EarlyExitDrafter):
        cache, tokens = drafter.target.new_cache(), text.tokens[:-1]
        logits: Tensor = drafter.target.exit_early(tokens, cache, drafter.layers, len(text.answer), drafter.exit.head)
        return logits
    if not isinstance(drafter, ModelDrafter) or isinstance(drafter, VocabularyDrafter):
        return None
    model = drafter.model
    if model.max_positions is not None and len(text.tokens) > model.max_positions:
        return None
    known = [min(t, model.embedding_size - 1) for t in text.tokens[:-1]]
    found = feed(model, known, model.new_cache(), len(text.answer))
    if (to_target := drafter.output_map()) is not None:
        return to_target(found)
    vocab = drafter.target_vocab_size
    found = found[:, :vocab]
    return torch.nn.functional.pad(found, (0, vocab - found.shape[-1]), value=float("-inf"))


def trail_of(target_rows: Tensor, draft_rows: Tensor, text: Text, params: SamplingParams) -> Trail:
    """What both say of the answer under ``params``, from their logits (n, V)."""
    parts = []
    sampler = sampler_of(text, params)
    # At temperature 0 a distribution is sure of itself; what tells how sure the draft is are its logits.
    unsure = sampler_of(text, replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0))
    for start in range(0, len(text.answer), _ROWS):
        part = slice(start, start + _ROWS)
        tokens = text.answer[part]
        before = text.tokens[: len(text.prompt) + start + len(tokens) - 1]
        p, q = (sampler.probs(rows[part], before) for rows in (target_rows, draft_rows))
        sure = unsure.probs(draft_rows[part], before).amax(dim=1).tolist() if sampler.greedy else None
        parts.append(trail(p, q, tokens, sure))
    return joined(parts)


def replayed_trail(target_rows: Tensor, drafter: Drafter, text: Text, params: SamplingParams) -> Trail:
    """The same of a drafter with sessions only: it is asked for one token at each position."""
    parts = []
    sampler = sampler_of(text, params)
    session = drafter.start(sampler)
    for at, token in enumerate(text.answer):
        before = text.tokens[: len(text.prompt) + at]
        draft = session.draft(before, 1)
        p = sampler.probs(target_rows[at : at + 1], before)
        q = torch.zeros_like(p)
        if draft.probs is not None:
            q[0, : draft.probs.shape[1]] = draft.probs[0]
        elif draft.tokens and draft.tokens[0] < q.shape[1]:
            q[0, draft.tokens[0]] = 1
        parts.append(trail(p, q, [token], draft.confidence[:1] or None))
    return joined(parts)


def sampler_of(text: Text, params: SamplingParams) -> Sampler:
    """A sampler of the request that ``text`` answers."""
    return Sampler(params, len(text.prompt), (), 0)


# --- rounds as they would begin at each position ----------------------------------------------------------------------


def model_starts(found: Trail, rule: Rule, *, own: bool) -> Callable[[int], Start]:
    """Of a drafter that finds each token by a pass of a model."""

    @cache
    def starts(at: int) -> Start:
        return Start(found.reach(rule, at, MOST, own=own))

    return starts


def copied_starts(drafter: Drafter, text: Text, params: SamplingParams) -> Callable[[int], Start]:
    """Of a drafter whose drafts are functions of the past, by asking it at every position."""
    session = drafter.start(sampler_of(text, params))
    passed = int(not getattr(session, "copies", False))

    def look(at: int) -> Start:
        draft = session.draft(text.tokens[: len(text.prompt) + at], MOST)
        reach = _stands(draft.tokens, text.answer[at:])
        return Start(reach, (passed,) * len(reach))

    found = [look(at) for at in range(len(text.answer))]  # in order, as the session expects it
    return found.__getitem__


def _stands(drafted: Sequence[int], after: Sequence[int]) -> tuple[float, ...]:
    right, found = 1.0, []
    for token, wanted in zip(drafted, after, strict=False):
        right *= token == wanted
        found.append(right)
    return tuple(found)


class _Along:
    """Stands for a draft model in a cascade: goes on with the text itself, while the model would be sure enough.

    ``passes`` has the places of the text at which the model would have been asked.
    """

    gate: Gate | None = None

    def __init__(self, name: str, text: Text, sure: Sequence[float], passes: list[int]) -> None:
        self.name = name
        self._text = text
        self._sure = sure
        self._passes = passes

    def start(self, sampler: Sampler) -> _Along:
        return self

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        return self._go_on(len(tokens) - len(self._text.prompt), k)

    def _go_on(self, start: int, k: int) -> Draft:
        answer, at = self._text.answer, start
        ended: DraftEnd = "limit"
        while at < min(start + k, len(answer)):
            self._passes.append(at)
            if self.gate is not None and not self.gate(at - start, self._sure[at] if self._sure else 1.0):
                ended = "controller"
                break
            at += 1
        return Draft(answer[start:at], None, ended)


class _AlongOthers(_Along):
    """The same of a model that can go on from the others' tokens."""

    def draft_after(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Draft:
        return self._go_on(len(tokens) + len(drafted) - len(self._text.prompt), k)


def _stand_in(drafter: Drafter, known: Trail, text: Text, sampler: Sampler, passes: list[int]) -> _Along:
    goes_on = hasattr(drafter.start(sampler), "draft_after")
    return (_AlongOthers if goes_on else _Along)(drafter.name, text, known.sure, passes)


def cascade_starts(
    drafter: CascadeDrafter, trails: Sequence[Trail | None], text: Text, params: SamplingParams, rule: Rule
) -> Callable[[int], Start]:
    """Of a cascade: who copies really drafts, and each model in it stands for its ``Trail``."""
    sampler, asked = sampler_of(text, params), list[int]()
    members = list(zip(drafter.drafters, trails, strict=True))
    parts = [one if known is None else _stand_in(one, known, text, sampler, asked) for one, known in members]
    names = {one.name: known for one, known in members}
    known = next((one for one in trails if one is not None), None)
    session = CascadeDrafter(parts, min_confidence=drafter.min_confidence).start(sampler)

    def look(at: int) -> Start:
        asked.clear()
        draft = session.draft(text.tokens[: len(text.prompt) + at], MOST)
        so_far, reach = (1.0, 1.0), []
        for j, (token, source) in enumerate(zip(draft.tokens, draft.sources, strict=True)):
            place = at + j
            if place >= len(text.answer):
                break
            model = names.get(source)
            if model is not None:
                so_far = _further(so_far, _share(model, place, rule, text), rule, own=text.own)
            elif token == text.answer[place]:
                so_far = _further(so_far, 1 / _certainty(known, place), rule, own=text.own)
            else:
                so_far = (0.0, 0.0)
            reach.append(so_far[1])
        return Start(tuple(reach), tuple(asked.count(at + j) for j in range(len(reach) + 1)))

    found = [look(at) for at in range(len(text.answer))]
    return found.__getitem__


def _share(model: Trail, at: int, rule: Rule, text: Text) -> float:
    if rule == "block" and text.own:
        return model.ratio[at]
    return model.reach(rule, at, 1, own=text.own)[0]


def _certainty(known: Trail | None, at: int) -> float:
    """P of the answer's token."""
    return max(known.target[at], 1e-9) if known is not None else 1.0


def _further(so_far: tuple[float, float], share: float, rule: Rule, *, own: bool) -> tuple[float, float]:
    """q / P of a draft, and how likely all of it stands, with one more token; see ``Trail.reach``."""
    joint, least = so_far
    if rule == "block" and own:
        return joint * share, min(least, joint * share)
    return joint * min(share, 1.0), least * min(share, 1.0)


def starts_of(
    drafter: Drafter, trails: Sequence[Trail | None], text: Text, params: SamplingParams, rule: Rule
) -> Callable[[int], Start]:
    """The rounds of any drafter; ``trails`` has one entry, or one for each member of a cascade, None of copiers."""
    if isinstance(drafter, CascadeDrafter):
        return cascade_starts(drafter, trails, text, params, rule)
    if trails[0] is None or _writes_strings(drafter, text, params):
        return copied_starts(drafter, text, params)
    return model_starts(trails[0], rule, own=text.own)


def _writes_strings(drafter: Drafter, text: Text, params: SamplingParams) -> bool:
    if not isinstance(drafter, VocabularyDrafter):
        return False
    return isinstance(drafter.start(sampler_of(text, params)), StringSession)


def members_of(drafter: Drafter) -> tuple[Drafter, ...]:
    """Those of a cascade, else the drafter itself."""
    return tuple(drafter.drafters) if isinstance(drafter, CascadeDrafter) else (drafter,)


def has_model(drafter: Drafter) -> bool:
    """Whether some of its tokens take passes."""
    return any(not isinstance(one, SuffixDrafter) for one in members_of(drafter))


def reads_prompt(drafter: Drafter) -> bool:
    """Whether it has to read the prompt before its first draft."""
    return any(isinstance(one, ModelDrafter) for one in members_of(drafter))


def check_texts(texts: Sequence[Text]) -> list[Text]:
    """Those that say something of acceptance.

    Raises:
        InputError: none of them does.
    """
    found = [text for text in texts if len(text.answer) > 1]
    if not found:
        raise InputError("no answer has two tokens or more, so nothing can be said of drafts; give longer prompts")
    return found


def in_order(texts: Sequence[Text], prompts: Sequence[BenchPrompt]) -> Iterator[Text]:
    """In the order of the prompts."""
    by_id = {text.id: text for text in texts}
    return (by_id[p.id] for p in prompts if p.id in by_id)
