"""The endpoint for long, and its page in a real headless Chromium, where one is installed."""

import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

import pytest
from endpoint import ask, command, save_world, serving, speaker, text_of
from world import save_tokenizer

import generate
from talon.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


# --- for long -------------------------------------------------------------------------------------


def resident(process: subprocess.Popen) -> int:
    """Bytes of memory that a process holds."""
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def generated(directory: Path, prompts: list[str]) -> dict[str, list[int]]:
    """What generate.py says without a head, greedily: its ids by prompt."""
    said = {}
    for prompt in prompts:
        words = ["--checkpoint_path", directory / "talon.safetensors", "--prompt", prompt]
        words += ["--no_chat", "--no_compile", "--max_new_tokens", "24"]
        words += ["--json", directory / "out.json"]
        assert generate.main([*map(str, words)]) == 0
        said[prompt] = json.loads((directory / "out.json").read_text())["samples"][0]["tokens"]
    return said


def test_many_requests_and_many_clients_get_no_wrong_text_and_no_memory_grows(tmp_path):
    save_world(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    expected = generated(tmp_path, [f"Question {i}" for i in range(6)])
    wrong, count = [], 0

    def one(port: int, prompt: str) -> None:
        nonlocal count
        count += 1
        answer = ask(port, "/v1/completions", prompt=prompt, max_tokens=24)
        ids, usage = expected[prompt], answer["usage"]
        if text_of(answer) != tokenizer.decode(ids) or usage["completion_tokens"] != len(ids):
            wrong.append(answer)

    def client(port: int, first: int, end: float) -> None:
        turn = first
        while time.monotonic() < end:
            one(port, f"Question {turn % 6}")
            turn += 1

    with command(tmp_path, "--port", "0") as (process, port):
        threading.Thread(target=process.stderr.read, daemon=True).start()
        for i in range(60):
            one(port, f"Question {i % 6}")
        before = resident(process)
        for i in range(500):
            one(port, f"Question {i % 6}")
        middle, end = resident(process), time.monotonic() + 20
        threads = [threading.Thread(target=client, args=(port, i, end)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = resident(process)
    assert not wrong, wrong[0]
    print(f"memory in MB: {before / 1e6:.1f}, {middle / 1e6:.1f}, {after / 1e6:.1f}; {count} texts")
    assert middle - before < 20e6 and after - before < 20e6


# --- the page -------------------------------------------------------------------------------------


class Browser:
    """A headless Chromium, driven through its debugging pipe."""

    def __init__(self, profile: Path) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
        words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]

        def take_pipes() -> None:
            os.dup2(given[0], 3)
            os.dup2(given[1], 4)

        self.process = subprocess.Popen(
            words, preexec_fn=take_pipes, pass_fds=(3, 4), stderr=DEVNULL
        )
        for end in (theirs_in, theirs_out, *given):
            os.close(end)
        self.out, self.into = open(ours_in, "rb"), open(ours_out, "wb")
        self.count, self.session = 0, None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __call__(self, method: str, **params: object) -> dict:
        """One command of the DevTools protocol, and its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.into.write(json.dumps(message).encode() + b"\0")
        self.into.flush()
        while True:
            data = b""
            while not data.endswith(b"\0"):
                byte = self.out.read(1)
                assert byte, "Chromium has ended"
                data += byte
            answer = json.loads(data[:-1])
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def js(self, code: str) -> object:
        result = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, code: str, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.js(code):
            assert time.monotonic() < end, (code, self.js("document.body.innerText"))
            time.sleep(0.02)

    def open(self, port: int) -> None:
        self("Page.navigate", url=f"http://127.0.0.1:{port}/")
        self.until("document.readyState === 'complete' && location.pathname === '/'")

    def key(self, name: str, code: int) -> None:
        more = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        more |= {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, **more)

    def say(self, text: str) -> None:
        self.until("send.textContent === 'Send'")
        self.js("document.getElementById('text').focus()")
        self("Input.insertText", text=text)
        self.key("Enter", 13)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.out.close()
        self.into.close()


@pytest.fixture
def browser(tmp_path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


LAST = "[...document.querySelectorAll('.answer')].at(-1)"
FIGURES = "[...document.querySelectorAll('.figures')].at(-1).textContent"
COLOURS = f"""["drafted", "chosen"].map(
    name => getComputedStyle({LAST}.querySelector("." + name)).color)"""


def test_the_page_asks_colours_drafted_tokens_stops_and_asks_again(browser, tmp_path):
    save_tokenizer(tmp_path)
    engine = speaker(load_tokenizer(tmp_path), "abcdefghijkl", ends=False, limit=60_000)
    with serving(engine, api_key="sesame") as port:
        browser.open(port)
        browser.until("!document.getElementById('locked').hidden")  # it asks for the key
        browser.js("document.getElementById('key').value = 'sesame'; describe()")
        browser.until("document.getElementById('model').textContent.includes('chain:2')")

        browser.js("document.getElementById('limit').value = 20")
        browser.say("Tell me")
        browser.until(f"{FIGURES}.includes('reused')")
        assert browser.js(f"{LAST}.textContent") == ("abcdefghijkl" * 2)[:20]
        assert "20 tokens" in browser.js(FIGURES) and "acceptance 2." in browser.js(FIGURES)
        drafted, chosen = browser.js(COLOURS)
        assert drafted != chosen
        browser.js("document.getElementById('marks').click()")
        assert browser.js(COLOURS) == [chosen, chosen]

        browser.js("document.getElementById('limit').value = 50000")
        for stop in (lambda: browser.key("Escape", 27), lambda: browser.js("send.click()")):
            browser.say("For ever")
            browser.until(f"{LAST}.textContent.length > 100")
            assert browser.js("send.textContent") == "Stop"
            stop()
            browser.until("send.textContent === 'Send'")
            assert "stopped" in browser.js(FIGURES)
            said, end = engine.current.generation, time.monotonic() + 20
            while said.stop_reason is None:  # the browser takes a moment to close the connection
                assert time.monotonic() < end
                time.sleep(0.01)
            assert said.stop_reason == "gone"

        browser.js("document.getElementById('limit').value = 12")
        browser.say("Again")
        browser.until(f"{FIGURES}.includes('12 tokens')")
        assert browser.js("document.querySelectorAll('.user').length") == 4

        light = browser.js("getComputedStyle(document.body).backgroundColor")
        browser.js("theme.click()")
        assert browser.js("getComputedStyle(document.body).backgroundColor") != light
        browser.js("fresh.click()")
        assert browser.js("talk.textContent") == ""


def test_the_page_shows_a_refusal_and_keeps_the_question(browser, tmp_path):
    save_tokenizer(tmp_path)
    with serving(speaker(load_tokenizer(tmp_path), "abcdefghijkl", limit=300)) as port:
        browser.open(port)
        browser.until("document.getElementById('model').textContent.includes('chain:2')")
        browser.say("<b>long</b>" * 100)
        browser.until(f"{FIGURES}.includes('shorten it')")
        assert browser.js("document.querySelector('.user b')") is None
        assert browser.js("document.getElementById('text').value.length") == 1100


def test_the_page_completes_texts_where_there_is_no_chat_template(browser, tmp_path):
    save_tokenizer(tmp_path, template="")
    with serving(speaker(load_tokenizer(tmp_path), "abcdefghijkl")) as port:
        browser.open(port)
        browser.until("document.getElementById('model').textContent.includes('chain:2')")
        browser.say("Once!")
        browser.until(f"{FIGURES}.includes('reused')")
        assert browser.js(f"{LAST}.textContent") == "abcdefghijkl"
