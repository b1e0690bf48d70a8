"""`python -m trainer.evaluate FROM tasks=a,b [key=value ...]`: scores a model on tasks."""

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.config.dump import PROCESSES
from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.help import answers_question
from trainer.config.load import Loaded, load
from trainer.config.paths import local_path
from trainer.config.words import visible
from trainer.evaluation.specs import Spec, read_specs
from trainer.generate import WEIGHTS, read_words
from trainer.runtime.distributed import distributed, told_to_others
from trainer.runtime.platforms import add_threads_for_simulated_devices, leave_out_absent_tpu

_OWN = {"tasks": (), "weights": WEIGHTS, "output": ()}
HELP = """\
usage: python -m trainer.evaluate FROM tasks=TASK,TASK [output=FOLDER] [weights=raw|ema] [key=value ...]
       python -m trainer.evaluate [base.yml] load_parameters_path=FROM model_name=... tasks=TASK,TASK [key=value ...]

FROM     a run's folder or one of its checkpoints/N, a Hugging Face model directory, a GGUF file, or the output of
         trainer.export. The model's keys come from it. A MaxText checkpoint does not contain them: use the second form.
tasks    text           loss, perplexity and bits per byte of the data given by dataset_type and its keys
         FILE.jsonl     questions with answers or choices, one per line
         FILE.yml       a task with settings (kind: text, questions, reasoning-gym or programs), or an lm-eval task file
         NAME           a task of lm-eval; its data must be on this machine
output   a folder for the scores and for all questions and answers; default: the next free number in
         base_output_directory/evaluations
weights  for a run with ema_decay: ema (default), the average of the parameters, or raw
key      keys of base.yml: eval_tasks_limit is the maximum number of samples per task, per_device_batch_size the number
         of sequences at once, max_target_length the length of a question with its answer, dtype the precision;
         use_chat_template=true makes each question the user's message to the assistant

Standard output contains only the table. docs/guides/evaluation.md describes the file formats.
--explain KEY explains a key."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    started = time.perf_counter()
    words = command_line(argv)
    if answers_question(words, HELP):
        return
    with told_to_others(words):
        model_path, options, keys = read_words(words, "evaluate", _OWN)
        loaded = None if model_path else load(keys, environment=os.environ)
        connection = loaded or load([word for word in keys if word.partition("=")[0] in PROCESSES])
        tasks = [task for task in options.get("tasks", "").split(",") if task]
        if not tasks:
            raise UserError("cannot evaluate: tasks= is missing\n  see python -m trainer.evaluate --help")
        if loaded and not loaded.config.load_parameters_path:
            raise UserError("cannot evaluate: there is no model: give FROM, or load_parameters_path=... and its keys")
        specs = read_specs(tasks, "tasks")
        output = local_path(options["output"], "output=") if "output" in options else None
        if output and output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(f"cannot evaluate: output={output}: exists and is not an empty folder")
    # Imports that load JAX come after the checks that do not need it.
    leave_out_absent_tpu()
    add_threads_for_simulated_devices()
    with distributed(connection.config):
        from trainer.runtime.agreement import agreed
        from trainer.weights.load import of_checkpoint

        average = options.get("weights") == "ema"
        if loaded is None:
            loaded, average = agreed(lambda: of_checkpoint(model_path, keys, options.get("weights")))
        _evaluate(loaded, specs, average, output, started)


def _evaluate(loaded: Loaded, specs: Sequence[Spec], average: bool, output: Path | None, started: float) -> None:
    """Runs the tasks and writes their results. Every process runs every batch; only the first process writes."""
    from trainer.chat.encoder import Prompts
    from trainer.config.files import by_hand
    from trainer.evaluation.model import EvaluatedModel, TooLong
    from trainer.evaluation.scores import table
    from trainer.evaluation.tasks import keep, open_tasks
    from trainer.inference.max_engine import MaxEngine
    from trainer.runtime.agreement import agreed, check_same, from_first, is_first
    from trainer.runtime.versions import program
    from trainer.weights.open import open_source

    def say(text: str) -> None:
        if is_first():
            print(visible(text), file=sys.stderr, flush=True)

    for note in loaded.notes:
        say(note)

    def prepared():
        engine = MaxEngine(loaded.config)
        tokenizer = engine.get_tokenizer()
        chat = Prompts(loaded.config, tokenizer, say) if loaded.config.use_chat_template else None
        stop = [*engine.stop_tokens(tokenizer), *(chat.stop_tokens() if chat else ())]
        config = loaded.config
        about = open_source(config.load_parameters_path, config.decoder_block, verify=False).about
        images = {} if config.dataset_type == "synthetic" else about.images
        return engine, tokenizer, chat, stop, images, open_tasks(specs, config, tokenizer, say)

    engine, tokenizer, chat, stop, images, tasks = agreed(prepared)
    # The paths of task files are not compared, because they may differ between hosts.
    check_same(lambda: program() | {"the tasks": "\n".join(str(spec._replace(path=None)) for spec in specs)})
    folder = output or Path(from_first(lambda: str(_new_folder(loaded.config.base_output_directory))))
    given = {key for key, where in loaded.changed.items() if by_hand(where)}
    params = engine.load_params(say=say, given=given, average=average)
    say(f"ready after {time.perf_counter() - started:.1f} s; scores, questions and answers go to {folder}")
    model = EvaluatedModel(engine, params, tokenizer, stop, chat, say=say, images=images)
    results = []
    for task in tasks:
        began = time.perf_counter()
        model.begin_task(loaded.config.eval_tasks_timeout_seconds)
        try:
            results += task.run(model)
        except TooLong as error:
            raise UserError(f"{task.name}: {error}") from None
        keep(folder, results)  # after each task, because the next one may fail
        say(f"{task.name}: {time.perf_counter() - began:.1f} s")
    if is_first():
        print(visible(table(results)))


def _new_folder(base: str) -> Path:
    """Creates and returns the folder with the next free number, even if other commands do the same concurrently."""
    from trainer.observe.rundir import writing

    parent = local_path(base, "base_output_directory=") / "evaluations"
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1 + max((int(path.name) for path in parent.glob("[0-9]*[0-9]")), default=0)):
            with contextlib.suppress(FileExistsError):
                (parent / f"{number:04d}").mkdir()
                return parent / f"{number:04d}"
    raise AssertionError


if __name__ == "__main__":
    main()
