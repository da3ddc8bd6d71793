"""The report of `dualgauge bench`, from the results file of a real run: `--quick`, demo pair, two cores."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from engines.bench import results as files
from engines.bench.configurations import BASELINE, EXACT, FAST, GGUF
from engines.bench.results import FULL, LEVELS, TEXTS, Gain, Measured, Part, Results, Spent
from gateway.cli import bench_report

RECORDING = Path(__file__).parent / "recordings" / "bench.json"
PICTURES = {"throughput", "latency", "ttft", "memory", "perplexity"}


@pytest.fixture
def recorded() -> Results:
    found = files.load(RECORDING)
    assert found is not None
    return found


class Page(HTMLParser):
    """Tables as lists of rows, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.pictures = 0
        self.text = ""
        self._cell: list[str] | None = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "svg":
            self.pictures += 1

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            assert self._cell is not None
            self.tables[-1][-1].append("".join(self._cell))
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell is not None:
            self._cell.append(data)


def written(results: Results, folder: Path) -> tuple[Page, str]:
    page, text = bench_report.write(results, folder)
    return Page(page.read_text("utf-8")), text.read_text("utf-8")


def tables_of(markdown: str) -> list[list[list[str]]]:
    """Without the lines that say how columns are aligned."""
    blocks = [block.split("\n") for block in markdown.split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in (rows[0], *rows[2:])]
        for rows in blocks
    ]


def of(results: Results, key: str) -> Measured:
    row = results.of(key)
    assert row is not None
    return row


def without(results: Results, key: str, problem: str) -> None:
    """As if that configuration had not been at hand."""
    place = results.configurations.index(of(results, key))
    results.configurations[place] = Measured(key=key, title="the one missing", problem=problem)


def faster(results: Results, by: Callable[[int], float]) -> None:
    """AWQ's tokens a second as such a multiple of the 16-bit engine's."""
    exact, fast = of(results, EXACT), of(results, FAST)
    for level, speed in exact.speeds.items():
        output = speed.output * by(level)
        fast.speeds[level] = msgspec.structs.replace(fast.speeds[level], output=output)


def test_the_recording_is_of_a_whole_run(recorded: Results) -> None:
    assert [row.key for row in recorded.configurations] == [BASELINE, EXACT, FAST, GGUF]
    assert recorded.workload.levels == LEVELS
    assert all(row.complete(recorded.workload) and not row.problem for row in recorded.configurations)


def test_every_cell_of_the_page_is_filled(recorded: Results, tmp_path: Path) -> None:
    page, _ = written(recorded, tmp_path)
    assert len(page.tables) == 4
    for table in page.tables:
        for row in table[1:]:
            assert len(row) == len(table[0])
            assert all(cell not in ("", bench_report.NONE) for cell in row), row


def test_the_table_has_memory_speed_and_perplexity_of_each_configuration(
    recorded: Results, tmp_path: Path
) -> None:
    page, _ = written(recorded, tmp_path)
    head, *rows = page.tables[0]
    assert head == [
        *("", "memory", "model's files"),
        *(f"tok/s at {level}" for level in LEVELS),
        *(f"perplexity, {text}" for text in TEXTS),
    ]
    assert [row[0] for row in rows] == [row.title for row in recorded.configurations]


def test_latencies_of_each_configuration_at_each_level(recorded: Results, tmp_path: Path) -> None:
    page, _ = written(recorded, tmp_path)
    head, *rows = page.tables[1]
    names = [f"{what} p{part}" for what in ("request", "TTFT", "ITL") for part in (50, 90, 99)]
    assert head == ["", "requests", *names]
    assert [row[0] for row in rows] == [
        f"{row.title}, {level} at a time" for row in recorded.configurations for level in LEVELS
    ]


def test_both_files_have_the_same_tables(recorded: Results, tmp_path: Path) -> None:
    page, text = written(recorded, tmp_path)
    assert tables_of(text) == page.tables


def test_the_page_has_every_picture_within(recorded: Results, tmp_path: Path) -> None:
    page, _ = written(recorded, tmp_path)
    assert page.pictures == len(PICTURES)


def test_pictures_beside_the_text_are_whole_files(recorded: Results, tmp_path: Path) -> None:
    _, text = written(recorded, tmp_path)
    named = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert {Path(name).stem for name in named} == PICTURES
    for name in named:
        picture = ElementTree.fromstring((tmp_path / name).read_text("utf-8"))
        shown = "".join(picture.itertext())
        assert all(row.title in shown for row in recorded.configurations), name


def test_the_small_workload_is_named(recorded: Results, tmp_path: Path) -> None:
    page, _ = written(recorded, tmp_path)
    work = recorded.workload
    assert f"requests of {work.input_tokens} prompt and {work.output_tokens} reply tokens" in page.text
    assert "This is the small workload of `--quick`".replace("`", "") in page.text
    assert f"over the first {work.scored} tokens of each of four short texts" in page.text


def test_the_full_workload_is_not_called_small(recorded: Results, tmp_path: Path) -> None:
    recorded.workload = FULL
    page, _ = written(recorded, tmp_path)
    assert "small workload" not in page.text


def test_what_it_took_and_what_others_took_is_told(recorded: Results, tmp_path: Path) -> None:
    recorded.spent = Spent(seconds=245.4, cpu=300.0, others=50.0, idle=150.0)
    page, _ = written(recorded, tmp_path)
    told = "It took 4 min 5 s and 300 CPU seconds; other processes had 10.0 % of the cores meanwhile."
    assert told in page.text
    assert "so busy a machine" not in page.text


def test_figures_of_a_busy_machine_say_so(recorded: Results, tmp_path: Path) -> None:
    recorded.spent = Spent(seconds=20.0, cpu=20.0, others=10.0, idle=10.0)
    page, _ = written(recorded, tmp_path)
    assert "It took 20 s and 20 CPU seconds; other processes had 25.0 % of the cores" in page.text
    assert "Speeds on so busy a machine are too low" in page.text


def test_results_of_before_this_was_counted_have_a_report(recorded: Results, tmp_path: Path) -> None:
    recorded.spent = None
    page, _ = written(recorded, tmp_path)
    assert "It took" not in page.text


def test_the_crossing_lies_between_two_levels(recorded: Results, tmp_path: Path) -> None:
    faster(recorded, lambda level: 2.0 if level <= 8 else 0.5)
    page, text = written(recorded, tmp_path)
    for told in (page.text, text):
        assert "At about 16 requests at a time: AWQ is faster at 8, and not from 32 on" in told
        assert "as a multiple of BF16: 2.00 at 1, 2.00 at 8, 0.50 at 32, 0.50 at 128." in told


def test_awq_that_is_always_faster_crosses_nowhere(recorded: Results, tmp_path: Path) -> None:
    faster(recorded, lambda _: 1.5)
    _, text = written(recorded, tmp_path)
    assert "AWQ is still faster at 128 requests at a time, the most that was measured." in text


def test_awq_that_is_never_faster_is_told(recorded: Results, tmp_path: Path) -> None:
    faster(recorded, lambda _: 0.8)
    _, text = written(recorded, tmp_path)
    assert "AWQ is not faster at any concurrency that was measured." in text


def test_a_missing_configuration_is_told_with_its_reason(recorded: Results, tmp_path: Path) -> None:
    without(recorded, GGUF, "llama-server is not installed: run `x`")
    page, text = written(recorded, tmp_path)
    assert "One model in 3 configurations" in text
    assert "- the one missing: llama-server is not installed: run `x`" in text
    assert "the one missing: llama-server is not installed: run x" in page.text


def test_a_missing_configuration_has_dashes_and_the_others_their_figures(
    recorded: Results, tmp_path: Path
) -> None:
    without(recorded, GGUF, "not installed")
    page, _ = written(recorded, tmp_path)
    *others, missing = page.tables[0][1:]
    assert set(missing[1:]) == {bench_report.NONE}
    assert all(bench_report.NONE not in row for row in others)
    assert not [row for row in page.tables[1] if row[0].startswith("the one missing")]


@pytest.mark.parametrize("key", [EXACT, FAST])
def test_without_one_of_the_pair_neither_crossing_nor_gain_is_known(
    recorded: Results, tmp_path: Path, key: str
) -> None:
    without(recorded, key, "not here")
    _, text = written(recorded, tmp_path)
    assert "Not known: it needs figures of both the AWQ and the 16-bit engine." in text
    assert "What that saves is not known: both engines must be measured" in text


def test_requests_that_failed_are_told(recorded: Results, tmp_path: Path) -> None:
    speeds = of(recorded, GGUF).speeds
    speeds[128] = msgspec.structs.replace(speeds[128], failed=3)
    _, text = written(recorded, tmp_path)
    told = f"{of(recorded, GGUF).title}: 3 of {speeds[128].requests} requests failed at 128 at a time"
    assert told in text


def test_what_the_policy_would_gain_is_reckoned_by_the_speeds(recorded: Results, tmp_path: Path) -> None:
    recorded.gain = Gain(
        "default", 10, {"exact": Part(4, 1000), "fast": Part(6, 3000)}, Part(0, 0), Part(0, 0), 0
    )
    for key, total in ((EXACT, 100.0), (FAST, 200.0)):
        row = of(recorded, key)
        row.speeds = {1: msgspec.structs.replace(row.speeds[1], total=total)}
    page, _ = written(recorded, tmp_path)
    assert page.tables[-1][1:] == [["1", "40.0 s", "10.0 s", "15.0 s", "-38 %", "-62 %"]]


def test_without_a_decision_log_it_says_how_to_have_one(recorded: Results, tmp_path: Path) -> None:
    recorded.gain = None
    _, text = written(recorded, tmp_path)
    assert "`dualgauge bench --decision-log FILE` reckons with it." in text


def test_few_requests_make_no_99th_percentile(recorded: Results, tmp_path: Path) -> None:
    _, text = written(recorded, tmp_path)
    assert "Of fewer than 100 requests (at 1, 8, 32 at a time) p99 is nearly the slowest one." in text


def test_texts_that_are_counted_otherwise_are_not_compared(recorded: Results, tmp_path: Path) -> None:
    score = of(recorded, GGUF).scores["prose"]
    of(recorded, GGUF).scores["prose"] = msgspec.structs.replace(score, ids="other")
    _, text = written(recorded, tmp_path)
    assert "their perplexities cannot be compared" in text


def test_the_recorded_perplexities_are_over_the_same_tokens(recorded: Results, tmp_path: Path) -> None:
    _, text = written(recorded, tmp_path)
    assert "cannot be compared" not in text


def test_words_of_a_log_are_no_markup(recorded: Results, tmp_path: Path) -> None:
    without(recorded, GGUF, "<script>alert(1)</script>")
    page, _ = bench_report.write(recorded, tmp_path)
    assert "<script>" not in page.read_text("utf-8")


def test_a_speed_has_figures_of_its_size(recorded: Results, tmp_path: Path) -> None:
    speeds = of(recorded, EXACT).speeds
    speeds[1] = msgspec.structs.replace(speeds[1], output=1234.56)
    speeds[8] = msgspec.structs.replace(speeds[8], output=12.345)
    page, _ = written(recorded, tmp_path)
    assert page.tables[0][2][3:5] == ["1,235", "12.3"]
