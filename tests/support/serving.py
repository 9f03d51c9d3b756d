"""A server of docs/examples/serving on a free port, and clients of the standard library."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from docs.examples.serving.__main__ import make_server, parser
from docs.examples.serving.server import Server


@contextmanager
def running(*arguments: str) -> Iterator[Server]:
    server = make_server(options(*arguments))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        server.engine.close()
        if server.engine.error == "the server is closing":
            server.engine.manager.close()


def options(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["--port", "0", *arguments])


def connect(server: Server) -> HTTPConnection:
    host, port = server.server_address[:2]
    return HTTPConnection(str(host), int(port), timeout=60)


def request(server: Server, method: str, path: str, body: object = None) -> tuple[int, Any]:
    connection = connect(server)
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found


def complete(server: Server, prompt: object, **arguments: object) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, **arguments}
    status, found = request(server, "POST", "/v1/completions", body)
    assert status == 200, found
    assert isinstance(found, dict)
    return found


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["text"])


def stream(server: Server, path: str, body: dict[str, object]) -> list[dict[str, Any]]:
    """Return the events of a stream, which ends with [DONE]."""
    connection = connect(server)
    connection.request("POST", path, json.dumps({**body, "stream": True}))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    *events, done = list(events_of(response))
    assert done == "[DONE]"
    connection.close()
    return [json.loads(event) for event in events]


def events_of(response: HTTPResponse) -> Iterator[str]:
    for line in response:
        text = line.decode().rstrip("\n")
        if text:
            assert text.startswith("data: ")
            yield text.removeprefix("data: ")


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return what calls in a thread each return."""
    found: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        found[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it didn't happen"
        time.sleep(0.01)


def make_checkpoint(folder: Path, name: str = "llama") -> Any:
    """Save a small model of random weights with a tokenizer of words; return it, eager."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.support.hf_models import VOCABULARY, make_model

    model = make_model(name)
    model.save_pretrained(folder)
    words = {f"w{i}" if i else "unknown": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="unknown"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="unknown")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}w9"
    fast.save_pretrained(folder)
    return model
