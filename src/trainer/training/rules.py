"""The update rules of a configuration, in the order in which a step applies them."""

from collections.abc import Sequence

from trainer.backends.base import Model, tree_mode
from trainer.config.capabilities.sparsity_keys import is_sparse
from trainer.config.keys import Config
from trainer.models.clipped import clipped_layers
from trainer.models.matrices import masked_kernels
from trainer.optim.average import averaging
from trainer.optim.qk_clip import qk_clip
from trainer.optim.router_bias import router_bias
from trainer.optim.rules import Rule
from trainer.optim.sparsity import weight_sparsity
from trainer.optim.spikes import skip_spikes


def make_rules(config: Config, model: Model, more: Sequence[Rule] = ()) -> list[Rule]:
    """Returns the update rules for `config` (resolved) and `model`, including the given rules `more`.

    Weight masks and the parameter average come last, because both depend on the final parameters of a step.

    Raises:
      UserError: a rule does not fit the model.
    """
    rules: list[Rule] = []
    if config.skip_step_on_spikes:
        rules.append(skip_spikes(config))
    if config.use_qk_clip:
        with tree_mode():
            layers = clipped_layers(config)
        rules.append(qk_clip(config, model.param_axes, layers))
    if config.routed_bias and config.routed_bias_update_rate:
        rules.append(router_bias(config, model.abstract[1]))
    rules += more
    if is_sparse(config):
        rules.append(weight_sparsity(config, masked_kernels(config)))
    return [*rules, *([averaging(config)] if config.ema_decay else [])]
