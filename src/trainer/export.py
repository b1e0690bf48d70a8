"""`python -m trainer.export FROM OUT format=hf|params|maxtext|peft|gguf [key=value ...]`: converts parameters."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.help import answers_question
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.config.schema import schema
from trainer.config.values import read_text
from trainer.config.words import visible
from trainer.runtime.new_folder import new_file, new_folder, path_mistakes
from trainer.runtime.platforms import leave_out_absent_tpu

FORMATS = ("hf", "params", "maxtext", "peft", "gguf")
DTYPES = ("float32", "bfloat16")
GGUF_DTYPES = (*DTYPES, "float16", "q8_0", "q4_0", "q4_1")
WEIGHTS = ("raw", "ema")
HELP = """\
usage: python -m trainer.export FROM OUT format=hf|params|maxtext|peft [dtype=float32|bfloat16] [weights=raw|ema]
                                 [like=FOLDER] [key=value ...]
       python -m trainer.export FROM OUT.gguf format=gguf [dtype=float32|bfloat16|float16|q8_0|q4_0|q4_1] ...

FROM    the same as load_parameters_path: a run's folder or one of its checkpoints/N, of this trainer or of MaxText;
        a Hugging Face model directory; a GGUF file; the output of this command; a MaxText checkpoint's tree
        (.../N/items). For a run with LoRA, or a folder of Hugging Face's PEFT, adapters are merged into the base
OUT     a new or empty folder
format  hf: a Hugging Face model directory, config.json and safetensors
        params: parameters only, for load_parameters_path
        maxtext: OUT/0/items for MaxText's load_parameters_path, with scan_layers=true (default) or false; the last
        line printed contains the arguments with which MaxText loads it
        peft: the adapters and other trained parameters of a run with LoRA, as a folder of Hugging Face's PEFT
        gguf: one new file for llama.cpp, Ollama and others, with tokenizer, chat template and end tokens. dtype is the
        type of the matrices; with q4_0 and q4_1, token tables have eight bits. Needs the extra gguf
dtype   of the output; default: as stored in FROM. Weights quantized by trainer.quantize stay quantized in params and,
        in the layout of compressed-tensors, in hf; in maxtext and gguf, and with dtype, they are dequantized first
like    with format=hf: a Hugging Face model directory that contains FROM's text model and further parts, such as a
        vision tower. OUT is a copy of this directory with the tensors of FROM in place of its text model's
weights for a run with ema_decay: raw, the trained parameters (default), or ema, their average, which is stored in
        float32; frozen parameters have no average and are exported unchanged
key     keys of the model, as for trainer.train. They default to FROM's config.json or config.yml; a MaxText checkpoint
        has neither, so give model_name=... or each key. rope_interleave is converted. max_target_length=... is
        written as max_position_embeddings. For a Linen block, also give the flags of the module system.
load_parameters_path   for adapters: the path of their base, if the base has moved or a PEFT folder names another path
Weights that weight_sparsity_n masks are zero in hf and maxtext; params also contains the masks.
Copies the tokenizer files next to FROM, and FROM's settings for end tokens, lengths and sampling
(generation_config.json).
--help SECTION and --explain KEY explain the keys."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if answers_question(words, HELP):
        return
    source, out, options, keys = _read_words(words)
    # Imports that load JAX come after the checks that do not need it.
    leave_out_absent_tpu()
    from trainer.backends.registry import make_model
    from trainer.products.dequantized import parameter_count
    from trainer.weights.about_files import copy_beside
    from trainer.weights.gguf.write import write_gguf
    from trainer.weights.huggingface.like import Like
    from trainer.weights.masks import check_masks, with_zeros
    from trainer.weights.open import weights_of

    if options["format"] == "peft":
        _export_adapters(source, out, options, keys)
        return
    checkpoint, config = _opened(source, options, keys)
    model = make_model(config)
    shapes, buffers = weights_of(model)
    check_masks(config, checkpoint, shapes)
    leaves = checkpoint.leaves(config, shapes)
    leaves = {name: dataclasses.replace(leaf, buffer=name in buffers) for name, leaf in leaves.items()}
    like = Like(options["like"], config, shapes) if "like" in options else None
    about = _about(checkpoint)
    length = {"max_target_length": config.max_target_length} if _length_given(keys) else {}
    if length:
        about = about._replace(fields={**about.fields, "max_position_embeddings": config.max_target_length})
    with (new_file if options["format"] == "gguf" else new_folder)(out) as partial:
        for note in filter(None, [*checkpoint.notes(config), about.note()]):
            print(visible(note))
        if options["format"] == "gguf":
            write_gguf(partial, config, with_zeros(config, leaves), options.get("dtype"), about, checkpoint.tokenizer)
        else:
            _write(partial, options, config, leaves, about, like)
            copy_beside(checkpoint.tokenizer, about, partial, fields=options["format"] != "hf")
        if like:
            like.copy_files(partial)
    _report(out, options, parameter_count(model.abstract[0]))
    if options["format"] == "maxtext":
        print(_maxtext_line(out, options, config, length))


def _opened(source: str, options: dict[str, str], keys: Sequence[str]) -> tuple[Any, Config]:
    """Returns the checkpoint, and the configuration of the model to export."""
    from trainer.weights.adapters import WithAdapters
    from trainer.weights.model_keys import check_words, model_config
    from trainer.weights.open import open_source

    given = dict(word.partition("=")[::2] for word in keys)
    average, base = options.get("weights") == "ema", options.get("load_parameters_path", "")
    checkpoint = open_source(source, given.get("decoder_block", ""), average=average, base=base)
    if base and not isinstance(checkpoint, WithAdapters):
        raise UserError(
            f"load_parameters_path={base} is the base of adapters, but {source} has no adapters; leave "
            "load_parameters_path out"
        )
    # Quantized weights stay quantized if the format supports it and no dtype is given.
    floats = options["format"] in ("maxtext", "gguf") or "dtype" in options
    own = ["checkpoint_is_quantized=false"] if floats and checkpoint.keys.get("checkpoint_is_quantized") else []
    config = model_config(checkpoint.keys, [*own, *keys], str(checkpoint.path))
    if floats and config.checkpoint_is_quantized:
        raise UserError(
            "checkpoint_is_quantized=true: format=maxtext, gguf and dtype=... write floats; leave "
            "checkpoint_is_quantized out, or use another format without dtype"
        )
    check_words(checkpoint.keys, keys, config, str(checkpoint.path))
    return checkpoint, config


def _about(checkpoint: Any) -> Any:
    """Returns the checkpoint's metadata. If the metadata contain no special tokens, as for a MaxText checkpoint, adds
    the special tokens of the tokenizer next to the checkpoint."""
    from trainer.config.tokenizer_files import has_tokenizer
    from trainer.data.tokenizer_files import load_tokenizer
    from trainer.leaves.about import TOKENS
    from trainer.weights.about_files import about_tokenizer

    about, folder = checkpoint.about, checkpoint.tokenizer
    said = about.generation is not None or not about.fields.keys().isdisjoint(TOKENS)
    if said or checkpoint.kind in ("Hugging Face", "GGUF") or not has_tokenizer(folder, "auto"):
        return about
    try:
        tokenizer = load_tokenizer(str(folder), "auto", add_bos=True, add_eos=True)
    except UserError as error:
        print(f"{error}\n  so the tokens that end a text are unknown and not written")
        return about
    return about_tokenizer(tokenizer.bos, tokenizer.eos).under(about)


def _export_adapters(source: str, out: Path, options: dict[str, str], words: list[str]) -> None:
    """Writes only the adapters. The adapted model's configuration keys come from the run or, for a PEFT folder, from
    the base model."""
    from trainer.weights.about_files import copy_beside
    from trainer.weights.model_keys import as_words, check_words, model_config
    from trainer.weights.open import open_adapters, open_source, weight_shapes
    from trainer.weights.peft.write import write_peft

    adapters = open_adapters(source, average=options.get("weights") == "ema")
    base = options.get("load_parameters_path", "")
    described = adapters.described or open_source(source, base=base).keys
    config = model_config(described, words, str(adapters.path))
    check_words(described, words, config, str(adapters.path))
    lora = {
        name: value
        for name, value in adapters.lora_keys(config).items()
        if name not in ("lora_weight_qtype", "lora_tile_size")
    }
    config = model_config(described, [*as_words(lora), *words], str(adapters.path))
    leaves = adapters.leaves(config, weight_shapes(config))
    place = base or adapters.origin.path
    if place and "://" not in place and local_path(place).is_dir() and getattr(open_source(place), "text", None):
        print(
            "the adapters have the parameter names of the text model alone, which peft does not find in "
            f"{visible(place)}; trainer.export format=hf writes the text model alone"
        )
    with new_folder(out) as partial:
        write_peft(
            partial,
            config,
            leaves,
            base=place,
            rank=lora["lora_rank"],
            alpha=lora["lora_alpha"],
            dtype=options.get("dtype"),
        )
        copy_beside(adapters.tokenizer, adapters.about, partial, fields=True)
    _report(out, options, sum(leaf.size for leaf in leaves.values()))


def _read_words(words: Sequence[str]) -> tuple[str, Path, dict[str, str], list[str]]:
    """Returns FROM, OUT, this command's options, and the `key=value` arguments for base.yml."""
    paths, rest = words[:2], words[2:]
    named = {"format", "dtype", "weights", "like", *schema().keys}
    own: tuple[str, ...] = ("format=", "dtype=", "weights=", "like=", "load_parameters_path=")
    if "format=maxtext" in rest:
        own += ("scan_layers=",)
    options = dict(word.split("=", 1) for word in rest if word.startswith(own))
    gguf = options.get("format") == "gguf"
    mistakes = path_mistakes(paths, named, file=gguf)
    if options.get("format") not in FORMATS:
        mistakes.append(f"format={options.get('format', '')}: allowed: {', '.join(FORMATS)}")
    dtypes = GGUF_DTYPES if gguf else DTYPES
    if options.get("dtype", DTYPES[0]) not in dtypes:
        mistakes.append(f"dtype={options['dtype']}: allowed: {', '.join(dtypes)}, or leave it out")
    if options.get("weights", WEIGHTS[0]) not in WEIGHTS:
        mistakes.append(f"weights={options['weights']}: allowed: {', '.join(WEIGHTS)}, or leave it out")
    if "like" in options and options.get("format") != "hf":
        mistakes.append("like=...: only with format=hf")
    try:
        _scans(options)
    except ValueError as error:
        mistakes.append(f"scan_layers={options['scan_layers']}: {error}")
    if mistakes:
        raise UserError("\n  ".join(["cannot export:", *mistakes, "see python -m trainer.export --help"]))
    keys = [word for word in rest if not word.startswith(own)]
    return paths[0], local_path(paths[1]).absolute(), options, keys


def _scans(options: dict[str, str]) -> bool:
    return read_text(schema().keys["scan_layers"], options.get("scan_layers", "true"))


def _length_given(keys: Sequence[str]) -> bool:
    return any(word.startswith("max_target_length=") for word in keys)


def _write(folder: Path, options: dict[str, str], config: Config, leaves: Any, about: Any, like: Any) -> None:
    from trainer.weights.huggingface.config_json import length_notes
    from trainer.weights.huggingface.write import write_huggingface
    from trainer.weights.masks import with_zeros
    from trainer.weights.maxtext.model_arguments import maxtext_notes
    from trainer.weights.maxtext.write import write_maxtext
    from trainer.weights.params.write import write_params

    if options["format"] != "params":
        leaves = with_zeros(config, leaves)
    if options["format"] == "hf":
        for note in like.notes(leaves, options.get("dtype")) if like else length_notes(config, about.fields):
            print(visible(note))
        write_huggingface(folder, config, leaves, options.get("dtype"), about, like=like)
    elif options["format"] == "maxtext":
        for note in maxtext_notes(config):
            print(note)
        write_maxtext(folder, config, leaves, options.get("dtype"), _scans(options))
    else:
        write_params(folder, config, leaves, options.get("dtype"))


def _report(out: Path, options: dict[str, str], parameters: int) -> None:
    from trainer.observe.text import si

    dtype = options.get("dtype", "as stored")
    weights = "the average of the parameters" if options.get("weights") == "ema" else "the parameters as trained"
    print(f"{out}: {si(parameters, '').strip()} parameters, format={options['format']}, dtype {dtype}, {weights}")
    for path in [out] if out.is_file() else sorted(out.iterdir()):
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        size = si(sum(file.stat().st_size for file in files), "B")
        print(f"  {path.name + ('/' if path.is_dir() else ''):<36}{size:>10}")


def _maxtext_line(out: Path, options: dict[str, str], config: Config, length: dict[str, int]) -> str:
    """Returns a message with the keys that MaxText needs to load the output, because a MaxText checkpoint does not
    describe its model."""
    from trainer.leaves.orbax import ITEMS
    from trainer.weights.maxtext.model_arguments import maxtext_keys
    from trainer.weights.maxtext.write import STEP
    from trainer.weights.model_keys import as_words

    keys = {"load_parameters_path": str(out / STEP / ITEMS), "scan_layers": _scans(options)}
    keys |= maxtext_keys(config) | length
    return f"to load it in MaxText, give: {shlex.join(as_words(keys))}"


if __name__ == "__main__":
    main()
