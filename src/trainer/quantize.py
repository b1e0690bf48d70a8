"""`python -m trainer.quantize FROM OUT quantization=int8|... [key=value ...]`: quantizes weights."""

import dataclasses
import functools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.capabilities.data_keys import without_rows
from trainer.config.capabilities.quantization_keys import OF_STORED, STORED_DTYPES, asks_for_floats
from trainer.config.dump import as_words
from trainer.config.errors import UserError, command_line, exit_on_user_error, shortened
from trainer.config.flags import FLAGS
from trainer.config.help import answers_question
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.config.paths import local_path
from trainer.config.resolve import resolve
from trainer.config.schema import schema
from trainer.config.words import counted, visible
from trainer.runtime.new_folder import new_folder, path_mistakes
from trainer.runtime.platforms import leave_out_absent_tpu

HELP = f"""\
usage: python -m trainer.quantize FROM OUT quantization={"|".join(STORED_DTYPES)} [key=value ...]

FROM    the same as load_parameters_path: a run's folder or one of its checkpoints/N, a Hugging Face model directory,
        a GGUF file, the output of trainer.export; a MaxText checkpoint's tree (.../N/items)
OUT     a new or empty folder, for load_parameters_path and trainer.generate
weights for a run with ema_decay: ema (default), the averaged parameters, or raw, the unaveraged ones
key     weight_block_size=[32,1]: how many inputs and outputs share a scale (default: all inputs of each output)
        weight_quantization_algorithm=rounding (default), awq or gptq; the last two calibrate on text: dataset_type=...
        and other keys of --help Data, by default the source code of Python's standard library, with FROM's tokenizer
        calibration_rows=128: the number of text rows; max_target_length=... is their length (default: the training
        length, at most 2048)
        weight_quantization_calibration_method=minmax: also stores zero points, for int8 and int4
        unquantized_modules=[mlp/wo], quantize_logits_proj=true: select the matrices; routers of experts stay float
        unless quantize_router_proj=true is given
        keys of the model, as for trainer.train; they default to FROM's config.json or config.yml; a MaxText
        checkpoint has neither, so give them
Matrices are quantized layer by layer, and other weights are unchanged. Tokenizer files next to FROM are copied.
--help SECTION and --explain KEY explain the keys. docs/guides/quantization.md"""
_ROWS = "calibration_rows"
_DEFAULT_ROWS, _TOGETHER, _LONGEST = 128, 8, 2048  # _TOGETHER: the maximum number of rows in a batch


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if answers_question(words, HELP):
        return
    source, out, rows, weights, keys = _read_words(words)
    # Imports that load JAX come after the checks that do not need it.
    leave_out_absent_tpu()
    from trainer.backends.registry import make_model
    from trainer.calibration.quantize import Calibrated
    from trainer.models.matrices import quantized_kernels
    from trainer.models.quantization import storage_of
    from trainer.weights.about_files import copy_beside
    from trainer.weights.model_keys import check_words, model_config
    from trainer.weights.open import open_source, weights_of
    from trainer.weights.params.write import write_params
    from trainer.weights.stored import as_stored, stored_kernels

    given = dict(word.partition("=")[::2] for word in keys)
    average = weights != "raw" and (weights == "ema" or open_source(source, given.get("decoder_block", "")).averaged)
    checkpoint = open_source(source, given.get("decoder_block", ""), average=average)
    where = str(checkpoint.path)
    of_storage, of_data, of_model = _parted(keys)
    config = model_config(checkpoint.keys, [*of_model, "checkpoint_is_quantized=false"], where)
    check_words(checkpoint.keys, of_model, config, where)
    stored = _configuration(
        config, ["dataset_type=synthetic", "checkpoint_is_quantized=true", "quantize_router_proj=false", *of_storage]
    )
    shapes, buffers = weights_of(make_model(config))
    kernels, forms = quantized_kernels(stored, shapes), stored_kernels(stored)
    leaves = checkpoint.leaves(config, shapes)
    leaves = {name: dataclasses.replace(leaf, buffer=name in buffers) for name, leaf in leaves.items()}
    if stored["weight_quantization_algorithm"] == "rounding" and (of_data or rows is not None):
        raise UserError(
            f"{' '.join(of_data) or _ROWS}: weight_quantization_algorithm=rounding reads no text; leave it out"
        )
    with new_folder(out) as partial:
        for note in filter(None, [*checkpoint.notes(config), checkpoint.about.note()]):
            print(visible(note))
        if average:
            print(
                f"{visible(where)}: quantizing the averaged parameters (ema_decay); weights=raw selects the unaveraged "
                "ones"
            )
        with Calibrated(kernels, storage_of(stored), partial) as calibrated:
            if stored["weight_quantization_algorithm"] != "rounding":
                batches = _batches(config, checkpoint, of_data, rows)
                calibrated.run(config, forms, leaves, batches, stored["weight_quantization_algorithm"], print)
            parts = as_stored(stored, forms, leaves, _rounded(stored, kernels), calibrated.leaves)
            write_params(partial, stored, parts, None)
        copy_beside(checkpoint.tokenizer, checkpoint.about, partial, fields=True)
    _report(out, stored, kernels, leaves, parts)


def _parted(keys: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns the arguments for the storage of weights, the arguments for data, and the arguments for the model."""

    def kind(word: str) -> int:
        key = schema().keys.get(word.partition("=")[0])
        if key is None or key.name in OF_STORED:
            return 0 if key else 2
        return 1 if key.section == "Data" or key.name == "max_target_length" else 2

    parted: tuple[list[str], list[str], list[str]] = ([], [], [])
    for word in keys:
        parted[kind(word)].append(word)
    return parted


def _batches(config: Config, checkpoint: Any, words: Sequence[str], rows: int | None) -> Iterator[Any]:
    """Yields batches of text for calibration, tokenized for the model of `checkpoint`."""
    from trainer.data.dataset import open_dataset

    given = [word.partition("=")[0] for word in words]
    rows = _DEFAULT_ROWS if rows is None else rows
    own = ["eval_interval=-1"]
    if not {"tokenizer_path", "tokenizer_type"}.intersection(given):
        own.append(f"tokenizer_path={checkpoint.tokenizer}")
    if not {"max_target_length", "prepared_path"}.intersection(given):
        own.append(f"max_target_length={min(checkpoint.length or _LONGEST, _LONGEST)}")
    dataset = open_dataset(_configuration(config, [*own, *words]), lambda line: print(visible(line)))
    print(f"calibrating with {counted(rows, 'row')} of {visible(str(dataset))}")
    stream = dataset.train_stream(rows=min(rows, _TOGETHER))
    try:
        for first in range(0, rows, _TOGETHER):
            yield {name: array[: rows - first] for name, array in next(stream)[0].items()}
    finally:
        stream.close()


def _configuration(config: Config, words: Sequence[str]) -> Config:
    """Returns a resolved configuration with the model of `config`, and with the arguments `words`."""
    from trainer.weights.model_keys import described

    keys = described(config) | {name: config[name] for name in ("rope_interleave", *FLAGS)}
    given = [*as_words(keys), *words]
    loaded = load(["base.yml", *given], defaults=without_rows(given))
    return resolve(loaded.config, device_count=1, platform="cpu")


def _rounded(config: Config, kernels: Mapping[str, Any]) -> Any:
    """Returns a function that rounds one layer of a kernel, given the kernel's name and the layer's values."""
    import jax
    import numpy as np

    from trainer.models.quantization import storage_of

    storage = storage_of(config)
    rounded = {name: jax.jit(functools.partial(storage.store, kernel)) for name, kernel in kernels.items()}
    return lambda name, value: jax.tree.map(np.asarray, rounded[name](value))


def _report(
    out: Path, config: Config, kernels: Mapping[str, Any], leaves: Mapping[str, Any], parts: Mapping[str, Any]
) -> None:
    """Prints the sizes of the quantized matrices and of the other weights, in bytes."""
    from trainer.observe.text import si

    def bits(leaf: Any) -> int:
        return leaf.size * (4 if leaf.dtype.name == "int4" else 8 * leaf.dtype.itemsize)

    floats = sum(leaf.size for name, leaf in leaves.items() if name in kernels)
    quantized = [leaf for name, leaf in parts.items() if name not in leaves]
    values = sum(bits(leaf) for name, leaf in parts.items() if name.endswith(("/qvalue", "/codes"))) // 8
    scales = sum(bits(leaf) for leaf in quantized) // 8 - values
    rest = sum(leaf.nbytes for name, leaf in leaves.items() if name not in kernels)
    print(
        f"{out}: {len(kernels)} matrices with {si(floats, '').strip()} weights in {config.quantization}: "
        f"{si(values, 'B').strip()}, scales {si(scales, 'B').strip()}; other weights {si(rest, 'B').strip()}, as stored"
    )
    print(f"to generate from it: python -m trainer.generate {shlex.quote(str(out))}")


def _read_words(words: Sequence[str]) -> tuple[str, Path, int | None, str, list[str]]:
    """Returns FROM, OUT, the number of rows for calibration (None: not given), the choice of weights, and the
    `key=value` arguments for base.yml."""
    own = (f"{_ROWS}=", "weights=")
    paths, keys = words[:2], [word for word in words[2:] if not word.startswith(own)]
    options = dict(word.split("=", 1) for word in words if word.startswith(own))
    number, weights = options.get(_ROWS), options.get("weights", "")
    mistakes = path_mistakes(paths, {_ROWS, "weights", *schema().keys})
    if number is not None and not (number.isdecimal() and len(number) < 10 and int(number) > 0):
        mistakes.append(f"{_ROWS}={shortened(number)}: must be a whole number of at least 1")
    if weights not in ("", "raw", "ema"):
        mistakes.append(f"weights={shortened(weights)}: allowed: raw, ema, or leave it out")
    given = dict(word.partition("=")[::2] for word in keys)
    if given.get("quantization") not in STORED_DTYPES:
        mistakes.append(f"quantization={given.get('quantization', '')}: allowed: {', '.join(STORED_DTYPES)}")
    if asks_for_floats(keys):
        mistakes.append(
            f"checkpoint_is_quantized={given['checkpoint_is_quantized']}: this command's output is "
            "quantized; leave it out"
        )
    if mistakes:
        raise UserError("\n  ".join(["cannot quantize:", *mistakes, "see python -m trainer.quantize --help"]))
    rows = None if number is None else int(number)
    return paths[0], local_path(paths[1]).absolute(), rows, weights, keys


if __name__ == "__main__":
    main()
