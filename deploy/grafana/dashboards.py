"""Makes operators.json and tenants.json from types that Grafana publishes, in its first schema: old Grafanas
read it, and new ones do.

Usage: python deploy/grafana/dashboards.py [FOLDER] (needs the extra `dev`)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    DataSourceRef,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.table import Options as TableOptions

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
FAILED = 'outcome=~"unavailable|engine_error|timeout|internal_error"'
TRIED = 'outcome!~"client_error|limited|cancelled"'
STATES = {"ready": "green", "asleep": "blue", "starting": "yellow", "suspect": "orange", "down": "red"}
# Engines do not name their tier in every metric: it is joined from the one that does.
OF_TIER = '* on (job, instance, engine) group_left () dualgauge_engine_info{job=~"$job", tier="$tier"}'
Panel = Builder[model.Panel]
Query = tuple[str, str]
"""An expression in PromQL and the legend of its series."""


def series(metric: str, *matchers: str) -> str:
    inside = ", ".join(('job=~"$job"', *matchers))
    return f"{metric}{{{inside}}}"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    inner = f"rate({series(metric, *matchers)}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def hourly(metric: str, *matchers: str) -> str:
    return f"sum(increase({series(metric, *matchers)}[1h]))"


def quantiles(histogram: str, *matchers: str, shares: tuple[int, ...] = (50, 90, 99)) -> list[Query]:
    inner = rate(f"{histogram}_bucket", *matchers, by="le")
    return [(f"histogram_quantile({share / 100}, {inner})", f"p{share}") for share in shares]


def target(query: Query) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(SOURCE).expr(query[0]).legend_format(query[1]).range()


def chart(
    title: str,
    unit: str,
    *queries: Query,
    about: str = "",
    width: int = 12,
    stacked: bool = False,
    tiers: bool = False,
) -> timeseries.Panel:
    """Lines over time; with `tiers` once a tier, side by side."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .height(8)
        .span(WIDTH if tiers else width)
        .line_width(1)
        .fill_opacity(30 if stacked else 10)
        .show_points(VisibilityMode.NEVER)
        .legend(
            VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if tiers:
        panel.repeat("tier").repeat_direction("h").max_per_row(2)
    for query in queries:
        panel.with_target(target(query))
    return panel


def figure(title: str, query: Query, unit: str = "short", *, bad: float | None = None) -> stat.Panel:
    """One number, red from `bad` on, zero where there is no series; a legend is shown in its place."""
    steps = [model.Threshold(value=None, color="green")]
    if bad is not None:
        steps.append(model.Threshold(value=bad, color="red"))
    return (
        stat.Panel()
        .title(title)
        .datasource(SOURCE)
        .unit(unit)
        .no_value("0")
        .height(4)
        .span(3)
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .text_mode(BigValueTextMode.NAME if query[1] else BigValueTextMode.AUTO)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(target(query))
    )


def states(title: str, metric: str) -> statetimeline.Panel:
    """A band for each state that an engine was in."""
    panel = (
        statetimeline.Panel()
        .title(title)
        .datasource(SOURCE)
        .height(6)
        .span(WIDTH)
        .show_value(VisibilityMode.NEVER)
        .with_target(target((f"max by (engine, state) ({series(metric)} == 1)", "{{engine}} {{state}}")))
    )
    for state, color in STATES.items():
        fixed = model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})
        panel.override_by_regexp(f"/ {state}$/", [fixed])
    return panel


def columns(title: str, by: str, *queries: Query) -> table.Panel:
    """A row for each value of `by`, a column for each query, over the time that is shown."""
    panel = table.Panel().title(title).datasource(SOURCE).height(9).span(WIDTH).unit("short").decimals(0)
    for letter, (expression, _) in zip("ABCDEFGH", queries, strict=False):
        query = prometheus.Dataquery().datasource(SOURCE).expr(expression).instant().ref_id(letter)
        panel.with_target(query.format(PromQueryFormat.TABLE))
    names = {f"Value #{letter}": name for letter, (_, name) in zip("ABCDEFGH", queries, strict=False)}
    return panel.transformations(
        [
            model.DataTransformerConfig(id_val="joinByField", options={"byField": by, "mode": "outer"}),
            model.DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {f"Time {n}": True for n in range(1, len(queries) + 1)},
                    "renameByName": names,
                },
            ),
        ]
    )


def choice(name: str, label: str, metric: str) -> dashboard.QueryVariable:
    """A variable of the values that label `name` has on a metric."""
    everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({metric}, {name})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(everything)
    )


def empty(title: str, about: str, *variables: dashboard.QueryVariable) -> dashboard.Dashboard:
    others = (
        dashboard.DashboardLink("Dualgauge")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags(["dualgauge"])
        .keep_time(True)
        .include_vars(True)
    )
    return (
        dashboard.Dashboard(title)
        .description(about)
        .tags(["dualgauge"])
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(others)
        .variables(
            [
                dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
                choice("job", "Deployment", "dualgauge_store_up"),
                *variables,
            ]
        )
    )


def now() -> tuple[Panel, ...]:
    failing = f"{rate('dualgauge_requests_total', FAILED)} / {rate('dualgauge_requests_total', TRIED)}"
    down = series("dualgauge_engine_state", 'state="down"')
    return (
        figure("Requests a second", (rate("dualgauge_requests_total"), ""), "reqps"),
        figure("Failing", (failing, ""), "percentunit", bad=0.005),
        figure("Degraded in an hour", (hourly("dualgauge_degraded_total"), "")),
        figure("Refused by limits in an hour", (hourly("dualgauge_limited_total"), "")),
        figure("Engines down", (f"sum({down})", ""), bad=1),
        figure("Limiter stores down", (f"sum(1 - {series('dualgauge_store_up')})", ""), bad=1),
        figure("Refused files", (f"sum({series('dualgauge_file_refused')})", ""), bad=1),
        figure("Policy", (f"max by (hash) ({series('dualgauge_policy_info')})", "{{hash}}")),
        states("Engines", "dualgauge_engine_state"),
    )


def side_by_side() -> tuple[Panel, ...]:
    tier = 'tier="$tier"'
    waits = rate("dualgauge_queue_seconds_bucket", by="tier, le")
    preempted = f"rate({series('dualgauge_engine_preemptions_total')}[$__rate_interval])"
    first, between = "dualgauge_time_to_first_token_seconds", "dualgauge_inter_token_seconds"
    return (
        chart(
            "$tier: tokens a second",
            "short",
            (rate("dualgauge_tokens_total", tier, by="kind"), "{{kind}}"),
            about="Cached tokens are part of the prompt's.",
            tiers=True,
        ),
        chart("$tier: time to first token", "s", *quantiles(first, tier), tiers=True),
        chart("$tier: time between tokens", "s", *quantiles(between, tier), tiers=True),
        chart("$tier: whole requests", "s", *quantiles("dualgauge_request_seconds", tier), tiers=True),
        chart(
            "$tier: KV cache",
            "percentunit",
            (f"{series('dualgauge_engine_kv_usage')} {OF_TIER}", "{{engine}}"),
            tiers=True,
        ),
        chart(
            "$tier: requests at engines",
            "short",
            (f"{series('dualgauge_engine_running')} {OF_TIER}", "{{engine}} running"),
            (f"{series('dualgauge_engine_waiting')} {OF_TIER}", "{{engine}} waiting"),
            (f"sum({series('dualgauge_in_flight', tier)})", "sent by the gateway"),
            tiers=True,
        ),
        chart("$tier: preemptions", "ops", (f"{preempted} {OF_TIER}", "{{engine}}"), tiers=True),
        chart(
            "Waiting for a tier to be ready, p90",
            "s",
            (f"histogram_quantile(0.9, {waits})", "{{tier}}"),
            about="Requests whose rule says `wait`.",
        ),
        chart("Attempts after the first", "ops", (rate("dualgauge_retries_total", by="tier"), "{{tier}}")),
    )


def decisions() -> tuple[Panel, ...]:
    requests, counted = "dualgauge_requests_total", 'kind=~"prompt|completion"'
    of_tier = rate("dualgauge_tokens_total", counted, by="tier")
    share = f"{of_tier} / on () group_left () {rate('dualgauge_tokens_total', counted)}"
    candidate = rate("dualgauge_shadow_decisions_total", by="rule, tier, candidate_tier")
    return (
        chart("Requests by rule", "reqps", (rate(requests, by="rule"), "{{rule}}"), stacked=True),
        chart(
            "Degraded by rule",
            "reqps",
            (rate("dualgauge_degraded_total", by="rule"), "{{rule}}"),
            about="Answers from a less precise tier than the rule wants.",
            stacked=True,
        ),
        chart("Share of tokens", "percentunit", (share, "{{tier}}")),
        chart("Requests by outcome", "reqps", (rate(requests, by="outcome"), "{{outcome}}"), stacked=True),
        chart(
            "A candidate beside the policy",
            "reqps",
            (candidate, "{{rule}}: {{tier}}, candidate {{candidate_tier}}"),
            about="What the policy in `shadow` decides about the same requests.",
            width=WIDTH,
            stacked=True,
        ),
    )


def limits() -> tuple[Panel, ...]:
    kinds = rate("dualgauge_limited_total", by="kind")
    fallbacks = rate("dualgauge_store_fallback_total")
    return (
        chart("Refused by kind", "reqps", (kinds, "{{kind}}"), width=8, stacked=True),
        chart("Open reservations", "short", (f"sum({series('dualgauge_leases')})", "leases"), width=8),
        chart("Reservations without their store", "reqps", (fallbacks, "by on_store_failure"), width=8),
    )


def gateway() -> tuple[Panel, ...]:
    return (
        chart("Overhead", "s", *quantiles("dualgauge_overhead_seconds", shares=(50, 99)), width=8),
        chart("Deciding", "s", *quantiles("dualgauge_decision_seconds", shares=(50, 99)), width=8),
        chart(
            "Event loop lag",
            "s",
            *quantiles("dualgauge_loop_lag_seconds", shares=(50, 99)),
            about="How late timers fire: above 50 ms, every request waits that long.",
            width=8,
        ),
    )


def operators() -> dashboard.Dashboard:
    page = empty(
        "Dualgauge: operators",
        "Both tiers side by side, what the policy decides, and what limits refuse.",
        choice("tier", "Tier", "dualgauge_in_flight"),
    )
    rows = {
        "Now": now(),
        "Tiers side by side": side_by_side(),
        "Decisions": decisions(),
        "Limits": limits(),
        "Gateway": gateway(),
    }
    for title, panels in rows.items():
        page.with_row(dashboard.Row(title))
        for panel in panels:
            page.with_panel(panel)
    return page


def usage() -> tuple[Panel, ...]:
    who, tenant = 'tenant=~"$tenant"', "{{tenant}}"
    requests, tokens = "dualgauge_tenant_requests_total", "dualgauge_tenant_tokens_total"
    # Cached tokens are prompt tokens already.
    counted = 'kind!="cached"'

    def total(metric: str, *matchers: str) -> str:
        return f"sum by (tenant) (increase({series(metric, who, *matchers)}[$__range]))"

    def each(metric: str, *matchers: str, by: str = "tenant") -> str:
        return rate(metric, who, *matchers, by=by)

    seconds = f"{each('dualgauge_tenant_request_seconds_total')} / {each(requests)}"
    cached = each(tokens, 'kind="cached"') + " / " + each(tokens, 'kind="prompt"')
    limited = each("dualgauge_tenant_limited_total", by="tenant, kind")
    by_tier = each(tokens, counted, by="tenant, tier")
    return (
        columns(
            "In the time that is shown",
            "tenant",
            (total(requests), "requests"),
            (total(tokens, 'kind="prompt"'), "prompt tokens"),
            (total(tokens, 'kind="completion"'), "completion tokens"),
            (total(tokens, counted, 'tier="exact"'), "tokens of exact"),
            (total("dualgauge_tenant_limited_total"), "refused by limits"),
            (total("dualgauge_tenant_degraded_total"), "degraded"),
        ),
        chart("Requests", "reqps", (each(requests), tenant), stacked=True),
        chart("Tokens a second", "short", (each(tokens, counted), tenant), stacked=True),
        chart("Tokens a second by tier", "short", (by_tier, "{{tenant}} {{tier}}"), stacked=True),
        chart("Share of prompts from the cache", "percentunit", (cached, tenant)),
        chart("Mean time of a request", "s", (seconds, tenant)),
        chart("Failing", "percentunit", (f"{each(requests, FAILED)} / {each(requests, TRIED)}", tenant)),
        chart("Refused by limits", "reqps", (limited, "{{tenant}} {{kind}}"), stacked=True),
        chart(
            "Degraded",
            "reqps",
            (each("dualgauge_tenant_degraded_total"), tenant),
            about="Answers from a less precise tier than the rule wants.",
            stacked=True,
        ),
    )


def tenants() -> dashboard.Dashboard:
    page = empty(
        "Dualgauge: tenants",
        "What each key uses, waits for and is refused.",
        choice("tenant", "Tenant", "dualgauge_tenant_requests_total"),
    )
    for panel in usage():
        page.with_panel(panel)
    return page


def text(page: dashboard.Dashboard) -> str:
    """The page as JSON, without what these builders write and the kind of thing at hand does not have."""
    built = page.build()
    assert built.templating is not None
    for variable in built.templating.list_val or []:
        variable.auto = variable.auto_min = variable.auto_count = None
    for number, panel in enumerate(built.panels or [], 1):
        panel.id_val = number
        if isinstance(panel, model.Panel) and isinstance(panel.options, TableOptions):
            panel.options.footer = None
    return json.dumps(built, cls=JSONEncoder, indent=1) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards"
    (folder / "operators.json").write_text(text(operators()), "utf-8")
    (folder / "tenants.json").write_text(text(tenants()), "utf-8")
