"""What `dualgauge bench` has measured, as JSON in one file that is replaced after every cell.

A cell is one configuration under one concurrency, or its perplexity on one text. A second run goes on with
the cells that are not there; a file of other settings is refused, not mixed with.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

NAME = "results.json"
VERSION = 1
TEXTS = ("prose", "code", "maths", "json")
LEVELS = (1, 8, 32, 128)


class ResultsError(Exception):
    """A file of results that this run cannot go on with; the message says what to do."""


class Workload(msgspec.Struct, frozen=True):
    """What every configuration is asked: `requests` at a time is one of `levels`, tokens are of each request.

    `scored` is the number of tokens of each text whose probability is looked at, at most. `least` and `most`
    bound how many requests one concurrency gets.
    """

    levels: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    scored: int
    least: int
    most: int

    def requests(self, level: int) -> int:
        """How many requests are sent in all, `level` at a time: two rounds of them within the bounds."""
        return max(level, min(self.most, max(self.least, 2 * level)))

    @property
    def quick(self) -> bool:
        """Whether it is smaller than it would be without `--quick`."""
        return self.most < FULL.most

    @property
    def cells(self) -> int:
        """How many cells a configuration has."""
        return len(self.levels) + len(TEXTS)


QUICK = Workload(LEVELS, input_tokens=16, output_tokens=12, scored=128, least=6, most=32)
FULL = Workload(LEVELS, input_tokens=512, output_tokens=128, scored=512, least=32, most=512)


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


class Speed(msgspec.Struct, frozen=True):
    """One configuration under one concurrency. `output` and `total` are tokens a second of all requests
    together, the second with the prompts' tokens; `seconds` is how long they took.

    `latency` is of whole requests, `ttft` up to the first token, `itl` between two tokens of a request.
    """

    requests: int
    failed: int
    seconds: float
    output: float
    total: float
    latency: Quantiles
    ttft: Quantiles
    itl: Quantiles


class Score(msgspec.Struct, frozen=True):
    """Perplexity of one text over `tokens` of its tokens; `ids` stands for which tokens these were."""

    perplexity: float
    tokens: int
    ids: str


class Memory(msgspec.Struct, frozen=True):
    """Bytes: the most that the processes held while they were measured, and the model's files.

    `kind` says how that was read: `resident` (proportional set size) or `GPU`.
    """

    peak: int
    files: int
    kind: str


class Measured(msgspec.Struct):
    """One configuration. `engine` is what the server says of its version, `arguments` what it was started
    with, `problem` why (the rest of) it is not measured. `identity` stands for the model, the program and its
    arguments; empty where the configuration is not at hand. `tier` is its engine's."""

    key: str
    title: str
    tier: str = ""
    identity: str = ""
    model: str = ""
    device: str = ""
    arguments: str = ""
    engine: str = ""
    start_seconds: float | None = None
    memory: Memory | None = None
    speeds: dict[int, Speed] = {}
    scores: dict[str, Score] = {}
    problem: str = ""

    def complete(self, workload: Workload) -> bool:
        return all(level in self.speeds for level in workload.levels) and all(t in self.scores for t in TEXTS)


class Host(msgspec.Struct, frozen=True):
    """The machine; `memory` is bytes."""

    processor: str
    cores: int
    memory: int
    gpus: tuple[str, ...]
    system: str


class Part(msgspec.Struct, frozen=True):
    """What goes to one tier."""

    requests: int
    tokens: int


class Gain(msgspec.Struct, frozen=True):
    """The decisions of a log made again by `policy`: what goes to each tier, prompt and completion tokens.

    `pinned` named their tier themselves, `undecided` cannot be decided again; `bad` lines could not be read.
    """

    policy: str
    decisions: int
    tiers: dict[str, Part]
    pinned: Part
    undecided: Part
    bad: int


class Spent(msgspec.Struct, frozen=True):
    """Seconds of all runs that filled one file: by the clock, and of the machine's cores.

    `cpu` was used by the bench and all that it started, `others` by other processes meanwhile; `idle` is what
    was left.
    """

    seconds: float
    cpu: float
    others: float
    idle: float

    def __add__(self, more: Spent) -> Spent:
        return Spent(
            self.seconds + more.seconds,
            self.cpu + more.cpu,
            self.others + more.others,
            self.idle + more.idle,
        )

    def since(self, before: Spent) -> Spent:
        """What lies between the two; the kernel's ticks are coarse, so that `others` may come out below 0."""
        return Spent(
            self.seconds - before.seconds,
            self.cpu - before.cpu,
            max(0.0, self.others - before.others),
            self.idle - before.idle,
        )

    @property
    def disturbed(self) -> float:
        """What other processes used, as a part of all that the cores could give."""
        whole = self.cpu + self.others + self.idle
        return self.others / whole if whole else 0.0


class Results(msgspec.Struct):
    """All that one file has. `began` is Unix time; `gain` is there where a decision log was given."""

    version: int
    began: float
    host: Host
    workload: Workload
    configurations: list[Measured] = []
    gain: Gain | None = None
    spent: Spent | None = None

    def of(self, key: str) -> Measured | None:
        return next((measured for measured in self.configurations if measured.key == key), None)


def load(path: Path) -> Results | None:
    """The file's results, None where there is none. Raises ResultsError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(
            f"{path} cannot be read: {error}; begin anew with --fresh, or name another --out"
        ) from None


def resume(path: Path, begun: Results) -> Results:
    """`begun` with what is measured already of the same configurations. Raises ResultsError."""
    found = load(path)
    if found is None:
        return begun
    if (found.version, found.workload, found.host) != (begun.version, begun.workload, begun.host):
        raise _others(path, "of another workload or machine")
    kept = []
    for measured in begun.configurations:
        before = found.of(measured.key)
        if before is None or not before.identity or not measured.identity:
            kept.append(before if before is not None and before.identity else measured)
        elif before.identity == measured.identity:
            kept.append(before)
        else:
            raise _others(path, f"of `{measured.title}` with another model, program or arguments")
    return msgspec.structs.replace(begun, began=found.began, configurations=kept, spent=found.spent)


def _others(path: Path, what: str) -> ResultsError:
    return ResultsError(
        f"{path} has figures {what}: begin anew with --fresh, or name another folder with --out"
    )


def store(path: Path, results: Results) -> None:
    """Replace the file as a whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    beside.replace(path)
