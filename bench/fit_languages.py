"""Fits the endings of `policies/signals/languages.txt` to the translations that Django ships (BSD licence).

    pip download django --no-deps -d /tmp/django && unzip -q -d /tmp/django /tmp/django/*.whl
    python bench/fit_languages.py /tmp/django

Rewrites the part `[endings]` of the file. An ending is the last three letters of a word, `^` before it where
that is the whole word; its weight is the logarithm of how much more often words of the language have it than
words of the other languages of its script, in tenths.
"""

from __future__ import annotations

import collections
import math
import re
import sys
from pathlib import Path

from policies.signals import language

FILE = Path(language.__file__).with_name("languages.txt")
MOST = 120
CEILING = 3.0
LOCALES = {
    "nb": "no",
    "nn": "no",
    "sr_Latn": "hr",
    "bs": "hr",
    "zh_Hans": "zh",
    "zh_Hant": "zh",
    "pt_BR": "pt",
}
_MARKS = re.compile(r"%\(\w+\)\w|%\w|\{\w*\}|<[^>]*>|&\w+;|\\\w|https?:\S*")
_STRING = re.compile(r'^(msgid|msgstr(?:\[\d\])?|msgid_plural)?\s*"(.*)"$')


def strings(po: str, what: str) -> list[str]:
    """The translations (`msgstr`) in a .po file or the texts translated (`msgid`), without marks of formats."""
    found: list[str] = []
    inside = False
    for line in po.splitlines():
        match = _STRING.match(line)
        if match is None:
            continue
        if match[1] is not None:
            inside = match[1].startswith(what)
            if inside:
                found.append("")
        if inside:
            found[-1] += match[2]
    return [_MARKS.sub(" ", text) for text in found[1:] if text]


def counts(folder: Path) -> dict[str, collections.Counter[str]]:
    """How often words of each language have each ending."""
    found: dict[str, collections.Counter[str]] = {}
    for po in sorted(folder.glob("**/locale/*/LC_MESSAGES/*.po")):
        locale = po.parts[-3]
        code = LOCALES.get(locale, locale)
        if "_" in code:
            continue
        tally = found.setdefault(code, collections.Counter())
        text = po.read_text(encoding="utf-8")
        for one in set(strings(text, "msgstr")):
            tally.update(map(language.ending, language.WORD.findall(one.lower())))
        if code == "de":  # any: the texts translated are the same
            for one in set(strings(text, "msgid")):
                found.setdefault("en", collections.Counter()).update(
                    map(language.ending, language.WORD.findall(one.lower()))
                )
    return found


def main() -> None:
    found = counts(Path(sys.argv[1]))
    lines = ["[endings]"]
    for words in language.shipped_words().values():
        codes = sorted({code for some in words.words.values() for code, _ in some} & found.keys())
        shares = {
            code: {end: count / found[code].total() for end, count in found[code].items() if count > 2}
            for code in codes
        }
        for code in codes:
            weighed = {}
            for end, share in shares[code].items():
                others = [max(shares[other].get(end, 0.0), 2e-5) for other in codes if other != code]
                # Against the nearest other languages, not the many in which it never occurs.
                near = sorted(others)[-3:]
                weight = min(CEILING, math.log(share / (sum(near) / len(near))))
                if weight > 0.3:
                    weighed[end] = (share * weight, round(10 * weight))
            best = sorted(weighed, key=lambda end: weighed[end], reverse=True)[:MOST]
            if best:
                lines.append(f"{code}: " + " ".join(f"{end}{weighed[end][1]}" for end in sorted(best)))
    kept = FILE.read_text(encoding="utf-8").split("[endings]")[0]
    FILE.write_text(kept + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
