"""The keys of a pipeline: checks before and after the devices are known, keys without effect, and MaxText's command."""

import re

import pytest

from trainer.config.capabilities.all_keys import step_keys
from trainer.config.capabilities.invariant_keys import split_on
from trainer.config.capabilities.pipeline_keys import (
    KEYS,
    SIZES,
    Pipeline,
    delay,
    microbatches,
    stages,
    unpipelined,
)
from trainer.config.effects import without_effect_here
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.config.maxtext import verdicts
from trainer.config.resolve import resolve
from trainer.config.resume import LAYOUT
from trainer.config.schema import schema
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import TRAIN, convert
from trainer.maxtext.rows import DIFFERS, SAME, by_kind

# Written out, because the defaults of base.yml may change.
BASE = (
    "dataset_type=synthetic vocab_size=4096 max_target_length=128 per_device_batch_size=8 eval_per_device_batch_size=0 "
    "base_emb_dim=192 base_num_query_heads=6 base_num_kv_heads=2 base_mlp_dim=512 base_num_decoder_layers=8 "
    "head_dim=32 gradient_accumulation_steps=1 steps=100 eval_interval=50 "
)
TWO = f"{BASE}ici_pipeline_parallelism=2 "
FOUR = f"{BASE}ici_pipeline_parallelism=2 dcn_pipeline_parallelism=2 dcn_data_parallelism=1 "
MAXTEXT = (
    "python3 -m maxtext.trainers.pre_train.train base.yml dataset_type=synthetic model_name=llama2-7b "
    "ici_pipeline_parallelism=2 dcn_pipeline_parallelism=2 num_layers_per_pipeline_stage=2 num_pipeline_repeats=4 "
    "num_pipeline_microbatches=8 pipeline_parallel_layers=32 pipeline_delay_activation_forwarding=false "
    "pipeline_fsdp_ag_once=true pipeline_fsdp_ag_per_repeat=false scan_pipeline_iterations=true "
    "scan_layers_per_stage=false set_remat_policy_on_pipeline_iterations=true "
    "set_remat_policy_on_layers_per_stage=false"
)
DELAYED = "pipeline_delay_activation_forwarding=true"


def mistakes(words: str, devices: int = 8, **slices) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve(load(words.split()).config, device_count=devices, platform="cpu", **slices)
    return str(caught.value).split("\n  ")[1:]


def test_these_are_the_keys_of_a_pipeline():
    names = {name for name in schema().keys if re.search("pipeline|per_stage", name)}
    assert names == {*KEYS, *SIZES, "data_pipeline"}
    assert set(KEYS) <= set(LAYOUT)  # a run may resume with another pipeline
    assert set(KEYS) <= set(step_keys())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"{TWO}num_pipeline_microbatches=3",
            r"=3 \(command line\).*: must be a multiple of the 2 stages; nearest: 2 or 4$",
        ),
        (f"{TWO}num_pipeline_microbatches=1", "multiple of the 2 stages; nearest: 2$"),
        (f"{FOUR}num_pipeline_microbatches=6", "multiple of the 4 stages; nearest: 4 or 8$"),
        (
            f"{TWO}num_pipeline_microbatches=2 {DELAYED}",
            "2 stages, at least 4, because .* iteration later; nearest: 4$",
        ),
        (f"{FOUR}num_pipeline_microbatches=9 {DELAYED}", "4 stages, at least 8, because .*; nearest: 8 or 12$"),
        (
            f"{BASE}pipeline_fsdp_ag_once=true pipeline_fsdp_ag_per_repeat=true",
            r"pipeline_fsdp_ag_per_repeat=true \(command line\): weights are gathered either once, or once for",
        ),
        (
            f"{TWO}enable_diloco=true enable_streaming_diloco=true",
            r"enable_streaming_diloco=true \(command line\): a fragment is a set of layers, whose .* between stages",
        ),
        (
            f"{TWO}batch_invariant=true",
            r"ici_pipeline_parallelism=2 .*: bitwise equality is not verified for pipelines; use data and fsdp$",
        ),
        (f"{TWO}logical_axis_rules=[[layers,stage]]", "the rule of layers names the mesh axis stage, which separates"),
        (
            f"{TWO}logical_axis_rules=[[activation_mlp,[tensor,stage]],[activation_batch,[data,fsdp]]]",
            "the rule of activation_mlp names the mesh axis stage, which separates",
        ),
        (
            f"{TWO}logical_axis_rules=[[stages,data],[embed,[stage,fsdp]]]",
            r"the rule of stages must be \[stages,stage\] with a pipeline; the rule of embed names .*; leave it out$",
        ),
        (f"{TWO}logical_axis_rules=[[circular_repeats,fsdp]]", r"must be \[circular_repeats,\[\]\] with a pipeline"),
    ],
)
def test_what_is_wrong_without_devices(words, message):
    with pytest.raises(UserError, match=message) as caught:
        load(words.split())
    assert "1 mistake in" in str(caught.value)


def test_sizes_that_follow_from_the_devices_are_checked_with_them():
    words = f"{BASE}ici_pipeline_parallelism=-1 ici_fsdp_parallelism=1 num_pipeline_microbatches=6"
    words += " logical_axis_rules=[[embed,stage]] enable_diloco=true enable_streaming_diloco=true batch_invariant=true"
    sizes = "ici_pipeline_parallelism=4 dcn_pipeline_parallelism=1"
    found = mistakes(words, 4)
    assert len(found) == 4
    delayed = "pipeline_delay_activation_forwarding=false"
    assert found[0] == (
        f"{sizes} num_pipeline_microbatches=6 {delayed}: must be a multiple of the 4 stages; nearest: 4 or 8"
    )
    assert found[1].startswith(f"{sizes} logical_axis_rules: the rule of embed names the mesh axis stage")
    assert found[2].startswith(f"{sizes} enable_streaming_diloco=true: a fragment")
    assert found[3].startswith("batch_invariant=true: stage has 4 devices: bitwise equality")
    assert mistakes(f"{FOUR}dcn_pipeline_parallelism=-1 num_pipeline_microbatches=6", 8, num_slices=2) == [
        f"ici_pipeline_parallelism=2 dcn_pipeline_parallelism=2 num_pipeline_microbatches=6 {delayed}: must be a "
        "multiple of the 4 stages; nearest: 4 or 8"
    ]


@pytest.mark.parametrize(
    ("words", "rows", "parts", "nearest"),
    [
        ("per_device_batch_size=0.5", 4, "2 x fsdp 4 = 8", "1"),
        ("per_device_batch_size=2 num_pipeline_microbatches=8", 16, "8 x fsdp 4 = 32", "4, or {}=4"),
        ("per_device_batch_size=6 num_pipeline_microbatches=8", 48, "8 x fsdp 4 = 32", "4 or 8, or {}=6 or 12"),
        ("per_device_batch_size=0.5 ici_pipeline_parallelism=8", 4, "8", "1"),
        (  # the microbatch of a gradient accumulation, not the whole update
            "per_device_batch_size=1 num_pipeline_microbatches=4 gradient_accumulation_steps=2",
            8,
            "4 x fsdp 4 = 16",
            "2, or {}=2",
        ),
        (  # the rows of an island
            "per_device_batch_size=1 num_pipeline_microbatches=4 enable_diloco=true ici_diloco_parallelism=2",
            8,
            "4 x diloco 2 x fsdp 2 = 16",
            "2, or {}=2",
        ),
        (
            "eval_per_device_batch_size=3 per_device_batch_size=4 num_pipeline_microbatches=4",
            24,
            "4 x fsdp 4 = 16",
            "2 or 4, or {}=2",
        ),
    ],
)
def test_rows_of_a_pipelines_microbatch(words, rows, parts, nearest):
    key, _, size = words.split()[0].partition("=")
    by_rule = " by the rule of activation_batch" if "=" in parts else ""
    assert mistakes(TWO + words) == [
        f"{key}={size}: {size} x 8 devices = {rows} rows, not a whole multiple of {parts.split()[-1]} "
        f"(num_pipeline_microbatches {parts}{by_rule}); nearest: {nearest.format('num_pipeline_microbatches')}"
    ]


@pytest.mark.parametrize(
    "words",
    [
        f"{TWO}per_device_batch_size=4 eval_per_device_batch_size=3 num_pipeline_microbatches=4 eval_interval=0",
        f"{TWO}per_device_batch_size=2 eval_per_device_batch_size=4 num_pipeline_microbatches=4",  # eval in two parts
        f"{TWO}num_pipeline_microbatches=4 {DELAYED}",
        f"{TWO}logical_axis_rules=[[vocab,[stage,tensor]],[activation_batch,[data,fsdp]]]",  # outside of the pipeline
        f"{TWO}enable_diloco=true ici_diloco_parallelism=2",
        f"{TWO}logical_axis_rules=[[activation_batch,[data,fsdp]]] per_device_batch_size=1",
        f"{BASE}num_pipeline_microbatches=3 logical_axis_rules=[[layers,stage]] per_device_batch_size=1",  # one stage
    ],
)
def test_neighbours_of_mistakes_pass(words):
    resolve(load(words.split()).config, device_count=8, platform="cpu")


@pytest.mark.parametrize("delayed", [False, True])
def test_the_nearest_values_fit(delayed):
    """Every number that a message suggests is accepted, and every accepted configuration has whole rows on each
    shard."""
    loaded = load(f"{TWO}eval_interval=0 pipeline_delay_activation_forwarding={delayed}".split()).config

    def wrong(**values) -> str:
        config = loaded.copy_and_resolve_references()
        config.update(values)
        try:
            found = resolve(config, device_count=8, platform="cpu")
        except UserError as error:
            return str(error)
        rows = found.per_device_batch_size * 8
        assert microbatches(found) % stages(found) == 0
        assert microbatches(found) >= delay(found) * stages(found)
        assert rows % (microbatches(found) * 8 // stages(found)) == 0
        return ""

    refused = 0
    for count in (2, 4):
        for given in range(1, 13):
            for size in (0.5, 1.0, 3.0, 4.0, 6.0):
                keys = {
                    "ici_pipeline_parallelism": count,
                    "num_pipeline_microbatches": given,
                    "per_device_batch_size": size,
                }
                if not (text := wrong(**keys)):
                    continue
                refused += 1
                for line in text.split("\n  ")[1:]:
                    sizes, _, counts = line.partition("nearest: ")[2].partition("or num_pipeline_microbatches=")
                    if line.startswith("ici_"):  # its suggestions do not consider the rows
                        assert all(
                            "must be" not in wrong(**keys | {"num_pipeline_microbatches": int(n)})
                            for n in sizes.split(" or ")
                        )
                    elif "must be" not in text:
                        fitting = [("per_device_batch_size", float(n)) for n in re.findall(r"[\d.]+", sizes)]
                        fitting += [("num_pipeline_microbatches", int(n)) for n in re.findall(r"\d+", counts)]
                        assert fitting
                        assert not any(wrong(**keys | {key: value}) for key, value in fitting)
    assert refused > 60


def test_a_mesh_that_does_not_fit_changes_the_stages_too():
    assert mistakes(f"{BASE}ici_pipeline_parallelism=3 ici_fsdp_parallelism=2") == [
        "stage 3 x fsdp 2 = 6, but there are 8 devices; nearest: ici_pipeline_parallelism=4"
    ]


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        *(
            (f"{BASE}{key}={2 if schema().keys[key].kind is int else 'true'}", key, "there is one stage")
            for key in KEYS
        ),
        (f"{TWO}scan_layers_per_stage=true", "scan_layers_per_stage", "num_layers_per_pipeline_stage=1"),
        (
            f"{TWO}remat_policy=none set_remat_policy_on_layers_per_stage=true",
            "set_remat_policy_on_layers_per_stage",
            "remat_policy=none",
        ),
        (
            f"{TWO}remat_policy=none set_remat_policy_on_pipeline_iterations=false",
            "set_remat_policy_on_pipeline_iterations",
            "remat_policy=none",
        ),
    ],
)
def test_keys_without_effect(words, key, reason):
    (warning,) = (line for line in load(words.split()).warnings if line.startswith(f"{key}="))
    assert "has no effect" in warning
    assert reason in warning


@pytest.mark.parametrize("key", ["pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat"])
def test_without_fsdp_there_is_nothing_to_gather(key):
    for sizes, expected in (("ici_fsdp_parallelism=1 ici_data_parallelism=-1", 1), ("ici_fsdp_parallelism=-1", 0)):
        loaded = load(f"{TWO}{sizes} {key}=true".split())
        lines = without_effect_here(
            resolve(loaded.config, device_count=8, platform="cpu"), loaded.changed, loaded.config
        )
        assert sum("no weight of a stage is sharded over fsdp here" in line for line in lines) == expected


@pytest.mark.parametrize("size", ["ici_pipeline_parallelism=2", "ici_fsdp_parallelism=1 ici_pipeline_parallelism=-1"])
def test_with_stages_the_keys_have_an_effect(size):
    words = f"{BASE}{size} num_layers_per_pipeline_stage=2 num_pipeline_repeats=2 num_pipeline_microbatches=4"
    words += " pipeline_parallel_layers=8 pipeline_delay_activation_forwarding=true pipeline_fsdp_ag_per_repeat=true"
    words += " scan_pipeline_iterations=false scan_layers_per_stage=true set_remat_policy_on_layers_per_stage=true"
    words += " set_remat_policy_on_pipeline_iterations=false remat_policy=full"
    assert not load(words.split()).warnings


@pytest.mark.parametrize("delayed", [False, True])
def test_microbatches_follow_from_the_stages(delayed):
    words = f"{FOUR}pipeline_delay_activation_forwarding={delayed}"
    config = resolve(load(words.split()).config, device_count=8, platform="cpu", num_slices=2)
    assert (stages(config), delay(config), microbatches(config)) == (4, 1 + delayed, 4 * (1 + delayed))
    alone = unpipelined(config)
    assert (stages(alone), microbatches(alone)) == (1, 1)
    assert unpipelined(alone) is alone
    assert {key for key in config if config[key] != alone[key]} == set(SIZES)


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize("repeats", [1, 3])
def test_iterations_and_bubble_are_those_of_the_schedule(repeats, late):
    """Computes when each stage works on each microbatch that may enter it."""
    plan = Pipeline(repeats, 4, 2, 8, late)
    begins = {}
    for repeat in range(repeats):
        for batch in range(8):
            for stage in range(4):
                begins[repeat, batch, stage] = repeat * 8 + batch + late * stage
                if (before := (repeat, batch, stage - 1) if stage else (repeat - 1, batch, 3)) in begins:
                    assert begins[repeat, batch, stage] >= begins[before] + late
    assert len({(when, stage) for (_, _, stage), when in begins.items()}) == len(begins)  # one microbatch at a time
    assert plan.iterations == max(begins.values()) + 1
    assert plan.bubble == pytest.approx(1 - len(begins) / (4 * plan.iterations))
    assert plan.sizes == (repeats, 4, 2)


def test_the_command_of_maxtext():
    found = convert(parse([*MAXTEXT.split(), "scan_pipeline_repeats=false", "scan_layers=false"]), TRAIN)
    assert found.runs
    kinds = {name: {row.given.partition("=")[0] for row in rows} for name, rows in by_kind(found.rows).items()}
    assert kinds[DIFFERS] == {"dataset_type", "pipeline_parallel_layers", "scan_layers"}
    assert kinds[SAME] == {*KEYS, *SIZES, "model_name"} - {"pipeline_parallel_layers"}
    assert kinds[verdicts.NEEDLESS] == {"scan_pipeline_repeats"}
    assert found.words[4:] == [*MAXTEXT.split()[4:], "scan_layers=false"]


def test_batch_invariant_names_what_is_split():
    stage, tensor = split_on(Config({"batch_invariant": True}), {"data": 2, "stage": 2, "tensor": 2})
    said = "stage has 2 devices: bitwise equality is not verified for pipelines; use data and fsdp"
    assert stage == f"batch_invariant=true: {said}"
    assert tensor.startswith("batch_invariant=true: tensor has 2 devices: each device must have whole rows")
