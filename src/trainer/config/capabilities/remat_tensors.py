"""The tensors of a block that a rematerialization policy can keep. Their names are used by layers and as keys of
base.yml.

With remat_policy=custom, each key says what to do with the tensor of that name.
"""

QKV = ("query_proj", "key_proj", "value_proj")
ATTENTION = (*QKV, "out_proj")
# All matrix products with weights. "context" is the result of attention before its output projection.
OF_MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")
OF_EXPERTS = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
PROJECTIONS = (*ATTENTION, *OF_MLP, *OF_EXPERTS)
QUANTIZED = "quantization"  # MaxText's name for the quantized operands of products
LAYER_INPUT = "decoder_layer_input"
TENSORS = (LAYER_INPUT, "context", *PROJECTIONS)
# The keys that list a family's own tensors, each with what remat_policy=custom does with these tensors.
OWN_TENSORS = {"custom_device_tensors": "device", "custom_offload_tensors": "offload"}
