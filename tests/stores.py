"""Places to read from that are not this machine's disk: a real S3 server, and a web server that breaks off."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


class S3:
    """moto's S3 server with one bucket. environment: what a process needs to find it."""

    def __init__(self) -> None:
        import boto3
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.address = f"http://{host}:{port}"
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.address}
        self._client = boto3.client("s3", endpoint_url=self.address, aws_access_key_id="a", aws_secret_access_key="b")
        self._client.create_bucket(Bucket="sets")

    def put(self, name: str, data: bytes) -> str:
        self._client.put_object(Bucket="sets", Key=name, Body=data)
        return f"s3://sets/{name}"

    def refuse_everybody(self) -> None:
        """From now on a request needs credentials of a user that exists: there is none."""
        requests.post(f"{self.address}/moto-api/reset-auth", data=b"0", timeout=30).raise_for_status()

    def close(self) -> None:
        self._server.stop()


class _Files(BaseHTTPRequestHandler):
    """Serves a folder, whole or by ranges. Of each file the first `breaks` answers to GET end in their middle. Below
    /status/N/ it answers with that status, and sends whoever follows it back there."""

    root: Path
    breaks = 0
    asked: Counter[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, body: bool) -> None:
        path = self.root / self.path.strip("/")
        if says := re.match(r"/status/(\d+)/", self.path):
            self.send_response(int(says[1]))
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = 0, len(data)
        if wanted:
            start, end = int(wanted[1]), min(len(data), int(wanted[2] or len(data)) + 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.asked[self.path] += 1
            broken = self.asked[self.path] <= self.breaks
            self.wfile.write(data[start : start + (end - start) // 2] if broken else data[start:end])
            self.close_connection = broken

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def web_server(root: Path, breaks: int = 0) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the address of a server of a folder's files, and how often each has been asked for."""
    asked: Counter[str] = Counter()
    handler = type("Files", (_Files,), {"root": root, "breaks": breaks, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
