"""A small S3 over real HTTP on loopback, which can fail in every way that a store does."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
NO_BUCKET = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"
FAILURES: dict[str, tuple[int, bytes]] = {
    "no bucket": (404, NO_BUCKET),
    "bad request": (400, b"<Error><Code>InvalidRequest</Code></Error>"),
    "wrong key": (401, b""),
    "forbidden": (403, b"<Error><Code>AccessDenied</Code></Error>"),
    "not allowed": (405, b""),
    "conflict": (409, b"<Error><Code>OperationAborted</Code></Error>"),
    "precondition": (412, b""),
    "too many": (429, b"<Error><Code>SlowDown</Code></Error>"),
    "not implemented": (501, b""),
    "redirect": (301, b""),
    "no answer": (0, b""),
}
"""What it answers instead, by name; 0 ends the connection."""


class ObjectServer(ThreadingHTTPServer):
    """Objects by path; `failure` names what every call meets, and paths with a part in `refused` cannot be put. While
    `open` is clear no put is answered, for a minute at most.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.failure = ""
        self.refused: set[str] = set()
        self.open = threading.Event()
        self.open.set()
        self.puts = 0

    @property
    def environment(self) -> dict[str, str]:
        """What a store at s3://bucket reads."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: ObjectServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def _answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def _fails(self) -> bool:
        if not self.server.failure:
            return False
        status, body = FAILURES[self.server.failure]
        if status:
            self._answer(status, b"" if self.command == "HEAD" else body)
        else:
            self.close_connection = True
        return True

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.puts += 1
        self.server.open.wait(110)
        if any(part in self.path for part in self.server.refused):
            self._answer(403)
        elif not self._fails():
            self.server.objects[self.path] = data
            self._answer(200)

    def do_GET(self) -> None:
        if self._fails():
            return
        found = self.server.objects.get(self.path)
        if found is None:
            self._answer(404)
        else:
            self._answer(200, b"" if self.command == "HEAD" else found, len(found))

    do_HEAD = do_GET  # noqa: N815 (the name that the base class calls)

    def do_POST(self) -> None:
        """Objects are deleted by a list of their keys."""
        wanted = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._fails():
            return
        keys = re.findall(rb"<Key>(.*?)</Key>", wanted)
        for key in keys:
            self.server.objects.pop(f"/{BUCKET}/{key.decode()}", None)
        deleted = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
        self._answer(200, b"<DeleteResult>%s</DeleteResult>" % deleted)


@contextmanager
def running_object_server() -> Iterator[ObjectServer]:
    """A server that is up."""
    server = ObjectServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
