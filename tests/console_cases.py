"""A console that has printed its banner, and rows for it, for the tests of its lines and of its terminal."""

import io
from pathlib import Path

from trainer.config.flags import flags_of
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.observe.banner import work_of
from trainer.observe.console import Console

FLOPS_PER_TOKEN = 1e7
ROW = {
    "step": 12,
    "loss": 4.82134,
    "lm_loss": 4.80001,
    "grad_norm": 1.23456,
    "skipped": 0,
    "learning_rate": 5.1e-3,
    "tokens": 1000,
    "step_time": 0.1,
    "tokens_per_second": 10000.0,
    "data_wait": 0.0125,
}
EVALUATION = {
    "step": 350,
    "eval_loss": 3.21,
    "eval_perplexity": 24.7791,
    "eval_bits_per_byte": 1.95123,
    "eval_tokens": 12345,
    "eval_time": 1.25,
}


def config(*words, devices=1, platform="cpu"):
    flags = [f"{name}={value}" for name, value in flags_of("nnx").items()]
    sizes = ["max_target_length=128", "per_device_batch_size=8", "steps=700", *flags]
    return resolve(load([*sizes, *words]).config, device_count=devices, platform=platform)


def begun(stream, *words, is_terminal=False, devices=1, **changes):
    """Returns a console that has printed its banner."""
    console = Console(stream, is_terminal)
    facts = {
        "device_kind": "cpu",
        "platform": "cpu",
        "process_count": 1,
        "parameters": 1671104,
        "dataset": "stdlib: 2,423,000 tokens",
        "run_dir": Path("runs/run-0001"),
    }
    resolved = config(*words, devices=devices)
    work = work_of(resolved, FLOPS_PER_TOKEN, changes.pop("peak", None))
    console.banner(resolved, work=work, **facts | changes)
    return console


def written(act, *words, **changes):
    """Returns what `act(console)` writes after the banner."""
    stream = io.StringIO()
    console = begun(stream, *words, **changes)
    start = stream.tell()
    act(console)
    return stream.getvalue()[start:]
