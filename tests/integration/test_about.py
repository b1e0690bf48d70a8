"""The tokenizer, generation and config.json metadata of a model folder, through training, quantization and exports."""

import contextlib
import io
import json
import shutil

import pytest
from checkpoint_cases import FAMILIES, config_of, hf_tensors, random_params, write_hf
from run_cases import command
from support import pinned

from trainer import export, quantize, sft
from trainer.checkpoint.manager import newest
from trainer.data.tokenizer import train_bpe

pytestmark = pytest.mark.usefixtures("equal_programs")
NAMES = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "padding_side": "left", "model_max_length": 8192}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
GENERATION = {"eos_token_id": [1, 0], "temperature": 0.6, "do_sample": True}
KEYS = pinned("nnx") | {
    "dataset_type": "grain",
    "grain_file_type": "jsonl",
    "grain_train_files": "chats.jsonl",
    "steps": 2,
}
KEYS |= {"per_device_batch_size": 2, "opt_type": "sgd"}
KEYS |= {"train_data_columns": "messages", "enable_checkpointing": True, "enable_tensorboard": False}
KEYS |= {"load_parameters_path": "base", "run_name": "r", "eval_interval": -1, "checkpoint_period": 1, "prompt": ""}
KEYS |= {"max_target_length": 64, "max_num_checkpoints_to_keep": "none", "data_cache_directory": "cache"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face model folder whose chat template ends turns with a token that is not an end-of-text token yet."""
    folder = tmp_path_factory.mktemp("about")
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"], vocab_size=300)
    said = {"eos_token_id": 1, "max_position_embeddings": 8192}
    base = write_hf(folder / "base", config, hf_tensors(random_params(config)), **said)
    bpe = train_bpe(["some text"], 260)
    bpe._inner.add_special_tokens(["<|turn|>"])
    (base / "tokenizer.json").write_text(bpe._inner.to_str())
    (base / "tokenizer_config.json").write_text(json.dumps(NAMES | {"chat_template": TEMPLATE}))
    (base / "generation_config.json").write_text(json.dumps(GENERATION))
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 8)
    return folder


def files_of(folder):
    """Returns tokenizer_config.json, generation_config.json and the token and length fields of config.json."""
    named = [json.loads((folder / name).read_text()) for name in ("tokenizer_config.json", "generation_config.json")]
    found = folder / "config.json"
    fields = json.loads(found.read_text()) if found.is_file() else json.loads((folder / "huggingface.json").read_text())
    return [*named, fields["eos_token_id"], fields["max_position_embeddings"]]


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_says_the_same_after_training_but_for_what_it_was_taught(folder, monkeypatch, lora):
    monkeypatch.chdir(folder)
    adapters = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4, "run_name": "l"} if lora else {}
    code, printed = command(KEYS | adapters, program=sft.main)
    assert code == 0, printed
    turn = json.loads((folder / "base/tokenizer.json").read_text())["added_tokens"][-1]["id"]
    assert f"changed by training: eos_token_id=[1, 0, {turn}] (was [1, 0])" in printed
    run = folder / "runs" / ("l" if lora else "r")
    if not lora:  # a resumed run remembers the base's metadata after the base has moved
        (run / "finished").unlink()
        shutil.rmtree(run / "checkpoints/2")
        shutil.move("base", "moved")
        code, printed = command(KEYS, program=sft.main)
        shutil.move("moved", "base")
        assert code == 0, printed
        assert f"changed by training: eos_token_id=[1, 0, {turn}]" in printed
    wanted = [NAMES | {"chat_template": TEMPLATE}, GENERATION | {"eos_token_id": [1, 0, turn]}, [1, turn], 8192]
    assert files_of(newest(run) / "run/tokenizer") == wanted
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for source, target, form in ((run, "params", "params"), ("params", "hf", "hf")):
            shutil.rmtree(target, ignore_errors=True)
            export.main([str(source), target, f"format={form}"])
            assert files_of(folder / target) == wanted
        shutil.rmtree("int8", ignore_errors=True)
        quantize.main(["params", "int8", "quantization=int8"])
    assert files_of(folder / "int8") == wanted
    assert out.getvalue().count(f"changed by training: eos_token_id=[1, 0, {turn}] (was [1, 0])") == 3
