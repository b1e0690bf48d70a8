"""A config-driven trainer for language models in JAX and Flax. Importing it loads neither JAX nor Flax."""

import signal
import sys

# `python -m trainer.NAME` imports this first, while sys.argv[0] is "-m". Until `exit_on_user_error` takes Ctrl-C, it
# ends the process at once, by the system: an exception in the middle of imports would print a traceback.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
