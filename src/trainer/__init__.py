"""A config-driven training framework for language models in JAX and Flax. Importing it loads neither JAX nor Flax."""

import signal
import sys

# `python -m trainer.NAME` imports this first, while sys.argv[0] is "-m". Until there is something to close, Ctrl-C has
# the system's default action and ends the process at once. An exception during imports would print a traceback.
_module = next((after for word, after in zip(sys.orig_argv, sys.orig_argv[1:], strict=False) if word == "-m"), "")
_is_command = sys.argv[:1] == ["-m"] and f"{_module}.".startswith("trainer.")
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
