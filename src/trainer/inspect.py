"""`python -m trainer.inspect PATH [norms=false | row=N | eval_row=N]`: shows a checkpoint, or prepared data."""

import json
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.config.dump import to_flow
from trainer.config.errors import UserError, command_line, exit_on_user_error, shortened
from trainer.config.paths import local_path
from trainer.config.prepared import MANIFEST
from trainer.config.schema import schema
from trainer.config.values import read_text
from trainer.config.words import TRAINED_COLOUR, TRAINED_PLAIN, counted, visible
from trainer.runtime.platforms import leave_out_absent_tpu

HELP = """\
usage: python -m trainer.inspect PATH [norms=false | row=N | eval_row=N]

PATH         a run's folder (its newest checkpoint) or one of its checkpoints/N, also in a bucket; the output of
             trainer.export format=params; a MaxText checkpoint (its run, N, or N/items); a Hugging Face directory; a
             GGUF file; one .safetensors file; a folder of trainer.prepare
norms=false  read headers only: compute no norms and compare no checksums

row=N        for a folder of trainer.prepare: show row N: each segment's document, its positions in the row, its tokens,
             and which tokens are trained. Rows are numbered from 0, through all components of a mixture in order
eval_row=N   the same for a held-out row

Prints the kind, step, configuration, position in the data, each parameter with its shape, dtype and norm, and the sizes
of all other state. For stacked layers, a line shows the norm of all layers and the range of the norms of single layers.
Loads one array at a time."""
_OPTIONS = "norms=", "row=", "eval_row="
_WIDTH = 150
_MODEL = (
    *("decoder_block", "model_name", "base_num_decoder_layers", "base_emb_dim", "base_num_query_heads"),
    *("base_num_kv_heads", "head_dim", "base_mlp_dim", "vocab_size", "max_target_length"),
)
_WORDS = {
    "opt_state": "optimizer state",
    "outer_opt_state": "outer optimizer state",
    "rest": "other variables",
    "inner_state/params": "islands: parameters",
    "inner_state/opt_state": "islands: optimizer state",
    "inner_state/rest": "islands: other variables",
}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    if words and words[0] in ("--help", "-h", "help"):
        print(HELP)
        return
    path, norms, row = _read_words(words)
    if "://" not in path and (local_path(path) / MANIFEST).is_file():
        from trainer.data import shown

        place = local_path(path)
        for line in (
            shown.row(place, *row, TRAINED_COLOUR if sys.stdout.isatty() else TRAINED_PLAIN)
            if row
            else shown.summary(place)
        ):
            print(line)
        return
    if row:
        raise UserError(f"{path}: row=N requires a folder of trainer.prepare, but this path has no {MANIFEST}")
    leave_out_absent_tpu()
    from trainer.weights.contents import contents_of

    contents = contents_of(path, verify=norms)
    for lines in (_head(contents), _parameters(contents, norms), _others(contents)):
        for line in lines:
            print(visible(line, keep=""), flush=True)


def _read_words(words: Sequence[str]) -> tuple[str, bool, tuple[int, bool] | None]:
    """Returns the path, whether to print norms, and the requested row: None, or its number and whether it is a held-out
    row."""
    options = dict(word.split("=", 1) for word in words if word.startswith(_OPTIONS))
    paths = [word for word in words if not word.startswith(_OPTIONS)]
    if len(paths) != 1 or paths[0].startswith("-") or len(options) > 1:
        raise UserError("give one path: python -m trainer.inspect PATH [norms=false | row=N | eval_row=N]; see --help")
    for name in ("row", "eval_row"):
        if name in options:
            if not options[name].isdecimal():
                raise UserError(f"{name}={shortened(options[name])}: give a row number, counted from 0")
            return paths[0], True, (int(options[name]), name == "eval_row")
    try:
        return paths[0], read_text(schema().keys["enable_checkpointing"], options.get("norms", "true")), None
    except ValueError as error:
        raise UserError(f"norms={options['norms']}: {error}") from None


def _head(contents: Any) -> Iterator[str]:
    yield _row("checkpoint", contents.path)
    yield _row("kind", contents.kind)
    if contents.step is not None:
        yield _row("step", counted(contents.step, "update"))
    keys = contents.keys
    if flags := _combination(keys):
        yield _row("combination", flags)
    if contents.verified is not None:
        yield _row("checksums", "every file is as it was written" if contents.verified else "not compared")
    if keys:
        sizes = " ".join(f"{key}={to_flow(keys[key])}" for key in _MODEL if key in keys)
        yield from _wrapped("model", sizes)
        yield from _wrapped("configuration", " ".join(_differing(keys)) or "the defaults of base.yml")
    if contents.position is not None:
        yield from _wrapped("data", f"{_flat(contents.position)}; fingerprint {contents.fingerprint}")
    if contents.tokenizer:
        yield _row("tokenizer", ", ".join(contents.tokenizer))
    for note in contents.notes:
        yield _row("note", note)


def _combination(keys: Mapping[str, Any]) -> str:
    from trainer.config.flags import COMBINATIONS, combination, flags_of

    flags = flags_of(next(iter(COMBINATIONS)))
    return combination(keys) if flags and flags.keys() <= keys.keys() else ""


def _differing(keys: Mapping[str, Any]) -> list[str]:
    """Returns KEY=VALUE for keys that differ from base.yml, except for sizes that are printed separately."""
    defaults = schema().keys
    return [
        f"{name}={shortened(to_flow(value))}"
        for name, value in keys.items()
        if name not in _MODEL and value != defaults[name].default
    ]


def _flat(position: Any) -> str:
    """Returns `position` as JSON on one line. The outer braces of an object are omitted."""
    if isinstance(position, dict):
        return ", ".join(f"{key}: {json.dumps(value)}" for key, value in position.items())
    return json.dumps(position)


def _parameters(contents: Any, norms: bool) -> Iterator[str]:
    from trainer.leaves.source import progress

    tensors = [tensor for tensor in contents.tensors if tensor.part == "params"]
    yield ""
    yield f"parameters: {_sizes(tensors)}"
    wide = max(len(tensor.name) for tensor in tensors)
    shapes = {tensor.name: f"[{', '.join(map(str, tensor.shape))}]" for tensor in tensors}
    room, kinds = max(map(len, shapes.values())), max(len(tensor.dtype) for tensor in tensors)
    squares = 0.0
    with progress(tensors, "reading", lambda line: print(line, file=sys.stderr)) as tick:
        for tensor in tensors:
            line = f"  {tensor.name:<{wide}}  {shapes[tensor.name]:<{room}}  {tensor.dtype:<{kinds}}"
            if norms:
                of_layers = tensor.norms()
                total = math.sqrt(sum(norm * norm for norm in of_layers))
                squares += total * total
                line += f"  norm {total:<10.4g}"
                if len(of_layers) > 1:
                    line += f" layers {min(of_layers):.4g} to {max(of_layers):.4g}"
                tick(tensor.nbytes)
            yield line.rstrip()
    if norms:
        yield f"  norm of all: {math.sqrt(squares):.6g}"


def _others(contents: Any) -> Iterator[str]:
    """Yields a line for each part of the state except parameters, and for each part of an optimizer state."""
    names = [param.name for param in contents.tensors if param.part == "params"]
    parts: dict[str, list[Any]] = {}
    for tensor in contents.tensors:
        if tensor.part.rpartition("/")[2] not in ("params", "step") or tensor.part == "inner_state/params":
            parts.setdefault(tensor.part, []).append(tensor)
    for part, tensors in parts.items():
        kind = f" of {contents.keys['opt_type']}" if part.endswith("opt_state") and "opt_type" in contents.keys else ""
        yield ""
        yield f"{_WORDS.get(part, part)}{'' if part.startswith('outer') else kind}: {_sizes(tensors)}"
        slots: dict[str, list[Any]] = {}
        for tensor in tensors:
            name = next((name for name in names if tensor.name.endswith(f"/{name}")), "")
            slots.setdefault(tensor.name.removesuffix(name).rstrip("/"), []).append(tensor)
        if part.endswith("opt_state"):
            wide = max(map(len, slots))
            yield from (f"  {slot:<{wide}}  {_sizes(those)}" for slot, those in slots.items())
    yield ""
    yield f"in all: {_sizes(contents.tensors)}"


def _sizes(tensors: Sequence[Any]) -> str:
    from trainer.observe.text import si

    dtypes = ", ".join(dict.fromkeys(tensor.dtype for tensor in tensors))
    size = si(sum(tensor.nbytes for tensor in tensors), "B")
    values = counted(sum(tensor.size for tensor in tensors), "value")
    return f"{counted(len(tensors), 'array')}, {values}, {size} ({dtypes})"


def _row(name: str, text: str) -> str:
    return f"{name:<13}  {text}"


def _wrapped(name: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH - 15, break_on_hyphens=False)
    return [_row(name if i == 0 else "", line) for i, line in enumerate(lines)]


if __name__ == "__main__":
    main()
