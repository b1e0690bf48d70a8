"""What routers of mixtures of experts did in a step."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

TOKENS, DROPPED = "tokens_per_expert", "dropped_tokens"  # integers that add up over islands of DiLoCo


def router_metrics(counts: Mapping[str, jax.Array], drops: bool, by_layer: bool) -> dict[str, jax.Array]:
    """Metrics of a step, from the sums `counts` that `layers.moe` sows; tokens are those that are not padding.

    - router_entropy: of the softmax over experts, in nats, the mean over layers and tokens: 0 if each token has one
      expert for certain, log(experts) if it makes no difference;
    - expert_load: the tokens of the busiest expert of all layers, over those of an expert on average: 1 if balanced;
    - dropped_tokens, if experts may drop tokens (`drops`): a choice of a token that found no place, in all layers;
    - with `by_layer` <layer>/tokens_per_expert, int32 [layers, experts], and <layer>/router_entropy [layers].
    """
    entropies, loads = [], []
    found: dict[str, jax.Array] = {}
    dropped = jnp.zeros((), jnp.int32)
    for path, tokens in counts.items():
        stem, is_tokens, _ = path.partition(TOKENS)
        if not is_tokens:
            continue
        # A token counts once for each expert that it chose.
        chosen = jnp.maximum(tokens.sum(-1), 1)
        entropy = counts[f"{stem}entropy"] / jnp.maximum(counts[f"{stem}tokens"], 1)
        entropies.append(entropy.reshape(-1))
        loads.append((tokens.max(-1) / chosen * tokens.shape[-1]).reshape(-1))
        dropped += counts[f"{stem}dropped"].sum()
        if by_layer:
            found |= {f"{stem}{TOKENS}": tokens, f"{stem}router_entropy": entropy}
    if not loads:
        return {}  # experts of a user's own that sow nothing
    found |= {"router_entropy": jnp.concatenate(entropies).mean(), "expert_load": jnp.concatenate(loads).max()}
    return found | ({DROPPED: dropped} if drops else {})
