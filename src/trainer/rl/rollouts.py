"""Rounds for reinforcement learning: reward functions score the model's completions of prompts."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import numpy as np

from trainer.rl.groups import advantages
from trainer.rl.prompts import Prompt
from trainer.rl.rewards import Rewards, Sample, Scored
from trainer.rl.rounds import Judged, Rounds
from trainer.runtime.agreement import agreed, from_first, is_first


class _Where(NamedTuple):
    """The description of a completion in messages. `str` computes the text only on demand, because computing it may
    read a file."""

    name: str
    prompt: Any

    def __str__(self) -> str:
        return f"{self.name}, the prompt in {self.prompt}"


class Rollouts(Rounds):
    """`Rounds` whose completions are scored by reward functions. These functions run only on the first process's
    machine."""

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._rewards = agreed(self._judges)
        if self._rewards is not None:
            self._stack.enter_context(self._rewards)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        super().__exit__(*error)

    def judged(self, prompts: Sequence[Prompt], texts: Sequence[str], group: int, name: str) -> Judged:
        scored = self._scored(prompts, texts, name)
        rewards = np.array([one.reward for one in scored])
        groups = rewards.reshape(-1, group)
        gains = advantages(groups).reshape(-1).tolist()
        metrics = {
            "reward_std": float(rewards.std()),
            "equal_groups": float((groups == groups[:, :1]).all(axis=1).mean()),
            "rewards_timed_out": sum(one.timed_out for one in scored),
        }
        functions = self._run.config.reward_functions
        rows = [
            {
                "reward": one.reward,
                "rewards": dict(zip(functions, one.by_function, strict=True)),
                "advantage": gain,
                "timed_out": one.timed_out,
            }
            for one, gain in zip(scored, gains, strict=True)
        ]
        return Judged({"rewards": rewards.tolist(), "advantages": gains}, metrics, rows)

    def _judges(self) -> Rewards | None:
        """Starts the reward workers if this is the run's first process; otherwise returns None."""
        if not is_first():
            return None
        config = self._run.config
        seconds = config.reward_worker_timeout_seconds
        return Rewards(config.reward_functions, config.reward_num_workers, seconds, self._say)

    def _scored(self, prompts: Sequence[Prompt], texts: Sequence[str], name: str) -> list[Scored]:
        """Computes the rewards of the completions `texts` in the first process, and returns them in every process."""

        def scored() -> list[Scored]:
            assert self._rewards is not None
            samples = [
                Sample(prompt.text, text, prompt.columns, _Where(name, prompt.where))
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            return self._rewards(samples)

        return [Scored(*one) for one in from_first(scored)]
