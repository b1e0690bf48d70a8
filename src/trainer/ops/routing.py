"""Routing: each token's experts and their weights, and routing statistics.

Shapes: b rows, t tokens of a row, e experts, k chosen experts of a token. All numbers are float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """The chosen experts of each token, the best first, and their weights in the sum of the experts' results."""

    expert: jax.Array  # int32 [..., k], all different
    weight: jax.Array  # float32 [..., k]


# (logits [..., e], k) -> the routing; with a router bias, the arguments are (logits, k, bias [e])
Score = Callable[..., Routing]


def softmax_of_chosen(logits: jax.Array, chosen: int) -> Routing:
    """Chooses the experts with the largest logits, weighted by the softmax of these logits (Jiang et al. 2024, Mixtral,
    arXiv:2401.04088). Ties go to the expert with the lower index."""
    largest, expert = jax.lax.top_k(logits, chosen)
    return Routing(expert, jax.nn.softmax(largest, axis=-1))


def chosen_of_softmax(logits: jax.Array, chosen: int) -> Routing:
    """Chooses the experts with the largest logits, weighted by the softmax over all experts. So a token's weights sum
    to less than 1."""
    _, expert = jax.lax.top_k(logits, chosen)
    return Routing(expert, _probability(logits, expert))


def sigmoid_of_chosen(logits: jax.Array, chosen: int) -> Routing:
    """Chooses the experts with the largest logits, each weighted by the sigmoid of its logit (Llama 4)."""
    largest, expert = jax.lax.top_k(logits, chosen)
    return Routing(expert, jax.nn.sigmoid(largest))


def _probability(logits: jax.Array, expert: jax.Array) -> jax.Array:
    """Returns the probabilities of the experts in `expert` [..., k], by a softmax over all experts.

    If this function computed exp(logit - log Z), forward passes with and without gradients would have different bits:
    jaxlib 0.12 adds 8 or fewer exponentials in another order if they are used only for the sum (docs/decisions/0028).
    """
    return jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), expert, axis=-1)


def within_groups(logits: jax.Array, chosen: int, *, groups: int, kept: int) -> Routing:
    """Computes `chosen_of_softmax`, but chooses experts only within the best groups, that is, the `kept` groups with
    the largest maximum logits (DeepSeek-V2, arXiv:2405.04434, section 2.2.2). Each of the `groups` groups consists of
    consecutive experts."""
    _, expert = jax.lax.top_k(_of_best_groups(logits, groups, kept, best=1), chosen)
    return Routing(expert, _probability(logits, expert))


def softmax_in_groups(logits: jax.Array, chosen: int, *, normalize: bool, groups: int, kept: int) -> Routing:
    """Chooses the experts with the largest probabilities (softmax over all experts) within the `kept` best groups. A
    group is ranked by the sum of its two largest probabilities (Mistral 4). `normalize`: whether to divide a token's
    weights by their sum."""
    score = jax.nn.softmax(logits, axis=-1)
    _, expert = jax.lax.top_k(_of_best_groups(score, groups, kept, best=2), chosen)
    weight = _probability(logits, expert)
    return Routing(expert, weight / weight.sum(-1, keepdims=True) if normalize else weight)


def _of_best_groups(score: jax.Array, groups: int, kept: int, *, best: int) -> jax.Array:
    """Returns `score` [..., e] with -inf outside of the `kept` best groups. A group is ranked by the sum of its `best`
    largest scores."""
    by_group = score.reshape(*score.shape[:-1], groups, -1)
    of_group = by_group.max(-1) if best == 1 else jax.lax.top_k(by_group, best)[0].sum(-1)
    _, taken = jax.lax.top_k(of_group, kept)
    allowed = jax.nn.one_hot(taken, groups, dtype=jnp.bool_).any(-2)
    return jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(score.shape)


def by_sigmoid(
    logits: jax.Array,
    chosen: int,
    bias: jax.Array | None = None,
    *,
    normalize: bool,
    groups: int = 1,
    kept: int = 1,
) -> Routing:
    """Chooses the experts with the largest sigmoid(logits) + `bias` [e], weighted by their sigmoids without the bias
    (arXiv:2412.19437, section 2.1.2).

    Only experts in the `kept` best groups can be chosen. A group is ranked by the total of its two largest values of
    sigmoid + bias. The bias gets no gradient.

    Args:
      normalize: whether to divide the weights of a token by their sum.
      groups: the number of groups. Each group consists of at least two consecutive experts.
    """
    score = jax.nn.sigmoid(logits)
    biased = jax.lax.stop_gradient(score if bias is None else score + bias)
    if groups > 1:
        biased = _of_best_groups(biased, groups, kept, best=2)
    _, expert = jax.lax.top_k(biased, chosen)
    weight = jnp.take_along_axis(score, expert, axis=-1)
    if normalize:
        weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)  # as published, because all sigmoids may be 0
    return Routing(expert, weight)


def times(score: Score, factor: float) -> Score:
    """Wraps `score` so that the weights are multiplied by `factor`."""

    def scaled(*args: Any) -> Routing:
        routing = score(*args)
        return Routing(routing.expert, routing.weight * factor)

    return scaled


def tokens_per_expert(expert: jax.Array, real: jax.Array, experts: int) -> jax.Array:
    """Returns how many tokens chose each expert: int32 [..., e]. `expert`: the choices, [..., t, k]. `real`: bool
    [..., t], False for tokens that do not count."""
    chose = jax.nn.one_hot(expert, experts, dtype=jnp.int32).sum(-2)
    return jnp.sum(chose * real[..., None], axis=-2)


def weight_of_each(routing: Routing, experts: int) -> jax.Array:
    """Returns each token's weights for all experts, 0 for experts that the token did not choose: float32 [..., e]."""
    chose = jax.nn.one_hot(routing.expert, experts, dtype=jnp.float32)
    return jnp.sum(chose * routing.weight[..., None], axis=-2)


def load_balance(logits_bte: jax.Array, expert_btk: jax.Array, real_bt: jax.Array) -> jax.Array:
    """Returns the load-balance loss of each row, [b], over real tokens: e times the sum over experts of (the share of
    tokens that chose the expert x the expert's mean probability) (Fedus et al. 2021, arXiv:2101.03961); 0 for a row
    without real tokens.

    For sigmoid scores, pass log_sigmoid(logits) as the logits: the softmax of these is the scores divided by their sum
    (DeepSeek-V3, arXiv:2412.19437, equation 19). As in MaxText, the shares sum to k: the loss is k if experts are
    balanced, and up to e if all tokens choose the same k experts. Gradients flow only through the probabilities.
    """
    experts = logits_bte.shape[-1]
    tokens_b = jnp.maximum(real_bt.sum(-1), 1).astype(jnp.float32)
    count_be = tokens_per_expert(expert_btk, real_bt, experts)
    probability_be = jnp.sum(jax.nn.softmax(logits_bte, axis=-1) * real_bt[..., None], axis=1)
    return experts * jnp.sum(count_be * probability_be, axis=-1) / tokens_b**2


def squared_log_z(logits_bte: jax.Array, real_bt: jax.Array) -> jax.Array:
    """Returns the router's z-loss, [b]: the squared logarithm of the softmax's normalizer, summed over a row's real
    tokens (Zoph et al. 2022, arXiv:2202.08906)."""
    return jnp.sum(jnp.where(real_bt, jax.nn.logsumexp(logits_bte, axis=-1) ** 2, 0), axis=-1)


def entropy(logits_bte: jax.Array, real_bt: jax.Array) -> jax.Array:
    """Returns the entropy of the router's probabilities, softmax(logits), in nats, summed over a row's real tokens:
    [b]. For sigmoid scores, see `load_balance`."""
    log_bte = jax.nn.log_softmax(logits_bte, axis=-1)
    return -jnp.sum(jnp.where(real_bt[..., None], jnp.exp(log_bte) * log_bte, 0), axis=(1, 2))
