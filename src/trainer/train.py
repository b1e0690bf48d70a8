"""`python -m trainer.train [base.yml] key=value ...`: train a language model."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from trainer.config import UserError, exit_on_user_error, load, to_yaml


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: the process's own)."""
    started = time.perf_counter()
    loaded = load(sys.argv[1:] if argv is None else argv)
    # From here on the command line makes sense by itself; what follows loads JAX.
    import jax

    from trainer.data import open_dataset
    from trainer.observe import Console, MetricsWriter, open_run
    from trainer.training import Reports, build, fit

    console = Console()
    for note in loaded.notes:
        console.say(note)
    run = build(loaded.config, jax.devices())
    dataset = open_dataset(run.config, console.say)
    prompt = _prompt(run.config, dataset.tokenizer)
    params = _given_parameters(run, console.say, loaded.changed)
    # All that can be wrong with the command has been seen: the run begins to leave traces.
    run_dir = open_run(run.config.base_output_directory, run.config.run_name)
    (run_dir / "config.yml").write_text(to_yaml(run.config))
    _say_what_runs(console, run, dataset, run_dir, loaded.warnings)
    console.say("compiling the training step")
    compiled = run.compile()

    with MetricsWriter(run_dir) as writer:

        def on_step(row):
            writer.write(row)
            console.step(row, run.config.steps)

        def on_evaluation(row):
            writer.write(row)
            console.evaluation(row)

        state = fit(run, compiled, run.init(params), dataset, Reports(on_step, on_evaluation))
    console.summary(time.perf_counter() - started)
    if prompt:
        console.sample(run.config.prompt, _sample(run, state, dataset.tokenizer, prompt))


def _say_what_runs(console, run, dataset, run_dir, warnings: Sequence[str]) -> None:
    import jax

    from trainer.models.flops import flops_per_token, parameter_count

    device = run.mesh.devices.flat[0]
    console.banner(
        run.config,
        device_kind=device.device_kind,
        platform=device.platform,
        process_count=jax.process_count(),
        parameters=parameter_count(run.config),
        flops_per_token=flops_per_token(run.config),
        dataset=str(dataset),
        run_dir=run_dir,
        warnings=warnings,
    )
    if run.config.log_config:
        console.say(to_yaml(run.config))


def _given_parameters(run, say, given) -> Any:
    """The parameters of load_parameters_path on their devices, or None."""
    if not run.config.load_parameters_path:
        return None
    from trainer.checkpoint import load_parameters

    abstract = run.backend.unpack(run.abstract_args()[0]).params
    return load_parameters(run.config.load_parameters_path, run.config, abstract, say, given)


def _prompt(config, tokenizer) -> list[int]:
    """The prompt's tokens, [] for no sample; checked before training starts."""
    if tokenizer is None or not config.prompt:
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

    def draw(params, rest):
        return sample(run.config, run.backend, params, rest, prompt, rows=rows, temperature=temperature, seed=seed)

    tokens = jax.device_get(jax.jit(run.placed(draw))(tree.params, tree.rest))[0].tolist()
    # The end may be the token that also stands at the beginning.
    end = tokens.index(tokenizer.eos, len(prompt)) if tokenizer.eos in tokens[len(prompt) :] else len(tokens)
    return tokenizer.decode(tokens[:end])


if __name__ == "__main__":
    main()
