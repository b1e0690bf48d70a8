"""Stage 2: values to fill in, the mesh, and sizes that it must divide; derived sizes; the dump."""

import pytest

from trainer.config.derived import (
    DCN,
    ICI,
    MESH_AXES,
    eval_batch_rows,
    eval_parts,
    global_batch_rows,
    mesh_axes,
    microbatch_rows,
)
from trainer.config.dump import PROCESSES, SUPERVISION, to_yaml
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.config.schema import schema

# Written out, because the defaults of base.yml may change.
SIZES = """
dataset_type=synthetic vocab_size=4096 max_target_length=128 per_device_batch_size=8 eval_per_device_batch_size=0
base_emb_dim=192 base_num_query_heads=6 base_num_kv_heads=2 base_mlp_dim=512 base_num_decoder_layers=2 head_dim=32
gradient_accumulation_steps=1 steps=100 eval_interval=50
"""


def resolved(words: str = "", devices: int = 1, platform: str = "cpu", slices: int | None = None):
    config = load((SIZES + words).split()).config
    return resolve(config, device_count=devices, platform=platform, num_slices=slices)


def mistakes(words: str, devices: int, slices: int | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolved(words, devices, slices=slices)
    return str(caught.value).split("\n  ")[1:]


@pytest.mark.parametrize(
    ("words", "platform", "key", "value"),
    [
        ("", "cpu", "dtype", "float32"),
        ("", "tpu", "dtype", "bfloat16"),
        ("", "gpu", "dtype", "bfloat16"),
        ("dtype=bfloat16", "cpu", "dtype", "bfloat16"),
        ("", "cpu", "mu_dtype", "float32"),
        ("weight_dtype=bfloat16", "cpu", "mu_dtype", "bfloat16"),
        ("mu_dtype=bfloat16", "cpu", "mu_dtype", "bfloat16"),
        ("max_target_length=1023", "cpu", "attention", "dot_product"),
        ("max_target_length=1024", "cpu", "attention", "blockwise"),
        ("attention=flash", "cpu", "attention", "blockwise"),
        ("steps=-1 learning_rate_schedule_steps=50", "cpu", "steps", 50),
        ("steps=60", "cpu", "learning_rate_schedule_steps", 60),
        ("steps=60 learning_rate_schedule_steps=50", "cpu", "learning_rate_schedule_steps", 50),
        ("per_device_batch_size=4", "cpu", "eval_per_device_batch_size", 4.0),
        ("eval_per_device_batch_size=2", "cpu", "eval_per_device_batch_size", 2.0),
    ],
)
def test_open_values_are_filled_in(words, platform, key, value):
    assert resolved(words, platform=platform)[key] == value


def test_the_result_is_frozen_and_the_input_left_alone():
    config = load(SIZES.split()).config
    frozen = resolve(config, device_count=8, platform="cpu")
    assert config.dtype == "auto"
    assert config.ici_fsdp_parallelism == -1
    with pytest.raises(AttributeError):
        frozen.steps = 3


def test_resolving_twice_changes_nothing():
    once = resolved("", 8)
    assert resolve(once, device_count=8, platform="cpu") == once


@pytest.mark.parametrize(
    ("words", "devices", "slices", "mesh"),
    [
        ("", 1, None, {}),
        ("", 8, None, {"fsdp": 8}),
        ("ici_fsdp_parallelism=4 ici_tensor_parallelism=-1 base_num_kv_heads=6", 8, None, {"fsdp": 4, "tensor": 2}),
        ("ici_data_parallelism=-1 ici_fsdp_parallelism=1", 8, None, {"data": 8}),
        ("ici_data_parallelism=2 ici_fsdp_parallelism=4", 8, None, {"data": 2, "fsdp": 4}),
        ("ici_fsdp_transpose_parallelism=2 ici_tensor_sequence_parallelism=2", 8, None,
         {"fsdp": 2, "fsdp_transpose": 2, "tensor_sequence": 2}),
        ("", 8, 2, {"data": 2, "fsdp": 4}),
        ("enable_diloco=true dcn_data_parallelism=1 dcn_diloco_parallelism=-1", 8, 2, {"diloco": 2, "fsdp": 4}),
        ("dcn_data_parallelism=1 dcn_fsdp_parallelism=-1", 8, 2, {"fsdp": 8}),
        ("dcn_data_parallelism=2", 8, None, {"data": 2, "fsdp": 4}),
        ("dcn_data_parallelism=2 dcn_fsdp_parallelism=2 ici_fsdp_parallelism=1 ici_data_parallelism=-1", 8, None,
         {"data": 4, "fsdp": 2}),
    ],
)  # fmt: skip
def test_the_open_axis_takes_what_is_left(words, devices, slices, mesh):
    config = resolved(words, devices, slices=slices)
    axes = mesh_axes(config)
    assert tuple(axes) == MESH_AXES
    assert {axis: size for axis, size in axes.items() if size > 1} == mesh
    assert -1 not in [config[key] for key in (*ICI.values(), *DCN.values())]
    assert resolve(config, device_count=devices, platform="cpu", num_slices=slices) == config


@pytest.mark.parametrize(
    ("words", "devices", "slices", "line"),
    [
        (
            "ici_data_parallelism=2 ici_fsdp_parallelism=3",
            8,
            None,
            "data 2 x fsdp 3 = 6, but there are 8 devices; nearest: ici_fsdp_parallelism=4",
        ),
        (
            "ici_data_parallelism=3",
            8,
            None,
            "data 3, which does not divide the 8 devices for ici_fsdp_parallelism=-1; "
            "nearest: ici_data_parallelism=4 ici_fsdp_parallelism=2",
        ),
        (
            "ici_fsdp_parallelism=16",
            8,
            None,
            "fsdp 16, but there are 8 devices; nearest: ici_fsdp_parallelism=8",
        ),
        (
            "ici_fsdp_parallelism=2 ici_tensor_sequence_parallelism=2",
            1,
            None,
            "fsdp 2 x tensor_sequence 2 = 4, but there is 1 device; "
            "nearest: ici_fsdp_parallelism=1 ici_tensor_sequence_parallelism=1",
        ),
        (
            "ici_fsdp_parallelism=8",
            8,
            2,
            "fsdp 8, but there are 4 devices in each of 2 slices; nearest: ici_fsdp_parallelism=4",
        ),
        (
            "dcn_data_parallelism=4",
            8,
            2,
            "data 4, but there are 2 slices; nearest: dcn_data_parallelism=2",
        ),
        (
            "dcn_data_parallelism=-1 dcn_fsdp_parallelism=3",
            8,
            2,
            "fsdp 3, which does not divide the 2 slices for dcn_data_parallelism=-1; "
            "nearest: dcn_data_parallelism=1 dcn_fsdp_parallelism=2",
        ),
        (
            "dcn_data_parallelism=3",
            8,
            None,
            "data 3 slices do not divide the 8 devices; nearest: 4 slices",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_shows_the_arithmetic(words, devices, slices, line):
    assert mistakes(words, devices, slices) == [line]


def test_what_is_wrong_within_slices_and_over_them_is_told_at_once():
    assert len(mistakes("ici_fsdp_parallelism=3 dcn_data_parallelism=3", 8, 2)) == 2


@pytest.mark.parametrize(
    ("words", "devices", "line"),
    [
        (
            "base_emb_dim=90",
            4,
            "base_emb_dim=90: fsdp 4 by the rule of embed does not divide it in "
            "token_embedder/embedding [vocab 4096, embed 90]; nearest: 88 or 92",
        ),
        (
            "ici_fsdp_parallelism=1 ici_tensor_parallelism=2 base_num_kv_heads=3",
            2,
            "base_num_kv_heads=3: tensor 2 by the rule of kv_heads and activation_kv_heads does not divide it in "
            "self_attention/key/kernel [layers 2, embed 192, kv_heads 3, kv_head_dim 32]; nearest: 2 or 4",
        ),
        (
            "logical_axis_rules=[[embed,[data,fsdp]]] ici_data_parallelism=2 base_emb_dim=6",
            4,
            "base_emb_dim=6: data 2 x fsdp 2 = 4 by the rule of embed does not divide it in "
            "token_embedder/embedding [vocab 4096, embed 6]; nearest: 4 or 8",
        ),
        (
            "logical_axis_rules=[[layers,fsdp],[embed,[]]]",
            4,
            "base_num_decoder_layers=2: fsdp 4 by the rule of layers does not divide it in "
            "self_attention/query/kernel [layers 2, embed 192, q_heads 6, kv 32]; nearest: 4",
        ),
        (
            "logical_axis_rules=[[activation_length,tensor],[activation_embed,[]],[activation_heads,[]],[activation_kv_heads,[]],"
            "[activation_mlp,[]],[activation_vocab,[]],[kv_heads,[]]] "
            "ici_fsdp_parallelism=1 ici_tensor_parallelism=2 max_target_length=127",
            2,
            "max_target_length=127: tensor 2 by the rule of activation_length does not divide it in "
            "inputs of attention and MLP [activation_batch, activation_length 127, activation_embed 192]; "
            "nearest: 126 or 128",
        ),
        (
            "ici_fsdp_parallelism=1 ici_fsdp_transpose_parallelism=4 base_emb_dim=90 mtp_num_layers=1",
            4,
            "base_emb_dim=90: fsdp_transpose 4 by the rule of mlp does not divide it in the projection of a "
            "multi-token prediction module [embed 180, mlp 90]; nearest: 88 or 92",
        ),
    ],
)
def test_a_length_that_the_mesh_does_not_divide(words, devices, line):
    assert mistakes(words, devices) == [line]


@pytest.mark.parametrize(
    ("words", "devices", "line"),
    [
        (
            "per_device_batch_size=0.3",
            8,
            "per_device_batch_size=0.3: 0.3 x 8 devices = 2.4 rows, not a whole multiple of 8 "
            "(fsdp 8 by the rule of activation_batch); nearest: 1",
        ),
        ("per_device_batch_size=1.5", 2, "1.5 x 2 devices = 3 rows, not a whole multiple of 2|nearest: 1 or 2"),
        ("per_device_batch_size=0.01", 1, "0.01 rows|nearest: 1"),
        ("eval_per_device_batch_size=0.5", 2, "eval_per_device_batch_size=0.5: 0.5 x 2|nearest: 1"),
    ],
)
def test_rows_must_be_whole_on_every_part_of_the_mesh(words, devices, line):
    (found,) = mistakes(words, devices)
    assert all(part in found for part in line.split("|"))


def test_without_modules_the_rule_of_mlp_says_nothing_of_the_width():
    resolved("ici_fsdp_parallelism=1 ici_fsdp_transpose_parallelism=4 base_emb_dim=90", 4)


def test_evaluation_rows_do_not_matter_without_evaluation():
    resolved("eval_per_device_batch_size=0.5 eval_interval=-1", 2)


def test_all_mistakes_of_the_stage_are_told_at_once():
    words = (
        "ici_fsdp_parallelism=4 ici_tensor_parallelism=2 base_emb_dim=90 base_num_kv_heads=3 per_device_batch_size=0.3"
    )
    assert [line.partition("=")[0] for line in mistakes(words, 8)] == [
        "base_emb_dim",
        "base_num_kv_heads",
        "per_device_batch_size",
    ]


@pytest.mark.parametrize(
    ("words", "devices", "rows"),
    [
        ("", 1, (8, 8, 8)),
        ("per_device_batch_size=2 gradient_accumulation_steps=4 eval_per_device_batch_size=3", 8, (16, 64, 24)),
        ("per_device_batch_size=0.5 ici_fsdp_parallelism=4 ici_tensor_parallelism=2 base_num_kv_heads=6", 8, (4, 4, 4)),
        ("per_device_batch_size=0.1 ici_fsdp_parallelism=1 ici_tensor_parallelism=30 base_num_query_heads=30 "
         "base_num_kv_heads=30 base_mlp_dim=30 vocab_size=30 base_emb_dim=30", 30, (3, 3, 3)),
    ],
)  # fmt: skip
def test_rows_of_a_batch(words, devices, rows):
    config = resolved(words, devices)
    assert (microbatch_rows(config), global_batch_rows(config), eval_batch_rows(config)) == rows


def test_an_evaluation_reads_the_same_rows_however_an_update_is_split():
    """An evaluation has as many rows as an update, or as many as its own key sets. Its parts are no larger than a
    microbatch, if the rows can be divided evenly."""
    for rows, parts in ((8, 1), (4, 2), (2, 4), (1, 8)):
        config = resolved(f"per_device_batch_size={rows} gradient_accumulation_steps={parts}", 2)
        assert (eval_batch_rows(config), eval_parts(config)) == (16, parts)
        config = resolved(f"per_device_batch_size={rows} eval_per_device_batch_size=4", 2)
        assert (eval_batch_rows(config), eval_parts(config)) == (8, max(1, 4 // rows))
    assert eval_parts(resolved("per_device_batch_size=2 eval_per_device_batch_size=3", 2)) == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        [  # a value of base.yml and a value of a preset
            "model_name=llama2-7b",
            f"base_emb_dim={schema().keys['base_emb_dim'].default}",
            "enable_dropout=true",
        ],
        [
            "prompt=a: 'b'\n\t\"c\" # ü \x7f\u2028",
            "data_cache_directory=123",
            "adamw_mask=[norm,'a,b']",
            "learning_rate=1e-3",
        ],
        [f"prompt={'many words ' * 20}"],
        ["logical_axis_rules=[[embed,[]],[mlp,[fsdp,tensor]]]", "dataset_type=synthetic", "base_output_directory=null"],
    ],
)
@pytest.mark.parametrize("devices", [1, 8])
def test_a_dump_loads_back_to_the_same_configuration(words, devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Uses the axis data, which does not shard any width, because base.yml may set any widths.
    words = ["ici_data_parallelism=-1", "ici_fsdp_parallelism=1", *words]
    config = resolve(load(words).config, device_count=devices, platform="cpu")
    (tmp_path / "config.yml").write_text(to_yaml(config), encoding="utf-8")
    again = load(["config.yml"])
    # One line per key, without run_name and the keys of processes and supervision, and one for base_config.
    assert to_yaml(config).count("\n") == len(config) - len(PROCESSES) - len(SUPERVISION)
    assert resolve(again.config, device_count=devices, platform="cpu") == config
    assert to_yaml(again.config) == to_yaml(config)
    assert again.warnings == []


def test_a_dump_has_no_name_for_the_run_that_repeats_it(tmp_path):
    config = resolved("run_name=first")
    path = tmp_path / "config.yml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert config.run_name == "first"
    assert "run_name" not in path.read_text(encoding="utf-8")
    assert load([str(path)]).config.run_name == ""


@pytest.mark.parametrize(
    ("hardware", "platform"), [("tpu", "tpu"), ("gpu_multiprocess", "gpu"), ("cpu", "cpu"), ("", "gpu")]
)
def test_hardware_is_the_devices(hardware, platform):
    assert resolve(load([f"hardware={hardware}"]).config, device_count=1, platform=platform).hardware == hardware


def test_other_hardware_is_an_error():
    with pytest.raises(UserError, match="hardware=tpu: the devices are cpu; leave it out; JAX_PLATFORMS selects"):
        resolve(load(["hardware=tpu"]).config, device_count=1, platform="cpu")


def test_a_resolved_configuration_equals_one_that_is_made_from_its_keys():
    """JAX uses the configuration as a key when it looks up traces."""
    resolved = resolve(load(["base.yml", "dataset_type=synthetic"]).config, device_count=1, platform="cpu")
    again = Config({**resolved})
    assert (again, hash(again)) == (resolved, hash(resolved))
    assert Config({**resolved, "steps": resolved.steps + 1}) != resolved
