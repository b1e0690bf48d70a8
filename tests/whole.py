"""Which tests a run of the whole suite leaves out, because others cover nearly the same.

`python -m pytest -n 2` leaves them out and says how many, `--tests=rest` runs only them, `--tests=all` runs all. CI
runs all. A run of tests that the command line names leaves nothing out.

Left out are
- cases of the three combinations between the first and the last one. In all five the update has the same text
  (test_five_combinations.py), the initial parameters are equal, and the codec permutes leaves (test_codec.py), so two
  of them represent all from end to end;
- the tests below, each with what covers it in the other runs.
"""

import re

import pytest
from support import ALL_COMBINATIONS

BETWEEN = ALL_COMBINATIONS[1:-1]
# A pattern of names: what still runs.
COVERED = {
    r"integration/test_after_a_flip\.py::test_losses_gradients\S*\[linen": "nnx; one program in test_frozen.py",
    r"integration/test_check_accelerator\.py": "its parts: ops, combinations, checkpoints, the engine",
    r"integration/test_flips\.py": "a run goes on under another combination in test_diloco.py",
    r"integration/test_interrupted\.py::test_killed_at_a_random_moment": "SIGTERM, and a killed save in checkpoint/",
    r"integration/test_diloco\.py::test_an_island_on_each_process": "islands in one process; test_processes.py",
    r"integration/test_context_runs\.py": "layers/test_across.py: arrays that pass as one; test_processes.py",
    r"integration/test_multi_token\.py": "test_diloco.py; evaluation and dropout in training/test_multi_token.py",
    r"integration/test_lora\.py::test_merged_and_sep": "inference/test_adapters.py; training/test_lora.py",
    r"integration/test_lora\.py::test_a_folder_of_peft": "weights/test_peft.py; a run begins with adapters",
    r"integration/test_start_from_model\.py::test_two_pro": "test_processes.py; one process",
    r"integration/test_sparsity\.py::test_a_run_is_res": "training/test_sparsity.py; test_resume.py",
    r"integration/test_dpo\.py::test_(devices_mic|adapters_have)": "objectives/test_preference.py; test_frozen.py",
    r"integration/test_grpo\.py::test_adapters": "training/test_frozen.py; adapters in generation: inference/",
    r"integration/test_grpo\.py::test_two_processes": "test_processes.py; rounds in one process",
    r"integration/test_generate\.py::test_two_processes": "test_processes.py; generation in one process",
    r"integration/test_generate\.py::test_a_hugging_face_directory_and": "inference/test_goldens.py",
    r"integration/test_five_combinations\.py::test_the_update_is_the_same_program\[(separate|2 islands)": "two more",
    r"integration/test_parity\.py::test_a_fault_in_an_update_is_named\[(ad\w+a|adam_|lion|muon|na|sgd)": "adamw",
    r"integration/test_parity\.py::test_(another_mesh_on|a_fault_in_routing)": "adamw's fault, and sides of a program",
    r"integration/test_parity\.py::test_all_combinations": "test_five_combinations.py; linen/test_wrong_shift.py",
    r"integration/test_pipeline\.py::test_loss\S*\[(tensor|zero|d|four|per|re|seq|two|pat|b)": "accumulation; experts",
    r"integration/test_pipeline\.py::test_quantized\S*\[int8": "fp8",
    r"integration/test_pipeline\.py::test_all_combi\S*-(unrolled|per )": "everything",
    r"integration/test_pipeline\.py::test_what_moves\[(no queue|once)": "a queue; per repeat",
    r"unit/layers/test_pipeline\.py::test_\S*\[(one|no |a layer|delayed, [on]|per repeat, [uo])": "other plans",
    r"integration/test_pipeline_maxtext\.py::test_(same|full)": "test_pipeline.py; layers/test_pipeline.py",
    r"integration/test_pipeline_runs\.py::test_equal_sums": "losses of runs that go on",
    r"integration/test_pipeline_runs\.py::test_stages_on_processes": "stages in one process; test_processes.py",
    r"integration/test_parity\.py::test_a_pipeline_is": "state/test_stages.py; sides of one program",
    r"integration/test_processes\.py::test_\S*\[4": "two processes at first; test_sums.py, test_launch_local.py",
    r"integration/test_train_compile\.py::test_islands_on_two_slices": "test_streaming_diloco.py counts their traffic",
    r"integration/test_train_compile\.py::test_train_takes_the_step": "aot/test_executable.py",
    r"integration/test_train_compile\.py::test_the_step_of_every_train_state": "the same program on CPU devices",
    r"integration/test_quantize\.py::test_what_is_written\S*\[(deepseek|gemma2)": "llama2 and mixtral",
    r"integration/test_quantize\.py::test_hugging_face\S*mixtral": "llama2 and qwen3",
    r"integration/test_resume\.py::test_(unrolled_layers|a_run_on_one|the_same_batch|without)": "8 devices to 1",
    r"integration/test_zero1\.py::test_a_(run_goes_on_from|tpu_gathers)": "what a device holds; collectives on CPU",
    r"integration/test_resume\.py::test_a\w+_that_is_not_finite": "training/test_step.py, training/test_diloco.py",
    r"integration/test_parity_records\.py::test_the_sizes": "a tolerance, which reads the same arrays",
    r"integration/test_parity\.py::test_a_clip_along": "adamw's fault, and a lost tile",
    r"integration/test_zero1\.py::test_it_learns_what_data_parallelism_learns\[linen": "nnx; one program",
    r"unit/aot/test_cost\.py::test_an_unrolled": "loops count as often as they run",
    r"unit/aot/test_executable\.py::test_whatever_runs\S*\[linen": "nnx; a change of linen/ changes the key",
    r"unit/weights/test_maxtext_folders\.py::test_logits\S*\[(de\w+|experts|params|gemma3)_unscanned": "gemma2",
    r"unit/weights/test_new_parameters\.py::test_a_run_starts\S*\[linen": "nnx; initial values are equal",
    r"unit/weights/test_modules\.py::test_maxtext\[False": "scanned layers; test_maxtext.py",
    r"unit/data/test_streams\.py::test_a_share_that_changes\S*\[40": "the smaller share",
    r"unit/inference/test_batch_invariant\.py::test_log\S*\[mixtral-float32": "bfloat16",
    r"unit/inference/test_batch_invariant\.py::test_log\S*\[deepseek-bfl": "float32",
    r"unit/inference/test_batch_invariant\.py::test_log\S*\[(gem|gpt|ll|qwen|lora|unr)": "deepseek, mixtral",
    r"unit/inference/test_batch_invariant\.py::test_several_adapters": "its product; inference/test_adapters.py",
    r"unit/inference/test_host_work\.py::test_a_turn_dispatches": "what an engine compiles in test_controls.py",
    r"unit/inference/test_weights\.py::test_text\S*\[two": "the loop with adapters; models/test_families.py",
    r"unit/inference/test_quantized_cache\.py::test_on_eight": "the same on one device; test_engine.py on eight",
    r"unit/docs/test_extending\.py::test_adapters_for": "adapters of every kind in training/test_lora.py",
    r"unit/training/test_lora\.py::test_the_same_losses\S*\[(exp|mic)": "a mesh",
    r"integration/test_bucket\.py": "the storage of its files, in tests/unit",
    r"integration/test_covering\.py::test_gives\S*\[linen": "nnx; one program in test_five_combinations.py",
    r"integration/test_data\.py::test_a_run_on_files_of_megatron": "data/test_megatron.py",
    r"integration/test_lora\.py::test_(a_run_begins|adapters_of_initial)": "a run that resumes; test_peft.py",
    r"integration/test_parity_records\.py::test_a_record_of_a_started": "records of a first step",
    r"integration/test_serve\.py::test_several_adapters": "inference/test_adapters.py; serving/",
    r"integration/test_quantize\.py::test_calibration_w": "calibration/test_layerwise.py",
    r"integration/test_quantized_training\.py::test_a_run_from": "its step; checkpoints in test_qwix_types.py",
    r"integration/test_grpo\.py::test_with_batch_inv": "inference/test_batch_invariant.py",
    r"integration/test_pipeline_runs\.py::test_a_run_goes_on": "state/test_stages.py, and losses in test_pipeline.py",
    r"integration/test_pipeline\.py::test_an_optimizer_moves": "what moves with AdamW",
    r"unit/products/test_stored\.py::test_(a_tiled_head|generation)": "tiles; generation in test_weights.py",
    r"unit/inference/test_controls\.py::test_(a_warm\S*\[False|with_batch)": "prefixes; test_batch_invariant.py",
    r"unit/inference/test_engine\.py::test_more_requests\S*\[gpt3": "the other kinds; decoding in models/test_gpt3.py",
    r"unit/inference/test_goldens\.py\S*\[(deepseek-v2|mixtral|qwen3-tied)": "deepseek-v3, qwen3-moe; their logits",
    r"unit/inference/test_goldens\.py\S*\[(gemma\]|olmo2|qwen2|smollm3)": "gemma2, olmo3, exaone4; their logits",
    r"unit/models/test_families\.py::test_the_program\S*\[(gemma-|olmo2|smollm3)": "gemma2, olmo3, gemma3",
    r"unit/models/test_families\.py::test_eight_devices\S*\[qwen2": "olmo3; the shardings of biases",
    r"unit/models/test_families\.py::test_eight_devices\S*\[gemma3": "olmo3; the rest of a pattern in test_goldens.py",
    r"unit/models/test_presets\.py::test_the_largest\S*\[(gemma-|gemma2|olmo2|qwen2|smollm3)": "gemma3, olmo3",
    r"unit/layers/test_remat\.py::test_(a_layer_more|every_combination)": "order of memory and FLOPs; one program",
    r"unit/layers/test_remat\.py::test_compiled_mem": "what each policy keeps",
    r"unit/weights/test_peft\.py::test_twenty\S*\[sgd": "adamw",
    r"unit/data/test_megatron\.py::test_no_damage\S*\[[1-9]": "damage 0",
    r"unit/inference/test_batch_invariant\.py::test_without_the_key": "nothing: it tests the tests",
    r"unit/objectives/test_preference\.py::test_neither\S*\[orpo": "dpo",
    r"unit/layers/test_remat\.py::test_on_cpu_offloading\S*\[minimal": "qkv_proj_offloaded",
    r"unit/layers/test_stack\.py::test_neither_recomputing\S*\[(full|minimal)-": "minimal_offloaded",
    r"unit/linen/test_own_block(\.py::test_modules_(of_multi|hold)|_parity)": "the block in a plain stack",
    r"unit/models/test_(deepseek|interleaved)\.py::test_combinations_make": "test_five_combinations.py, with experts",
    r"unit/models/test_deepseek\.py::test_maxtexts_\S*\[(False|true)": "the other layout",
    r"unit/models/test_family\.py::test_it_trains_(by_the_same|and_a_run)": "its losses, by a second implementation",
    r"unit/models/test_goldens\.py::test_logits\S*-blockwise-": "the reference op; ops/test_blockwise.py",
    r"unit/models/test_goldens\.py::test_the_goldens_notice": "nothing: it tests the goldens",
    r"unit/optim/test_groups\.py::test_a_group\S*\[(ad\w+a|adam_|lion|na|sgd)": "adamw and muon",
    r"unit/products/test_stored\.py::test_(a_model_of_int|training_ar|a_checkpoint_has)": "test_qwix_types.py",
    r"unit/products/test_context\.py::test_a_product_uses": "stochastic rounding follows the key and the row",
    r"unit/products/test_stored\.py::test_experts\S*\[(cap|all)": "experts in groups",
    r"unit/products/test_quantized\.py::test_experts_are_mapped\S*\[batch": "sorted rows",
    r"unit/training/test_sparsity\.py::test_fp8_takes": "Qwix's order in products; one program with fp8_full",
    r"unit/products/test_qwix_types\.py::test_(experts|the_step\S*\[False)": "stored experts; the scanned step",
    r"unit/training/test_sparsity\.py::test_(a_mesh|islands)": "masks of one device; other buffers on meshes",
    r"integration/test_qwix_types\.py::test_parity": "test_parity_records.py",
    r"integration/test_qwix_types\.py::test_a_run_resumes": "checkpoints and steps of the types in unit/products/",
    r"unit/training/test_frozen\.py::test_(meshes|the_reports)": "its program; a run that resumes",
    r"integration/test_quantized_t\w+\.py::test_the_program\S*\[(fp8(_e.*|_[gn].*)?|na.*|int4)-": "int8, fp8_full",
    r"integration/test_quantized_training\.py::test_(all_comb|a_run\S*\[linen|islands\S*rounding)": "one program",
    r"integration/test_quantized_training\.py::test_(recomputing|a_tiled|experts_on)": "its product, on a mesh, too",
    r"integration/test_quantized_training\.py::test_(islands\S*experts|accumulation)": "its product, mapped, in parts",
    r"integration/test_quantized_training\.py::test_no_product\S*\[all": "experts by sorted rows",
    r"integration/test_train_compile\.py::test_a_tpu_multiplies": "the products in the jaxpr",
    r"unit/products/test_quantized\.py::test_experts\S*\[(fp8|clipped|per tensor)": "int8, and dense layers",
    r"unit/sharding/test_(default_rules\.py::test_the_inputs\S*\[tensor_s|early_reduction\.py::test_a_tpu_w)": "tensor",
    r"unit/sharding/test_table_gradient\.py::test_a_tpu": "the same count on CPU devices",
    r"unit/state/test_host\.py::test_the_same_bits\S*adafactor": "muon, for which more is offloaded",
    r"unit/training/test_diloco\.py\S*\[everything": "few features; test_experts.py traces more",
    r"unit/training/test_experts\.py::test_the_same_step\S*\[ways[13]": "two other meshes",
    r"unit/training/test_multi_token\.py::test_(one_seed|what_else|the_heads)": "its loss, by a second implementation",
    r"unit/training/test_qk_clip\.py::test_a_hot_head\S*\[linen": "nnx; one program",
    r"unit/training/test_router_bias\.py::test_(islands_have|it_is_equal)": "a step moves it; test_diloco.py",
    r"unit/training/test_sown\.py::test_accumulated\S*\[linen": "nnx; one program",
    r"unit/training/test_step\.py::test_a(ccumulation|_mesh)\S*\[(1-8|4-1|8-1)": "microbatches and tiles, three axes",
    r"unit/training/test_streaming_diloco\.py::test_what_a_sync\S*\[(bfloat16|int8)": "float32; rounded gradients",
}
_COVERED = [re.compile(rf"(tests/)?{pattern}") for pattern in COVERED]


def is_left_out(item: pytest.Item) -> bool:
    """Returns whether a run of the whole suite leaves the test out."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {value if isinstance(value, str) else value.get("combination") for value in values if _names(value)}
    return not names.isdisjoint(BETWEEN) or any(pattern.match(item.nodeid) for pattern in _COVERED)


def _names(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("combination"), str))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tests", choices=("usual", "rest", "all"), default="usual", help="see tests/whole.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        config.option.tests = "all"
    config.option.tests = getattr(config, "workerinput", {}).get("tests", config.option.tests)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Of xdist: a worker leaves out what the first process would."""
    node.workerinput["tests"] = node.config.option.tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.tests == "all":
        return
    stale = [pattern.pattern for pattern in _COVERED if not any(pattern.match(item.nodeid) for item in items)]
    config.stash[_STALE] = stale if BETWEEN else []
    left = [item for item in items if is_left_out(item) is (config.option.tests == "usual")]
    items[:] = [item for item in items if item not in set(left)]
    config.hook.pytest_deselected(items=left)
    config.stash[_LEFT] = len(left)


_LEFT = pytest.StashKey[int]()
_STALE = pytest.StashKey[list[str]]()  # patterns of COVERED that match no test


def pytest_sessionfinish(session: pytest.Session) -> None:
    stash = session.config.stash
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"left": stash.get(_LEFT, 0), "stale": stash.get(_STALE, [])}
    elif stash.get(_STALE, []):
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Of xdist: each worker leaves out the same tests."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_LEFT], node.config.stash[_STALE] = output.get("left", 0), output.get("stale", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_LEFT, 0):
        kind = "others" if config.option.tests == "rest" else "tests that others nearly cover; --tests=rest runs them"
        terminalreporter.write_line(f"left out: {left} {kind}")
    for pattern in config.stash.get(_STALE, []):
        terminalreporter.write_line(f"tests/whole.py: no test has the name {pattern}", red=True)
