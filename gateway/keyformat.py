"""The form of the keys that `dualgauge keys` makes: `dgk_`, 30 random characters, 6 of a checksum.

It is GitHub's ("Behind GitHub's new authentication token formats", github.blog, 2021): a prefix by which
scanners find leaked keys, base62 so that a double click selects the whole key, and the CRC-32 of the random
part, so that a typo or a chance match is told from a key without asking anybody. 30 characters hold 178
random bits. Any other text may be a key as well, if the key file says so.
"""

from __future__ import annotations

import re
import secrets
import string
import zlib
from collections.abc import Callable

PREFIX = "dgk_"
DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase
RANDOM = 30
CHECKSUM = 6
SHAPE = re.compile(rf"{PREFIX}([0-9A-Za-z]{{{RANDOM}}})([0-9A-Za-z]{{{CHECKSUM}}})")


def new_key(choice: Callable[[str], str] = secrets.choice) -> str:
    """A key that nobody else has."""
    entropy = "".join(choice(DIGITS) for _ in range(RANDOM))
    return f"{PREFIX}{entropy}{_checksum(entropy)}"


def well_formed(key: str) -> bool:
    """Whether a text is a key that `new_key` could have made: false after a typo."""
    match = SHAPE.fullmatch(key)
    return match is not None and _checksum(match[1]) == match[2]


def _checksum(entropy: str) -> str:
    number, text = zlib.crc32(entropy.encode()), ""
    for _ in range(CHECKSUM):
        number, digit = divmod(number, len(DIGITS))
        text = DIGITS[digit] + text
    return text
