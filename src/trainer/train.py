"""`python -m trainer.train [base.yml] key=value ...`: trains a language model."""

import contextlib
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.capabilities.chat_keys import other_command
from trainer.config.capabilities.invariant_keys import unchecked
from trainer.config.capabilities.vocab_tiles import chosen
from trainer.config.derived import eval_batch_rows
from trainer.config.dump import to_yaml
from trainer.config.effects import without_effect_here
from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.files import by_hand
from trainer.config.from_model import taken_from_model
from trainer.config.help import prints_usage
from trainer.config.keys import Config
from trainer.config.load import Loaded, begin
from trainer.evaluation.specs import TEXT, Spec, read_specs
from trainer.observe.goodput import Timeline
from trainer.runtime.distributed import distributed, told_to_others
from trainer.runtime.platforms import add_threads_for_simulated_devices, leave_out_absent_tpu
from trainer.runtime.preemption import NAMES, exit_code
from trainer.runtime.supervision import COMPILATION, RESTORE, pulse, supervise

DRY_RUN = "--dry-run"
_FINISHED = "{} is finished: nothing to do; to continue it, increase steps"


@dataclass(frozen=True)
class Kind:
    """The properties in which training commands differ. Each argument `say` is a function that prints a line.

    Attributes:
      command: the name of the command.
      check: raises UserError if a configuration is for another command. It runs before JAX is loaded.
      defaults: the command's default values of keys; see `config.load`.
      prepare: `prepare(loaded, say)` sets keys that the user does not give, from the model and the data
        (`Loaded.complete`), and returns a dict of these keys. It runs in the first process, after JAX is loaded.
      encoder: returns the encoder of records; see `data.dataset.open_dataset`.
      prompts: `prompts(config, tokenizer, say)` returns the encoder of the sample prompt; see `inference.tokens_of`.
      dataset: `dataset(config, say)` opens data that are not records; `config` is resolved. None: the data are records,
        which `data.dataset.open_dataset` opens.
      source: `source(run, dataset, begin, run_dir, say)` returns the source of batches; see `training.loop.fit`. The
        source is opened before the step is compiled. `run_dir` is None in a dry run, in which the source must not write
        files.
      instead: `instead(run, dataset, say)` is called instead of training.
    """

    command: str
    check: Callable[[Config], None]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Loaded, Callable[[str], None]], Mapping[str, Any]] = lambda loaded, say: {}
    encoder: Callable[[], Any] | None = None
    prompts: Callable[[Config, Any, Callable[[str], None]], Any] = lambda config, tokenizer, say: None
    dataset: Callable[[Config, Callable[[str], None]], Any] | None = None
    source: Callable[..., Any] | None = None
    instead: Callable[..., None] | None = None


def _of_documents(config: Config) -> None:
    if other := other_command(config):
        raise UserError(other)


TRAIN = Kind("train", _of_documents)


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    run_command(command_line(argv), TRAIN)


def run_command(words: Sequence[str], kind: Kind) -> None:
    """Trains as the command line `words` specifies.

    Raises:
      UserError: the command is invalid or cannot run.
      RunStopped: the run was ended early, for example because of a NaN loss.
    """
    if prints_usage(kind.command, words):
        return
    tell = pulse()
    timeline = Timeline(tell)
    with told_to_others(words):
        begun = begin([word for word in words if word != DRY_RUN], os.environ, kind.defaults)
        kind.check(begun.config)
        _specs(kind, begun.config)
    if begun.config.supervise and tell is None and DRY_RUN not in words:
        raise SystemExit(supervise(f"trainer.{kind.command}", words, begun.config))
    # All checks that need only the command line are done. The following code loads JAX.
    leave_out_absent_tpu()
    add_threads_for_simulated_devices()

    with distributed(begun.config):
        from trainer.weights.model_of_command import with_model

        loaded = with_model(begun)
        if kind.instead:
            console, run, dataset, *_ = _opened(loaded, kind)
            for warning in loaded.warnings:
                console.say(f"warning: {warning}")
            kind.instead(run, dataset, console.say)
        else:
            _dry_run(loaded, kind) if DRY_RUN in words else _run(loaded, kind, timeline)


class _Silence(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


def _run(loaded: Loaded, kind: Kind, timeline: Timeline) -> None:
    from trainer.observe.runs import open_run
    from trainer.runtime.agreement import agreed

    console, run, dataset, prompt, config_yml = _opened(loaded, kind)
    with (
        open_run(
            run.config.base_output_directory,
            run.config.run_name,
            config_yml,
            run.config.enable_checkpointing,
            console.say,
        ) as run_dir,
        timeline,  # closes its file while this process still owns the run
    ):
        timeline.place(run_dir.path)
        _say_what_runs(console, loaded, run, dataset, run_dir.folder)
        end = _train(loaded, kind, run, dataset, prompt, run_dir, timeline, console)
        if end is None:
            console.say(_FINISHED.format(run_dir.folder))
            return
        run_dir.upload()
        if end.signal:
            saved = "saved; the same command continues from here"
            lost = "stopped; nothing is saved, because enable_checkpointing=false"
            saved_or_lost = saved if run.config.enable_checkpointing else lost
            console.say(f"{NAMES[end.signal]}: {saved_or_lost} ({run_dir.folder})")
            console.say(f"time: {timeline.goodput}")
            raise SystemExit(exit_code(end.signal))
        run_dir.finish()
        console.summary(time.perf_counter() - timeline.started, agreed(lambda: _files(run_dir, timeline.goodput)))
        if prompt.tokens:
            from trainer.inference.sample import sample_text
            from trainer.training.reports import keep_sample

            stop = list(dict.fromkeys([*prompt.stop, *end.ends]))
            text = sample_text(run, end.state, dataset.tokenizer, prompt._replace(stop=stop))
            console.sample(run.config.prompt, text)
            keep_sample(run_dir, run.config.steps, run.config.prompt, text, console.say)
        timeline.finish()
        run_dir.upload()


def _dry_run(loaded: Loaded, kind: Kind) -> None:
    """Does everything that `_run` does before the first step, except that it writes nothing to the run's folder."""
    from trainer.checkpoint.manager import SavedCheckpoints
    from trainer.config.dump import to_flow
    from trainer.observe.rundir import FINISHED_FILE
    from trainer.observe.runs import check_earlier, expected_run
    from trainer.runtime.agreement import from_first
    from trainer.runtime.storage import folder
    from trainer.training.compiled import compiled_step, loaded_step, needs_of
    from trainer.training.reports import metrics_files

    console, run, dataset, prompt, config_yml = _opened(loaded, kind)
    config, resumes = run.config, run.config.enable_checkpointing
    run_folder = folder(
        from_first(
            lambda: str(expected_run(config.base_output_directory, config.run_name, config_yml, resumes, console.say))
        )
    )
    _say_what_runs(console, loaded, run, dataset, run_folder)
    console.say("keys set outside base.yml:")
    for name, source in loaded.sources.items():
        if source != "default":
            console.say(f"{name}={to_flow(config[name])} ({source})")
    begin = _start(loaded, run, dataset, prompt, SavedCheckpoints(run_folder) if resumes else None, console)
    finished = begin.updates == config.steps and from_first((run_folder / FINISHED_FILE).exists)
    if finished:
        console.say(_FINISHED.format(run_folder))
    else:
        from_first(lambda: check_earlier(run_folder, config_yml, begin.updates, begin.resumed, console.say))
    if begin.updates < config.steps:
        compiled = loaded_step(run, console.say) or compiled_step(run, run_folder, console.say)
        console.needs(needs_of(run, compiled), config.steps - begin.updates)
        if kind.source:
            with kind.source(run, dataset, begin, None, console.say):
                pass
    _tasks(kind, run, dataset, begin, console)
    metrics_files(config, Path(str(run_folder)), run_folder.name)
    result = "nothing would run" if finished else "everything before the first step works"
    console.say(f"dry run: {result}; nothing was written to {run_folder}")


def _opened(loaded: Loaded, kind: Kind):
    """Returns a tuple: the console, the run, its data, its sample prompt, and the text of its config.yml."""
    from trainer.aot.executable import source_of_block
    from trainer.observe.console import Console
    from trainer.runtime.agreement import agreed, check_same, from_first, is_first
    from trainer.runtime.versions import program

    # Before the data and the model, because processes whose code differs may fail or hang there.
    check_same(program)
    # Only the first process prints, except for errors.
    console = Console(None if is_first() else _Silence())
    for note in filter(None, (*loaded.notes, taken_from_model(loaded.config, loaded.sources))):
        console.say(note)
    for key in ("compile_topology", "compile_topology_num_slices", "compile_report_file"):
        if by_hand(where := loaded.changed.get(key, "")):
            loaded.warnings.append(f"{key} ({where}) has no effect: trainer.train uses the available devices")
    loaded.complete(from_first(lambda: kind.prepare(loaded, console.say)))
    run, dataset, prompt = agreed(lambda: _prepare(loaded, kind, console))
    if note := unchecked(run.config, run.mesh.devices.flat[0].platform):
        console.say(note)
    config_yml = to_yaml(run.config)
    check_same(
        lambda: (
            source_of_block(run.config) | {"the configuration": config_yml, "the training data": dataset.fingerprint}
        )
    )
    return console, run, dataset, prompt, config_yml


def _prepare(loaded: Loaded, kind: Kind, console):
    """Returns a tuple: the run, its data, and its sample prompt."""
    import jax

    from trainer.checkpoint.compare import check_dtypes
    from trainer.config.keys import Config
    from trainer.data.dataset import open_dataset
    from trainer.inference.sample import sample_prompt
    from trainer.training.build import build
    from trainer.training.evaluate import check_held_out
    from trainer.training.memory import check_memory, device_memory

    check_memory(loaded.config, jax.devices(), device_memory(jax.devices()))
    run = build(loaded.config, jax.devices())
    if run.config.enable_checkpointing:
        check_dtypes(run.codec.unpack(run.abstract_state))
    run.check_arguments()
    index = jax.process_index()

    def say(text: str) -> None:
        # Every process prints, because messages about reading, waiting, and skipped or truncated documents differ
        # between processes.
        console.say(text) if index == 0 else print(f"process {index}: {text}", flush=True)

    config = run.config
    if loaded.tokenizer:  # replaces a missing tokenizer_path for the data, but not in the run's configuration
        config = Config({**config, "tokenizer_path": loaded.tokenizer})
    if kind.dataset:
        dataset = kind.dataset(config, say)
    else:
        dataset = open_dataset(config, say, *([kind.encoder()] if kind.encoder else []))
        check_held_out(dataset.evaluation, eval_batch_rows(run.config), run.config.eval_steps)
    if run.config.num_epoch > 1:
        run = _with_passes(loaded, run, dataset, console)
    chat = kind.prompts(run.config, dataset.tokenizer, console.say)
    return run, dataset, sample_prompt(run.config, dataset.tokenizer, console.say, chat)


def _with_passes(loaded: Loaded, run, dataset, console):
    """Returns a run with as many steps as num_epoch needs, or `run` unchanged if the user sets `steps` to a smaller
    number."""
    import jax

    from trainer.training.build import build
    from trainer.training.passes import steps_of

    steps, passes = steps_of(run.config, dataset), f"{run.config.num_epoch} passes over {dataset.epoch.content}"
    if "steps" in loaded.changed and run.config.steps < steps:
        console.say(f"steps={run.config.steps:,} ends the run before num_epoch: {passes} are {steps:,} steps")
        return run
    console.say(f"steps={steps}: {passes} (num_epoch)")
    loaded.complete({"steps": steps})
    return build(loaded.config, jax.devices())


def _train(loaded: Loaded, kind: Kind, run, dataset, prompt, run_dir, timeline, console):
    """Starts or resumes the run and trains to its end; see `training.loop.fit`. Returns None if the run was already
    finished."""
    from trainer.checkpoint.manager import CheckpointManager
    from trainer.runtime.agreement import agreed, from_first, is_first
    from trainer.training.compiled import StepsByRows, compiled_step, loaded_step, needs_of
    from trainer.training.loop import fit
    from trainer.training.reports import metrics_files, open_reports, start_entry

    with contextlib.ExitStack() as stack:
        manager = None
        if run.config.enable_checkpointing:
            from_first(run_dir.check)  # must run before the manager removes interrupted saves
            manager = CheckpointManager(run_dir.folder, run.config, console.say, run_dir.check)
            stack.enter_context(manager)
        resumes = manager is not None and manager.latest is not None

        def open_timeline() -> None:
            saves = run.config.enable_checkpointing
            agreed(lambda: timeline.open(run_dir.path, is_first(), saves, console.say, run_dir.check))

        if resumes and not run_dir.finished:
            open_timeline()  # a process that is killed during its restore has spent time, too
        with timeline.during(RESTORE) if resumes else contextlib.nullcontext():
            begin = _start(loaded, run, dataset, prompt, manager, console)
        if begin.updates == run.config.steps and run_dir.finished:
            return None
        compiled = loaded_step(run, console.say)
        files = metrics_files(run.config, run_dir.path, run_dir.folder.name)
        source = None
        if kind.source:
            opened = stack.enter_context(kind.source(run, dataset, begin, run_dir, console.say))
            source = lambda *args: contextlib.nullcontext(opened)  # noqa: E731
        tasks = _tasks(kind, run, dataset, begin, console)
        # All possible errors in the command have been reported by now, so the run may change its files.
        entry = start_entry(run, begin, loaded.sources)
        run_dir.begin(to_yaml(run.config), entry, resumed=begin.resumed, say=console.say)
        open_timeline()
        if begin.updates < run.config.steps:
            with timeline.during(COMPILATION):
                compiled = compiled or compiled_step(run, run_dir.folder, console.say)
            console.needs(needs_of(run, compiled), run.config.steps - begin.updates)
        reports = open_reports(run, run_dir, begin, files, console, timeline, stack)
        if begin.updates < run.config.steps:
            timeline.step(begin.updates)
        else:
            timeline.end()
        steps, by_tasks = StepsByRows(run, compiled, console.say), tasks and tasks.to(run_dir)
        return fit(run, steps, begin, dataset, reports, manager, source, by_tasks)


def _specs(kind: Kind, config: Config) -> list[Spec]:
    """Returns the tasks of eval_tasks. Raises UserError if a task uses the run's data and they are not plain text."""
    specs = read_specs(config.eval_tasks, "eval_tasks")
    own = [spec.name for spec in specs if spec.kind == TEXT and not spec.documents]
    if own and (kind.encoder or kind.dataset):
        raise UserError(
            f"eval_tasks={own[0]}: the data of trainer.{kind.command} are not plain text; give a file that defines a "
            "task with kind: text and its own data. For the loss on this run's held-out data, set eval_interval; it is "
            "reported as eval_loss"
        )
    return specs


def _tasks(kind: Kind, run, dataset, begin, console):
    """Returns the evaluator of eval_tasks, with the tasks' data opened; None if there are no tasks."""
    if not run.config.eval_tasks:
        return None
    from trainer.evaluation.in_run import RunTasks
    from trainer.runtime.agreement import agreed

    def opened():
        tokenizer = dataset.tokenizer
        chat = tokenizer and kind.prompts(run.config, tokenizer, lambda line: None)
        eos = [] if tokenizer is None or tokenizer.eos is None else [tokenizer.eos]
        stop = [*eos, *begin.about.ends, *(chat.stop_tokens() if chat else ())]
        images = {} if run.config.dataset_type == "synthetic" else begin.about.images
        return RunTasks(run, _specs(kind, run.config), tokenizer, chat, stop, console.say, images)

    return agreed(opened)


def _start(loaded: Loaded, run, dataset, prompt, saved, console):
    """Returns the result of `training.start.start`, with the run's model metadata as `about`. `saved`: the manager of
    the run's checkpoints, or None."""
    from trainer.runtime.agreement import agreed
    from trainer.training.about import about_run
    from trainer.training.start import start

    given = {key for key, where in loaded.changed.items() if by_hand(where)}
    schedule_given = loaded.config.learning_rate_schedule_steps != -1
    begin = start(run, dataset, saved, console.say, schedule_given=schedule_given, given=given)
    own = saved.path(saved.latest) if saved is not None and saved.latest is not None else None
    about = agreed(lambda: about_run(run.config, dataset.tokenizer, own, prompt.taught, console.say))
    if note := about.note():
        console.say(note)
    return begin._replace(about=about)


def _files(run_dir, goodput):
    """Returns entries of a finished run's summary: how the run spent its time, and the paths of its results."""
    from trainer.checkpoint.manager import newest
    from trainer.observe.rundir import REPORT_FILE

    checkpoint = newest(run_dir.folder)
    named = {} if checkpoint is None else {"checkpoint": str(checkpoint)}
    return {"time": str(goodput)} | named | {"charts": str(run_dir.folder / REPORT_FILE)}


def _say_what_runs(console, loaded: Loaded, run, dataset, run_folder) -> None:
    import jax

    from trainer.models.families import stacks
    from trainer.models.matrices import adapted_names, masked_kernels, quantized_and_float
    from trainer.models.stages import stage_text
    from trainer.observe.banner import product_rows
    from trainer.sharding import hardware
    from trainer.state import table
    from trainer.training.passes import mixture_lines, passes_text
    from trainer.training.reports import run_work, teacher_text

    device, masked = run.mesh.devices.flat[0], [kernel.name for kernel in masked_kernels(run.config)]
    console.banner(
        run.config,
        device_kind=device.device_kind,
        platform=device.platform,
        capability=hardware(run.mesh.devices.ravel())["capability"],
        process_count=jax.process_count(),
        parameters=run.parameters,
        trained=run.trained_parameters,
        passes=passes_text(run.config, dataset),
        work=run_work(run),
        dataset=str(dataset),
        run_dir=run_folder,
        products=product_rows(
            run.config, *quantized_and_float(run.config, run.model.param_axes), masked, adapted_names(run.config)
        ),
        pipeline=stage_text(stacks(run.config)),
        teacher=teacher_text(run),
        warnings=[*loaded.warnings, *without_effect_here(run.config, loaded.changed, loaded.config)],
    )
    for line in (*mixture_lines(run.config, dataset), *chosen(loaded.config, run.config)):
        console.say(line)
    if run.config.shard_optimizer_over_data and run.mesh.shape["data"] == 1:
        console.say("warning: shard_optimizer_over_data=true has no effect: the mesh axis data has size 1")
    if run.config.debug_sharding:
        shardings = run.table()
        console.say(table.text(shardings["tensors"], shardings["totals"], shardings["warnings"]))
    if run.config.log_config:
        console.say(to_yaml(run.config))


if __name__ == "__main__":
    main()
