"""`python -m trainer.plan` as a user runs it, with the compiler for TPUs."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from compiler import TINY_TPU, needs_libtpu, xla_flags
from support import arguments

from trainer.config.load import load
from trainer.plan import main
from trainer.train_compile import compile_for_topology


@needs_libtpu
@pytest.mark.rest(covered_by="unit/planning")
def test_a_plan_of_a_tiny_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = {key: value for key, value in TINY_TPU.items() if key not in ("remat_policy", "per_device_batch_size")}
    tiny = [word for word in arguments("nnx", **own) if not word.startswith("per_device_batch_size")]
    hosts = ("optimizer_memory_host_offload=false", "parameter_memory_host_offload=false", "num_vocab_tiling=1")
    words = [*tiny, *hosts, "search.remat_policy=none,full", "search.per_device_batch_size=1"]
    main([*words, "--json"])
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert answer["counts"]["compiled"] == 2
    assert "compiling 2 of at most 24" in output.err
    assert [found["outcome"] for found in answer["candidates"]] == ["fits", "fits"]
    program, *rest = shlex.split(answer["command"])[2:]
    assert program == "trainer.train"
    report = compile_for_topology(load([*rest, "compile_topology=v5e-4"]).config).report
    assert report.memory.peak == answer["best"]["row"]["report"]["peak_bytes"]

    dry = [sys.executable, "-m", program, *rest, "--dry-run"]
    environment = os.environ | {"XLA_FLAGS": xla_flags(4), "JAX_COMPILATION_CACHE_DIR": ""}
    done = subprocess.run(dry, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "everything before the first step works" in done.stdout) == (0, True), done.stderr

    main(words)
    assert "2 from the journal" in capsys.readouterr().out
