"""Errors that a user can act on.

Every message is one sentence that names the input, says what is wrong with it, and says what to do.
The command line prints it and exits with code 2; a server answers 400.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base class of the errors below."""


class InputError(SlipstreamError, ValueError):
    """An argument, file or model that cannot be used as asked; found before any expensive work."""


class ModelError(SlipstreamError, RuntimeError):
    """The target model produced something that no token can be sampled from, such as NaN logits."""


class ForbiddenError(ModelError):
    """Bias, penalties and processors forbid every token at some position."""
