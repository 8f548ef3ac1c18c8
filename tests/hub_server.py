"""A small Hugging Face Hub on a loopback port, for the unmodified client, with faults that a test can order.

Files that end in .safetensors are listed as LFS files, as on the Hub, and are served from another origin ("localhost"
instead of "127.0.0.1"), as from the Hub's storage, where a token must not arrive. Uploads differ: here all files are
part of the commit, whereas the client sends large files to the real Hub through Xet or LFS.

huggingface_hub reads HF_ENDPOINT when it is imported; tests in one process set it in `constants`.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

MAIN = "main"


@dataclass(frozen=True)
class Blob:
    """A file of a commit: its git name, its size, and for an LFS file its SHA-256."""

    oid: str
    size: int
    sha256: str | None

    @property
    def etag(self):
        return self.sha256 or self.oid


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision):
        commit = revision if revision in self.commits else (self.branches | self.tags).get(revision)
        if commit is None:
            raise Refusal(404, X_Error_Code="RevisionNotFound")
        return commit


@dataclass
class Fault:
    """What happens to the next requests whose "METHOD /path" a pattern matches.

    Attributes:
        pattern: searched in "METHOD /path".
        times: how many requests it happens to.
        status: answered instead, with `headers`.
        flip: place of a byte of the body that is changed.
    """

    pattern: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    flip: int | None = None


class Refusal(Exception):  # noqa: N818 - an answer of the server, not an error
    def __init__(self, status, **headers):
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class HubServer:
    """A Hub for one user, who owns every namespace; repositories are public unless made private."""

    def __init__(self, root, token):
        self.root, self.token = root, token
        self.repositories = {}
        self.faults = []
        self.log = []  # "METHOD /path", with " +token" where one came
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.endpoint, self.storage = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self.server = uvicorn.Server(uvicorn.Config(routes(self), log_level="critical"))
        threading.Thread(target=self.server.run, args=([listener],), daemon=True).start()

    def shutdown(self):
        self.server.should_exit = True

    def take_fault(self, request):
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.pattern, request):
                fault.times -= 1
                return fault
        return Fault("")

    def store(self, path, data):
        sha256 = hashlib.sha256(data).hexdigest() if path.endswith(".safetensors") else None
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()
        blob = Blob(git_name(pointer if sha256 else data), len(data), sha256)
        (self.root / blob.etag).write_bytes(data)
        return blob

    def create(self, name, private=False):
        repository = self.repositories[name] = Repository(private)
        attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        self.commit(repository, {".gitattributes": self.store(".gitattributes", attributes)})
        return repository

    def commit(self, repository, files):
        names = json.dumps([len(repository.commits), sorted((path, blob.oid) for path, blob in files.items())])
        commit = hashlib.sha1(names.encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[MAIN] = commit
        return commit

    def add(self, name, files, remove=()):
        """A commit made without the client, as a test's starting point or as an attacker's."""
        repository = self.repositories.get(name) or self.create(name)
        tree = dict(repository.commits[repository.branches[MAIN]])
        tree |= {path: self.store(path, data) for path, data in files.items()}
        return self.commit(repository, {path: blob for path, blob in tree.items() if path not in remove})

    def head(self, name):
        """The commit of the main branch."""
        return self.repositories[name].branches[MAIN]

    def read(self, name, path):
        """A file of the main branch."""
        return (self.root / self.repositories[name].commits[self.head(name)][path].etag).read_bytes()

    def allowed(self, request, needed=False):
        """Whether a request has the token; a wrong one is refused, and a missing one if it is needed."""
        given = request.headers.get("Authorization")
        if given not in (None, f"Bearer {self.token}"):
            raise Refusal(401, X_Error_Message="Invalid credentials in Authorization header")
        if needed and given is None:
            raise Refusal(401, X_Error_Message="Unauthorized")
        return given is not None

    def repository(self, request, name, write=False):
        allowed = self.allowed(request, needed=write)
        repository = self.repositories.get(name)
        if repository is None or (repository.private and not allowed):
            raise Refusal(404 if allowed else 401, X_Error_Code="RepoNotFound")
        return repository


def git_name(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def routes(hub):
    """What huggingface_hub 2.x asks for to create, fill, list and download model repositories."""
    app = FastAPI()

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal):
        return JSONResponse({"error": "refused"}, refusal.status, refusal.headers)

    @app.middleware("http")
    async def faulty(request: Request, answer):
        line = f"{request.method} {request.url.path}"
        hub.log.append(line + (" +token" if "Authorization" in request.headers else ""))
        fault = hub.take_fault(line)
        if fault.status is not None:
            return JSONResponse({"error": "ordered"}, fault.status, fault.headers)
        response = await answer(request)
        body = bytearray([byte async for part in response.body_iterator for byte in part])
        if fault.flip is not None and body:
            body[fault.flip] ^= 1
        return Response(bytes(body), response.status_code, dict(response.headers))

    model = "/api/models/{owner}/{repo}"

    @app.get(model)
    @app.get(model + "/revision/{revision}")
    async def info(request: Request, owner, repo, revision=MAIN):
        name = f"{owner}/{repo}"
        repository = hub.repository(request, name)
        commit = repository.commit_of(revision)
        about = {"_id": "0", "id": name, "modelId": name, "sha": commit, "private": repository.private, "tags": []}
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        return about | {"siblings": siblings, "downloads": 0, "likes": 0}

    @app.get(model + "/tree/{revision}")
    async def tree(request: Request, owner, repo, revision):
        repository = hub.repository(request, f"{owner}/{repo}")
        files = repository.commits[repository.commit_of(revision)].items()
        return [{"type": "file", "oid": blob.oid, "size": blob.size, "path": path} for path, blob in files]

    @app.api_route("/{owner}/{repo}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    async def resolve(request: Request, owner, repo, revision, path):
        repository = hub.repository(request, f"{owner}/{repo}")
        commit = repository.commit_of(revision)
        blob = repository.commits[commit].get(path)
        if blob is None:
            raise Refusal(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        about = {"X-Repo-Commit": commit, "ETag": f'"{blob.etag}"', "X-Linked-ETag": f'"{blob.etag}"'}
        about |= {"X-Linked-Size": str(blob.size)}
        if blob.sha256 is None:
            return Response((hub.root / blob.oid).read_bytes(), headers=about)
        return Response(status_code=302, headers=about | {"Location": f"{hub.storage}/storage/{blob.sha256}"})

    @app.api_route("/storage/{key}", methods=["GET", "HEAD"])
    async def storage(key):
        return Response((hub.root / key).read_bytes(), headers={"ETag": f'"{key}"'})

    @app.post("/api/repos/create")
    async def create(request: Request):
        hub.allowed(request, needed=True)
        asked = await request.json()
        name = f"{asked['organization'] or 'owner'}/{asked['name']}"
        status = 409 if name in hub.repositories else 200
        if status == 200:
            hub.create(name, asked.get("visibility") == "private")
        return JSONResponse({"url": f"{hub.endpoint}/{name}", "name": name, "id": "0"}, status)

    @app.post("/api/validate-yaml")
    async def validate_yaml():
        return {"errors": [], "warnings": []}

    @app.post(model + "/preupload/{revision}")
    async def preupload(request: Request, owner, repo):
        name = f"{owner}/{repo}"
        known = hub.repository(request, name, write=True).commits[hub.head(name)]
        about = {"uploadMode": "regular", "shouldIgnore": False}
        asked = [file["path"] for file in (await request.json())["files"]]
        oids = [git_name(hub.read(name, path)) if path in known else None for path in asked]
        return {"files": [{"path": path, "oid": oid} | about for path, oid in zip(asked, oids, strict=True)]}

    @app.post(model + "/commit/{revision}")
    async def make_commit(request: Request, owner, repo, revision):
        repository = hub.repository(request, f"{owner}/{repo}", write=True)
        files = dict(repository.commits[repository.commit_of(revision)])
        for item in map(json.loads, (await request.body()).splitlines()):
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = hub.store(value["path"], base64.b64decode(value["content"]))
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = hub.commit(repository, files)
        page = f"{hub.endpoint}/{owner}/{repo}/commit/{commit}"
        return {"success": True, "commitOid": commit, "hookOutput": "", "commitUrl": page}

    return app
