"""Determines the number of processes, this process's index and the coordinator's address, from configuration keys or
environment variables.
"""

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.runtime.platforms import has_tpu

# The default port. MaxText's launchers set a port only for GPUs.
_PORT = "1234"
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


class Cluster(NamedTuple):
    """Arguments of `jax.distributed.initialize`. JAX uses `method` to determine the fields that are None."""

    source: str  # the origin of the values, for messages
    method: str | None  # JAX's cluster_detection_method; None: JAX tries all of its methods
    address: str | None = None  # host:port of the first process
    processes: int | None = None
    process: int | None = None


def find_cluster(config: Config, environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster to which this process belongs; None for a single process.

    Imports no packages and sends no requests. With skip_jax_distributed_system=true, the result is None. Otherwise, the
    first of these sources that is present determines the result: the key coordinator_address, MaxText's environment
    variables, Slurm, MPI, a TPU slice, Kubernetes.

    Raises:
      UserError: environment variables are missing or not numbers, or the package for Kubernetes is missing.
    """
    if config.skip_jax_distributed_system:
        return None
    if config.coordinator_address:
        where = config.coordinator_address, config.num_processes, config.process_id
        return Cluster("coordinator_address", "deactivate", *where)
    # On a Slurm cluster, mpirun starts its ranks within a Slurm step, and the ranks inherit the step's variables, so
    # MPI's variables are read first.
    under_mpirun = (_mpi, _slurm) if environ.get("OMPI_COMM_WORLD_SIZE") else (_slurm, _mpi)
    finders = (_maxtext_gpu, _maxtext_cpu, *under_mpirun, _tpu, _kubernetes)
    return next((cluster for find in finders if (cluster := find(environ))), None)


def _maxtext_gpu(environ: Mapping[str, str]) -> Cluster | None:
    if not environ.get("JAX_COORDINATOR_IP"):
        return None
    names = ("JAX_COORDINATOR_PORT", "NNODES", "NODE_RANK")
    port, count, index = _numbers(environ, names, "JAX_COORDINATOR_IP")
    return Cluster("JAX_COORDINATOR_IP", "deactivate", f"{environ['JAX_COORDINATOR_IP']}:{port}", count, index)


def _maxtext_cpu(environ: Mapping[str, str]) -> Cluster | None:
    if not environ.get("JAX_PROCESS_COUNT"):
        return None
    names = ("JAX_PROCESS_COUNT", "JOB_INDEX", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX")
    count, job, per_job, index = _numbers(environ, names, "JAX_PROCESS_COUNT")
    return Cluster("JAX_PROCESS_COUNT", "deactivate", _address(environ), count, job * per_job + index)


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    # Only processes started by srun have peers. The shell of a batch script has no peers and no SLURM_STEP_NODELIST.
    if not all(environ.get(name) for name in _SLURM):
        return None
    [tasks] = _numbers(environ, ["SLURM_NTASKS"], "SLURM_STEP_NODELIST")
    if tasks == 1:
        return None
    return Cluster("Slurm", "slurm")


def _mpi(environ: Mapping[str, str]) -> Cluster | None:
    for names in (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")):
        if not environ.get(names[0]):
            continue
        count, index = _numbers(environ, names, names[0])
        if count == 1:
            return None
        if "OMPI_MCA_orte_hnp_uri" in environ and not environ.get("JAX_COORDINATOR_ADDRESS"):
            return Cluster("Open MPI", "ompi")
        return Cluster("MPI", "deactivate", _address(environ), count, index)
    return None


def _tpu(environ: Mapping[str, str]) -> Cluster | None:
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    slices = 1
    if environ.get("MEGASCALE_NUM_SLICES"):
        [slices] = _numbers(environ, ["MEGASCALE_NUM_SLICES"], "MEGASCALE_NUM_SLICES")
    if "," in hosts or slices > 1:
        return Cluster("the TPU's environment", None)
    # A Compute Engine TPU VM does not set these variables; JAX queries its metadata server.
    wanted = "tpu" in (environ.get("JAX_PLATFORMS") or "tpu").split(",")
    query = wanted and not hosts and "TPU_SKIP_MDS_QUERY" not in environ
    if query and has_tpu() and importlib.util.find_spec("libtpu") is not None:
        return Cluster("the TPU's metadata", None)
    return None


def _kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    if not environ.get("KUBERNETES_SERVICE_HOST") or not environ.get("JOB_COMPLETION_INDEX"):
        return None
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            "this is a pod of an indexed job, and JAX needs the package kubernetes to find the other pods: install it, "
            "or set coordinator_address, num_processes and process_id; skip_jax_distributed_system=true trains with "
            "this process only"
        )
    return Cluster("Kubernetes", "k8s")


def _address(environ: Mapping[str, str]) -> str:
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        raise UserError(
            "several processes were started, but the address of process 0 is not set: set JAX_COORDINATOR_ADDRESS "
            "(host or host:port), or skip_jax_distributed_system=true to train each process by itself"
        )
    return address if ":" in address else f"{address}:{_PORT}"


def _numbers(environ: Mapping[str, str], names: tuple[str, ...] | list[str], given: str) -> list[int]:
    wrong = [f"{name}={environ.get(name, '')}" for name in names if not environ.get(name, "").isdecimal()]
    if wrong:
        raise UserError(
            f"{given} is set in the environment, so these must be numbers: {', '.join(wrong)}; "
            "skip_jax_distributed_system=true trains with this process only"
        )
    return [int(environ[name]) for name in names]
