"""A hub on 127.0.0.1, which huggingface_hub's client talks to over HTTP; its address is set in tests/__init__.py."""

import hashlib
import json
import socket
import struct
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

from model.hub import answers
from tests import PORT


@dataclass
class Repository:
    """Folders by commit, and commits by branch or tag."""

    commits: dict[str, Path]
    refs: dict[str, str]
    gated: bool = False
    cut: str = ""  # this file's transfer ends in the middle


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)  # sent whole
    server: ThreadingHTTPServer | None = None

    def add(self, name: str, folder: Path, **more) -> str:
        """Make a repository of a folder; its commit."""
        commit = hashlib.sha1(f"{name} {folder}".encode()).hexdigest()
        self.repositories[name] = Repository({commit: folder}, {"main": commit}, **more)
        return commit

    def start(self) -> None:
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(PORT.getsockname(), handler)
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        answers.cache_clear()  # of this minute

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
        self.server = None
        answers.cache_clear()


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        if path == "/":
            return self.send(b"hello")
        is_api = path.startswith("/api/models/")
        owner, name, kind, *rest = (
            *path.removeprefix("/api/models/").strip("/").split("/"),
            "",
            "",
            "",
        )
        repository = self.hub.repositories.get(f"{owner}/{name}")
        if repository is None:
            return self.fail(401, "RepoNotFound")
        revision, *rest = rest
        commit = repository.refs.get(revision or "main", revision)
        if commit not in repository.commits:
            return self.fail(404, "RevisionNotFound")
        folder = repository.commits[commit]
        if is_api:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            names = [path.relative_to(folder).as_posix() for path in files]
            listed = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
                for name, path in zip(names, files, strict=True)
            ]
            about = {
                "id": f"{owner}/{name}",
                "sha": commit,
                "siblings": [{"rfilename": n} for n in names],
            }
            return self.send(
                json.dumps(listed if kind == "tree" else about).encode(), commit=commit
            )
        if repository.gated:
            return self.fail(401, "GatedRepo")
        file = folder / "/".join(filter(None, rest))
        if not file.is_file():
            return self.fail(404, "EntryNotFound")
        cut = file.name == repository.cut and self.command == "GET"
        self.send(file.read_bytes(), cut, commit=commit)
        if self.command == "GET" and not cut:
            self.hub.files.append(f"{owner}/{name}/{file.name}")

    do_HEAD = do_GET

    def fail(self, code: int, reason: str) -> None:
        self.send(b"{}", code=code, reason=reason)

    def send(self, data: bytes, cut=False, code=200, reason="", commit="") -> None:
        self.send_response(code)
        headers = {"Content-Type": "application/json", "Content-Length": len(data)}
        headers |= {"X-Error-Code": reason} if reason else {}
        if commit:
            headers |= {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:  # a reset, as of a cable that was pulled; without it the client tries 5 times
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
