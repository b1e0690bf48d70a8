"""Errors in the format of OpenAI's API."""

import functools
from typing import Any

INVALID, UNAVAILABLE, TIMEOUT = "invalid_request_error", "unavailable_error", "timeout_error"


class ApiError(Exception):
    """An error response.

    Attributes:
      status: the HTTP status code.
      headers: the headers of the response.
      body: the JSON of the response. Its `param` is the invalid parameter of the request, if there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def __reduce__(self) -> Any:
        said = dict(self.body["error"])
        again = functools.partial(ApiError, headers=self.headers, kind=said.pop("type"), **said)
        return again, (self.status,)


def timed_out(message: str) -> ApiError:
    """Returns the error for a request that took too long. Clients should not retry it automatically."""
    return ApiError(408, message, kind=TIMEOUT, code="timeout", headers={"x-should-retry": "false"})


def unavailable(message: str, status: int = 503, after: int = 1) -> ApiError:
    """Returns the error for a request that may be retried after `after` seconds."""
    return ApiError(status, message, kind=UNAVAILABLE, headers={"retry-after": str(after)})
