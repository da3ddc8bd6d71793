"""Keys to tenants."""

import hashlib
from typing import Any

import pytest

from gateway.errors import InvalidKey
from gateway.identity import Keyring, Known, parse_keys, presented_key
from policies.document import ProblemsError

SHA = hashlib.sha256(b"sk-hashed").hexdigest()
NOW = 1_800_000_000.0


KNOWN = Known(tiers=("fast", "exact"), plans=("default", "trial"), models=("smollm2", "smollm2:fast"))


def read(text: str, *, loopback: bool = True) -> Keyring:
    return parse_keys(text, "keys.yaml", KNOWN, loopback=loopback)


def test_a_key_is_found_by_its_digest_or_in_plain() -> None:
    ring = read(f"keys: [{{name: a, sha256: {SHA}, plan: trial, tags: [x]}}, {{name: b, key: sk-plain}}]")
    tenant = ring.authenticate(b"sk-hashed", NOW)
    assert (tenant.name, tenant.plan, tenant.tags) == ("a", "trial", {"x"})
    assert ring.authenticate(b"sk-plain", NOW).name == "b"


@pytest.mark.parametrize("given", [None, b"", b"sk", b"sk-plain ", b"SK-PLAIN", SHA.encode(), b"\0" * 32])
def test_other_keys_are_nobodys(given: bytes | None) -> None:
    ring = read(f"keys: [{{name: a, sha256: {SHA}}}, {{name: b, key: sk-plain}}]")
    with pytest.raises(InvalidKey) as caught:
        ring.authenticate(given, NOW)
    with pytest.raises(InvalidKey) as other:
        ring.authenticate(b"wrong", NOW)
    assert caught.value.message == other.value.message


def test_keys_end_by_date_and_by_hand() -> None:
    ring = read(
        "keys: [{name: a, key: ka, expires: 2027-01-15}, {name: b, key: kb, disabled: true},"
        " {name: c, key: kc, expires: '2027-01-15T08:00:00+00:00'}]"
    )
    start = 1_799_971_200.0  # 2027-01-15T00:00:00Z
    assert ring.authenticate(b"ka", start - 1).name == "a"
    assert ring.authenticate(b"kc", start + 8 * 3600 - 1).name == "c"
    for key, now in ((b"ka", start), (b"kb", 0), (b"kc", start + 8 * 3600)):
        with pytest.raises(InvalidKey):
            ring.authenticate(key, now)


def test_a_key_before_ends_by_its_own_date() -> None:
    other = hashlib.sha256(b"ko").hexdigest()
    ring = read(
        f"keys: [{{name: a, key: kn, plan: trial, previous: {{sha256: {other}, until: 2027-01-15}}}},"
        f" {{name: b, key: kb, expires: 2027-01-15, previous: {{sha256: {SHA}, until: 2028-01-01}}}}]"
    )
    start = 1_799_971_200.0  # 2027-01-15T00:00:00Z
    assert ring.authenticate(b"ko", start - 1).plan == "trial"
    assert ring.authenticate(b"sk-hashed", start - 1).name == "b"
    assert ring.authenticate(b"kn", start).name == "a"
    for key in (b"ko", b"kb", b"sk-hashed"):
        with pytest.raises(InvalidKey):
            ring.authenticate(key, start)


def test_without_a_key_file_everybody_is_anonymous() -> None:
    assert Keyring(None).authenticate(None, NOW).name == "anonymous"
    assert Keyring(None).authenticate(b"anything", NOW).may_use("exact")


def test_an_empty_key_file_lets_nobody_in() -> None:
    with pytest.raises(InvalidKey):
        read("keys: []").authenticate(b"x", NOW)


def test_keys_of_an_organisation_share_its_plan() -> None:
    ring = read(
        "organisations: [{name: acme, plan: trial}]\n"
        "keys: [{name: a, key: ka, organisation: acme}, {name: b, key: kb}]"
    )
    inside, outside = ring.authenticate(b"ka", NOW), ring.authenticate(b"kb", NOW)
    assert (inside.organisation, inside.plan, inside.shared) == ("acme", "default", "trial")
    assert (outside.organisation, outside.plan) == ("", "default")


def test_organisations_are_checked() -> None:
    with pytest.raises(ProblemsError) as caught:
        read(
            "organisations:\n"
            "- {name: acme, plan: trail}\n"
            "- {name: acme, plan: trial}\n"
            "- {name: a/b, plan: trial}\n"
            "keys: [{name: a, key: ka, organisation: acmee}]"
        )
    assert [str(problem) for problem in caught.value.diagnostics] == [
        "keys.yaml:2:22: error: unknown plan `trail`; did you mean `trial`?",
        "keys.yaml:3:10: error: `acme` is another organisation's name already",
        "keys.yaml:4:10: error: use letters, digits, dots, dashes; 63 at most",
        "keys.yaml:5:41: error: unknown organisation `acmee`; did you mean `acme`?",
    ]


def test_tiers_bound_what_a_key_may_use() -> None:
    ring = read(
        "keys: [{name: a, key: ka, tiers: [fast]}, {name: b, key: kb, tiers: []}, {name: c, key: kc}]"
    )
    may = {
        key: [ring.authenticate(key, NOW).may_use(t) for t in ("fast", "exact")]
        for key in (b"ka", b"kb", b"kc")
    }
    assert may == {b"ka": [True, False], b"kb": [False, False], b"kc": [True, True]}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([(b"authorization", b"Bearer a")], b"a"),
        ([(b"authorization", b"bearer   a  ")], b"a"),
        ([(b"authorization", b"Bearer")], b""),
        ([(b"authorization", b"Basic a")], b""),
        ([(b"x-api-key", b" a ")], b"a"),
        ([(b"x-api-key", b"b"), (b"authorization", b"Bearer a")], b"a"),
        ([(b"authorization", b"Basic a"), (b"x-api-key", b"b")], b""),
    ],
    ids=str,
)
def test_where_a_key_is_presented(headers: Any, key: bytes | None) -> None:
    assert presented_key(dict(headers)) == key


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1:1: error: expected `object`, got `null`"),
        ("keys: {}", "1:7: error: expected `array`, got `object`"),
        ("keys: [{key: a}]", "1:8: error: the key `name` is missing"),
        ("keys: [{name: 'a b', key: a}]", "1:15: error: use letters, digits, dots, dashes"),
        ("keys: [{name: a}]", "1:8: error: give either `sha256` or `key`"),
        (f"keys: [{{name: a, key: x, sha256: {SHA}}}]", "1:8: error: give either `sha256` or `key`"),
        ("keys: [{name: a, sha256: abc}]", "1:8: error: `sha256` is 64 hexadecimal digits"),
        (f"keys: [{{name: a, sha256: '{SHA[:-1]}g'}}]", "1:8: error: `sha256` is 64 hexadecimal digits"),
        (
            f"keys: [{{name: a, sha256: {hashlib.sha256(b'').hexdigest()}}}]",
            "1:8: error: `sha256` is that of an empty key",
        ),
        (
            "keys: [{name: a, key: x, previous: {sha256: abc, until: 2027-01-01}}]",
            "1:8: error: `sha256` is 64 hexadecimal digits",
        ),
        (
            f"keys: [{{name: a, key: sk-hashed, previous: {{sha256: {SHA}, until: 2027-01-01}}}}]",
            "1:8: error: the same key twice",
        ),
        (
            f"keys: [{{name: a, key: x, previous: {{sha256: {SHA}, until: soon}}}}]",
            "1:8: error: `soon` is not a date",
        ),
        ("keys: [{name: a, key: ' '}]", "1:8: error: `key` is empty"),
        ("keys: [{name: a, key: x}, {name: a, key: y}]", "1:34: error: `a` is another key's name already"),
        ("keys: [{name: a, key: x}, {name: b, key: x}]", "1:27: error: the same key twice"),
        (
            "keys: [{name: a, key: x, tiers: [fats]}]",
            "1:34: error: unknown tier `fats`; did you mean `fast`?",
        ),
        ("keys: [{name: a, key: x, expires: soon}]", "1:8: error: `soon` is not a date: write 2027-01-01"),
        ("keys: [{name: a, key: x, expires: 2027}]", "1:35: error: expected `str | null`, got `int`"),
        ("keys: [{name: a, key: x, paln: y}]", "1:26: error: unknown key `paln`; did you mean `plan`?"),
        ("keys: [{name: a, key: x, disabled: yes}]", "1:36: error: expected `bool`, got `str`"),
    ],
)
def test_an_invalid_key_file_is_told_where_and_what(text: str, expected: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        read(text)
    (problem,) = caught.value.diagnostics
    assert str(problem).removeprefix("keys.yaml:").startswith(expected)
    assert "sk-" not in str(problem)


def test_a_problem_never_shows_a_key() -> None:
    with pytest.raises(ProblemsError) as caught:
        read("keys: [{name: a, key: sk-secret}, {name: a, key: sk-secret}]")
    assert "sk-secret" not in str(caught.value)


def test_plain_keys_are_warned_of_where_others_can_reach_them() -> None:
    text = "keys: [{name: a, key: sk-plain}]"
    assert read(text).warnings == ()
    (warning,) = read(text, loopback=False).warnings
    assert "write its sha256" in warning.message
    assert "sk-plain" not in warning.message
