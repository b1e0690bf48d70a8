"""The programs accept every command of the README and the docs.

The programs exist, keys and values are allowed, and the mesh fits the devices. Nothing runs here: scripts/run_docs.py
runs the commands, with fewer steps. Links lead to existing files.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from trainer import distill, evaluate, export, generate, inspect, parity, plan, quantize, serve, sft
from trainer.config.capabilities.chat_keys import SFT_DEFAULTS, not_conversations
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS, not_pairs
from trainer.config.capabilities.rl_keys import RL_DEFAULTS, not_prompts
from trainer.config.errors import UserError
from trainer.config.flags import COMBINATIONS
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.config.sides import load_sides
from trainer.config.topologies import Topology, find_topology
from trainer.evaluation.specs import read_specs
from trainer.maxtext.command_line import parse

_SCRIPT = Path(__file__).parents[3] / "scripts" / "documented_commands.py"
_spec = importlib.util.spec_from_file_location("documented_commands", _SCRIPT)
assert _spec
assert _spec.loader
documented = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(documented)
ROOT, PAGES, HEREDOC = documented.ROOT, documented.PAGES, documented.HEREDOC


# Once Linen is removed, the migration pages still mention it.
REMOVED = re.compile(r"enable_nnx=|pure_nnx|linen|bridged") if len(COMBINATIONS) == 1 else None
# scripts/run_docs.py checks that the commands with exit code 2 are refused.
COMMANDS = [
    command
    for command in documented.commands()
    if command.code != 2 and not (REMOVED and REMOVED.search(" ".join(command.words)))
]
pytestmark = pytest.mark.default_combination


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with the files that the pages mention: files that the pages write, and the reader's my.yml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    files = {"my.yml": "base_config: base.yml\n"}
    question = '{"question": "1", "answer": "1"}\n'
    files |= dict.fromkeys(("orders-test.jsonl", "no-table-test.jsonl"), question)  # written by a page's script
    for page in PAGES:
        files |= dict(HEREDOC.findall(page.read_text(encoding="utf-8")))
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


def accept(program, words, variables):
    """Raises UserError if `program` would refuse the words before it builds anything."""
    if Path(program).is_file():  # the page writes this program
        return
    if program == "docs/guides/own_objective.py" and words[0] == "parity":
        program, words = "trainer.parity", words[1:]
    words = [word for word in words if not word.startswith("prepared_path=")]  # the missing folder would set other keys
    if program in ("trainer.train", "trainer.train_compile", "docs/guides/own_objective.py"):
        check(load([word for word in words if not word.startswith("--")], environment=variables).config, variables)
    elif program == "trainer.prepare":
        own = [word for word in words if not word.startswith(("out=", "beam="))]
        check(load(own, environment=variables).config, variables)
    elif program == "trainer.inspect":
        inspect._read_words(words)
    elif program == "trainer.plan":
        load(plan.read_words(words).config, environment=variables)
    elif program == "trainer.sft":
        loaded = load(sft._without_show(words)[0], environment=variables, defaults=SFT_DEFAULTS)
        assert not not_conversations(loaded.config)
        check(loaded.config, variables)
    elif program == "trainer.dpo":
        loaded = load(sft._without_show(words)[0], environment=variables, defaults=DPO_DEFAULTS)
        assert not not_pairs(loaded.config)
        check(loaded.config, variables)
    elif program == "trainer.distill":
        kinds = {"use_sft=true": distill.CONVERSATIONS, "distill_rollouts=true": distill.ROLLOUTS}
        own = next((kind for word, kind in kinds.items() if word in words), distill.DOCUMENTS)
        loaded = load(sft._without_show(words)[0], environment=variables, defaults=own.defaults)
        own.check(loaded.config)
        check(loaded.config, variables)
    elif program == "trainer.grpo":
        loaded = load(words, environment=variables, defaults=RL_DEFAULTS)
        assert not not_prompts(loaded.config)
        check(loaded.config, variables)
    elif program == "trainer.shardings":
        load_sides(words, variables)
    elif program == "trainer.parity":
        *_, rest = parity._options(words)
        if any("=" in word or word.endswith(".yml") for word in rest):  # otherwise the words are checkpoints
            load_sides(rest, variables)
    elif program == "trainer.export":
        export._read_words(words)
    elif program == "trainer.quantize":
        quantize._read_words(words)
    elif program in ("trainer.generate", "trainer.serve"):
        own = generate._OWN if program == "trainer.generate" else serve._OWN
        *_, keys = generate.read_words(words, "generate", own)
        check(load(keys, environment=variables).config, variables)
    elif program == "trainer.evaluate":
        _, options, keys = generate.read_words(words, "evaluate", evaluate._OWN)
        others = {"thousand.yml", "choices.yml", "rolling.yml", "written.yml"}  # files of a benchmark
        read_specs([task for task in options["tasks"].split(",") if task not in others], "tasks")
        check(load(keys, environment=variables).config, variables)
    elif program == "trainer.from_maxtext":
        assert parse(words)
    elif program.startswith("scripts/"):
        assert (ROOT / program).is_file(), program
        given = words[words.index("--") + 1 :] if "--" in words else [word for word in words if "=" in word]
        load(given, environment=variables)
    else:
        raise AssertionError(f"say here how the words of {program} are read")


def check(config, variables):
    """Resolves the configuration for the command's devices."""
    forced = re.search(r"device_count=(\d+)", variables.get("XLA_FLAGS", ""))
    count, platform = int(forced[1]) if forced else 1, "cpu"
    if config.compile_topology:
        topology = find_topology(config.compile_topology)
        assert isinstance(topology, Topology), topology
        count, platform = topology.devices * config.compile_topology_num_slices, topology.platform
    resolve(config, device_count=count, platform=platform)


def test_there_are_commands():
    assert len(COMMANDS) > 45
    assert len({found.page for found in COMMANDS}) > 15


@pytest.mark.parametrize("found", COMMANDS, ids=[f"{found.page}-{found.program}" for found in COMMANDS])
def test_a_documented_command_is_accepted(found):
    accept(found.program, found.words, found.variables)


def test_a_command_that_would_be_refused_is_found():
    for bad in (["no_such_key=1"], ["steps=none"], ["ici_fsdp_parallelism=3"], ["model_name=no-such-model"]):
        with pytest.raises(UserError):
            accept("trainer.train", ["base.yml", *bad], {})


def test_modules_that_the_text_names_exist():
    names = {name for page in PAGES for name in re.findall(r"python3? -m (trainer\.\w+)", page.read_text())}
    assert len(names) >= 8
    assert [name for name in sorted(names) if importlib.util.find_spec(name) is None] == []


def test_links_lead_to_files():
    broken, count = [], 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                count += 1
                broken += [] if (page.parent / target).exists() else [f"{page.relative_to(ROOT)}: {target}"]
    assert count > 100
    assert broken == []
