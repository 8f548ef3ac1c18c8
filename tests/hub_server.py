"""A small Hugging Face Hub on a loopback port, for the unmodified client, with faults that a test can order.

It speaks what huggingface_hub 2.x asks for to create, fill, tag, list and download model repositories, and keeps blobs
in a folder. Files that end in .safetensors are LFS files, as on the Hub; they are served from another origin
("localhost" instead of "127.0.0.1"), as from the Hub's storage, where a token must not arrive.

Uploads to the real Hub go through Xet: hf_xet, a compiled library, splits files into chunks and speaks to a storage
service of its own, which this server is not. HF_HUB_DISABLE_XET=1 makes the client take the older, still supported way
of LFS. huggingface_hub reads HF_ENDPOINT when it is imported; tests in one process set it in `constants`.
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

    def resolve(self, revision):
        if revision in self.commits:
            return revision
        return self.branches.get(revision) or self.tags.get(revision)


@dataclass
class Fault:
    """What happens to the next requests whose "METHOD /path" a pattern matches.

    Attributes:
        pattern: searched in "METHOD /path".
        times: how many requests it happens to.
        after: requests that pass first.
        status: answered instead, with `headers`.
        cut: bytes of the answer's body (or of an upload) after which the connection is closed.
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
        """A client that goes away is nothing to report."""

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

    def store(self, data, lfs):
        sha256 = hashlib.sha256(data).hexdigest() if lfs else None
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()
        blob = Blob(git_oid(pointer if lfs else data), len(data), sha256)
        (self.root / blob.etag).write_bytes(data)
        return blob

    def create(self, name, private=False):
        repository = self.repositories[name] = Repository(private)
        attributes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        self.commit(repository, {".gitattributes": self.store(attributes, lfs=False)})
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
        tree |= {path: self.store(data, path.endswith(".safetensors")) for path, data in files.items()}
        return self.commit(repository, {path: blob for path, blob in tree.items() if path not in remove})

    def head(self, name):
        """The commit of the main branch."""
        return self.repositories[name].branches[MAIN]

    def read(self, name, path):
        """A file of the main branch."""
        return (self.root / self.repositories[name].commits[self.head(name)][path].etag).read_bytes()


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One method per kind of request; ROUTES says which."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.route()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def route(self):
        self.url = urlsplit(self.path)
        request = f"{self.command} {unquote(self.url.path)}"
        self.server.log.append(request + (" +token" if "Authorization" in self.headers else ""))
        self.fault = self.server.take_fault(request)
        self.body = self.read_body()
        if self.body is None:
            self.close_connection = True
            return
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

    def read_body(self):
        """The request's body; None if a fault cuts it off."""
        if self.fault.cut is not None and self.command == "PUT":
            self.rfile.read(self.fault.cut)
            return None
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def send(self, answer):
        body = answer.body
        if self.fault.flip is not None and body:
            body = bytearray(body)
            body[self.fault.flip] ^= 1
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault.cut is not None:
            self.wfile.write(body[: self.fault.cut])
            self.close_connection = True
            return
        self.wfile.write(body)

    # What requests share.

    def json(self):
        return json.loads(self.body or b"{}")

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

    def revision(self, repository, revision):
        commit = repository.resolve(revision)
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
            if "/" in path and not deep:
                continue
            entry = {"type": "file", "oid": blob.oid, "size": blob.size, "path": path}
            if blob.sha256:
                entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}
            entries.append(entry)
        raise Answer(body=entries)

    def refs(self, name):
        repository = self.repository(name)

        def shown(kind, refs):
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c} for n, c in refs.items()]

        branches = shown("heads", {n: c for n, c in repository.branches.items() if not n.startswith("refs/")})
        raise Answer(body={"branches": branches, "converts": [], "tags": shown("tags", repository.tags)})

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
        data = (self.server.root / key).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None:
            raise Answer(200, data, ETag=f'"{key}"', Accept_Ranges="bytes")
        start = int(asked[1])
        raise Answer(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")

    # Uploads.

    def create(self):
        self.check_token(needed=True)
        asked = self.json()
        name = f"{asked['organization'] or 'owner'}/{asked['name']}"
        answer = {"url": f"{self.server.endpoint}/{name}", "name": name, "id": "0"}
        if name in self.server.repositories:
            raise Answer(409, answer | {"error": "You already created this model repo"})
        self.server.create(name, asked.get("visibility") == "private")
        raise Answer(body=answer)

    def validate_yaml(self):
        raise Answer(body={"errors": [], "warnings": []})

    def preupload(self, name, revision):
        repository = self.repository(name, write=True)
        there = repository.commits[self.revision(repository, revision)]
        files = []
        for file in self.json()["files"]:
            mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
            oid = there[file["path"]].etag if file["path"] in there else None
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        raise Answer(body={"files": files})

    def lfs_batch(self, name):
        self.repository(name, write=True)
        objects = []
        for asked in self.json()["objects"]:
            oid, size = asked["oid"], asked["size"]
            answer = {"oid": oid, "size": size}
            if not (self.server.root / oid).exists():
                answer["actions"] = {
                    "upload": {"href": f"{self.server.storage}/upload/{oid}"},
                    "verify": {"href": f"{self.server.endpoint}/{name}.git/info/lfs/verify"},
                }
            objects.append(answer)
        raise Answer(body={"transfer": "basic", "objects": objects})

    def upload(self, oid):
        if hashlib.sha256(self.body or b"").hexdigest() != oid:
            raise Answer(400, {"error": "the content is not that of its name"})
        (self.server.root / oid).write_bytes(self.body or b"")
        raise Answer()

    def lfs_verify(self, name):
        self.repository(name, write=True)
        asked = self.json()
        path = self.server.root / asked["oid"]
        raise Answer(200 if path.exists() and path.stat().st_size == asked["size"] else 404)

    def make_commit(self, name, revision):
        repository = self.repository(name, write=True)
        tree = dict(repository.commits[self.revision(repository, revision)])
        for line in (self.body or b"").splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "file":
                tree[value["path"]] = self.server.store(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile":
                path = self.server.root / value["oid"]
                if not path.exists():
                    raise Answer(400, {"error": f"{value['path']} was not uploaded"})
                tree[value["path"]] = self.server.store(path.read_bytes(), lfs=True)
            elif key == "deletedFile":
                del tree[value["path"]]
        as_request = "create_pr" in parse_qs(self.url.query)
        branch = "refs/pr/1" if as_request else revision
        commit = self.server.commit(repository, tree, branch)
        answer = {"success": True, "commitOid": commit, "hookOutput": ""}
        answer["commitUrl"] = f"{self.server.endpoint}/{name}/commit/{commit}"
        if as_request:
            answer["pullRequestUrl"] = f"{self.server.endpoint}/{name}/discussions/1"
        raise Answer(body=answer)

    def tag(self, name, revision):
        repository = self.repository(name, write=True)
        tag = self.json()["tag"]
        if tag in repository.tags:
            raise Answer(409, {"error": "Tag reference exists already"})
        repository.tags[tag] = self.revision(repository, revision)
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
    ("POST", f"/{NAME}\\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("POST", f"/{NAME}\\.git/info/lfs/verify", Handler.lfs_verify),
    ("GET", r"/storage/(\w+)", Handler.storage),
    ("PUT", r"/upload/(\w+)", Handler.upload),
]
