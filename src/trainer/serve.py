"""`python -m trainer.serve FROM [key=value ...]`: serves a trained model over HTTP."""

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import PurePath

from trainer.config.errors import UserError, command_line, exit_on_user_error
from trainer.config.files import by_hand
from trainer.config.help import answers_question
from trainer.config.keys import Config
from trainer.config.load import Loaded, load
from trainer.config.words import visible
from trainer.generate import NO_MODEL, WEIGHTS, read_words
from trainer.runtime.cluster import find_cluster
from trainer.runtime.platforms import add_threads_for_simulated_devices, leave_out_absent_tpu

_OWN = {"adapters": (), "weights": WEIGHTS}
# Chunked prefill keeps long prompts from delaying other requests. The temperature is the default of OpenAI's API.
_DEFAULTS = {"use_chunked_prefill": "true", "decode_sampling_temperature": "1"}
HELP = """\
usage: python -m trainer.serve FROM [adapters=PATH,PATH] [weights=raw|ema] [key=value ...]
       python -m trainer.serve [base.yml] load_parameters_path=FROM model_name=... [key=value ...]

FROM     a run's folder or one of its checkpoints/N, a Hugging Face model directory, a GGUF file, or the output of
         trainer.export. The model's keys come from it. A MaxText checkpoint does not contain them: use the second form.
adapters LoRA runs or PEFT folders with FROM as their base. A request's field model selects one by its folder's name
weights  for a run with ema_decay: ema (default), the average of the parameters, or raw
key      keys of base.yml: host, port, drain_seconds, ... (--help Serving); per_device_batch_size is the number of
         slots per device; max_target_length is the length of prompt and continuation together (default: the training
         length, at most 2048); decode_sampling_* are the defaults for requests without sampling parameters

The API is compatible with OpenAI's clients: /v1/models, /v1/completions and /v1/chat/completions. / is a page to try
the model, /health and /metrics are for monitoring. SIGTERM or Ctrl-C ends the server after the accepted
requests, at the latest after drain_seconds. The server needs the packages of trainer[serve].
--help Serving lists the keys for serving; --explain KEY explains a key."""


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    started = time.perf_counter()
    words = command_line(argv)
    if answers_question(words, HELP):
        return
    model_path, options, keys = read_words(words, "serve", _OWN)
    given = {word.partition("=")[0] for word in keys}
    greedy = "decode_sampling_strategy=greedy" in keys
    keys += [
        f"{key}={value}" for key, value in _DEFAULTS.items() if key not in given and not (greedy and "temp" in key)
    ]
    loaded = None if model_path else load(keys, environment=os.environ)
    if loaded and not loaded.config.load_parameters_path:
        raise UserError(f"cannot serve:\n  {NO_MODEL}\n  see python -m trainer.serve --help")
    # JAX is imported only after the checks that do not need it.
    leave_out_absent_tpu()
    add_threads_for_simulated_devices()
    average = options.get("weights") == "ema"
    if loaded is None:
        from trainer.weights.load import of_checkpoint

        loaded, average = of_checkpoint(model_path, keys, options.get("weights"))
    _check(loaded)
    paths = [path for path in options.get("adapters", "").split(",") if path]
    _serve(loaded, paths, average, options.get("weights") == "raw", started)


def _check(loaded: Loaded) -> None:
    """Raises UserError for settings that a server does not support."""
    config, wrong = loaded.config, []
    if config.compile_topology:
        wrong.append("compile_topology: a server cannot compile for other devices (trainer.generate can); leave it out")
    if not config.use_chunked_prefill:
        wrong.append("use_chunked_prefill=false: a long prompt would keep all others waiting; leave it out")
    if "use_chat_template" in loaded.changed:
        wrong.append("use_chat_template: the path of a request selects this (/v1/chat/completions); leave it out")
    if "return_log_prob" in loaded.changed:
        wrong.append("return_log_prob: requests select this with logprobs; leave it out")
    if find_cluster(config, os.environ) is not None:
        wrong.append("this process is one of several, but a server must be a single process; start only one")
    if wrong:
        raise UserError("\n  ".join(["cannot serve:", *wrong]))


def _serve(loaded: Loaded, paths: list[str], average: bool, raw: bool, started: float) -> None:
    try:
        from trainer.serving.access import read_tokens
        from trainer.serving.front import Model
        from trainer.serving.server import Server, bound, url_of
    except ImportError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise UserError(f"the package {error.name} is not installed: pip install 'trainer[serve]'") from error
    from trainer.chat.encoder import Prompts
    from trainer.inference.max_engine import MaxEngine
    from trainer.inference.sampling import sampling_of
    from trainer.inference.scheduler import Scheduler
    from trainer.weights.open import open_adapters

    config = loaded.config
    for note in loaded.notes:
        _say(note)
    tokens = read_tokens(config.token_file, config.host)
    with bound(config.host, config.port) as at:
        names = _names(config.served_model_name or _name(config.load_parameters_path), paths)
        opened = [open_adapters(path, average=False if raw else None) for path in paths]
        engine = MaxEngine(config, adapters=opened, controls=True)
        tokenizer = engine.get_tokenizer()
        if tokenizer.note:
            _say(tokenizer.note)
        chat = Prompts(config, tokenizer, _say)
        hand = {key for key, where in loaded.changed.items() if by_hand(where)}
        params = engine.load_params(say=_say, given=hand, average=average)
        model = Model(
            scheduler=Scheduler(engine, params),
            tokenizer=tokenizer,
            chat=chat,
            adapters=names,
            begin=tokenizer.before_text,
            stop=engine.stop_tokens(tokenizer),
            turn_end=chat.stop_tokens(),
            default=sampling_of(engine.config),
            seed=config.decode_sampling_seed if "decode_sampling_seed" in hand else None,
        )
        _say(f"the model is loaded after {time.perf_counter() - started:.1f} s; compiling")

        def ready() -> None:
            slots, length = engine.max_concurrent_decodes, config.max_target_length
            seconds = time.perf_counter() - started
            print(f"ready after {seconds:.1f} s: {', '.join(names)}; {slots} slots of {length} tokens", flush=True)
            text = config.prompt if "prompt" in hand else ""
            print(_banner(url_of(at), next(iter(names)), config, text, chat.own_template, bool(tokens)), flush=True)

        Server(model, at, tokens, _say).run(ready)


def _names(base: str, paths: list[str]) -> dict[str, int]:
    """Returns a dict from each model's name to its number: 0 for the base, and 1, 2, ... for the adapters. Raises
    UserError if two names are equal.
    """
    names = {base: 0}
    for number, path in enumerate(paths, 1):
        if (name := _name(path)) in names:
            raise UserError(
                f"adapters: {path} and another model are called {name}; requests select by the folder's name, so "
                "rename one folder, or set served_model_name, the name of the base"
            )
        names[name] = number
    return names


def _name(path: str) -> str:
    """Returns the name of a model's folder, or of the run's folder if `path` is a checkpoint."""
    parts = [part for part in PurePath(path).parts if part != ".."]
    run = parts[:-2] if len(parts) > 2 and parts[-2] == "checkpoints" else parts
    return visible(run[-1]) if run else "model"


def _banner(url: str, name: str, config: Config, text: str, chat: bool, token: bool) -> str:
    """Returns a text for the console: the server's address, and an example request for a chat or, if `chat` is false,
    for a completion. `text`: the prompt of the example; if it is empty, a default prompt."""
    from trainer.serving.access import VARIABLE

    where = f"$(head -n 1 {shlex.quote(config.token_file)})" if config.token_file else f"${VARIABLE}"
    header = f' -H "Authorization: Bearer {where}"' if token else ""
    path = "chat/completions" if chat else "completions"
    prompt = {"prompt": text or config.prompt or "Once"}
    said = {"messages": [{"role": "user", "content": text or "Hello"}]} if chat else prompt
    body = json.dumps({"model": name, **said, "max_tokens": 32}, ensure_ascii=False)
    content = "-H 'Content-Type: application/json'"
    return f"{url}\n  curl {url}/v1/{path} {content}{header} -d {shlex.quote(body)}"


def _say(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
