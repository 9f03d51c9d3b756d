"""The example server over a real socket, on the CPU."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.examples.serving.sampling import Sampler
from docs.examples.serving.server import MAX_BODY_BYTES, Server
from docs.examples.serving.text import ByteTokenizer, GrowingText
from jitattn.kv import KVCacheManager
from tests.support.serving import (
    at_once,
    complete,
    connect,
    events_of,
    make_checkpoint,
    request,
    running,
    stream,
    text_of,
    wait_until,
)

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = [f"question {i}: " + "lorem ipsum " * (i % 4) for i in range(10)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--kv-bytes", "4000000") as server:
        yield server


def say(server: Server, content: object, **arguments: object) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **arguments}
    return request(server, "POST", CHATS, body)


def is_idle(server: Server) -> bool:
    """Whether the engine has ended all it was asked for, and leaves the manager alone."""
    return server.engine.is_idle and server.engine.manager.stats().num_sequences == 0


def manager_of(server: Server) -> KVCacheManager:
    """The manager, when the engine's thread leaves it alone."""
    wait_until(lambda: is_idle(server))
    return server.engine.manager


# --- answers --------------------------------------------------------------------------------------


def test_models_and_health(server: Server) -> None:
    status, found = request(server, "GET", "/v1/models")
    assert status == 200
    assert [model["id"] for model in found["data"]] == ["random"]
    assert request(server, "GET", "/v1/models/random")[1]["object"] == "model"
    assert request(server, "GET", "/health") == (200, {"status": "ok"})


def test_an_answer(server: Server) -> None:
    answer = complete(server, "hello", max_tokens=9, model="random")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["text"]) == 9
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 9)
    assert usage["total_tokens"] == 15
    as_tokens = complete(server, [ByteTokenizer.BEGIN, *b"hello"], max_tokens=9)
    assert text_of(as_tokens) == choice["text"]
    assert len(text_of(complete(server, "hello"))) <= 16


def test_requests_at_once_are_answered_as_alone(server: Server) -> None:
    alone = [text_of(complete(server, prompt, max_tokens=12)) for prompt in PROMPTS]
    manager_of(server).clear_reusable()
    calls = [lambda p=prompt: text_of(complete(server, p, max_tokens=12)) for prompt in PROMPTS]
    assert at_once(calls) == alone
    assert len(set(alone)) > 1


def test_prefixes_are_reused(server: Server) -> None:
    manager_of(server).clear_reusable()
    before = manager_of(server).stats().reused_tokens
    prompt = "a system prompt that many share, " * 4
    answers = [complete(server, prompt + end, max_tokens=5) for end in ("x", "y", "x")]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached[0] == 0
    assert 0 < cached[1] <= len(prompt) + 1
    assert cached[2] == len(prompt) + 1  # all but the last token, whose logits are wanted
    assert manager_of(server).stats().reused_tokens - before == sum(cached)
    assert text_of(answers[0]) == text_of(answers[2])


def test_a_stream_is_the_whole_in_pieces(server: Server) -> None:
    body: dict[str, object] = {"prompt": PROMPTS[3], "temperature": 0, "max_tokens": 20}
    events = stream(server, COMPLETIONS, body)
    assert "".join(event["choices"][0]["text"] for event in events) == text_of(
        complete(server, PROMPTS[3], max_tokens=20)
    )
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 19
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len({event["id"] for event in events}) == 1


def test_a_streamed_chat_of_several_choices(server: Server) -> None:
    body: dict[str, object] = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "why?"}]},
        ],
        "n": 3, "seed": 5, "max_completion_tokens": 15,
    }  # fmt: skip
    *events, last = stream(server, CHATS, {**body, "stream_options": {"include_usage": True}})
    status, whole = request(server, "POST", CHATS, body)
    assert status == 200
    texts, reasons = [""] * 3, [""] * 3
    for event in events:
        (choice,) = event["choices"]
        assert event["object"] == "chat.completion.chunk"
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert last["choices"] == []
    cached = whole["usage"].pop("prompt_tokens_details")
    assert cached["cached_tokens"] > 0
    last["usage"].pop("prompt_tokens_details")
    assert last["usage"] == whole["usage"]


def test_choices_share_a_prompt(server: Server) -> None:
    """It is computed once, and the first choice is what its seed alone gives."""
    manager_of(server).clear_reusable()
    before = server.engine.num_computed
    status, found = say(server, "tell me " * 20, n=4, seed=3, temperature=1.5, max_tokens=6)
    assert status == 200
    usage = found["usage"]
    assert server.engine.num_computed - before <= usage["prompt_tokens"] + 4 * 5
    assert len({choice["message"]["content"] for choice in found["choices"]}) > 1
    _, alone = say(server, "tell me " * 20, seed=3, temperature=1.5, max_tokens=6)
    assert alone["choices"][0]["message"] == found["choices"][0]["message"]
    _, greedy = say(server, "tell me " * 20, n=2, max_tokens=6)
    assert greedy["choices"][0]["message"] == greedy["choices"][1]["message"]


def test_a_seed_repeats_and_none_varies(server: Server) -> None:
    arguments: dict[str, object] = {"temperature": 1.5, "max_tokens": 12}
    with_seed = [text_of(complete(server, "go", **arguments, seed=7)) for _ in range(2)]
    assert with_seed[0] == with_seed[1]
    others = {text_of(complete(server, "go", **arguments)) for _ in range(4)}
    assert len(others) > 1
    narrow = complete(server, "go", **(arguments | {"top_p": 1e-6}))
    assert text_of(narrow) == text_of(complete(server, "go", max_tokens=12))


def test_stop_strings_end_an_answer_and_are_not_said(server: Server) -> None:
    whole = text_of(complete(server, PROMPTS[1], max_tokens=30))
    stop = whole[10:13]
    cut = whole[: whole.index(stop)]
    body: dict[str, object] = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": 30}
    for stops in (stop, ["never said", stop]):
        answer = complete(server, PROMPTS[1], max_tokens=30, stop=stops)
        assert text_of(answer) == cut
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(cut) + 3
        events = stream(server, COMPLETIONS, {**body, "stop": stops})
        assert "".join(event["choices"][0]["text"] for event in events) == cut


def test_tokens_that_end_an_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = text_of(complete(server, PROMPTS[2], max_tokens=30))
    last = next(char for char in whole if whole.index(char) >= 4)
    cut = whole[: whole.index(last)]
    monkeypatch.setattr(ByteTokenizer, "stop_ids", frozenset(last.encode()))
    answer = complete(server, PROMPTS[2], max_tokens=30)
    assert text_of(answer) == cut
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(cut) + 1


def test_what_asks_for_nothing_is_taken(server: Server) -> None:
    complete(
        server, "x", max_tokens=2, stop=None, logit_bias={}, presence_penalty=0.0, user="me",
        echo=False, best_of=1, suffix=None, n=1, stream=False,
    )  # fmt: skip


# --- clients that go, and memory that runs out ----------------------------------------------------


@pytest.mark.parametrize("is_stream", [True, False])
def test_pages_of_who_goes_are_given_back(server: Server, is_stream: bool) -> None:
    wait_until(lambda: is_idle(server))
    computed = server.engine.num_computed
    wanted = server.engine.max_len - 10
    connection = connect(server)
    body = {"prompt": "hi", "max_tokens": wanted, "n": 2, "stream": is_stream, "seed": 1}
    connection.request("POST", COMPLETIONS, json.dumps(body | {"temperature": 0}))
    if is_stream:
        response = connection.getresponse()
        events = events_of(response)
        assert [next(events) for _ in range(3)]
        response.close()
    else:
        wait_until(lambda: server.engine.num_computed > computed)
    connection.close()
    pools = manager_of(server).stats().pools
    assert server.engine.num_computed - computed < wanted
    assert all(pool.used == pool.held == 0 for pool in pools)


def test_memory_that_runs_out_makes_requests_wait() -> None:
    """Eight answers need many times the pages; sleepers have no host memory to go to, or some."""
    prompts = [f"{i} " + "words " * 12 for i in range(8)]
    with running("--kv-bytes", "4000000") as server:
        alone = [text_of(complete(server, prompt, max_tokens=24)) for prompt in prompts]
    small = "--kv-bytes", "300000", "--typical-len", "64"
    for host_bytes in (0, 100_000):
        with running(*small, "--host-bytes", str(host_bytes)) as server:
            assert server.engine.max_len < 700
            calls = [lambda p=p: text_of(complete(server, p, max_tokens=24)) for p in prompts]
            assert at_once(calls) == alone
            assert server.engine.num_suspended > 0
            wait_until(lambda: is_idle(server))


def test_all_that_fits_is_answered() -> None:
    """Requests as long as memory, one after the other; one token more is refused at once."""
    with running("--kv-bytes", "300000", "--typical-len", "64") as server:
        most = server.engine.max_len
        for prompt_len in (most - 3, most - 30):
            prompt = [ByteTokenizer.BEGIN, *[97] * (prompt_len - 1)]
            answers = at_once([lambda p=prompt: complete(server, p, max_tokens=most - len(p))] * 3)
            assert [answer["usage"]["total_tokens"] for answer in answers] == [most] * 3
            body = {"prompt": prompt, "max_tokens": most - prompt_len + 1}
            assert request(server, "POST", COMPLETIONS, body)[0] == 400


def test_choices_wait_too() -> None:
    with running("--kv-bytes", "300000", "--typical-len", "64") as server:
        status, found = say(server, "hi", n=5, seed=1, temperature=1.0, max_tokens=40)
        assert status == 200
        assert len(found["choices"]) == 5
        status, again = say(server, "hi", n=5, seed=1, temperature=1.0, max_tokens=40)
        assert again["choices"] == found["choices"]
        wait_until(lambda: is_idle(server))


def test_an_engine_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        assert complete(server, "x", max_tokens=1)

        def fail(*arguments: object) -> None:
            raise RuntimeError("out of luck")

        monkeypatch.setattr(server.engine.model, "forward", fail)
        body = {"prompt": "x", "n": 2}
        status, found = request(server, "POST", COMPLETIONS, body)
        assert (status, found["error"]["type"]) == (503, "server_error")
        assert "out of luck" in found["error"]["message"]
        assert request(server, "POST", COMPLETIONS, body)[0] == 503
        assert request(server, "GET", "/health")[0] == 503


def test_closing_ends_what_runs() -> None:
    found: list[Any] = []
    with running() as server:
        body = {"prompt": "x", "max_tokens": server.engine.max_len - 4, "temperature": 0}
        thread = threading.Thread(
            target=lambda: found.append(request(server, "POST", COMPLETIONS, body))
        )
        thread.start()
        wait_until(lambda: bool(server.engine.running))
        server.engine.close()
        thread.join()
    assert found[0][0] == 503


# --- bad requests ---------------------------------------------------------------------------------

BAD: list[tuple[dict[str, object], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, 258]}, "token 258"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": "\ud800"}, "surrogates"),
    ({"prompt": "x" * 100_000}, "expected at most"),
    ({"max_tokens": 1 << 30}, "expected at most"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": "5"}, "max_tokens='5'"),
    ({"max_tokens": True}, "max_tokens=True"),
    ({"n": 0}, "n=0"),
    ({"n": 17}, "n=17"),
    ({"n": 1.5}, "n=1.5"),
    ({"temperature": -1}, "temperature=-1"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": 10**400}, "temperature="),
    ({"top_p": 0}, "top_p=0"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop": "x" * 1_000_000}, "stop"),
    ({"stop": ["a", "x" * 257]}, "stop"),
    ({"prompt": [1] * 1_000_000}, "prompt has 1000000 tokens"),
    ({"prompt": "x" * 2_000_000}, "prompt has 2000000 characters"),
    ({"prompt": [10**4000]}, "prompt has the token 1000"),
    ({"user": "x" * 10_000}, "user"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": "x" * 10_000}}, "metadata"),
    ({"metadata": dict.fromkeys(map(str, range(100)), "x")}, "metadata"),
    ({"metadata": {"a": {}}}, "metadata"),
    ({"logprobs": 0}, "logprobs=0 is not supported"),
    ({"best_of": True}, "best_of=True is not supported"),
    ({"echo": 0}, "echo=0 is not supported"),
    ({"presence_penalty": False}, "presence_penalty=False is not supported"),
    ({"top_logprobs": False}, "top_logprobs=False is not supported"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls=1 is not supported"),
    ({"suffix": "x" * 1_000_000}, "suffix='xxx"),
    ({"x" * 1_000_000: 1}, "unknown parameter: 'xxx"),
    ({"temperature": True}, "temperature=True"),
    ({"temperature": "x" * 1_000_000}, "temperature='xxx"),
    ({"n": 10**4000}, "n=1000"),
    ({"stream": "x" * 1_000_000}, "stream='xxx"),
    ({"seed": "1"}, "seed='1'"),
    ({"seed": 1 << 63}, "seed="),
    ({"stream": "yes"}, "stream='yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options"),
    ({"logprobs": 3}, "logprobs=3 is not supported"),
    ({"echo": True}, "echo=True is not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
    ({"messages": []}, "unknown parameter: 'messages'"),
    ({"max_completion_tokens": 5}, "unknown parameter"),
    ({"top_k": 5}, "unknown parameter: 'top_k'"),
]
BAD_CHATS: list[tuple[dict[str, object], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages[0]"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates"),
    ({"messages": [{"role": "user"}]}, r"messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"parts of text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "tool_calls"),
    ({"messages": [{"role": "user", "content": "x"}] * 1025}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "name": "y" * 1000}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "x", "y" * 100_000: 1}]}, "yyy"),
    ({"prompt": "x"}, "unknown parameter: 'prompt'"),
    ({"tools": [{}]}, "tools="),
    ({"response_format": {"type": "json_object"}}, "response_format="),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
]


@pytest.mark.parametrize(("arguments", "wanted"), BAD)
def test_bad_completions(server: Server, arguments: dict[str, object], wanted: str) -> None:
    status, found = request(server, "POST", COMPLETIONS, {"prompt": "x", **arguments})
    assert status == 400, found
    assert found["error"]["type"] == "invalid_request_error"
    assert wanted in found["error"]["message"]
    assert len(json.dumps(found)) < 1000


@pytest.mark.parametrize(("arguments", "wanted"), BAD_CHATS)
def test_bad_chats(server: Server, arguments: dict[str, object], wanted: str) -> None:
    status, found = say(server, "x", **arguments)
    assert status == 400, found
    assert wanted in found["error"]["message"]
    assert len(json.dumps(found)) < 1000


def test_bad_paths_methods_models_and_bodies(server: Server) -> None:
    assert request(server, "GET", "/v2/models")[0] == 404
    assert request(server, "GET", COMPLETIONS)[0] == 405
    assert request(server, "POST", "/v1/models", {})[0] == 405
    assert request(server, "POST", "/v1/embeddings", {})[0] == 404
    assert request(server, "DELETE", "/v1/models")[0] == 501
    status, found = request(server, "POST", COMPLETIONS, {"prompt": "x", "model": "gpt-9"})
    assert (status, found["error"]["code"]) == (404, "model_not_found")
    for body in (b"{", b"\xff", b"[" * 100_000, b'"x"', b"[]", b""):
        status, found = request(server, "POST", COMPLETIONS, body)
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")


def exchange(server: Server, sent: bytes) -> bytes:
    host, port = server.server_address[:2]
    with socket.create_connection((host, port), timeout=20) as connection:
        connection.sendall(sent)
        found = b""
        while data := connection.recv(65536):
            found += data
        return found


def test_http_that_is_wrong(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    length = b"Content-Length: %d\r\n\r\n"
    assert b" 411 " in exchange(server, head + b"\r\n")
    assert b" 411 " in exchange(server, head + b"Content-Length: -5\r\n\r\n")
    assert b" 411 " in exchange(server, head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert b" 413 " in exchange(server, head + length % (MAX_BODY_BYTES + 1))
    assert b" 413 " in exchange(server, head + b"Content-Length: " + b"9" * 10_000 + b"\r\n\r\n")
    assert b" 411 " in exchange(server, head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n")
    assert b" 431 " in exchange(server, head + b"X: " + b"x" * 66_000 + b"\r\n\r\n")
    assert b" 431 " in exchange(server, head + (b"X: " + b"x" * 60_000 + b"\r\n") * 2 + b"\r\n")
    assert b" 431 " in exchange(server, head + b"X: x\r\n" * 200 + b"\r\n")
    assert b" 414 " in exchange(server, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert b"Bad request syntax" in exchange(server, b"nonsense\r\n\r\n")
    assert b"invalid_request_error" in exchange(server, b"GET / HTTP/9.9\r\n\r\n")


def test_the_body_of_a_get_is_no_request(server: Server) -> None:
    hidden = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
    found = exchange(server, head % len(hidden) + b"Connection: close\r\n\r\n" + hidden)
    assert found.count(b"HTTP/1.1 ") == 1
    found = exchange(server, head % len(hidden) + b"\r\n" + hidden + hidden)
    assert found.count(b"HTTP/1.1 200 ") == 2
    chunked = b"GET /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = exchange(server, chunked + hidden)
    assert found.count(b"HTTP/1.1 ") == found.count(b" 411 ") == 1
    assert b" 413 " in exchange(server, head % (MAX_BODY_BYTES + 1) + b"\r\n")


# --- connections, log and numbers -----------------------------------------------------------------


def metrics_of(server: Server) -> dict[str, float]:
    connection = connect(server)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = response.read().decode()
    connection.close()
    found = {}
    for line in text.splitlines():
        if not line.startswith("# TYPE "):
            name, value = line.rsplit(" ", 1)
            assert name.startswith("jitattn_server_")
            assert name not in found
            found[name.removeprefix("jitattn_server_")] = float(value)
    return found


def test_connections_are_limited_and_idle_ones_closed() -> None:
    with running("--max-connections", "3", "--idle-seconds", "0.3") as server:
        address = server.server_address[:2]
        idle = [socket.create_connection(address, timeout=20) for _ in range(2)]
        slow = socket.create_connection(address, timeout=20)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
        wait_until(lambda: server.num_connections == 3)
        with socket.create_connection(address, timeout=20) as more:
            assert b" 503 " in more.recv(1000)
        for connection in (*idle, slow):
            while connection.recv(1000):
                pass
            connection.close()
        wait_until(lambda: server.num_connections == 0)
        # An answer may take longer than that.
        assert complete(server, "x", max_tokens=300)["usage"]["completion_tokens"] == 300
        found = metrics_of(server)
        assert found["refused_connections_total"] == 1
        assert found["closed_idle_connections_total"] == 3


def test_metrics_count_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="docs.examples.serving.requests")
    with running() as server:
        prompt = "measure " * 20
        answers = [complete(server, prompt, max_tokens=n) for n in (3, 4)]
        request(server, "POST", COMPLETIONS, {"prompt": 3})
        request(server, "GET", "/a%0Ab")
        found = metrics_of(server)
        usage = [answer["usage"] for answer in answers]
        cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
        assert found['requests_total{path="/v1/completions",status="200"}'] == 2
        assert found['requests_total{path="/v1/completions",status="400"}'] == 1
        assert found['requests_total{path="other",status="404"}'] == 1
        assert found["prompt_tokens_total"] == sum(each["prompt_tokens"] for each in usage)
        assert found["cached_prompt_tokens_total"] == sum(cached) > 0
        assert found["generated_tokens_total"] == 7
        assert found["first_text_seconds_count"] == 2
        assert found['request_seconds_bucket{le="+Inf"}'] == found["request_seconds_count"] == 4
        wait_until(lambda: metrics_of(server)["running_choices"] == 0)
        pools = server.engine.load.stats.pools
        for i, pool in enumerate(pools):
            names = [
                f'pages{{pool="{i}",tier="device",state="{state}"}}'
                for state in ("used", "held", "reusable", "free")
            ]
            assert sum(metrics_of(server)[name] for name in names) == pool.total

    def lines_of() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    # Lines of the log come after answers.
    wait_until(lambda: sum("POST '/v1/completions' 200" in line for line in lines_of()) == 2)
    lines = lines_of()
    assert any(f"{usage[0]['prompt_tokens']} tokens + 3" in line for line in lines)
    assert not any("\n" in line for line in lines)


def test_whoever_has_an_answer_finds_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        end_request = server.metrics.end_request

        def end_late(path: str, status: int, seconds: float) -> None:
            time.sleep(0.1)
            end_request(path, status, seconds)

        monkeypatch.setattr(server.metrics, "end_request", end_late)

        def counted(status: int) -> tuple[float, float, float]:
            found = metrics_of(server)
            name = f'requests_total{{path="/v1/completions",status="{status}"}}'
            return found.get(name, 0), found["generated_tokens_total"], found["disconnects_total"]

        complete(server, "whole", max_tokens=2)
        assert counted(200) == (1, 2, 0)
        connection = connect(server)
        body = {"prompt": "in pieces", "max_tokens": 3, "temperature": 0, "stream": True}
        connection.request("POST", COMPLETIONS, json.dumps(body))
        response = connection.getresponse()
        assert "[DONE]" in events_of(response)  # and not the end of the connection
        assert counted(200) == (2, 5, 0)
        response.close()
        connection.close()
        request(server, "POST", COMPLETIONS, {"prompt": 3})
        assert counted(400) == (1, 5, 0)
        assert b" 411 " in exchange(server, b"POST /v1/completions HTTP/1.1\r\n\r\n")
        assert counted(411) == (1, 5, 0)


def test_many_that_go_give_all_pages_back() -> None:
    """At every stage: while they wait, while the prompt is computed, amid the answer."""
    with running("--kv-bytes", "600000", "--host-bytes", "200000", "--typical-len", "64") as server:
        wanted = server.engine.max_len - 100
        gone = 0
        for i in range(24):
            connection = connect(server)
            body = {"prompt": "p" * (3 * i + 1), "max_tokens": wanted, "n": 1 + i % 3, "seed": i}
            connection.request("POST", COMPLETIONS, json.dumps(body | {"stream": i % 2 == 0}))
            if i % 4 == 0:
                response = connection.getresponse()
                assert response.readline()
                response.close()
            connection.close()
            gone += 1
            assert server.engine.error is None
        wait_until(lambda: is_idle(server))
        wait_until(lambda: metrics_of(server)["disconnects_total"] == gone)
        found = metrics_of(server)
        assert found["sequences"] == found["running_choices"] == found["waiting_choices"] == 0
        for name, value in found.items():
            if name.startswith("pages{") and ("used" in name or "held" in name):
                assert value == 0, name
        assert complete(server, "still here", max_tokens=3)


def test_shutting_down_ends_every_connection() -> None:
    with running() as server:
        address = server.server_address[:2]
        idle = socket.create_connection(address, timeout=20)
        busy = connect(server)
        body = {"prompt": "x", "max_tokens": server.engine.max_len - 4}
        busy.request("POST", COMPLETIONS, json.dumps(body))
        wait_until(lambda: bool(server.engine.running) and server.num_connections == 2)
        server.engine.close()
        server.end_connections()
        assert idle.recv(10) == b""
        response = busy.getresponse()
        assert response.status == 503
        response.close()
        busy.close()
        idle.close()
        wait_until(lambda: server.num_connections == 0)
        assert all(pool.used == pool.held == 0 for pool in server.engine.load.stats.pools)


def test_a_connection_takes_several_requests(server: Server) -> None:
    connection = connect(server)
    for _ in range(2):
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "x", "max_tokens": 1}))
        response = connection.getresponse()
        assert response.status == 200
        response.read()
        connection.request("POST", "/v1/else", b'{"prompt": 1}')
        response = connection.getresponse()
        assert response.status == 404
        response.read()
    connection.close()


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("añ€😀z", [], "añ€😀z"),
        ("say END now", ["END"], "say "),
        ("aab", ["ab", "b"], "a"),
        ("ababac", ["abac"], "ab"),
        ("EN", ["END"], "EN"),
        ("€END", ["D", "€E"], ""),
    ],
)
def test_growing_text(text: str, stops: list[str], wanted: str) -> None:
    growing = GrowingText(ByteTokenizer(), stops)
    said = []
    for token in text.encode():
        said.append(growing.push(token))
        assert wanted.startswith("".join(said))
        if growing.is_stopped:
            break
    said.append("" if growing.is_stopped else growing.finish())
    assert "".join(said) == wanted


def test_text_of_random_bytes_is_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    tokenizer = ByteTokenizer()
    for _ in range(50):
        tokens = torch.randint(258, (12,), generator=generator).tolist()
        growing = GrowingText(tokenizer, [])
        said = "".join(growing.push(token) for token in tokens) + growing.finish()
        assert said == tokenizer.decode(tokens)


def test_samples_are_in_proportion() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    sampler = Sampler(1.0, 0.9, 0)
    counts = torch.tensor([sampler.choose(logits) for _ in range(2000)]).bincount(minlength=4)
    assert counts[3] == 0
    torch.testing.assert_close(
        counts[:3] / 2000, torch.tensor([0.5, 0.3, 0.15]) / 0.95, atol=0.04, rtol=0
    )
    assert Sampler(1e-9, 1.0, 0).choose(logits) == 0
    assert Sampler(0, 0.1, 0).choose(logits) == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Its greedy words are those that transformers generates, where no two are as good."""
    pytest.importorskip("transformers")
    model = make_checkpoint(tmp_path, name)
    prompt = " ".join(f"w{(7 * i) % 250 + 1}" for i in range(30))
    with running("--model", str(tmp_path), "--name", name) as server:
        for _ in range(2):  # the second has a prefix that is there
            words = text_of(complete(server, prompt, max_tokens=12)).split()
            tokens = torch.tensor([[int(word[1:]) for word in [*prompt.split(), *words]]])
            with torch.no_grad():
                logits = model(tokens).logits[0, 29:-1].float()
            chosen = logits.gather(1, tokens[0, 30:, None])[:, 0]
            assert (logits.max(dim=1).values - chosen < 0.05 * logits.abs().max()).all()
        status, found = say(server, "w1 w2", max_tokens=3)
        assert status == 200
        assert found["usage"]["prompt_tokens"] == 4
