"""A config-driven training framework for language models in JAX and Flax. Importing it loads neither JAX nor Flax."""

import signal
import sys

# `python -m trainer.NAME` imports this first, while sys.argv[0] is "-m". Until `take_interrupts` is called, Ctrl-C has
# the system's default action and ends the process at once: an exception during imports would print a traceback.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
