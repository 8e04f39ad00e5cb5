"""From a request's fields to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.drafters import NoDrafter
from slipstream.sampling import validate
from slipstream.serve.api.schema import Generation, Speculation
from slipstream.serve.errors import ApiError
from slipstream.serve.service import Service
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


def sampling_params(
    body: Generation, service: Service, prompt: Sequence[int], most: int | None, **more: Any
) -> SamplingParams:
    """The parameters of each answer.

    Args:
        body: what was asked for.
        service: that is to answer.
        prompt: its ids, which count towards the context.
        most: length of the answer; None leaves it to the server.
        more: further fields of ``SamplingParams``.

    Raises:
        ApiError, InputError: fields that contradict each other, or the model.
    """
    room = _room(service, len(prompt))
    if most is not None and most > room:
        raise ApiError(
            400,
            f"max_tokens={most} do not fit behind a prompt of {len(prompt)} tokens: there is room for {room}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    given = {
        "temperature": 1.0 if body.temperature is None else float(body.temperature),
        "top_p": body.top_p,
        "top_k": None if body.top_k == -1 else body.top_k,
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
        **more,
    }
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    validate(params, service.engine.setting.target.vocab_size)
    return params


def answers(body: Generation, service: Service, prompts: Sequence[tuple[int, ...]]) -> int:
    """How many answers there are to be to each prompt.

    Raises:
        ApiError: too many, or a prompt is too long.
    """
    longest, allowed = max(map(len, prompts)), service.options.max_prompt
    if allowed is not None and longest > allowed:
        raise ApiError(
            400,
            f"the prompt has {longest} tokens, more than the {allowed} allowed here; shorten it",
            code="context_length_exceeded",
        )
    n, most = body.n or 1, service.options.max_n
    if n * len(prompts) > most:
        what = f"n={n}" if len(prompts) == 1 else f"n={n} for {len(prompts)} prompts"
        raise ApiError(400, f"{what} asks for more than the {most} answers allowed; send several requests", param="n")
    return n


def draft_length(given: Speculation | None, service: Service) -> int | None:
    """k of each round; None leaves it to the engine.

    Raises:
        ApiError: drafts are asked for where nothing drafts.
    """
    if given is None:
        return None
    if given.enabled is False:
        if given.k:
            raise ApiError(400, f"speculation.k={given.k} contradicts speculation.enabled=false", param="speculation")
        return 0
    if (given.k or given.enabled) and isinstance(service.engine.setting.drafter, NoDrafter):
        raise ApiError(400, "this server has no draft; leave speculation.enabled and .k out", param="speculation")
    return given.k


def requests(
    prompts: Sequence[tuple[int, ...]], n: int, params: Sequence[Sequence[SamplingParams]], k: int | None
) -> tuple[Request, ...]:
    """One for each answer; ``params`` are those of each prompt's ``n`` answers."""
    return tuple(
        Request(prompt, params[at][index], k=k, index=index) for at, prompt in enumerate(prompts) for index in range(n)
    )


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


def _stops(given: str | list[str], service: Service) -> tuple[str, ...]:
    if service.engine.setting.tokenizer is None:
        raise ApiError(400, "stop needs text, but the model has no tokenizer; use stop_token_ids", param="stop")
    return (given,) if isinstance(given, str) else tuple(given)
