"""The policy language as a tree of values, read from a document with every problem it has.

Names are not resolved here: `policies.compile` does that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies import units
from policies.conditions import ConditionReader
from policies.decision import DEFAULT_KV, DEFAULT_WAITING, Busy, Contract
from policies.document import Diagnostic, Document, Path, unknown
from policies.expressions import AllOf, Expression
from policies.plan import Plan, read_plans
from policies.shipped import SHIPPED, SHIPPED_NAME

TOP_KEYS = ("version", "classes", "rules", "affinity", "plans", "shadow", "rollout")
RULE_KEYS = ("name", "when", "send", "if_busy", "if_unavailable", "priority", "trace", "cap", "set")


@dataclass(frozen=True, slots=True)
class RuleSyntax:
    """One rule as written; `path` is where it stands in the document."""

    path: Path
    name: str
    when: Expression | None
    send: str
    contract: Contract
    busy: Busy | None
    priority: int
    trace: bool
    max_tokens: int | None
    temperature: float | None


@dataclass(frozen=True, slots=True)
class PolicySyntax:
    classes: Mapping[str, Expression]
    rules: tuple[RuleSyntax, ...]
    affinity: str | None
    plans: Mapping[str, Plan]
    references: tuple[tuple[Path, str], ...]
    shadow: str | None = None
    rollout: float = 0.0


def read(document: Document, tiers: Sequence[str]) -> tuple[PolicySyntax, list[Diagnostic]]:
    """The tree of a policy, and what is wrong with it; parts that cannot be read are left out of the tree."""
    reader = _Reader(document, tiers)
    return reader.policy(), reader.problems


class _Reader(ConditionReader):
    def __init__(self, document: Document, tiers: Sequence[str]) -> None:
        super().__init__(document)
        self._tiers = tiers

    def policy(self) -> PolicySyntax:
        top = self._document.value
        if not isinstance(top, dict):
            self.problem((), "a policy is a mapping with the keys `version`, `classes` and `rules`")
            return PolicySyntax({}, (), None, {}, ())
        self.known_keys((), top, TOP_KEYS)
        if "version" not in top:
            self.problem((), "the key `version` is missing: write `version: 1`")
        elif top["version"] != 1 or top["version"] is True:
            newer = type(top["version"]) is int and top["version"] > 1
            update = "this is for a newer Dualgauge: update this one, which" if newer else "this Dualgauge"
            self.problem(("version",), f"{update} reads `version: 1`")
        affinity = top.get("affinity")
        if affinity not in (None, "conversation"):
            self.problem(("affinity",), "`affinity` is `conversation`, or left out")
            affinity = None
        classes = self._classes(top.get("classes"))
        rules = self._rules(top)
        plans = read_plans(self._document, self._tiers, self.problems) if top.get("plans") is not None else {}
        shadow, rollout = self._shadow(top)
        return PolicySyntax(classes, rules, affinity, plans, tuple(self.references), shadow, rollout)

    def _shadow(self, top: Mapping[str, Any]) -> tuple[str | None, float]:
        shadow, rollout = top.get("shadow"), 0.0
        if shadow is not None and (not isinstance(shadow, str) or not shadow.strip()):
            self.problem(("shadow",), "`shadow` is the file of a candidate, or the name of a shipped policy")
            shadow = None
        elif shadow is not None and SHIPPED_NAME.fullmatch(shadow) and shadow not in SHIPPED:
            self.problem(("shadow",), unknown("policy", shadow, SHIPPED))
        if top.get("rollout") is not None:
            try:
                rollout = units.share(top["rollout"])
            except ValueError as error:
                self.problem(("rollout",), str(error))
            if top.get("shadow") is None:
                message = "`rollout` is the share of a candidate: name its file as `shadow` too"
                self.problem(("rollout",), message, key=True)
        return shadow, rollout

    def _classes(self, value: Any) -> dict[str, Expression]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problem(("classes",), "`classes` is a mapping from names to conditions")
            return {}
        read = {name: self.expression(("classes", name), item) for name, item in value.items()}
        # A class that could not be read stays known, so that its name is not reported again where it is used.
        return {name: AllOf(()) if item is None else item for name, item in read.items()}

    def _rules(self, top: dict[str, Any]) -> tuple[RuleSyntax, ...]:
        value = top.get("rules")
        if not isinstance(value, list) or not value:
            where: Path = ("rules",) if "rules" in top else ()
            self.problem(where, "`rules` is a list whose last rule has no `when`")
            return ()
        rules = []
        for index, item in enumerate(value):
            if isinstance(item, dict):
                rules.append(self._rule(("rules", index), item))
            else:
                self.problem(("rules", index), "a rule is a mapping with the keys `name`, `when` and `send`")
        return tuple(rules)

    def _rule(self, path: Path, item: dict[str, Any]) -> RuleSyntax:
        self.known_keys(path, item, RULE_KEYS)
        when: Expression | None = None
        if "when" in item:
            when = self.expression((*path, "when"), item["when"]) or AllOf(())
        send = self._tier((*path, "send"), item["send"]) if "send" in item else None
        if "send" not in item:
            self.problem(path, f"the key `send` is missing: write `send: {self._tiers[-1]}`")
        priority, trace = item.get("priority", 0), item.get("trace")
        if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > 1_000_000:
            self.problem((*path, "priority"), "`priority` is a whole number; lower is served earlier")
            priority = 0
        if trace not in (None, "always"):
            self.problem((*path, "trace"), "`trace` is `always`, or left out")
        cap = self._edit((*path, "cap"), item.get("cap"), "max_tokens")
        temperature = self._edit((*path, "set"), item.get("set"), "temperature")
        return RuleSyntax(
            path=path,
            name=self._rule_name(path, item),
            when=when,
            send=send or self._tiers[-1],
            contract=self._contract((*path, "if_unavailable"), item.get("if_unavailable", "fail"), send),
            busy=self._busy((*path, "if_busy"), item["if_busy"], send) if "if_busy" in item else None,
            priority=priority,
            trace=trace == "always",
            max_tokens=None if cap is None else int(cap),
            temperature=temperature,
        )

    def _rule_name(self, path: Path, item: dict[str, Any]) -> str:
        default = f"rule {path[-1]}"
        name = item.get("name")
        if "name" not in item:
            self.problem(path, "the key `name` is missing: it is what headers, traces and metrics show")
        elif (
            not isinstance(name, str)
            or not 0 < len(name) <= 80
            or not name.isascii()
            or not name.isprintable()
        ):
            self.problem((*path, "name"), "a rule's name is 1 to 80 printable ASCII characters")
        elif name != name.strip():
            self.problem((*path, "name"), "a rule's name has no blanks around it")
        elif name == "pinned":
            self.problem((*path, "name"), "`pinned` is the name for requests that name their tier themselves")
        else:
            return name
        return default

    def _tier(self, path: Path, value: Any) -> str | None:
        if isinstance(value, str) and value in self._tiers:
            return value
        self.unknown(path, "tier", value, self._tiers)
        return None

    def _other_tier(self, path: Path, value: Any, send: str | None) -> str | None:
        tier = self._tier(path, value)
        if tier is not None and tier == send:
            self.problem(path, f"`{tier}` is where the rule sends already: name another tier")
        return tier

    def _contract(self, path: Path, value: Any, send: str | None) -> Contract:
        if value == "fail":
            return Contract("fail")
        if value == "degrade":
            self._can_degrade(path, send)
            return Contract("degrade")
        if isinstance(value, dict) and "use" in value:
            self.known_keys(path, value, ("use",))
            return Contract("use", use=self._other_tier((*path, "use"), value["use"], send))
        if isinstance(value, dict) and "wait" in value:
            self.known_keys(path, value, ("wait", "then"))
            then = value.get("then", "fail")
            if then not in ("fail", "degrade"):
                self.unknown((*path, "then"), "value", then, ("fail", "degrade"))
                then = "fail"
            if then == "degrade":
                self._can_degrade((*path, "then"), send)
            return Contract("wait", wait=self._duration((*path, "wait"), value["wait"]), then=then)
        self.problem(
            path, "write `fail`, `degrade`, `{wait: 20s}`, `{wait: 20s, then: degrade}` or `{use: ...}`"
        )
        return Contract("fail")

    def _can_degrade(self, path: Path, send: str | None) -> None:
        if send is not None and send == self._tiers[0]:
            self.problem(path, f"no tier is less precise than `{send}`: write `fail` or `{{use: ...}}`")

    def _duration(self, path: Path, value: Any) -> float:
        try:
            seconds = units.duration(value)
        except ValueError as error:
            self.problem(path, str(error))
            return 0.0
        if not 0 < seconds <= 3600:
            self.problem(path, "a wait is longer than nothing and no longer than 1h")
        return seconds

    def _busy(self, path: Path, value: Any, send: str | None) -> Busy | None:
        if isinstance(value, str):
            tier = self._other_tier(path, value, send)
            return None if tier is None else Busy(tier)
        if not isinstance(value, dict) or "use" not in value:
            self.problem(path, "write `if_busy: fast` or `if_busy: {use: fast, waiting: 8, kv: 0.95}`")
            return None
        self.known_keys(path, value, ("use", "waiting", "kv", "wait"))
        waiting, kv = value.get("waiting", DEFAULT_WAITING), value.get("kv", DEFAULT_KV)
        if not isinstance(waiting, int) or isinstance(waiting, bool) or waiting < 0:
            self.problem((*path, "waiting"), "`waiting` is a number of requests, 0 or more")
            waiting = DEFAULT_WAITING
        if not isinstance(kv, int | float) or isinstance(kv, bool) or not 0 < kv <= 1:
            self.problem((*path, "kv"), "`kv` is the used share of the KV cache, above 0 and at most 1")
            kv = DEFAULT_KV
        tier = self._other_tier((*path, "use"), value["use"], send)
        wait = self._duration((*path, "wait"), value["wait"]) if "wait" in value else None
        return None if tier is None else Busy(tier, waiting, float(kv), wait)

    def _edit(self, path: Path, value: Any, key: str) -> float | None:
        if value is None:
            return None
        if not isinstance(value, dict) or not value:
            self.problem(path, f"write `{path[-1]}: {{{key}: ...}}`")
            return None
        self.known_keys(path, value, (key,))
        number = value.get(key)
        if number is None:
            return None
        whole = key == "max_tokens"
        low, high = (1, 10_000_000) if whole else (0, 2)
        kinds = int if whole else int | float
        if not isinstance(number, kinds) or isinstance(number, bool) or not low <= number <= high:
            what = "whole number" if whole else "number"
            self.problem((*path, key), f"`{key}` is a {what} from {low} to {high}")
            return None
        return float(number)
