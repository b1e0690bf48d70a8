"""Kills a run at random moments, repeatedly, and compares its result with an undisturbed run.

    python scripts/kill_rounds.py --rounds 30 dataset_type=synthetic steps=60 checkpoint_period=5 eval_interval=20

Every round starts the same command and ends it with SIGKILL, or sometimes SIGTERM, at a random moment of one of its
phases: starting, preparing data, restoring and compiling, training. The durations of the phases come from the
undisturbed run. When a run reaches its end, it is compared: metrics.jsonl without its timing fields, every array of the
last checkpoint, bit for bit, and the completions of trainer.grpo (--module trainer.grpo). Then the next run starts from
nothing, until all rounds are done. With dataset_type=stdlib, each run prepares its data in its own folder, so that
kills also occur during preparation.
"""

import argparse
import collections
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SIGTERM_SHARE = 0.25
# The output that marks the beginning of each phase, in order. Everything before the first mark is starting.
PHASES = ("", "preparing ", "\nrun  ", "completed step")


class Ended(NamedTuple):
    """How a process ended: its exit code (-9 for SIGKILL), its last line of output, and its duration."""

    code: int
    words: str
    seconds: float
    phases: dict[str, float]  # the duration of each of PHASES


def run_once(
    words: list[str],
    folder: Path,
    limit: float | None = None,
    how: signal.Signals = signal.SIGKILL,
    after: str = "",
    module: str = "trainer.train",
) -> Ended:
    """Runs the trainer in `folder`. Sends it the signal `how`, if it still runs, `limit` seconds after the text
    `after`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    started = time.perf_counter()
    seen = {"": started}  # when each phase began
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "base.yml", f"base_output_directory={folder / 'runs'}", *words],
            stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder,
        )  # fmt: skip
        while process.poll() is None:
            text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
            now = time.perf_counter()
            for phase in PHASES:
                if phase in text:
                    seen.setdefault(phase, now)
            if limit is not None and after in seen and now - seen[after] >= limit:
                process.send_signal(how)
                process.wait()
            time.sleep(0.005)
    ends = [*seen.values(), time.perf_counter()]
    lasted = {phase: ends[i + 1] - ends[i] for i, phase in enumerate(seen)}
    return Ended(process.returncode, _last_words(folder / "log.txt"), ends[-1] - started, lasted)


def outcome(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Returns the metrics without timing, and the bytes of every array in the newest checkpoint, of the run in
    `folder`."""
    from trainer.checkpoint.manager import newest
    from trainer.observe.metrics import METRICS_FILE, TIMING_FIELDS, read_rows

    [run] = (folder / "runs").iterdir()
    rows = [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in read_rows(run / METRICS_FILE)]
    checkpoint = newest(run)
    assert checkpoint is not None, f"{run} has no checkpoint"
    arrays = {name: array.tobytes() for name, array in arrays_of(checkpoint).items()}
    return rows, arrays | {f"rollouts/{path.name}": path.read_bytes() for path in (run / "rollouts").glob("*")}


def arrays_of(checkpoint: Path) -> dict[str, Any]:
    """Returns the arrays of a checkpoint by name, no matter on which devices it was saved."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    from trainer.ops.paths import by_name

    path, one = checkpoint.absolute(), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns that it cannot describe the other items
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one),
        ocp.checkpointables_metadata(path).metadata["state"],
    )
    state = ocp.load_checkpointables(path, {"state": wanted})["state"]
    return {name: np.asarray(leaf) for name, leaf in by_name(state).items()}


def differences(left: tuple[list[dict], dict[str, bytes]], right: tuple[list[dict], dict[str, bytes]]) -> list[str]:
    """Returns the differences between two outcomes, one line each; [] for equal bits."""
    (rows, arrays), (other_rows, other_arrays) = left, right
    lines = [f"{len(rows)} and {len(other_rows)} rows of metrics"] if len(rows) != len(other_rows) else []
    lines += [f"{a} and {b}" for a, b in zip(rows, other_rows, strict=False) if json.dumps(a) != json.dumps(b)][:3]
    names = arrays.keys() | other_arrays.keys()
    return lines + [f"array {name}" for name in sorted(names) if arrays.get(name) != other_arrays.get(name)]


def rounds(words: list[str], count: int, seed: int, folder: Path, say=print, module: str = "trainer.train") -> int:
    """Disturbs runs `count` times. Returns the number of runs that reached their end and were compared.

    Raises:
      AssertionError: a process did not end by its signal, or a run differs from the undisturbed one.
    """
    draw = random.Random(seed)
    whole = run_once(words, folder / "undisturbed", module=module)
    assert whole.code == 0, f"the undisturbed run ended with {whole.code}: {whole.words}"
    expected = outcome(folder / "undisturbed")
    phases: collections.Counter[str] = collections.Counter()
    done, compared = 0, 0
    while done < count:
        here = folder / f"disturbed-{compared + 1}"
        while True:
            how = signal.SIGTERM if draw.random() < SIGTERM_SHARE else signal.SIGKILL
            after, most = draw.choice(list(whole.phases.items()))
            limit = draw.uniform(0, most) if done < count else None
            ended = run_once(words, here, limit, how, after, module)
            if ended.code != 0:
                assert ended.code in (-how, 143), f"ended with {ended.code}: {(here / 'log.txt').read_text()}"
                done += 1
                phases[" ".join(ended.words.partition(" /")[0].split()[:2])] += 1
                say(f"round {done}: {how.name} after {ended.seconds:.1f} s, exit {ended.code}, at: {ended.words}")
            if list(here.glob("runs/*/finished")):  # the signal may have come after the run had finished
                break
        found = differences(expected, outcome(here))
        assert not found, f"{here}: {found}"
        compared += 1
        say(f"run {compared} came to its end: {len(expected[0])} rows and {len(expected[1])} arrays equal in every bit")
    say(f"{done} rounds, {compared} runs compared; the last words before the signal: {dict(phases)}")
    return compared


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:70] if lines else "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", default="trainer.train", help="the command, such as trainer.grpo")
    options, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds(words, options.rounds, options.seed, Path(folder), module=options.module)


if __name__ == "__main__":
    main()
