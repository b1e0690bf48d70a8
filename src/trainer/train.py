"""`python -m trainer.train [base.yml] key=value ...`: train a language model."""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.config import UserError, exit_on_user_error, load, to_yaml
from trainer.config.files import COMMAND_LINE
from trainer.runtime.platforms import leave_out_absent_tpu
from trainer.runtime.preemption import EXIT_CODE


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: the process's own)."""
    started = time.perf_counter()
    loaded = load(sys.argv[1:] if argv is None else argv)
    # From here on the command line makes sense by itself; what follows loads JAX.
    leave_out_absent_tpu()
    import jax

    from trainer.data import open_dataset
    from trainer.observe import Console, open_run
    from trainer.training import build

    console = Console()
    for note in loaded.notes:
        console.say(note)
    for key in ("compile_topology", "compile_topology_num_slices", "compile_report_file"):
        if loaded.changed.get(key) == COMMAND_LINE:
            loaded.warnings.append(
                f"{key} ({COMMAND_LINE}) has no effect: trainer.train runs on the devices that it has"
            )
    run = build(loaded.config, jax.devices())
    dataset = open_dataset(run.config, console.say)
    prompt = _prompt(run.config, dataset.tokenizer)
    config_yml = to_yaml(run.config)
    with open_run(
        run.config.base_output_directory, run.config.run_name, config_yml, run.config.enable_checkpointing, console.say
    ) as run_dir:
        _say_what_runs(console, run, dataset, run_dir.path, loaded.warnings)
        end = _train(loaded, run, dataset, run_dir, console)
        if end is None:
            console.say(f"{run_dir.path} is finished, there is nothing to do; a larger steps goes on with it")
            return
        if end.preempted:
            saved = "saved, the same command goes on from here"
            console.say(f"SIGTERM: {saved if run.config.enable_checkpointing else 'stopped'} ({run_dir.path})")
            raise SystemExit(EXIT_CODE)
        run_dir.finish()
    console.summary(time.perf_counter() - started)
    if prompt:
        console.sample(run.config.prompt, _sample(run, end.state, dataset.tokenizer, prompt))


def _train(loaded, run, dataset, run_dir, console):
    """From where the run stands to its end; see `training.fit`. None for a run that an earlier process finished."""
    from trainer.checkpoint import CheckpointManager
    from trainer.observe import MetricsWriter
    from trainer.training import Reports, fit, start

    with contextlib.ExitStack() as stack:
        manager = None
        if run.config.enable_checkpointing:
            manager = stack.enter_context(CheckpointManager(run_dir.path, run.config, console.say))
        given = {key for key, where in loaded.changed.items() if where == COMMAND_LINE}
        schedule_given = loaded.config.learning_rate_schedule_steps != -1
        begin = start(run, dataset, manager, console.say, schedule_given=schedule_given, given=given)
        if begin.updates == run.config.steps and run_dir.finished:
            return None
        compiled = None
        if run.config.compiled_trainstep_file:
            compiled = _load_step(run, console)
        # All that can be wrong with the command has been seen: the run leaves its traces.
        run_dir.begin(to_yaml(run.config), resumed=begin.resumed, say=console.say)
        if compiled is None and begin.updates < run.config.steps:
            console.say("compiling the training step")
            compiled = run.compile()
        writer = stack.enter_context(MetricsWriter(run_dir.path, begin.updates))

        def on_step(row):
            writer.write(row)
            console.step(row, run.config.steps)

        def on_evaluation(row):
            writer.write(row)
            console.evaluation(row)

        evaluated = frozenset(row["step"] for row in writer.kept if "eval_loss" in row)
        return fit(run, compiled, begin, dataset, Reports(on_step, on_evaluation, writer.sync, evaluated), manager)


def _load_step(run, console):
    """The step that `trainer.train_compile` compiled."""
    from trainer.aot import executable

    path = Path(run.config.compiled_trainstep_file).expanduser()
    devices, args = list(run.mesh.devices.flat), run.abstract_args()
    step = executable.load(path, executable.origin_of(run.config, devices, args), args, devices)
    console.say(f"the training step is that of {path}, nothing is compiled")
    return step


def _say_what_runs(console, run, dataset, run_dir, warnings: Sequence[str]) -> None:
    import jax

    from trainer.state import table

    device = run.mesh.devices.flat[0]
    console.banner(
        run.config,
        device_kind=device.device_kind,
        platform=device.platform,
        process_count=jax.process_count(),
        parameters=run.parameters,
        flops_per_token=run.flops_per_token,
        dataset=str(dataset),
        run_dir=run_dir,
        warnings=warnings,
    )
    if run.config.shard_optimizer_over_data and run.mesh.shape["data"] == 1:
        console.say("warning: shard_optimizer_over_data=true has no effect: the mesh axis data has size 1")
    if run.config.debug_sharding:
        found = run.table()
        console.say(table.text(found["tensors"], found["totals"]))
    if run.config.log_config:
        console.say(to_yaml(run.config))


def _prompt(config, tokenizer) -> list[int]:
    """The prompt's tokens, [] for no sample; checked before training starts."""
    if tokenizer is None or not config.prompt or ":" in config.decoder_block:
        return []
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    tokens = begin + tokenizer.encode(config.prompt)
    if len(tokens) >= config.max_target_length:
        raise UserError(
            f"prompt has {len(tokens)} tokens and leaves no room in a row of max_target_length="
            f"{config.max_target_length}: shorten it, or set prompt= for no sample"
        )
    return tokens


def _sample(run, state, tokenizer, prompt: list[int]) -> str:
    """The prompt and what the trained model makes of it, up to the end of the document."""
    import jax

    from trainer.inference import sample

    tree = run.backend.unpack(state)
    rows = run.mesh.size  # a row for every device, so that the batch can be placed on any mesh; the first is shown
    temperature, seed = run.config.decode_sampling_temperature, run.config.init_weights_seed

    def draw(tree):
        params = run.fetch(tree).params
        params = jax.lax.with_sharding_constraint(params, run.backend.unpack(run.compute_shardings).params)
        return sample(run.config, run.backend, params, tree.rest, prompt, rows=rows, temperature=temperature, seed=seed)

    tree = tree._replace(opt_state=None)
    tokens = jax.device_get(jax.jit(run.placed(draw, whole_rows=True))(tree))[0].tolist()
    # The end may be the token that also stands at the beginning.
    end = tokens.index(tokenizer.eos, len(prompt)) if tokenizer.eos in tokens[len(prompt) :] else len(tokens)
    return tokenizer.decode(tokens[:end])


if __name__ == "__main__":
    main()
