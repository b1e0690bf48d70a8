"""A sample of text from the model of a run."""

from collections.abc import Callable
from typing import Any

import jax

from trainer.config import UserError
from trainer.data.text import mended
from trainer.inference.sample import sample
from trainer.models.families import takes_cache


def prompt_tokens(config, tokenizer: Any, say: Callable[[str], None]) -> list[int]:
    """The tokens of `prompt`; [] if the model cannot be sampled from.

    Raises:
      UserError: they leave no room in a row.
    """
    if tokenizer is None or not config.prompt:
        return []
    if not takes_cache(config):
        say(f"decoder_block={config.decoder_block} has no init_cache: the model is trained and not sampled from")
        return []
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    prompt, replaced = mended(config.prompt)
    if replaced:
        say(f"prompt: lone surrogates are replaced by U+FFFD: {replaced}")
    tokens = begin + tokenizer.encode(prompt)
    if len(tokens) >= config.max_target_length:
        raise UserError(
            f"prompt has {len(tokens)} tokens and leaves no room in a row of max_target_length="
            f"{config.max_target_length}: shorten it, or set prompt= for no sample"
        )
    return tokens


def sample_text(run: Any, state: Any, tokenizer: Any, prompt: list[int]) -> str:
    """The prompt and its continuation by the model of `run` (`training.Run`) with the native train state `state`, up to
    the end of the document. The parameters are those of `Run.trained`: averages with `ema_decay`."""
    rows = run.mesh.size  # one per device, so that any mesh can shard the batch; the first is returned
    temperature, seed = run.config.decode_sampling_temperature, run.config.init_weights_seed

    def draw(tree: Any) -> jax.Array:
        params, rest = run.trained(tree)
        params = jax.lax.with_sharding_constraint(params, run.param_shardings.compute)
        return sample(run.config, run.model, params, rest, prompt, rows=rows, temperature=temperature, seed=seed)

    drawn = jax.jit(run.sharded(draw, whole_rows=True), out_shardings=run.replicated)(run.codec.unpack(state))
    tokens = jax.device_get(drawn)[0].tolist()
    # The end token may be the same as the begin token.
    end = tokens.index(tokenizer.eos, len(prompt)) if tokenizer.eos in tokens[len(prompt) :] else len(tokens)
    return tokenizer.decode(tokens[:end])
