"""Engines under test, each behind one method: prompts, parameters and seeds in, answers out."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.audit.types import EVERY_PARAMETER, Answer, Counters, EngineError, Prompt, RefusedError, refusals
from slipstream.errors import InputError
from slipstream.text import encode
from slipstream.types import Output, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.speculative import SpeculativeDecoding


class SlipstreamEngine:
    """Slipstream in this process, with any drafter, rule and k."""

    honours = EVERY_PARAMETER

    def __init__(self, decoding: SpeculativeDecoding, name: str = "slipstream") -> None:
        self.name = name
        self._decoding = decoding
        if decoding.tokenizer is None:
            self.honours = EVERY_PARAMETER - {"stop"}

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it; several prompts share every pass."""
        if len(prompts) == 1:
            return self._told(self._decoding.complete(prompts[0], replace(params, seed=seeds[0])))
        requests = [
            Request(encode(prompt, self._decoding.tokenizer), replace(params, seed=seed), index=i)
            for prompt, seed in zip(prompts, seeds, strict=True)
            for i in range(params.n)
        ]
        return self._told(self._decoding._together(requests))

    def abandon(self, prompt: Prompt, params: SamplingParams, seed: int) -> None:
        """Begin an answer and do without the rest of it."""
        stream = self._decoding.stream(prompt, replace(params, seed=seed))
        next(stream, None)
        stream.close()

    def constrained(
        self, prompt: Prompt, pattern: str, params: SamplingParams, seeds: Sequence[int]
    ) -> list[str] | None:
        """Texts that a regular expression was asked of; None if there are no grammars here."""
        from slipstream.grammar import Grammars

        target, ids = self._decoding.target, encode(prompt, self._decoding.tokenizer)
        try:
            grammar = Grammars(self._decoding.tokenizer, target.vocab_size, target.eos_token_ids).regex(pattern)
        except (ImportError, InputError):
            return None
        masked = [replace(params, seed=seed, logits_processors=(grammar.processor(len(ids)),)) for seed in seeds]
        return [self._decoding.complete(ids, one)[0].text for one in masked]

    def _told(self, outputs: Sequence[Output]) -> list[Answer]:
        return [
            Answer(
                tokens=o.tokens,
                text=o.text if self._decoding.tokenizer is not None else None,
                finish_reason=o.finish_reason,
                logprobs=None if o.logprobs is None else tuple(entry.logprob for entry in o.logprobs),
                usage=o.stats.emitted,
                counters=Counters(o.stats.rounds, o.stats.drafted, o.stats.accepted),
                origins=tuple(o.origins),
            )
            for o in outputs
        ]


class TransformersEngine:
    """transformers' own ``generate``: plain, with an assistant, or looking up in the prompt.

    Args:
        model: a transformers model.
        assistant: a second one, or None.
        lookup: ``prompt_lookup_num_tokens``; 0 does without.
        k: draft tokens of the assistant, held constant.
        eos: ids that end an answer.
        tokenizer: for texts; None does without.
        call: further arguments of ``generate``.
        extra: further fields of the generation config.
    """

    honours = frozenset(
        {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens", "logit_bias", "seed"}
    )

    def __init__(
        self,
        model: Any,
        assistant: Any = None,
        lookup: int = 0,
        k: int = 4,
        eos: Sequence[int] = (),
        tokenizer: Any = None,
        call: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        import transformers

        kind = "assisted" if assistant is not None else "prompt lookup" if lookup else "plain"
        said = [f"transformers {transformers.__version__}", kind, f"k={lookup or k}"]
        self.name = ", ".join([*said, *(f"{name}={value}" for name, value in extra.items())])
        self._model, self._assistant, self._k, self._tokenizer = model, assistant, k, tokenizer
        self._eos = tuple(eos)
        self._fields = extra
        self._call = dict(call or {})
        if assistant is not None:
            self._call["assistant_model"] = assistant
        elif lookup:
            self._call["prompt_lookup_num_tokens"] = lookup
        self.unsupported: dict[str, str] = {}

    def probe(self) -> None:
        """As ``Refusing`` has it: a ``ValueError`` refuses, unless it comes without any parameter too."""
        self.complete([(1, 2)], SamplingParams(max_new_tokens=2), [0])
        self.unsupported = refusals(self.honours, lambda params: self.complete([(1, 2)], params, [0]))
        self.honours -= set(self.unsupported)

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it; one call of ``generate`` each, since assisted generation takes one prompt."""
        config = self._config(params)
        return [self._one(p, config, s) for p, s in zip(prompts, seeds, strict=True) for _ in range(params.n)]

    def _one(self, prompt: Prompt, config: Any, seed: int) -> Answer:
        ids = torch.tensor([prompt], dtype=torch.long, device=self._model.device)
        with _silent(), torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                out = self._model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **self._call
                )
            except ValueError as error:
                raise RefusedError(str(error)) from error
            except Exception as error:  # whatever goes wrong in there is a finding
                raise EngineError(f"{type(error).__name__}: {error}") from error
        tokens = tuple(out[0, len(prompt) :].tolist())
        text = None if self._tokenizer is None else str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        return Answer(tokens, text)

    def _config(self, params: SamplingParams) -> Any:
        from transformers import GenerationConfig

        sampled = params.temperature > 0
        eos = {*(() if params.ignore_eos else self._eos), *params.stop_token_ids}
        given: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "min_new_tokens": params.min_new_tokens or None,
            "do_sample": sampled,
            "eos_token_id": sorted(eos) or None,
            "pad_token_id": self._eos[0] if self._eos else 0,
            "repetition_penalty": params.repetition_penalty,
        }
        if sampled:
            given |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
            given |= {"min_p": params.min_p or None}
        if params.logit_bias:
            given["sequence_bias"] = {(token,): float(bias) for token, bias in params.logit_bias.items()}
        if self._assistant is not None:
            self._assistant.generation_config = GenerationConfig(
                num_assistant_tokens=self._k,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
                eos_token_id=given["eos_token_id"],
                pad_token_id=given["pad_token_id"],
            )
        return GenerationConfig(**given, **self._fields)


@contextmanager
def _silent() -> Iterator[None]:
    """Without the warnings that transformers' own code gives rise to."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


class CallableEngine:
    """A Python function ``f(prompt_ids, params: dict, seed) -> ids``, named as ``module:function``.

    The function may have an attribute ``honours``, the names of the parameters that it takes; without it temperature
    and max_new_tokens alone are tested. ``params`` holds the fields of ``SamplingParams`` that differ from the default.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = _imported(name)
        self.honours = _honoured(self._function, name)

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it."""
        plain = SamplingParams()
        given = {f.name: v for f in fields(params) if (v := getattr(params, f.name)) != getattr(plain, f.name)}
        given |= {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens}
        given.pop("seed", None)
        given.pop("n", None)
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            for number in range(params.n):
                try:
                    returned = self._function(list(prompt), dict(given), seed + 1_000_003 * number)
                    answers.append(Answer(_ids(returned)))
                except (Exception, SystemExit) as error:
                    raise EngineError(f"{type(error).__name__}: {error}, asked for {given}") from error
        return answers


def _ids(returned: Any) -> tuple[int, ...]:
    """What a function returned, as ids: 1.5 is none, and a text has none.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(returned, str | bytes | Mapping):
        raise TypeError(f"it returned a {type(returned).__name__}, not a list of ids")
    return tuple(index(token) for token in returned)


def _honoured(function: Any, name: str) -> frozenset[str]:
    """The parameters that a function says it takes.

    Raises:
        InputError: they are no list of names, or no parameters.
    """
    given = getattr(function, "honours", ("temperature",))
    names = list(given) if isinstance(given, list | tuple | set | frozenset) else [given]
    known = [f.name for f in fields(SamplingParams)]
    for one in names:
        if one not in known:
            raise InputError(f"--callable {name!r} honours {one!r}, which is no parameter; use {', '.join(known)}")
    return frozenset(names)


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's code may do anything
        raise InputError(f"--callable {name!r} cannot be imported ({error}); write MODULE:FUNCTION") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise InputError(f"--callable {name!r} is not a function; write MODULE:FUNCTION")
    return found  # type: ignore[no-any-return]
