"""A config-driven training framework for language models in JAX and Flax. Importing it loads neither JAX nor Flax."""

import signal
import sys

# `python -m trainer.NAME` imports this module first, while sys.argv[0] is "-m". Restore the system's default action for
# Ctrl-C, which ends the process at once: Python's handler would print a traceback if it interrupts an import. Programs
# that have something to close install their own handler later.
_module = next((after for word, after in zip(sys.orig_argv, sys.orig_argv[1:], strict=False) if word == "-m"), "")
_is_command = sys.argv[:1] == ["-m"] and f"{_module}.".startswith("trainer.")
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
