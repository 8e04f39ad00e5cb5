"""The values that travel through Slipstream: frozen dataclasses without behaviour beyond derived figures.

Words: the *target* is the model whose answers are wanted; a *drafter* proposes *draft tokens*; one *round* is one draft
and its verification; an *accepted* token came from the draft, a *corrected* token was sampled from the residual after a
rejection, a *bonus* token from the target after every draft token (possibly none) was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from torch import Tensor

Origin = Literal["accepted", "corrected", "bonus"]
FinishReason = Literal["stop", "length"]
#: Why a draft has no further token: as many as were asked for (or as the context holds); the drafter was not sure
#: enough of the next; going on would not have paid; nothing to copy from; the next token is not the target's.
DraftEnd = Literal["limit", "confidence", "controller", "no match", "vocabulary"]
#: ``(token ids so far, logits row of shape (V,)) -> logits row of shape (V,)``. Must be a pure function of its
#: arguments: it is called once for each position that is drafted or verified, also for rejected ones.
LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Names mean what they mean in transformers and vLLM.

    Logits are processed in this order: ``logit_bias``, ``repetition_penalty``, ``frequency_penalty`` and
    ``presence_penalty``, ``no_repeat_ngram_size``, ``min_new_tokens``, ``logits_processors``, ``temperature``,
    ``top_k``, ``top_p``, ``min_p``.
    """

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens (ties at the border are kept); 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches top_p; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens of at least min_p times the likeliest token's probability; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that occur in the prompt or the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each of its occurrences in the output."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it occurs in the output."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in prompt + output; 0 switches it off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a number that is added to its logit; ``-inf`` forbids it."""
    min_new_tokens: int = 0
    """Before this many tokens no end-of-sequence id or stop id can be sampled, and ``stop`` strings do not count."""
    max_new_tokens: int = 256
    """At most this many tokens; the context limit may end an answer earlier."""
    stop: Sequence[str] = ()
    """Generation ends once the text contains one of these; the text is cut before it."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends after one of these ids; the id is kept in ``tokens`` and left out of ``text``."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence ids."""
    seed: int | None = None
    """Same seed, same tokens; None draws a seed from torch's global generator."""
    n: int = 1
    """Number of independent samples of each prompt."""
    logprobs: int | None = None
    """Return the log-probability of each token under the unprocessed target, and of the this many likeliest ones."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Further processors, applied in order."""
    share: bool = True
    """Whether this request may use what others left (drafts in a shared store, how drafts fare) and leave its own."""

    def __new__(cls, *args: object, **given: object) -> SamplingParams:
        """Remember which fields were given, so that the others can be filled from somebody else's defaults."""
        self = super().__new__(cls)
        names = [f.name for f in fields(cls)]
        object.__setattr__(self, "_given", frozenset([*names[: len(args)], *given]))
        return self

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """The fields that were given to this object, and ``defaults`` for the others.

        >>> SamplingParams(top_p=0.9).over(SamplingParams(temperature=0.7)).temperature
        0.7
        """
        return replace(defaults, **self.given())

    def given(self) -> dict[str, Any]:
        """The fields that were given to this object, by name."""
        names: frozenset[str] = self._given  # type: ignore[attr-defined]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes: ``tokens`` (k,), and ``probs`` (k, V), the distributions they were drawn from.

    ``probs is None`` means that each q is one-hot: the token was copied or is an argmax.
    """

    tokens: tuple[int, ...] = ()
    probs: Tensor | None = None
    ended: DraftEnd = "limit"
    """Why it is no longer."""
    sources: tuple[str, ...] = ()
    """The drafter of each token, (k,); empty if all are of the drafter that was asked."""
    confidence: tuple[float, ...] = ()
    """How sure the drafter was of each token before drawing it, in [0, 1], (k,); empty if it cannot say."""


@dataclass(frozen=True)
class Verdict:
    """What verification says of a draft: the first ``num_accepted`` tokens stand, ``next_token`` follows them."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one returned token under the target's unprocessed distribution, and the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Round:
    """One draft and its verification, after stop rules have cut it: what was proposed, what came out, what it took."""

    tokens: tuple[int, ...]
    """The new tokens: accepted ones first, then (unless a stop rule cut it off) the corrected or bonus token."""
    num_drafted: int
    num_accepted: int
    """How many of ``tokens`` came from the draft."""
    draft_seconds: float
    verify_seconds: float
    total_seconds: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    k: int = 0
    """The most draft tokens that the drafter was asked for; 0 if it was not asked."""
    ended: DraftEnd | None = None
    """Why the draft is no longer; None if none was asked for."""
    sources: tuple[str, ...] = ()
    """The drafter of each draft token, (num_drafted,)."""

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each of ``tokens`` came from."""
        accepted: Origin = "accepted"
        last: Origin = "bonus" if self.num_accepted == self.num_drafted else "corrected"
        rest = len(self.tokens) - self.num_accepted
        return (accepted,) * self.num_accepted + (last,) * rest


@dataclass(frozen=True)
class Stats:
    """Counts and times of one answer (or several, added up), from the rounds that produced it; times in seconds."""

    rounds: int = 0
    emitted: int = 0
    """Tokens returned = accepted + one a round, less the one that a stop rule may have cut off the last round."""
    drafted: int = 0
    accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    rounds_by_k: Mapping[int, int] = field(default_factory=dict)
    """Rounds after the first one, by the number of tokens that were drafted."""
    rounds_by_end: Mapping[str, int] = field(default_factory=dict)
    """Rounds in which a draft was asked for, by why it was no longer."""
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    """Draft tokens by their drafter."""
    accepted_by: Mapping[str, int] = field(default_factory=dict)
    """Accepted ones by their drafter."""
    prefill_seconds: float = 0.0
    """Reading the prompt; it yields the first token."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Target passes after the first one, with sampling and the accept rule."""
    total_seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted a round, the corrected or bonus token included; 0 if there was no round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def mean_k(self) -> float:
        """Draft tokens a round after the first; 0 if there is none."""
        rounds = sum(self.rounds_by_k.values())
        return sum(k * n for k, n in self.rounds_by_k.items()) / rounds if rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole answer, prompt reading included."""
        return self.emitted / self.total_seconds if self.total_seconds else 0.0

    @property
    def seconds_per_token(self) -> float:
        """Time of one token after the first; 0 if there is no second one."""
        later = self.emitted - 1
        return (self.total_seconds - self.first_token_seconds) / later if later > 0 else 0.0


@dataclass(frozen=True)
class Piece:
    """What one round adds to a stream. ``text`` may be empty while a character or stop string is incomplete."""

    text: str
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class Output:
    """One finished answer."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """All generated ids; an end-of-sequence or stop id that ended it is the last of them."""
    text: str
    """Decoded answer without special tokens and without the stop string; empty if there is no tokenizer."""
    finish_reason: FinishReason | None
    """"stop" (an end-of-sequence id, stop id or stop string), "length", or None if the stream was closed early."""
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    stats: Stats
    index: int = 0
    """Which of the prompt's ``n`` samples this is."""


@dataclass(frozen=True)
class Request:
    """One answer that an engine is asked for."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    k: int | None = None
    """Draft tokens in a round; 0 decodes plainly, None leaves it to the engine."""
    reuse: bool = True
    """Whether the prompt's beginning may come from the prefix cache, and is left there."""
    index: int = 0
    """Which sample of its prompt this is; each has a seed of its own."""
    drafter: Any = None
    """A drafter of its own, with no other models than the engine's has; None: the engine's."""


@dataclass(frozen=True)
class Event:
    """What a step of an engine brought for one request: a piece, its end, or both."""

    id: int
    piece: Piece | None = None
    round: Round | None = None
    """The round that ``piece`` came from."""
    output: Output | None = None
    """Set with the request's last event; after ``abort`` its ``finish_reason`` is None."""
    error: Exception | None = None
    """Why the request failed; ``output`` then holds what there was so far."""
    speed_up: float | None = None
    """With ``output``: an estimate of what drafting gained, see ``Goodput.speed_up``."""
