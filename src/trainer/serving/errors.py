"""Errors in the format of the API."""

import functools
from typing import Any

INVALID, UNAVAILABLE, TIMEOUT = "invalid_request_error", "unavailable_error", "timeout_error"


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
      status: the code of HTTP.
      param: the parameter of the request that is wrong, if it is one.
      headers: of the answer.
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
    """Returns the error for a request that took too long, which clients should not repeat by themselves."""
    return ApiError(408, message, kind=TIMEOUT, code="timeout", headers={"x-should-retry": "false"})


def unavailable(message: str, status: int = 503, after: int = 1) -> ApiError:
    """Returns the error for a request that may be repeated `after` so many seconds."""
    return ApiError(status, message, kind=UNAVAILABLE, headers={"retry-after": str(after)})
