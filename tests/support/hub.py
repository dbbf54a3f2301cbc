"""A Hugging Face Hub on this machine, with the few endpoints that a push and a download need."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

USERS = {"hf_mine": "me", "hf_theirs": "they"}
"""Token -> user."""


@dataclass
class Repository:
    owner: str
    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{".gitattributes": b""}])

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1]


class Hub(ThreadingHTTPServer):
    """Repositories in memory. `before` is called with the method and path of each request."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, path: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, token: str = "hf_mine") -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error of the server."""


class Refused(Exception):
    pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.server.requests.append((self.command, path))
        self.server.before(self.command, path)
        for method, pattern, endpoint in ENDPOINTS:
            if self.command == method and (match := re.fullmatch(pattern, path)):
                try:
                    self.send(200, *endpoint(self, body, *match.groups()))
                except Refused as error:
                    status, text, *more = error.args
                    self.send(status, {"error": text, **dict(more)})
                return
        self.send(404, {"error": f"no such endpoint: {self.command} {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    @property
    def user(self) -> str:
        user = USERS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if user is None:
            raise Refused(401, "Invalid credentials in Authorization header")
        return user

    def repository(self, name: str, writes: bool = True) -> Repository:
        result = self.server.repositories.get(name)
        if result is None or (result.private and result.owner != self.user):
            raise Refused(404, "Repository not found")
        if writes and result.owner != self.user:
            raise Refused(403, "Forbidden: pass `create_pr=1` to create a Pull Request")
        return result


Answer = tuple[Any] | tuple[Any, dict[str, str]]


def whoami(handler: Handler, body: bytes) -> Answer:
    return ({"name": handler.user, "type": "user", "orgs": []},)


def create(handler: Handler, body: bytes) -> Answer:
    given = json.loads(body)
    owner = given["organization"] or handler.user
    name = f"{owner}/{given['name']}"
    if owner != handler.user:
        raise Refused(403, f"You don't have the rights to create a model under {owner}")
    if name in handler.server.repositories:
        url = ("url", f"{handler.server.url}/{name}")
        raise Refused(409, "You already created this model repo", url)
    private = given.get("private") or given.get("visibility") == "private"
    handler.server.repositories[name] = Repository(owner, bool(private))
    return ({"url": f"{handler.server.url}/{name}"},)


def about(handler: Handler, body: bytes, name: str, _: str | None = None) -> Answer:
    result = handler.repository(name, writes=False)
    files = [{"rfilename": path} for path in result.files]
    sha = f"{len(result.commits):040x}"
    return ({"id": name, "private": result.private, "sha": sha, "siblings": files},)


def tree(handler: Handler, body: bytes, name: str, _: str) -> Answer:
    files = handler.repository(name, writes=False).files.items()
    return (
        [
            {"type": "file", "path": path, "size": len(text), "oid": digest(text)}
            for path, text in files
        ],
    )


def preupload(handler: Handler, body: bytes, name: str, _: str) -> Answer:
    handler.repository(name)
    modes = [
        {
            "path": one["path"],
            "uploadMode": "lfs" if re.search(r"\.(safetensors|png)$", one["path"]) else "regular",
            "shouldIgnore": False,
        }
        for one in json.loads(body)["files"]
    ]
    return ({"files": modes},)


def batch(handler: Handler, body: bytes, name: str) -> Answer:
    handler.repository(name)
    objects = json.loads(body)["objects"]
    for one in objects:
        if one["oid"] not in handler.server.blobs:
            href = f"{handler.server.url}/lfs/{one['oid']}"
            one["actions"] = {"upload": {"href": href}}
    return ({"transfer": "basic", "objects": objects},)


def upload(handler: Handler, body: bytes, oid: str) -> Answer:
    assert hashlib.sha256(body).hexdigest() == oid
    handler.server.blobs[oid] = body
    return ({},)


def validate(handler: Handler, body: bytes) -> Answer:
    metadata = yaml.safe_load(json.loads(body)["content"].split("---")[1])
    if not isinstance(metadata, dict):
        raise Refused(400, "no metadata")
    return ({"warnings": [], "errors": []},)


def commit(handler: Handler, body: bytes, name: str, _: str) -> Answer:
    result = handler.repository(name)
    files = dict(result.files)
    for line in map(json.loads, body.splitlines()):
        key, value = line["key"], line["value"]
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = handler.server.blobs[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
        else:
            assert key == "header", key
    result.commits.append(files)
    sha = f"{len(result.commits):040x}"
    return ({"commitUrl": f"{handler.server.url}/{name}/commit/{sha}", "commitOid": sha},)


def resolve(handler: Handler, body: bytes, name: str, _: str, path: str) -> Answer:
    result = handler.repository(name, writes=False)
    if path not in result.files:
        raise Refused(404, "Entry not found")
    sha = f"{len(result.commits):040x}"
    return result.files[path], {"X-Repo-Commit": sha, "ETag": f'"{digest(result.files[path])}"'}


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


NAME, API = r"([\w.-]+/[\w.-]+)", "/api/models/"
ENDPOINTS: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", validate),
    ("GET", f"{API}{NAME}(?:/revision/(.+))?", about),
    ("GET", f"{API}{NAME}/tree/([^/]+)", tree),
    ("POST", f"{API}{NAME}/preupload/(.+)", preupload),
    ("POST", f"{API}{NAME}/commit/(.+)", commit),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", batch),
    ("PUT", "/lfs/(.+)", upload),
    ("GET", f"/{NAME}/resolve/([^/]+)/(.+)", resolve),
    ("HEAD", f"/{NAME}/resolve/([^/]+)/(.+)", resolve),
]


@contextmanager
def serving(port: int = 0) -> Iterator[Hub]:
    """Serve an empty Hub in a thread; it is gone afterwards."""
    hub = Hub(port)
    threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
