"""A hub of the test's own: a repository is served from a folder as huggingface.co serves it, or badly."""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "c" * 40


class HubServer(ThreadingHTTPServer):
    """This server writes no traceback if a client closes the connection, as `pull` does on a full disk."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FakeHub:
    """drops: so many bytes of a large file come before the connection breaks, once for each number; pace:
    seconds that each 64 kB take; ranges: where the requests for large files began."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.name = folder, name
        self.drops: list[int] = []
        self.pace = 0.0
        self.ranges: list[int] = []
        self.damaged = False
        self.architecture = ""  # of its GGUF files
        self._server = HubServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def is_large(self, file: Path) -> bool:
        return file.suffix in (".safetensors", ".gguf")

    def contents(self, file: Path) -> bytes:
        data = file.read_bytes()
        return b"\xff" * len(data) if self.damaged and self.is_large(file) else data

    def facts(self, file: Path) -> dict:
        data = file.read_bytes()
        known = {"size": len(data), "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
        if self.is_large(file):
            digest = hashlib.sha256(data).hexdigest()
            known["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}
        return known

    def files(self) -> dict[str, Path]:
        """Paths inside the repository, subfolders included -> files."""
        files = sorted(p for p in self.folder.rglob("*") if p.is_file())
        return {p.relative_to(self.folder).as_posix(): p for p in files}

    def info(self) -> dict:
        siblings = [
            {"rfilename": name, "blobId": self.facts(file)["oid"], **self.facts(file)}
            for name, file in self.files().items()
        ]
        known = {"gguf": {"total": 1000, "architecture": self.architecture}} if self.architecture else {}
        return {
            "id": self.name,
            "modelId": self.name,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": [],
            **known,
        }

    def tree(self) -> list[dict]:
        return [{"type": "file", "path": name, **self.facts(file)} for name, file in self.files().items()]

    def _handler(hub):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self._answer(body=False)

            def do_GET(self):
                self._answer(body=True)

            def _answer(self, body):
                path = self.path.partition("?")[0]
                if path.startswith(f"/api/models/{hub.name}"):
                    self._json(hub.tree() if "/tree/" in path else hub.info(), body)
                elif path.startswith(f"/{hub.name}/resolve/"):
                    self._file(hub.folder / unquote(path.split("/", 5)[5]), body)
                else:
                    self._json({"error": "Repository not found"}, body, 404, {"X-Error-Code": "RepoNotFound"})

            def _json(self, value, body, status=200, headers=None):
                data = json.dumps(value).encode()
                self._head(status, {"Content-Length": len(data), **(headers or {})})
                if body:
                    self.wfile.write(data)

            def _head(self, status, headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, str(value))
                self.end_headers()

            def _file(self, file, body):
                data, facts = hub.contents(file), hub.facts(file)
                etag = facts["lfs"]["oid"] if "lfs" in facts else facts["oid"]
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
                start = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
                if body and hub.is_large(file):
                    hub.ranges.append(start)
                part = data[start:]
                if start:
                    headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
                self._head(206 if "Range" in self.headers else 200, {"Content-Length": len(part), **headers})
                if body:
                    self._write(part, hub.drops.pop(0) if hub.is_large(file) and hub.drops else None)

            def _write(self, part, drop):
                for at in range(0, len(part), 1 << 16):
                    piece = part[at : at + (1 << 16)]
                    if drop is not None and at + len(piece) > drop:
                        self.wfile.write(piece[: drop - at])
                        self.close_connection = True
                        return
                    self.wfile.write(piece)
                    time.sleep(hub.pace)

        return Handler
