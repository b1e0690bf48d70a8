"""Several processes as one run: how they find each other, and how they end."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from trainer.config import RunStopped, UserError, exit_on_user_error
from trainer.runtime.agreement import AgreedError
from trainer.runtime.cluster import Cluster, find_cluster


@contextlib.contextmanager
def distributed(config: Any) -> Iterator[None]:
    """`jax.distributed` around a run, if this process is one of several; comes before the first use of a device.

    What ends all processes alike (the end of the run, SIGTERM, an `AgreedError`, `RunStopped`) passes. Any other
    exception is this process's own: it is reported, and the process ends at once, without waiting for the others,
    which wait for it and learn of it by its end.

    Raises:
      UserError: see `find_cluster`; or the others did not come in time.
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
    except BaseException as error:  # nothing goes on from here
        _end_alone(error)
    jax.distributed.shutdown()


def _join(cluster: Cluster, config: Any) -> None:
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
    except (ValueError, RuntimeError) as error:  # JaxRuntimeError is one
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"the processes that {cluster.said_by} speaks of did not find each other ({reason}); start all of them so "
            "that they reach the first one's address, or set skip_jax_distributed_system=true to train with one alone"
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
    os._exit(code)  # Python's own end would wait for the other processes


@exit_on_user_error
def _raise(error: BaseException) -> NoReturn:
    raise error
