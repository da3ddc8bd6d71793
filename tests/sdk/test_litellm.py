"""A session with LiteLLM's SDK, by its provider for any OpenAI endpoint and by its own for vLLM."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from tests.engines_real.pair import MODEL, until
from tests.sdk.conftest import Recovering
from tests.sdk.front import CITY, CODE, CRITICAL, KEY, LONG, PROSE, SCHEMA, SINGLE_KEY, SMALL_KEY, Front

# What LiteLLM makes pydantic say of LiteLLM's own types.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Items? .* `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields':DeprecationWarning"),
]

RETRIES = {"num_retries": 5, "retry_strategy": "exponential_backoff_retry"}
PROMPT = [{"role": "user", "content": PROSE}]


@pytest.fixture(scope="session")
def litellm() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import fetches one
        import litellm

    litellm.suppress_debug_info = True
    yield litellm
    # It keeps its clients, and their sockets, until the process ends.
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if not inspect.iscoroutinefunction(client.close):
            client.close()


@pytest.fixture(params=["openai", "hosted_vllm"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def arguments(front: Front, provider: str, model: str = MODEL, **more: Any) -> dict[str, Any]:
    common = {"api_base": front.url, "api_key": KEY, "messages": PROMPT, "max_tokens": 8, "max_retries": 0}
    return {"model": f"{provider}/{model}", **common, **more}


def test_a_completion(litellm: Any, front: Front, provider: str) -> None:
    reply = litellm.completion(**arguments(front, provider))
    assert reply.choices[0].message.role == "assistant"
    assert 0 < reply.usage.completion_tokens <= 8


def test_headers_tell_the_decision(litellm: Any, front: Front, provider: str) -> None:
    code = [{"role": "user", "content": CODE}]
    tiers = []
    for more in ({}, {"messages": code}, {"extra_headers": CRITICAL}):
        reply = litellm.completion(**{**arguments(front, provider), **more})
        headers = reply._hidden_params["additional_headers"]
        assert headers["llm_provider-x-request-id"] in reply.id
        assert headers["x-ratelimit-limit-requests"] == "1000"
        tiers.append(headers["llm_provider-x-dualgauge-tier"])
    assert tiers == ["fast", "exact", "exact"]


def test_a_stream_without_usage(litellm: Any, front: Front, provider: str) -> None:
    chunks = list(litellm.completion(**arguments(front, provider, stream=True)))
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert all(getattr(chunk, "usage", None) is None for chunk in chunks)


def test_a_stream_with_usage(litellm: Any, front: Front, provider: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**arguments(front, provider, **options)))
    assert 0 < chunks[-1].usage.completion_tokens <= 8


def test_tools_reach_the_engine(litellm: Any, front: Front, provider: str) -> None:
    """Only an engine that was given both notices that the choice is none of the tools."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    choice = {"type": "function", "function": {"name": "time"}}
    with pytest.raises(litellm.BadRequestError, match="does not match any of the specified `tools`"):
        litellm.completion(**arguments(front, provider, tools=[tool], tool_choice=choice))


def test_a_json_schema_binds_the_reply(litellm: Any, front: Front, provider: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    question = [{"role": "user", "content": "Is water wet? Answer in JSON."}]
    asked = arguments(front, provider, response_format=schema, max_tokens=64, temperature=0)
    reply = litellm.completion(**{**asked, "messages": question})
    assert json.loads(reply.choices[0].message.content)["answer"] in ("yes", "no")


def test_an_unknown_key(litellm: Any, lone: Front, provider: str) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**arguments(lone, provider, api_key="sk-wrong"))


def test_an_unknown_model(litellm: Any, lone: Front, provider: str) -> None:
    with pytest.raises(litellm.NotFoundError, match="does not exist here"):
        litellm.completion(**arguments(lone, provider, "no-such-model"))


def test_what_the_engine_refuses(litellm: Any, front: Front, provider: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**arguments(front, provider, temperature=-1))


def test_a_request_beyond_its_plan(litellm: Any, lone: Front, provider: str) -> None:
    with pytest.raises(litellm.RateLimitError, match="small"):
        litellm.completion(**arguments(lone, provider, api_key=SMALL_KEY, max_tokens=1000))


def test_no_engine(litellm: Any, lone: Front, provider: str) -> None:
    with pytest.raises(litellm.ServiceUnavailableError):
        litellm.completion(**arguments(lone, provider, extra_headers=CRITICAL))


@contextmanager
def once_refused(front: Front, then: Callable[[], None]) -> Iterator[None]:
    """Do something as soon as the gateway has refused a request."""
    before = front.refusals()

    def watch() -> None:
        until("a request is refused", lambda: front.refusals() > before, 30)
        then()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        yield
        watching.result()


def test_a_429_is_tried_again(litellm: Any, front: Front, provider: str) -> None:
    """The key's only slot is held by a stream, which ends once the second request was refused."""
    body = {"model": MODEL, "messages": PROMPT, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    key = {"authorization": f"Bearer {SINGLE_KEY}"}
    with httpx2.stream("POST", f"{front.url}/chat/completions", json=body, headers=key, timeout=60) as held:
        assert held.status_code == 200
        with once_refused(front, held.close):
            reply = litellm.completion(**arguments(front, provider, api_key=SINGLE_KEY, **RETRIES))
    assert reply.usage.completion_tokens > 0


def test_a_503_is_tried_again(litellm: Any, recovering: Recovering, provider: str) -> None:
    """The exact engine comes up once a critical request was refused."""
    with once_refused(recovering.front, recovering.up):
        asked = arguments(recovering.front, provider, extra_headers=CRITICAL, **RETRIES)
        reply = litellm.completion(**asked)
    assert reply._hidden_params["additional_headers"]["llm_provider-x-dualgauge-tier"] == "exact"
