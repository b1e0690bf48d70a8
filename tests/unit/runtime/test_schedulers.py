"""The examples for Slurm and Kubernetes: whether their options and fields exist, and how scripts/slurm.sh ends."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from trainer.config.load import load

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "slurm.sh"
# The options of sbatch 23.11 that the script uses, with patterns of their values, and the options of srun.
SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"[\w%.-]+",
    "signal": r"(R|B|RB):(TERM|USR1|USR2)@\d+",
}
SRUN = {"kill-on-bad-exit": "0|1", "wait": r"\d+", "output": r"[\w%.-]+", "open-mode": "append|truncate"}
# The fields and values of jobset.x-k8s.io/v1alpha2 (its CRD of 2026-08-18, which includes batch/v1) for each path that
# the manifest uses. "!" marks a required field. Below the paths in FREE, names are arbitrary.
FIELDS = {
    "": "apiVersion kind metadata spec",
    "metadata": "name namespace labels annotations",
    "spec": "coordinator failurePolicy managedBy network replicatedJobs startupPolicy successPolicy suspend "
    "ttlSecondsAfterFinished volumeClaimPolicies",
    "spec.failurePolicy": "maxRestarts restartStrategy rules",
    "spec.failurePolicy.rules": "action! name! onJobFailureMessagePatterns onJobFailureReasons targetReplicatedJobs",
    "spec.replicatedJobs": "dependsOn groupName name! replicas template!",
    "spec.replicatedJobs.template": "metadata spec",
    "spec.replicatedJobs.template.spec": "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode "
    "completions managedBy manualSelector maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy selector "
    "successPolicy suspend template! ttlSecondsAfterFinished",
    "spec.replicatedJobs.template.spec.podFailurePolicy": "rules!",
    "spec.replicatedJobs.template.spec.podFailurePolicy.rules": "action! onExitCodes onPodConditions",
    "spec.replicatedJobs.template.spec.podFailurePolicy.rules.onExitCodes": "containerName operator! values!",
    "spec.replicatedJobs.template.spec.template": "metadata spec",
    "spec.replicatedJobs.template.spec.template.spec": "affinity containers! hostNetwork initContainers nodeSelector "
    "priorityClassName restartPolicy serviceAccountName terminationGracePeriodSeconds tolerations volumes",
    "spec.replicatedJobs.template.spec.template.spec.containers": "args command env image imagePullPolicy name! ports "
    "resources securityContext volumeMounts workingDir",
    "spec.replicatedJobs.template.spec.template.spec.containers.env": "name! value valueFrom",
    "spec.replicatedJobs.template.spec.template.spec.containers.env.valueFrom": "configMapKeyRef fieldRef "
    "resourceFieldRef secretKeyRef",
    "spec.replicatedJobs.template.spec.template.spec.containers.env.valueFrom.fieldRef": "apiVersion fieldPath!",
    "spec.replicatedJobs.template.spec.template.spec.containers.resources": "claims limits requests",
}
FREE = {"spec.replicatedJobs.template.spec.template.spec.containers.resources.limits"}
VALUES = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "restartStrategy": "Recreate BlockingRecreate InPlaceRestart",
    "completionMode": "Indexed NonIndexed",
    "restartPolicy": "Never",  # Always and OnFailure cannot be combined with podFailurePolicy
    "operator": "In NotIn",
    "spec.failurePolicy.rules.action": "FailJobSet RestartJobSet RestartJobSetAndIgnoreMaxRestarts",
    "spec.replicatedJobs.template.spec.podFailurePolicy.rules.action": "FailJob FailIndex Ignore Count",
    "onJobFailureReasons": "BackoffLimitExceeded DeadlineExceeded FailedIndexes PodFailurePolicy",
}
NUMBERS = {"maxRestarts", "replicas", "parallelism", "completions", "backoffLimit", "values"}


def mistakes(value, path=""):
    """Yields the fields and values that the tables do not contain."""
    name = path.rpartition(".")[2]
    if isinstance(value, dict):
        if path in FREE:
            return
        known = FIELDS.get(path, "").split()
        yield from (f"{path}: no {field}" for field in value if field not in {word.strip("!") for word in known})
        yield from (f"{path}: {word} is missing" for word in known if word[-1] == "!" and word[:-1] not in value)
        for field, inner in value.items():
            yield from mistakes(inner, f"{path}.{field}".strip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from mistakes(inner, path)
    elif (choices := VALUES.get(path) or VALUES.get(name)) and value not in choices.split():
        yield f"{path}: {value}"
    elif (name in NUMBERS or name.endswith("Seconds")) != isinstance(value, int):
        yield f"{path}: {value} has another type"


def manifest():
    return (ROOT / "docs/guides/jobset.yml").read_text()


def test_the_manifest_writes_what_there_is():
    assert not list(mistakes(yaml.safe_load(manifest())))


@pytest.mark.parametrize(
    ("text", "other"),
    [("operator: In", "operatr: In"), ("FailJob ", "FailJobs "), ("Limit: 0", "Limit: none"), ("- name: hosts", "-")],
)
def test_a_mistake_in_a_manifest_is_found(text, other):
    assert text in manifest()
    assert list(mistakes(yaml.safe_load(manifest().replace(text, other, 1))))


def test_the_manifest_fits_itself_and_the_trainer():
    jobset = yaml.safe_load(manifest())
    (group,) = jobset["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert rule["action"] == "FailJob"
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert (job["backoffLimit"], job["completionMode"]) == (0, "Indexed")
    python, m, module, *words = container["command"]
    assert [python, m, module] == ["python", "-m", "trainer.train"]
    config = load([word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in words]).config
    assert config.num_processes == job["completions"] == job["parallelism"] == config.process_id + 1
    assert config.run_name == jobset["metadata"]["name"]
    assert config.supervise
    host, port = config.coordinator_address.split(":")
    assert host == f"{jobset['metadata']['name']}-{group['name']}-0-0.{jobset['metadata']['name']}"
    assert port.isdecimal()


def test_the_directives_exist():
    text = SCRIPT.read_text()
    for table, options in (
        (SBATCH, re.findall(r"^#SBATCH --(\S+)$", text, re.MULTILINE)),
        (SRUN, re.findall(r"--(\S+)", re.search(r"^srun (.*) bash -c", text, re.MULTILINE)[1])),
    ):
        given = dict(option.partition("=")[::2] for option in options)
        assert given.keys() == table.keys()
        assert all(re.fullmatch(table[name], value) for name, value in given.items())
    assert text.count("#SBATCH") == len(SBATCH)
    load([*re.search(r'"\$@" (.*) &$', text, re.MULTILINE)[1].replace('"', "").replace("$SLURM_JOB_ID", "7").split()])


PROGRAMS = {
    # Without the options, simulates srun: two tasks, and the higher of their exit codes.
    "srun": 'shift 4; TASK=1 "$@" & TASK=0 "$@"; a=$?; wait $!; b=$?; exit $((a > b ? a : b))',
    "python": """
        trap 'sleep 0.5; : > saved-$TASK; exit 143' TERM
        echo "$PPID $$ $*" > "task-$TASK"
        while [ ${CODES[$TASK]} = waits ]; do sleep 0.05; done
        exit ${CODES[$TASK]}""",
    # Like Slurm, sends the signal to all processes of the tasks.
    "scancel": 'echo "$*" > cancelled; for f in task-*; do read -r a b rest < "$f"; kill -TERM "$a" "$b"; done',
    "scontrol": """
        [ "$*" != "show job 7" ] || exec echo " PreemptEligibleTime=2026-11-30T00:00:00 PreemptTime=${PREEMPTED:-None}"
        echo "$*" > queued""",
}


@pytest.fixture
def submitted(tmp_path):
    """Yields a function that starts the script as Slurm does, with tasks that end with `codes`."""
    (tmp_path / "bin").mkdir()
    for name, program in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\nCODES=($TASK_CODES)\n{program}\n")
        path.chmod(0o755)

    def start(codes, **others):
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "TASK_CODES": codes,
        }
        command = ["bash", SCRIPT, "my.yml", "prompt=two words"]
        return subprocess.Popen(command, cwd=tmp_path, env=environment | others, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize(
    ("codes", "others", "code", "queued"),
    [
        ("0 0", {}, 0, False),
        ("1 137", {}, 0, True),
        ("75 134", {"SLURM_RESTART_COUNT": "19"}, 0, True),
        ("75 134", {"SLURM_RESTART_COUNT": "20"}, 75, False),
        ("75 143", {}, 0, True),  # the supervisor that ended one process made both processes end
        ("2 134", {}, 2, False),  # a user's error in one process; JAX aborts the other
        ("143 143", {}, 143, False),  # scancel
    ],
)
def test_how_the_script_ends(codes, others, code, queued, submitted, tmp_path):
    with submitted(codes, **others) as script:
        said, _ = script.communicate()
    assert script.returncode == code, said
    assert (tmp_path / "queued").exists() == queued
    assert ("not queued again" in said) == (code != 0)
    words = "-m trainer.train my.yml prompt=two words run_name=job-7 supervise=true"
    assert [(tmp_path / f"task-{task}").read_text().split(maxsplit=2)[2] for task in range(2)] == [f"{words}\n"] * 2


def run_and_signal(script, number, tmp_path):
    """Sends a signal to the script when its tasks run. Returns the script's output."""
    until = time.monotonic() + 120
    while not all((path := tmp_path / f"task-{task}").exists() and path.read_text() for task in range(2)):
        assert time.monotonic() < until
        time.sleep(0.02)
    script.send_signal(number)
    if number == signal.SIGTERM:  # Slurm sends it to the tasks, too
        subprocess.run([tmp_path / "bin/scancel"], cwd=tmp_path, check=True)
    return script.communicate(timeout=120)[0]


def test_when_slurm_ends_the_job_the_script_waits_for_its_tasks(submitted, tmp_path):
    with submitted("waits waits") as script:
        said = run_and_signal(script, signal.SIGTERM, tmp_path)
    assert said == "slurm.sh: somebody ended it; not queued again\n"
    assert script.returncode == 143
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert not (tmp_path / "queued").exists()


def test_a_preempted_job_waits_until_slurm_ends_it(submitted, tmp_path):
    with submitted("143 143", PREEMPTED="2026-11-30T00:01:00") as script:
        assert script.stdout.readline() == "slurm.sh: preempted; Slurm queues the job again\n"
        time.sleep(0.2)
        assert script.poll() is None
        script.terminate()
    assert not (tmp_path / "queued").exists()


def test_at_the_time_limit_all_save_and_the_job_is_queued_again(submitted, tmp_path):
    with submitted("waits waits") as script:
        said = run_and_signal(script, signal.SIGUSR1, tmp_path)
    assert said == "slurm.sh: exit code 143; queued again\n"
    assert len(list(tmp_path.glob("saved-*"))) == 2, "the script waits for the tasks"
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 7\n"
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
