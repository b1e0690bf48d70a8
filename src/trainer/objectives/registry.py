"""Makes the objective of a configuration."""

from typing import Any

import jax.numpy as jnp

from trainer.config.capabilities.expert_keys import has_experts
from trainer.config.derived import has_reference, has_rollouts, policy_temperature, samples_divergence
from trainer.config.keys import Config
from trainer.models.transformer import head_matrix
from trainer.objectives.base import Objective
from trainer.objectives.distillation import Distillation, Schedule, Teacher
from trainer.objectives.multi_token import MultiToken
from trainer.objectives.next_token import NextToken
from trainer.objectives.on_policy import OnPolicy
from trainer.objectives.policy import Policy
from trainer.objectives.preference import Dpo, Orpo
from trainer.objectives.reference import first_parameters
from trainer.objectives.router import WithRouters
from trainer.objectives.saved_logits import SavedDistillation, SavedTeacher
from trainer.objectives.tiling import Tiling
from trainer.ops.divergence import divergence_of


def make_objective(config: Config, model: Any, teacher: Teacher | SavedTeacher | None = None) -> Objective:
    """Returns the objective of the resolved `config` for `model` (`backends.Model`). `teacher` is required by
    use_distill."""
    if config.use_grpo or config.use_dpo:
        objective = (_policy if config.use_grpo else _preference)(config, model)
    else:
        objective = _next_token(config, model, teacher)
    balance, z = config.load_balance_loss_weight, config.router_z_loss_weight
    return WithRouters(objective, balance, z) if has_experts(config) and (balance or z) else objective


def _next_token(config: Config, model: Any, teacher: Any) -> Objective:
    shared = model.apply, config.z_loss_multiplier, config.label_smoothing, make_tiling(config, model)
    next_token = NextToken(*shared) if teacher is None else _distillation(config, teacher, *shared)
    if not config.mtp_num_layers:
        return next_token
    scale, evaluated = config.mtp_loss_scaling_factor, config.mtp_eval_target_module
    return MultiToken(next_token, config.mtp_num_layers, scale, evaluated)


def _distillation(config: Config, teacher: Any, *shared: Any) -> Distillation:
    def schedule(start: float, end: float | None, shape: str) -> Schedule:
        return Schedule(start, start if end is None else end, shape, config.learning_rate_schedule_steps)

    temperature = config.distill_temperature, config.distill_temperature_end, config.distill_temperature_schedule
    own: dict[str, Any] = {
        "teacher": teacher,
        "divergence": divergence_of(config.distill_loss, config.distill_jensen_shannon_weight),
        "alpha": schedule(config.distill_alpha, config.distill_alpha_end, config.distill_alpha_schedule),
        "temperature": schedule(*temperature),
        "vocab_size": config.vocab_size,
    }
    if isinstance(teacher, SavedTeacher):
        return SavedDistillation(*shared, **own)
    if has_rollouts(config):
        return OnPolicy(*shared, **own, sampled=samples_divergence(config))
    return Distillation(*shared, **own)


def _preference(config: Config, model: Any) -> Objective:
    shared = model.apply, config.dpo_label_smoothing, make_tiling(config, model)
    if has_reference(config):
        return Dpo(*shared, first_parameters(config, model), config.dpo_beta)
    return Orpo(*shared, weight=config.dpo_orpo_lambda, answer_only=config.sft_train_on_completion_only)


def _policy(config: Config, model: Any) -> Objective:
    low, high, beta = config.rl_grpo_epsilon, config.rl_epsilon_high, config.rl_grpo_beta
    return Policy(
        model.apply,
        low,
        low if high < 0 else high,
        beta,
        config.rl_loss_algo == "gspo-token",
        config.rl_loss_agg_mode,
        policy_temperature(config),
        first_parameters(config, model) if has_reference(config) else None,
        make_tiling(config, model),
    )


def make_tiling(config: Config, model: Any) -> Tiling | None:
    """Returns the tiling of the loss; None if `num_vocab_tiling` is 1."""
    if config.num_vocab_tiling == 1:
        return None
    return Tiling(config.num_vocab_tiling, head_matrix(config), model.param_axes, jnp.dtype(config.dtype))
