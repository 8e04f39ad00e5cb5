"""A drafter of one's own: phrases that the answers of this application keep using, from a phrase book.

Support replies, licence headers, boilerplate of reports: once a phrase has begun, the rest of it is likely. Nothing in
Slipstream is edited; whatever the book says, the answers are the target's own.

    python examples/own_drafter.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slipstream import Draft, SpeculativeDecoding, load_model

PHRASES = [
    "Thank you for contacting us. We are sorry for any inconvenience you may have had regarding your order.",
    "Please do not hesitate to contact us if you have any further questions.",
]
PROMPT = "Reply to a customer whose chair arrived broken. Begin with: Thank you for contacting us. We are sorry"


class PhraseBook:
    """Proposes the rest of a phrase whose first tokens have just come out. Drafter and session in one: no state."""

    name = "phrases"

    def __init__(self, phrases: Sequence[Sequence[int]], begun: int = 3) -> None:
        self.after = {
            tuple(phrase[:at][-begun:]): tuple(phrase[at:]) for phrase in phrases for at in range(begun, len(phrase))
        }
        self.begun = begun

    def start(self, sampler: object) -> PhraseBook:
        """Begin one request."""
        return self

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Up to ``k`` tokens; they are copied, so q is one-hot and there are no probabilities to give."""
        found = self.after.get(tuple(tokens[-self.begun :]), ())
        return Draft(found[:k], ended="limit" if found else "no match")


def main(model: str = "smollm2-135m", max_new_tokens: int = 48) -> float:
    """Answer plainly and with the phrase book; the acceptance rate."""
    target = load_model(model)
    phrases = [target.tokenizer(" " + phrase, add_special_tokens=False)["input_ids"] for phrase in PHRASES]
    message = [{"role": "user", "content": PROMPT}]
    plain = SpeculativeDecoding(target, None, max_new_tokens=max_new_tokens).complete(message)[0]
    # Alone, or in front of others: draft_model=[PhraseBook(phrases), "suffix"].
    spec = SpeculativeDecoding(target, PhraseBook(phrases), k=8, max_new_tokens=max_new_tokens)
    output = spec.complete(message)[0]
    same = "the same answer" if output.tokens == plain.tokens else "another answer (a tie in the last bits)"
    print(output.text)
    print(f"\n{output.stats.rounds} rounds instead of {plain.stats.rounds}, {same}")
    return output.stats.acceptance_rate


if __name__ == "__main__":
    main(*sys.argv[1:2])
