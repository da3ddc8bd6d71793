"""The report of `dualgauge bench`: one list of blocks, as Markdown with pictures and as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from engines.bench.configurations import EXACT, FAST
from engines.bench.crossing import Crossing, crossing
from engines.bench.results import TEXTS, Measured, Quantiles, Results, Speed
from engines.hardware import GIB, MIB
from gateway.cli import bench_plots
from gateway.cli.bench_gain import Estimate, estimates
from gateway.cli.bench_plots import Series

MARKDOWN, PAGE, PLOTS = "report.md", "report.html", "plots"
NONE = "-"
ENOUGH = 100
"""Requests from which a 99th percentile is more than the slowest of them."""
BUSY = 0.1
"""Part of the cores that others have, from which speeds are not those of this machine by itself."""
_WIDE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2937}"
    "table{border-collapse:collapse;font-size:.875rem;margin:1rem 0;display:block;overflow-x:auto}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid #e5e7eb;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto;margin:1rem 0}"
    "code{overflow-wrap:anywhere}@media (prefers-color-scheme:dark){body{background:#111827;color:#e5e7eb}"
    "th,td{border-color:#374151}}"
)


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class Listing:
    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """The first column is text, the others are figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Plot:
    name: str
    what: str
    svg: str


Block = Heading | Paragraph | Listing | Table | Plot


def write(results: Results, out: Path) -> tuple[Path, Path]:
    """Both files, and the pictures of the first; returns where they are."""
    blocks = list(report(results))
    (out / PLOTS).mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Plot):
            (out / PLOTS / f"{block.name}.svg").write_text(block.svg + "\n", encoding="utf-8")
    (out / MARKDOWN).write_text(markdown(blocks), encoding="utf-8")
    (out / PAGE).write_text(html(blocks), encoding="utf-8")
    return out / PAGE, out / MARKDOWN


def report(results: Results) -> Iterator[Block]:
    """All that it says, in order."""
    rows = results.configurations
    yield Heading(f"One model in {sum(bool(row.speeds) for row in rows)} configurations", 1)
    yield Paragraph(_asked(results))
    yield overview(results)
    yield from _problems(rows)
    yield from _plots(results)
    yield Heading("Where 4 bits stop being faster")
    yield Paragraph(crossing_text(results))
    yield Heading("Latency")
    yield Paragraph(
        "Milliseconds of whole requests, up to the first token (TTFT), and between two tokens of one (ITL)."
    )
    yield _latency(results)
    slow = [str(level) for level in results.workload.levels if results.workload.requests(level) < ENOUGH]
    if slow:
        yield Paragraph(
            f"Of fewer than {ENOUGH} requests (at {', '.join(slow)} at a time) p99 is nearly the slowest one."
        )
    yield Heading("What the policy would gain")
    yield from _gain(results)
    yield Heading("How this was measured")
    yield Listing(list(_how(results)))


def overview(results: Results) -> Table:
    """A row a configuration: memory, tokens a second by concurrency, perplexity by text."""
    levels = results.workload.levels
    head = ["", "memory", "model's files", *(f"tok/s at {level}" for level in levels)]
    head += [f"perplexity, {text}" for text in TEXTS]
    rows = []
    for row in results.configurations:
        speeds = [_figure(row.speeds[level].output) if level in row.speeds else NONE for level in levels]
        scores = [f"{row.scores[text].perplexity:.2f}" if text in row.scores else NONE for text in TEXTS]
        memory = [_bytes(row.memory.peak), _bytes(row.memory.files)] if row.memory else [NONE, NONE]
        rows.append([row.title, *memory, *speeds, *scores])
    return Table(head, rows)


def _asked(results: Results) -> str:
    work, host = results.workload, results.host
    when = datetime.fromtimestamp(results.began, UTC).strftime("%Y-%m-%d")
    where = ", ".join((*host.gpus, f"{host.cores} cores of {host.processor}", _bytes(host.memory)))
    told = (
        f"Measured on {when} on {where}. Each server ran alone; requests of {work.input_tokens} prompt and "
        f"{work.output_tokens} reply tokens, so many at a time as the columns say. Tokens a second are those "
        "of replies, of all requests together."
    )
    if work.quick:
        told += (
            f" This is the small workload of `--quick`: at most {work.requests(max(work.levels))} requests a "
            f"cell, {work.scored} tokens of each text."
        )
    return f"{told} {_spent(results)}".rstrip()


def _spent(results: Results) -> str:
    found = results.spent
    if found is None:
        return ""
    told = f"It took {_duration(found.seconds)} and {found.cpu:.0f} CPU seconds"
    told += f"; other processes had {_percent(found.disturbed)} of the cores meanwhile."
    if found.disturbed > BUSY:
        told += " Speeds on so busy a machine are too low, and not by the same part everywhere."
    return told


def _problems(rows: Iterable[Measured]) -> Iterator[Block]:
    items = [f"{row.title}: {row.problem}" for row in rows if row.problem]
    failed = [
        f"{row.title}: {speed.failed} of {speed.requests} requests failed at {level} at a time"
        for row in rows
        for level, speed in sorted(row.speeds.items())
        if speed.failed
    ]
    if items or failed:
        yield Paragraph("Not measured, or not wholly:")
        yield Listing(items + failed)


# plots


def _plots(results: Results) -> Iterator[Plot]:
    def over(read: Callable[[Speed], float], faint: Callable[[Speed], float] | None = None) -> list[Series]:
        return [
            Series(
                row.title,
                place,
                {level: read(speed) for level, speed in row.speeds.items()},
                {level: faint(speed) for level, speed in row.speeds.items()} if faint else {},
            )
            for place, row in enumerate(results.configurations)
            if row.speeds
        ]

    rows = [(place, row) for place, row in enumerate(results.configurations)]
    yield from _plot(
        "throughput",
        "Tokens a second by concurrency",
        bench_plots.lines("Throughput", "reply tokens a second", over(lambda speed: speed.output)),
    )
    yield from _plot(
        "latency",
        "Latency by concurrency, p50 and p99",
        bench_plots.lines(
            "Latency",
            "ms, p50 (p99 dashed)",
            over(lambda speed: speed.latency.p50, lambda speed: speed.latency.p99),
        ),
    )
    yield from _plot(
        "ttft",
        "Time to the first token by concurrency, p50 and p99",
        bench_plots.lines(
            "Time to the first token",
            "ms, p50 (p99 dashed)",
            over(lambda speed: speed.ttft.p50, lambda speed: speed.ttft.p99),
        ),
    )
    held = [
        Series(
            row.title, place, {"most held": row.memory.peak / GIB, "model's files": row.memory.files / GIB}
        )
        for place, row in rows
        if row.memory
    ]
    yield from _plot(
        "memory", "Memory", bench_plots.bars("Memory", "GiB", ["most held", "model's files"], held)
    )
    scores = [
        Series(row.title, place, {text: score.perplexity for text, score in row.scores.items()})
        for place, row in rows
        if row.scores
    ]
    yield from _plot(
        "perplexity", "Perplexity", bench_plots.bars("Perplexity", "lower is better", TEXTS, scores)
    )


def _plot(name: str, what: str, svg: str) -> Iterator[Plot]:
    if svg:
        yield Plot(name, what, svg)


# crossing and latency


def crossing_of(results: Results) -> Crossing | None:
    """Of the AWQ engine against the 16-bit one; None where one of them was not measured."""
    fast, exact = results.of(FAST), results.of(EXACT)
    if fast is None or exact is None:
        return None
    return crossing(
        {level: speed.output for level, speed in fast.speeds.items()},
        {level: speed.output for level, speed in exact.speeds.items()},
    )


def crossing_text(results: Results) -> str:
    """In one or two sentences."""
    found, fast, exact = crossing_of(results), results.of(FAST), results.of(EXACT)
    if found is None or fast is None or exact is None:
        return "Not known: it needs figures of both the AWQ and the 16-bit engine."
    ratios = ", ".join(
        f"{fast.speeds[level].output / exact.speeds[level].output:.2f} at {level}" for level in found.levels
    )
    told = f"Tokens a second of AWQ as a multiple of {exact.title.split()[0]}: {ratios}."
    if found.kind == "never":
        return f"AWQ is not faster at any concurrency that was measured. {told}"
    if found.kind == "beyond":
        most = found.levels[-1]
        return f"AWQ is still faster at {most} requests at a time, the most that was measured. {told}"
    return (
        f"At about {found.level:.0f} requests at a time: AWQ is faster at {found.wins[-1]}, and not from "
        f"{found.first} on (a straight line between the two on logarithmic scales). {told}"
    )


def _latency(results: Results) -> Table:
    names = [f"{what} {part}" for what in ("request", "TTFT", "ITL") for part in ("p50", "p90", "p99")]
    rows = []
    for row in results.configurations:
        for level, speed in sorted(row.speeds.items()):
            figures = [f for q in (speed.latency, speed.ttft, speed.itl) for f in _quantiles(q)]
            rows.append([f"{row.title}, {level} at a time", str(speed.requests), *figures])
    return Table(["", "requests", *names], rows)


def _quantiles(found: Quantiles) -> list[str]:
    return [_figure(value) for value in (found.p50, found.p90, found.p99)]


# gain


def _gain(results: Results) -> Iterator[Block]:
    found = results.gain
    if found is None:
        yield Paragraph(
            "No decision log was given. `decision_log` in dualgauge.yaml has one written, and "
            "`dualgauge bench --decision-log FILE` reckons with it."
        )
        return
    decided = sum(part.requests for part in found.tiers.values())
    tokens = sum(part.tokens for part in found.tiers.values())
    also = [
        f"{found.pinned.requests:,} named their tier themselves" if found.pinned.requests else "",
        f"{found.undecided.requests:,} cannot be decided again" if found.undecided.requests else "",
        f"{found.bad:,} lines could not be read" if found.bad else "",
    ]
    rest = "; ".join(filter(None, also))
    yield Paragraph(
        f"The policy `{found.policy}` decided {decided:,} of the log's {found.decisions:,} requests"
        f"{f' ({rest})' if rest else ''}, with {tokens:,} prompt and reply tokens."
    )
    yield Table(
        ["tier", "requests", "of all", "tokens", "of all"],
        [
            [
                tier,
                f"{part.requests:,}",
                _percent(part.requests / max(1, decided)),
                f"{part.tokens:,}",
                _percent(part.tokens / max(1, tokens)),
            ]
            for tier, part in found.tiers.items()
        ],
    )
    reckoned = list(estimates(results))
    if not reckoned:
        yield Paragraph(
            "What that saves is not known: both engines must be measured, and be those of its tiers."
        )
        return
    yield Table(
        ["at a time", "all on exact", "exact", "fast", "engine time", "time until done"],
        [_estimate(one) for one in reckoned],
    )
    yield Paragraph(
        "Seconds of engines for the log's tokens, at the speeds measured above (prompt and reply tokens "
        "together; the log's share of prompts may be another). Engine time is that of both together, time "
        "until done the longer one, where neither slows the other: against all on the 16-bit engine."
    )


def _estimate(one: Estimate) -> list[str]:
    seconds = [f"{value:,.1f} s" for value in (one.all_exact, one.exact, one.fast)]
    return [str(one.level), *seconds, _change(one.engine_time), _change(one.finished)]


def _change(part: float) -> str:
    return f"{part - 1:+.0%}".replace("%", " %")


# how


def _how(results: Results) -> Iterator[str]:
    work, host = results.workload, results.host
    sent = ", ".join(f"{work.requests(level)} at {level}" for level in work.levels)
    yield (
        "Load: `vllm bench serve`, random prompts, greedy, replies of full length, as many requests under "
        f"way as the column says. Requests sent: {sent}."
    )
    yield (
        f"Perplexity: over the first {work.scored} tokens of each of four short texts that come with "
        "Dualgauge. They are too short to compare models by; they compare precisions of one model."
    )
    yield (
        "No paging: transformers' `generate` in whole batches, what waits goes into the next. "
        "It is the least that a server with transformers alone can do."
    )
    if len({score.ids for row in results.configurations for score in row.scores.values()}) > len(TEXTS):
        yield "The servers do not count the texts' tokens alike: their perplexities cannot be compared."
    kinds = {row.memory.kind for row in results.configurations if row.memory}
    if "resident" in kinds:
        yield (
            "Memory on a CPU: the most that the server's processes held (proportional set size), with the "
            "KV cache as far as it was touched."
        )
    if "GPU" in kinds:
        yield "Memory on a GPU: what it had in use, less what it had before the server was started."
    for row in results.configurations:
        if row.engine:
            started = f", ready after {row.start_seconds:.0f} s" if row.start_seconds is not None else ""
            yield f"{row.title}: {row.engine}, {row.model}, {row.device}{started}; `{row.arguments}`"
    yield f"System: {host.system}."


# figures


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _percent(part: float) -> str:
    return f"{part:.1%}".replace("%", " %")


# as Markdown


def markdown(blocks: Iterable[Block]) -> str:
    return "\n".join(part for block in blocks for part in (*_markdown(block), ""))


def _markdown(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"{'#' * block.level} {block.text}"
        case Paragraph():
            yield block.text
        case Listing():
            yield from (f"- {item}" for item in block.items)
        case Table():
            yield _row(block.head)
            yield _row(["---", *["---:"] * (len(block.head) - 1)])
            yield from (_row(row) for row in block.rows)
        case Plot():
            yield f"![{block.what}]({PLOTS}/{block.name}.svg)"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# as HTML


def html(blocks: Sequence[Block]) -> str:
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(part for block in blocks for part in _html(block))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_WIDE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _html(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
        case Paragraph():
            yield f"<p>{_inline(block.text)}</p>"
        case Listing():
            yield "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in block.items) + "</ul>"
        case Table():
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.head)
            yield f"<table><thead><tr>{head}</tr></thead><tbody>"
            for row in block.rows:
                yield "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>"
            yield "</tbody></table>"
        case Plot():
            yield block.svg


def _inline(text: str) -> str:
    """Escaped, with `code` spans."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts))
