"""Connects several processes into one run, and ends them together."""

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from trainer.config.dump import PROCESSES
from trainer.config.errors import RunStopped, UserError, exit_on_user_error
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.runtime.agreement import AgreedError, agreed, lost_process
from trainer.runtime.cluster import Cluster, find_cluster
from trainer.runtime.platforms import add_threads_for_simulated_devices, leave_out_absent_tpu

_LATER = 60  # seconds added to JAX's timeout, because this module must time out first: JAX would abort the process
_TELLING = "jax_distributed_initialization_timeout=60"  # for a process that connects only to report its error
_REMEDY = (
    ": look for an error in the output of each process, start all processes, and check that they can reach the address "
    "of process 0; or set skip_jax_distributed_system=true to train with this process only"
)
_ENDED = (
    "another process of this run ended or no longer answers: look for the cause in the output of the others; the same "
    "command continues from the newest checkpoint ({})"
)


@contextlib.contextmanager
def distributed(config: Config) -> Iterator[None]:
    """Runs the body within `jax.distributed` if this process is one of several. Enter before the first use of a device.

    Exceptions that all processes raise at the same point (`AgreedError`, `RunStopped`, SystemExit) pass through. Any
    other exception is local to this process: it is reported, and the process exits immediately, without waiting for the
    other processes. This exit also ends the other processes.

    Raises:
      UserError: see `find_cluster`; or the connection to the other processes failed.
    """
    cluster = find_cluster(config, os.environ)
    if cluster is None:
        yield
        return
    import jax

    _join(cluster, config)
    try:
        yield
    except (AgreedError, RunStopped, SystemExit):
        jax.distributed.shutdown()
        raise
    except BaseException as error:  # ends the process
        _end_alone(error)
    jax.distributed.shutdown()


@contextlib.contextmanager
def told_to_others(words: Sequence[str]) -> Iterator[None]:
    """A context in which the command line `words` is read. If the body raises UserError in one of several processes,
    all processes end.

    The failed process reports the error, but still connects to the other processes, so that the first call of `agreed`
    in the other processes raises the same error. This call must be the first use of the module `agreement` in these
    processes.
    """
    try:
        yield
    except UserError as error:
        try:
            config = load([*(word for word in words if word.partition("=")[0] in PROCESSES), _TELLING]).config
            cluster = find_cluster(config, os.environ)
        except UserError:
            cluster = None
        if cluster is None:
            raise
        try:
            _raise(error)  # reports the error before connecting, because the other processes may not have started
        except SystemExit as end:
            leave_out_absent_tpu()
            add_threads_for_simulated_devices()
            with contextlib.suppress(AgreedError), distributed(config):
                agreed(functools.partial(_fail, error))
            raise end from None


def _fail(error: UserError) -> NoReturn:
    raise error


def _join(cluster: Cluster, config: Config) -> None:
    import jax

    timeout, where = config.jax_distributed_initialization_timeout, f"the processes given by {cluster.source}"
    missing = UserError(f"{where} did not all connect to each other within {timeout} s{_REMEDY}")
    late = threading.Timer(timeout, lambda: _end_alone(missing))
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            cluster.address,
            cluster.processes,
            cluster.process,
            cluster_detection_method=cluster.method,
            initialization_timeout=timeout + _LATER,
            heartbeat_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
            shutdown_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:  # JaxRuntimeError is a RuntimeError
        reason = str(error).partition("\n")[0]
        raise UserError(f"{where} could not connect to each other ({reason}){_REMEDY}") from error
    finally:
        late.cancel()


def _end_alone(error: BaseException) -> NoReturn:
    code: Any = 1
    try:
        if not isinstance(error, UserError) and lost_process(error):
            error = RunStopped(_ENDED.format(str(error).partition("\n")[0]))
        _raise(error)
    except SystemExit as end:
        code = end.code
    except BaseException as other:
        traceback.print_exception(other)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for the other processes


@exit_on_user_error
def _raise(error: BaseException) -> NoReturn:
    raise error
