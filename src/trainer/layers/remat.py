"""What a checkpointed block keeps for its backward pass."""

import jax

# Names that layers give their matrix products with weights (jax.ad_checkpoint.checkpoint_name).
PROJECTIONS = ("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")

# remat_policy -> policy of jax.checkpoint, or None where nothing is recomputed.
POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "minimal": jax.checkpoint_policies.save_only_these_names(*PROJECTIONS),
}
