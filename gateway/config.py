"""`dualgauge.yaml` as an immutable value. Every complaint names file, line and column.

Paths in the file are relative to it; `${NAME}` in a value is that environment variable.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from engines import hosted
from engines.address import Address
from engines.allowed import Allowance, Allowed, Aspect
from engines.flags import OTHER_MODEL, SLEEP_MODE, has_option
from engines.spec import EngineSpec, Kind, Timeouts
from policies import units
from policies.document import Diagnostic, Document, ProblemsError, content_hash, convert, load, unknown
from policies.shipped import SHIPPED_NAME

DEFAULT_FILE = "dualgauge.yaml"
VERSION = 1
"""Of the file's form: raised where a file that was right no longer means the same."""
FIRST_ENGINE_PORT = 8101
MOST_WORKERS = 256
LAST_PORT = 65535
OF_THE_POLICY = ("shadow", "rollout")
MIN_LOG = 64 << 10
MAX_LOGS = 500
AT_LEAST_ONE = (
    "requests",
    "body",
    "depth",
    "nodes",
    "n",
    "prompts",
    "schema",
    "tools",
    "inputs",
    "pattern",
    "read",
)
AT_LEAST_NONE = ("stop", "logprobs", "bad_words", "token_ids", "logit_bias")
# A host name of two labels or more, the last of which begins with a letter: no IP literal of any spelling.
HOST = r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
FETCH = re.compile(rf"\*|(?:\*\.)?{HOST}")
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}")
IN_A_HEADER = re.compile(r"[!-~]([ -~]*[!-~])?")
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
STORE = re.compile(r"rediss?(\+sentinel|\+cluster)?|unix")
OTLP = re.compile(r"(https?|grpcs?)://[^/]")
OTLP_GRPC_PORT = 4317
ENV = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

OnStoreFailure = Literal["closed", "open", "local"]


class Seconds(float):
    pass


class Bytes(int):
    pass


class Share(float):
    pass


class HostPort:
    """An address to listen on; `host` without brackets, `port` 0 lets the system choose."""

    __slots__ = ("host", "port")

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port

    @classmethod
    def parse(cls, value: object) -> HostPort:
        """`127.0.0.1:8080`, `[::1]:8080` or `localhost:8080`. Raises ValueError."""
        host, _, port = str(value).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isascii() or not port.isdigit() or int(port) > LAST_PORT:
            raise ValueError(f"`{value}` is not an address: write 127.0.0.1:8080")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"http://{HostPort(host, self.port)}"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class TimeoutsPart(Part, frozen=True):
    connect: Seconds = Seconds(2)
    first_byte: Seconds = Seconds(120)
    idle: Seconds = Seconds(60)
    total: Seconds = Seconds(1800)


class EngineTimeouts(Part, frozen=True):
    connect: Seconds | None = None
    first_byte: Seconds | None = None
    idle: Seconds | None = None
    total: Seconds | None = None


class Health(Part, frozen=True):
    every: Seconds = Seconds(2)
    down_after: int = 3
    up_after: int = 1
    stalled_after: Seconds = Seconds(30)


class Retries(Part, frozen=True):
    attempts: int = 3
    budget: Share = Share(0.2)


class Bounds(Part, frozen=True):
    requests: int = 4096
    memory: Bytes = Bytes(256 << 20)
    body: Bytes = Bytes(10 << 20)
    depth: int = 64
    nodes: int = 200_000
    n: int = 4
    stop: int = 16
    logprobs: int = 20
    prompts: int = 8
    schema: Bytes = Bytes(64 << 10)
    tools: Bytes = Bytes(256 << 10)
    inputs: int = 2048
    bad_words: int = 128
    token_ids: int = 128
    logit_bias: int = 1024
    pattern: int = 10_000
    recursion: bool = False
    fetch: tuple[str, ...] = ()
    read: Seconds = Seconds(60)


class LimitsPart(Part, frozen=True):
    store: str = "memory"
    on_store_failure: OnStoreFailure = "local"
    timeout: Seconds = Seconds(0.05)
    processes: Literal["auto"] | int = "auto"
    waiting: int = 1000


class Telemetry(Part, frozen=True):
    otlp: str | None = None
    sample: Share = Share(0.1)
    capture_content: bool = False


class LogsPart(Part, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    access: bool = True


class ParityPart(Part, frozen=True):
    allow: tuple[Aspect, ...] = ()
    accept: tuple[str, ...] = ()

    @property
    def allowance(self) -> Allowance:
        return Allowance(frozenset(self.allow), frozenset(self.accept))


class SwapPart(Part, frozen=True):
    tier: str = "exact"
    residence: Seconds = Seconds(30)
    batch: int = 8
    patience: Seconds = Seconds(2)
    idle: Seconds = Seconds(15)
    budget: int = 30
    wait: Seconds = Seconds(60)


class DecisionLogPart(Part, frozen=True):
    path: str
    size: Bytes = Bytes(64 << 20)
    keep: int = 8
    signals: Literal["all", "used"] = "all"


class IntegrityPart(Part, frozen=True):
    manifest: Literal["auto", "required"] = "auto"
    public_key: str | None = None


class EnginePart(Part, frozen=True):
    name: str
    tier: str
    kind: Kind
    precision: str
    model: str | None = None
    url: str | None = None
    port: int | None = None
    served_model: str | None = None
    gpu: int | None = None
    share: Share | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    api_key: str | None = None
    timeouts: EngineTimeouts = EngineTimeouts()
    priorities: bool | None = None
    allow: list[Allowed] = []
    manifest: str | None = None
    binary: str | None = None


class File(Part, frozen=True):
    model: str
    engines: list[EnginePart]
    listen: HostPort = HostPort("127.0.0.1", 8080)
    admin: HostPort = HostPort("127.0.0.1", 8081)
    admin_token: str | None = None
    workers: int = 1
    policy: str = "default"
    keys: str | None = None
    tiers: list[str] = msgspec.field(default_factory=lambda: ["fast", "exact"])
    limits: LimitsPart = LimitsPart()
    telemetry: Telemetry = Telemetry()
    logs: LogsPart = LogsPart()
    decision_log: DecisionLogPart | None = None
    tokenizer: str = "auto"
    timeouts: TimeoutsPart = TimeoutsPart()
    health: Health = Health()
    retries: Retries = Retries()
    bounds: Bounds = Bounds()
    parity: ParityPart = ParityPart()
    swap: SwapPart | None = None
    integrity: IntegrityPart = IntegrityPart()
    shutdown_grace: Seconds = Seconds(120)
    version: int = VERSION


class Config(msgspec.Struct, frozen=True):
    """One deployment. `tiers` go from the least to the most precise; `policy` is a shipped name or an
    absolute path; times are in seconds; `hash` names the file's content."""

    path: Path
    model: str
    engines: tuple[EngineSpec, ...]
    tiers: tuple[str, ...]
    listen: HostPort
    admin: HostPort
    admin_token: str | None
    workers: int
    policy: str
    keys: Path | None
    limits: LimitsPart
    telemetry: Telemetry
    logs: LogsPart
    decision_log: DecisionLogPart | None
    health: Health
    retries: Retries
    bounds: Bounds
    parity: ParityPart
    swap: SwapPart | None
    integrity: IntegrityPart
    tokenizer: str
    shutdown_grace: float
    hash: str

    @property
    def folder(self) -> Path:
        return self.path.parent


def read(path: Path, env: Mapping[str, str] = os.environ) -> Config:
    """Load a deployment file. Raises ProblemsError, OSError."""
    return parse(path.read_text("utf-8"), located(path), env)


def located(path: Path) -> Path:
    """The file's absolute place; where it is a link itself, the link's.

    Kubernetes leads the links in a volume to another folder when keys change, and removes the one before.
    """
    return path.parent.resolve() / path.name


def parse(text: str, path: Path, env: Mapping[str, str]) -> Config:
    """A deployment from text; `path` is absolute and need not exist. Raises ProblemsError."""
    document = load(text, _shown(path), expand=lambda value: _expand(value, env))
    misplaced = [key for key in OF_THE_POLICY if isinstance(document.value, dict) and key in document.value]
    if misplaced:
        message = "belongs into the policy's file, where a reload is enough to change it"
        raise ProblemsError(document.problem((key,), f"`{key}` {message}", key=True) for key in misplaced)
    _check_version(document)
    file: File = convert(document, File, dec_hook=_decode)
    if file.telemetry.otlp == "":  # of a variable that is set to nothing
        file = msgspec.structs.replace(file, telemetry=msgspec.structs.replace(file.telemetry, otlp=None))
    problems = list(_Checks(document, file).run())
    if any(p.severity == "error" for p in problems):
        raise ProblemsError(problems)
    folder = path.parent
    policy = file.policy
    if not SHIPPED_NAME.fullmatch(policy):
        policy = str(_absolute(folder, policy))
    return Config(
        path=path,
        model=file.model,
        engines=tuple(_engine(part, index, file, folder) for index, part in enumerate(file.engines)),
        tiers=tuple(file.tiers),
        listen=file.listen,
        admin=file.admin,
        admin_token=file.admin_token,
        workers=file.workers,
        policy=policy,
        keys=_absolute(folder, file.keys) if file.keys else None,
        limits=file.limits,
        telemetry=file.telemetry,
        logs=file.logs,
        decision_log=_decision_log(file.decision_log, folder),
        health=file.health,
        retries=file.retries,
        bounds=file.bounds,
        integrity=_integrity(document, file.integrity, folder),
        parity=file.parity,
        swap=file.swap,
        tokenizer=_tokenizer(document, file.tokenizer, folder),
        shutdown_grace=file.shutdown_grace,
        hash=content_hash(text),
    )


def _check_version(document: Document) -> None:
    """Before anything else is read: another version's keys mean something else. Raises ProblemsError."""
    version = document.value.get("version", VERSION) if isinstance(document.value, dict) else VERSION
    if type(version) is int and version == VERSION:
        return
    if type(version) is int and version > VERSION:
        message = f"this is for a newer Dualgauge: update this one, which reads `version: {VERSION}`"
    else:
        message = f"this Dualgauge reads `version: {VERSION}`"
    raise ProblemsError([document.problem(("version",), message)])


def _tokenizer(document: Document, named: str, folder: Path) -> str:
    """`auto`, `none`, or a file that is there. Raises ProblemsError."""
    if named in ("auto", "none"):
        return named
    file = _absolute(folder, named)
    if file.is_dir():
        file /= "tokenizer.json"
    if not file.is_file():
        message = f"there is no {file}: name a tokenizer.json or the folder that has it, `auto` or `none`"
        raise ProblemsError([document.problem(("tokenizer",), message)])
    return str(file)


def _engine(part: EnginePart, index: int, file: File, folder: Path) -> EngineSpec:
    own, common = part.timeouts, file.timeouts
    model = part.model
    if model is not None and model.startswith(("/", "./", "../", "~")):
        model = str(_absolute(folder, model))
    return EngineSpec(
        name=part.name,
        tier=part.tier,
        kind=part.kind,
        url=_url(part, index),
        served_model=_served_model(part, file),
        precision=part.precision,
        model=model,
        gpu=part.gpu,
        share=part.share,
        args=_args(part, file),
        env=dict(part.env),
        api_key=part.api_key,
        timeouts=Timeouts(
            connect=_or(own.connect, common.connect),
            first_byte=_or(own.first_byte, common.first_byte),
            idle=_or(own.idle, common.idle),
            total=_or(own.total, common.total),
        ),
        priorities=_by_priority(part.args) if part.priorities is None else part.priorities,
        allow=frozenset(part.allow),
        manifest=part.manifest,
        api_base=part.url if part.kind == "hosted" else None,
        binary=None if part.binary is None else str(_absolute(folder, part.binary)),
    )


def _url(part: EnginePart, index: int) -> str:
    if part.kind == "hosted":
        return ""
    return part.url or f"http://127.0.0.1:{part.port or FIRST_ENGINE_PORT + index}"


def _integrity(document: Document, part: IntegrityPart, folder: Path) -> IntegrityPart:
    """With the key's absolute path. Raises ProblemsError where no such file is there."""
    if part.public_key is None:
        return part
    key = _absolute(folder, part.public_key)
    if not key.is_file():
        message = f"there is no {key}: name the PEM file of the public key that models are signed for"
        raise ProblemsError([document.problem(("integrity", "public_key"), message)])
    return msgspec.structs.replace(part, public_key=str(key))


def _args(part: EnginePart, file: File) -> tuple[str, ...]:
    """As written; engines that take turns must be able to sleep."""
    sleeps = file.swap is not None and part.kind == "vllm" and not has_option(part.args, SLEEP_MODE)
    return (*part.args, *((SLEEP_MODE,) if sleeps else ()))


def _served_model(part: EnginePart, file: File) -> str:
    if part.kind == "hosted" and part.model is not None:
        return part.model.partition("/")[2]
    return part.served_model or file.model


def _by_priority(args: list[str]) -> bool:
    """Whether a vLLM with these arguments schedules by priority."""
    spelt = [part for arg in args for part in arg.split("=", 1)]
    return ("--scheduling-policy", "priority") in pairwise(spelt)


def _decision_log(part: DecisionLogPart | None, folder: Path) -> DecisionLogPart | None:
    return None if part is None else msgspec.structs.replace(part, path=str(_absolute(folder, part.path)))


def listening(config: Config, listen: HostPort) -> Config:
    """The deployment on another address than its file's. Raises ValueError."""
    problem = _open_to_all(listen, config.keys)
    if problem is not None:
        raise ValueError(f"{problem} ({config.path})")
    if listen.port and listen.port == config.admin.port:
        raise ValueError(f"port {listen.port} is `admin`'s already in {config.path}")
    return msgspec.structs.replace(config, listen=listen)


def _open_to_all(listen: HostPort, keys: object) -> str | None:
    """What to do about an address that others reach while no key is asked."""
    if keys is not None or listen.loopback:
        return None
    return f"{listen} can be reached by others: add `keys: keys.yaml`, or listen on 127.0.0.1"


def _or(own: float | None, common: float) -> float:
    return common if own is None else own


def _absolute(folder: Path, path: str) -> Path:
    return Path(os.path.normpath(folder / Path(path).expanduser()))


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _expand(value: str, env: Mapping[str, str]) -> str:
    def lookup(match: re.Match[str]) -> str:
        if match[1] not in env:
            raise ValueError(f"the environment variable {match[1]} is not set")
        return env[match[1]]

    return ENV.sub(lookup, value)


def _decode(kind: Any, value: Any) -> Any:
    if kind is Seconds:
        return Seconds(units.duration(value))
    if kind is Bytes:
        return Bytes(units.size(value))
    if kind is Share:
        return Share(units.share(value))
    if kind is HostPort:
        return HostPort.parse(value)
    raise NotImplementedError(f"no way to read a {kind}")


def _store_problem(store: str) -> str | None:
    """What is wrong with a store's URL. It may hold a password, so it is not repeated."""
    if store == "memory":
        return None
    parts = urlsplit(store)
    if not STORE.fullmatch(parts.scheme):
        return (
            "write `memory`, or where Redis is: redis://host:6379/0, rediss://host:6379, "
            "unix:///run/redis.sock, redis+sentinel://host:26379/name, redis+cluster://host:6379"
        )
    if parts.scheme == "unix":
        return None if parts.path.startswith("/") else "a socket has an absolute path: unix:///run/redis.sock"
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if len(hosts) > 1 and "+" not in parts.scheme:
        return "several hosts are Sentinels or a cluster: redis+sentinel://a,b/name or redis+cluster://a,b"
    try:
        read = [urlsplit(f"//{host}") for host in hosts]
        valid = all(host.hostname and host.port != 0 for host in read)
    except ValueError:
        valid = False
    if not valid:
        return "each host is a name or an address, with a port perhaps: host:6379"
    if parts.scheme.endswith("+sentinel") and not parts.path.strip("/"):
        return "Sentinels are asked for a master by its name: redis+sentinel://host:26379/mymaster"
    return None


def speaks_grpc(url: str) -> bool:
    """Whether a collector's url is one of OTLP over gRPC: by its scheme, or by the port that is gRPC's.

    Raises ValueError where its port is none.
    """
    parts = urlsplit(url)
    return parts.scheme in ("grpc", "grpcs") or (parts.port == OTLP_GRPC_PORT and parts.path in ("", "/"))


def _collector_problem(url: str) -> str | None:
    """What is wrong with a collector's url. It may hold a password, so it is not repeated."""
    grpc = False
    try:
        grpc = speaks_grpc(url)
    except ValueError:
        url = ""
    if not OTLP.match(url):
        return "a collector's url: http://127.0.0.1:4318, or grpc://127.0.0.1:4317"
    if grpc and importlib.util.find_spec("grpc") is None:
        return "OTLP over gRPC needs one more package: pip install 'dualgauge[grpc]'"
    return None


class _Checks:
    """What types cannot say: names, references between keys, and what would be unsafe."""

    def __init__(self, document: Document, file: File) -> None:
        self._at = document.problem
        self._given = document.value
        self._file = file

    def run(self) -> list[Diagnostic]:
        file = self._file
        found: list[Diagnostic] = []
        if not file.engines:
            found.append(self._at(("engines",), "no engine: name at least one"))
        if len(set(file.tiers)) < len(file.tiers) or not file.tiers:
            found.append(self._at(("tiers",), "name each tier once, from the least to the most precise"))
        for index, tier in enumerate(file.tiers):
            if not NAME.fullmatch(tier):
                found.append(self._at(("tiers", index), f"`{tier}` cannot be a tier's name"))
        if not file.model or ":" in file.model or not file.model.isascii() or not file.model.isprintable():
            found.append(self._at(("model",), "a model's name is printable ASCII without a colon"))
        open_to_all = _open_to_all(file.listen, file.keys)
        if open_to_all is not None:
            found.append(self._at(("listen",), open_to_all))
        if file.admin_token is None and not file.admin.loopback:
            message = f"{file.admin} can be reached by others: add `admin_token: ${{NAME}}`, or use 127.0.0.1"
            found.append(self._at(("admin",), message))
        if file.admin_token is not None and not file.admin_token.strip():
            found.append(self._at(("admin_token",), "is empty, so that no token would be asked: write one"))
        elif file.admin_token is not None and not IN_A_HEADER.fullmatch(file.admin_token):
            message = "cannot be sent in a header: use printable ASCII, without a blank at its ends"
            found.append(self._at(("admin_token",), message))
        if file.listen.port and file.listen.port == file.admin.port:
            message = f"port {file.admin.port} is both `listen`'s and `admin`'s: change one"
            found.append(self._at(("admin",) if "admin" in self._given else ("listen",), message))
        if file.workers < 1:
            found.append(self._at(("workers",), "at least 1"))
        if file.workers > MOST_WORKERS:
            found.append(
                self._at(("workers",), f"{MOST_WORKERS} at most; as many as there are cores is enough")
            )
        elif file.workers > 1 and file.limits.store == "memory":
            message = (
                "several workers share their limits in Redis: add "
                "`limits: {store: redis://127.0.0.1:6379/0}`, or leave `workers` out"
            )
            found.append(self._at(("workers",), message))
        found.extend(self._limits())
        if file.telemetry.capture_content and file.telemetry.otlp is None:
            message = "there are no traces to put them into: name a collector, `otlp: http://127.0.0.1:4318`"
            found.append(self._at(("telemetry", "capture_content"), message))
        found.extend(self._figures())
        for index, digest in enumerate(file.parity.accept):
            if not SHA256.fullmatch(digest):
                message = "the hash of a difference, as `dualgauge up` prints it when it refuses it: sha256:…"
                found.append(self._at(("parity", "accept", index), message))
        if file.swap is not None:
            found.extend(self._swap(file.swap))
        for index, engine in enumerate(file.engines):
            found.extend(self._engine(index, engine))
        return found

    def _limits(self) -> list[Diagnostic]:
        limits, found = self._file.limits, []
        problem = _store_problem(limits.store)
        if problem is not None:
            found.append(self._at(("limits", "store"), problem))
        if limits.processes != "auto" and limits.processes < 1:
            found.append(self._at(("limits", "processes"), "at least 1, or `auto`"))
        if limits.timeout < 0.001:
            found.append(self._at(("limits", "timeout"), "at least 1ms"))
        if limits.waiting < 1:
            found.append(self._at(("limits", "waiting"), "at least 1"))
        return found

    def _swap(self, swap: SwapPart) -> Iterator[Diagnostic]:
        engines = self._file.engines
        at = ("swap",)
        if swap.tier not in self._file.tiers:
            yield self._at((*at, "tier"), unknown("tier", swap.tier, self._file.tiers))
            return
        if any(engine.kind != "vllm" for engine in engines):
            yield self._at(at, "only engines of `kind: vllm` can take turns: others cannot sleep")
        if {engine.tier for engine in engines} != set(self._file.tiers) or len(self._file.tiers) != 2:
            yield self._at(at, "two tiers take turns: name two, with an engine in each")
        for name in ("batch", "budget"):
            if getattr(swap, name) < 1:
                yield self._at((*at, name), "at least 1")

    def _figures(self) -> list[Diagnostic]:
        file = self._file
        low = {
            ("retries", "attempts"): file.retries.attempts,
            ("health", "down_after"): file.health.down_after,
            ("health", "up_after"): file.health.up_after,
            ("health", "every"): file.health.every * 100,
            ("health", "stalled_after"): file.health.stalled_after * 100,
            **{("bounds", name): getattr(file.bounds, name) for name in AT_LEAST_ONE},
            **{("bounds", name): getattr(file.bounds, name) + 1 for name in AT_LEAST_NONE},
            **{
                ("timeouts", name): value * 1000
                for name, value in msgspec.structs.asdict(file.timeouts).items()
            },
        }
        found = [self._at(path, "must be larger") for path, value in low.items() if value < 1]
        if file.bounds.memory < file.bounds.body:
            found.append(self._at(("bounds", "memory"), "at least bounds.body: the largest body must fit"))
        for index, host in enumerate(file.bounds.fetch):
            if not FETCH.fullmatch(host):
                message = "a host's name in lower case: images.example.com, *.example.com, or * for any"
                found.append(self._at(("bounds", "fetch", index), message))
        log = file.decision_log
        if log is not None and not log.path.strip():
            found.append(self._at(("decision_log", "path"), "a file: decisions.jsonl"))
        if log is not None and log.size < MIN_LOG:
            found.append(self._at(("decision_log", "size"), "must be larger: 64KiB at least"))
        if log is not None and not 1 <= log.keep <= MAX_LOGS:
            found.append(self._at(("decision_log", "keep"), f"how many older files stay: 1 to {MAX_LOGS}"))
        problem = None if file.telemetry.otlp is None else _collector_problem(file.telemetry.otlp)
        if problem is not None:
            found.append(self._at(("telemetry", "otlp"), problem))
        return found

    def _hosted(self, at: tuple[str | int, ...], engine: EnginePart) -> Iterator[Diagnostic]:
        if hosted.missing():
            message = "hosted engines need one more package: pip install 'dualgauge[hosted]'"
            yield self._at((*at, "kind"), message)
        if engine.model is None or "/" not in engine.model:
            yield self._at(at, "which `model`? The provider and its name for it: anthropic/claude-sonnet-5")
        for key in ("args", "port", "gpu", "share", "served_model"):
            if getattr(engine, key) not in (None, []):
                yield self._at((*at, key), "nothing is started here for a hosted engine: leave this out")

    def _engine(self, index: int, engine: EnginePart) -> list[Diagnostic]:
        file, at = self._file, ("engines", index)
        found: list[Diagnostic] = []
        if not NAME.fullmatch(engine.name):
            found.append(self._at((*at, "name"), "use letters, digits, dots, dashes; 63 at most"))
        if engine.name in [e.name for e in file.engines[:index]]:
            found.append(self._at((*at, "name"), f"`{engine.name}` is another engine's name already"))
        if engine.tier not in file.tiers:
            found.append(self._at((*at, "tier"), unknown("tier", engine.tier, file.tiers)))
        if engine.kind == "hosted":
            found.extend(self._hosted(at, engine))
        if engine.kind == "external" and engine.url is None:
            found.append(self._at(at, "an external engine needs its `url`"))
        if engine.kind in ("vllm", "llama.cpp"):
            if engine.model is None:
                found.append(self._at(at, "which `model` should it serve? A hub name or a folder"))
            if engine.url is not None:
                found.append(self._at((*at, "url"), "this engine is started here: give its `port` instead"))
            port = engine.port or FIRST_ENGINE_PORT + index
            if port in (file.listen.port, file.admin.port):
                found.append(self._at((*at, "port"), f"port {port} is the gateway's own"))
            others = [
                e.port or FIRST_ENGINE_PORT + i
                for i, e in enumerate(file.engines[:index])
                if e.url is None and e.kind != "hosted"
            ]
            if port in others:
                found.append(self._at((*at, "port"), f"port {port} is another engine's already"))
        found.extend(
            self._at((*at, "timeouts", name), "must be larger")
            for name, value in msgspec.structs.asdict(engine.timeouts).items()
            if value is not None and value < 0.001
        )
        if engine.manifest is not None and not SHA256.fullmatch(engine.manifest):
            message = "the sha256 of a manifest, as `dualgauge models manifest` prints it: sha256:…"
            found.append(self._at((*at, "manifest"), message))
        if engine.kind in ("external", "hosted"):
            found.extend(
                self._at((*at, key), "only the model of an engine that is started here can be checked")
                for key in ("allow", "manifest")
                if getattr(engine, key)
            )
        if engine.kind == "llama.cpp" and has_option(engine.args, *OTHER_MODEL):
            message = "these name a model too, which nobody would have checked: write it into `model` alone"
            found.append(self._at((*at, "args"), message))
        if engine.binary is not None and engine.kind != "llama.cpp":
            found.append(self._at((*at, "binary"), "a program of your own is for `kind: llama.cpp`"))
        if engine.gpu is not None and engine.gpu < 0:
            found.append(self._at((*at, "gpu"), "GPUs are counted from 0"))
        if engine.port is not None and not 0 < engine.port <= LAST_PORT:
            found.append(self._at((*at, "port"), f"a port is 1 to {LAST_PORT}"))
        if engine.url is not None:
            try:
                Address.parse(engine.url)
            except ValueError as exc:
                found.append(self._at((*at, "url"), str(exc)))
        return found
