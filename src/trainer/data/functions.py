"""Loads user functions, named package.module:function. Imports only the standard library, so that workers start
fast."""

import hashlib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any


def load_function(path: str) -> Callable[..., Any]:
    """Returns the function that `path` names: package.module:function, or package.module.function.

    Raises:
      ImportError: the message states the problem and the remedy.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module can raise any exception
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            hint = f"; modules are searched in the current folder, {os.getcwd()}, and in PYTHONPATH"
        raise ImportError(f"cannot be imported: {failure(error)}{hint}") from error
    function = getattr(found, name, None)
    if not callable(function):
        from trainer.config.errors import nearest

        where = getattr(found, "__file__", None) or module
        instead = f", but {name} of the type {type(function).__name__}" if hasattr(found, name) else ""
        functions = [each for each, value in vars(found).items() if callable(value)]
        raise ImportError(f"{where} has no function {name}{instead}{nearest(name, functions)}")
    return function


def failure(error: BaseException) -> str:
    """Returns the type and text of an exception that a user's code raised, shortened to 80 characters, with the code's
    file and line.

    Call this function in the function that called the user's code, because the first frame of the traceback must be the
    caller's. The next frame, apart from the frames of an import, is then the frame of the user's code.
    """
    from trainer.config.errors import shortened

    of_imports = (importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if frame.filename not in of_imports]
    theirs = [frame for frame in frames if frame.filename == frames[0].filename]
    at = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{shortened(f'{type(error).__name__}: {error}')}{at}"


def source_hash(function: Callable[..., Any]) -> str:
    """Returns a hash of the source of the function's module; a hash of "" if there is no source."""
    try:
        source = inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):  # such as a function written in C
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()
