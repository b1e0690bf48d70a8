"""The environment variables that launchers set."""

from types import SimpleNamespace

import pytest

from trainer.config.errors import UserError
from trainer.runtime.cluster import Cluster, find_cluster

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
MAXTEXT_GPU = {
    "JAX_COORDINATOR_IP": "10.0.0.1",
    "JAX_COORDINATOR_PORT": "99",
    "NNODES": "4",
    "NODE_RANK": "3",
}
MAXTEXT_CPU = {
    "JAX_PROCESS_COUNT": "4",
    "JOB_INDEX": "1",
    "PROCESSES_IN_JOB": "2",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "first",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
GKE_TPU = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}


def found(environ, **keys):
    config = {"skip_jax_distributed_system": False, "coordinator_address": "", "num_processes": 0, "process_id": -1}
    return find_cluster(SimpleNamespace(**config | keys), environ)


@pytest.mark.parametrize(
    ("environ", "cluster"),
    [
        ({}, None),
        (SLURM, Cluster("Slurm", "slurm")),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None),
        (MAXTEXT_GPU, Cluster("JAX_COORDINATOR_IP", "deactivate", "10.0.0.1:99", 4, 3)),
        (MAXTEXT_GPU | SLURM, Cluster("JAX_COORDINATOR_IP", "deactivate", "10.0.0.1:99", 4, 3)),
        (MAXTEXT_CPU, Cluster("JAX_PROCESS_COUNT", "deactivate", "first:1234", 4, 3)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3"}, Cluster("Open MPI", "ompi")),
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "first:5"}, Cluster("MPI", "deactivate", "first:5", 2, 1)),
        (
            {"PMI_SIZE": "3", "PMI_RANK": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
            Cluster("MPI", "deactivate", "a:1", 3, 2),
        ),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        (GKE_TPU, Cluster("the TPU's environment", None)),
        (GKE_TPU | {"TPU_WORKER_HOSTNAMES": "a"}, None),
        (GKE_TPU | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, Cluster("the TPU's environment", None)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_environments(environ, cluster):
    assert found(environ) == cluster
    assert found(environ, skip_jax_distributed_system=True) is None
    keys = {"coordinator_address": "there:1", "num_processes": 2, "process_id": 0}
    assert found(environ, **keys) == Cluster("coordinator_address", "deactivate", "there:1", 2, 0)


def test_a_pod_of_an_indexed_job(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert found(KUBERNETES) == Cluster("Kubernetes", "k8s")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs the package kubernetes"):
        found(KUBERNETES)


def test_mpirun_within_slurm_is_mpi():
    assert found(SLURM | OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "a"}).source == "MPI"
    assert found(SLURM).source == "Slurm"


def test_a_virtual_machine_with_tpus_asks_its_metadata(monkeypatch):
    monkeypatch.setattr("trainer.runtime.cluster.has_tpu", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert found({}) == found({"JAX_PLATFORMS": "tpu,cpu"}) == Cluster("the TPU's metadata", None)
    for others in ({"JAX_PLATFORMS": "cpu"}, {"TPU_SKIP_MDS_QUERY": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"}):
        assert found(others) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"JAX_COORDINATOR_IP": "a", "NNODES": "2", "NODE_RANK": "x"}, "JAX_COORDINATOR_PORT=, NODE_RANK=x"),
        ({"JAX_PROCESS_COUNT": "2"}, "JOB_INDEX=, PROCESSES_IN_JOB=, JOB_COMPLETION_INDEX="),
        (OPEN_MPI, "set JAX_COORDINATOR_ADDRESS"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK="),
    ],
)
def test_half_of_an_environment(environ, message):
    with pytest.raises(UserError, match=message):
        found(environ)
