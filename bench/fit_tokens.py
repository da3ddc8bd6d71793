"""Fit the weights of the token estimate, and show its error for each tokenizer.

    python bench/fit_tokens.py TOKENIZER TOKENIZER... [--also TOKENIZER]... [--texts LABELLED.jsonl]

A TOKENIZER is a tokenizer.json, a .tiktoken file of a Qwen model, or the name of a tiktoken encoding. The weights
are fitted to the geometric mean of the first ones, on the standard library's sources, the licences that Debian ships and
bench/data/prompts.txt, and printed; `--also` ones and `--texts` are only measured. Needs numpy, tokenizers
and, for its encodings, tiktoken.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from policies.signals.tokens import FEATURES, features

PROMPTS = Path(__file__).parent / "data" / "prompts.txt"
LICENCES = Path("/usr/share/common-licenses")
# How Qwen's tokenizers cut a text before merging (its tokenizer.json, `pre_tokenizer`).
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Count = Callable[[str], int]
# ruff: noqa: RUF001
MARKS = (
    "“It’s fine,” she said – “really…” and left — without a word.",
    "Great news 🎉🎉 we won! 😀 See you at the party 🥳 • 8 pm ✓ bring friends 🙌 → main hall",
    "• first point\n• second point – with a “quote”\n• third → done ✓",
    "👍 thanks! 😂😂 I can’t believe it… 🙈",
)


def tokenizer(name: str) -> Count:
    if name.endswith(".json"):
        from tokenizers import Tokenizer

        whole = Tokenizer.from_file(name)
        return lambda text: len(whole.encode(text, add_special_tokens=False).ids)
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    if name.endswith(".tiktoken"):
        encoding = tiktoken.Encoding(
            name, pat_str=QWEN, mergeable_ranks=load_tiktoken_bpe(name), special_tokens={}
        )
    else:
        encoding = tiktoken.get_encoding(name)
    return lambda text: len(encoding.encode(text, disallowed_special=()))


def own_texts() -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {"python": [], "licences": [], "marks": list(MARKS)}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 5000:
            texts["python"].append(text[2000:4000])
    for path in sorted(LICENCES.glob("*")):
        text = path.read_text(encoding="utf-8", errors="replace")
        texts["licences"] += [text[at : at + 1500] for at in range(1000, len(text) - 1500, 12000)]
    by_language: dict[str, list[str]] = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            _, language, text = line.split(" ", 2)
            by_language.setdefault(language, []).append(text.replace("\\n", "\n"))
    for language, lines in by_language.items():
        texts[language] = ["\n".join(lines[at : at + 6]) for at in range(0, len(lines), 6)]
    return texts


def labelled_texts(path: Path) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            kind = "code" if row["code_heavy"] else "maths" if row["math"] else "prose"
            text = "\n".join(message["content"] for message in row["messages"])
            texts.setdefault(f"{row['language']} {kind}", []).append(text)
    return {kind: some for kind, some in texts.items() if len(some) >= 20}


def fit(texts: Mapping[str, Sequence[str]], counts: Sequence[Count]) -> list[float]:
    """Least squares of relative errors, no weight below nothing: those that fall below are left out in turn."""
    rows, aims = [], []
    for some in texts.values():
        for text in some:
            rows.append(features(text))
            aims.append(max(1.0, prod(count(text) for count in counts) ** (1 / len(counts))))
    aim = np.array(aims)
    values = np.array(rows) / aim[:, None]
    ridge = 0.02 * np.sqrt((values**2).sum(axis=0).mean())
    kept = list(range(values.shape[1]))
    while True:
        chosen = np.vstack((values[:, kept], ridge * np.eye(len(kept))))
        found = np.linalg.lstsq(chosen, np.concatenate((np.ones(len(aim)), np.zeros(len(kept)))), rcond=None)[
            0
        ]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    weights = [0.0] * values.shape[1]
    for index, weight in zip(kept, found, strict=True):
        weights[index] = round(float(weight), 3)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tokenizers", nargs="+")
    parser.add_argument("--also", action="append", default=[])
    parser.add_argument("--texts", type=Path)
    arguments = parser.parse_args()
    texts = own_texts()
    weights = fit(texts, [tokenizer(name) for name in arguments.tokenizers])
    print("WEIGHTS = (", ", ".join(map(str, weights)), ")")
    print(dict(zip(FEATURES, weights, strict=True)))
    if arguments.texts:
        texts |= labelled_texts(arguments.texts)
    counts = {_short(name): tokenizer(name) for name in (*arguments.tokenizers, *arguments.also)}
    print(
        "\nestimate against each, of all texts of a kind together; in brackets the median error of one text"
    )
    print(f"{'':24}" + "".join(f"{name:>18}" for name in counts))
    for kind, some in texts.items():
        guesses = np.array([float(np.dot(weights, features(text))) for text in some])
        cells = []
        for count in counts.values():
            exact = np.array([max(1, count(text)) for text in some])
            each = np.median(np.abs(guesses / exact - 1))
            cells.append(f"{f'{guesses.sum() / exact.sum() - 1:+.0%} ({each:.0%})':>18}")
        print(f"{kind:14} {len(some):4} texts" + "".join(cells))


def _short(name: str) -> str:
    path = Path(name)
    return path.parent.name if path.stem == "tokenizer" else path.stem.removesuffix("_tokenizer")


if __name__ == "__main__":
    main()
