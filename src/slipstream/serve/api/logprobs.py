"""Log-probabilities of tokens, as chats and completions show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.serve.api.parts import Token
from slipstream.serve.texts import Texts

#: What stands for a log-probability of minus infinity, which JSON does not have.
LEAST = -9999.0


def of_chat(tokens: Sequence[Token], texts: Texts) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = texts.token_bytes(token)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(raw)}

    content = []
    for token in tokens:
        if token.begins and token.logprob is not None:
            top = [entry(t, p) for t, p in token.logprob.top]
            content.append({**entry(token.id, token.logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_completion(tokens: Sequence[Token], texts: Texts, before: int) -> dict[str, Any]:
    """``logprobs`` of a completion's choice; ``before``: characters of its text that are prompt."""
    known = [(t, t.logprob) for t in tokens if t.begins and t.logprob is not None]

    def name(token: int) -> str:
        raw = texts.token_bytes(token)
        try:
            return raw.decode() or f"token_id:{token}"
        except UnicodeDecodeError:  # a part of a character; so that no two have one name
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    return {
        "tokens": [name(t.id) for t, _ in known],
        "token_logprobs": [max(p.logprob, LEAST) for _, p in known],
        "top_logprobs": [{name(i): max(q, LEAST) for i, q in p.top} for _, p in known],
        "text_offset": [before + t.offset for t, _ in known],
    }
