"""Generates a sample of text with the model of a training run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from trainer.backends.registry import make_model
from trainer.config.capabilities.pipeline_keys import unpipelined
from trainer.config.keys import Config
from trainer.data.tokenizer import Tokenizer
from trainer.inference.engine import Engine
from trainer.inference.of_run import trained_variables
from trainer.inference.scheduler import Scheduler
from trainer.inference.served import Served, for_decoding, longest_prompt
from trainer.inference.text import Chat, TextStream, tokens_of
from trainer.models.caches import takes_cache


class SamplePrompt(NamedTuple):
    """The prompt of a sample.

    Attributes:
      tokens: the prompt's tokens; [] if no sample is to be generated.
      stop: the tokens that end the prompt's continuation.
      taught: the tokens that end the training texts.
      asked: in a chat, the user's message; "" if `tokens` are a text to continue.
    """

    tokens: list[int]
    stop: Sequence[int] = ()
    taught: Sequence[int] = ()
    asked: str = ""


def sample_prompt(
    config: Config, tokenizer: Tokenizer | None, say: Callable[[str], None], chat: Chat | None = None
) -> SamplePrompt:
    """Returns the prompt that the key `prompt` specifies. `chat`: see `inference.text.tokens_of`. Raises UserError if
    the prompt has too many tokens."""
    eos = [] if tokenizer is None or tokenizer.eos is None else [tokenizer.eos]
    taught = chat.stop_tokens() if chat else eos
    if tokenizer is None or not config.prompt:
        return SamplePrompt([], (), taught)
    if not takes_cache(config):
        say(f"decoder_block={config.decoder_block} has no init_cache: the model is trained, but no sample is generated")
        return SamplePrompt([], (), taught)
    tokens = tokens_of(config.prompt, tokenizer, tokenizer.before_text, longest_prompt(config), say, chat)
    return SamplePrompt(tokens, [*eos, *taught], taught, config.prompt if chat else "")


def sample_text(run: Any, state: Any, tokenizer: Tokenizer, prompt: SamplePrompt) -> str:
    """Returns the prompt and its continuation up to the end of the document. In a chat, returns the user's message and,
    on the next line, the answer, as `trainer.generate` prints them.

    Args:
      run: a `training.Run`. With `ema_decay`, the averaged parameters are used.
      state: the run's native train state, which is donated.
    """

    config = for_decoding(unpipelined(run.config), run.mesh.devices.flat[0].platform)
    model = run.model if config is run.config else make_model(config)
    slots = run.mesh.size  # one per device, so that any mesh can shard the batch
    engine = Engine(Served(config, run.mesh, run.rules, model, slots))
    weights = engine.hold(*jax.jit(trained_variables(run), donate_argnums=0)(state), donate=True)
    scheduler = Scheduler(engine, weights)
    scheduler.submit(prompt.tokens, stop=prompt.stop)
    drawn = [event.token for event in scheduler.run() if event.token is not None]
    if not prompt.asked:
        return tokenizer.decode([*prompt.tokens, *drawn])
    answer = TextStream(tokenizer, prompt.tokens)
    return "".join([prompt.asked, "\n", *map(answer.add, drawn), answer.end()])
