"""The random numbers of rounds."""

import itertools
from types import SimpleNamespace

import numpy as np
from support import arguments

from trainer.config import load
from trainer.rl.prompts import INDEX
from trainer.rl.rollouts import Rollouts

KEYS = {"use_grpo": True, "reward_functions": "[m:f]", "decode_sampling_temperature": 1, "rl_num_iterations": 2}


def test_every_prompt_of_every_round_has_its_own_seed():
    """It follows from decode_sampling_seed and the number of the round: a run that resumes draws the same."""
    config, asked = load(arguments("nnx", **KEYS, steps=6, checkpoint_period=2)).config, {}

    def seeds(done, seed=config.decode_sampling_seed):
        made = object.__new__(Rollouts)
        made._run = SimpleNamespace(config=type(config)({**config, "decode_sampling_seed": seed}))
        made._dataset = SimpleNamespace(train=SimpleNamespace(prompts=["a", "b", "c"]))
        made._stream = iter([({INDEX: np.arange(3)}, {})])
        made._done, made.updates, made._current = done, 2, lambda state: state
        made._complete = lambda variables, prompts, sampling, seeds, *rest: asked.update({done: seeds})
        assert made._make(None) is None
        return asked[done]

    rounds = [seeds(done) for done in (0, 2, 4)]
    assert len({*itertools.chain(*rounds)}) == 9
    assert seeds(2) == rounds[1]
    assert not {*seeds(0, seed=config.decode_sampling_seed + 1)} & {*itertools.chain(*rounds)}
