"""The keys that define a model's parameters."""

import fnmatch

from trainer.config.schema import schema

# Keys of the section Model that define how a model is computed. The section's other keys define the model's parameters.
_COMPUTED = (
    *("sparse_matmul", "capacity_factor", "ragged_buffer_factor", "routed_bias_update_rate", "attention", "sa_*"),
    *("batch_invariant", "gdn_chunk_size"),
    *(
        "*dropout*",
        "init_weights_seed",
        "dtype",
        "weight_dtype",
        "weight_stochastic_rounding",
        "scan_layers",
        "remat_policy",
        "decoder_layer_input",
    ),
    *("context", "*_proj", "mlpw*", "moe_mlpw*", "custom_*_tensors", "global_parameter_scale"),
    *("*quantiz*", "*_calibration_method", "weight_block_size", "bwd_stochastic_rounding", "weight_sparsity_*_step"),
)


def of_parameters(name: str) -> bool:
    """Returns whether the key `name` defines a model's parameters or their meaning."""
    key = schema().keys.get(name)
    return key is not None and key.section == "Model" and not any(fnmatch.fnmatchcase(name, glob) for glob in _COMPUTED)
