"""`dualgauge.yaml`: what it means, and what is said where it is wrong."""

from pathlib import Path

import pytest

from engines.spec import Timeouts
from gateway.config import Config, HostPort, listening, parse
from policies.document import ProblemsError

FILE = Path("/srv/dualgauge/dualgauge.yaml")
HEAD = "model: m\nengines: [{name: a, tier: fast, kind: external, url: 'http://h:1', precision: awq}]\n"
EXTERNAL = "name: a, tier: fast, kind: external, url: 'http://h:1', precision: awq"
VLLM = "name: a, tier: fast, kind: vllm, model: x, precision: awq"
VLLM_EXACT = "name: b, tier: exact, kind: vllm, model: y, precision: bf16"


def engine(*parts: str) -> str:
    return "model: m\nengines:\n" + "".join(f"  - {{{part}}}\n" for part in parts)


def read(text: str, **env: str) -> Config:
    return parse(text, FILE, env)


def problems(text: str) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        read(text)
    return [str(d).removeprefix(f"{FILE}:") for d in caught.value.diagnostics]


INVALID = [
    ("", "1:1: error: expected `object`, got `null`"),
    ("[1]", "1:1: error: expected `object`, got `array`"),
    ("model: {m\n", "2:1: error: not valid YAML: while parsing a flow mapping, expected ',' or '}'"),
    (HEAD + "model: n\n", "3:1: error: duplicate key `model`: it is already given on line 1"),
    (HEAD.split("\n", 1)[1], "1:1: error: the key `model` is missing"),
    ("model: m\n", "1:1: error: the key `engines` is missing"),
    ("model: m\nengines: []\n", "2:10: error: no engine: name at least one"),
    ("model: m\nengines: [null]\n", "2:11: error: expected `object`, got `null`"),
    (HEAD + "polcy: default\n", "3:1: error: unknown key `polcy`; did you mean `policy`?"),
    (HEAD + "limits: {stroe: memory}\n", "3:10: error: unknown key `stroe`; did you mean `store`?"),
    (HEAD + "zzz: 1\n", "3:1: error: unknown key `zzz`; known: model, engines, listen, admin,"),
    (HEAD.replace("model: m", "model: a:b"), "1:8: error: a model's name is printable ASCII without a colon"),
    (HEAD.replace("model: m", "model: 5"), "1:8: error: expected `str`, got `int`"),
    (HEAD + "timeouts: {connect: 2}\n", "3:21: error: `2` is not a duration: write 250ms, 20s, 5m or 1h"),
    (HEAD + "timeouts: {connect: 0s}\n", "3:21: error: must be larger"),
    (HEAD + "shutdown_grace: -5s\n", "3:17: error: `-5s` is not a duration"),
    (HEAD + "bounds: {body: 10 apples}\n", "3:16: error: `10 apples` is not a size: write 65536, 64KiB"),
    (HEAD + "bounds: {body: 0}\n", "3:16: error: must be larger"),
    (HEAD + "bounds: {n: -1}\n", "3:13: error: must be larger"),
    (HEAD + "bounds: {stop: -1}\n", "3:16: error: must be larger"),
    (HEAD + "bounds: {read: 0s}\n", "3:16: error: must be larger"),
    (HEAD + "bounds: {fetch: [127.0.0.1]}\n", "3:18: error: a host's name in lower case: images.example.com"),
    (HEAD + "bounds: {fetch: ['http://a.b/']}\n", "3:18: error: a host's name in lower case"),
    (HEAD + "bounds: {fetch: [localhost]}\n", "3:18: error: a host's name in lower case"),
    (HEAD + "bounds: {fetch: [7]}\n", "3:18: error: expected `str`, got `int`"),
    (HEAD + "retries: {budget: 20}\n", "3:19: error: `20` is not a share: write 20% or 0.2"),
    (HEAD + "retries: {attempts: 0}\n", "3:21: error: must be larger"),
    (HEAD + "health: {every: 1ms}\n", "3:17: error: must be larger"),
    (HEAD + "health: {stalled_after: 0s}\n", "3:25: error: must be larger"),
    (HEAD + "listen: localhost\n", "3:9: error: `localhost` is not an address: write 127.0.0.1:8080"),
    (HEAD + "listen: 127.0.0.1:99999\n", "3:9: error: `127.0.0.1:99999` is not an address"),
    (
        HEAD + "listen: 0.0.0.0:8080\n",
        "3:9: error: 0.0.0.0:8080 can be reached by others: add `keys: keys.yaml`",
    ),
    (
        HEAD + "admin: '[::]:8081'\n",
        "3:8: error: [::]:8081 can be reached by others: add `admin_token: ${NAME}`",
    ),
    (HEAD + "listen: 127.0.0.1:8081\n", "3:9: error: port 8081 is both `listen`'s and `admin`'s"),
    (
        "model: m\nengines: [{name: a, tier: fast, kind: llama.cpp, precision: q, model: /m, args: [-m, b]}]",
        "2:81: error: these name a model too, which nobody would have checked: write it into `model` alone",
    ),
    (
        HEAD + "parity: {accept: [abc]}\n",
        "3:19: error: the hash of a difference, as `dualgauge up` prints it when it refuses it: sha256:…",
    ),
    (HEAD + "parity: {allow: [eoss]}\n", "3:18: error: unknown value `eoss`; did you mean `eos`?"),
    (HEAD + "swap: {tier: exat}\n", "3:14: error: unknown tier `exat`; did you mean `exact`?"),
    (
        engine(EXTERNAL, VLLM_EXACT) + "swap: {tier: exact}\n",
        "5:7: error: only engines of `kind: vllm` can take turns",
    ),
    (engine(VLLM) + "swap: {tier: exact}\n", "4:7: error: two tiers take turns: name two"),
    (engine(VLLM, VLLM_EXACT) + "swap: {batch: 0}\n", "5:15: error: at least 1"),
    (HEAD + "workers: 0\n", "3:10: error: at least 1"),
    (HEAD + "workers: 2\n", "3:10: error: several workers share their limits in Redis"),
    (HEAD + "workers: 1000\n", "3:10: error: 256 at most"),
    (
        HEAD + "limits: {store: reddis://h}\n",
        "3:17: error: write `memory`, or where Redis is: redis://host:6379/0, ",
    ),
    (
        HEAD + "limits: {store: redis+sentinel://h:1}\n",
        "3:17: error: Sentinels are asked for a master by its name: redis+sentinel://host:26379/mymaster",
    ),
    (
        HEAD + "limits: {store: 'redis://a,b'}\n",
        "3:17: error: several hosts are Sentinels or a cluster: redis+sentinel://a,b/name or redis+cluster://a,b",
    ),
    (
        HEAD + "limits: {store: redis://h:x}\n",
        "3:17: error: each host is a name or an address, with a port perhaps: host:6379",
    ),
    (
        HEAD + "limits: {store: unix://redis.sock}\n",
        "3:17: error: a socket has an absolute path: unix:///run/redis.sock",
    ),
    (HEAD + "limits: {processes: 0}\n", "3:21: error: at least 1, or `auto`"),
    (HEAD + "limits: {timeout: 0s}\n", "3:19: error: at least 1ms"),
    (HEAD + "limits: {waiting: 0}\n", "3:19: error: at least 1"),
    (HEAD + "telemetry: {capture_content: true}\n", "3:30: error: there are no traces to put them into"),
    (
        HEAD + "telemetry: {otlp: '4318'}\n",
        "3:19: error: a collector's url: http://127.0.0.1:4318, or grpc://",
    ),
    (HEAD + "telemetry: {otlp: 'http://h:x'}\n", "3:19: error: a collector's url: http://127.0.0.1:4318"),
    (HEAD + "workers: two\n", "3:10: error: expected `int`, got `str`"),
    (
        HEAD + "limits: {on_store_failure: clsoed}\n",
        "3:28: error: unknown value `clsoed`; did you mean `closed`?",
    ),
    (HEAD + "telemetry: {otlp: 'localhost:4318'}\n", "3:19: error: a collector's url: http://127.0.0.1:4318"),
    (HEAD + "telemetry: {sample: 2}\n", "3:21: error: `2` is not a share"),
    (HEAD + "tiers: [fast, fast]\n", "3:8: error: name each tier once, from the least to the most precise"),
    (HEAD + "tiers: [fast, 'a b']\n", "3:15: error: `a b` cannot be a tier's name"),
    (HEAD + "tiers: [exact]\n", "2:27: error: unknown tier `fast`; known: exact"),
    (HEAD + "version: 2\n", "3:10: error: this is for a newer Dualgauge: update this one, which "),
    (HEAD + "version: 2\nnew_key: 1\n", "3:10: error: this is for a newer Dualgauge"),
    (HEAD + "version: 0\n", "3:10: error: this Dualgauge reads `version: 1`"),
    (HEAD + "version: '1'\n", "3:10: error: this Dualgauge reads `version: 1`"),
    (HEAD + "version: true\n", "3:10: error: this Dualgauge reads `version: 1`"),
    (HEAD + "admin_token: ''\n", "3:14: error: is empty, so that no token would be asked"),
    (HEAD + "admin_token: gehei\u00df\n", "3:14: error: cannot be sent in a header: use printable ASCII"),
    (HEAD + 'admin_token: "two\\nlines"\n', "3:14: error: cannot be sent in a header"),
    (HEAD + "admin_token: 'blank '\n", "3:14: error: cannot be sent in a header"),
    (HEAD + "admin_token: ${NOPE}\n", "3:14: error: the environment variable NOPE is not set"),
    (engine(EXTERNAL.replace("fast", "exakt")), "3:21: error: unknown tier `exakt`; did you mean `exact`?"),
    (engine(EXTERNAL.replace("external", "vlm")), "3:33: error: unknown value `vlm`; did you mean `vllm`?"),
    (engine(EXTERNAL.replace("name: a", "name: 'a b'")), "3:12: error: use letters, digits, dots, dashes"),
    (engine(EXTERNAL, EXTERNAL), "4:12: error: `a` is another engine's name already"),
    (engine(EXTERNAL.replace(", precision: awq", "")), "3:5: error: the key `precision` is missing"),
    (engine(EXTERNAL.replace("url: 'http://h:1', ", "")), "3:5: error: an external engine needs its `url`"),
    *(
        (engine(EXTERNAL.replace("http://h:1", url)), "3:48: error: an engine's url is http://host:port,")
        for url in (
            "ftp://h",
            "h:1",
            "http://",
            "http://u:p@h",
            "http://h:x",
            "http://h:70000",
            "http://[::1",
        )
    ),
    (engine(EXTERNAL.replace("http://h:1", "http://h/é")), "3:48: error: an engine's url is"),
    (engine(EXTERNAL.replace("http://h:1", "http://h/a b")), "3:48: error: an engine's url is"),
    (
        engine(EXTERNAL.replace("http://h:1", "unix:rel.sock")),
        "3:48: error: a unix socket is written unix:/path",
    ),
    (
        engine(VLLM + ", url: 'http://h:1'"),
        "3:70: error: this engine is started here: give its `port` instead",
    ),
    (
        engine(VLLM.replace("model: x, ", "")),
        "3:5: error: which `model` should it serve? A hub name or a folder",
    ),
    (engine(VLLM + ", port: 8080"), "3:71: error: port 8080 is the gateway's own"),
    (engine(VLLM + ", port: 99999"), "3:71: error: a port is 1 to 65535"),
    (
        engine(VLLM + ", port: 9", VLLM.replace("name: a", "name: b") + ", port: 9"),
        "4:71: error: port 9 is another",
    ),
    (engine(VLLM + ", share: 1.5"), "3:72: error: `1.5` is not a share"),
    (engine(VLLM + ", gpu: -1"), "3:70: error: GPUs are counted from 0"),
    (engine(VLLM + ", args: [--n, 5]"), "3:77: error: expected `str`, got `int`"),
    (engine(EXTERNAL + ", timeouts: {idel: 5s}"), "3:89: error: unknown key `idel`; did you mean `idle`?"),
    (engine(EXTERNAL + ", timeouts: {idle: 0s}"), "3:95: error: must be larger"),
    (HEAD + "shadow: new.yaml", "3:1: error: `shadow` belongs into the policy's file"),
    (HEAD + "rollout: 10%", "3:1: error: `rollout` belongs into the policy's file"),
    (HEAD + "decision_log: {size: 1MiB}", "3:15: error: the key `path` is missing"),
    (HEAD + "decision_log: {path: ' '}", "3:22: error: a file: decisions.jsonl"),
    (HEAD + "decision_log: {path: d, size: 1KiB}", "3:31: error: must be larger: 64KiB at least"),
    (HEAD + "decision_log: {path: d, keep: 0}", "3:31: error: how many older files stay: 1 to 500"),
    (HEAD + "decision_log: {path: d, signals: some}", "3:34: error: "),
    (HEAD + "decision_log: {path: d, rotate: 3}", "3:25: error: unknown key `rotate`"),
]


@pytest.mark.parametrize(("text", "expected"), INVALID, ids=[expected[:60] for _, expected in INVALID])
def test_an_invalid_file_is_told_where_and_what(text: str, expected: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(expected)


def test_all_problems_are_told_at_once() -> None:
    text = engine(EXTERNAL.replace("precision", "precison")) + "wrokers: 1\nlisten: x\n"
    assert [problem.split(": error", 1)[0] for problem in problems(text)] == ["3:5", "3:62", "4:1", "5:9"]


def test_defaults() -> None:
    config = read(HEAD)
    assert (str(config.listen), str(config.admin)) == ("127.0.0.1:8080", "127.0.0.1:8081")
    assert config.tiers == ("fast", "exact")
    assert (config.policy, config.keys, config.workers) == ("default", None, 1)
    assert config.retries.attempts == 3
    assert config.retries.budget == 0.2
    assert config.bounds.body == 10 << 20
    assert config.shutdown_grace == 120
    health = config.health
    assert (health.every, health.down_after, health.up_after, health.stalled_after) == (2, 3, 1, 30)
    (spec,) = config.engines
    assert spec.served_model == "m"
    assert spec.timeouts == Timeouts(2, 120, 60, 1800)
    assert spec.api_key is None


def test_paths_are_relative_to_the_file() -> None:
    config = read(HEAD + "policy: policies/mine.yaml\nkeys: ../keys.yaml\n")
    assert config.policy == "/srv/dualgauge/policies/mine.yaml"
    assert config.keys == Path("/srv/keys.yaml")
    log = read(HEAD + "decision_log: {path: logs/d.jsonl}").decision_log
    assert log is not None
    assert (log.path, log.size, log.keep, log.signals) == ("/srv/dualgauge/logs/d.jsonl", 64 << 20, 8, "all")
    assert read(HEAD).decision_log is None
    assert read(HEAD + "policy: strict\n").policy == "strict"
    (spec,) = read(engine(VLLM.replace("model: x", "model: ./models/a"))).engines
    assert spec.model == "/srv/dualgauge/models/a"
    (spec,) = read(engine(VLLM.replace("model: x", "model: Qwen/Qwen2.5-7B"))).engines
    assert spec.model == "Qwen/Qwen2.5-7B"


def test_the_environment_is_expanded_in_values() -> None:
    config = read(HEAD + "admin_token: x-${TOKEN}\nlisten: 127.0.0.1:${PORT}\n", TOKEN="s3", PORT="9000")
    assert config.admin_token == "x-s3"
    assert config.listen.port == 9000


def test_a_collector_of_an_empty_variable_is_none() -> None:
    text = HEAD + "telemetry: {otlp: '${OTLP}'}\n"
    assert read(text, OTLP="").telemetry.otlp is None
    assert read(text, OTLP="http://h:4318").telemetry.otlp == "http://h:4318"


def test_an_expanded_value_cannot_become_structure() -> None:
    config = read(HEAD + "admin_token: ${T}\n", T="a, workers: 5 # {")
    assert (config.workers, config.admin_token) == (1, "a, workers: 5 # {")
    text = HEAD + "telemetry: {otlp: '${T}'}\n"
    with pytest.raises(ProblemsError, match="3:19: error"):
        read(text, T="http://h\nworkers: 5")


def test_launched_engines_get_ports_one_after_the_other() -> None:
    first, second = read(engine(VLLM, VLLM.replace("name: a", "name: b"))).engines
    assert (first.url, second.url) == ("http://127.0.0.1:8101", "http://127.0.0.1:8102")


def test_an_engines_own_timeouts_go_first() -> None:
    text = engine(EXTERNAL + ", timeouts: {idle: 5s}") + "timeouts: {idle: 9s, total: 1h}\n"
    assert read(text).engines[0].timeouts == Timeouts(2, 120, 5, 3600)


def test_an_engines_key_is_not_shown() -> None:
    assert "sk-secret" not in repr(read(engine(EXTERNAL + ", api_key: sk-secret")).engines)


def test_public_addresses_need_keys_and_a_token() -> None:
    config = read(HEAD + "listen: 0.0.0.0:80\nadmin: 0.0.0.0:81\nkeys: keys.yaml\nadmin_token: x\n")
    assert config.listen.url == "http://127.0.0.1:80"


def test_another_address_than_the_files_is_held_to_the_same() -> None:
    config = read(HEAD + "admin: 127.0.0.1:9\n")
    assert listening(config, HostPort("127.0.0.1", 7)).listen.port == 7
    for address, why in (
        ("0.0.0.0:7", "can be reached by others: add `keys"),
        ("127.0.0.1:9", "is `admin`'s"),
    ):
        with pytest.raises(ValueError, match=why):
            listening(config, HostPort.parse(address))
    keyed = read(HEAD + "keys: keys.yaml\n")
    assert str(listening(keyed, HostPort.parse("0.0.0.0:7")).listen) == "0.0.0.0:7"


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, True),
        ("127.9.9.9:80", "127.9.9.9", 80, True),
        ("[::1]:0", "::1", 0, True),
        ("localhost:80", "localhost", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("[::]:80", "::", 80, False),
        ("example.org:80", "example.org", 80, False),
    ],
)
def test_addresses(text: str, host: str, port: int, loopback: bool) -> None:
    address = HostPort.parse(text)
    assert (address.host, address.port, address.loopback) == (host, port, loopback)
    assert str(address) == text


@pytest.mark.parametrize("text", ["", ":", "a", "a:", ":80", "a:-1", "a:65536", "a:8o", "a:٨", "8080"])
def test_what_is_not_an_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        HostPort.parse(text)


def test_engines_that_take_turns_are_started_with_sleep_mode() -> None:
    engines = read(engine(VLLM, VLLM_EXACT) + "swap: {}\n").engines
    assert [each.args for each in engines] == [("--enable-sleep-mode",)] * 2
    given = read(engine(VLLM + ", args: [--enable_sleep_mode]", VLLM_EXACT) + "swap: {}\n").engines
    assert given[0].args == ("--enable_sleep_mode",)
    assert all(each.args == () for each in read(engine(VLLM, VLLM_EXACT)).engines)
