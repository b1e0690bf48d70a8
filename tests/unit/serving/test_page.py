"""The page at /, in headless Chromium, if it is on the path or the variable CHROMIUM names it."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess

import pytest
from serving_cases import SLOTS, call, complete, served, tiny_engine, wait_for

from trainer.serve import _banner
from trainer.serving.app import _PAGE

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
FOUND = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page in a browser that is controlled through two pipes, with JSON messages that end with a zero byte."""

    def __init__(self, url):
        self._numbers = itertools.count(1)
        (there, to), (of, there_too) = os.pipe(), os.pipe()
        words = [FOUND, "--headless", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu"]
        shell = ["bash", "-c", f'exec "$@" 3<&{there} 4>&{there_too}', "bash", *words, "--remote-debugging-pipe"]
        self.process = subprocess.Popen(shell, pass_fds=(there, there_too), stderr=subprocess.DEVNULL)
        os.close(there)
        os.close(there_too)
        self._to, self._of = os.fdopen(to, "wb", 0), os.fdopen(of, "rb")
        target = self.call("Target.createTarget", url=url)["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    _session: dict = {}

    def call(self, method, **params):
        number = next(self._numbers)
        self._to.write(json.dumps({"id": number, "method": method, "params": params} | self._session).encode() + b"\0")
        while True:
            message = bytearray()
            while (byte := self._of.read(1)) != b"\0":
                assert byte, "the browser has ended"
                message += byte
            if (answer := json.loads(message)).get("id") == number:
                return answer["result"]

    def run(self, code):
        """Returns the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=code, returnByValue=True)["result"].get("value")

    def text(self, name):
        return self.run(f"document.getElementById('{name}')?.textContent")

    def close(self):
        self.process.kill()
        self.process.wait()
        self._to.close()
        self._of.close()


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def test_the_page_is_one_small_file(engine):
    with served(*engine) as port:
        status, headers, text = call(port, "/", method="GET")
    assert status == 200
    assert text == _PAGE.read_bytes()
    assert len(text) < 6000
    assert b"://" not in text  # the page loads nothing
    assert "connect-src 'self'" in headers["content-security-policy"]


def test_the_command_of_a_chat_model_is_a_chat(engine):
    config = engine[0].config
    assert "/v1/chat/completions" in _banner("http://a", "m", config, "", chat=True, token=False)
    assert '"messages": [{"role": "user", "content": "Hi"}]' in _banner("http://a", "m", config, "Hi", True, False)
    assert '"prompt": "def "' in _banner("http://a", "m", config, "", chat=False, token=False)


@pytest.mark.skipif(FOUND is None, reason="there is no Chromium")
def test_in_a_browser(engine):
    """It shows the API's text as it arrives, speed and errors, and asks for a token where the server requires one."""
    with served(*engine) as port, contextlib.closing(Page(f"http://127.0.0.1:{int(port)}/")) as page:
        wait_for(lambda: page.run("document.getElementById('model')?.value") == "tiny")
        page.run("document.getElementById('temperature').value = 0; document.getElementById('count').value = 40")
        page.run("document.getElementById('send').click()")
        wait_for(lambda: "tokens/s" in page.text("speed"))
        text = complete(port, prompt="def ", max_tokens=40, temperature=0)["choices"][0]["text"]
        assert page.text("text") == text
        assert page.text("speed").startswith("40 tokens, ")
        page.run("document.getElementById('count').value = 500; document.getElementById('chat').click()")
        page.run("document.getElementById('send').click()")
        wait_for(lambda: "max_tokens is 500" in page.text("error"))
        page.run("document.getElementById('count').value = 90; document.getElementById('send').click()")
        wait_for(lambda: page.text("text").partition("\n\nassistant: ")[2])
        page.run("document.getElementById('stop').click()")
        wait_for(lambda: page.run("document.getElementById('prompt').value") == "")
        page.run("document.getElementById('prompt').value = 'b'; document.getElementById('count').value = 2")
        page.run("document.getElementById('send').click()")
        wait_for(lambda: page.text("text").count("assistant: ") == 2)  # the conversation goes on
        page.run("document.getElementById('clear').click(); document.getElementById('send').click()")
        wait_for(lambda: page.text("text").count("assistant: ") == 1)
        wait_for(lambda: port.scheduler.free_slots == SLOTS)
    with served(*engine, ["a-long-token"]) as port, contextlib.closing(Page(f"http://127.0.0.1:{int(port)}/")) as page:
        wait_for(lambda: page.run("document.getElementById('access')?.hidden") is False)
        code = "const token = document.getElementById('token'); token.value = 'a-long-token';"
        page.run(f"{code} token.dispatchEvent(new Event('change'))")
        wait_for(lambda: page.run("document.getElementById('model').value") == "tiny")
