"""Checks the paths that users write, so that an invalid path is reported before a system call fails."""

import os
from pathlib import Path

from trainer.config.errors import UserError, shortened

MAX_NAME, MAX_PATH = 255, 4095  # bytes, on Linux
# The URL schemes of remote data files, each with the pip extra that installs its package.
EXTRAS = {"gs": "gcs", "s3": "s3", "hf": "hf", "http": "http", "https": "http"}


def path_problem(text: str) -> str | None:
    """Returns why `text` cannot be a local path, or None."""
    try:
        path = os.fsencode(Path(text).expanduser())
    except RuntimeError:
        return f"there is no home folder {shortened(Path(text).parts[0])}; write the full path"
    except UnicodeEncodeError:
        path = b"\0"
    if b"\0" in path:
        return "not a valid path"
    longest = max(path.split(b"/"), key=len)
    if len(longest) > MAX_NAME:
        return f"the name has {len(longest)} bytes; the limit is {MAX_NAME}"
    if len(path) > MAX_PATH:
        return f"the path has {len(path)} bytes; the limit is {MAX_PATH}"
    return None


def url_problem(text: str) -> str | None:
    """Returns why data files cannot be read from the URL `text`, or None."""
    scheme, _, rest = text.partition("://")
    if scheme not in EXTRAS:
        return f"data are read from {', '.join(f'{known}://' for known in EXTRAS)} and from this machine"
    return None if rest.strip("/") else "nothing follows the scheme"


def without_secrets(url: str) -> str:
    """Returns `url` for messages. Removes the user, password and query of http and https URLs, which may be secret."""
    if not url.startswith(("http://", "https://")):
        return url
    scheme, _, rest = url.partition("://")
    rest, question, _ = rest.partition("?")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}{'?...' if question else ''}"


def local_path(text: str, what: str = "") -> Path:
    """Returns `text` as a path, with `~` expanded. Raises UserError if the path is invalid; see `path_problem`. `what`:
    the beginning of the error message, such as `tokenizer_path=`."""
    if problem := path_problem(text):
        raise UserError(f"{what}{shortened(text)}: {problem}")
    return Path(text).expanduser()


def is_file(text: str) -> bool:
    """Returns whether `text` is the path of a file."""
    return path_problem(text) is None and Path(text).is_file()
