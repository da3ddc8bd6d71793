"""The Unicode script of a text, from a sample of its letters."""

from __future__ import annotations

from bisect import bisect_right

SAMPLE = 40

# Where each run of letters of one script begins, by code point (block list of Unicode 16).
_RUNS = (
    (0x0041, "latin"), (0x005B, ""), (0x0061, "latin"), (0x007B, ""), (0x00AA, "latin"), (0x00AB, ""),
    (0x00C0, "latin"), (0x02B0, ""), (0x0370, "greek"), (0x0400, "cyrillic"), (0x0530, "armenian"),
    (0x0590, "hebrew"), (0x0600, "arabic"), (0x0700, ""), (0x0750, "arabic"), (0x0780, ""),
    (0x08A0, "arabic"), (0x0900, "devanagari"), (0x0980, "bengali"), (0x0A00, "other"),
    (0x0B80, "tamil"), (0x0C00, "telugu"), (0x0C80, "other"), (0x0E00, "thai"), (0x0E80, "other"),
    (0x10A0, "georgian"), (0x1100, "hangul"), (0x1200, "ethiopic"), (0x13A0, "other"), (0x1780, "khmer"),
    (0x1800, "other"), (0x1C80, "cyrillic"), (0x1C90, "other"), (0x1D00, "latin"), (0x1DC0, ""),
    (0x1E00, "latin"), (0x1F00, "greek"), (0x2000, ""), (0x3040, "kana"), (0x3100, "han"),
    (0x3130, "hangul"), (0x3190, ""), (0x31F0, "kana"), (0x3200, ""), (0x3400, "han"), (0x4DC0, ""),
    (0x4E00, "han"), (0xA000, "other"), (0xAC00, "hangul"), (0xD7FC, ""), (0xF900, "han"),
    (0xFB00, "latin"), (0xFB10, ""), (0xFB1D, "hebrew"), (0xFB50, "arabic"), (0xFE00, ""),
    (0xFE70, "arabic"), (0xFEFF, ""), (0xFF21, "latin"), (0xFF3B, ""), (0xFF41, "latin"), (0xFF5B, ""),
    (0xFF66, "kana"), (0xFFA0, "hangul"), (0xFFDD, ""), (0x20000, "han"), (0x323B0, ""),
)  # fmt: skip
_STARTS = tuple(start for start, _ in _RUNS)
_NAMES = tuple(name for _, name in _RUNS)
NONE = "none"
SCRIPTS = (*sorted({name for name in _NAMES if name} - {"kana"}), "japanese", NONE)


def script_of(text: str) -> str:
    """One of SCRIPTS: that of most letters among SAMPLE characters spread over the text.

    Han with some kana is `japanese`; a text without letters is `none`.
    """
    if text.isascii():
        ends = text if len(text) <= 2 * SAMPLE else text[:SAMPLE] + text[-SAMPLE:]
        return "latin" if ends.upper() != ends.lower() else NONE
    counts: dict[str, int] = {}
    for character in text[:: len(text) // SAMPLE + 1]:
        run = bisect_right(_STARTS, ord(character)) - 1
        if run >= 0 and (name := _NAMES[run]):
            counts[name] = counts.get(name, 0) + 1
    kana = counts.pop("kana", 0)
    han = counts.get("han", 0)
    if kana and kana * 10 >= han:
        counts["japanese"] = kana + counts.pop("han", 0)
    return max(counts, key=lambda name: counts[name]) if counts else NONE
