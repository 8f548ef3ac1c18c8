"""A small Hugging Face Hub on a loopback port, for the unmodified client, with faults that a test can order.

It speaks what huggingface_hub 2.x asks for to create, fill, tag, list and download model repositories, and keeps files
in a folder. Files that end in .safetensors are listed as LFS files, as on the Hub, and are served from another origin
("localhost" instead of "127.0.0.1"), as from the Hub's storage, where a token must not arrive. Uploads differ: here all
files are part of the commit, whereas the client sends large files to the real Hub through Xet or LFS.

huggingface_hub reads HF_ENDPOINT when it is imported; tests in one process set it in `constants`.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

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


@dataclass
class Fault:
    """What happens to the next requests whose "METHOD /path" a pattern matches.

    Attributes:
        pattern: searched in "METHOD /path".
        times: how many requests it happens to.
        after: requests that pass first.
        status: answered instead, with `headers`.
        cut: bytes of the answer's body after which the connection is closed.
        flip: place of a byte of the body that is changed.
        move: repository whose main branch goes back to its first commit, once this request is answered.
    """

    pattern: str
    times: int = 1
    after: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    flip: int | None = None
    move: str | None = None


class Answer(Exception):  # noqa: N818 - not an error: how a handler answers, from any depth
    """An HTTP answer."""

    def __init__(self, status=200, body=b"", **headers):
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class HubServer(ThreadingHTTPServer):
    """A Hub for one user, who owns every namespace; repositories are public unless made private."""

    daemon_threads = True

    def __init__(self, root, token):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.token = root, token
        self.repositories = {}
        self.faults = []
        self.log = []  # "METHOD /path", with " +token" where one came
        self.lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """Ignore clients that disconnect."""

    def take_fault(self, request):
        with self.lock:
            for fault in self.faults:
                if re.search(fault.pattern, request):
                    if fault.after > 0:
                        fault.after -= 1
                    elif fault.times > 0:
                        fault.times -= 1
                        return fault
        return Fault("")

    def store(self, path, data):
        sha256 = hashlib.sha256(data).hexdigest() if path.endswith(".safetensors") else None
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()
        in_git = pointer if sha256 else data
        blob = Blob(hashlib.sha1(b"blob %d\0" % len(in_git) + in_git).hexdigest(), len(data), sha256)
        (self.root / blob.etag).write_bytes(data)
        return blob

    def create(self, name, private=False):
        repository = self.repositories[name] = Repository(private)
        attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        self.commit(repository, {".gitattributes": self.store(".gitattributes", attributes)})
        return repository

    def commit(self, repository, files, branch=MAIN):
        names = json.dumps([len(repository.commits), sorted((path, blob.oid) for path, blob in files.items())])
        commit = hashlib.sha1(names.encode()).hexdigest()
        repository.commits[commit] = files
        repository.branches[branch] = commit
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


class Handler(BaseHTTPRequestHandler):
    """One method per kind of request; ROUTES says which."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.url = urlsplit(self.path)
        request = f"{self.command} {unquote(self.url.path)}"
        self.server.log.append(request + (" +token" if "Authorization" in self.headers else ""))
        self.fault = self.server.take_fault(request)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if self.fault.status is not None:
                raise Answer(self.fault.status, {"error": "ordered"}, **self.fault.headers)
            for method, pattern, handler in ROUTES:
                match = re.fullmatch(pattern, self.url.path)
                if match and (self.command == method or (self.command == "HEAD" and method == "GET")):
                    handler(self, *map(unquote, match.groups()))
            raise Answer(404, {"error": f"no route for {request}"})
        except Answer as answer:
            self.send(answer)
        if self.fault.move is not None:
            repository = self.server.repositories[self.fault.move]
            repository.branches[MAIN] = next(iter(repository.commits))

    do_HEAD = do_POST = do_GET  # noqa: N815

    def send(self, answer):
        body = bytearray(answer.body)
        if self.fault.flip is not None and body:
            body[self.fault.flip] ^= 1
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: self.fault.cut])
            self.close_connection = self.close_connection or self.fault.cut is not None

    # What requests share.

    def check_token(self, needed):
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {self.server.token}"):
            raise Answer(401, X_Error_Message="Invalid credentials in Authorization header")
        if needed and given is None:
            raise Answer(401, X_Error_Message="Unauthorized")
        return given is not None

    def repository(self, name, write=False):
        allowed = self.check_token(write)
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not allowed):
            raise Answer(404 if allowed else 401, {"error": "not found"}, X_Error_Code="RepoNotFound")
        return repository

    def revision(self, repository, name):
        commit = name if name in repository.commits else (repository.branches | repository.tags).get(name)
        if commit is None:
            raise Answer(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        return commit

    # Questions.

    def info(self, name, revision=MAIN):
        repository = self.repository(name)
        commit = self.revision(repository, revision)
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        about = {"_id": "0", "id": name, "modelId": name, "sha": commit, "private": repository.private, "tags": []}
        raise Answer(body=about | {"siblings": siblings, "downloads": 0, "likes": 0})

    def tree(self, name, revision):
        repository = self.repository(name)
        entries, deep = [], "recursive=true" in self.url.query.lower()
        for path, blob in sorted(repository.commits[self.revision(repository, revision)].items()):
            if deep or "/" not in path:
                lfs = {"lfs": {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}} if blob.sha256 else {}
                entries.append({"type": "file", "oid": blob.oid, "size": blob.size, "path": path} | lfs)
        raise Answer(body=entries)

    def refs(self, name):
        tags = self.repository(name).tags.items()
        shown = [{"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": commit} for tag, commit in tags]
        raise Answer(body={"branches": [], "converts": [], "tags": shown})

    # Downloads.

    def resolve(self, name, revision, path):
        repository = self.repository(name)
        commit = self.revision(repository, revision)
        blob = repository.commits[commit].get(path)
        if blob is None:
            raise Answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        if blob.sha256 is None:
            # The Hub sends small files on to a cache of its own, by a relative path.
            raise Answer(307, X_Repo_Commit=commit, Location=f"/api/resolve-cache/models/{name}/{commit}/{path}")
        linked = {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.sha256}"'}
        location = f"{self.server.storage}/storage/{blob.sha256}"
        raise Answer(302, X_Repo_Commit=commit, ETag='"storage"', Location=location, **linked)

    def resolve_cache(self, name, commit, path):
        blob = self.repository(name).commits[commit][path]
        data = (self.server.root / blob.etag).read_bytes()
        raise Answer(200, data, X_Repo_Commit=commit, ETag=f'"{blob.etag}"')

    def storage(self, key):
        raise Answer(200, (self.server.root / key).read_bytes(), ETag=f'"{key}"')

    # Uploads.

    def create(self):
        self.check_token(needed=True)
        asked = json.loads(self.body)
        name = f"{asked['organization'] or 'owner'}/{asked['name']}"
        answer = {"url": f"{self.server.endpoint}/{name}", "name": name, "id": "0"}
        if name in self.server.repositories:
            raise Answer(409, answer | {"error": "You already created this model repo"})
        self.server.create(name, asked.get("visibility") == "private")
        raise Answer(body=answer)

    def validate_yaml(self):
        raise Answer(body={"errors": [], "warnings": []})

    def preupload(self, name, revision):
        self.repository(name, write=True)
        about = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
        raise Answer(body={"files": [{"path": file["path"]} | about for file in json.loads(self.body)["files"]]})

    def make_commit(self, name, revision):
        repository = self.repository(name, write=True)
        tree = dict(repository.commits[self.revision(repository, revision)])
        for item in map(json.loads, self.body.splitlines()):
            value = item["value"]
            if item["key"] == "file":
                tree[value["path"]] = self.server.store(value["path"], base64.b64decode(value["content"]))
            elif item["key"] == "deletedFile":
                del tree[value["path"]]
        as_request = "create_pr" in parse_qs(self.url.query)
        commit = self.server.commit(repository, tree, "refs/pr/1" if as_request else revision)
        answer = {"success": True, "commitOid": commit, "hookOutput": ""}
        answer["commitUrl"] = f"{self.server.endpoint}/{name}/commit/{commit}"
        if as_request:
            answer["pullRequestUrl"] = f"{self.server.endpoint}/{name}/discussions/1"
        raise Answer(body=answer)

    def tag(self, name, revision):
        repository = self.repository(name, write=True)
        repository.tags[json.loads(self.body)["tag"]] = self.revision(repository, revision)
        raise Answer()


NAME, REVISION = r"([\w.-]+/[\w.-]+)", r"([^/]+)"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("GET", f"/api/models/{NAME}", Handler.info),
    ("GET", f"/api/models/{NAME}/revision/{REVISION}", Handler.info),
    ("GET", f"/api/models/{NAME}/tree/{REVISION}", Handler.tree),
    ("GET", f"/api/models/{NAME}/refs", Handler.refs),
    ("POST", f"/api/models/{NAME}/preupload/{REVISION}", Handler.preupload),
    ("POST", f"/api/models/{NAME}/commit/{REVISION}", Handler.make_commit),
    ("POST", f"/api/models/{NAME}/tag/{REVISION}", Handler.tag),
    ("GET", f"/api/resolve-cache/models/{NAME}/{REVISION}/(.+)", Handler.resolve_cache),
    ("GET", f"/{NAME}/resolve/{REVISION}/(.+)", Handler.resolve),
    ("GET", r"/storage/(\w+)", Handler.storage),
]
