"""`python -m trainer.train` as a user runs it."""

import gzip
import importlib
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest
import yaml
from again import sharing_programs
from compiler import xla_flags
from megatron_files import write_indexed
from sample_data import document, write_corpus, write_records, write_tfds
from support import TINY, arguments, pinned

from trainer.aot.dump import given_folder
from trainer.chat.encoder import chat_encoder
from trainer.chat.pairs import pair_encoder
from trainer.config.capabilities.chat_keys import SFT_DEFAULTS
from trainer.config.capabilities.context_keys import token_order
from trainer.config.capabilities.decoding_keys import SERVING
from trainer.config.capabilities.optimizers import KEYS as OF_OPTIMIZERS
from trainer.config.capabilities.optimizers import TRAITS
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS
from trainer.config.capabilities.rl_keys import RL_DEFAULTS
from trainer.config.dump import PROCESSES, SUPERVISION
from trainer.config.load import load
from trainer.config.resolve import resolve as resolve_config
from trainer.config.schema import schema
from trainer.data.dataset import open_dataset
from trainer.data.tokenizer import ByteTokenizer
from trainer.evaluation.in_run import RunTasks
from trainer.observe.profiler import Profiler
from trainer.rl.prompts import open_prompts
from trainer.rl.room import check_rows
from trainer.train import main
from trainer.training.build import build

SOURCES = Path(__file__).parents[2] / "src/trainer/config"
STEP_FIELDS = {
    "step",
    "loss",
    "lm_loss",
    "grad_norm",
    "skipped",
    "learning_rate",
    "tokens",
    "tokens_seen",
    "step_time",
    "tokens_per_second",
    "data_wait",
}
MAXTEXT_LINE = re.compile(
    r"^completed step: \d+, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, Tokens/s/device: \d+\.\d{3}, "
    r"total_weights: \d+, loss: \d+\.\d{3}, lm_loss: \d+\.\d{3}, perplexity: \d+\.\d{3}(, |$)"
)
# A real run on text, small enough for the test suite. CI trains on Python's sources with the README's first command.
TEXT = (
    TINY
    | pinned("nnx")
    | {
        "dataset_type": "grain",
        "grain_file_type": "jsonl",
        "held_out_share": 0.2,
        "vocab_size": 512,
        "max_target_length": 64,
        "steps": 12,
        "eval_interval": 6,
        "eval_steps": 2,
        "learning_rate": 1e-2,
        "enable_checkpointing": True,
    }
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Returns the keys for a text, made of sources of this project, and for the folder of its prepared data."""
    folder = tmp_path_factory.mktemp("corpus")
    # The number of documents is large enough that some are held out, however the sources change.
    parts = [part for source in sorted(SOURCES.glob("*.py")) for part in source.read_text().split("\n\n\n")]
    write_records(folder / "sources.jsonl", "jsonl", [{"text": part} for part in parts])
    return {"grain_train_files": folder / "sources.jsonl", "data_cache_directory": folder / "cache"}


def run_module(*args, cwd, devices=1, **environment):
    env = os.environ | {"XLA_FLAGS": xla_flags(devices)} | environment
    command = [sys.executable, "-m", "trainer.train", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def rows_of(run_dir: Path) -> tuple[list[dict], list[dict]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row]


def steps_of_profile(run_dir: Path) -> list[int]:
    """Returns the steps in the run's only trace, which must have a compressed memory profile."""
    (place,) = (run_dir / "tensorboard" / "plugins" / "profile").iterdir()
    assert gzip.decompress((place / "memory.prof").read_bytes())
    (trace,) = place.glob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(trace)).planes for line in plane.lines]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a jaxlib 0.12 warning
        stats = [dict(event.stats) for line in lines for event in line.events if event.name == "train"]
    return sorted(each["step_num"] for each in stats)


def test_a_run_on_text_from_any_folder_without_a_yml(tmp_path, corpus, monkeypatch, capsys):
    found = jax.devices()[:1]
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(jax, "devices", lambda: found)
        main([f"{k}={v}" for k, v in (TEXT | corpus).items()])
    printed = capsys.readouterr().out
    assert "run-0001" in printed
    run_dir = tmp_path / "runs" / "run-0001"

    steps, evaluations = rows_of(run_dir)
    assert [row["step"] for row in steps] == list(range(12))
    assert all(set(row) == STEP_FIELDS for row in steps)
    assert all(row["loss"] == row["lm_loss"] for row in steps)
    # The last token of a document has no target, and the last row of the text is only partly filled.
    fewest, *others = sorted(row["tokens"] for row in steps)
    assert fewest > 3 * 60
    assert all(4 * 60 < tokens <= 4 * 64 for tokens in others)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [row["step"] for row in evaluations] == [5, 11]
    for row in evaluations:
        assert math.isclose(row["eval_perplexity"], math.exp(row["eval_loss"]))
        assert 0 < row["eval_bits_per_byte"] < 8

    lines = [line for line in printed.splitlines() if line.startswith("completed step")]
    assert len(lines) == 12
    assert all(MAXTEXT_LINE.match(line) for line in lines)
    assert "continues 'def '" in printed
    assert "bits per byte" in printed
    assert "training a BPE" in printed
    (sample,) = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
    assert (sample["step"], sample["prompt"]) == (12, "def ")
    assert sample["text"].startswith("def ")
    page = (run_dir / "report.html").read_text()
    assert "<p>After 12 updates:</p><pre><b>def </b>" in page
    assert re.search(r"<td>steps</td><td>12</td><td>\d+</td><td>command line</td>", page)

    # The last checkpoint has sidecar metadata beside its arrays.
    beside = run_dir / "checkpoints" / "12" / "run"
    assert (beside / "config.yml").read_text() == (run_dir / "config.yml").read_text()
    assert json.loads((beside / "tokenizer" / "tokenizer.json").read_text())["model"]["type"] == "BPE"

    # The resolved configuration is complete: without changes, it runs again on the prepared data, with the same losses.
    resolved = yaml.safe_load((run_dir / "config.yml").read_text())
    assert resolved["dtype"] == "float32"
    assert set(schema().keys) - set(resolved) == {"run_name", *PROCESSES, *SUPERVISION}
    # Profiling some steps changes no result. Needs another process: JAX's profiler crashes where libtpu has been
    # loaded.
    profiled = ["profiler=xplane", "skip_first_n_steps_for_profiler=2", "profiler_steps=3"]
    again = run_module(str(run_dir / "config.yml"), *profiled, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert steps_of_profile(tmp_path / "runs" / "run-0002") == [2, 3, 4]
    assert "the profile of 3 steps from step 2 on is in runs/run-0002/tensorboard/plugins/profile/" in again.stdout
    assert "training a BPE" not in again.stdout
    page = (tmp_path / "runs" / "run-0002" / "report.html").read_text()
    assert re.search(r"<td>steps</td><td>12</td><td>\d+</td><td>[^<]*runs/run-0001/config.yml:\d+</td>", page)
    repeated, _ = rows_of(tmp_path / "runs" / "run-0002")
    for name in ("loss", "grad_norm"):  # the same command leads to the same bits
        assert [row[name] for row in repeated] == [row[name] for row in steps]


def test_runs_are_numbered_and_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = arguments("nnx", steps=1, per_device_batch_size=1)
    with sharing_programs():
        main(args)
        main(args)
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["run-0001", "run-0002"]
        before = (tmp_path / "runs/run-0002/metrics.jsonl").read_text()
        main([*args, "run_name=run-0002"])
    assert "its files are kept as metrics-1.jsonl, config-1.yml" in capsys.readouterr().out
    assert (tmp_path / "runs/run-0002/metrics-1.jsonl").read_text() == before
    steps, _ = rows_of(tmp_path / "runs" / "run-0002")
    assert len(steps) == 1


def test_a_mistake_is_told_before_jax_is_loaded_and_leaves_nothing_behind(tmp_path):
    code = (
        "import sys\nfrom trainer.train import main\n"
        "try: main(sys.argv[1:])\nfinally: print('jax' in sys.modules, 'flax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "base.yml", "stps=10", "learning_rate=fast", "remat_policy=ful"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout.split() == ["False", "False"]
    assert "Traceback" not in done.stderr
    for expected in ("stps", "nearest: steps", "learning_rate", "remat_policy", "nearest: full"):
        assert expected in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_the_devices_is_told_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(arguments("nnx", ici_fsdp_parallelism=3, ici_tensor_parallelism=2))
    assert exit_.value.code == 2
    assert "fsdp 3 x tensor 2 = 6" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_fills_the_row_is_refused_before_training(tmp_path, corpus, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = TEXT | corpus | {"prompt": "def a_function_of_many(arguments, and_more, and_another): return None" * 3}
    with pytest.raises(SystemExit) as exit_:
        main([f"{k}={v}" for k, v in settings.items()])
    assert exit_.value.code == 2
    assert "prompt" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


class Recording:
    """A configuration that records which keys are read."""

    def __init__(self, config, seen):
        self.__dict__.update(_config=config, _seen=seen)

    def __getattr__(self, name):
        if name in self._config:
            self._seen.add(name)
        return getattr(self._config, name)

    def __getitem__(self, name):
        self._seen.add(name)
        return self._config[name]

    def __iter__(self):
        return iter(self._config)


# Keys that are read only before a run begins.
READ_BY_LOADING = {
    "model_name": "chooses a preset while the configuration is loaded",
    "global_parameter_scale": "applied while the configuration is loaded",
    "override_model_config": "needless, and answered with a warning",
    "lora_restore_path": "read where parameters are loaded",
    "allow_split_physical_axes": "read where the mesh is made of other devices than a CPU's",
    "compile_topology": "read by trainer.train_compile and trainer.shardings",
    "compile_topology_num_slices": "read by trainer.train_compile and trainer.shardings",
    "compile_report_file": "read by trainer.train_compile",
    "num_batches": "gives steps while the configuration is resolved",
    "use_sft": "chooses between trainer.train and trainer.sft",
    "teacher_path": "read where the teacher's keys and weights are read",
    "save_teacher_logits": "read by trainer.distill",
    "distill_rollouts_share": "read by the rounds of trainer.distill",
    **dict.fromkeys(
        (
            *("reward_functions", "reward_num_workers", "reward_worker_timeout_seconds"),
            *("rollout_micro_batch_size", "rl_num_iterations"),
        ),
        "read by the rollouts of trainer.grpo",
    ),
    **dict.fromkeys(set(OF_OPTIMIZERS) - set(TRAITS["adamw"].reads), "read by another optimizer"),
    **dict.fromkeys(SERVING, "read by trainer.serve"),
    **dict.fromkeys(SUPERVISION, "read by the process that supervises this one"),
    **dict.fromkeys(PROCESSES, "read where processes find each other, before there is a run"),
}


def other_sources(folder: Path) -> list[list[str]]:
    """Returns command lines for the other kinds of data, and writes the files that they name."""
    import datasets

    write_tfds(folder / "tfds")
    write_corpus(folder / "jsonl", "jsonl")
    write_indexed(folder / "mmap", [[[i + 1] * 9] for i in range(50)])
    rows = [{"text": document(i)} for i in range(9)]
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name in ("train", "test")}).save_to_disk(
        folder / "hf"
    )
    shared = ["eval_interval=1", "tokenizer_type=bytes", f"data_cache_directory={folder / 'cache'}"]
    kinds = (
        ["tfds", f"dataset_path={folder}/tfds", "dataset_name=tiny/made", "eval_dataset_name=tiny/made:1.2.3"],
        ["grain", "grain_file_type=jsonl", f"grain_train_files={folder}/jsonl/*", "data_pipeline=streaming"],
        ["grain", "grain_file_type=mmap_npy", f"grain_train_files={folder}/mmap", "mmap_npy_split=4,1"],
        ["hf", f"hf_path={folder}/hf", "hf_eval_split=test"],
    )
    return [[f"dataset_type={kind}", *words, *shared, "held_out_share=0.2"] for kind, *words in kinds]


def test_every_key_is_read(tmp_path, monkeypatch, corpus):
    monkeypatch.chdir(tmp_path)
    seen: set[str] = set()
    module = importlib.import_module("trainer.training.build")
    resolve = module.resolve
    monkeypatch.setattr(module, "resolve", lambda *args, **kwargs: Recording(resolve(*args, **kwargs), seen))
    for user in ("trainer.train", "trainer.training.loop"):
        monkeypatch.setattr(f"{user}.to_yaml", lambda config: "")  # writing all keys does not count as reading them
    common = TEXT | pinned("nnx") | {"steps": 1, "per_device_batch_size": 1, "eval_interval": 1}
    common |= corpus | {"lr_schedule_type": "wsd"}
    common |= {"attention_type": "local_sliding", "sliding_window_size": 8, "use_qk_clip": True, "mtp_num_layers": 1}
    common |= {"remat_policy": "custom"}
    common |= {"skip_step_on_spikes": True, "ema_decay": 0.9}
    common |= {"decode_sampling_strategy": "composite", "decode_sampling_top_k": 5, "decode_sampling_nucleus_p": 0.9}
    common |= {"use_chunked_prefill": True, "prefill_chunk_size": 2, "enable_prefix_caching": True}
    common |= {"quantize_kvcache": True}
    common |= {"base_num_decoder_layers": 1}
    common |= {"scan_layers": False}  # otherwise the sample copies the configuration, which reads every key
    main([f"{k}={v}" for k, v in common.items()])
    streaming = {"enable_diloco": True, "enable_streaming_diloco": True, "num_diloco_fragments": 3}
    experts = {"decoder_block": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16}
    experts |= {"sparse_matmul": False, "capacity_factor": 1.0, "router_z_loss_weight": 0.1}
    gpt3 = {"decoder_block": "gpt3", "base_num_kv_heads": 4, "trainable_position_size": 16, "fused_qkv": True}
    latent = {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "num_experts": 4}
    latent |= {"base_moe_mlp_dim": 8, "shared_experts": 1, "n_routing_groups": 2, "topk_routing_group": 1}
    latent |= {"routed_score_func": "sigmoid", "routed_bias": True, "routed_bias_update_rate": 0.01}
    alternating = {"decoder_block": "gemma2", "sliding_window_size": 8, "sliding_window_pattern": 2}
    alternating |= {"use_post_attn_norm": True, "use_post_ffw_norm": True}
    quantized = {"quantization": "int8", "weight_sparsity_n": 2, "weight_sparsity_m": 4}
    stored = {"checkpoint_is_quantized": True, "quantization": "int8", "trainable_parameters_mask": "[embedding,norm]"}
    lora = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 2.0, "lora_weight_qtype": "nf4", "lora_tile_size": 2}
    lora |= {"decoder_block": "smollm3", "nope_layer_interval": 2}
    pairs = {"use_dpo": True, "packing": False, "train_data_columns": "[a,b]", "eval_data_columns": "[a,b]"}
    rounds = {"use_grpo": True, "reward_functions": "[m:f]", "decode_sampling_strategy": "weighted"}
    taught = {"use_distill": True, "teacher_overrides": {"vocab_size": 64}, "distill_loss": "jensen_shannon"}
    taught |= {"distill_alpha_schedule": "linear", "distill_alpha_end": 0.9}
    saved = {"use_distill": True, "teacher_overrides": {"vocab_size": 64, "dtype": "float32"}}
    saved |= {"teacher_logits_path": "a", "distill_vocab_size": 64}
    own_texts = {"use_distill": True, "teacher_overrides": {"vocab_size": 64}, "distill_alpha": 1.0}
    own_texts |= {"distill_rollouts": True, "distill_loss": "sampled_reverse_kl", "decode_sampling_temperature": 1.0}
    distilled = (taught, saved, own_texts)
    others = (pairs, pairs | {"dpo_algo": "orpo"}, rounds, *distilled)
    stages = gpt3 | {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 1}
    split = {"ici_context_parallelism": 2, "ici_fsdp_parallelism": 1, "sharding_tolerance": 0.05}
    split |= {"decoder_block": "qwen2", "attention_bias": True}
    shapes = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16, "shared_experts": 1}
    chunked = shapes | {"decoder_block": "llama4", "chunk_attn_window_size": 4, "temperature_tuning": True}
    chunked |= {"nope_layer_interval": 2, "base_num_decoder_layers": 2}
    clamped = shapes | {"decoder_block": "gpt_oss", "mlp_activations_limit": 0.5, "sliding_window_size": 8}
    del clamped["shared_experts"]
    recurrent = {"decoder_block": "qwen3_5", "inhomogeneous_layer_cycle_interval": 2, "base_num_decoder_layers": 2}
    blocks = (experts, latent, alternating | quantized, chunked, clamped, recurrent)
    for keys in (streaming, *blocks, stored, lora, stages, split, *others):
        run = build(load(arguments("nnx", **keys)).config, jax.devices()[: 2 if keys in (stages, split) else 1])
        token_order(run.config)
        state, *rest = run.abstract_args()
        jax.eval_shape(run.computation.update, run.codec.unpack(state), *rest)
    monkeypatch.setattr("trainer.evaluation.in_run.engine_of_run", lambda run, slots: None)  # it reads every key
    run = build(load(arguments("nnx")).config, jax.devices()[:1])
    RunTasks(run, [], None, None, [], print)
    Profiler(Recording(load(["profiler=xplane"]).config, seen), tmp_path, 0, print)
    given_folder(Recording(load([f"dump_hlo_local_dir={tmp_path}"]).config, seen))
    for words in other_sources(tmp_path):
        open_dataset(Recording(load(words).config, seen), lambda line: None)
    of_chats = ["dataset_type=grain", "grain_train_files=x", "tokenizer_type=bytes", "formatting_func_path=json:loads"]
    chats = load(of_chats, defaults=SFT_DEFAULTS)
    chat_encoder(Recording(chats.config, seen), ByteTokenizer(), ("messages",), True)
    of_pairs = load(of_chats, defaults=DPO_DEFAULTS)
    pair_encoder(Recording(of_pairs.config, seen), ByteTokenizer(), ("chosen", "rejected"), True)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a"}\n')
    of_prompts = ["dataset_type=grain", "grain_file_type=jsonl", "grain_train_files=prompts.jsonl", "batch_size=1"]
    prompts = load(
        [*of_prompts, "tokenizer_type=bytes", "held_out_share=0", "eval_interval=-1"],
        defaults=RL_DEFAULTS | {"reward_functions": ["m:f"]},
    )
    for read in (check_rows, lambda config: open_prompts(config, print)):
        read(Recording(resolve_config(prompts.config, device_count=1, platform="cpu"), seen))
    unread = set(schema().keys) - seen - set(READ_BY_LOADING)
    assert not unread
    assert not seen & set(READ_BY_LOADING), "a key that a run reads needs no excuse"
