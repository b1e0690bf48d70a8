"""The keys of recurrent layers: the pattern of layers, and the sizes of Gated DeltaNet."""

from trainer.config.family import PATTERN, RECURRENT, lacks, reads
from trainer.config.key_rows import Check, Inert, Resume, Row, refused
from trainer.config.keys import Config


def attention_blocks(config: Config) -> int:
    """Returns the number of blocks with attention. Includes blocks of multi-token prediction, which have attention if
    the last layer has it."""
    layers, modules = config.base_num_decoder_layers, config.mtp_num_layers
    if not reads(config, PATTERN):
        return layers + modules
    every = config.inhomogeneous_layer_cycle_interval
    return layers // every + (0 if layers % every else modules)


def has_recurrence(config: Config) -> bool:
    """Returns whether some layer is known to be recurrent."""
    return reads(config, PATTERN) and config.inhomogeneous_layer_cycle_interval > 1


def recurrent_modules(config: Config) -> bool:
    """Returns whether the model has blocks of multi-token prediction that are recurrent, like its last layer."""
    layers, every = config.base_num_decoder_layers, config.inhomogeneous_layer_cycle_interval
    return has_recurrence(config) and config.mtp_num_layers > 0 and layers % every != 0


CHUNK = "gdn_chunk_size"  # not a key of the model: it changes results only by rounding
ROWS = (Row((CHUNK,), Resume.LAYOUT),)
CHECKS: tuple[Check, ...] = (
    refused(
        ("gdn_num_value_heads", "gdn_num_key_heads"),
        lambda c: has_recurrence(c) and c.gdn_num_value_heads % c.gdn_num_key_heads,
        "the number of value heads must be a multiple of the number of key heads, which the value heads share",
    ),
)
INERT = (
    Inert((PATTERN, CHUNK), lambda c: lacks(c, PATTERN), "this family has no recurrent layers"),
    Inert(
        (*RECURRENT, CHUNK),
        lambda c: reads(c, PATTERN) and not has_recurrence(c),
        "inhomogeneous_layer_cycle_interval=1",
    ),
)
