"""`python -m trainer.serve` as a user starts it: adapters, the printed command, and shutdown."""

import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tokenizers
from compiler import xla_flags

from trainer import serve
from trainer.generate import main as generate

KEYS = ["per_device_batch_size=3", "prefill_chunk_size=16", "max_target_length=64", "add_eos=false"]
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with the model `base`, whose tokens are characters, and its adapters `one` and `two`."""
    found = tmp_path_factory.mktemp("serve")
    shutil.copytree(TESTS / "goldens" / "llama", found / "base")
    config = json.loads((found / "base/config.json").read_text())
    (found / "base/config.json").write_text(json.dumps(config | {"eos_token_id": None}))  # texts do not end
    tokens = ["<unk>", "<s>", "</s>", *string.ascii_lowercase, *string.digits, *" ()+-*/=:;,.<>[]{}!?_|&%$"]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({it: i for i, it in enumerate(tokens)}, [], unk_token="<unk>"))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(found / "base" / "tokenizer.json"))
    (found / "base" / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    for name, alpha in (("one", 8), ("two", 24)):
        shutil.copytree(TESTS / "peft" / "llama", found / name)
        file = found / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": alpha}))
    return found


@pytest.fixture(scope="module")
def server(folder):
    """Yields a server process, which demands a token, and its output."""
    (folder / "tokens").write_text("a-token-for-tests\n")
    words = [sys.executable, "-m", "trainer.serve", "base", "adapters=one,two", "port=0", *KEYS]
    environment = os.environ | {"XLA_FLAGS": xla_flags(1)}
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [*words, "token_file=tokens", "host=0.0.0.0"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    printed = ""
    while "curl" not in printed:
        line = process.stdout.readline()
        assert line, (folder / "errors.txt").read_text()
        printed += line
    yield process, printed
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdout.close()


def url_of(printed):
    return re.search(r"^http://\S+$", printed, re.MULTILINE)[0].replace("0.0.0.0", "127.0.0.1")


def call(url, path, body=None):
    headers = {"content-type": "application/json", "authorization": "Bearer a-token-for-tests"}
    request = urllib.request.Request(url + path, body and json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.load(answer)


def test_the_banner_has_a_command_that_works(server, folder):
    _, printed = server
    assert re.match(
        r"ready after [\d.]+ s: base, one, two; 3 slots of 64 tokens\nhttp://0\.0\.0\.0:\d+\n  curl", printed
    )
    command = printed.splitlines()[2].strip()
    assert "Bearer $(head -n 1 tokens)" in command
    if shutil.which("curl"):
        answer = subprocess.run(["bash", "-c", command + " -s"], cwd=folder, capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0
    assert shlex.split(command)[-2] == "-d"
    with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(url_of(printed) + "/v1/models"):
        pass
    assert refused.value.code == 401
    refused.value.close()


@pytest.mark.rest(covered_by="unit/inference/test_adapters.py; unit/serving/")
def test_several_adapters_in_one_batch(server, folder, monkeypatch, capsys):
    """Each model generates the same text as alone in trainer.generate."""
    monkeypatch.chdir(folder)
    texts, url = {}, url_of(server[1])
    assert [model["id"] for model in call(url, "/v1/models")["data"]] == ["base", "one", "two"]
    for name in ("base", "one", "two"):
        adapter = [] if name == "base" else [f"adapters={name}"]
        generate(["base", *adapter, "prompt=def f", "decode_sampling_strategy=greedy", *KEYS])
        texts[name] = capsys.readouterr().out.removeprefix("def f").removesuffix("\n")
    assert len({*texts.values()}) == 3
    answers = {}

    def ask(name):
        body = {"model": name, "prompt": "def f", "max_tokens": 59, "temperature": 0}
        answers[name] = call(url, "/v1/completions", body)

    threads = [threading.Thread(target=ask, args=(name,)) for name in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: answer["choices"][0]["text"] for name, answer in answers.items()} == texts
    assert min(map(len, texts.values())) > 30
    assert all(answer["model"] == name for name, answer in answers.items())


def test_sigterm_finishes_what_was_accepted(server, folder):
    """The last test, because it ends the server."""
    process, printed = server
    answers = []
    body = {"prompt": ["def f"] * 12, "max_tokens": 58}
    thread = threading.Thread(target=lambda: answers.append(call(url_of(printed), "/v1/completions", body)))
    thread.start()
    while "trainer_slots_in_use 3.0" not in metrics(printed) and thread.is_alive():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    thread.join()
    assert len(answers[0]["choices"]) == 12
    assert process.wait(60) == 0
    assert "Traceback" not in (folder / "errors.txt").read_text()


def metrics(printed):
    headers = {"authorization": "Bearer a-token-for-tests"}
    with urllib.request.urlopen(urllib.request.Request(url_of(printed) + "/metrics", headers=headers)) as answer:
        return answer.read().decode()


@pytest.mark.parametrize(
    ("said", "words"),
    {
        "there is no model: give FROM": [],
        "allowed: raw, ema": ["base", "weights=best"],
        "use_chunked_prefill=false: a long prompt would keep all others waiting": [
            "base",
            "use_chunked_prefill=false",
        ],
        "others can reach it, so requests must have a token": ["base", "host=0.0.0.0"],
        "cannot listen at host=256.1.1.1": ["base", "host=256.1.1.1", "token_file=tokens"],
        "token_file=no-such-file: cannot be read": ["base", "token_file=no-such-file"],
        "base and another model are called base": ["base", "adapters=base"],
        "return_log_prob: requests select this with logprobs": ["base", "return_log_prob=true"],
        "port=65536": ["base", "port=65536"],
    }.items(),
)
def test_what_a_server_refuses(folder, monkeypatch, capsys, said, words):
    (folder / "tokens").write_text("a-token-for-tests\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("TRAINER_SERVE_TOKEN", raising=False)
    with pytest.raises(SystemExit) as exited:
        serve.main(words)
    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("trainer.serving")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as exited:
        serve.main(["base"])
    assert exited.value.code == 2
    assert "the package uvicorn is not installed: pip install 'trainer[serve]'" in capsys.readouterr().err


def test_names_of_models():
    assert serve._name("runs/one/checkpoints/12") == serve._name("runs/one/") == serve._name("../one") == "one"
    assert serve._names("base", ["a/x", "b/y"]) == {"base": 0, "x": 1, "y": 2}
