"""The maximum number of tokens of a completion, and the number of rows in the batch of an update."""

from trainer.config.capabilities.invariant_keys import TILE
from trainer.config.derived import completions_per_prompt, global_batch_rows, microbatch_rows
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.inference.served import longest_prompt


def completion_limit(config: Config) -> int | None:
    """Returns the maximum number of tokens of a completion; None if only the row length limits prompt and completion
    together."""
    longest = config.max_prefill_predict_length
    return None if longest < 0 else config.max_target_length - longest


def rows_for(config: Config, needed: int) -> int:
    """Returns the number of rows in the batch of an update, for sequences that need `needed` rows.

    The result is the smallest sufficient size out of the full batch, half of it, a quarter of it, and so on, each
    rounded up to whole microbatches. Only these sizes are allowed, because a program must be compiled for each size.
    """
    rows, parts = microbatch_rows(config), config.gradient_accumulation_steps
    while parts > 1 and -(-parts // 2) * rows >= needed:
        parts = -(-parts // 2)
    return parts * rows


def check_rows(config: Config) -> None:
    """Raises UserError if the sequences of a round may not fit into the rows of an update. `config` is resolved."""
    length, sequences = config.max_target_length, config.batch_size * completions_per_prompt(config)
    longest = min(length, longest_prompt(config) + (completion_limit(config) or length)) - 1
    align = TILE if config.batch_invariant else 1
    together = 1 + (length - longest) // (longest + -longest % align) if config.packing else 1
    needed, there = -(-sequences // together), global_batch_rows(config)
    if needed > there:
        generations = f", rl_num_generations={config.rl_num_generations}" if config.use_grpo else ""
        steps = -(-needed // microbatch_rows(config))
        raise UserError(
            f"batch_size={config.batch_size}{generations}: the {sequences:,} sequences of a round have up to "
            f"{longest + 1} tokens each and may need {counted(needed, 'row')}; an update has {there:,} "
            f"(per_device_batch_size={config.per_device_batch_size:g}, gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps}). Set gradient_accumulation_steps={steps}; a round that needs fewer "
            "rows uses fewer microbatches"
        )
