"""Policy, its candidate and keys: read at the start, read again while requests run.

A snapshot is immutable and replaced in one assignment. A policy or key file with a mistake changes nothing, a
candidate with a mistake leaves the one before in its place; either is told in the log, in the metrics, in
`status` and in `/readyz`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from gateway.config import Config, read
from gateway.files import read_text
from gateway.identity import Known, read_keys
from gateway.runtime import Gateway, Snapshot, Stamp, Stamps, model_names
from gateway.shadow import Candidate
from policies.compile import compile_policy
from policies.document import Diagnostic, ProblemsError, unknown
from policies.logged import Fields
from policies.policy import Policy
from policies.shipped import SHIPPED, SHIPPED_NAME, beside, shipped

logger = logging.getLogger("dualgauge.gateway")

FILE_POLL_SECONDS = 0.5
"""A file that looks the same twice is read: one that is being written is left alone until it is whole."""


def read_policy(named: str, config: Config, asked_in: str) -> Policy:
    """A shipped policy by name, or one from a file; `asked_in` is the file that names it.

    Raises ProblemsError.
    """
    served = {spec.tier for spec in config.engines}
    if not SHIPPED_NAME.fullmatch(named):
        policy = compile_policy(read_text(Path(named)), named, tiers=config.tiers, served=served)
        _check_models(policy, model_names(config))
        return policy
    if named not in SHIPPED:
        message = unknown("policy", named, SHIPPED)
        raise ProblemsError([Diagnostic(asked_in, 1, 1, "error", message)])
    return compile_policy(*shipped(named), tiers=config.tiers, served=served)


def _check_models(policy: Policy, names: Collection[str]) -> None:
    """A limit of a model that nobody can ask for would never hold."""
    wrong = [
        Diagnostic(policy.file, *limits.at, "error", unknown("model", model, names))
        for plan in policy.plans.values()
        for model, limits in plan.models.items()
        if model not in names
    ]
    if wrong:
        raise ProblemsError(wrong)


def read_snapshot(
    config: Config, before: Snapshot | None = None, stamps: Stamps | None = None
) -> tuple[Snapshot, str | None]:
    """All as it stands now, and what is wrong with the candidate, if something is: the one before stays then.

    How the files look is put into `stamps` before they are read, so that a change meanwhile is seen later.
    Raises ProblemsError where policy or keys have a mistake.
    """
    stamps = {} if stamps is None else stamps
    stamps |= _look(_files(config))
    policy = read_policy(config.policy, config, str(config.path))
    known = Known(tiers=config.tiers, plans=tuple(policy.plans), models=tuple(model_names(config)))
    keyring = read_keys(config.keys, known, loopback=config.listen.loopback)
    for warning in (*policy.warnings, *keyring.warnings):
        logger.warning("%s", warning)
    candidate, problem = None, None
    if policy.shadow is not None:
        stamps |= _look(_files(config, policy))
        candidate, problem = _candidate(policy, config, before)
    policies = [policy] if candidate is None else [policy, candidate.policy]
    return Snapshot(policy, keyring, candidate, Fields(policies)), problem


def _candidate(live: Policy, config: Config, before: Snapshot | None) -> tuple[Candidate | None, str | None]:
    assert live.shadow is not None
    named = beside(live.shadow, live.file)
    old = None if before is None else before.candidate
    problem = None
    try:
        policy = read_policy(named, config, live.file)
    except ProblemsError as exc:
        problem = str(exc)
        if old is None or old.named != named:
            return None, problem
        policy = old.policy
    if old is not None and (old.policy.hash, old.live) == (policy.hash, live.hash):
        return old, problem
    for warning in policy.warnings:
        logger.warning("%s", warning)
    if policy.shadow is not None:
        logger.warning("%s: a candidate's own `shadow` is not read", policy.file)
    return Candidate(named, policy, live, live.rollout), problem


def reload(gateway: Gateway) -> str | None:
    """Read everything again; None, or what is wrong and stays as it was."""
    config, before = gateway.config, gateway.snapshot
    gateway.stamps = stamps = _look(gateway.stamps)
    try:
        snapshot, problem = read_snapshot(config, before, stamps)
    except ProblemsError as exc:
        gateway.reload_error = str(exc)
        gateway.metrics.reload_failed(_which_file(config, exc))
        logger.error("reload refused, the old files stay in force:\n%s", exc)
        return gateway.reload_error
    if snapshot.policy.hash != before.policy.hash:
        logger.info("policy %s replaces %s", snapshot.policy.hash, before.policy.hash)
    gateway.snapshot = snapshot
    gateway.reload_error = None
    told(gateway, problem)
    gateway.stamps = {file: stamps[file] for file in _files(config, snapshot.policy)}
    return problem and f"the policy {snapshot.policy.hash} is in force, its candidate is refused:\n{problem}"


def told(gateway: Gateway, problem: str | None) -> None:
    """Show what is in force, and what is wrong with the candidate."""
    snapshot, candidate = gateway.snapshot, gateway.snapshot.candidate
    gateway.metrics.policy(snapshot.policy.hash)
    gateway.metrics.candidate(None if candidate is None else candidate.policy.hash, snapshot.policy.rollout)
    gateway.shadow_error = problem
    if problem is not None:
        gateway.metrics.reload_failed("shadow")
        kept = "there is none" if candidate is None else f"{candidate.policy.hash} stays"
        logger.error("the candidate is refused, %s:\n%s", kept, problem)


def _which_file(config: Config, problems: ProblemsError) -> str:
    keys = config.keys is not None and any(d.file == str(config.keys) for d in problems.diagnostics)
    return "keys" if keys else "policy"


def _files(config: Config, policy: Policy | None = None) -> list[Path]:
    """Where policy, keys and the candidate of `policy` come from."""
    named = [config.policy]
    if policy is not None and policy.shadow is not None:
        named.append(beside(policy.shadow, policy.file))
    files = [Path(name) for name in named if not SHIPPED_NAME.fullmatch(name)]
    return files if config.keys is None else [*files, config.keys]


def _look(files: Iterable[Path]) -> Stamps:
    return {file: _stamp(file) for file in files}


def _stamp(file: Path) -> Stamp:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


async def watch_files(gateway: Gateway) -> None:
    """Read again what changes on disk. Runs until it is cancelled."""
    config = gateway.config
    started_with = last = told_of = _stamp(config.path)
    before = gateway.stamps
    while True:
        await asyncio.sleep(FILE_POLL_SECONDS)
        now = _look(gateway.stamps)
        if now == before and now != gateway.stamps:
            reload(gateway)
        before = now
        stamp = _stamp(config.path)
        if stamp == last != told_of:
            told_of = stamp
            _tell_of_config(gateway, changed=stamp != started_with)
        last = stamp
        gateway.restart_needed = stamp != started_with


def _tell_of_config(gateway: Gateway, *, changed: bool) -> None:
    """`dualgauge.yaml` is read at the start only; a mistake in a changed one would end the next start."""
    path = gateway.config.path
    try:
        read(path)
    except (ProblemsError, OSError, UnicodeDecodeError) as exc:
        logger.error("%s was changed, and a restart would fail:\n%s", path, exc)
        gateway.metrics.reload_failed("config")
        return
    gateway.metrics.config(gateway.config.hash)
    if changed:
        logger.warning("%s was changed: restart needed, it is read at the start only", path)
