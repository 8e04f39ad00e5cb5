"""``SpeculativeDecoding``, the class a user meets first."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.answers import Answer, Setting, check_prompt
from slipstream.controller import Adaptive, Policy, make_policy
from slipstream.decode import Decoder
from slipstream.drafters import check_names, is_name, make_drafter
from slipstream.engine import Engine
from slipstream.errors import InputError
from slipstream.goodput import Goodput
from slipstream.measure.curves import begin_with_measured
from slipstream.models.base import ROWS, Model
from slipstream.models.load import Checkpoint, open_checkpoint, open_draft
from slipstream.models.vocabulary import check_pair
from slipstream.sampling import validate
from slipstream.seats import Limits, enough_memory
from slipstream.text import Prompt, encode, token_id
from slipstream.types import Output, Piece, Request, Round, SamplingParams, Stats
from slipstream.verify import RULES, check_rule


class SpeculativeDecoding:
    """Generates from ``target_model``, sooner, by letting a draft propose tokens that the target verifies.

    The answers follow the target's own distribution exactly, whatever the draft is.

    Args:
        target_model: what ``load_model`` returns, a transformers model as it is, or a path.
        draft_model: the same, or ``"suffix"`` (copies from the text), ``"early-exit:8"`` (the target's own first
            layers), a drafter object, None for plain decoding, or a list of them: a cascade, in which the next one
            drafts what the one before is not sure of.
        k: number of draft tokens in a round: ``"adaptive"``, whatever yields the most tokens a second, 0 included;
            ``"halving"``, 8 until the first rejection and 4 from then on; a number, 0 decodes plainly; or a policy.
        tokenizer: needed only where text goes in or out of a model that came without one.
        rejection_sampling: None samples if the temperature is above 0; False insists on greedy decoding.
        rule: ``"block"`` (never accepts fewer tokens in expectation) or ``"token"``, see ``slipstream.verify``. Greedy
            answers do not depend on it, and ``bit_exact`` does not use it.
        bit_exact: the target's logits have the same bits however many tokens are in a pass, and random numbers belong
            to positions: greedy and seeded answers are those of plain decoding, always (lean decoder on a CPU only).
        defaults: fields of ``SamplingParams``, for calls that do not say otherwise.

    Raises:
        InputError: a model, name or number that cannot be used; one sentence says why.
    """

    def __init__(
        self,
        target_model: Any,
        draft_model: Any = None,
        k: int | str | Policy = "adaptive",
        *,
        tokenizer: Any | None = None,
        rejection_sampling: bool | None = None,
        rule: str = RULES[0],
        bit_exact: bool = False,
        **defaults: Any,
    ) -> None:
        self.policy = make_policy(k)
        self._goodput = Goodput()
        if rejection_sampling is not None and type(rejection_sampling) is not bool:
            raise InputError(f"rejection_sampling={rejection_sampling!r} is not usable; use None, True or False")
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise InputError(
                f"tokenizer= is a {type(tokenizer).__name__}; pass what AutoTokenizer.from_pretrained returns"
            )
        check_rule(rule)
        self.k = k
        self.rule = rule
        self.bit_exact = bit_exact
        self.rejection_sampling = rejection_sampling
        self.defaults = self._checked(_params(None, defaults))
        # Everything that can be known without weights is checked before any are read.
        target, draft = _opened(target_model), _each(draft_model, _opened_draft)
        if not _is_model(target):
            raise InputError(
                f"target_model= is a {_kind(target_model)}, which is not a model; use what load_model returns, a "
                "transformers model or a path"
            )
        members = draft if isinstance(draft, list) else [draft]
        if isinstance(target, Checkpoint):
            check_names(members, target)
        for one in members:
            if _is_model(one):
                check_pair(target, one)
        loaded = _loaded(target)
        if getattr(loaded, "output_ids", None) is not None:
            raise InputError(
                f"{loaded.name} can say only {loaded.vocab_size} of the {loaded.embedding_size} ids that it reads, "
                "so it is no target; use it as draft_model"
            )
        self.target: Model = _bit_exact(loaded) if bit_exact else loaded
        validate(self.defaults, self.target.vocab_size)
        self.tokenizer = tokenizer if tokenizer is not None else self.target.tokenizer
        self.drafter = make_drafter(_each(draft, _loaded), self.target)
        if type(k) is str and isinstance(self.policy, Adaptive):
            begin_with_measured(self.policy, self.target, self.drafter)

    def generate(
        self,
        input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
        attention_mask: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        token_type_ids: Tensor | None = None,
        **overrides: Any,
    ) -> Tensor:
        """Prompt ids in, prompt and answer ids out, as transformers' ``generate``.

        Args:
            input_ids: (batch, prompt) or (prompt,).
            attention_mask: (batch, prompt), 0 where a row is padding.
            token_type_ids: ignored; some tokenizers return it beside the other two.
            overrides: fields of ``SamplingParams``.

        Returns:
            LongTensor (batch * n, prompt + new), rows padded on the right.
        """
        ids = _tensor("input_ids", input_ids)
        if ids.ndim not in (1, 2) or ids.is_floating_point():
            raise InputError(f"input_ids of shape {tuple(ids.shape)} are not (batch, prompt) token ids")
        ids = torch.atleast_2d(ids)
        mask = (
            torch.ones_like(ids)
            if attention_mask is None
            else torch.atleast_2d(_tensor("attention_mask", attention_mask))
        )
        if mask.shape != ids.shape:
            raise InputError(f"attention_mask {tuple(mask.shape)} does not fit input_ids {tuple(ids.shape)}")
        prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        params = self._resolve(None, overrides)
        outputs = self.complete(prompts, params)
        new = max(len(o.tokens) for o in outputs) if outputs else 0
        padded = [[*o.tokens, *[self._pad_id] * (new - len(o.tokens))] for o in outputs]
        answers = torch.tensor(padded, dtype=torch.long, device=ids.device).reshape(len(outputs), new)
        return torch.cat((ids.long().repeat_interleave(params.n, dim=0), answers), dim=1)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any) -> Stream:
        """One answer, round by round.

        Args:
            prompt: text, token ids or chat messages.
            params: fields that are given in it win over the constructor's.
            overrides: fields of ``SamplingParams``; they win over both.
        """
        resolved = self._resolve(params, overrides)
        if resolved.n != 1:
            raise InputError(f"n={resolved.n} answers cannot be streamed as one; use complete()")
        return self._start(self._ids(prompt), resolved, 0)

    def complete(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **overrides: Any
    ) -> list[Output]:
        """Whole answers: ``n`` for each prompt, in the prompts' order. Several are worked on at a time, by an engine.

        Args:
            prompts: one prompt, or a list of prompts, each text, token ids or chat messages.
            params: fields that are given in it win over the constructor's.
            overrides: fields of ``SamplingParams``; they win over both.
        """
        resolved = self._resolve(params, overrides)
        ids = [self._ids(p) for p in _several(prompts)]
        requests = [Request(row, resolved, index=index) for row in ids for index in range(resolved.n)]
        if len(requests) == 1:
            return [self._start(ids[0], resolved, 0).finish()]
        return self._together(requests) if requests else []

    def _resolve(self, params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
        given = _params(params, overrides)
        resolved = self._checked(given.over(self.defaults))
        validate(resolved, self.target.vocab_size)
        if resolved.stop and self.tokenizer is None:
            raise InputError(f"stop={list(resolved.stop)!r} needs text, but there is no tokenizer; pass tokenizer=")
        return resolved

    def _checked(self, params: SamplingParams) -> SamplingParams:
        validate(params)
        if self.rejection_sampling is False and params.temperature > 0:
            raise InputError(
                f"rejection_sampling=False contradicts temperature={params.temperature}: sampling is exact only with "
                "rejection sampling; set temperature=0 or leave rejection_sampling out"
            )
        return params

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt as ids that the target can be fed."""
        ids = encode(prompt, self.tokenizer)
        check_prompt(ids, self.target)
        return ids

    def _start(self, prompt: tuple[int, ...], params: SamplingParams, index: int) -> Stream:
        return Stream(*self._setting.start(prompt, params, index))

    @property
    def _setting(self) -> Setting:
        return Setting(self.target, self.drafter, self.policy, self.tokenizer, self.rule, self.bit_exact)

    def engine(self, limits: Limits | None = None) -> Engine:
        """An engine that answers many requests at once; an adaptive k is then chosen over all of them."""
        return Engine(self._batch_setting, limits)

    def _together(self, requests: Sequence[Request]) -> list[Output]:
        """The answers to several requests at once."""
        limits = Limits(memory=enough_memory(self._setting, requests), rows=ROWS)  # nobody waits for a first token
        return self.engine(limits).answers(requests)

    @property
    def _batch_setting(self) -> Setting:
        setting = self._setting
        return replace(setting, policy=self._goodput) if isinstance(self.policy, Adaptive) else setting

    @property
    def _pad_id(self) -> int:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        if pad is not None:
            return int(pad)
        return self.target.eos_token_ids[0] if self.target.eos_token_ids else 0


class Stream(Iterator[Piece]):
    """One answer in the making: iterate for its pieces, then read ``output``.

    It may be closed (or dropped) at any point; the models are free for the next request at once.
    """

    def __init__(self, decoder: Decoder, answer: Answer) -> None:
        self._decoder = decoder
        self._answer = answer
        self._pieces = self._run()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End the answer here; ``output`` then holds what there is so far."""
        self._pieces.close()
        self._answer.flush()

    def finish(self) -> Output:
        """Run to the end."""
        for _ in self:
            pass
        return self.output

    @property
    def rounds(self) -> tuple[Round, ...]:
        """What each round drafted, accepted and took, so far; the first one read the prompt."""
        return tuple(self._answer.rounds)

    @property
    def stats(self) -> Stats:
        """Counts and times so far."""
        return self.output.stats

    @property
    def output(self) -> Output:
        """The answer so far; its ``finish_reason`` is None until it has ended."""
        return self._answer.output

    def _run(self) -> Generator[Piece, None, None]:
        if self._answer.over:
            return
        for r in self._decoder.rounds(self._answer.prompt, self._answer.push):
            yield self._answer.add(r)


def _opened(model: Any, read: Callable[[Any], Checkpoint] = open_checkpoint) -> Any:
    """A path as a checkpoint, a transformers model behind its adapter, anything else as it is."""
    if isinstance(model, str | os.PathLike):
        return read(model)
    if isinstance(model, torch.nn.Module) and hasattr(model, "config"):
        from slipstream.models.huggingface import HuggingFaceModel

        return HuggingFaceModel(cast(Any, model))
    return model


def _opened_draft(draft: Any) -> Any:
    return draft if is_name(draft) else _opened(draft, open_draft)


def _each(draft: Any, function: Callable[[Any], Any]) -> Any:
    """``function`` of a draft, or of each of several."""
    return [function(one) for one in draft] if isinstance(draft, list | tuple) else function(draft)


def _loaded(model: Any) -> Any:
    return model.load() if isinstance(model, Checkpoint) else model


def _bit_exact(model: Any) -> Any:
    if not hasattr(model, "bit_exact"):
        raise InputError(f"bit_exact=True is not available for {model.name}, only for the lean decoder; leave it out")
    return model.bit_exact()


def _is_model(model: Any) -> bool:
    if isinstance(model, type):
        return False
    return isinstance(model, Checkpoint) or (hasattr(model, "forward") and hasattr(model, "new_cache"))


def _kind(value: Any) -> str:
    """What to call an object in a message: many an object's repr fills a screen."""
    return f"class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    """``overrides`` on top of ``params``, remembering which fields were given at all."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InputError(f"params= is a {_kind(params)}; pass SamplingParams(...), or its fields by name")
    known = {f.name for f in fields(SamplingParams)}
    for name in overrides:
        if name not in known:
            raise InputError(f"{name!r} is not a sampling parameter; use one of {', '.join(sorted(known))}")
    return SamplingParams(**{**(params.given() if params is not None else {}), **overrides})


def _tensor(name: str, given: Any) -> Tensor:
    if isinstance(given, Mapping):
        raise InputError(f"{name} is a {_kind(given)}, not token ids; unpack it: generate(**tokenizer(...))")
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} cannot be used as a tensor ({error}); pad short rows, or use complete()") from error


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several."""
    given = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        return [cast(Prompt, given)]
    if given and (isinstance(given[0], Mapping) or token_id(given[0]) is not None):
        return [cast(Prompt, given)]
    return list(cast(Sequence[Prompt], given))
