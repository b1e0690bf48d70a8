"""Update rules: stateful functions that change the train state after the optimizer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Seen(NamedTuple):
    """The measurements of a step's batch before the update."""

    loss: jax.Array  # float32 [], of the whole batch
    grad_norm: jax.Array  # float32 [], of the trained parameters, before clipping
    step: jax.Array  # int32 [], the number of steps so far, including skipped ones


def _unchanged(state: Any, old: Any, new: Any, sown: Any) -> tuple[Any, Any]:
    return state, new


class Rule(NamedTuple):
    """One entry in the ordered list of update rules.

    Attributes:
      name: the name of the rule's state, unique in the list.
      init: `init(params) -> state`, a pytree of finite arrays. A subtree with the structure of `params` is sharded
        like `params`.
      update: `update(state, old, new, sown) -> (state, new)`, where `old` is the TrainTree before the step, and `new`
        is the TrainTree after the optimizer and the previous rules. `update` may replace `new.params` and `new.rest`.
      sown: the types of sown values (`layers.sown`) that the rule reads. The argument `sown` of `update` is a dict from
        the name of each type to a dict from the path of each sown value to the value for the whole batch.
      metrics: `metrics(state)` returns the metrics of a step by name, from the rule's state after the step. A skipped
        step leaves the state unchanged.
      observe: `observe(state, seen) -> (state, reasons)`, called before `update`. `reasons` is a dict from the names of
        reasons to bools []. If any reason is true, the step is skipped: nothing but the step count changes, not even a
        rule's state. Each reason is also a metric of the step, 0 or 1. None: the rule never skips a step.
      due: `due(step)` returns a bool []: whether the rule reads its sown values in the step with the count `step`,
        int32 []. None: the rule reads them in every step. `update` is called in every step, but the sown values may be
        meaningless in a step for which `due` returns False.
    """

    name: str
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, Any], tuple[Any, Any]] = _unchanged
    sown: tuple[type, ...] = ()
    metrics: Callable[[Any], Mapping[str, Any]] = lambda state: {}
    due: Callable[[jax.Array], jax.Array] | None = None
    observe: Callable[[Any, Seen], tuple[Any, Mapping[str, jax.Array]]] | None = None


class WithRules(NamedTuple):
    """The `opt_state` of an optimizer with rules."""

    optimizer: Any  # optax's state
    rules: dict[str, Any]  # the state of each rule, by the name of the rule


def with_rules(tx: optax.GradientTransformation, rules: Sequence[Rule]) -> optax.GradientTransformation:
    """Returns `tx` with the state of `rules` included in its state; without rules, `tx` itself.

    The result computes the same updates as `tx`. A training step applies the updates and then calls `apply_rules`.
    """
    if not rules:
        return tx
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> WithRules:
        return WithRules(inner.init(params), {rule.name: rule.init(params) for rule in rules})

    def update(grads: Any, state: WithRules, params: Any = None, **extra: Any) -> tuple[Any, WithRules]:
        updates, optimizer = inner.update(grads, state.optimizer, params, **extra)
        return updates, state._replace(optimizer=optimizer)

    return optax.GradientTransformationExtraArgs(init, update)


def any_due(rules: Sequence[Rule], step: jax.Array) -> jax.Array | None:
    """Returns whether any of `rules` reads sown values in step `step`, a bool [].

    Returns None if no rule reads sown values, or if a rule reads them in every step. If any rule is due, a step
    computes the sown values of all rules, so rules with different `due` all get their values.
    """
    conditions = [rule.due for rule in rules if rule.sown]
    flags = [due(step) for due in conditions if due is not None]
    return functools.reduce(jnp.logical_or, flags) if flags and len(flags) == len(conditions) else None


def observed(rules: Sequence[Rule], tree: Any, seen: Seen) -> tuple[Any, dict[str, jax.Array]]:
    """Returns `tree` with the rules' state after `observe`, and the rules' reasons to skip the step: a dict from the
    name of a reason to a bool []."""
    reasons: dict[str, jax.Array] = {}
    for rule in rules:
        if rule.observe is not None:
            state, own_reasons = rule.observe(tree.opt_state.rules[rule.name], seen)
            tree = _with_state(tree, rule, state)
            if taken := sorted(reasons.keys() & own_reasons.keys()):
                raise ValueError(f"two update rules have the reason {', '.join(taken)}")
            reasons |= own_reasons
    return tree, reasons


def apply_rules(rules: Sequence[Rule], old: Any, new: Any, sown: Any) -> Any:
    """Applies all `rules`, in order, to the TrainTree `new`, and returns the result. `old`: see `Rule.update`."""
    for rule in rules:
        state, new = rule.update(new.opt_state.rules[rule.name], old, new, sown)
        new = _with_state(new, rule, state)
    return new


def _with_state(tree: Any, rule: Rule, state: Any) -> Any:
    return tree._replace(opt_state=tree.opt_state._replace(rules=tree.opt_state.rules | {rule.name: state}))
