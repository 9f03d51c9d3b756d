"""HTTP server of the standard library over an engine, a thread a connection."""

from __future__ import annotations

import json
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from docs.examples.serving.engine import Choice, Engine, Event
from docs.examples.serving.metrics import Metrics
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

MAX_BODY_BYTES, MAX_HEADER_BYTES = 8 << 20, 64 << 10
MAX_CONNECTIONS, IDLE_S = 256, 60.0
# Interval of checks for closed connections.
_LOOK_S = 0.05
_PATHS = {"/v1/completions": False, "/v1/chat/completions": True}
_READS = ("/v1/models", "/health", "/metrics")
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)
_LOG = logging.getLogger(__name__)
_REQUESTS = logging.getLogger("docs.examples.serving.requests")


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
        metrics: what it has done.
        max_connections: those beyond get a 503.
        idle_s: seconds in which a whole request has to arrive.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        engine: Engine,
        tokenizer: Tokenizer,
        model: str,
        *,
        max_connections: int = MAX_CONNECTIONS,
        idle_s: float = IDLE_S,
    ) -> None:
        super().__init__(address, Handler)
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.max_connections, self.idle_s = max_connections, idle_s
        self.metrics = Metrics()
        self.created = int(time.time())
        self._lock = threading.Condition()
        # Since when a request of each is awaited; None while one is answered.
        self._connections: dict[socket.socket, float | None] = {}

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._connections) >= self.max_connections
            if not is_full:
                self._connections[request] = time.monotonic()
        if not is_full:
            super().process_request(request, client_address)
            return
        self.metrics.count(refused_connections=1)
        body = json.dumps(error_body("too many connections", "server_error")).encode()
        with suppress(OSError):
            request.setblocking(False)
            request.send(_FULL % (len(body), body))
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
            self._lock.notify_all()
        super().shutdown_request(request)

    def note_wait(self, connection: socket.socket, *, is_waiting: bool) -> None:
        """Note that a request of a connection is awaited, or has arrived."""
        with self._lock:
            if connection in self._connections:
                self._connections[connection] = time.monotonic() if is_waiting else None

    def service_actions(self) -> None:
        """Close connections whose request has not arrived in time, twice a second or so."""
        latest = time.monotonic() - self.idle_s
        with self._lock:
            late = [c for c, since in self._connections.items() if since and since < latest]
            if late:
                self.metrics.count(closed_idle_connections=len(late))
            for connection in late:
                _hang_up(connection)
                self._connections[connection] = None

    def end_connections(self, seconds: float = 5.0) -> None:
        """Close idle connections, and the others when they are answered or time is up."""
        with self._lock:
            for connection, since in self._connections.items():
                if since is not None:
                    _hang_up(connection)
            self._lock.wait_for(lambda: not self._connections, seconds)
            for connection in self._connections:
                _hang_up(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _LOG.info("a connection of %s ended early", client_address, exc_info=True)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self._asked.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens of all choices."""
        return sum(choice.num_generated for choice in self.choices)

    @property
    def num_reused(self) -> int:
        """Tokens of the prompt that were there."""
        return self.choices[0].num_reused or 0

    def _next(self, connection: socket.socket) -> Event:
        while True:
            if is_gone(connection):
                raise ClientGoneError
            try:
                return self._events.get(timeout=_LOOK_S)
            except queue.Empty:
                continue

    def usage(self) -> dict[str, Any]:
        return usage_of(self.num_prompt, self.num_generated, self.num_reused)


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
    server: Server

    def setup(self) -> None:
        self.timeout = self.server.idle_s + 5  # of a read or a write; see `service_actions`
        super().setup()
        self._begin()

    def do_GET(self) -> None:
        self._serve(self._read_state)

    def do_POST(self) -> None:
        self._serve(self._complete)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if sum(len(name) + len(value) for name, value in self.headers.items()) > MAX_HEADER_BYTES:
            self.send_error(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
            return False
        return True

    def _serve(self, answer: Callable[[str, bytes], None]) -> None:
        """Read a request, answer it, and write a line of the log."""
        path = unquote(self.path.partition("?")[0])
        self._begin(path)
        try:
            # Read the body first, or its rest would be the next request.
            body = self._body()
            self.server.note_wait(self.connection, is_waiting=False)
            self._begun = time.monotonic()
            answer(path, body)
        except BadRequestError as error:
            self._refuse(error)
        except (ClientGoneError, ConnectionError, TimeoutError):
            self.close_connection = True
            self.server.metrics.count(disconnects=1)
            self._is_gone = True
        finally:
            self._log_request()
            self.server.note_wait(self.connection, is_waiting=True)

    def _begin(self, path: str = "?") -> None:
        self._path, self._status, self._begun = path, 0, time.monotonic()
        self._answer: Answer | None = None
        self._is_counted = self._is_gone = False

    def _count(self) -> None:
        """Count the request, once: before the end of its answer, which a client may act upon."""
        if self._is_counted:
            return
        self._is_counted = True
        metrics, answer = self.server.metrics, self._answer
        if answer is not None:
            metrics.count(
                prompt_tokens=answer.num_prompt,
                cached_prompt_tokens=answer.num_reused,
                generated_tokens=answer.num_generated,
            )
        known = self._path in _PATHS or self._path in _READS
        seconds = time.monotonic() - self._begun
        metrics.end_request(self._path if known else "other", self._status, seconds)

    def _log_request(self) -> None:
        self._count()
        answer = self._answer
        what = "" if answer is None else f", {answer.num_prompt} tokens + {answer.num_generated}"
        _REQUESTS.info(
            "%s %s %.200r %d %.3f s%s%s",
            self.address_string(), self.command, self._path, self._status,
            time.monotonic() - self._begun, what, " gone" if self._is_gone else "",
        )  # fmt: skip

    def _read_state(self, path: str, body: bytes) -> None:
        """Answer a GET, whose body says nothing."""
        del body
        model = {
            "id": self.server.model,
            "object": "model",
            "created": self.server.created,
            "owned_by": "local",
        }
        if path == "/v1/models":
            self._send(200, {"object": "list", "data": [model]})
        elif path == f"/v1/models/{self.server.model}":
            self._send(200, model)
        elif path == "/health":
            error = self.server.engine.error
            self._send(503 if error else 200, {"status": error or "ok"})
        elif path == "/metrics":
            load = self.server.engine.load
            now = {
                "running_choices": load.num_running,
                "waiting_choices": load.num_waiting,
                "suspensions_total": load.num_suspended,
                "sequences": load.stats.num_sequences,
                "connections": self.server.num_connections,
            }
            text = self.server.metrics.text(now, load.stats)
            self._send_data(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path in _PATHS:
            raise BadRequestError(f"{path} takes POST", status=405)
        else:
            raise BadRequestError(f"there is no {path[:200]}", status=404)

    def _complete(self, path: str, body: bytes) -> None:
        """Answer a POST."""
        if path not in _PATHS:
            known = path in _READS
            status = 405 if known else 404
            raise BadRequestError(
                f"{path} takes GET" if known else f"there is no {path[:200]}", status=status
            )
        asked = parse(
            _json(body), is_chat=_PATHS[path], tokenizer=self.server.tokenizer,
            model=self.server.model, max_len=self.server.engine.max_len,
        )  # fmt: skip
        self._answer = answer = Answer(self.server, asked)
        try:
            self._send_answer(asked, answer)
        except (ClientGoneError, ConnectionError, TimeoutError):
            raise
        except Exception:
            _LOG.exception("a request of %s failed", self.address_string())
            self.close_connection = True
            if not asked.stream:
                self._send(500, error_body("the server has failed", "server_error"))

    # --- answers

    def _send_answer(self, asked: Asked, answer: Answer) -> None:
        answers = Answers(asked.is_chat, self.server.model)
        if asked.stream:
            self._stream(asked, answer, answers)
            return
        texts, reasons = [""] * asked.n, [""] * asked.n
        try:
            for event in self._events(answer):
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
            for event in self._events(answer):
                self._event(answers.piece(event.index, event.text, event.reason))
            if asked.include_usage:
                self._event(answers.last(answer.usage()))
        except EngineError as error:
            self._count()
            self._event(error_body(str(error), "server_error"))
            return
        self._count()
        self._event("[DONE]")

    def _events(self, answer: Answer) -> Iterator[Event]:
        is_first = True
        for event in answer.events(self.connection):
            if is_first:
                self.server.metrics.begin_answer(time.monotonic() - self._begun)
            is_first = False
            yield event

    def _event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    # --- requests

    def _body(self) -> bytes:
        """Read the body, whose length a POST has to say."""
        lengths = {text.strip() for text in self.headers.get_all("Content-Length", [])}
        length = lengths.pop() if lengths else "0"
        is_missing = self.command == "POST" and "Content-Length" not in self.headers
        if lengths or is_missing or self.headers.get("Transfer-Encoding"):
            raise self._unread(BadRequestError("one Content-Length is needed", status=411))
        if not length.isascii() or not length.isdigit():
            raise self._unread(BadRequestError("Content-Length is no number", status=411))
        digits = length.lstrip("0") or "0"
        if len(digits) > 19 or int(digits) > MAX_BODY_BYTES:
            raise self._unread(
                BadRequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413)
            )
        data = self.rfile.read(int(digits))
        if len(data) < int(digits):
            raise self._unread(BadRequestError("the body ends early"))
        return data

    def _unread(self, error: BadRequestError) -> BadRequestError:
        self.close_connection = True
        return error

    def _refuse(self, error: BadRequestError) -> None:
        self._send(error.status, error.body())

    def _send(self, status: int, body: object) -> None:
        self._send_data(status, json.dumps(body).encode(), "application/json")

    def _send_data(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self._count()
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Format errors of http.server in the same way."""
        del explain
        self._begin()
        self.close_connection = True
        self.server.note_wait(self.connection, is_waiting=False)
        text = (message or "bad request")[:300]
        self._send(code, error_body(text, "invalid_request_error"))
        self.command = self.command or "?"
        self._log_request()

    def send_response(self, code: int, message: str | None = None) -> None:
        self._status = code
        super().send_response(code, message)

    def log_message(self, format: str, *arguments: object) -> None:
        _LOG.debug("%s %r", self.address_string(), format % arguments)


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {str(error)[:200]}") from error
