"""Suggestions for a step that does not fit."""

import pytest
from support import tiny_config

from trainer.aot.suggest import suggest
from trainer.config.keys import Config
from trainer.config.resolve import resolve

STATE = ["optimizer_memory_host_offload=true", "parameter_memory_host_offload=true", "shard_optimizer_over_data=true"]
TIGHT = {"needed": 20, "available": 16, "arguments": 5}


def settings(config, check=None, **sizes):
    return [suggestion.settings for suggestion in suggest(config, **(TIGHT | sizes), check=check)]


def on_eight(values):
    return resolve(values, device_count=8, platform="cpu")


def test_nothing_where_it_fits():
    assert settings(tiny_config("nnx"), needed=16) == []


def test_the_cheapest_come_first():
    config = tiny_config("nnx", devices=8, scan_layers=False, ici_data_parallelism=2, ici_fsdp_parallelism=4)
    assert settings(config, on_eight) == [
        "scan_layers=true",
        "attention=flash",
        "num_vocab_tiling=8",
        "remat_policy=minimal_with_context",
        "remat_policy=save_dot_with_context_except_mlp",
        "remat_policy=full",
        "remat_policy=minimal_offloaded",
        "remat_policy=custom decoder_layer_input=offload",
        *STATE,
        "ici_data_parallelism=1 ici_fsdp_parallelism=8",
        "per_device_batch_size=2 gradient_accumulation_steps=2",
        "per_device_batch_size=2",
        "mu_dtype=bfloat16",
        "weight_dtype=bfloat16",
        "max_target_length=8",
    ]
    assert all(suggestion.price for suggestion in suggest(config, **TIGHT))


def test_more_gpus_are_more_hosts():
    config = tiny_config("nnx", compile_topology="h100-4")
    assert "compile_topology=h100-8 ici_fsdp_parallelism=2" in settings(config)
    config = Config(dict(config.items()) | {"compile_topology": "h100-8", "compile_topology_num_slices": 2})
    assert "compile_topology_num_slices=4 dcn_fsdp_parallelism=2" in settings(config)


@pytest.mark.parametrize("policy", ["full", "qkv_proj_offloaded", "minimal_offloaded"])
def test_only_policies_that_keep_less(policy):
    found = settings(tiny_config("nnx", remat_policy=policy))
    assert [line for line in found if "remat_policy" in line] == ["remat_policy=custom decoder_layer_input=offload"]


def test_a_custom_policy_is_read():
    config = tiny_config("nnx", remat_policy="custom", context="device", decoder_layer_input="offload")
    assert [line for line in settings(config) if "remat_policy" in line] == ["remat_policy=full"]
    config = tiny_config("nnx", remat_policy="custom", mlpwi_0="device", query_proj="offload")
    assert "remat_policy=custom decoder_layer_input=offload" in settings(config)


def test_tiles_of_the_loss_where_they_are_worth_their_gradient():
    for keys, suggested in (({}, True), ({"num_vocab_tiling": 2}, False)):
        assert ("num_vocab_tiling=8" in settings(tiny_config("nnx", **keys))) == suggested
    assert not [it for it in settings(tiny_config("nnx", base_emb_dim=128)) if "num_vocab_tiling" in it]


def test_arguments_that_do_not_fit_need_a_smaller_state():
    config = tiny_config("nnx", devices=8, ici_data_parallelism=2, ici_fsdp_parallelism=4)
    found = settings(config, on_eight, arguments=17)
    mesh = "ici_data_parallelism=1 ici_fsdp_parallelism=8"
    assert found == [*STATE, mesh, "mu_dtype=bfloat16", "weight_dtype=bfloat16"]


def test_what_configuration_refuses_is_not_suggested():
    config = tiny_config("nnx", devices=8, base_emb_dim=20, ici_data_parallelism=2, ici_fsdp_parallelism=4)
    assert "ici_data_parallelism=1 ici_fsdp_parallelism=8" in settings(config)
    assert not [line for line in settings(config, on_eight) if "ici_" in line]
    rows = tiny_config("nnx", devices=8, per_device_batch_size=1)
    assert not [line for line in settings(rows, on_eight) if "per_device_batch_size" in line]


def test_keys_of_host_memory_zero_1_and_topology_are_used_where_there_are_such():
    from trainer.config.keys import Config

    config = tiny_config("nnx", devices=8, ici_data_parallelism=8, ici_fsdp_parallelism=1)
    keys = {
        "optimizer_memory_host_offload": False,
        "parameter_memory_host_offload": False,
        "shard_optimizer_over_data": False,
        "compile_topology": "v5e-8",
    }
    found = settings(Config(dict(config.items()) | keys), arguments=17)
    assert found[:5] == [
        "optimizer_memory_host_offload=true",
        "parameter_memory_host_offload=true",
        "shard_optimizer_over_data=true",
        "ici_data_parallelism=1 ici_fsdp_parallelism=8",
        "compile_topology=v5e-16 ici_fsdp_parallelism=2",
    ]
    given = Config(dict(config.items()) | dict.fromkeys(keys, True) | {"compile_topology": ""})
    assert settings(given, arguments=17)[0] == "ici_data_parallelism=1 ici_fsdp_parallelism=8"
