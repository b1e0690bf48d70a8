"""`python -m trainer.generate FROM [prompt=TEXT] [key=value ...]`: continues prompts with a trained model."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.config.dump import PROCESSES
from trainer.config.errors import UserError, command_line, exit_on_user_error, shortened
from trainer.config.files import YML_ENDINGS
from trainer.config.help import answers_question
from trainer.config.load import Loaded, load
from trainer.config.paths import local_path, path_problem
from trainer.config.schema import schema
from trainer.config.words import visible
from trainer.runtime.agreement import agreed
from trainer.runtime.distributed import distributed, told_to_others
from trainer.runtime.platforms import add_threads_for_simulated_devices, leave_out_absent_tpu, prepare_to_compile

WEIGHTS = ("raw", "ema")
FORMATS = ("text", "jsonl")
_OWN = {"prompts": (), "adapters": (), "weights": WEIGHTS, "format": FORMATS}  # allowed values; () allows any text
NO_MODEL = "there is no model: give FROM, or load_parameters_path=... and the model's keys"
HELP = """\
usage: python -m trainer.generate FROM [prompt=TEXT | prompts=FILE] [adapters=PATH,PATH] [format=text|jsonl]
                                       [weights=raw|ema] [key=value ...]
       python -m trainer.generate [base.yml] load_parameters_path=FROM model_name=... [prompt=TEXT] [key=value ...]

FROM     a run's folder or one of its checkpoints/N, a Hugging Face model directory, a GGUF file, or the output of
         trainer.export. The model's keys come from it. A MaxText checkpoint does not contain them: use the second form.
prompt   the text to continue; default: the prompt of base.yml
prompts  a file with one prompt per line; - reads standard input; not together with prompt
adapters runs with LoRA, or folders of PEFT, with FROM as their base: each adapter continues each prompt, in one batch.
         If FROM is a run with LoRA, its adapters are merged into its base
format   text (default), or jsonl: a line of JSON for each prompt, with prompt, text (the continuation), adapter,
         tokens, log_probs (of each token, at temperature 1) and end: stop (a token that ends texts) or length
weights  for a run with ema_decay: ema (default), the average of the parameters, or raw
key      keys of base.yml: decode_sampling_* control sampling, max_target_length is the length of prompt and
         continuation together (default: the training length, at most 2048), ici_*_parallelism is the mesh, without
         pipeline stages;
         compile_topology=v5e-8 compiles a decode step for these devices and reports its memory and cost;
         use_chat_template=true makes each prompt the user's message to the assistant

Standard output contains only the texts, each after its prompt, or the lines of JSON; messages go to standard error.
--help Generation lists the keys of generation, --explain KEY explains one."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    started = time.perf_counter()
    words = command_line(argv)
    if answers_question(words, HELP):
        return
    with told_to_others(words):
        model_path, options, keys = read_words(words, "generate", _OWN)
        as_json = options.get("format") == "jsonl"
        if as_json and not any(word.startswith("return_log_prob=") for word in keys):
            keys.append("return_log_prob=true")
        loaded = None if model_path else load(keys, environment=os.environ)
        connection = loaded or load([word for word in keys if word.partition("=")[0] in PROCESSES])
        prompts = _prompts(options["prompts"]) if "prompts" in options else None
        name = loaded.config.compile_topology if loaded else _last(keys, "compile_topology")
        if loaded and not (name or loaded.config.load_parameters_path):
            raise UserError(f"cannot generate:\n  {NO_MODEL}\n  see python -m trainer.generate --help")
    # Imports that load JAX come after the checks that do not need it.
    if name:
        prepare_to_compile(name)
    else:
        leave_out_absent_tpu()
        add_threads_for_simulated_devices()
    average = options.get("weights") == "ema"
    adapters = [path for path in options.get("adapters", "").split(",") if path]
    if name:
        from trainer.weights.load import of_checkpoint

        _compile(loaded or of_checkpoint(model_path, keys, options.get("weights"))[0], adapters)
        return
    with distributed(connection.config):  # must begin before a checkpoint is read, because reading may use devices
        if loaded is None:
            from trainer.weights.load import of_checkpoint

            loaded, average = agreed(lambda: of_checkpoint(model_path, keys, options.get("weights")))
        raw = options.get("weights") == "raw"
        _generate(loaded, prompts, adapters, average, raw, as_json, started)


class _Text(NamedTuple):
    """A prompt, and the adapter with which to continue it."""

    prompt: str
    tokens: list[int]  # the tokens of the prompt
    adapter: str  # the adapter's path; "" for none

    def row(self) -> dict[str, Any]:
        """Returns the text's JSON line, still without generated tokens."""
        adapter = {"adapter": self.adapter} if self.adapter else {}
        return {"prompt": self.prompt, **adapter, "text": "", "tokens": [], "log_probs": []}


def _generate(
    loaded: Loaded,
    prompts: list[str] | None,
    adapters: list[str],
    average: bool,
    raw: bool,
    as_json: bool,
    started: float,
) -> None:
    """Continues the prompts. Every process runs every step; only the first process writes. For adapters with averaged
    weights, the average is used unless `raw` is true."""
    from trainer.config.files import by_hand
    from trainer.inference.max_engine import MaxEngine
    from trainer.inference.scheduler import Scheduler
    from trainer.inference.text import tokens_of
    from trainer.runtime.agreement import check_same, is_first
    from trainer.runtime.versions import program
    from trainer.weights.open import open_adapters

    say, write = (_say, _write) if is_first() else (_nothing, _nothing)
    for note in loaded.notes:
        say(note)
    prompts = [loaded.config.prompt] if prompts is None else prompts

    def prepared():
        if not all(prompts):
            raise UserError("prompt is empty: give prompt=TEXT, or prompts=FILE")
        opened = [open_adapters(path, average=False if raw else None) for path in adapters]
        engine = MaxEngine(loaded.config, sequences=len(prompts) * max(len(adapters), 1), adapters=opened)
        tokenizer = engine.get_tokenizer()
        if tokenizer.note:
            say(tokenizer.note)
        begin, longest = tokenizer.before_text, engine.max_prefill_length
        chat = _chat(loaded, tokenizer, say)
        tokens = [tokens_of(prompt, tokenizer, begin, longest, say, chat) for prompt in prompts]
        return engine, tokenizer, [*engine.stop_tokens(tokenizer), *(chat.stop_tokens() if chat else ())], tokens

    engine, tokenizer, stop, tokens = agreed(prepared)
    # If the tokens differed between processes, the processes would run different steps and wait for each other forever.
    what = "the tokens of the prompts, and those that end a text,"
    check_same(lambda: program() | {what: "\n".join(map(str, [*tokens, stop]))})
    given = {key for key, where in loaded.changed.items() if by_hand(where)}
    scheduler = Scheduler(engine, engine.load_params(say=say, given=given, average=average))
    loading = time.perf_counter() - started
    several = len(adapters) > 1
    shown = [f"{prompt}\n" if loaded.config.use_chat_template and not as_json else prompt for prompt in prompts]
    texts = {
        scheduler.submit(row, stop=stop, adapter=number if several else 0): _Text(prompt, row, path)
        for number, path in enumerate(adapters or [""], 1)
        for prompt, row in zip(shown, tokens, strict=True)
    }
    say(_print(scheduler, tokenizer, texts, as_json, loading, write))


def _chat(loaded: Loaded, tokenizer: Any, say: Callable[[str], None]) -> Any:
    """Returns the encoder that converts prompts to conversations if use_chat_template is true, otherwise None."""
    if not loaded.config.use_chat_template:
        if (template := tokenizer.chat_template) and "use_chat_template" not in loaded.changed:
            say(
                f"{template.where} has a chat template, which is not applied: prompts are continued unchanged; "
                "use_chat_template=true applies it"
            )
        return None
    from trainer.chat.encoder import Prompts

    chat = Prompts(loaded.config, tokenizer, say)
    if not chat.stop_tokens():
        say("the template does not end turns with a special token: answers end with the document or at their limit")
    return chat


def _compile(loaded: Loaded, adapters: list[str]) -> None:
    """Compiles a decode step for compile_topology and prints the report."""
    from trainer.aot.report import DOES_NOT_FIT
    from trainer.aot.text import report_text, verdict
    from trainer.aot.topologies import devices_of, topology_of
    from trainer.inference.max_engine import MaxEngine

    config = loaded.config
    for note in loaded.notes:
        _say(note)
    devices = devices_of(topology_of(config), config.compile_topology_num_slices)
    _, report = MaxEngine(config, devices, adapters=adapters).aot_compile()
    print(report_text(report))
    if report.fits is False:
        _say(f"error: {verdict(report)}")
        raise SystemExit(DOES_NOT_FIT)


def _print(
    scheduler: Any,
    tokenizer: Any,
    texts: dict[int, _Text],
    as_json: bool,
    loading: float,
    write: Callable[[str], None],
) -> str:
    """Writes the texts in order while they are generated; a later text waits for the earlier ones. Returns a line with
    the times and the speed."""
    from trainer.inference.text import TextStream

    streams = {number: TextStream(tokenizer, text.tokens) for number, text in texts.items()}
    several = len({text.adapter for text in texts.values()}) > 1
    heads = {number: f"== {text.adapter} ==\n" if several else "" for number, text in texts.items()}
    waiting = {number: "" if as_json else heads[number] + text.prompt for number, text in texts.items()}
    rows: dict[int, Any] = {number: text.row() for number, text in texts.items()}
    left, ended = list(texts), set()
    count, began, first = 0, time.perf_counter(), 0.0
    write(waiting.pop(left[0]))
    for event in scheduler.run():
        if event.token is not None:
            first = first or time.perf_counter() - began
            count += 1
        row, part = rows[event.request], ""
        if event.token is not None:
            part = streams[event.request].add(event.token)
            row["tokens"].append(event.token)
            row["log_probs"].append(event.log_prob)
        if event.end is not None:
            part += streams[event.request].end()
            ended.add(event.request)
        if as_json:
            row["text"] += part
            part = "" if event.end is None else json.dumps(row | {"end": event.end})
        if event.end is not None:
            part += "\n"
        if event.request == left[0]:
            write(part)
        else:
            waiting[event.request] += part
        while left and left[0] in ended:
            left.pop(0)
            if left:
                write(waiting.pop(left[0]))
    seconds = time.perf_counter() - began
    speed = f"{(count - 1) / (seconds - first):.0f} tokens/s after that" if count > 1 else "no more tokens"
    return f"{count} tokens; ready after {loading:.1f} s, the first token {first:.2f} s later, {speed}"


def _write(text: str) -> None:
    # Files and other programs get the text unchanged. For a terminal, the model's control characters are made visible,
    # so that they have no effect.
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _say(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)


def _nothing(text: str) -> None:
    """Does nothing, for processes that do not write."""


def read_words(
    words: Sequence[str], program: str, own: Mapping[str, Sequence[str]]
) -> tuple[str, dict[str, str], list[str]]:
    """Returns the argument FROM ("" if it is absent), the program's options, and the arguments for base.yml.

    Args:
      own: a dict from the program's options to their allowed values; () allows any text.

    Raises:
      UserError: FROM is not a path, or the value of an option is not allowed.
    """
    names = {*own, *schema().keys}
    options = {name: value for name, _, value in (word.partition("=") for word in words) if name in own}
    keys = [word for word in words if word.partition("=")[0] not in own]
    model_path = ""
    if keys and keys[0].partition("=")[0] not in names and not keys[0].endswith(YML_ENDINGS):
        model_path, *keys = keys
    mistakes = []
    if model_path and (problem := path_problem(model_path)):
        mistakes.append(f"{shortened(model_path)}: {problem}")
    if not words:
        mistakes.append(NO_MODEL)
    if "prompts" in options and any(word.startswith("prompt=") for word in keys):
        mistakes.append("prompt and prompts: give one of them")
    for name, value in options.items():
        if own[name] and value not in own[name]:
            mistakes.append(f"{name}={value}: allowed: {', '.join(own[name])}, or leave it out")
    if mistakes:
        raise UserError("\n  ".join([f"cannot {program}:", *mistakes, f"see python -m trainer.{program} --help"]))
    return model_path, options, keys


def _last(words: Sequence[str], key: str) -> str:
    return dict(word.partition("=")[::2] for word in words).get(key, "")


def _prompts(path: str) -> list[str]:
    try:
        text = sys.stdin.read() if path == "-" else local_path(path, "prompts=").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"prompts={path}: cannot be read: {error}") from error
    # splitlines would also split at form feeds and some Unicode characters.
    prompts = [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"prompts={path}: contains no prompt; write one prompt per line")
    return prompts


if __name__ == "__main__":
    main()
