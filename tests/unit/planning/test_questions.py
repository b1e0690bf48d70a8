"""Command lines of `trainer.plan`: their words, mistakes, and random questions to a randomly answering compiler."""

import contextlib
import json
import random

import jax
import pytest
from support import TINY, arguments

from trainer.aot.chips import CHIPS
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.plan import main, read_words
from trainer.planning import search as searching
from trainer.planning.answer import answer_json, answer_text
from trainer.planning.bounds import Bound
from trainer.planning.journal import Journal
from trainer.planning.progress import run_and_tell
from trainer.planning.search import Search
from trainer.planning.space import default_space

RANDOM = 500
# Values of keys for random questions; some are refused, alone or in combination.
VALUES = {
    "remat_policy": ["none", "full", "minimal_offloaded", "custom"],
    "per_device_batch_size": ["0.25", "1", "2", "3"],
    "num_vocab_tiling": ["1", "-1", "7"],
    "ici_tensor_parallelism": ["1", "2", "4", "-1"],
    "ici_pipeline_parallelism": ["1", "2"],
    "ici_context_parallelism": ["1", "2"],
    "shard_optimizer_over_data": ["true", "false"],
    "optimizer_memory_host_offload": ["true", "false"],
    "parameter_memory_host_offload": ["false"],
    "gradient_accumulation_steps": ["1", "2"],
    "decoder_block": ["llama2", "gemma3", "mistral"],
    "opt_type": ["adamw", "muon"],
    "base_num_query_heads": ["4", "3"],
    "scan_layers": ["true", "false"],
    "enable_diloco": ["true", "false"],
    "trainable_parameters_mask": ["[embedding]", "[norm,mlp]"],
}
NARROW = ("remat_policy", "num_vocab_tiling", "optimizer_memory_host_offload", "parameter_memory_host_offload")


def test_the_words_of_a_plan():
    words = read_words(
        [
            *(
                "mine.yml",
                "steps=3",
                "search.remat_policy=full,none,full",
                "search.lora.lora_rank=8",
                "objective=batch",
            ),
            *(
                "search.trainable_parameters_mask=[a,b],[c]",
                "global_batch_tokens=64",
                "compiles=3",
                "journal=x",
                "--json",
            ),
        ]
    )
    assert words.config == ["mine.yml", "steps=3"]
    lists = {"trainable_parameters_mask": [("a", "b"), ("c",)]}
    assert words.search == {"remat_policy": ["full", "none"], "lora_rank": [8]} | lists
    assert words[2:] == ("batch", 64, 3, "x", True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("search.remat_polici=full", "there is no key remat_polici; nearest: remat_policy"),
        ("search.remat_policy=fast", "search.remat_policy: fast: not one of the choices; allowed: none, full"),
        ("search.per_device_batch_size=one", "search.per_device_batch_size: one: "),
        ("search.per_device_batch_size=1,,2", "give the values to choose from, as in search.per_device_batch_size=A,B"),
        ("search.remat_policy", "give the values to choose from"),
        ("search.trainable_parameters_mask=[a,b", "choose from, as in search.trainable_parameters_mask=[A],[B]"),
        ("search.steps=-5", "search.steps: -5: out of range"),
        ("search.model_name=llama2-7b", "a plan cannot vary this key; give model_name=VALUE"),
        ("search.logical_axis_rules=[[embed,[]]]", "a plan cannot vary this key"),
        ("objective=speed", "objective=speed: allowed: tokens, batch"),
        ("compiles=0", "nothing would be compiled"),
        (f"compiles={'9' * 5000}", "not a whole number"),
        ("compiles=many", "compiles=many: not a whole number"),
        ("global_batch_tokens=-8", "global_batch_tokens=-8: not a whole number"),
    ],
)
def test_mistakes(word, message):
    with pytest.raises(UserError) as error:
        read_words(["base.yml", word])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compile_topology="], "compile_topology is empty"),
        (["compile_topology=cpu-8"], "its memory and speed are unknown"),
        (["compile_topology=v5e-3"], "there is no slice v5e-3"),
        (["compile_topology=cpu-8", "search.steps=3"], "search.steps and steps=20"),
        (
            ["compile_topology=v5e-4", "global_parameter_scale=2", "search.base_moe_mlp_dim=8,16"],
            "search.base_moe_mlp_dim and global_parameter_scale: give one of them",
        ),
        (["compile_topology=cpu-8", "journal=."], "the journal .: Is a directory; give another"),
    ],
)
def test_mistakes_end_with_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([*arguments("nnx"), *words])
    assert message in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [] or message.startswith("its memory and speed")


class Answers:
    """A compiler with random answers, and bounds that sometimes exclude a point."""

    def __init__(self, draw):
        self.draw = draw

    def of(self, config):
        return Bound(0, self.draw.choice([0, 0, 0, 2**60]), self.draw.choice([0.0, 1e-9, 1e9]))

    def __call__(self, config):
        draw, hbm = self.draw, CHIPS["v5e"].usable
        row = {"wall_seconds": draw.choice([0.0, 90.5]), "memory": 0, "reason": "", "report": {}}
        row["again"] = draw.random() < 0.5
        outcome = draw.choice(["fits", "fits", "does not fit", "failed"])
        if outcome == "failed":
            return row | {"outcome": outcome, "reason": "the compiler was ended by SIGKILL"}
        names = ("flops", "hbm_bytes_accessed", "network_bytes", "argument_bytes", "host_bytes")
        report = {name: draw.choice([0, 1e3, 1e15]) for name in names} | {"mesh": {}, "hbm_bytes": hbm}
        report["peak_bytes"] = draw.randrange(1, hbm) if outcome == "fits" else draw.randrange(hbm, 9 * hbm)
        seconds, parts = draw.choice([1e-6, 1.0, 1e6]), ["compute", "memory", "network", "host"]
        estimate = {"scheduled_seconds": seconds, "bound": draw.choice(parts), "lower_bound": draw.random() < 0.2}
        return row | {"outcome": outcome, "report": report | {"estimate": draw.choice([None, estimate, estimate])}}


def asks(seed, folder, monkeypatch):
    draw = random.Random(seed)
    answers = Answers(draw)
    monkeypatch.setattr(searching, "Bounds", lambda devices: answers)
    devices, slices = jax.devices()[: draw.choice([1, 2, 4])], 1
    keys = draw.sample(sorted(VALUES), 3)
    words = [f"{key}={draw.choice(VALUES[key])}" for key in keys[:1]]
    searched = {*keys[1:], *(key for key in NARROW if key not in keys)}
    words += [f"search.{key}={','.join(draw.sample(VALUES[key], min(2, len(VALUES[key]))))}" for key in searched]
    one = (f"ici_{axis}_parallelism" for axis in ("pipeline", "context"))
    words += [f"{key}=1" for key in one if key not in keys]
    words += [f"objective={draw.choice(['tokens', 'batch'])}", f"compiles={draw.choice([1, 3, 9])}"]
    words += [f"global_batch_tokens={draw.choice([64, 96, 100])}"] if draw.random() < 0.3 else []
    asked = read_words([*(word for word in arguments("nnx") if word.partition("=")[0] not in VALUES), *words])
    loaded = load(asked.config)
    fixed = [key for key in loaded.changed if key not in TINY or key in VALUES]
    space = default_space(loaded.config, len(devices), slices, fixed, asked.search, asked.global_batch_tokens)
    options = {"objective": asked.objective, "limit": asked.compiles, "chip": CHIPS["v5e"]}
    search = Search(loaded.config, space, devices, Journal(folder / f"{seed}.jsonl"), answers, **options)
    run_and_tell(search, lambda line: None)
    text = answer_text(search, space, asked.config)
    answer = json.loads(json.dumps(answer_json(search, space, asked.config)))
    assert search.counts.left >= 0
    assert (answer["best"] is None) == ("trainer.train base.yml" not in text)
    return search.counts.compiled


def test_random_questions(tmp_path, monkeypatch):
    assert ask_many(range(10), tmp_path, monkeypatch) > 3


@pytest.mark.rest(covered_by="test_random_questions")
def test_more_random_questions(tmp_path, monkeypatch):
    assert ask_many(range(10, RANDOM), tmp_path, monkeypatch) > 200


def ask_many(seeds, folder, monkeypatch):
    """Returns how many questions led to a compilation. The others end with a UserError."""
    compiled = 0
    for seed in seeds:
        with contextlib.suppress(UserError):
            compiled += asks(seed, folder, monkeypatch) > 0
    return compiled
