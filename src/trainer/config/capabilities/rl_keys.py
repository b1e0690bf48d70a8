"""The keys of reinforcement learning: their checks, and the settings under which the keys have no effect."""

from collections.abc import Callable

from trainer.config.capabilities.chat_keys import functions_problem, not_texts
from trainer.config.capabilities.expert_keys import drops
from trainer.config.capabilities.quantization_keys import shares_scales
from trainer.config.derived import has_dropout, has_rollouts, samples_divergence
from trainer.config.dump import to_flow
from trainer.config.key_rows import Check, Inert, Resume, Row, left_out, only_if, refused
from trainer.config.keys import Config
from trainer.config.numbers import multiples_around

NOT_COLUMNS = ("prompts", "completions")  # column names that clash with other arguments of reward functions
_OF_ROUNDS = ("batch_size", "num_batches", "rollout_micro_batch_size", "rl_num_iterations")
KEYS = (
    *(
        "rl_num_generations",
        "rl_grpo_beta",
        "rl_grpo_epsilon",
        "rl_epsilon_high",
        "rl_loss_algo",
        "rl_loss_agg_mode",
        "reward_functions",
    ),
)
_WORKERS = ("reward_num_workers", "reward_worker_timeout_seconds")
# The defaults of trainer.grpo that differ from base.yml's. Temperature 1 samples completions from the model's
# unmodified distribution.
RL_DEFAULTS = {"use_grpo": True, "decode_sampling_temperature": 1.0}


def _functions(config: Config) -> str | None:
    if not config.reward_functions:
        return "no function scores the completions; name one, as in [my_rewards:exact_answer]"
    return functions_problem(config.reward_functions)


def _columns(config: Config) -> str | None:
    taken = [name for name in NOT_COLUMNS if name in (*config.train_data_columns, *config.eval_data_columns)]
    return f"{taken[0]} is the name of another argument of reward functions; rename the column" if taken else None


def _room(config: Config) -> str | None:
    longest, row = config.max_prefill_predict_length, config.max_target_length
    return f"prompts of {longest} tokens leave no room for a completion in a row of {row}" if longest >= row else None


def _rounds(key: str) -> Check:
    def problem(config: Config) -> str | None:
        every, count = config.rl_num_iterations, config[key]
        if count <= 0 or count % every == 0 or (key == "steps" and config.num_batches > 0):
            return None
        nearest = multiples_around(count, every)
        return f"a run can be saved and end only between rounds, which have {every} updates each; nearest: {nearest}"

    return (key, "rl_num_iterations"), problem


ROWS = (
    Row(("num_batches",), Resume.LENGTH, step=False),
    Row(("batch_size", "rl_num_generations", "rl_num_iterations"), step=False),
    Row(("reward_functions",), step=False, code=True),
    # The keys that determine where and for how long reward functions run, and how many completions are generated at
    # once.
    Row((*_WORKERS, "rollout_micro_batch_size"), Resume.AROUND, step=False),
)
_REWARDED: tuple[Check, ...] = (
    (("reward_functions",), _functions),
    (("train_data_columns", "eval_data_columns"), _columns),
)
_IN_ROUNDS: tuple[Check, ...] = (
    refused(
        ("decode_sampling_strategy", "decode_sampling_temperature"),
        lambda c: c.decode_sampling_strategy == "greedy" or not c.decode_sampling_temperature,
        "completions must be sampled, as with strategy weighted and temperature 1",
    ),
    (("max_prefill_predict_length", "max_target_length"), _room),
    _rounds("steps"),
    _rounds("checkpoint_period"),
    left_out("enable_diloco", "each island has its own parameters, and rollouts would not come from them"),
    left_out("mtp_num_layers", "modules of multi-token prediction would not be trained"),
    left_out("z_loss_multiplier", "it is a term of the next-token loss"),
    left_out("label_smoothing", "it smooths the next-token loss"),
    left_out("quantize_kvcache", "it changes the log-probabilities of rollouts, as if another model had made them"),
)
CHECKS = [
    *only_if(lambda c: c.use_grpo, _REWARDED, shown=("use_grpo",)),
    *only_if(has_rollouts, _IN_ROUNDS, shown=("use_grpo", "distill_rollouts")),
]
INERT = (
    Inert(_OF_ROUNDS, lambda c: not has_rollouts(c), "use_grpo=false and distill_rollouts=false"),
    Inert(KEYS, lambda c: not c.use_grpo, "use_grpo=false"),
    Inert(_WORKERS, lambda c: not c.use_grpo and not c.eval_tasks, "use_grpo=false and eval_tasks is empty"),
    Inert(("grain_packing_type", "max_segments_per_seq", "use_truncation"), has_rollouts, "rollouts are packed"),
    Inert(
        ("steps",), lambda c: has_rollouts(c) and c.num_batches > 0, "a run has num_batches x rl_num_iterations updates"
    ),
    Inert(("reuse_example_batch",), has_rollouts, "each round has its own prompts"),
    Inert(("data_pipeline", "grain_worker_count"), has_rollouts, "prompts are held in memory"),
)


# Each entry consists of keys, a condition on the configuration, and a reason. If the condition is true, updates compute
# other log-probabilities than rollouts, for this reason.
_DRIFTS: tuple[tuple[tuple[str, ...], Callable[[Config], bool], str], ...] = (
    (
        ("sparse_matmul", "capacity_factor"),
        lambda c: drops(c) and c.capacity_factor * c.num_experts_per_tok < c.num_experts,
        "experts drop tokens in updates, but not in rollouts; set sparse_matmul=true",
    ),
    (
        ("enable_dropout", "dropout_rate", "attention_dropout_rate"),
        has_dropout,
        "updates use dropout, but rollouts do not; set enable_dropout=false",
    ),
    (
        ("quantization",),
        shares_scales,
        "the tokens of a batch share activation scales, and rollouts have different batches; set quantization=fp8",
    ),
)


def drifts(config: Config) -> list[str]:
    """Returns one line for each reason why rollouts and the first update after them compute different
    log-probabilities."""
    reads = has_rollouts(config) and (config.use_grpo or samples_divergence(config))
    said = "in the first update of a round, log-probabilities differ from those of the rollouts by more than rounding"
    return [
        f"{' '.join(f'{key}={to_flow(config[key])}' for key in keys)}: {said}: {why}"
        for keys, when, why in _DRIFTS
        if reads and when(config)
    ]


def not_prompts(config: Config) -> list[str]:
    """Returns one message for each key that prevents trainer.grpo from reading prompts."""
    columns = "train_data_columns=[prompt,answer] eval_data_columns=[prompt,answer]"
    return not_texts(config, "prompts", f"/data/prompts.jsonl {columns}")
