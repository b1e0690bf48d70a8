"""Agreement between two real processes, and how they end."""

import dataclasses
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from process_cases import words

import trainer
from trainer import train
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.runtime import agreement, versions
from trainer.runtime.agreement import AgreedError, agreed, check_same, from_first, gather, is_first, lost_process
from trainer.runtime.versions import program

HOST = platform.node()
PROGRAM = """
import sys
from types import SimpleNamespace
from trainer.config.errors import UserError, exit_on_user_error
from trainer.runtime.agreement import agreed, check_same, from_first, gather, gather_later, is_first
from trainer.runtime.distributed import distributed
from trainer.runtime.versions import program

index, address = int(sys.argv[1]), sys.argv[2]

def told(fn):
    try:
        return fn()
    except UserError as error:
        return str(error)

def fail(text):
    raise UserError(text)

@exit_on_user_error
def main():
    config = SimpleNamespace(
        skip_jax_distributed_system=False, coordinator_address=address, num_processes=2, process_id=index,
        jax_distributed_initialization_timeout=60, jax_distributed_heartbeat_timeout_seconds=10,
    )
    with distributed(config):
        print(is_first(), gather("ä" * (1 + 2000 * index))[1][-1:], [len(text) for text in gather("ä" * 1500 * index)])
        print(from_first(lambda: {"from": index}), told(lambda: from_first(lambda: fail(f"of {index}"))))
        print(agreed(lambda: index), told(lambda: agreed(lambda: fail("mine") if index else 0)))
        print(told(lambda: agreed(lambda: fail("everybody's"))))
        print(told(lambda: check_same(lambda: program() | {"it": str(index)})), told(lambda: check_same(program)))
        print(gather_later([index + 0.5, 2])().tolist(), flush=True)
        if index:
            fail("alone")  # while the other waits for this one
        try:
            gather("")
        finally:
            raise OSError("what closes at the end fails, too")

main()
"""


def ended(command, ends=((), ())):
    """Runs two processes with a free address; returns each one's return code, output and errors.

    `ends`: the additional arguments of each process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, *(word.format(index=index, address=address) for word in command), *ends[index]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(len(ends))
    ]
    said = [process.communicate(timeout=120) for process in processes]
    return [process.returncode for process in processes], said


def test_two_processes():
    codes, ends = ended(["-c", PROGRAM.replace("{", "{{").replace("}", "}}"), "{index}", "{address}"])
    for index, (output, errors) in enumerate(ends):
        lines = [line for line in output.splitlines() if "Gloo" not in line]
        assert lines == [
            f"{index == 0} ä [0, 1500]",
            "{'from': 0} of 0",
            f"{index} process 1 of 2: mine",
            "everybody's",
            f"it must be the same in every process: 0 in process 0 ({HOST}), 1 in process 1 ({HOST}) None",
            "[[0.5, 2.0], [1.5, 2.0]]",
        ], errors
    assert codes[1] == 2
    assert ends[1][1].splitlines()[-1] == "error: alone"
    assert "Traceback" not in ends[0][1]
    assert "stopped: another process of this run ended or no longer answers: look for the cause in" in ends[0][1]
    assert codes[0] == 1, "it learned of the other's end, and did not wait for it"


WHERE = ["process_id={index}", "num_processes=2", "coordinator_address={address}"]
TRAIN = ["-m", "trainer.train", *words(dataset_type="synthetic", enable_checkpointing=False), *WHERE]


def test_a_wrong_word_in_one_process_is_the_message_of_all():
    """It is detected before the process connects. The other processes would wait for it until their timeout."""
    codes, ends = ended(TRAIN, [[], ["stepz=3"]])
    mistake = "1 mistake in the configuration:\n  stepz=3 (command line): there is no key stepz; nearest: steps\n"
    assert [said for _, said in ends] == [f"error: process 1 of 2: {mistake}", f"error: {mistake}"]
    assert codes == [2, 2]


def test_a_process_that_never_comes_is_one_message():
    """Without this, JAX would abort."""
    codes, ends = ended(TRAIN, [["jax_distributed_initialization_timeout=1"]])
    assert codes == [2]
    assert ends[0][1].startswith("error: the processes given by coordinator_address did not all connect to each other")
    assert "within 1 s: look for an error in the output of each process, start all processes" in ends[0][1]
    assert ends[0][1].count("\n") == 1


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Read error: Connection reset by peer"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Barrier failed because: Task 1 heartbeat timeout."), True),
        (TimeoutError("Timed out while waiting for async_commit_complete barrier."), True),
        (TimeoutError("timed out"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_the_loss_of_another_process_is_told_by_its_text(monkeypatch, error, lost):
    assert not lost_process(error), "a process alone"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    after = ValueError("what was closed")
    after.__context__ = error
    assert lost_process(error) == lost_process(after) == lost


def test_unequal_hosts_are_one_message(monkeypatch, tmp_path):
    """The message names differing source files, wherever trainer is installed, and shows this run's configuration."""
    package = tmp_path / "trainer"
    shutil.copytree(Path(trainer.__file__).parent / "ops", package / "ops", ignore=shutil.ignore_patterns("*.pyc"))
    here = program() | {"the configuration": "steps: 3\nseed: 0"}
    monkeypatch.setattr(trainer, "__file__", str(package / "__init__.py"))
    assert program()["the source of trainer"] in here["the source of trainer"], "the same files elsewhere"
    (package / "ops/losses.py").write_text("")
    version = versions.metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda name: "0.0.1" if name == "jaxlib" else version(name))
    there = program() | {"the configuration": "steps: 4\nseed: 0"}
    files = here["the source of trainer"].splitlines()
    assert {line.split()[0] for line in files} >= {"train.py", "base.yml", "config/models/qwen3-8b.yml"}
    there["the source of trainer"] += "\n" + "\n".join(line for line in files if not line.startswith("ops/"))

    monkeypatch.setattr(agreement, "_count", lambda: 4)
    hosts = {"a": here, "b": here, "c": there, "d": there}
    monkeypatch.setattr(agreement, "agreed", lambda fn: fn())
    monkeypatch.setattr(agreement, "gather", lambda text: [json.dumps(host) for host in hosts.items()])
    with pytest.raises(AgreedError) as raised:
        check_same(lambda: here)
    digest = next(line for line in files if line.startswith("ops/losses.py"))
    assert str(raised.value).split("\n  ") == [
        f"the versions must be the same in every process: jaxlib {version('jaxlib')} in process 0 (a), "
        "jaxlib 0.0.1 in process 2 (c) and 1 more",
        f"the source of trainer must be the same in every process: {digest} in process 0 (a), "
        "ops/losses.py e3b0c44298fc in process 2 (c) and 1 more",
        "the configuration must be the same in every process: steps: 3 in process 0 (a), "
        "steps: 4 in process 2 (c) and 1 more",
    ]


def test_the_code_is_compared_before_anything_depends_on_it(monkeypatch):
    def unequal(values):
        assert values is program
        raise AgreedError("unequal")

    monkeypatch.setattr(agreement, "check_same", unequal)
    kind = dataclasses.replace(train.TRAIN, prepare=lambda *args: 1 / 0)
    with pytest.raises(AgreedError, match="unequal"):
        train._opened(load(["model_name=qwen3-0.6b"]), kind)


def test_a_process_alone():
    assert is_first()
    assert gather("x") == ["x"]
    value = object()  # which JSON cannot represent
    assert from_first(lambda: value) is agreed(lambda: value) is value

    def fail():
        raise UserError("as it is")

    check_same(fail)

    for call in (agreed, from_first):
        with pytest.raises(UserError, match=r"^as it is$"):
            call(fail)
