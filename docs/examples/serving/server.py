"""HTTP server of the standard library over an engine, a thread a connection."""

from __future__ import annotations

import json
import logging
import queue
import select
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from docs.examples.serving.engine import Choice, Engine, Event
from docs.examples.serving.protocol import (
    Answers,
    Asked,
    BadRequestError,
    error_body,
    parse,
    usage_of,
)
from docs.examples.serving.sampling import Sampler
from docs.examples.serving.text import GrowingText, Tokenizer

MAX_BODY_BYTES = 8 << 20
# Interval of checks for closed connections.
_LOOK_S = 0.05
_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
_LOG = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client has closed the connection."""


class EngineError(RuntimeError):
    """The engine has stopped."""


class Server(ThreadingHTTPServer):
    """Serves one model.

    Attributes:
        engine: answers.
        tokenizer: of its model.
        model: the name that clients give.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], engine: Engine, tokenizer: Tokenizer, model: str
    ) -> None:
        super().__init__(address, Handler)
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.created = int(time.time())

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.info("a connection of %s ended early", client_address, exc_info=True)


class Answer:
    """The choices of a request in progress."""

    def __init__(self, server: Server, asked: Asked) -> None:
        self._engine, self._asked = server.engine, asked
        self._events: queue.Queue[Event] = queue.Queue()
        self.choices = [
            Choice(
                tokens=list(asked.prompt),
                num_wanted=asked.max_tokens,
                index=i,
                text=GrowingText(server.tokenizer, asked.stops),
                # Choices of one seed differ; the first equals that of n=1.
                sampler=Sampler(
                    asked.temperature, asked.top_p, None if asked.seed is None else asked.seed + i
                ),
                tell=self._events.put,
                stop_ids=server.tokenizer.stop_ids,
            )
            for i in range(asked.n)
        ]

    def events(self, connection: socket.socket) -> Iterator[Event]:
        """Return the text of all choices when they have ended.

        Raises:
            ClientGoneError: the client has closed the connection.
            EngineError: the engine has stopped.
        """
        try:
            self._engine.submit(self.choices)
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        num_running = len(self.choices)
        try:
            while num_running:
                event = self._next(connection)
                if event.error is not None:
                    raise EngineError(event.error)
                num_running -= event.reason is not None
                yield event
        finally:
            if num_running:
                self._engine.cancel(self.choices)

    def _next(self, connection: socket.socket) -> Event:
        while True:
            if is_gone(connection):
                raise ClientGoneError
            try:
                return self._events.get(timeout=_LOOK_S)
            except queue.Empty:
                continue

    def usage(self) -> dict[str, Any]:
        return usage_of(
            len(self._asked.prompt),
            sum(choice.num_generated for choice in self.choices),
            self.choices[0].num_reused or 0,
        )


def is_gone(connection: socket.socket) -> bool:
    """Whether the client has closed; bytes of a next request do not count."""
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLHUP | select.POLLERR)
    found = poll.poll(0)
    if not found:
        return False
    if found[0][1] & (select.POLLHUP | select.POLLERR):
        return True
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


class Handler(BaseHTTPRequestHandler):
    """A connection."""

    protocol_version = "HTTP/1.1"
    server_version = "jitattn-example"
    timeout = 60
    server: Server

    def do_GET(self) -> None:
        model = {
            "id": self.server.model,
            "object": "model",
            "created": self.server.created,
            "owned_by": "local",
        }
        path = unquote(self.path.partition("?")[0])
        if path == "/v1/models":
            self._send(200, {"object": "list", "data": [model]})
        elif path == f"/v1/models/{self.server.model}":
            self._send(200, model)
        elif path == "/health":
            error = self.server.engine.error
            self._send(503 if error else 200, {"status": error or "ok"})
        elif path in _PATHS:
            self._refuse(BadRequestError(f"{path} takes POST", status=405))
        else:
            self._refuse(BadRequestError(f"there is no {path}", status=404))

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        try:
            # Read the body first, or its rest would be the next request.
            body = self._body()
            if path not in _PATHS:
                known = path in ("/v1/models", "/health")
                status = 405 if known else 404
                raise BadRequestError(
                    f"{path} takes GET" if known else f"there is no {path}", status=status
                )
            asked = parse(
                body, is_chat=_PATHS[path], tokenizer=self.server.tokenizer,
                model=self.server.model, max_len=self.server.engine.max_len,
            )  # fmt: skip
        except BadRequestError as error:
            self._refuse(error)
            return
        try:
            self._answer(asked)
        except (ClientGoneError, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:
            _LOG.exception("a request of %s failed", self.address_string())
            self.close_connection = True
            if not asked.stream:
                self._send(500, error_body("the server has failed", "server_error"))

    # --- answers

    def _answer(self, asked: Asked) -> None:
        answer = Answer(self.server, asked)
        answers = Answers(asked.is_chat, self.server.model)
        if asked.stream:
            self._stream(asked, answer, answers)
            return
        texts, reasons = [""] * asked.n, [""] * asked.n
        try:
            for event in answer.events(self.connection):
                texts[event.index] += event.text
                reasons[event.index] = event.reason or ""
        except EngineError as error:
            self._send(503, error_body(str(error), "server_error"))
            return
        self._send(200, answers.whole(texts, reasons, answer.usage()))

    def _stream(self, asked: Asked, answer: Answer, answers: Answers) -> None:
        """Send server-sent events; the end of the connection ends them."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for i in range(asked.n):
                if (piece := answers.first(i)) is not None:
                    self._event(piece)
            for event in answer.events(self.connection):
                self._event(answers.piece(event.index, event.text, event.reason))
            if asked.include_usage:
                self._event(answers.last(answer.usage()))
        except EngineError as error:
            self._event(error_body(str(error), "server_error"))
            return
        self._event("[DONE]")

    def _event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    # --- requests

    def _body(self) -> object:
        if self.headers.get("Transfer-Encoding"):
            raise self._unread(BadRequestError("Content-Length is needed", status=411))
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise self._unread(BadRequestError("Content-Length is needed", status=411))
        if int(length) > MAX_BODY_BYTES:
            raise self._unread(
                BadRequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
            )
        data = self.rfile.read(int(length))
        if len(data) < int(length):
            raise self._unread(BadRequestError("the body ends early"))
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is no JSON: {error}") from error

    def _unread(self, error: BadRequestError) -> BadRequestError:
        self.close_connection = True
        return error

    def _refuse(self, error: BadRequestError) -> None:
        self._send(error.status, error.body())

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Format errors of http.server in the same way."""
        del explain
        self.close_connection = True
        self._send(code, error_body(message or "bad request", "invalid_request_error"))

    def log_message(self, format: str, *arguments: object) -> None:
        _LOG.info("%s %s", self.address_string(), format % arguments)
