"""What a client is told when it cannot be served."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ForbiddenError, InputError, ModelError
from slipstream.serve.worker import CrashedError, StoppedError

#: OpenAI's kinds of errors.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form.

    Args:
        status: of HTTP.
        message: one sentence that names the input, says what is wrong with it and what to do.
        param: the field of the request that is meant.
        code: for programs, such as ``"model_not_found"``.
        retry_after: seconds after which it may work.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The document."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After``, if there is hope."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def api_error(error: Exception) -> ApiError:
    """What a client is told of a failure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError | ForbiddenError):
        return ApiError(400, str(error))
    if isinstance(error, StoppedError):
        return ApiError(503, str(error), code="shutting_down", retry_after=5)
    if isinstance(error, CrashedError):
        return ApiError(500, str(error), code="crashed")
    if isinstance(error, ModelError):
        return ApiError(500, str(error), code="model_error")
    return ApiError(500, f"the request failed ({type(error).__name__}); the server's log says more", code="failed")
