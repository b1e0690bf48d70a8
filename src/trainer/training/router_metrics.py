"""Per-step metrics of mixture-of-experts routers."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

TOKENS, DROPPED = "tokens_per_expert", "dropped_tokens"  # integers, summed over islands of DiLoCo


def router_metrics(counts: Mapping[str, jax.Array], drops: bool, by_layer: bool) -> dict[str, jax.Array]:
    """Returns metrics of a step, from the sums `counts` that `layers.moe` sows. Padding tokens are not counted.

    - router_entropy: the entropy of the softmax over experts in nats, averaged over layers and tokens. It is 0 if every
      token chooses one expert with certainty, and log(experts) for a uniform distribution;
    - expert_load: the token count of a layer's busiest expert divided by the mean count; the maximum over layers;
    - dropped_tokens, if experts may drop tokens (`drops`): the number of choices beyond an expert's capacity, over all
      layers; a token counts once for each dropped choice;
    - with `by_layer`: <layer>/tokens_per_expert, int32 [layers, experts], and <layer>/router_entropy [layers].
    """
    entropies, loads = [], []
    found: dict[str, jax.Array] = {}
    dropped = jnp.zeros((), jnp.int32)
    for path, tokens in counts.items():
        stem, is_tokens, _ = path.partition(TOKENS)
        if not is_tokens:
            continue
        # A token counts once for each expert that it chooses.
        chosen = jnp.maximum(tokens.sum(-1), 1)
        entropy = counts[f"{stem}entropy"] / jnp.maximum(counts[f"{stem}tokens"], 1)
        entropies.append(entropy.reshape(-1))
        loads.append((tokens.max(-1) / chosen * tokens.shape[-1]).reshape(-1))
        dropped += counts[f"{stem}dropped"].sum()
        if by_layer:
            tokens = tokens.reshape(-1, tokens.shape[-1]) if tokens.ndim > 2 else tokens
            entropy = entropy.reshape(-1) if entropy.ndim > 1 else entropy
            found |= {f"{stem}{TOKENS}": tokens, f"{stem}router_entropy": entropy}
    if not loads:
        return {}  # custom experts may sow nothing
    found |= {"router_entropy": jnp.concatenate(entropies).mean(), "expert_load": jnp.concatenate(loads).max()}
    return found | ({DROPPED: dropped} if drops else {})
