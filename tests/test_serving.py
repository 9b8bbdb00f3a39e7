"""The endpoint: the official client, the API's refusals, hostile requests, turns, leaving, ending.

Models are tiny: a random one with a head, and table models whose every choice is known. What takes
long, and the page in a browser, is in test_serving_slow.py.
"""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from endpoint import (
    CARD,
    HELLO,
    ask,
    command,
    connect,
    drafted,
    exchange,
    head,
    plain,
    post,
    receive,
    refused,
    save_world,
    serving,
    speaker,
    text_of,
)
from tiny import random_model
from world import TEMPLATE, VOCAB, save_tokenizer

from talon.cli import run
from talon.decoder import Decoder
from talon.serving import server as server_module
from talon.serving.__main__ import main
from talon.serving.server import MOST_BODY
from talon.text import Engine
from talon.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("serving")
    save_world(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(world) -> Tokenizer:
    return load_tokenizer(world)


@pytest.fixture(scope="module")
def port(tokenizer) -> Iterator[int]:
    """A server with a random model and its head."""
    with serving(drafted(tokenizer)) as number:
        yield number


# --- the official client --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(port):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def test_the_client_gets_the_text_that_the_engine_says(client, tokenizer):
    engine = plain(tokenizer)
    ids = tokenizer.encode_chat(HELLO)
    expected = engine.generate(ids, max_new_tokens=40)
    text = "".join(expected)
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=40
    )
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == len(expected.tokens) == 40
    assert answer.usage.total_tokens == len(ids) + 40
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.system_fingerprint == CARD["system_fingerprint"]
    assert answer.usage.rounds > 0 and 1 <= answer.usage.acceptance_length <= 3


def test_a_stream_joined_is_the_whole_answer(client):
    fields = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 60}
    whole = client.chat.completions.create(**fields)
    parts = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [part.choices[0].delta.content for part in parts[:-1]]
    assert len(pieces) > 20 and "".join(pieces) == whole.choices[0].message.content
    assert [part.choices[0].delta.role for part in parts[:2]] == ["assistant", None]
    assert [part.choices[0].finish_reason for part in parts[-3:-1]] == [None, "length"]
    assert len({part.id for part in parts}) == 1
    assert parts[0].object == "chat.completion.chunk"
    assert not parts[-1].choices and parts[-1].usage.completion_tokens == 60


def test_a_stream_says_which_pieces_were_drafted(tokenizer):
    openai = pytest.importorskip("openai")
    with serving(speaker(tokenizer, "abcdefghijkl")) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        parts = client.completions.create(
            model="tiny", prompt="z", temperature=0, max_tokens=12, stream=True
        )
        choices = [part.choices[0] for part in parts]
    said = [(choice.text, choice.drafted) for choice in choices if choice.text]
    # Rounds of three, two of them drafted, after the prompt's own choice.
    assert "".join(piece for piece, _ in said) == "abcdefghijkl"
    assert [mark for _, mark in said] == [False, *[True, True, False] * 4][:12]


def test_a_stop_text_is_cut_off(client, tokenizer):
    openai = pytest.importorskip("openai")
    with serving(speaker(tokenizer, "abcdefghijkl")) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        for stop, text in (("ef", "abcd"), (["x", "hi"], "abcdefg"), ([], "abcdefghijkl")):
            for stream in (False, True):
                answer = client.chat.completions.create(
                    model="tiny", messages=HELLO, temperature=0, stop=stop, stream=stream
                )
                if stream:
                    choices = [part.choices[0] for part in answer]
                    said, reason = "".join(c.delta.content for c in choices), choices[-1]
                else:
                    said, reason = answer.choices[0].message.content, answer.choices[0]
                assert (said, reason.finish_reason) == (text, "stop")


def test_a_seed_gives_the_same_text_twice_with_and_without_the_head(client, tokenizer):
    openai = pytest.importorskip("openai")
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 1.2}

    def say(client, **more) -> str:
        answer = client.chat.completions.create(**fields, **more)
        return answer.choices[0].message.content

    with serving(plain(tokenizer)) as port:
        other = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        for more in ({}, {"top_p": 0.8}, {"extra_body": {"top_k": 20}}):
            said = say(client, seed=7, **more)
            assert said == say(client, seed=7, **more) == say(other, seed=7, **more)
            assert said != say(client, seed=8, **more)
    assert say(client) != say(client)  # without a seed, a new one each time


def test_completions_take_a_text_or_ids(client, tokenizer):
    ids = tokenizer.encode("Hello")
    said = [
        client.completions.create(model="tiny", prompt=prompt, temperature=0)
        for prompt in ("Hello", ids)
    ]
    assert said[0].choices[0].text == said[1].choices[0].text
    assert said[0].usage.completion_tokens == 16 and said[0].object == "text_completion"


def test_the_client_lists_the_model(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_client_sees_refusals_as_what_they_are(client, tokenizer):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, n=2)
    assert caught.value.param == "n"
    with serving(plain(tokenizer), api_key="sesame") as port:
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="open").models.list()
        assert openai.OpenAI(base_url=url, api_key="sesame").models.list().data


# --- what may be asked ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"tools": [], "tool_choice": "auto", "logit_bias": {}, "top_logprobs": None},
        {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": True},
        {"stop": None, "seed": None, "temperature": 0, "stream": None, "model": None},
        {"max_tokens": 500, "max_completion_tokens": 8},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        {"messages": [{"role": "user", "content": "Hello", "tool_calls": None, "name": ""}]},
        {"temperature": 0.0, "top_p": 1, "top_k": 0, "ignore_eos": False},
        {"chat_template_kwargs": {}},
    ],
)
def test_what_asks_for_nothing_changes_nothing(port, fields):
    expected = ask(port, messages=HELLO, max_tokens=8)
    assert text_of(ask(port, **{"messages": HELLO, "max_tokens": 8} | fields)) == text_of(expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frobnicate": "yes"}, "frobnicate"),
        ({"stream_options": {"include_everything": True}}, "stream_options.include_everything"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": "seven"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": [8]}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"model": 5}, "model"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"content": "Hello"}]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*HELLO, {"role": "user", "content": ["x"]}]}, "messages[1].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
            "messages[0].tool_calls",
        ),
        ({"chat_template_kwargs": {"messages": HELLO}}, "messages"),
        ({"prompt": "Hello"}, "prompt"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(port, fields, param):
    error = refused(port, post({"messages": HELLO, "max_tokens": 4} | fields), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param.partition("[")[0].partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature -1"),
        ({"top_p": 0}, "top_p 0"),
        ({"top_k": -5}, "top_k -5"),
        ({"seed": -1}, "seed -1"),
        ({"max_tokens": -1}, "-1"),
        ({"stop": ""}, "stop"),
        ({"stop": "\ud800"}, ""),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "shorten"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "UTF-8"),
    ],
)
def test_values_are_refused_as_the_engine_refuses_them(port, fields, words):
    assert words in refused(port, post({"messages": HELLO} | fields), 400)["message"]


@pytest.mark.parametrize("prompt", ["", [], [0, -1], [10**6], ["a", "b"], [[1, 2]], [True], 5, {}])
def test_prompts_that_are_none_are_refused(port, prompt):
    if prompt == "":  # the tokenizer begins every text with BOS, so this one is not empty
        assert ask(port, "/v1/completions", prompt=prompt, max_tokens=1)
    else:
        refused(port, post({"prompt": prompt}, "/v1/completions"), 400)


def test_template_options_reach_the_template(tmp_path):
    save_tokenizer(tmp_path, TEMPLATE + "{{ 'Think ' + how if how }}")
    tokenizer = load_tokenizer(tmp_path)
    with serving(plain(tokenizer)) as port:
        for options in ({}, {"how": "hard"}):
            answer = ask(port, messages=HELLO, max_tokens=1, chat_template_kwargs=options)
            more = len(tokenizer.encode("Think hard", add_bos=False)) if options else 0
            expected = len(tokenizer.encode_chat(HELLO)) + more
            assert answer["usage"]["prompt_tokens"] == expected
        body = {"messages": HELLO, "chat_template_kwargs": {"hwo": "hard"}}
        assert refused(port, post(body), 400)["param"] == "chat_template_kwargs.hwo"


def test_a_model_without_a_template_has_completions_only(tmp_path):
    save_tokenizer(tmp_path, template="")
    with serving(plain(load_tokenizer(tmp_path))) as port:
        error = refused(port, post({"messages": HELLO}), 400)
        assert "/v1/completions" in error["message"]
        assert ask(port, "/v1/completions", prompt="Hello")["usage"]["completion_tokens"] == 16


# --- turns ----------------------------------------------------------------------------------------


def test_a_second_turn_runs_only_its_new_tokens(tokenizer):
    engine = speaker(tokenizer, "abcdefghijkl")
    with serving(engine) as port:
        talk = [{"role": "user", "content": "Tell me. " * 100}]
        first = ask(port, messages=talk)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        talk += [{"role": "assistant", "content": text_of(first)}, *HELLO]
        second = ask(port, messages=talk)
        before = len(tokenizer.encode_chat(talk[:1])) + len("abcdefghijkl")
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == before - 1
        other = ask(port, messages=HELLO)
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < 20
        assert text_of(first) == text_of(second) == text_of(other) == "abcdefghijkl"


@pytest.mark.parametrize("length", [10, 255, 256, 257, 300, 511, 512, 513, 1000])
def test_long_prompts_read_in_parts_give_the_same_text(port, tokenizer, length):
    ids = [3 + (7 * i + length) % 256 for i in range(length)]
    engine = plain(tokenizer)
    expected = "".join(engine.generate(ids, max_new_tokens=12))
    answer = ask(port, "/v1/completions", prompt=ids, max_tokens=12)
    assert text_of(answer) == expected and answer["usage"]["prompt_tokens"] == length


def test_requests_at_once_wait_their_turn_and_get_their_own_text(port, tokenizer):
    engine, count = plain(tokenizer), 8
    prompts = [f"Question {i}" for i in range(count)]
    expected = ["".join(engine.generate(prompt, max_new_tokens=30)) for prompt in prompts]
    said = [""] * count

    def one(i: int) -> None:
        said[i] = text_of(ask(port, "/v1/completions", prompt=prompts[i], max_tokens=30))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == expected


@pytest.fixture
def endless(tokenizer) -> Iterator[tuple[Engine, int]]:
    """An engine that would talk for a minute or more, and its server's port."""
    engine = speaker(tokenizer, "abcdefghijkl", ends=False, limit=60_000)
    with serving(engine) as port:
        yield engine, port


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_text_within_a_round(endless, stream):
    engine, port = endless
    with connect(port) as connection:
        connection.sendall(post({"messages": HELLO, "stream": stream, "temperature": 0}))
        until(lambda: engine.current and engine.current.generation.stats.rounds > 10)
        left = engine.current.generation
    rounds = left.stats.rounds  # read after leaving: one more may be under way, one just begun
    answer = ask(port, messages=HELLO, max_tokens=5)
    assert text_of(answer) == "abcde"
    assert left.stats.rounds <= rounds + 2 and left.stop_reason == "gone"


def test_a_client_that_leaves_while_it_waits_is_never_answered(endless):
    engine, port = endless
    with connect(port) as first:
        first.sendall(post({"messages": HELLO, "temperature": 0}))
        until(lambda: engine.current is not None)
        running = engine.current
        with connect(port) as second:
            second.sendall(post({"messages": HELLO, "temperature": 0}))
        time.sleep(0.1)
        assert engine.current is running
    assert text_of(ask(port, messages=HELLO, max_tokens=3)) == "abc"


def test_a_client_with_no_more_to_say_still_gets_its_answer(port):
    expected = ask(port, messages=HELLO, max_tokens=30)
    for stream in (False, True):
        fields = {"messages": HELLO, "max_tokens": 30, "temperature": 0, "stream": stream}
        status, _, body = exchange(port, post(fields), half_close=True)
        assert status == 200
        if stream:
            events = [json.loads(line[6:]) for line in body.split(b"\n\n")[:-2]]
            said = "".join(event["choices"][0]["delta"]["content"] for event in events)
        else:
            said = text_of(json.loads(body))
        assert said == text_of(expected)


def test_the_page_and_health_answer_while_a_text_is_under_way(endless):
    engine, port = endless
    with connect(port) as connection:
        connection.sendall(post({"messages": HELLO, "temperature": 0}))
        until(lambda: engine.current is not None)
        assert exchange(port, head("/health", "GET"))[0] == 200
        assert exchange(port, head("/", "GET"))[0] == 200
        refused(port, post({"messages": []}), 400)
        assert engine.current.generation.stop_reason is None


# --- hostile requests -----------------------------------------------------------------------------


DEEP = 100_000
SAID = b', "messages": [{"role": "user", "content": "x"}]}'
BAD_BODIES = [
    b"", b"{", b"nonsense", b"[]", b"null", b"5", b'"text"', b"{'a': 1}", b"\xff\xfe\xfd", b"\x00",
    b'{"messages": [', b"[" * DEEP, b'{"a":' * DEEP, b'{"messages": NaN}', b'{"n": 2}', b'{"n":',
    b'{"seed": ' + b"9" * 5000 + SAID, b'{"messages": {}}', b'{"messages": [[[[[]]]]]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}', b'{"messages": [null]}',
    b'{"messages": [{"role": [], "content": ""}]}', b'{"temperature": NaN' + SAID,
    b'{"top_p": Infinity' + SAID, b'{"temperature": 1e999' + SAID, b'{"stop": [""]' + SAID,
    b'{"max_tokens": -99999999999999999999' + SAID, b'{"seed": 99999999999999999999' + SAID,
    b'{"top_k": 99999999999999999999' + SAID, b'{"stop": "\\ud800", "seed": -1' + SAID,
    b'{"chat_template_kwargs": {"self": 1}' + SAID, b'{"model": [' + b"1," * DEEP + b"1]}",
    b'{"' + b"k" * DEEP + b'": 1}', SAID, b'{"stream_options": {"stream_options": {}, "a": 1}}',
    b'{"messages": [{"role": "user", "content": "' + b"y" * 900_000 + b'"}]}',
]  # fmt: skip
PATHS = [
    "/../../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/%00", "/page.html", "/api.py",
    "/v1", "/v1/", "/v1/models/../../x", "/v1/models/other", "/v1/chat/completions/", "/V1/models",
    "/v1/chat/completions%20", "/static/../page.html", "/.git/config", "/~root", "/health%00",
    "/v1/chat//completions", "/health/", "/index.html", "/favicon.ico", "/%2e%2e/%2e%2e/etc/passwd",
    "/....//....//etc/passwd", "/\\..\\..\\windows", "/v1/models/tiny/../..", "/" + "a" * 9000,
]  # fmt: skip
NOT_HTTP = [
    b"\r\n\r\n", b"GET\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"{}\r\n\r\n",
    b"get / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1 \r\n\r\n", b"GET http://a/ HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\n\r\n", b"\x00" * 100 + b"\r\n\r\n", b"GET / HTTP/1.1\n\r\n\r\n",
    b"GET / HTTP/1.1\r\n: empty\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
]  # fmt: skip
METHODS = ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "X" * 300]
LENGTHS = ["-1", "+5", "1e3", "0x10", "five", "", "5, 5", " ", "1.0", "9" * 30, "\u00b2", "5;5"]


def hostile() -> Iterator[tuple[bytes, set[int]]]:
    """Requests with the statuses that are right for them."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        yield from ((post(body, path), {400}) for body in BAD_BODIES)
    yield from ((head(path, "GET"), {404}) for path in PATHS)
    yield from ((post({}, path), {404}) for path in PATHS)
    yield from ((data, {400}) for data in NOT_HTTP)
    yield from ((post(body, Expect="100-continue"), {400}) for body in BAD_BODIES[:8])
    for path in ("/", "/health", "/v1/models", "/v1/chat/completions"):
        yield from ((head(path, method), {405}) for method in METHODS)
    yield from ((head("/v1/chat/completions", method), {405}) for method in ("GET", "HEAD"))
    yield post(b"{}", "/"), {405}
    yield from ((head(Content_Length=length), {411, 413}) for length in LENGTHS)
    yield head(Transfer_Encoding="chunked") + b"5\r\nhello\r\n0\r\n\r\n", {411}
    yield head(Transfer_Encoding="chunked", Content_Length=5) + b"hello", {411}
    yield head(Content_Length=MOST_BODY + 1), {413}
    yield post(b"x" * (MOST_BODY + 1)), {413}
    yield post(b"x" * (64 * MOST_BODY)), {413}
    yield head(**{f"X{i}": "y" for i in range(200)}), {431}
    yield head(**{f"X{i}": "y" * 500 for i in range(5000)}), {431}
    yield head(Cookie="z" * 200_000), {431}
    yield b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", {431}
    yield b"A" * 1_000_000, {431}
    yield head("/", "GET", Host="evil.example"), {403}
    yield head("/", "GET", Host="127.0.0.1.evil.example:80"), {403}
    yield post({"messages": HELLO}, Origin="http://evil.example"), {403}
    yield post({"messages": HELLO}, Origin="null"), {403}


def test_hostile_requests_get_the_right_status_and_no_traceback(port, capfd):
    requests = list(hostile())
    assert len(requests) >= 200
    for data, statuses in requests:
        status, first, body = exchange(port, data)
        assert status in statuses, (data[:120], status, body[:200])
        assert data.startswith(b"HEAD") or json.loads(body)["error"]["message"]
        assert b"Traceback" not in body and b"root:" not in body
    assert text_of(ask(port, messages=HELLO, max_tokens=3)) is not None
    assert "Traceback" not in capfd.readouterr().err


def test_requests_cut_short_are_refused_or_dropped(port, capfd):
    whole = post({"messages": HELLO, "max_tokens": 3})
    for length in range(0, len(whole), 7):
        status, _, _ = exchange(port, whole[:length], half_close=True)
        assert status == 400, length
        with connect(port) as connection:
            connection.sendall(whole[:length])  # and gone
    assert text_of(ask(port, messages=HELLO, max_tokens=3)) is not None
    assert "Traceback" not in capfd.readouterr().err


def test_slow_senders_are_given_up_and_hold_nobody_up(tokenizer, monkeypatch, capfd):
    monkeypatch.setattr(server_module, "PATIENCE", 2.0)
    with serving(plain(tokenizer)) as port:
        slow = [connect(port) for _ in range(20)]
        whole = post({"messages": HELLO})
        for i, connection in enumerate(slow):
            connection.sendall(whole[: len(whole) * i // 20])
        started = time.monotonic()
        assert ask(port, messages=HELLO, max_tokens=3)
        while time.monotonic() < started + 2.5:  # a byte now and then does not help
            for connection in slow[1:-1]:
                with suppress(OSError):
                    connection.send(b"x")
            time.sleep(0.5)
        assert {receive(connection)[0] for connection in slow} == {408}
        for connection in slow:
            connection.close()
        assert ask(port, messages=HELLO, max_tokens=3)
    assert "Traceback" not in capfd.readouterr().err


def test_a_model_of_nan_is_a_refusal_and_not_a_traceback(tokenizer, capfd):
    model = random_model(vocab_size=VOCAB)
    model.norm.weight.fill_(float("nan"))
    with serving(Engine(Decoder(model, 128, compile=False), tokenizer, (2,), {})) as port:
        for stream in (False, True):
            data = post({"messages": HELLO, "temperature": 0, "stream": stream})
            assert "NaN" in refused(port, data, 500)["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_mistake_of_ours_is_told_to_the_log_and_the_server_goes_on(tokenizer, capfd):
    engine = plain(tokenizer)
    engine.decoder.prefill = None
    with serving(engine) as port:
        assert refused(port, post({"messages": HELLO}), 500)["type"] == "server_error"
        assert exchange(port, head("/health", "GET"))[0] == 200
    assert "Traceback" in capfd.readouterr().err


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_says_what_it_serves_and_a_signal_ends_its_text_and_the_server(world, number):
    options = "--port", "0", "--max_seq_length", "2048"
    with command(world, *options) as (process, port):
        answer = ask(port, messages=HELLO, max_tokens=4)
        assert answer["system_fingerprint"] == "talon.safetensors, fp32, tree chain:2"
        long = [{"role": "user", "content": "x" * 2200}]
        assert "2048" in refused(port, post({"messages": long}), 400)["message"]
        fields = {"messages": HELLO, "stream": True, "temperature": 0, "ignore_eos": True}
        with connect(port) as connection:
            connection.sendall(post(fields))
            assert connection.recv(1, socket.MSG_PEEK)
            process.send_signal(number)
            status, _, body = receive(connection)
            assert status == 200 and b"the server is stopping" in body
            assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1"),
        (["--port", "BUSY"], "give another"),
        (["--tree", "oak"], "oak"),
        (["--max_seq_length", "1"], "max_seq_length 1"),
        (["--checkpoint_path", "nothing.safetensors"], "nothing.safetensors"),
        (["--checkpoint_path", "BARE"], "no tokenizer"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(world, tmp_path, capfd, argv, words):
    bare = tmp_path / "talon.safetensors"
    bare.write_bytes((world / "talon.safetensors").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as busy:
        names = {"BUSY": str(busy.getsockname()[1]), "BARE": str(bare)}
        given = ["--checkpoint_path", str(world / "talon.safetensors"), "--port", "0"]
        with pytest.raises(SystemExit) as ended:
            run(lambda: main([*given, *(names.get(word, word) for word in argv)]))
    error = capfd.readouterr().err
    assert ended.value.code == 2 and len(error.splitlines()) == 1
    assert error.startswith("error: ") and words in error
