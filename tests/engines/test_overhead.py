import pytest

from engines.hardware import GIB, MIB
from engines.overhead import FOUR_BIT, GRAPH, GRAPHS, LOGITS, Width, Work, activations, defaults, graphs

WIDE = Width(hidden=4096, intermediate=14336, vocabulary=128256)
FOUR = Width(hidden=4096, intermediate=14336, vocabulary=128256, four_bit=True)


@pytest.mark.parametrize(
    ("sequences", "captured"),
    [(1, 2 + 1), (8, 5 + 4), (16, 7 + 5), (256, 51 + 35), (1024, 51 + 51)],
)
def test_as_many_graphs_as_vllm_logs_that_it_captures(sequences: int, captured: int) -> None:
    """`PIECEWISE=5, FULL=4` for 8 sequences and `PIECEWISE=51, FULL=35` for 256, by the published logs."""
    assert graphs(Work(2048, sequences)) == GRAPHS + captured * GRAPH


def test_an_eager_engine_has_no_graphs() -> None:
    assert graphs(Work(2048, 256, graphs=False)) == 0


def test_the_larger_of_a_pass_and_a_round_of_sampling_counts() -> None:
    forward = 2048 * 2 * (3 * 14336 + 4096)
    assert activations(WIDE, Work(2048, 1)) == forward
    assert activations(WIDE, Work(2048, 256)) == int(LOGITS * 256 * 128256 * 4)
    assert activations(FOUR, Work(2048, 1)) == forward + FOUR_BIT


def test_more_requests_or_longer_passes_never_take_less() -> None:
    sizes = [activations(WIDE, Work(2048, many)) for many in (1, 16, 64, 256)]
    assert sizes == sorted(sizes)
    assert activations(WIDE, Work(8192, 1)) == 4 * activations(WIDE, Work(2048, 1))


@pytest.mark.parametrize(
    ("size", "name", "work"),
    [
        (24 * GIB, "NVIDIA L4", Work(2048, 256)),
        (79 * GIB, "NVIDIA H100 80GB HBM3", Work(8192, 1024)),
        (79 * GIB, "NVIDIA A100-SXM4-80GB", Work(2048, 256)),
        (180 * GIB, "NVIDIA B200", Work(16384, 1024)),
        (70 * GIB - MIB, "card", Work(2048, 256)),
    ],
)
def test_what_vllm_does_unasked_depends_on_the_gpu(size: int, name: str, work: Work) -> None:
    assert defaults(size, name) == work
