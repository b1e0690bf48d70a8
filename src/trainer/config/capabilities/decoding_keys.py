"""The keys of text generation: their checks, and the settings under which the keys have no effect."""

from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.derived import has_rollouts
from trainer.config.key_rows import Check, Inert, Resume, Row, refused

# The values of decode_sampling_strategy that use decode_sampling_top_k, and those that use decode_sampling_nucleus_p.
TOP_K, NUCLEUS = ("topk", "composite"), ("nucleus", "composite")
OF_CACHE = ("kv_quant_axis", "kv_quant_dtype")
# The keys that determine which tokens are sampled. With rollouts, sampling is a part of training, so these keys must
# not change on resume.
DRAWN = (
    *("decode_sampling_strategy", "decode_sampling_temperature", "decode_sampling_top_k", "decode_sampling_nucleus_p"),
    *("decode_sampling_seed", "max_prefill_predict_length", "use_chat_template"),
)
KEYS = (
    *DRAWN,
    *("use_chunked_prefill", "prefill_chunk_size"),
    *("enable_prefix_caching", "prefix_caching_hbm_byte", "return_log_prob"),
    *("quantize_kvcache", *OF_CACHE),
)

# The keys that only trainer.serve reads.
SERVING = (
    *("host", "port", "token_file", "served_model_name", "max_waiting_prompts", "max_body_bytes"),
    *("receive_seconds", "request_seconds", "drain_seconds", "prefix_caching_by_token"),
)


ROWS = (Row(("prompt", *KEYS, *SERVING), Resume.AROUND, step=False),)
CHECKS: tuple[Check, ...] = (
    refused(
        ("decode_sampling_strategy", "decode_sampling_top_k"),
        lambda c: c.decode_sampling_strategy in TOP_K and c.decode_sampling_top_k < 1,
        "this strategy needs the number of tokens to choose from",
    ),
    refused(
        ("decode_sampling_strategy", "decode_sampling_nucleus_p"),
        lambda c: c.decode_sampling_strategy in NUCLEUS and not 0 < c.decode_sampling_nucleus_p <= 1,
        "this strategy needs the probability of the nucleus, in (0, 1]",
    ),
)
INERT = (
    Inert(("decode_sampling_top_k",), lambda c: c.decode_sampling_strategy not in TOP_K, "the strategy has no top k"),
    Inert(
        ("decode_sampling_nucleus_p",),
        lambda c: c.decode_sampling_strategy not in NUCLEUS,
        "the strategy has no nucleus",
    ),
    Inert(
        ("decode_sampling_temperature", "decode_sampling_seed"),
        lambda c: c.decode_sampling_strategy == "greedy",
        "decode_sampling_strategy=greedy",
    ),
    Inert(("prefill_chunk_size",), lambda c: not c.use_chunked_prefill, "use_chunked_prefill=false"),
    Inert(
        ("prefix_caching_hbm_byte", "prefix_caching_by_token"),
        lambda c: not c.enable_prefix_caching,
        "enable_prefix_caching=false",
    ),
    Inert(OF_CACHE, lambda c: not c.quantize_kvcache, "quantize_kvcache=false"),
    Inert(("kv_quant_axis",), is_latent, "latents have no heads"),
    Inert(KEYS, lambda c: not c.prompt and not has_rollouts(c), "prompt is empty"),
    Inert(
        ("prompt", *KEYS),
        lambda c: c.dataset_type == "synthetic" and bool(c.prompt),
        "dataset_type=synthetic has no tokenizer",
    ),
)
