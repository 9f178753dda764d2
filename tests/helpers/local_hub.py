"""A hub on 127.0.0.1 with one repository, for huggingface_hub's own client in other processes."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAME, COMMIT = "tiny/Model", "c" * 40


@dataclass
class Hub:
    """The repository, what was asked of it, and how it fails.

    Attributes:
        files: path -> content.
        asked: (method, path of a file, or "api") -> how often.
        stalls: of this file no more than half arrives until `goes_on` is set.
        stalled: set when that half is sent.
        gated: whether files are refused to who has not asked its authors.
        fails: whether it answers nothing any more.
    """

    files: Mapping[str, bytes]
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    stalls: str = ""
    stalled: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    gated: bool = False
    fails: bool = False

    def fetched(self) -> dict[str, int]:
        """Files of which bytes were asked, and how often."""
        got = {path: n for (method, path), n in self.asked.items() if method == "GET"}
        return {path: n for path, n in got.items() if path != "api"}

    def environment(self, address: str, cache: Path) -> dict[str, str]:
        """That of a process that has this hub, and a cache of its own."""
        own = {n: v for n, v in os.environ.items() if "proxy" not in n.lower()}
        more = dict(HF_ENDPOINT=address, HF_HOME=str(cache / "home"), HF_HUB_CACHE=str(cache))
        return {**own, **more, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def answer(self, handler: BaseHTTPRequestHandler, with_body: bool) -> None:
        """One request."""
        path = handler.path.partition("?")[0].removeprefix("/")
        api, resolved = f"api/models/{NAME}", f"{NAME}/resolve/{COMMIT}/"
        method = handler.command
        if self.fails:
            return _refuse(handler, 500, "")
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            self.asked[method, "api"] += 1
            said = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": f} for f in self.files]}
            _send_json(handler, said)
        elif path.startswith(f"{api}/tree/{COMMIT}"):
            self.asked[method, "api"] += 1
            _send_json(
                handler,
                [
                    {"type": "file", "path": f, "size": len(b), "oid": _etag(b)}
                    for f, b in self.files.items()
                ],
            )
        elif path.startswith(resolved) and path.removeprefix(resolved) in self.files:
            name = path.removeprefix(resolved)
            self.asked[method, name] += 1
            if self.gated:
                return _refuse(handler, 403, "GatedRepo")
            self._send_file(handler, name, with_body)
        else:
            is_here = path.startswith(api)
            _refuse(handler, 404, "RevisionNotFound" if is_here else "RepoNotFound")

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, with_body: bool) -> None:
        content = self.files[name]
        asked = handler.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        handler.send_response(206 if asked else 200)
        if asked:
            span = f"bytes {start}-{len(content) - 1}/{len(content)}"
            handler.send_header("Content-Range", span)
        handler.send_header("Content-Length", str(len(content) - start))
        handler.send_header("ETag", f'"{_etag(content)}"')
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.end_headers()
        if not with_body:
            return
        half = len(content) // 2 if name == self.stalls else len(content)
        handler.wfile.write(content[start:half])
        handler.wfile.flush()
        if name == self.stalls:
            self.stalled.set()
            self.goes_on.wait(60)
            handler.wfile.write(content[max(half, start) :])


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _send_json(handler: BaseHTTPRequestHandler, said: Any) -> None:
    body = json.dumps(said).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _refuse(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    handler.send_response(status)
    handler.send_header("X-Error-Code", code)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve a hub within the block; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                hub.answer(self, True)
            except OSError:  # Who asked was killed.
                self.close_connection = True

        def do_HEAD(self) -> None:
            hub.answer(self, False)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
