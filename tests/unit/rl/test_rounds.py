"""The random numbers of rounds, held-out prompts, and decoding slots."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from support import arguments

from trainer.config.derived import policy_temperature
from trainer.config.load import load
from trainer.inference import of_run
from trainer.rl import rounds
from trainer.rl.prompts import INDEX, Prompt
from trainer.rl.rounds import Rounds, engine_of, of_data, of_rollouts

KEYS = {"use_grpo": True, "reward_functions": "[m:f]", "decode_sampling_temperature": 1, "rl_num_iterations": 2}


def test_every_prompt_of_every_round_has_its_own_seed():
    """Seeds are derived from decode_sampling_seed and the round number, so a resumed run draws the same samples."""
    config, asked = load(arguments("nnx", **KEYS, steps=6, checkpoint_period=2)).config, {}

    def seeds(done, seed=config.decode_sampling_seed):
        made = object.__new__(Rounds)
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


@pytest.mark.parametrize(("steps", "count"), [(-1, 40), (2, 24), (9, 40)])
def test_an_evaluation_has_the_rows_of_its_steps(steps, count, monkeypatch):
    """An evaluation step has 3 parts of 4 rows."""
    monkeypatch.setattr(rounds, "eval_parts", lambda config: 3)
    made, asked = object.__new__(Rounds), []
    made._run = SimpleNamespace(config=SimpleNamespace(eval_steps=steps), eval_rows=4)
    made._dataset = SimpleNamespace(held_out=SimpleNamespace(prompts=[*range(40)]))
    made._averages, made._current = None, lambda state: state
    made._complete = lambda variables, prompts, *rest: asked.extend(prompts)
    assert not [*made.held_out(lambda: None)]
    assert asked == [*range(count)]


@pytest.mark.parametrize(("at_once", "slots"), [(-1, 24), (7, 8), (1, 4), (100, 24)])
def test_the_completions_of_a_prompt_have_slots_at_once(at_once, slots, monkeypatch):
    """24 sequences in groups of 3, sharded over two devices."""
    keys = KEYS | {"rollout_micro_batch_size": at_once, "rl_num_generations": 3}
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="cpu")]), shape={"fsdp": 1})
    for name, made in {
        "for_decoding": lambda config, platform: config,
        "row_parts": lambda mesh, rules: 2,
        "make_model": lambda config: None,
        "Served": lambda config, mesh, rules, model, slots: slots,
        "Engine": lambda served: served,
    }.items():
        monkeypatch.setattr(of_run, name, made)
    run = SimpleNamespace(config=load(arguments("nnx", **keys)).config, mesh=mesh, rules={})
    assert engine_of(run, 24) == slots


@pytest.mark.parametrize(("share", "rounds"), [(1, "RRRR"), (0.5, ".R.R"), (0.25, "...R"), (0.75, ".RRR")])
def test_the_share_of_rounds_with_rollouts(share, rounds):
    assert "".join(".R"[of_rollouts(share, number)] for number in range(4)) == rounds


@pytest.mark.parametrize(("longest", "kept"), [(-1, 6), (12, 4), (5, 6)])
def test_a_completion_of_the_data_has_the_room_of_a_rollout(longest, kept):
    """Rows have 16 tokens, and the prompt has 5."""
    config = load(arguments("nnx", max_target_length=16, max_prefill_predict_length=longest)).config
    prompt = Prompt("", "", {}, np.arange(5), np.arange(6))
    found = of_data(config, prompt)
    assert found.completion.tolist() == list(range(kept))
    assert found.truncated == (kept < 6)
    full = of_data(config, prompt._replace(tokens=np.arange(15)))
    assert full.pairs <= 16


def test_log_probabilities_are_those_of_the_distribution_from_which_rollouts_are_sampled():
    own_texts = {"use_distill": True, "distill_rollouts": True, "distill_alpha": 1}
    for keys, temperature in ((KEYS, 0.7), (own_texts, 0.7), (own_texts | {"distill_rollouts": False}, 1)):
        config = load(arguments("nnx", **keys | {"decode_sampling_temperature": 0.7})).config
        assert policy_temperature(config) == temperature
