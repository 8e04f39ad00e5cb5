"""Toy models of a known law, and drafters that propose what a test wants.

Everything computes in float64 and refuses to be used in a way that a real model could not bear, so that a test only has
to look at what comes out. ``greedy`` and ``joint_law`` are the slow, obvious references.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.controller import Controller, make_policy
from slipstream.decode import Decoder
from slipstream.drafters import Drafter
from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.sampling import Sampler
from slipstream.types import Draft, Round, SamplingParams

#: Tokens so far -> logits (V,) of the next one.
Law = Callable[[Sequence[int]], Tensor]
Outcome = TypeVar("Outcome")

INF = float("inf")


# --- laws -------------------------------------------------------------------------------------------------------------


def random_law(vocab: int, seed: int, order: int = 2, spread: float = 2.0) -> Law:
    """Gaussian logits, a function of the last ``order`` tokens."""
    rows: dict[tuple[int, ...], Tensor] = {}

    def law(tokens: Sequence[int]) -> Tensor:
        context = tuple(tokens[-order:])
        if context not in rows:
            generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, context)).encode()))
            rows[context] = spread * torch.randn(vocab, generator=generator, dtype=torch.float64)
        return rows[context].clone()

    return law


def constant_law(probs: Sequence[float]) -> Law:
    """The same distribution at every position."""
    logits = torch.tensor(probs, dtype=torch.float64).log()
    return lambda tokens: logits.clone()


def scripted_law(script: Sequence[int], vocab: int, prompt_length: int = 1) -> Law:
    """All probability on ``script``, over and over; behind anything else than the script, all on another token."""

    def law(tokens: Sequence[int]) -> Tensor:
        done = tokens[prompt_length:]
        at = len(done)
        wanted = script[at % len(script)]
        if any(t != script[i % len(script)] for i, t in enumerate(done)):
            wanted = (wanted + 1) % vocab
        row = torch.full((vocab,), -INF, dtype=torch.float64)
        row[wanted] = 0.0
        return row

    return law


# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One forward pass: from which position, how many tokens, how many rows of logits."""

    start: int
    count: int
    num_logits: int


class TableCache:
    """The tokens seen so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens), f"cut to {length}, but there are {len(self.tokens)}"
        del self.tokens[length:]


class TableModel:
    """A model with a given law; it counts its calls and refuses positions and ids that it does not have."""

    def __init__(
        self,
        law: Law,
        vocab: int,
        *,
        name: str = "toy",
        limit: int | None = None,
        eos: Sequence[int] = (),
        tokenizer: Any = None,
        embedding: int | None = None,
    ) -> None:
        self.law = law
        self.name = name
        self.vocab_size = vocab
        self.embedding_size = embedding or vocab
        self.max_positions = limit
        self.eos_token_ids = tuple(eos)
        self.tokenizer = tokenizer
        self.device = torch.device("cpu")
        self.calls: list[Call] = []
        self._caches: list[weakref.ref[Any]] = []

    def new_cache(self) -> Any:
        return self._remember(TableCache())

    def live_caches(self) -> list[Any]:
        """The caches that somebody still holds, oldest first."""
        return [cache for ref in self._caches if (cache := ref()) is not None]

    def forward(self, tokens: Sequence[int], cache: Any, num_logits: int) -> Tensor:
        self._admit(tokens, cache, num_logits)
        cache.tokens.extend(tokens)
        ends = range(cache.length - num_logits + 1, cache.length + 1)
        rows = [self.law(cache.tokens[:end]) for end in ends]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=torch.float64)

    @property
    def rows_fed(self) -> int:
        """Number of tokens that went through the model."""
        return sum(call.count for call in self.calls)

    def _remember(self, cache: Any) -> Any:
        self._caches.append(weakref.ref(cache))
        return cache

    def _admit(self, tokens: Sequence[int], cache: Any, num_logits: int) -> None:
        assert any(cache is own for own in self.live_caches()), "a cache of another model"
        assert len(tokens) >= max(1, num_logits) >= num_logits >= 0, (tokens, num_logits)
        assert all(0 <= t < self.embedding_size for t in tokens), f"{self.name} cannot embed {tokens}"
        end = cache.length + len(tokens)
        assert self.max_positions is None or end <= self.max_positions, f"{self.name} was fed position {end - 1}"
        self.calls.append(Call(cache.length, len(tokens), num_logits))


class RecurrentCache:
    """A hash of everything that was seen; going back means replaying from the start."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.state = 0
        self.replays = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.state = zlib.crc32(repr((self.state, token)).encode())

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        if length == len(self.tokens):
            return
        kept, self.tokens, self.state = self.tokens[:length], [], 0
        self.replays += 1
        for token in kept:
            self.append(token)


class RecurrentModel(TableModel):
    """A model whose logits depend on its whole past through a running hash, so that nothing stale goes unnoticed."""

    def __init__(self, vocab: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(random_law(vocab, seed, order=1), vocab, **settings)

    def new_cache(self) -> Any:
        return self._remember(RecurrentCache())

    def forward(self, tokens: Sequence[int], cache: Any, num_logits: int) -> Tensor:
        self._admit(tokens, cache, num_logits)
        rows = []
        for token in tokens:
            cache.append(token)
            rows.append(self.law([cache.state]))
        return torch.stack(rows)[len(rows) - num_logits :]


class RefusingModel(TableModel):
    """A recurrent model that cannot go back, and says so before anything is computed."""

    def new_cache(self) -> Any:
        raise InputError(f"{self.name} keeps a running state that cannot be rolled back; use another target")


class Watched:
    """A model as it is, with the caches that it gave out."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.caches: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_cache(self) -> Any:
        self.caches.append(self._model.new_cache())
        return self.caches[-1]


# --- drafters ---------------------------------------------------------------------------------------------------------


class ForcedDrafter:
    """Proposes what ``propose(tokens so far, k)`` says: ids (q one-hot) or a Draft. Its own session."""

    name = "forced"

    def __init__(self, propose: Callable[[Sequence[int], int], Sequence[int] | Draft]) -> None:
        self._propose = propose
        self.asked: list[tuple[int, int]] = []
        """(number of tokens so far, k) of each call."""
        self.proposed: list[tuple[int, ...]] = []

    def start(self, sampler: Sampler) -> ForcedDrafter:
        return self

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        assert k >= 1
        given = self._propose(tuple(tokens), k)
        draft = given if isinstance(given, Draft) else Draft(tuple(given))
        self.asked.append((len(tokens), k))
        self.proposed.append(draft.tokens)
        return draft


def oracle(sequence: Sequence[int]) -> ForcedDrafter:
    """Proposes how ``sequence`` (prompt and answer) goes on."""
    return ForcedDrafter(lambda tokens, k: sequence[len(tokens) : len(tokens) + k])


def always_wrong(sequence: Sequence[int], vocab: int) -> ForcedDrafter:
    """Proposes at each slot another token than ``sequence`` has there."""

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        right = [*sequence[len(tokens) : len(tokens) + k], *[0] * k][:k]
        return [(t + 1) % vocab for t in right]

    return ForcedDrafter(propose)


def wrong_at(sequence: Sequence[int], vocab: int, slots: Iterable[int]) -> ForcedDrafter:
    """Proposes how ``sequence`` goes on, but for one slot in each draft: ``slots``, over and over; k and up: none."""
    plan = list(slots)
    turn = iter(plan[i % len(plan)] for i in range(10**9))

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        right, slot = list(sequence[len(tokens) : len(tokens) + k]), next(turn)
        return [(t + 1) % vocab if i == slot else t for i, t in enumerate(right)]

    return ForcedDrafter(propose)


def greedy_of(law: Law) -> ForcedDrafter:
    """Proposes the likeliest tokens of ``law``, with one-hot q."""

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        extended = list(tokens)
        for _ in range(k):
            extended.append(int(law(extended).argmax()))
        return extended[len(tokens) :]

    return ForcedDrafter(propose)


# --- a tokenizer whose pieces a test spells out -----------------------------------------------------------------------


class Spelling:
    """Id i stands for ``pieces[i]``; ids in ``special`` are left out of decoded text."""

    chat_template = None
    bos_token = None
    pad_token_id = None

    def __init__(self, pieces: Sequence[str | bytes], special: Iterable[int] = ()) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.special = frozenset(special)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        rest, ids = text.encode(), []
        while rest:
            fitting = [i for i, p in enumerate(self.pieces) if p and rest.startswith(p) and i not in self.special]
            ids.append(max(fitting, key=lambda i: len(self.pieces[i])))
            rest = rest[len(self.pieces[ids[-1]]) :]
        return {"input_ids": ids}

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
    ) -> str:
        assert not clean_up_tokenization_spaces, "cleaning up changes the text"
        kept = (self.pieces[i] for i in ids if not (skip_special_tokens and i in self.special))
        return b"".join(kept).decode("utf-8", errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {repr(piece): i for i, piece in enumerate(self.pieces)}


# --- references and runs ----------------------------------------------------------------------------------------------


def greedy(law: Law, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """Plain greedy decoding, without any of Slipstream's code."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and not (len(tokens) > len(prompt) and tokens[-1] in eos):
        tokens.append(int(law(tokens).argmax()))
    return tokens[len(prompt) :]


def joint_law(law: Law, prompt: Sequence[int], count: int, process: Callable[[Tensor, list[int]], Tensor]) -> dict:
    """Probability of each sequence of ``count`` tokens; ``process`` turns logits into probabilities."""
    out: dict[tuple[int, ...], float] = {}
    vocab = len(law(list(prompt)))
    for sequence in product(range(vocab), repeat=count):
        probability = 1.0
        for i, token in enumerate(sequence):
            before = [*prompt, *sequence[:i]]
            probability *= float(process(law(before), before)[token])
        out[sequence] = probability
    return out


def softmax(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """``process`` of ``joint_law`` for a temperature of 1 and nothing else."""
    return torch.softmax(logits, dim=-1)


def start(
    target: Any,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    k: Any = 4,
    controller: Controller | None = None,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    coupled: bool = False,
    rule: str = "block",
    **params: Any,
) -> Decoder:
    """A decoder of one request, without texts: what SpeculativeDecoding builds inside."""
    given = SamplingParams(**params)
    sampler = Sampler(given, len(prompt), stop_ids, seed, coupled=coupled)
    limit = min(len(prompt) + given.max_new_tokens, target.max_positions or 10**9)
    session = drafter.start(sampler)
    if controller is None:
        controller = make_policy(k).start(session, drafter.name, repeatable=False, isolated=False)
    return Decoder(target, session, sampler, controller, limit, rule, drafter.name)


def decode(target: Any, drafter: Drafter, prompt: Sequence[int], **settings: Any) -> tuple[list[int], list[Round]]:
    """The answer and its rounds; after each round the target's cache is compared with what was committed."""
    watched = Watched(target)
    decoder = start(watched, drafter, prompt, **settings)
    rounds: list[Round] = []
    answer: list[int] = []
    for one in decoder.rounds(prompt, ender(decoder, len(prompt))):
        rounds.append(one)
        answer += one.tokens
        (cache,) = watched.caches
        committed = [*prompt, *answer]
        assert cache.length == len(committed) - 1
        if hasattr(cache, "tokens"):
            assert list(cache.tokens) == committed[:-1]
    return answer, rounds


def ender(decoder: Decoder, prompt_length: int) -> Callable[[int], bool]:
    """Ends an answer at the decoder's stop ids and length."""
    count = 0

    def ended(token: int) -> bool:
        nonlocal count
        count += 1
        return token in decoder.sampler.stop_ids or prompt_length + count >= decoder.max_length

    return ended


# --- all outcomes of a program that throws dice -----------------------------------------------------------------------


class Dice:
    """Makes the choices that ``script`` says, then the first possible one each time; knows their joint probability."""

    def __init__(self, script: Sequence[int]) -> None:
        self.probability = 1.0
        self._script = list(script)
        self._options: list[list[int]] = []
        self._taken: list[int] = []

    def choose(self, probs: Sequence[float]) -> int:
        """One index, of those with a positive probability."""
        options = [i for i, p in enumerate(probs) if p > 0]
        at = len(self._taken)
        taken = self._script[at] if at < len(self._script) else options[0]
        self._options.append(options)
        self._taken.append(taken)
        self.probability *= probs[taken]
        return taken

    def following(self) -> list[int] | None:
        """The script of the next outcome in order; None after the last."""
        for at in range(len(self._taken) - 1, -1, -1):
            place = self._options[at].index(self._taken[at])
            if place + 1 < len(self._options[at]):
                return [*self._taken[:at], self._options[at][place + 1]]
        return None


def all_outcomes(program: Callable[[Dice], Outcome]) -> dict[Outcome, float]:
    """The law of what ``program`` returns, by running it once for every way that its dice can fall."""
    law: dict[Outcome, float] = defaultdict(float)
    for dice in _throws():
        outcome = program(dice)
        law[outcome] += dice.probability
    return dict(law)


def _throws() -> Iterator[Dice]:
    script: list[int] | None = []
    while script is not None:
        dice = Dice(script)
        yield dice
        script = dice.following()


def loaded_dice(monkeypatch: Any, dice: Dice) -> None:
    """Have every random choice of drafting, accepting and sampling made by ``dice``."""

    def sample(probs: Tensor, generator: Any) -> int:
        if bool(probs.isnan().any()):
            return 0  # means nothing
        return dice.choose((probs / probs.sum()).tolist())

    def count_accepted(accept: Tensor, generator: Any) -> int:
        for i, p in enumerate(accept.tolist()):
            if p != p or not dice.choose([1 - p, p]):  # NaN is more than no random number
                return i
        return len(accept)

    def longest_accepted(probs: Sequence[float], generator: Any) -> int:
        for i in range(len(probs), 0, -1):
            if dice.choose([1 - probs[i - 1], probs[i - 1]]):
                return i
        return 0

    monkeypatch.setattr("slipstream.sampling.sample", sample)
    monkeypatch.setattr("slipstream.verify.sample", sample)
    monkeypatch.setattr("slipstream.verify._count_accepted", count_accepted)
    monkeypatch.setattr("slipstream.verify._longest_accepted", longest_accepted)
