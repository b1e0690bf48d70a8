"""Access control of a server, by access tokens or by host names."""

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Sequence

from trainer.config.errors import UserError
from trainer.config.paths import local_path
from trainer.serving.errors import ApiError

VARIABLE = "TRAINER_SERVE_TOKEN"
_SHORTEST = 8
_TOKEN = re.compile(r"[\x21-\x7e]+")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_local(host: str) -> bool:
    """Returns whether a server at the address `host` can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_tokens(path: str, host: str) -> list[str]:
    """Returns the access tokens in the file `path` or, if `path` is empty, in TRAINER_SERVE_TOKEN; one per line.

    Raises:
      UserError: the file cannot be read or is empty, a token is invalid, or there is no token but other machines can
        reach `host`.
    """
    where = f"token_file={path}" if path else VARIABLE
    text = os.environ.get(VARIABLE, "")
    if path:
        try:
            text = local_path(path, "token_file=").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot be read: {error}") from error
    tokens = list(filter(None, map(str.strip, text.splitlines())))
    if path and not tokens:
        raise UserError(f"{where}: the file contains no tokens; write one per line")
    for i, token in enumerate(tokens, 1):
        if len(token) < _SHORTEST or not _TOKEN.fullmatch(token):
            raise UserError(f"{where}: token {i} must have {_SHORTEST} or more visible ASCII characters")
    if not tokens and not is_local(host):
        raise UserError(
            f"host={host}: others can reach it, so requests must have a token: set token_file=FILE, a file with one "
            f"token per line, or the environment variable {VARIABLE}; host=127.0.0.1 needs no token"
        )
    return tokens


class Access:
    """Decides whether a request is allowed, from the request's headers."""

    def __init__(self, tokens: Sequence[str]):
        self._digests = [_digest(token.encode()) for token in tokens]

    def owner(self, authorization: str | None, host: str | None) -> str:
        """Returns an identifier of a request's access token; "" if the server has no access tokens.

        Args:
          authorization, host: the request's headers of these names.

        Raises:
          ApiError: 401 without a valid token; 403 if the server has no tokens and `host` is not local, because a web
            page may have sent such a request (DNS rebinding).
        """
        if not self._digests:
            name = re.sub(r":\d*$", "", host or "").strip("[]")
            if name not in _LOCAL_NAMES and not is_local(name):
                raise ApiError(403, f"this server accepts only the hosts {', '.join(_LOCAL_NAMES)}, not {name!r}")
            return ""
        scheme, _, token = (authorization or "").partition(" ")
        digest = _digest(token.strip().encode(errors="replace"))
        # Compares with the digest of each valid token, in constant time.
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(same):
            raise ApiError(
                401,
                "the request needs the header Authorization: Bearer TOKEN, with a token of this server",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return str(same.index(True))


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
