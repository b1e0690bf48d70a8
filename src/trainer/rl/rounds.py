"""Rounds of training on the model's own completions: the model completes prompts, then updates use the completions."""

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from trainer.config.capabilities.invariant_keys import TILE
from trainer.config.derived import completions_per_prompt, eval_parts, rollouts_share
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.data.batches import Batch
from trainer.data.streams import Position
from trainer.inference.engine import Engine
from trainer.inference.of_run import engine_of_run, trained_variables
from trainer.inference.sampling import UINT32_MAX, Sampling, sampling_of
from trainer.inference.scheduler import LENGTH, Scheduler
from trainer.inference.text import TextStream
from trainer.models.families import stacks
from trainer.models.stages import division, to_layers
from trainer.objectives.on_policy import LABELLED
from trainer.observe.rollouts import RolloutFiles
from trainer.observe.rundir import RunDir
from trainer.rl.groups import Rollout, packed, places
from trainer.rl.prompts import INDEX, Prompt, PromptDataset
from trainer.rl.room import completion_limit, rows_for
from trainer.runtime.agreement import is_first
from trainer.runtime.place import share_of_rows
from trainer.training.run import Run
from trainer.training.start import Start

_INTERVAL = 10.0  # seconds between two progress messages
Say = Callable[[str], None]


class Round(NamedTuple):
    """The batch of a round, and the position that the data set of prompts has reached after this batch."""

    batch: Batch
    position: Position


class Judged(NamedTuple):
    """The results of judging n completions.

    Attributes:
      fields: additional batch fields by name, with n values each; a value applies to all tokens of its completion.
      metrics: metrics of the round.
      rows: for each completion, a dict of additional columns for the completion's row in the round's output file.
    """

    fields: Mapping[str, Sequence[float]]
    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]]


def _labelled(labels: int, count: int) -> Judged:
    return Judged({LABELLED: [labels] * count}, {"own_texts": 1 - labels}, [{}] * count)


class Rounds:
    """A `training.BatchSource` that makes one batch per round and uses this batch for `rl_num_iterations` updates.

    A round uses sampled completions or, if `of_rollouts` returns False for the number of the round, completions from
    the data. All sampling depends only on decode_sampling_seed, the number of the round and the parameters, so a
    resumed run repeats the same rounds. Every process generates all completions. A subclass can override `judged` to
    score the completions.

    Attributes:
      updates: the number of updates in a round; a run ends and is saved only between rounds.
      metrics: the metrics of the current round, that is, of the last batch that `take` returned.
    """

    def __init__(self, run: Run, dataset: PromptDataset, start: Start, run_dir: RunDir | None, say: Say):
        """
        Args:
          run_dir: the run's folder, to which all completions are written; None if nothing may be written.
          say: gets progress messages.

        Raises:
          UserError: the model cannot generate text on this mesh, or the run starts in the middle of a round.
        """
        config = run.config
        if start.updates % config.rl_num_iterations:
            raise UserError(
                f"rl_num_iterations={config.rl_num_iterations}: the state at load_full_state_path has "
                f"{counted(start.updates, 'update')}, "
                "which is in the middle of a round; set load_parameters_path instead, to start at update 0"
            )
        self._run, self._dataset, self._say = run, dataset, say
        self._files = RolloutFiles(run_dir) if run_dir is not None and is_first() else None
        self.updates: int = config.rl_num_iterations
        self.waited, self.metrics = 0.0, dict[str, float]()
        self._done, self._round = start.updates, Round({}, start.position or {})
        self._align = TILE if config.batch_invariant else 1
        self._engine = engine_of(run, config.batch_size * completions_per_prompt(config))
        self._stream = dataset.train_stream(start.position, rows=config.batch_size)
        divided = division(stacks(config)) is not None
        self._by_layer = (
            jax.jit(functools.partial(to_layers, stacks(config))) if divided else lambda variables: variables
        )
        self._averages = jax.jit(trained_variables(run)) if config.ema_decay else None
        self._interrupted: Callable[[], bool] = lambda: False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()

    def judged(self, prompts: Sequence[Prompt], texts: Sequence[str], group: int, name: str) -> Judged:
        """Returns the results of judging the completions `texts`. This implementation scores nothing: it only marks all
        completions as sampled.

        Args:
          prompts: the prompt of each completion. A prompt with several completions is repeated: once for each of its
            `group` consecutive completions.
          texts: the completions; empty in processes other than the first.
          name: the name of the round, for messages.
        """
        return _labelled(0, len(prompts))

    def take(self, state: Callable[[], Any], interrupted: Callable[[], bool]) -> tuple[Batch, Position] | None:
        self._interrupted = interrupted
        if self._done % self.updates == 0:
            current = jax.block_until_ready(state())  # waits, so that the round's time excludes the previous update
            started = time.perf_counter()
            made = self._make(current)
            self.waited += time.perf_counter() - started
            if made is None:
                return None
            self._round = made
        self._done += 1
        return self._round

    def held_out(self, state: Callable[[], Any]) -> Iterable[Batch]:
        """See `BatchSource.held_out`. Decoding is greedy, with the averaged parameters if ema_decay is set."""
        run, held_out = self._run, self._dataset.held_out
        assert held_out is not None, "eval_interval is above 0"
        rows, steps = run.eval_rows, run.config.eval_steps
        most = len(held_out.prompts) if steps < 0 else steps * eval_parts(run.config) * rows
        prompts = held_out.prompts[:most]
        variables = self._averages(state()) if self._averages else self._current(state())
        rollouts = self._complete(variables, prompts, Sampling(0.0), [0] * len(prompts), 1, "evaluation")
        if rollouts is None:
            return
        fields = self.judged(prompts, self._texts(rollouts), 1, "evaluation").fields
        for first in range(0, len(prompts), rows):
            here = slice(first, first + rows)
            at = [(row, 0) for row in range(len(prompts[here]))]
            values = {name: of_all[here] for name, of_all in fields.items()}
            yield self._share(packed(rollouts[here], values, at, rows, run.config.max_target_length))

    def _make(self, state: Any) -> Round | None:
        """Makes and returns the next round; returns None if sampling was interrupted."""
        config, started, number = self._run.config, time.perf_counter(), self._done // self.updates
        chosen, position = next(self._stream)
        prompts = [self._dataset.train.prompts[i] for i in chosen[INDEX]]
        if not of_rollouts(rollouts_share(config), number):
            taken = [of_data(config, prompt) for prompt in prompts]
            return self._packed(taken, _labelled(1, len(taken)), started, position)
        seeds, group = _seeds(config.decode_sampling_seed, number, len(prompts)), completions_per_prompt(config)
        name = f"round {number + 1:,}"
        rollouts = self._complete(self._current(state), prompts, sampling_of(config), seeds, group, name)
        if rollouts is None:
            return None
        of_each = [prompt for prompt in prompts for _ in range(group)]
        texts = self._texts(rollouts)
        judged = self.judged(of_each, texts, group, name)
        self._write(of_each, rollouts, texts, judged)
        return self._packed(rollouts, judged, started, position)

    def _packed(self, rollouts: Sequence[Rollout], judged: Judged, started: float, position: Position) -> Round:
        config = self._run.config
        self.metrics = {
            **judged.metrics,
            "truncated": float(np.mean([rollout.truncated for rollout in rollouts])),
            "rollout_time": time.perf_counter() - started,
        }
        length = config.max_target_length
        at = places([rollout.pairs for rollout in rollouts], length, self._align, together=config.packing)
        rows = rows_for(config, 1 + max(row for row, _ in at))
        return Round(self._share(packed(rollouts, judged.fields, at, rows, length)), position)

    def _current(self, state: Any) -> tuple[Any, Any]:
        tree = self._run.codec.unpack(state)
        return self._by_layer((tree.params, tree.rest))

    def _complete(
        self,
        variables: tuple[Any, Any],
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seeds: Sequence[int],
        samples: int,
        name: str,
    ) -> list[Rollout] | None:
        """Samples `samples` completions of each prompt. Returns None if sampling was interrupted.

        `variables`: the model's parameters and its other variables.
        """
        run, stop = self._run, self._dataset.stop
        scheduler = Scheduler(self._engine, self._engine.hold(*variables), fill=True)
        limit = completion_limit(run.config)
        owners: dict[int, int] = {}
        for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            first = scheduler.submit(
                prompt.tokens.tolist(), limit=limit, stop=stop, sampling=sampling, seed=seed, samples=samples
            )
            owners |= {first + sample: i * samples + sample for sample in range(samples)}
        tokens: list[list[int]] = [[] for _ in owners]
        log_probs: list[list[float]] = [[] for _ in owners]
        ends: dict[int, str] = {}
        shown = time.perf_counter()
        while not scheduler.idle:
            for event in scheduler.turn():
                i = owners[event.request]
                drawn = event.stopped if event.token is None else event.token
                assert drawn is not None
                assert event.log_prob is not None
                tokens[i].append(drawn)
                log_probs[i].append(event.log_prob)
                if event.end is not None:
                    ends[i] = event.end
            if self._interrupted():
                return None
            if time.perf_counter() - shown > _INTERVAL:
                shown = time.perf_counter()
                self._say(f"{name}: {len(ends):,} of {len(owners):,} completions are complete")
        return [
            Rollout(
                prompts[i // samples].tokens,
                np.array(tokens[i], np.int32),
                np.array(log_probs[i], np.float32),
                ends[i] == LENGTH,
            )
            for i in range(len(owners))
        ]

    def _texts(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Returns the texts of completions; [] in processes other than the first, which do not need them."""
        return list(map(self._text, rollouts)) if is_first() else []

    def _text(self, rollout: Rollout) -> str:
        """Returns the text of a completion, without the stop token that ended it."""
        tokenizer = self._dataset.tokenizer
        assert tokenizer is not None
        stream = TextStream(tokenizer, rollout.prompt.tolist())
        drawn = rollout.completion.tolist()
        return "".join(map(stream.add, drawn if rollout.truncated else drawn[:-1])) + stream.end()

    def _write(
        self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout], texts: Sequence[str], judged: Judged
    ) -> None:
        if self._files is None:
            return
        rows = (
            {
                "step": self._done,
                "prompt": prompt.text if isinstance(prompt.text, str) else json.dumps(prompt.text),
                "completion": text,
                **others,
                "truncated": rollout.truncated,
                "prompt_tokens": rollout.prompt.tolist(),
                "tokens": rollout.completion.tolist(),
                "log_probs": rollout.log_probs.tolist(),
            }
            for prompt, rollout, text, others in zip(prompts, rollouts, texts, judged.rows, strict=True)
        )
        self._files.write(self._done // self.updates, rows)

    def _share(self, batch: Batch) -> Batch:
        """Returns this process's rows of the global batch `batch`."""
        share = share_of_rows(self._run.batch_shardings["row"], len(batch["row"]))
        each = len(batch["row"]) // share["process_count"]
        here = slice(share["process_index"] * each, (share["process_index"] + 1) * each)
        return {name: array[here] for name, array in batch.items()}


def engine_of(run: Run, sequences: int) -> Engine:
    """Returns an engine that generates with the model of `run`, on the mesh of `run`.

    Raises:
      UserError: the model cannot generate text, or cannot do so on this mesh.
    """
    config, at_once = run.config, run.config.rollout_micro_batch_size
    slots = sequences if at_once < 0 else min(sequences, at_once)
    return engine_of_run(run, max(slots, completions_per_prompt(config)), return_log_prob=True)


def of_rollouts(share: float, number: int) -> bool:
    """Returns whether round `number` (from 0) uses rollouts. For every n, floor(n * share) of the first n rounds use
    rollouts."""
    return math.floor((number + 1) * share) > math.floor(number * share)


def of_data(config: Config, prompt: Prompt) -> Rollout:
    """Returns a prompt with its completion from the data, truncated if it exceeds the row or the completion limit."""
    room = config.max_target_length - len(prompt.tokens) + 1
    tokens = prompt.completion[: min(room, completion_limit(config) or room)]
    unsampled = np.zeros(len(tokens), np.float32)
    return Rollout(prompt.tokens, tokens, unsampled, truncated=len(tokens) < len(prompt.completion))


def _seeds(seed: int, number: int, count: int) -> list[int]:
    """Returns `count` different seeds, for the prompts of round `number`."""
    first = int(np.random.Philox(key=[seed, number]).random_raw(1)[0])
    return [(first + i) % (UINT32_MAX + 1) for i in range(count)]
