"""Engines under test, each behind one method: prompts, parameters and seeds in, answers out."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit, urlunsplit
from urllib.request import ProxyHandler, Request, build_opener

import torch

from slipstream.audit.types import Answer, Counters, Prompt
from slipstream.errors import InputError, SlipstreamError
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.speculative import SpeculativeDecoding

_EVERY = frozenset(f.name for f in fields(SamplingParams)) - {"logits_processors", "no_repeat_ngram_size", "share"}
_LOCAL = ("localhost", "127.0.0.1", "::1")


class SlipstreamEngine:
    """Slipstream in this process, with any drafter, rule and k."""

    honours = _EVERY

    def __init__(self, decoding: SpeculativeDecoding, name: str = "slipstream") -> None:
        self.name = name
        self._decoding = decoding
        if decoding.tokenizer is None:
            self.honours = _EVERY - {"stop"}

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it."""
        outputs = [
            output
            for prompt, seed in zip(prompts, seeds, strict=True)
            for output in self._decoding.complete(prompt, replace(params, seed=seed))
        ]
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
        **extra: Any,
    ) -> None:
        import transformers

        kind = "assisted" if assistant is not None else "prompt lookup" if lookup else "plain"
        said = [f"transformers {transformers.__version__}", kind, f"k={lookup or k}"]
        self.name = ", ".join([*said, *(f"{name}={value}" for name, value in extra.items())])
        self._model, self._assistant, self._k, self._tokenizer = model, assistant, k, tokenizer
        self._eos = tuple(eos)
        self._fields = extra
        self._call: dict[str, Any] = {}
        if assistant is not None:
            self._call = {"assistant_model": assistant}
        elif lookup:
            self._call = {"prompt_lookup_num_tokens": lookup}

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it; one call of ``generate`` each, since assisted generation takes one prompt."""
        config = self._config(params)
        return [self._one(p, config, s) for p, s in zip(prompts, seeds, strict=True) for _ in range(params.n)]

    def _one(self, prompt: Prompt, config: Any, seed: int) -> Answer:
        ids = torch.tensor([prompt], dtype=torch.long, device=self._model.device)
        with _silent(), torch.inference_mode(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            out = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **self._call
            )
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
        self.honours = frozenset(getattr(self._function, "honours", ("temperature",)))

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it."""
        plain = SamplingParams()
        given = {f.name: v for f in fields(params) if (v := getattr(params, f.name)) != getattr(plain, f.name)}
        given |= {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens}
        given.pop("seed", None)
        given.pop("n", None)
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            for index in range(params.n):
                tokens = self._function(list(prompt), dict(given), seed + 1_000_003 * index)
                answers.append(Answer(tuple(int(t) for t in tokens)))
        return answers


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--callable {name!r} cannot be imported ({error}); write MODULE:FUNCTION") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise InputError(f"--callable {name!r} is not a function; write MODULE:FUNCTION")
    return found  # type: ignore[no-any-return]


class EndpointEngine:
    """A server with OpenAI's ``/completions``.

    Token ids are taken from what the server returns of them: ``token_ids`` (vLLM with ``return_token_ids``), ``tokens``
    as numbers (llama.cpp with ``return_tokens``), or log-probabilities whose tokens read ``token_id:5``. A server that
    returns none is compared by its texts.

    Args:
        address: ``http://HOST:PORT[/v1][?model=NAME]``.
        eos: if there is one such id, it is appended where the server says "stop" and leaves it out.
    """

    honours = _EVERY - {"ignore_eos"}

    def __init__(self, address: str, eos: Sequence[int] = ()) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{address!r} is no address of a server; write http://HOST:PORT")
        path = parts.path.rstrip("/").removesuffix("/completions")
        self.name = parts.netloc
        self._base = urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))
        self._opener = build_opener(ProxyHandler({})) if parts.hostname in _LOCAL else build_opener()
        self._eos = tuple(eos)
        self._extras: dict[str, Any] = {
            "return_token_ids": True,
            "return_tokens": True,
            "return_tokens_as_token_ids": True,
        }
        named = parse_qs(parts.query).get("model", [None])[0]
        self._model = named or self._first_model()

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it; one request a prompt."""
        answers: list[Answer] = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            asked = prompt if isinstance(prompt, str) else list(prompt)
            reply = self._post({"model": self._model, "prompt": asked, "seed": seed, **_body(params)})
            choices = reply.get("choices") or []
            usage = (reply.get("usage") or {}).get("completion_tokens") if len(choices) == 1 else None
            answers += [self._answer(choice, usage, params) for choice in choices]
        return answers

    def _answer(self, choice: Mapping[str, Any], usage: int | None, params: SamplingParams) -> Answer:
        tokens, reason = _token_ids(choice), choice.get("finish_reason")
        told = (choice.get("logprobs") or {}).get("token_logprobs")
        short = tokens is not None and len(tokens) < params.max_new_tokens
        if tokens is not None and short and reason == "stop" and len(self._eos) == 1 and not params.stop:
            ends = {*self._eos, *params.stop_token_ids}
            if not tokens or tokens[-1] not in ends:
                tokens, usage = (*tokens, self._eos[0]), None
        wanted = told if params.logprobs is not None else None
        return Answer(
            tokens=tokens,
            text=choice.get("text"),
            finish_reason=reason,
            logprobs=None if wanted is None else tuple(map(float, wanted)),
            usage=usage,
        )

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        while True:
            data = json.dumps({**body, **self._extras}).encode()
            request = Request(f"{self._base}/completions", data, {"Content-Type": "application/json"})
            try:
                with self._opener.open(request, timeout=600) as response:
                    found: dict[str, Any] = json.load(response)
                    return found
            except HTTPError as error:
                with error:
                    said = error.read(300).decode("utf-8", errors="replace")
                if error.code not in (400, 422) or not self._extras:
                    raise SlipstreamError(f"the server {self.name} failed (HTTP {error.code}: {said})") from error
                self._extras = {}
            except (OSError, HTTPException, ValueError) as error:
                raise SlipstreamError(f"the server {self.name} failed ({error}); look at its log") from error

    def _first_model(self) -> str:
        try:
            with self._opener.open(f"{self._base}/models", timeout=10) as response:
                return str(json.load(response)["data"][0]["id"])
        except HTTPError:
            return "default"
        except (OSError, HTTPException) as error:
            raise InputError(f"the server at {self._base} cannot be reached ({error}); start it first") from error
        except (ValueError, LookupError, TypeError):
            return "default"


def _body(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not at their default, by the names that servers have for them."""
    plain = SamplingParams()
    renamed = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}
    body: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_new_tokens, "logprobs": 0}
    for f in fields(params):
        value = getattr(params, f.name)
        if value == getattr(plain, f.name) or f.name in ("seed", "share", "logits_processors", "logprobs"):
            continue
        if f.name == "logit_bias":
            value = {str(token): bias for token, bias in value.items()}
        body[renamed.get(f.name, f.name)] = list(value) if isinstance(value, tuple) else value
    return body


def _token_ids(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    told = (choice.get("logprobs") or {}).get("tokens") or []
    for found in (choice.get("token_ids"), choice.get("tokens"), told):
        if found and all(isinstance(t, int) for t in found):
            return tuple(found)
    if told and all(isinstance(t, str) and t.startswith("token_id:") for t in told):
        return tuple(int(t.removeprefix("token_id:")) for t in told)
    return () if choice.get("text") == "" and choice.get("finish_reason") == "stop" else None
