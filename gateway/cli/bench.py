"""`dualgauge bench`: the operator's own pair on the operator's own machine, as a report."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gateway.cli.failures import Failure, interruptible, told

if TYPE_CHECKING:
    from rich.console import Console

    from engines.bench.results import Gain, Results, Workload
    from engines.making import Progress
    from gateway.cli.bench_rows import Rows
    from gateway.cli.view import View
    from gateway.config import Config

OUT = Path("dualgauge-bench")
LOGS = "logs"
MOST = 1024
"""Requests at a time that may be asked for."""
_STOPPED = "stopped; what is measured is kept, and the same command goes on from there"


def _levels(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """`1,8,32` as numbers, ascending."""
    if value is None:
        return None
    try:
        levels = tuple(int(part) for part in value.split(","))
    except ValueError:
        levels = ()
    if not levels or levels != tuple(sorted(set(levels))) or not 1 <= levels[0] <= levels[-1] <= MOST:
        raise click.BadParameter(f"write numbers of requests at a time, ascending, up to {MOST}: 1,8,32,128")
    return levels


@click.command("bench")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The deployment. [default: ./dualgauge.yaml, else the pair that `dualgauge up` would choose]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=OUT,
    show_default=True,
    help="Where report and results go; a second run goes on from what is there.",
)
@click.option("--quick", is_flag=True, help="Short requests and few of them: a first look.")
@click.option("--levels", callback=_levels, help="Requests at a time. [default: 1,8,32,128]")
@click.option("--input-tokens", type=click.IntRange(1), help="Of each prompt. [default: 512, quick: 16]")
@click.option("--output-tokens", type=click.IntRange(2), help="Of each reply. [default: 128, quick: 12]")
@click.option(
    "--gguf",
    type=click.Path(path_type=Path, exists=True),
    help="The model as a GGUF file, for llama.cpp. [default: that of the deployment]",
)
@click.option(
    "--decision-log",
    "log",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Reckon what --policy would gain on it. [default: that of the deployment]",
)
@click.option("--policy", default="default", show_default=True, help="A path or a shipped name.")
@click.option("--fresh", is_flag=True, help="Begin anew, whatever --out has.")
def bench_command(
    file: Path | None,
    out: Path,
    quick: bool,
    levels: tuple[int, ...] | None,
    input_tokens: int | None,
    output_tokens: int | None,
    gguf: Path | None,
    log: Path | None,
    policy: str,
    fresh: bool,
) -> None:
    """Measure this pair on this machine, and write a report.

    The 16-bit model under transformers alone and under vLLM, the AWQ model under vLLM, and a GGUF model under
    llama.cpp, each by itself: memory, tokens a second, latency, perplexity, and where 4 bits stop being
    faster. What is not at hand is named with the way to get it.

    \b
    Examples:
      dualgauge bench --quick
      dualgauge bench --levels 1,16,64 --input-tokens 1024 --out bench-long
      dualgauge bench --decision-log decisions.jsonl
    """
    from rich.console import Console

    from engines.bench.results import NAME, ResultsError, store
    from gateway.cli.view import View

    console = Console(stderr=True)
    workload = _workload(quick, levels, input_tokens, output_tokens)
    with told(_STOPPED), interruptible():
        config = _config(file)
        gain = _gain(config, log, policy)
        try:
            with _alone(config), contextlib.closing(View(console)) as view:
                found, results = _begin(config, out, workload, gguf, fresh, view)
                with _bar(console) as progress:
                    asyncio.run(_measure(found, results, out, progress))
        except ResultsError as error:
            raise Failure(str(error)) from None
        results.gain = gain
        store(out / NAME, results)
        _finish(results, out)


def _workload(
    quick: bool, levels: tuple[int, ...] | None, input_tokens: int | None, output_tokens: int | None
) -> Workload:
    import msgspec

    from engines.bench.results import FULL, QUICK

    chosen = QUICK if quick else FULL
    return msgspec.structs.replace(
        chosen,
        levels=levels or chosen.levels,
        input_tokens=input_tokens or chosen.input_tokens,
        output_tokens=output_tokens or chosen.output_tokens,
    )


def _config(file: Path | None) -> Config:
    """The deployment named or here, else that which `up` would write. Raises Failure, ProblemsError."""
    from engines import hardware
    from gateway import config
    from gateway.cli import prepare

    path = Path(config.DEFAULT_FILE).absolute()
    if file is not None or path.exists():
        return prepare.load(file)
    text, reasons = prepare.first_text(hardware.look(), prepare.DEFAULT_LISTEN)
    click.echo(
        f"There is no {config.DEFAULT_FILE} here: this is the pair that `dualgauge up` would choose.",
        err=True,
    )
    for reason in reasons:
        click.echo(f"  {reason}", err=True)
    return config.parse(text, path, {})


@contextlib.contextmanager
def _alone(config: Config) -> Iterator[None]:
    """Hold the deployment's lock. Raises Failure where it runs: each would slow the other."""
    from engines import runfile

    if not config.path.exists():
        yield
        return
    with runfile.hold(runfile.paths(config.path).lock) as ours:
        if not ours:
            stop = f"dualgauge down --config {config.path}"
            raise Failure(f"{config.path} is running, which would slow what is measured: `{stop}` first")
        yield


def _gain(config: Config, log: Path | None, policy: str) -> Gain | None:
    """Of the log named, else of the deployment's own where it has one with lines."""
    from gateway.cli.bench_gain import gain
    from gateway.cli.chosen import compiled
    from gateway.telemetry.decision_files import whole

    path = log
    if path is None and config.decision_log is not None:
        path = Path(config.decision_log.path)
    files = [] if path is None else whole(path)
    if log is not None and not files:
        raise Failure(f"there is no decision log {log}")
    return gain(compiled(policy, config.tiers), files) if files else None


def _begin(
    config: Config, out: Path, workload: Workload, gguf: Path | None, fresh: bool, view: View
) -> tuple[Rows, Results]:
    """What is at hand, and what is measured of it already. Raises as `prepare`, and ResultsError."""
    from engines.bench.measure import host
    from engines.bench.results import NAME, VERSION, Results, resume
    from gateway.cli import bench_rows, prepare

    prepared = prepare.engines_of(config, None, view)
    found = bench_rows.rows(prepared, gguf, workload, view)
    out.mkdir(parents=True, exist_ok=True)
    if fresh:
        (out / NAME).unlink(missing_ok=True)
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    machine = host(prepared.plan.machine, system)
    begun = Results(VERSION, time.time(), machine, workload, list(found.rows))
    return found, resume(out / NAME, begun)


async def _measure(found: Rows, results: Results, out: Path, progress: Progress) -> None:
    from engines.bench import spent
    from engines.bench.measure import Bench
    from engines.bench.results import NAME, store
    from engines.launch import ProcessLauncher

    (out / LOGS).mkdir(exist_ok=True)
    store(out / NAME, results)
    before = spent.now()
    task = asyncio.ensure_future(
        Bench(
            configurations=found.found,
            results=results,
            python=found.python,
            logs=out / LOGS,
            launcher=ProcessLauncher(),
            save=lambda: store(out / NAME, results),
            progress=progress,
        ).measure()
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        more = spent.now().since(before)
        results.spent = more if results.spent is None else results.spent + more
        store(out / NAME, results)


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    """A bar over all cells; where there is no terminal, a line for each."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        *(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    began = time.monotonic()

    def progress(message: str, done: int | None = None, total: int | None = None) -> None:
        if console.is_terminal:
            bars.update(task, description=message, completed=done, total=total)
        else:
            click.echo(f"  {time.monotonic() - began:4.0f} s  {done}/{total}  {message}", err=True)

    with bars:
        task = bars.add_task("", total=None)
        yield progress


def _finish(results: Results, out: Path) -> None:
    """Write the report, show the table, name the files. Raises Failure where a configuration failed."""
    from rich.console import Console
    from rich.table import Table

    from gateway.cli import bench_report

    page, text = bench_report.write(results, out)
    whole = bench_report.overview(results)
    speeds = 3 + len(results.workload.levels)
    for columns in ([0, 1, *range(3, speeds)], [0, *range(speeds, len(whole.head))]):  # fits 80 columns
        table = Table(box=None, pad_edge=False)
        for at in columns:
            table.add_column(whole.head[at], justify="right" if at else "left", no_wrap=not at)
        for cells in whole.rows:
            table.add_row(*(cells[at] for at in columns))
        Console().print(table)
    click.echo(bench_report.crossing_text(results))
    click.echo(f"report: {page}, {text}")
    for row in results.configurations:
        if row.problem and not row.identity:
            click.echo(f"not measured: {row.title}: {row.problem}", err=True)
    failed = [f"{row.title}: {row.problem}" for row in results.configurations if row.problem and row.identity]
    if failed:
        raise Failure("\n       ".join([*failed, "the same command tries again what is missing"]))
