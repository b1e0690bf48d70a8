"""From a configuration to its update rules, in the order in which a step applies them."""

from trainer.backends import Model
from trainer.backends.base import tree_mode
from trainer.models.clipped import clipped_layers
from trainer.optim import Rule
from trainer.optim.qk_clip import qk_clip


def make_rules(config, model: Model) -> list[Rule]:
    """The update rules of `config`, resolved, for `model`.

    Raises:
      UserError: a rule does not fit the model.
    """
    rules = []
    if config.use_qk_clip:
        with tree_mode():
            layers = clipped_layers(config)
        rules.append(qk_clip(config, model.param_axes, layers))
    return rules
