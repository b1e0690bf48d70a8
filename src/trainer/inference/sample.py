"""A sample of text from the model of a training run."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.backends import make_model
from trainer.config import Config
from trainer.data.tokenizer import Tokenizer
from trainer.inference.engine import Engine
from trainer.inference.scheduler import Scheduler
from trainer.inference.served import Served, longest_prompt, without_drops
from trainer.inference.text import tokens_of
from trainer.models.caches import takes_cache


def prompt_tokens(config: Config, tokenizer: Tokenizer | None, say: Callable[[str], None]) -> list[int]:
    """Returns the tokens of the key `prompt`; [] if there is no sample.

    Raises:
      UserError: the tokens leave no room in a row.
    """
    if tokenizer is None or not config.prompt:
        return []
    if not takes_cache(config):
        say(f"decoder_block={config.decoder_block} has no init_cache: the model is trained and not sampled from")
        return []
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    return tokens_of(config.prompt, tokenizer, begin, longest_prompt(config), say)


def sample_text(run: Any, state: Any, tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Returns the prompt and its continuation up to the end of the document.

    Args:
      run: a `training.Run`. Its parameters are those of `Computation.trained`: averages with `ema_decay`.
      state: its native train state, which is donated.
    """

    def variables(state: Any) -> Any:
        params, rest = run.computation.trained(run.codec.unpack(state))
        return jax.lax.with_sharding_constraint(params, run.param_shardings.compute), rest

    config = without_drops(run.config)
    model = run.model if config is run.config else make_model(config)
    slots = run.mesh.size  # one per device, so that any mesh can shard the batch
    scheduler = Scheduler(
        Engine(Served(config, run.mesh, run.rules, model, slots)),
        jax.jit(run.sharded(variables), donate_argnums=0)(state),
    )
    scheduler.submit(prompt, stop=() if tokenizer.eos is None else (tokenizer.eos,))
    drawn = [event.token for event in scheduler.run() if event.token is not None]
    return tokenizer.decode([*prompt, *drawn])
