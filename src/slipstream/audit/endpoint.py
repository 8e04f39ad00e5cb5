"""Servers under test: OpenAI's ``/completions``, and llama.cpp's own ``/completion``, which tells token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from typing import Any, ClassVar, Protocol
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit, urlunsplit
from urllib.request import ProxyHandler, Request, build_opener

from slipstream.audit.types import EVERY_PARAMETER, Answer, Counters, EngineError, Prompt, RefusedError, refusals
from slipstream.errors import InputError
from slipstream.types import SamplingParams

_LOCAL = ("localhost", "127.0.0.1", "::1")
#: Requests that are under way at a time.
_BESIDE = 8
#: Sent with every request, since servers have defaults of their own: llama.cpp cuts to 40 tokens, vLLM takes what the
#: model's generation_config.json says.
_NEUTRAL = frozenset({"top_p", "top_k", "min_p", "repetition_penalty"})


class Dialect(Protocol):
    """How one kind of server is asked, and what its replies mean."""

    path: str
    honours: frozenset[str]

    def body(self, params: SamplingParams) -> dict[str, Any]:
        """Everything but prompt and seed."""
        ...

    def answers(self, reply: Mapping[str, Any], params: SamplingParams) -> list[Answer]:
        """What came back."""
        ...

    def be_plain(self) -> None:
        """Leave out what only some servers know."""
        ...

    def grammar(self, pattern: str) -> dict[str, Any] | None:
        """The field that asks for text of a regular expression; None if there is none that is known."""
        ...


class EndpointEngine:
    """A server with OpenAI's ``/completions``, or llama.cpp's.

    Token ids are taken from what the server returns of them: ``token_ids`` (vLLM with ``return_token_ids``), ``tokens``
    as numbers (llama.cpp), or log-probabilities whose tokens read ``token_id:5``. A server that returns none is
    compared by its texts.

    Args:
        address: ``http://HOST:PORT[/v1][?model=NAME]``.
        eos: if there is one such id, it is appended where the server says "stop" and leaves it out.
        seconds: that a request may take.
    """

    def __init__(self, address: str, eos: Sequence[int] = (), seconds: float = 600.0) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{address!r} is no address of a server; write http://HOST:PORT")
        path = parts.path.rstrip("/").removesuffix("/completions") or "/v1"
        self.name = parts.netloc
        self._base = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self._opener = build_opener(ProxyHandler({})) if parts.hostname in _LOCAL else build_opener()
        self._eos = tuple(eos)
        self._seconds = seconds
        first = self._first_model()
        model = parse_qs(parts.query).get("model", [None])[0] or str(first.get("id", "default"))
        self._dialect: Dialect = OpenAI(model, str(first.get("owned_by")))
        if first.get("owned_by") == "llamacpp":
            self._base = self._base.removesuffix("/v1")
            self._dialect = LlamaCpp()
        self.honours = self._dialect.honours
        self._settled = False
        with suppress(EngineError):  # of a server that fails already: it is asked again, and a report says so
            self._settle()
        self.unsupported: dict[str, str] = {}
        """Parameters that the server refuses, with what it says."""

    def _settle(self) -> None:
        """Find out whether the server takes what only some servers know."""
        if self._settled:
            return
        try:
            self._ask((1,), SamplingParams(max_new_tokens=1), 0)
        except RefusedError:
            self._dialect.be_plain()
        self._settled = True

    def probe(self) -> None:
        """As ``Refusing`` has it."""
        self._settle()
        self.unsupported = refusals(self.honours, lambda params: self._ask((1,), params, 0))
        self.honours -= set(self.unsupported)

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it; one request a prompt, several at a time."""
        self._settle()
        with ThreadPoolExecutor(_BESIDE) as pool:
            found = list(pool.map(lambda pair: self._ask(pair[0], params, pair[1]), zip(prompts, seeds, strict=True)))
        return [answer for group in found for answer in group]

    def abandon(self, prompt: Prompt, params: SamplingParams, seed: int) -> None:
        """Begin a stream, and hang up after its first line; a server without streams is not asked again."""
        self._settle()
        body = {**self._body(prompt, params, seed), "stream": True}
        for name in ("return_token_ids", "speculation"):
            body.pop(name, None)
        with suppress(OSError, HTTPException), self._opener.open(self._request(body), timeout=self._seconds) as lines:
            lines.readline()

    def constrained(
        self, prompt: Prompt, pattern: str, params: SamplingParams, seeds: Sequence[int]
    ) -> list[str] | None:
        """As ``Constraining`` has it; None of a server whose field for it is not known here, or that refuses it."""
        field = self._dialect.grammar(pattern)
        if field is None:
            return None
        try:
            bodies = [{**self._body(prompt, params, seed), **field} for seed in seeds]
            with ThreadPoolExecutor(_BESIDE) as pool:
                replies = list(pool.map(self._post, bodies))
        except RefusedError:
            return None
        return [str(self._dialect.answers(reply, params)[0].text) for reply in replies]

    def _body(self, prompt: Prompt, params: SamplingParams, seed: int) -> dict[str, Any]:
        asked = prompt if isinstance(prompt, str) else list(prompt)
        return {"prompt": asked, "seed": seed, **self._dialect.body(params)}

    def _request(self, body: Mapping[str, Any]) -> Request:
        data = json.dumps(body).encode()
        return Request(f"{self._base}/{self._dialect.path}", data, {"Content-Type": "application/json"})

    def _ask(self, prompt: Prompt, params: SamplingParams, seed: int) -> list[Answer]:
        body = self._body(prompt, params, seed)
        reply = self._post(body)
        try:
            found = [self._ended(answer, params) for answer in self._dialect.answers(reply, params)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"its reply cannot be read ({error}), asked for {_told(body)}") from error
        if not found or (params.n == 1 and len(found) > 1):
            raise EngineError(f"it gave {len(found)} answers, asked for {_told(body)}")
        return found

    def _ended(self, answer: Answer, params: SamplingParams) -> Answer:
        """The answer with the end-of-sequence id that the server left out."""
        tokens, told = answer.tokens, answer.logprobs
        ends = {*self._eos, *params.stop_token_ids}
        if tokens and told is not None and len(told) == len(tokens) - 1 and tokens[-1] in ends:
            answer = replace(answer, logprobs=(*told, None))  # of what stands for no text none is told
        if tokens is None or len(tokens) >= params.max_new_tokens or len(self._eos) != 1 or params.stop:
            return answer
        if answer.finish_reason != "stop" or (tokens and tokens[-1] in ends):
            return answer
        logprobs = None if answer.logprobs is None else (*answer.logprobs, None)[: len(tokens) + 1]
        return replace(answer, tokens=(*tokens, self._eos[0]), usage=None, logprobs=logprobs)

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        request = self._request(body)
        try:
            with self._opener.open(request, timeout=self._seconds) as response:
                found: Any = json.load(response)
                if not isinstance(found, dict):
                    raise ValueError(f"it answers with {str(found)[:60]!r}, not with an object")
                return found
        except HTTPError as error:
            with error:
                said = " ".join(error.read(300).decode("utf-8", errors="replace").split())
            if error.code in (401, 403, 404, 405):
                raise InputError(
                    f"{request.full_url} answers HTTP {error.code} ({said}); look at address, key and ?model=NAME"
                ) from error
            kind = RefusedError if error.code in (400, 422) else EngineError
            raise kind(f"HTTP {error.code}: {said}, asked for {_told(body)}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise EngineError(f"{error}, asked for {_told(body)}; look at the log of {self.name}") from error

    def _first_model(self) -> dict[str, Any]:
        try:
            with self._opener.open(f"{self._base}/models", timeout=10) as response:
                found: dict[str, Any] = dict(json.load(response)["data"][0])
                return found
        except HTTPError:
            return {}
        except (OSError, HTTPException) as error:
            raise InputError(f"the server at {self._base} cannot be reached ({error}); start it first") from error
        except (ValueError, LookupError, TypeError):
            return {}


# --- dialects ---------------------------------------------------------------------------------------------------------


class OpenAI:
    """``/v1/completions``, with the further parameters of vLLM by their names."""

    path = "completions"
    honours = EVERY_PARAMETER - {"ignore_eos"}

    #: Its name for a regular expression, by the owner of the models that a server lists.
    _REGEX: ClassVar[Mapping[str, Callable[[str], dict[str, Any]]]] = {
        "slipstream": lambda pattern: {"guided_regex": pattern},
        "vllm": lambda pattern: {"structured_outputs": {"regex": pattern}},
    }

    def __init__(self, model: str, owner: str = "") -> None:
        self._model, self._owner = model, owner
        self._wishes: dict[str, Any] = {"return_token_ids": True}
        # Slipstream refuses what it does not know, and tells what was drafted; others take both.
        self._wishes |= (
            {"speculation": {"statistics": True}} if owner == "slipstream" else {"return_tokens_as_token_ids": True}
        )
        self._always = _NEUTRAL

    def body(self, params: SamplingParams) -> dict[str, Any]:
        """As ``Dialect`` has it."""
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": params.temperature,
            "max_tokens": params.max_new_tokens,
            "logprobs": params.logprobs or 0,
        }
        renamed = {"min_new_tokens": "min_tokens"}
        plain = SamplingParams()
        for name in sorted(self.honours - {"temperature", "max_new_tokens", "logprobs", "seed"}):
            value = getattr(params, name)
            if value == getattr(plain, name) and name not in self._always:
                continue
            if name == "logit_bias":
                value = {str(token): bias for token, bias in value.items()}
            body[renamed.get(name, name)] = list(value) if isinstance(value, tuple) else value
        return body | self._wishes

    def be_plain(self) -> None:
        """As ``Dialect`` has it."""
        self._wishes, self._always = {}, frozenset()

    def grammar(self, pattern: str) -> dict[str, Any] | None:
        """As ``Dialect`` has it."""
        asking = self._REGEX.get(self._owner)
        return None if asking is None else asking(pattern)

    def answers(self, reply: Mapping[str, Any], params: SamplingParams) -> list[Answer]:
        """As ``Dialect`` has it."""
        choices = reply.get("choices") or []
        answers = [self._answer(choice, params) for choice in choices]
        if len(answers) != 1:
            return answers
        usage, drafts = (reply.get("usage") or {}).get("completion_tokens"), reply.get("speculation")
        counters = Counters(drafts["rounds"], drafts["drafted"], drafts["accepted"]) if drafts else None
        return [replace(answers[0], usage=usage, counters=counters)]

    def _answer(self, choice: Mapping[str, Any], params: SamplingParams) -> Answer:
        told = (choice.get("logprobs") or {}).get("token_logprobs")
        wanted = told if params.logprobs is not None else None
        return Answer(
            tokens=_token_ids(choice),
            text=choice.get("text"),
            finish_reason=choice.get("finish_reason"),
            logprobs=None if wanted is None else tuple(None if one is None else float(one) for one in wanted),
        )


class LlamaCpp:
    """llama.cpp's ``/completion``.

    Its penalties for frequency and presence count the prompt's tokens as well, which is another meaning; so they are
    not tested. Its samplers are asked for in the order that everybody else has: temperature before filters.
    """

    path = "completion"
    honours = frozenset(
        {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "stop", "logprobs", "seed"}
    )
    _SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")

    def body(self, params: SamplingParams) -> dict[str, Any]:
        """As ``Dialect`` has it."""
        return {
            "n_predict": params.max_new_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "repeat_last_n": 100_000,
            "logit_bias": [[token, bias] for token, bias in params.logit_bias.items()],
            "stop": list(params.stop),
            "samplers": list(self._SAMPLERS),
            "return_tokens": True,
            "n_probs": 0 if params.logprobs is None else 1,
        }

    def be_plain(self) -> None:
        """As ``Dialect`` has it; all that is sent is its own."""

    def grammar(self, pattern: str) -> dict[str, Any] | None:
        """As ``Dialect`` has it; its grammars are of another notation than regular expressions."""
        return None

    def answers(self, reply: Mapping[str, Any], params: SamplingParams) -> list[Answer]:
        """As ``Dialect`` has it."""
        tokens = reply.get("tokens")
        told = reply.get("completion_probabilities") or []
        answer = Answer(
            tokens=None if tokens is None else tuple(tokens),
            text=reply.get("content"),
            finish_reason="length" if reply.get("stop_type") == "limit" else "stop",
            logprobs=_in_step(tokens or (), told) if told and params.logprobs is not None else None,
            usage=reply.get("tokens_predicted"),
        )
        return [answer]


def _in_step(tokens: Sequence[int], told: Sequence[Mapping[str, Any]]) -> tuple[float | None, ...]:
    """A log-probability for each token; None where llama.cpp leaves one out, as in the middle of a character."""
    found: list[float | None] = []
    left = list(told)
    for token in tokens:
        here = bool(left) and left[0].get("id") == token
        found.append(float(left.pop(0)["logprob"]) if here else None)
    return tuple(found)


def _told(body: Mapping[str, Any]) -> str:
    """A request in few words."""
    return json.dumps({name: value for name, value in body.items() if name not in ("model", "prompt")})


def _token_ids(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    told = choice.get("logprobs") or {}
    content = [entry.get("id") for entry in told.get("content") or []]
    for found in (choice.get("token_ids"), choice.get("tokens"), told.get("tokens"), content):
        if found and all(isinstance(t, int) for t in found):
            return tuple(found)
    words = told.get("tokens") or []
    if words and all(isinstance(t, str) and t.startswith("token_id:") for t in words):
        return tuple(int(t.removeprefix("token_id:")) for t in words)
    return () if choice.get("text") == "" and choice.get("finish_reason") == "stop" else None
