"""From a request's fields to what the engine is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from slipstream.drafters import Drafter, NoDrafter, SuffixStore, predicting
from slipstream.errors import InputError
from slipstream.grammar import Grammar
from slipstream.sampling import validate
from slipstream.serve.api.messages import Demand, schema_of, text_of
from slipstream.serve.api.schema import Generation, Speculation
from slipstream.serve.errors import ApiError
from slipstream.serve.service import Service
from slipstream.serve.texts import GrammarKind
from slipstream.types import Request, SamplingParams


def check_model(given: str | None, service: Service) -> None:
    """Whether it is the model that is served.

    Raises:
        ApiError: 404.
    """
    name = service.options.name
    if given is not None and given != name:
        raise ApiError(
            404, f"there is no model {given[:100]!r} here; use {name!r}", param="model", code="model_not_found"
        )


@dataclass(frozen=True)
class Asked:
    """What endpoints say in ways of their own."""

    most: int | None
    """Length of the answer; None leaves it to the server."""
    logprobs: int | None = None
    """Likeliest tokens of which log-probabilities are wanted, beside the one that was taken."""
    grammar: Demand | None = None
    """That the endpoint demands."""


async def prepare(
    body: Generation, service: Service, prompts: Sequence[tuple[int, ...]], asked: Asked
) -> tuple[Request, ...]:
    """One request for each answer, in the order of ``choices``.

    Raises:
        ApiError, InputError: fields that contradict each other, the model or the server's limits.
    """
    if not body.stream:
        if body.stream_options is not None:
            raise ApiError(400, "stream_options is for streams; set stream=true", param="stream_options")
        if body.speculation is not None and body.speculation.tokens:
            raise ApiError(400, "speculation.tokens is for streams; set stream=true", param="speculation.tokens")
    elif body.speculation is not None and body.speculation.tokens:
        check_text("speculation.tokens", service)
    _check_lengths(prompts, service, body.asks)
    n = _answers(body, service, len(prompts))
    k = _draft_length(body.speculation, service, predicted=body.prediction is not None)
    params = [_sampling_params(body, service, len(prompt), asked) for prompt in prompts]
    grammar = await _grammar(body, service, asked)
    made: list[Request] = []
    for prompt, shared in zip(prompts, params, strict=True):
        drafter = await _drafter(body, service, prompt)
        for index in range(n):
            own = shared
            if grammar is not None:  # a mask is of one answer
                own = replace(shared, logits_processors=(grammar.processor(len(prompt)),))
            made.append(Request(prompt, own, k=k, index=index, drafter=drafter))
    return tuple(made)


@contextmanager
def naming(field: str, service: Service) -> Iterator[None]:
    """Input that cannot be used is that of a ``field``; the target is called as clients know it, not by its path."""
    try:
        yield
    except InputError as error:
        told = str(error).replace(f" {service.engine.setting.target.name} ", f" {service.options.name} ")
        raise ApiError(400, told, param=field, code="invalid_value") from error


def _check_lengths(prompts: Sequence[tuple[int, ...]], service: Service, name: str) -> None:
    longest, most = max(map(len, prompts)), service.options.max_prompt
    if most is not None and longest > most:
        what = f"the prompt has {longest} tokens, more than the {most} allowed here; shorten it"
        raise ApiError(400, what, param=name, code="context_length_exceeded")


def _sampling_params(body: Generation, service: Service, prompt: int, asked: Asked) -> SamplingParams:
    most, room = asked.most, _room(service, prompt)
    if most is not None and most > room:
        raise ApiError(
            400,
            f"max_tokens={most} does not fit behind a prompt of {prompt} tokens: there is room for {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    given: dict[str, Any] = {
        "temperature": 1.0 if body.temperature is None else float(body.temperature),
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logit_bias": None if body.logit_bias is None else _bias(body.logit_bias),
        "min_new_tokens": body.min_tokens,
        "max_new_tokens": min(room, service.options.max_tokens) if most is None else most,
        "stop": None if body.stop is None else _stops(body.stop, service),
        "stop_token_ids": None if body.stop_token_ids is None else tuple(body.stop_token_ids),
        "ignore_eos": body.ignore_eos,
        "seed": body.seed,
        "logprobs": asked.logprobs,
    }
    if asked.logprobs is not None:
        _check_spelled(service)
    if (body.min_tokens or 0) > given["max_new_tokens"]:
        what = (
            f"min_tokens={body.min_tokens} is more than the {given['max_new_tokens']} tokens that the answer may have"
        )
        raise ApiError(400, what, param="min_tokens")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() & {"logit_bias", "stop_token_ids"}:  # what may be said there depends on the model
        with naming(name, service):
            validate(SamplingParams(**{name: given[name]}), service.engine.setting.target.vocab_size)
    return SamplingParams(**given)


async def _grammar(body: Generation, service: Service, asked: Asked) -> Grammar | None:
    """What the answer has to follow, if anything."""
    wanted: dict[str, tuple[GrammarKind, str]] = {}
    schema = schema_of(body.response_format)
    if schema is not None:
        wanted["response_format"] = "json", json.dumps(schema)
    if body.guided_regex is not None:
        wanted["guided_regex"] = "regex", body.guided_regex
    if body.guided_grammar is not None:
        wanted["guided_grammar"] = "lark", body.guided_grammar
    if asked.grammar is not None:  # which has the response format in it if that demands it
        wanted[asked.grammar.name] = asked.grammar.kind, asked.grammar.rules
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ApiError(400, f"{' and '.join(wanted)} contradict each other; give one", param=next(iter(wanted)))
    ((name, (kind, rules)),) = wanted.items()
    if body.min_tokens or body.ignore_eos:
        what = "min_tokens" if body.min_tokens else "ignore_eos"
        raise ApiError(400, f"{what} contradicts {name}, which says where answers end; leave it out", param=what)
    try:
        return await service.texts.grammar(kind, rules)
    except InputError as error:
        raise ApiError(400, str(error), param=name, code="invalid_grammar") from error


async def _drafter(body: Generation, service: Service, prompt: tuple[int, ...]) -> Drafter | None:
    """One that copies from what the client predicts, if it does."""
    if body.prediction is None:
        return None
    if body.speculation is not None and (body.speculation.enabled is False or body.speculation.k == 0):
        raise ApiError(400, "prediction contradicts speculation, which is switched off", param="prediction")
    text = text_of(body.prediction.content)
    if not text:
        return None
    # Behind the prompt's end, so that its first token is proposed where the answer begins.
    with naming("prediction", service):
        predicted = await service.texts.plain(text)
    most = _room(service, 0)
    if len(predicted) > most:
        what = f"prediction has {len(predicted)} tokens, but no answer has more than {most}; shorten it"
        raise ApiError(400, what, param="prediction", code="context_length_exceeded")
    document = [*prompt[-SuffixStore.window :], *predicted]
    return await service.texts.apart(predicting, service.engine.setting.drafter, document)


def _answers(body: Generation, service: Service, prompts: int) -> int:
    """How many answers there are to be to each prompt."""
    n, most = body.n or 1, service.options.max_n
    if n * prompts > most:
        what = f"n={n}" if prompts == 1 else f"n={n} for {prompts} prompts"
        raise ApiError(400, f"{what} asks for more than the {most} answers allowed; send several requests", param="n")
    return n


def _draft_length(given: Speculation | None, service: Service, *, predicted: bool) -> int | None:
    """k of each round; None leaves it to the engine."""
    if given is None:
        return None
    if given.enabled is False:
        if given.k:
            raise ApiError(400, f"speculation.k={given.k} contradicts speculation.enabled=false", param="speculation")
        return 0
    if (given.k or given.enabled) and not predicted and isinstance(service.engine.setting.drafter, NoDrafter):
        raise ApiError(400, "this server has no draft; leave speculation.enabled and .k out", param="speculation")
    return given.k


def _room(service: Service, prompt: int) -> int:
    limit = service.engine.seats.positions
    if (context := service.engine.setting.target.max_positions) is not None:
        limit = min(limit, context)
    return max(0, limit - prompt)


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 12):
            raise ApiError(400, f"logit_bias names {token[:20]!r}; its keys are token ids", param="logit_bias")
        bias[int(token)] = float(value)
    return bias


def check_text(field: str, service: Service) -> None:
    """Whether the model has text, which ``field`` is about.

    Raises:
        ApiError: it has ids only.
    """
    if service.texts.tokenizer is None:
        raise ApiError(400, f"{field} needs text, but the model has no tokenizer; leave it out", param=field)


def _check_spelled(service: Service) -> None:
    """Whether tokens can be told by their bytes."""
    try:
        service.texts.token_bytes(0)
    except InputError as error:
        what = "logprobs needs the bytes of tokens, which the model's tokenizer does not tell; leave it out"
        raise ApiError(400, what, param="logprobs") from error


def _stops(given: str | list[str], service: Service) -> tuple[str, ...]:
    check_text("stop", service)
    return (given,) if isinstance(given, str) else tuple(given)
