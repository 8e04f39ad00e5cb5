"""The drafter that proposes nothing: plain decoding, one token a round."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.sampling import Sampler
from slipstream.types import Draft


class NoDrafter:
    """Drafter and session in one, since there is no state."""

    name = "none"

    def start(self, sampler: Sampler) -> NoDrafter:
        """Begin one request."""
        return self

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Nothing."""
        return Draft()
