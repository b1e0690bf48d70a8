"""Runs the command `trainer.parity` on a tiny model, in this process."""

from typing import Any

import pytest
from compiler import unoptimized
from support import TINY, pinned

from trainer import parity
from trainer.compare import programs

# A model with few leaves on one device, which compiles quickly.
SMALL = TINY | {"opt_type": "sgd", "gradient_clipping_threshold": 0, "per_device_batch_size": 8}
SMALL |= {"base_num_decoder_layers": 3, "base_num_query_heads": 2, "base_num_kv_heads": 2, "ici_fsdp_parallelism": 1}


def run(capsys: Any, *words: str, only_forward: bool = False, **keys: Any) -> tuple[int, str, str]:
    """Returns the exit code, stdout and stderr of the command.

    The flags are nnx's unless `words` name a combination. Both sides are compiled without optimizations. `only_forward`
    leaves out gradients and update, for tests that need only the forward pass.
    """
    settings = SMALL | pinned("nnx") | keys
    argv = ["base.yml", *(f"{key}={value}" for key, value in settings.items()), *words]
    return command(capsys, *argv, only_forward=only_forward)


def command(capsys: Any, *argv: str, only_forward: bool = False) -> tuple[int, str, str]:
    """Like `run`, with the complete command line `argv`."""
    code = 0
    with pytest.MonkeyPatch.context() as patch, unoptimized():
        if only_forward:
            patch.setattr(programs, "MEASURES", programs.MEASURES[:2])
        try:
            parity.main(list(argv))
        except SystemExit as ended:
            code = int(str(ended.code))
    said = capsys.readouterr()
    return code, said.out, said.err
