"""Other engines on the same prompts: transformers' own ``generate``, and servers with OpenAI's interface."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import parse_qs, urlsplit, urlunsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener
from uuid import uuid4

import torch

from slipstream.errors import InputError, SlipstreamError
from slipstream.measure.costs import synchronize
from slipstream.measure.memory import peak_bytes, reset_peak
from slipstream.measure.prompts import BenchPrompt
from slipstream.measure.runs import Answered
from slipstream.models import registry
from slipstream.types import SamplingParams

#: Modes of transformers and the number of draft tokens that each has unless another one is given.
_MODES = {"plain": 0, "assisted": 4, "lookup": 10}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HF = re.compile(r"hf-(?P<mode>[a-z]+)(?::(?P<dtype>[a-z]+\d+))?(?::(?P<k>\d+))?")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_REACH_SECONDS = 10.0
_ANSWER_SECONDS = 1800.0


@dataclass(frozen=True)
class HFPeer:
    """transformers in one mode and one type of weights."""

    name: str
    mode: str
    dtype: str
    k: int


@dataclass(frozen=True)
class ServerPeer:
    """A server: its base address, which ends before ``/chat/completions``, and the model to ask for."""

    name: str
    base: str
    model: str | None


Peer = HFPeer | ServerPeer


def parse_peers(given: Sequence[str]) -> list[Peer]:
    """What ``--peer`` means: ``hf-MODE[:DTYPE][:K]``, several with commas between, or a server's address.

    An address may name the model to ask for (``?model=NAME``) and what to call it in reports (``#NAME``).

    Raises:
        InputError: anything else, or the same peer twice.
    """
    words = [w for text in given for w in ([text] if "://" in text else text.split(","))]
    peers = [_server(w) if "://" in w else _transformers(w) for w in words]
    names = [p.name for p in peers]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"the peer {name} is given twice; leave one out, or name addresses apart with #NAME")
    return peers


def _transformers(word: str) -> HFPeer:
    match = _HF.fullmatch(word)
    if match is None or match["mode"] not in _MODES:
        raise InputError(
            f"--peer {word!r} is not known; use {', '.join(f'hf-{mode}' for mode in _MODES)}, or a server's address "
            "such as http://localhost:8080"
        )
    if (dtype := match["dtype"] or "fp32") not in _DTYPES:
        raise InputError(f"--peer {word!r} has an unknown type of weights; use one of {', '.join(_DTYPES)}")
    if match["k"] is not None and (match["mode"] == "plain" or int(match["k"]) < 1):
        raise InputError(f"--peer {word!r} has no use for {match['k']} draft tokens; leave the number out")
    return HFPeer(word, match["mode"], dtype, int(match["k"] or _MODES[match["mode"]]))


def _server(address: str) -> ServerPeer:
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"--peer {address!r} is no address of a server; write http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/models")
    base = urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))
    model = parse_qs(parts.query).get("model", [None])[0]
    return ServerPeer(parts.fragment or parts.netloc, base, model)


# --- transformers -----------------------------------------------------------------------------------------------------


def check_hf_peers(peers: Sequence[Peer], target: str, draft: str | None) -> None:
    """Refuse what transformers cannot do, before anything is loaded.

    Args:
        peers: all of them; servers are not looked at.
        target: path or name of the target.
        draft: of the draft model, None if there is none.

    Raises:
        InputError: the checkpoint is a GGUF file, or there is no model to assist.
    """
    for peer in peers:
        if not isinstance(peer, HFPeer):
            continue
        if peer.mode == "assisted" and draft is None:
            raise InputError(f"--peer {peer.name} needs a draft model; give one with --draft")
        for model in (target, draft if peer.mode == "assisted" else None):
            if model is not None and Path(checkpoint_path(model)).is_file():
                raise InputError(
                    f"--peer {peer.name} needs {model} as a folder in Hugging Face layout; give the checkpoint that "
                    "the file was made from, or leave this peer out"
                )


def checkpoint_path(name: str) -> str:
    """Where transformers finds what ``load_model`` finds under ``name``: a path, else a hub id."""
    local = Path(name).expanduser()
    if local.exists():
        return str(local)
    return str(registry.resolve(name) or name)


def load_hf(name: str, dtype: str, device: str) -> Any:
    """A checkpoint in transformers' own modules.

    Raises:
        InputError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint_path(name), dtype=_DTYPES[dtype], trust_remote_code=False
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise InputError(f"transformers cannot load {name} ({error}); leave the hf- peers out") from error
    return loaded.to(device).eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars and warnings: its own code calls what it has deprecated."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class HFModels:
    """What one peer runs with; ``spare_bytes`` is memory of weights that are loaded for other contenders only."""

    target: Any
    draft: Any | None
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    spare_bytes: int = 0


class Transformers:
    """transformers' own ``generate`` on the same ids, with the same end."""

    kind = "transformers"

    def __init__(self, peer: HFPeer, models: HFModels, draft: str | None = None) -> None:
        self.name = peer.name
        self.k: int | str | None = peer.k
        self.draft = {"plain": None, "assisted": draft, "lookup": "lookup"}[peer.mode]
        self._models = models
        self._extra: dict[str, Any] = {}
        if peer.mode == "lookup":
            self._extra = {"prompt_lookup_num_tokens": peer.k}
        if peer.mode == "assisted":
            self._extra = {"assistant_model": models.draft}

    def answer(self, prompt: BenchPrompt, params: SamplingParams) -> Answered:
        """Generate once, with a streamer that looks at the clock."""
        target = self._models.target
        self._configure(params)
        ids = torch.tensor([prompt.ids], dtype=torch.long, device=target.device)
        watch = _Watch()
        reset_peak(target.device)
        with _quiet(), _seeded(params.seed):
            start = perf_counter()
            out = target.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), streamer=watch, use_cache=True, **self._extra
            )
            synchronize(target.device)
            total = perf_counter() - start
        peak = peak_bytes(target.device)
        tokens = tuple(out[0, len(prompt.ids) :].tolist())
        return Answered(
            text=self._models.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=tokens,
            num_tokens=len(tokens),
            first_token_seconds=(watch.first or start + total) - start,
            total_seconds=total,
            peak_memory=peak if peak is None else max(0, peak - self._models.spare_bytes),
        )

    def _configure(self, params: SamplingParams) -> None:
        """The checkpoint's own generation config would add penalties and filters that nobody asked for."""
        from transformers import GenerationConfig

        sampled = params.temperature > 0
        eos = self._models.eos_token_ids
        self._models.target.generation_config = GenerationConfig(
            max_new_tokens=params.max_new_tokens,
            do_sample=sampled,
            eos_token_id=None if params.ignore_eos or not eos else list(eos),
            pad_token_id=eos[0] if eos else 0,
            repetition_penalty=1.0,
            **({"temperature": params.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}),
        )
        if self._models.draft is not None and self._extra.get("assistant_model") is not None:
            self._models.draft.generation_config = GenerationConfig(
                num_assistant_tokens=self.k,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
                eos_token_id=None if params.ignore_eos or not eos else list(eos),
                pad_token_id=eos[0] if eos else 0,
            )


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """transformers draws from torch's global generator; it is as before afterwards, unless nobody gave a seed."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class _Watch:
    """A streamer that takes the time of the first tokens after the prompt."""

    def __init__(self) -> None:
        self._puts = 0
        self.first: float | None = None

    def put(self, value: Any) -> None:
        """The prompt comes first, then what was generated."""
        self._puts += 1
        if self._puts == 2:
            self.first = perf_counter()

    def end(self) -> None:
        """Nothing to do."""


# --- servers ----------------------------------------------------------------------------------------------------------


class Server:
    """A server with OpenAI's chat interface, asked by streaming.

    Args:
        peer: where it is.

    Raises:
        InputError: nobody answers there.
    """

    kind = "server"
    draft: str | None = None
    k: int | str | None = None

    def __init__(self, peer: ServerPeer) -> None:
        self.name = peer.name
        self._base = peer.base
        self._opener = _opener(peer.base)
        served = self._first_model()
        self._model = peer.model or served
        self._sent = 0.0
        usage = {"stream_options": {"include_usage": True}}
        # What a strict server may refuse, more and more of it left out. Who answers a prompt again from its cache reads
        # no prompt: llama.cpp's and vLLM's names for "do not". vLLM takes penalties and filters from the checkpoint.
        own = {"cache_prompt": False, "cache_salt": "", "repetition_penalty": 1.0, "top_k": 0, "min_p": 0.0}
        self._extras: list[dict[str, Any]] = [usage | own, usage, {}]

    def answer(self, prompt: BenchPrompt, params: SamplingParams) -> Answered:
        """Ask once and read the stream; times as a client sees them."""
        path, asked = _request(prompt, params)
        start = perf_counter()
        heard = _Heard()
        try:
            with self._post(path, {"model": self._model, "stream": True, **asked}) as response:
                start = self._sent  # the last try's, if the server refused something first
                for event in _events(response):
                    heard.take(event, perf_counter() - start)
        except (OSError, HTTPException, ValueError) as error:
            raise SlipstreamError(f"the server {self.name} failed ({_reason(error)}); look at its log") from error
        return heard.answered(perf_counter() - start)

    def _post(self, path: str, body: Mapping[str, Any]) -> HTTPResponse:
        """Send, without our extra wishes if the server does not know them."""
        while True:
            extras = dict(self._extras[0])
            if "cache_salt" in extras:
                extras["cache_salt"] = uuid4().hex
            request = Request(
                f"{self._base}{path}", json.dumps({**body, **extras}).encode(), {"Content-Type": "application/json"}
            )
            self._sent = perf_counter()
            try:
                response: HTTPResponse = self._opener.open(request, timeout=_ANSWER_SECONDS)
                return response
            except HTTPError as error:
                if error.code not in (400, 422) or len(self._extras) == 1:
                    raise
                error.close()
                self._extras.pop(0)

    def _first_model(self) -> str:
        """The model that the server names first; many a server has one and takes any name for it."""
        try:
            with self._opener.open(f"{self._base}/models", timeout=_REACH_SECONDS) as response:
                return str(json.load(response)["data"][0]["id"])
        except HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise InputError(f"the server {self.name} wants a key; start it without one") from None
            return "default"
        except (URLError, OSError, HTTPException) as error:
            raise InputError(
                f"the server at {self._base} cannot be reached ({_reason(error)}); start it, or correct the address"
            ) from None
        except (ValueError, LookupError, TypeError):
            return "default"


def _opener(base: str) -> OpenerDirector:
    """Proxies are for servers elsewhere."""
    return build_opener(ProxyHandler({})) if urlsplit(base).hostname in _LOCAL else build_opener()


def _request(prompt: BenchPrompt, params: SamplingParams) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": 1.0}
    if params.seed is not None:
        body["seed"] = params.seed
    if params.ignore_eos:
        body["ignore_eos"] = True
    if isinstance(prompt.content, str):
        return "/completions", {"prompt": prompt.content, **body}
    return "/chat/completions", {"messages": list(prompt.content), **body}


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for raw in response:
        line = raw.decode("utf-8", errors="replace").strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"it sent {data[:60]!r}")
        if "error" in event:
            raise ValueError(str(event["error"]))
        yield event


class _Heard:
    """What has come of one answer."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._first: float | None = None
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}

    def take(self, event: Mapping[str, Any], seconds: float) -> None:
        """One event, ``seconds`` after the request."""
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("reasoning_content") or delta.get("content")
            if text:
                self._text.append(text)
                self._first = seconds if self._first is None else self._first
        self._usage = event.get("usage") or self._usage
        self._timings = event.get("timings") or self._timings

    def answered(self, total: float) -> Answered:
        """The answer; a server that does not count its tokens sends, as a rule, one an event."""
        drafted, accepted = self._timings.get("draft_n"), self._timings.get("draft_n_accepted")
        return Answered(
            text="".join(self._text),
            tokens=None,
            num_tokens=int(self._usage.get("completion_tokens") or len(self._text)),
            first_token_seconds=total if self._first is None else self._first,
            total_seconds=total,
            drafted=drafted,
            accepted=accepted,
        )


def _reason(error: Exception) -> str:
    """What to say of a failure, in a few words."""
    if isinstance(error, HTTPError):
        with error:
            return f"HTTP {error.code}: {error.read(300).decode('utf-8', errors='replace').strip()}"
    return str(getattr(error, "reason", None) or str(error) or type(error).__name__)
