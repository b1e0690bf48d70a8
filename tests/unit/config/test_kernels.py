"""The table of attention kernels: which kernel `attention` selects, and which choices are refused by name."""

import contextlib
import dataclasses

import pytest

from trainer.config.capabilities.kernels import KERNELS, unsupported, why_no_kernel
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.layers.attention import OPS

# Written out, because the defaults of base.yml may change.
SIZES = """
dataset_type=synthetic vocab_size=4096 max_target_length=1024 per_device_batch_size=8 eval_per_device_batch_size=0
base_emb_dim=192 base_num_query_heads=8 base_num_kv_heads=2 base_mlp_dim=512 base_num_decoder_layers=2 head_dim=64
attention=autoselected attention_type=global sliding_window_size=0 attn_logits_soft_cap=0 dtype=auto
enable_dropout=true attention_dropout_rate=0 steps=100 eval_interval=-1 ici_fsdp_parallelism=-1
"""
WINDOW = "attention_type=local_sliding sliding_window_size=100"
DROPOUT = "attention_dropout_rate=0.1"
TENSOR = "ici_fsdp_parallelism=1 ici_tensor_parallelism=2"
KV_HEADS_WHOLE = "logical_axis_rules=[[activation_kv_heads,[]]]"
SPLIT_ROWS = (
    "logical_axis_rules=[[activation_q_length,tensor],[activation_heads,[]],[activation_kv_heads,[]],"
    "[activation_mlp,[]],[activation_vocab,[]]]"
)


H200, B200, A100 = (9, 0), (10, 0), (8, 0)
MLA = (
    "decoder_block=deepseek shared_experts=1 num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=32 "
    "attention_type=mla base_num_kv_heads=8 kv_lora_rank=64 v_head_dim=128 qk_rope_head_dim=64 "
    "qk_nope_head_dim="
)


def resolved(words: str, platform: str, devices: int = 1, **hardware):
    config = load((SIZES + words).split()).config
    return resolve(config, device_count=devices, platform=platform, **hardware)


def mistakes(words: str, platform: str, devices: int = 1) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolved(words, platform, devices)
    return str(caught.value).split("\n  ")[1:]


def test_the_table_is_what_the_layer_runs():
    assert list(KERNELS) == list(OPS)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_plain_ops_support_everything(platform):
    words = f"{WINDOW} {DROPOUT} attn_logits_soft_cap=30 max_target_length=1023 head_dim=18 dtype=float32"
    for name in ("dot_product", "blockwise"):
        assert resolved(f"{words} attention={name}", platform).attention == name


@pytest.mark.parametrize(
    ("words", "cpu", "gpu", "tpu"),
    [
        ("", "blockwise", "cudnn_flash_jax", "splash"),
        ("max_target_length=1023", "dot_product", "dot_product", "dot_product"),
        (f"max_target_length=1023 {DROPOUT}", "dot_product", "dot_product", "dot_product"),
        ("attention=flash", "blockwise", "cudnn_flash_jax", "splash"),
        ("attention=flash max_target_length=128", "blockwise", "cudnn_flash_jax", "splash"),
        (WINDOW, "blockwise", "cudnn_flash_jax", "splash"),
        (DROPOUT, "blockwise", "blockwise", "blockwise"),
        (f"{DROPOUT} enable_dropout=false", "blockwise", "cudnn_flash_jax", "splash"),
        ("attn_logits_soft_cap=30", "blockwise", "blockwise", "splash"),
        ("dtype=float32", "blockwise", "blockwise", "splash"),
        ("max_target_length=1100", "blockwise", "cudnn_flash_jax", "blockwise"),
        ("max_target_length=1101", "blockwise", "blockwise", "blockwise"),
        ("head_dim=36", "blockwise", "blockwise", "splash"),
        ("head_dim=256", "blockwise", "blockwise", "splash"),
        ("attention=dot_product", "dot_product", "dot_product", "dot_product"),
    ],
)
def test_the_kernel_of_each_platform(words, cpu, gpu, tpu):
    for platform, kernel in {"cpu": cpu, "gpu": gpu, "tpu": tpu}.items():
        config = resolved(words, platform)
        assert config.attention == kernel, platform
        assert resolve(config, device_count=1, platform=platform) == config


@pytest.mark.parametrize(
    ("words", "takes"),
    [
        ("head_dim=128", [A100, H200, B200]),
        ("head_dim=256", [H200]),
        ("head_dim=264", []),
        (f"{MLA}128", [H200, B200]),
        (f"{MLA}64", [A100, H200, B200]),
        (f"{MLA}120", [H200]),
        ("attn_logits_soft_cap=30", []),
    ],
)
def test_the_widths_of_each_gpu(words, takes):
    """attention=autoselected selects the kernel only for widths that every GPU supports, because the others were never
    tested on a GPU."""
    for capability in (A100, H200, B200):
        config = resolved(words, "gpu", capability=capability)
        assert config.attention == ("cudnn_flash_jax" if A100 in takes else "blockwise"), capability
        said = why_no_kernel(config, {}, "gpu", capability)
        assert ("attention=flash uses it anyway" in said) == (capability in takes and A100 not in takes), capability
        with contextlib.nullcontext() if capability in takes else pytest.raises(UserError, match="does not support"):
            assert resolved(f"{words} attention=flash", "gpu", capability=capability).attention == "cudnn_flash_jax"


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        (TENSOR, "splash"),
        (f"{TENSOR} {KV_HEADS_WHOLE}", "blockwise"),
        (f"ici_tensor_parallelism=1 {KV_HEADS_WHOLE}", "splash"),
        (f"{TENSOR} {SPLIT_ROWS}", "blockwise"),
    ],
)
def test_a_kernel_needs_whole_rows_and_heads_with_their_kv_heads(words, kernel):
    assert resolved(words, "tpu", devices=2).attention == kernel


@pytest.mark.parametrize(
    ("words", "platform", "line"),
    [
        ("attention=splash", "cpu", "attention=splash: splash does not support the platform cpu (only tpu); "
         "choose attention=autoselected or blockwise"),
        ("attention=cudnn_flash_jax", "tpu", "cudnn_flash_jax does not support the platform tpu (only gpu)"),
        (f"attention=splash {DROPOUT}", "tpu", "splash does not support attention_dropout_rate=0.1;"),
        (f"attention=flash {DROPOUT}", "tpu", "attention=flash: on tpu this is splash, which does not support "
         "attention_dropout_rate=0.1; choose attention=autoselected or blockwise"),
        ("attention=flash max_target_length=200", "tpu", "max_target_length=200 (only multiples of 128)"),
        ("attention=flash attn_logits_soft_cap=30 dtype=float32 head_dim=36 max_target_length=129", "gpu",
         "on gpu this is cudnn_flash_jax, which does not support attn_logits_soft_cap=30, "
         "dtype=float32 (only bfloat16), max_target_length=129 (only multiples of 2), "
         "head_dim=36 (only multiples of 8);"),
        ("attention=cudnn_flash_jax head_dim=136", "gpu", "head_dim=136 (at most 128)"),
    ],
)  # fmt: skip
def test_a_kernel_that_does_not_serve_is_refused_by_name(words, platform, line):
    (found,) = mistakes(words, platform)
    assert line in found


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (f"{TENSOR} {KV_HEADS_WHOLE}", "different rules of activation_heads (tensor) and activation_kv_heads (none)"),
        (f"{TENSOR} {SPLIT_ROWS}", "sharded rows (rule of activation_q_length: tensor)"),
    ],
)
def test_a_mesh_that_does_not_serve_is_refused_by_its_rules(words, line):
    (found,) = mistakes(f"attention=flash {words}", "tpu", devices=2)
    assert line in found


def test_the_kernel_is_told_with_the_other_mistakes_of_the_stage():
    words = f"attention=flash {DROPOUT} {KV_HEADS_WHOLE}"
    lines = mistakes(f"{words} ici_fsdp_parallelism=3", "tpu", devices=2)
    assert [line.partition(":")[0].partition(",")[0] for line in lines] == [
        "fsdp 3",
        "attention=flash",
    ]
    lines = mistakes(f"{words} base_emb_dim=193", "tpu", devices=2)
    assert [line.partition("=")[0] for line in lines] == ["base_emb_dim", "attention"]


@pytest.mark.parametrize(
    ("declared", "words", "found"),
    [("segments", "", ["packed documents"]), ("window", WINDOW, ["sliding_window_size=100"]), ("window", "", [])],
)
def test_a_kernel_without_segments_or_windows_is_not_taken(declared, words, found):
    kernel = dataclasses.replace(KERNELS["splash"], **{declared: False})
    assert unsupported(kernel, resolved(words, "tpu"), {}, "tpu") == found
