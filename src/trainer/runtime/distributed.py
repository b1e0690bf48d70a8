"""Several processes as one run: how they connect, and how they end."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from trainer.config import Config, RunStopped, UserError, exit_on_user_error
from trainer.runtime.agreement import AgreedError
from trainer.runtime.cluster import Cluster, find_cluster


@contextlib.contextmanager
def distributed(config: Config) -> Iterator[None]:
    """Runs the body within `jax.distributed` if this process is one of several. Enter before the first use of a device.

    Events that end all processes alike (the end of the run, SIGTERM, an `AgreedError`, `RunStopped`) pass through. Any
    other exception is local to this process. It is reported, and the process exits immediately, without waiting for the
    others. The exit also ends the other processes.

    Raises:
      UserError: see `find_cluster`; or the other processes did not connect in time.
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


def _join(cluster: Cluster, config: Config) -> None:
    import jax

    try:
        jax.distributed.initialize(
            cluster.address,
            cluster.processes,
            cluster.process,
            cluster_detection_method=cluster.method,
            initialization_timeout=config.jax_distributed_initialization_timeout,
            heartbeat_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
            shutdown_timeout_seconds=config.jax_distributed_heartbeat_timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:  # includes JaxRuntimeError
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the processes given by {cluster.source} could not connect to each other ({reason}); start all of them, "
            "and check that they can reach the address of process 0; or set skip_jax_distributed_system=true to train "
            "with this process only"
        ) from error


def _end_alone(error: BaseException) -> NoReturn:
    code: Any = 1
    try:
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
