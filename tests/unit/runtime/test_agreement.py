"""Agreement between two real processes, and how they end."""

import os
import socket
import subprocess
import sys

import pytest

from trainer.config import UserError
from trainer.runtime.agreement import agreed, check_same, from_first, gather, is_first

PROGRAM = """
import sys
from types import SimpleNamespace
from trainer.config import UserError, exit_on_user_error
from trainer.runtime.agreement import agreed, check_same, from_first, gather, is_first
from trainer.runtime.distributed import distributed

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
        print(told(lambda: check_same("it", str(index))), told(lambda: check_same("it", "")), flush=True)
        if index:
            fail("alone")  # while the other waits for this one
        gather("")

main()
"""


def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": ""}
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            [*command, str(index), address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for index in range(2)
    ]
    ends = [process.communicate(timeout=120) for process in processes]
    for index, (output, errors) in enumerate(ends):
        lines = [line for line in output.splitlines() if "Gloo" not in line]
        assert lines == [
            f"{index == 0} ä [0, 1500]",
            "{'from': 0} of 0",
            f"{index} process 1 of 2: mine",
            "everybody's",
            "it must be the same in every process: 0 in process 0, 1 in process 1 None",
        ], errors
    assert processes[1].returncode == 2
    assert ends[1][1].splitlines()[-1] == "error: alone"
    assert processes[0].returncode not in (0, 2), "it learned of the other's end, and did not wait for it"


def test_a_process_alone():
    assert is_first()
    assert gather("x") == ["x"]
    value = object()  # which JSON cannot represent
    assert from_first(lambda: value) is agreed(lambda: value) is value
    check_same("it", "x")

    def fail():
        raise UserError("as it is")

    for call in (agreed, from_first):
        with pytest.raises(UserError, match=r"^as it is$"):
            call(fail)
