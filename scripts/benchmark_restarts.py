"""Kills or stops one of a run's processes in several ways, and measures how long the run takes to recover.

    python scripts/benchmark_restarts.py --rounds 3
    python scripts/benchmark_restarts.py --rounds 3 --processes 4 --ways kill
    python scripts/benchmark_restarts.py --goodput 60 --every 5
    python scripts/benchmark_restarts.py --supervision 5

For each way and round, it prints the seconds from the fault to each of these events: the launcher names the process,
all processes have ended, the state is restored, and the first step that is new to the run is completed. --ways kill
measures only the ways whose names contain "kill".

--goodput M trains under supervision for M minutes. Every --every minutes, it sends SIGKILL to one of the processes, in
turn. It prints the goodput report, and compares the report's total time with the elapsed time. --supervision M
measures the CPU time of the supervisors over M minutes of undisturbed steps.

docs/guides/when-a-host-dies.md has dated results. The script needs Linux, because it looks processes up in /proc.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

LAUNCHER = str(Path(__file__).with_name("launch_local.py"))
WORDS = [
    *("base.yml", "dataset_type=synthetic", "base_emb_dim=32", "base_num_query_heads=2", "base_num_kv_heads=2"),
    *("base_mlp_dim=64", "base_num_decoder_layers=2", "vocab_size=64", "max_target_length=32", "steps=1000000"),
    *("learning_rate_schedule_steps=1000000", "eval_interval=-1", "prompt=", "checkpoint_period=25", "run_name=run"),
]
SUPERVISED = ["supervise=true", "hang_timeout_seconds=5"]
# Maps the name of a fault to the index of the process, the signal that the process gets, and additional arguments of
# the run. If the signal is None, the code in HANGS makes the process hang.
WAYS: dict[str, tuple[int, signal.Signals | None, list[str]]] = {
    "kill -9 of process 1": (1, signal.SIGKILL, []),
    "kill -9 of process 0": (0, signal.SIGKILL, []),
    "SIGSTOP": (1, signal.SIGSTOP, []),
    "SIGSTOP, supervised": (1, signal.SIGSTOP, SUPERVISED),
    "hang, supervised": (1, None, SUPERVISED),
}
SAVED = 1000  # checkpoint_period of --goodput; with the 25 of WORDS, saves would take longer than steps
BLOW = 60  # the step at which the fault strikes
# A sitecustomize.py that makes process 1 hang once its timeline has recorded step BLOW, but only at the run's first
# start.
HANGS = f"""
import os, sys, time
if "process_id=1" in sys.orig_argv:
    from trainer.observe.goodput import Timeline
    step = Timeline.step
    def slow(self, number, **waited):
        step(self, number, **waited)
        if number == {BLOW} and not os.path.exists("hung"):
            open("hung", "w").close()
            time.sleep(1e6)
    Timeline.step = slow
"""
MARKS = {"named": "; the others end too", "ended": "launch_local: restart 1", "restored": "updates are done"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ways", default="", metavar="TEXT", help="only the ways whose names contain this text")
    parser.add_argument("--goodput", type=float, metavar="MINUTES")
    parser.add_argument("--every", type=float, default=5.0, metavar="MINUTES", help="time between faults; default: 5")
    parser.add_argument("--supervision", type=float, metavar="MINUTES")
    options = parser.parse_args()
    if options.goodput or options.supervision:
        with tempfile.TemporaryDirectory() as folder:
            if options.goodput:
                goodput(Path(folder), options.processes, 60 * options.goodput, 60 * options.every)
            else:
                supervision(Path(folder), options.processes, 60 * options.supervision)
        return
    for _ in range(options.rounds):
        for way in (way for way in WAYS if options.ways in way):
            with tempfile.TemporaryDirectory() as folder:
                seconds, said = one(way, Path(folder), options.processes)
            marks = ", ".join(f"{mark} {passed:.1f}" for mark, passed in seconds.items())
            print(f"{way}: {marks} s; load {os.getloadavg()[0]:.1f}\n  {said}", flush=True)


def one(way: str, folder: Path, processes: int) -> tuple[dict[str, float], str]:
    """Returns a dict from the name of each event to the seconds since the fault, and the launcher's line about the
    process that failed."""
    index, number, words = WAYS[way]
    if number is None:
        (folder / "sitecustomize.py").write_text(HANGS)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        _command(processes, 1, *words),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    hit, last, said, seconds = 0.0, -1, "", {}
    assert process.stdout is not None
    for line in process.stdout:
        found = re.match(r"completed step: (\d+),", line)
        last = max(last, int(found[1])) if found and not hit else last
        if not hit and last == BLOW - 1 - (number is None):
            hit = time.monotonic()
            if number is not None:
                os.kill(_pid(process.pid, index, bool(words)), number)
        for mark, text in MARKS.items():
            if hit and text in line and mark not in seconds and (mark != "restored" or "ended" in seconds):
                seconds[mark] = time.monotonic() - hit
                said = line.strip() if mark == "named" else said
        if "restored" in seconds and found and int(found[1]) > last:
            seconds["new step"] = time.monotonic() - hit
            process.terminate()
            break
    for _ in process.stdout:
        pass
    process.wait()
    return seconds, said


def goodput(folder: Path, processes: int, seconds: float, every: float) -> None:
    from trainer.observe.goodput import read_goodput

    faults, missed = 0, 0
    with _log(folder).open("w") as log:
        process, started = _begun(folder, log, processes, 1000, f"checkpoint_period={SAVED}"), time.monotonic()

        def ended(passed: float) -> bool:
            """Waits until `passed` seconds after the start. Returns whether the launcher has ended by then."""
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, started + passed - time.monotonic()))
            return process.poll() is not None

        while not ended(min(seconds, every * (faults + missed + 1))) and every * (faults + missed + 1) < seconds:
            try:
                os.kill(_pid(process.pid, (faults + missed) % processes, True), signal.SIGKILL)
                faults += 1
            except (StopIteration, IndexError, OSError):  # the process is just being started
                missed += 1
        process.terminate()
        code = process.wait()
        passed = time.monotonic() - started
    found = read_goodput(folder / "runs/run")
    spent = sum(found.seconds().values())
    print(f"{faults} faults, {missed} missed during a start, step {_steps(folder):,}, exit {code}: {found}")
    print(", ".join(f"{part} {seconds:.1f}" for part, seconds in found.seconds().items()), "s")
    print(
        f"goodput {spent:.1f} s, elapsed {passed:.1f} s: {abs(spent / passed - 1):.2%}; load {os.getloadavg()[0]:.1f}"
    )


def supervision(folder: Path, processes: int, seconds: float) -> None:
    with _log(folder).open("w") as log:
        process = _begun(folder, log, processes, 0)
        while not (before := _steps(folder)):
            time.sleep(1)
        first = [_cpu(pid) for pid in _children(process.pid)]
        time.sleep(seconds)
        last, steps = [_cpu(pid) for pid in _children(process.pid)], _steps(folder) - before
        process.terminate()
        process.wait()
    an_hour = ", ".join(f"{3600 * (b - a) / seconds:.1f}" for a, b in zip(first, last, strict=True))
    print(f"until the first steps: {', '.join(f'{a:.2f}' for a in first)} s of CPU time of each supervisor")
    print(f"then {an_hour} s an hour, at {steps / seconds:.1f} steps a second; load {os.getloadavg()[0]:.1f}")


def _begun(folder: Path, log: IO[str], processes: int, restarts: int, *words: str) -> subprocess.Popen[str]:
    command = _command(processes, restarts, "supervise=true", *words)
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True)


def _command(processes: int, restarts: int, *words: str) -> list[str]:
    """Returns the launcher's command for a run with additional arguments."""
    numbers = ["-n", str(processes), "--devices", "1", "--restarts", str(restarts)]
    return [sys.executable, LAUNCHER, *numbers, "--", *WORDS, *words]


def _log(folder: Path) -> Path:
    return folder / "log.txt"


def _steps(folder: Path) -> int:
    """Returns the last completed step in the log; 0 if there is none."""
    return int((re.findall(r"completed step: (\d+),", _log(folder).read_text()) or [0])[-1])


def _cpu(pid: int) -> float:
    """Returns the seconds of CPU time of a process without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pid(launcher: int, index: int, supervised: bool) -> int:
    """Returns the id of the launcher's process `index`, or of the training process that it supervises."""
    pid = next(
        pid for pid in _children(launcher) if f"process_id={index}\0" in Path(f"/proc/{pid}/cmdline").read_text()
    )
    return _children(pid)[0] if supervised else pid


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    main()
