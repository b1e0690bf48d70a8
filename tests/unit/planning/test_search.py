"""The search, with a simulated compiler and without one."""

import json
import random
import shlex
from types import SimpleNamespace

import jax
import pytest
from support import arguments

from trainer.aot.chips import CHIPS
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.config.schema import schema
from trainer.config.values import read_text
from trainer.planning import larger
from trainer.planning import search as searching
from trainer.planning.answer import answer_json, answer_text, command, larger_text
from trainer.planning.bounds import Bound
from trainer.planning.journal import Journal
from trainer.planning.search import Search, plan
from trainer.planning.space import BATCH, Dimension, Space, default_space

ON_DEVICES = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 8}
MEMORY = CHIPS["v5e"].usable
KEYS = (
    *("ici_data_parallelism", "ici_fsdp_parallelism", "remat_policy", "num_vocab_tiling"),
    *("optimizer_memory_host_offload", "parameter_memory_host_offload"),
)


class Formula:
    """A simulated compiler that computes its answers from a formula and records what it compiled."""

    def __init__(self, seed=0, fails=()):
        self.compiled, self.seed, self.fails = [], seed, fails

    def figures(self, config):
        """Returns (bytes, seconds): memory grows with rows; all other keys have random effects."""
        rows, others = config["per_device_batch_size"], [config[key] for key in KEYS]
        draw = random.Random(f"{self.seed} {others}")
        return int(MEMORY * draw.uniform(0.1, 0.8) * (1 + rows / 8)), draw.uniform(1, 2) * (0.2 + rows)

    def __call__(self, config):
        self.compiled.append(tuple(config[key] for key in (*KEYS, "per_device_batch_size")))
        row = {"wall_seconds": 1.0, "memory": 10**9, "again": False}
        if len(self.compiled) in self.fails:
            return row | {"outcome": "failed", "reason": "the compiler was ended by SIGSEGV", "report": {}}
        memory, seconds = self.figures(config)
        estimate = {"scheduled_seconds": seconds, "seconds": seconds, "bound": "compute", "lower_bound": False}
        report = {"peak_bytes": memory, "hbm_bytes": MEMORY, "argument_bytes": 1, "host_bytes": 0, "mesh": {}}
        costs = {"flops": 1e9, "hbm_bytes_accessed": 1e9, "network_bytes": 1e6 * seconds**2, "estimate": estimate}
        outcome = "fits" if memory <= MEMORY else "does not fit"
        return row | {"outcome": outcome, "reason": "", "report": report | costs}


@pytest.fixture
def config():
    return load(arguments("nnx", **ON_DEVICES)).config


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "plan.jsonl")


@pytest.fixture(autouse=True)
def no_bounds(monkeypatch):
    """Replaces the bounds, which test_bounds.py tests, by bounds that exclude nothing."""
    monkeypatch.setattr(searching, "Bounds", lambda devices: NoBounds())


class NoBounds:
    def of(self, config):
        return Bound(0, 0, 0.0)


def small(config, rows=(1, 2, 4), policies=("none", "full"), tiles=(1, 2), meshes=((1, 8), (2, 4), (8, 1))):
    search = {"remat_policy": policies, "per_device_batch_size": rows, "num_vocab_tiling": tiles}
    search |= {"optimizer_memory_host_offload": [False], "parameter_memory_host_offload": [False]}
    sharding = [{"ici_data_parallelism": data, "ici_fsdp_parallelism": fsdp} for data, fsdp in meshes]
    dimensions = default_space(config, 8, 1, [], search).dimensions
    return Space((Dimension("sharding", tuple(sharding)), *dimensions[1:]))


def searched(config, space, journal, compiler, **options):
    search = Search(config, space, jax.devices(), journal, compiler, chip=CHIPS["v5e"], **options)
    search.run()
    return search


@pytest.mark.parametrize("seed", range(3))
def test_the_winner_is_that_of_brute_force(config, journal, seed):
    compiler, space = Formula(seed), small(config)
    search = searched(config, space, journal, compiler, limit=1000)
    speeds = [0.0]
    for point in space.points():
        memory, seconds = compiler.figures({**config, **point})
        speeds.append(search.tokens(point) / seconds if memory <= MEMORY else 0.0)
    assert search.best.tokens_per_second == max(speeds) > 0
    assert len(compiler.compiled) + search.counts.too_large == space.size - search.counts.refused
    assert search.counts.left == 0


def test_the_largest_batch(config, journal):
    compiler, space = Formula(), small(config)
    search = searched(config, space, journal, compiler, limit=1000, objective=BATCH)
    fitting = [
        (search.tokens(point), search.tokens(point) / seconds)
        for point in space.points()
        for memory, seconds in [compiler.figures({**config, **point})]
        if memory <= MEMORY
    ]
    assert (search.best.tokens, search.best.tokens_per_second) == max(fitting)


def test_bounds_save_compilations(config, journal, monkeypatch):
    class Exact:
        def of(self, resolved):
            memory, seconds = compiler.figures(resolved)
            return Bound(0, memory, 0.999 * seconds)

    compiler, space = Formula(), small(config)
    alone = searched(config, space, journal, compiler, limit=1000)
    without = len(compiler.compiled)
    monkeypatch.setattr(searching, "Bounds", lambda devices: Exact())
    search = searched(config, space, Journal(journal.path.with_name("other")), compiler, limit=1000)
    assert search.best.changes == alone.best.changes
    assert len(compiler.compiled) - without < without / 2
    assert all(candidate.outcome == "fits" for candidate in search.candidates)
    assert search.counts.worse
    assert search.counts.too_large


def test_what_train_would_refuse_is_not_compiled(config, journal):
    compiler = Formula()
    space = small(config, rows=(0.25, 1), meshes=((1, 8), (8, 1), (2, 2)))
    search = searched(config, space, journal, compiler, limit=1000)
    assert search.counts.refused == 8 + 8  # a four-device mesh; two rows for eight devices
    assert {candidate.changes["per_device_batch_size"] for candidate in search.candidates} == {1}
    assert not any(candidate.changes["ici_fsdp_parallelism"] == 2 for candidate in search.candidates)
    with pytest.raises(UserError, match="no point of the space can be trained"):
        searched(config, small(config, rows=(0.25,)), journal, compiler)


def test_the_limit_and_the_journal(config, journal):
    compiler, space = Formula(), small(config)
    first = searched(config, space, journal, compiler, limit=5)
    assert len(compiler.compiled) == first.counts.compiled == 5
    assert first.counts.left == space.size - 5 - first.counts.too_large
    again = searched(config, space, Journal(journal.path), compiler, limit=5)
    assert len(compiler.compiled) == 5
    assert again.counts.known == 5
    assert [found.changes for found in again.candidates] == [found.changes for found in first.candidates]
    more = searched(config, space, Journal(journal.path), compiler, limit=8)
    assert (more.counts.known, more.counts.compiled) == (5, 3)


def test_an_interrupted_search_has_its_results(config, journal):
    compiler, space = Formula(), small(config)

    def interrupted(config):
        if len(compiler.compiled) == 3:
            raise KeyboardInterrupt
        return compiler(config)

    search = Search(config, space, jax.devices(), journal, interrupted, chip=CHIPS["v5e"])
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert len(search.candidates) == len(Journal(journal.path).rows) == 3
    searched(config, space, Journal(journal.path), compiler, limit=5)
    assert len(set(compiler.compiled)) == len(compiler.compiled) == 5


def test_failures_are_rows(config, journal):
    space = small(config)
    search = searched(config, space, journal, Formula(fails=(1, 3)), limit=6)
    assert search.counts.failed == 2
    assert search.best.outcome == "fits"
    text = answer_text(search, space, ["base.yml"])
    assert text.count("the compiler was ended by SIGSEGV") >= 2


def test_lower_bounds_stand_apart(config, journal):
    compiler = Formula()

    def unknown_loop(config):
        row = compiler(config)
        row |= {"outcome": "fits"}
        row["report"]["estimate"]["lower_bound"] = len(compiler.compiled) == 1
        row["report"]["estimate"]["scheduled_seconds"] /= 100 if len(compiler.compiled) == 1 else 1
        return row

    space = small(config)
    search = searched(config, space, journal, unknown_loop, limit=6)
    assert search.candidates[0].lower_bound
    assert search.best is not search.candidates[0]
    text = answer_text(search, space, ["base.yml"])
    assert "lower bounds: a loop's trip count is unknown" in text
    assert " >" in text


def test_points_that_are_too_large_are_no_lower_bounds(config, journal):
    compiler = Formula()

    def too_large(config):
        row = compiler(config) | {"outcome": "does not fit"}
        row["report"] |= {"peak_bytes": 2 * MEMORY}
        row["report"]["estimate"]["lower_bound"] = True
        return row

    space = small(config)
    text = answer_text(searched(config, space, journal, too_large, limit=2), space, ["base.yml"])
    assert "nothing that was compiled fits; the smallest excess is" in text
    assert "lower bounds" not in text


def test_failures_alone_are_counted_in_words(config, journal):
    space = small(config)
    search = searched(config, space, journal, Formula(fails=(1, 2)), limit=2)
    heading, *lines = answer_text(search, space, ["base.yml"]).splitlines()[-3:]
    assert heading == "2 compilations failed:"
    assert all("the compiler was ended by SIGSEGV" in line for line in lines)


def test_values_of_any_searched_key_are_compared(config, journal):
    space = Space((*small(config).dimensions, Dimension("dtype", ({"dtype": "float32"}, {"dtype": "bfloat16"}))))
    search = searched(config, space, journal, Formula(), limit=1000)
    other = "bfloat16" if search.best.changes["dtype"] == "float32" else "float32"
    assert f"  dtype={other}: " in answer_text(search, space, ["base.yml"])


def test_from_python(journal, monkeypatch):
    monkeypatch.setattr(searching, "Compiler", Formula)
    config = load(arguments("nnx", compile_topology="cpu-8", **ON_DEVICES)).config
    found = plan(config, small(config), journal, limit=6, chip=CHIPS["v5e"])
    fitting = [candidate.tokens_per_second for candidate in found if candidate.outcome == "fits"]
    assert fitting == sorted(fitting, reverse=True)
    outcomes = [candidate.outcome for candidate in found]
    assert outcomes == sorted(outcomes, key=["fits", "does not fit"].index)


def test_every_number_of_the_answer_is_in_the_journal(config, journal):
    space = small(config)
    search = searched(config, space, journal, Formula(), limit=12)
    answer = answer_json(search, space, ["base.yml", "compile_topology=v5e-8", "steps=3"])
    rows = Journal(journal.path).rows
    best = None
    for candidate in answer["candidates"]:
        row = rows[candidate["row"]["key"]]
        assert row == json.loads(json.dumps(candidate["row"]))
        seconds = row["report"]["estimate"]["scheduled_seconds"]
        assert candidate["tokens_per_second"] == candidate["tokens"] / seconds
        if candidate["outcome"] == "fits" and (
            best is None or candidate["tokens_per_second"] > best["tokens_per_second"]
        ):
            best = candidate
    assert best == answer["best"]
    by_policy = {
        policy: max(
            (c for c in answer["candidates"] if c["changes"]["remat_policy"] == policy and c["outcome"] == "fits"),
            key=lambda candidate: candidate["tokens_per_second"],
        )
        for policy in ("none", "full")
    }
    loser = min(by_policy, key=lambda policy: by_policy[policy]["tokens_per_second"])
    reason = next(lost["reason"] for lost in answer["lost"] if lost["settings"] == loser)
    slower = best["tokens_per_second"] / by_policy[loser]["tokens_per_second"]
    sent = [c["row"]["report"]["network_bytes"] / c["tokens"] for c in (by_policy[loser], best)]
    assert reason.startswith(f"{slower:.3f} times the time per token" if slower >= 1.0005 else "equally fast")
    assert (f", {sent[0] / sent[1]:.3g} times the bytes over the network" in reason) == (sent[0] / sent[1] > 1.02)
    words = shlex.split(answer["command"])
    assert words[:5] == ["python", "-m", "trainer.train", "base.yml", "steps=3"]
    given = {name: read_text(schema().keys[name], text) for name, text in (word.split("=") for word in words[4:])}
    assert given.items() <= {"steps": 3, **best["changes"]}.items()


def test_the_command_is_that_of_the_method_and_unsets_variables(config, monkeypatch):
    monkeypatch.setenv("M_REMAT_POLICY", "minimal")
    monkeypatch.setenv("M_STEPS", "7")
    question = SimpleNamespace(config=Config({**config, "use_grpo": True}))
    found = " ".join(command(question, ["my.yml", "lora.lora_rank=8", "name=a b"], {"remat_policy": "full"}))
    assert found == "env -u M_REMAT_POLICY python -m trainer.grpo my.yml lora.lora_rank=8 'name=a b' remat_policy=full"


def test_a_list_is_searched(config, journal):
    masks = [("embedding",), ("norm", "mlp")]
    space = small(config, rows=(1,), tiles=(1,), meshes=((1, 8),))
    space = Space((*space.dimensions, Dimension("mask", tuple({"trainable_parameters_mask": m} for m in masks))))
    search = searched(config, space, journal, Formula())
    assert {found.changes["trainable_parameters_mask"] for found in search.candidates} == set(masks)
    assert "trainable_parameters_mask=[norm,mlp]" in answer_text(search, space, [])


def test_a_failure_that_may_pass_is_tried_again(config, journal):
    compiler, space = Formula(), small(config, rows=(1,), tiles=(1,), meshes=((1, 8),))

    def killed(config):
        return compiler(config) | {"outcome": "failed", "reason": "SIGKILL", "report": {}, "again": True}

    searched(config, space, journal, killed, limit=1)
    search = searched(config, space, Journal(journal.path), compiler)
    assert search.counts.known == 0
    assert {found.outcome for found in search.candidates} == {"fits"}


def test_a_bound_excludes_everything(config, journal, monkeypatch):
    class Large:
        def of(self, resolved):
            return Bound(0, MEMORY + int(resolved.per_device_batch_size * 2**30), 0.0)

    monkeypatch.setattr(searching, "Bounds", lambda devices: Large())
    space = small(config)
    search = searched(config, space, journal, None)
    assert search.counts.too_large == space.size
    assert "nothing fits: every point needs at least 1.00 GiB more" in answer_text(search, space, [])


def test_nothing_fits(config, journal):
    compiler = Formula()

    def too_large(config):
        row = compiler(config)
        peak = row["report"]["peak_bytes"] + 2 * MEMORY
        return row | {"outcome": "does not fit", "report": row["report"] | {"peak_bytes": peak}}

    space = small(config)
    search = searched(config, space, journal, too_large, limit=100)
    assert search.best is None
    least = min(row["report"]["peak_bytes"] - MEMORY for row in journal.rows.values())
    assert f"the smallest excess is {least / 2**30:.2f} GiB" in answer_text(search, space, ["base.yml"])
    assert answer_json(search, space, [])["command"] is None


def test_a_platform_without_a_table_is_refused(config, journal):
    with pytest.raises(UserError, match="its memory and speed are unknown"):
        Search(config, small(config), jax.devices(), journal, Formula())


def test_the_smallest_topology_that_fits(journal, monkeypatch):
    monkeypatch.setattr(larger, "devices_of", lambda topology, slices: jax.devices()[: topology.devices])
    config = load(arguments("nnx", compile_topology="h100-2", ici_fsdp_parallelism=2)).config
    tried, compiler = [], Formula()

    def eight(config):
        tried.append(config.compile_topology)
        row = compiler(config)
        if config.compile_topology == "h100-8":
            return row | {"outcome": "fits"}
        return row | {"outcome": "does not fit", "report": row["report"] | {"peak_bytes": 2**60}}

    search = Search(config, small(config, meshes=((1, 2),)), jax.devices()[:2], journal, eight, chip=CHIPS["v5e"])
    search.run()
    lines = []
    searched_keys = {"ici_tensor_parallelism": [1], "remat_policy": ["none"], "num_vocab_tiling": [-1]}
    found = larger.smallest_that_fits(search, ["ici_fsdp_parallelism", "remat_policy"], searched_keys, lines.append)
    assert (found.topology, found.slices) == ("h100-8", 1)
    assert found.candidate.changes["remat_policy"] == "full"
    assert found.candidate.changes["num_vocab_tiling"] == -1
    assert set(tried) == {"h100-2", "h100-4", "h100-8"}
    assert all("compiling for h100-" in line for line in lines)
    assert "compile_topology=h100-8, with" in larger_text(found)
    assert "fits on none" in larger_text(None)


@pytest.mark.parametrize(
    ("name", "slices", "expected"),
    [
        ("v5e-64", 1, [("v5e-128", 1), ("v5e-256", 1), ("v5e-256", 2), ("v5e-256", 4), ("v5e-256", 8)]),
        ("v5e-256", 1, [("v5e-256", 2), ("v5e-256", 4), ("v5e-256", 8), ("v5e-256", 16), ("v5e-256", 32)]),
        ("h100-4", 1, [("h100-8", 1), ("h100-8", 2), ("h100-8", 4), ("h100-8", 8), ("h100-8", 16)]),
        ("h100-8", 2, [("h100-8", 4), ("h100-8", 8), ("h100-8", 16), ("h100-8", 32), ("h100-8", 64)]),
    ],
)
def test_the_next_larger_topologies(name, slices, expected):
    config = load(arguments("nnx", compile_topology=name, compile_topology_num_slices=slices)).config
    assert [(topology.name, count) for topology, count in larger._larger(config)] == expected
