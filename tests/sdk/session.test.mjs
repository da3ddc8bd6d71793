// A session with OpenAI's Node SDK. test_openai_node.py runs each test, and says in SESSION whom to talk to.
import assert from "node:assert/strict";
import net from "node:net";
import { pipeline } from "node:stream";
import { test } from "node:test";
import OpenAI from "openai";

const { front, late, lone, words } = JSON.parse(process.env.SESSION);
const messages = [{ role: "user", content: words.prose }];

/** A client that calls `on` with the status of each reply, those that the SDK tries again included. */
function client(gateway, { key = words.key, retries = 0, on = () => {} } = {}) {
  const watched = async (url, init) => {
    const reply = await fetch(url, init);
    await on(reply.status);
    return reply;
  };
  return new OpenAI({ baseURL: gateway, apiKey: key, maxRetries: retries, fetch: watched });
}

const ask = (more = {}) => ({ model: words.model, messages, max_tokens: 8, ...more });

test("models", async () => {
  const ids = [];
  for await (const model of client(lone).models.list()) ids.push(model.id);
  assert.deepEqual(ids, [words.model, `${words.model}:fast`, `${words.model}:exact`]);
});

test("completion", async () => {
  const reply = await client(front).chat.completions.create(ask());
  assert.equal(reply.choices[0].message.role, "assistant");
  assert.ok(reply.usage.completion_tokens > 0 && reply.usage.completion_tokens <= 8);
  assert.equal(reply.id, `chatcmpl-${reply._request_id}`);
});

test("raw headers", async () => {
  const tiers = [];
  const critical = { headers: { "x-criticality": "high" } };
  const code = ask({ messages: [{ role: "user", content: words.code }] });
  for (const [body, options] of [[ask(), {}], [code, {}], [ask(), critical]]) {
    const { response, request_id } = await client(front).chat.completions.create(body, options).withResponse();
    assert.equal(response.headers.get("x-request-id"), request_id);
    assert.equal(response.headers.get("x-ratelimit-limit-requests"), "1000");
    tiers.push(response.headers.get("x-dualgauge-tier"));
  }
  assert.deepEqual(tiers, ["fast", "exact", "exact"]);
});

test("stream without usage", async () => {
  const { data, response } = await client(front).chat.completions.create(ask({ stream: true })).withResponse();
  assert.equal(response.headers.get("x-dualgauge-tier"), "fast");
  const chunks = [];
  for await (const chunk of data) chunks.push(chunk);
  assert.ok(chunks.every((chunk) => chunk.choices.length === 1 && chunk.usage == null));
  assert.ok(["length", "stop"].includes(chunks.at(-1).choices[0].finish_reason));
});

test("stream with usage", async () => {
  const body = ask({ stream: true, stream_options: { include_usage: true } });
  const chunks = [];
  for await (const chunk of await client(front).chat.completions.create(body)) chunks.push(chunk);
  assert.deepEqual(chunks.filter((chunk) => chunk.usage != null), chunks.slice(-1));
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

test("tools", async () => {
  const reply = await client(front).chat.completions.create({
    model: words.model,
    messages: [{ role: "user", content: "What is the weather in Oslo?" }],
    tools: [{ type: "function", function: { name: "weather", parameters: words.city, strict: true } }],
    tool_choice: { type: "function", function: { name: "weather" } },
    max_tokens: 64,
  });
  const [call] = reply.choices[0].message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.function.arguments).city));
});

test("json schema", async () => {
  const reply = await client(front).chat.completions.create({
    model: words.model,
    messages: [{ role: "user", content: "Is water wet? Answer in JSON." }],
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: words.schema, strict: true } },
    max_tokens: 64,
    temperature: 0,
  });
  assert.ok(["yes", "no"].includes(JSON.parse(reply.choices[0].message.content).answer));
});

test("responses", async () => {
  const stream = await client(front).responses.create({
    model: words.model,
    input: words.prose,
    max_output_tokens: 6,
    temperature: 0,
    stream: true,
  });
  const types = [];
  for await (const event of stream) types.push(event.type);
  assert.equal(types[0], "response.created");
  assert.ok(types.includes("response.output_text.delta"));
  assert.ok(["response.completed", "response.incomplete"].includes(types.at(-1)));
});

test("unknown key", async () => {
  await assert.rejects(client(lone, { key: "sk-wrong" }).chat.completions.create(ask()), (error) => {
    assert.ok(error instanceof OpenAI.AuthenticationError);
    assert.equal(error.code, "invalid_api_key");
    return true;
  });
});

test("unknown model", async () => {
  await assert.rejects(client(lone).chat.completions.create(ask({ model: "gpt-4o" })), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
});

test("wrong type", async () => {
  await assert.rejects(client(lone).chat.completions.create(ask({ max_tokens: "many" })), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "max_tokens");
    return true;
  });
});

test("beyond the plan", async () => {
  const small = client(lone, { key: words.small_key });
  await assert.rejects(small.chat.completions.create(ask({ max_tokens: 1000 })), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.equal(error.code, "request_exceeds_limit");
    return true;
  });
});

test("a 429 is tried again", async () => {
  // The key's only slot is held by a stream, which ends once the second request was refused.
  const holder = client(front, { key: words.single_key });
  const held = await holder.chat.completions.create(ask({ stream: true, max_tokens: words.long, ignore_eos: true }));
  const statuses = [];
  const on = (status) => {
    statuses.push(status);
    held.controller.abort();
  };
  const reply = await client(front, { key: words.single_key, retries: 3, on }).chat.completions.create(ask());
  assert.equal(statuses[0], 429);
  assert.equal(statuses.at(-1), 200);
  assert.ok(reply.usage.completion_tokens > 0);
});

test("a 503 is tried again", async () => {
  // The exact engine's port opens once a critical request was refused.
  const { hostname, port } = new URL(late.engine);
  const open = [];
  const server = net.createServer((socket) => {
    const engine = net.connect(Number(port), hostname);
    open.push(socket, engine);
    pipeline(socket, engine, socket, () => {});
  });
  const statuses = [];
  const on = async (status) => {
    statuses.push(status);
    if (!server.listening) await new Promise((up) => server.listen(late.port, "127.0.0.1", up));
  };
  try {
    const critical = { headers: { "x-criticality": "high" } };
    const { response } = await client(late.gateway, { retries: 3, on })
      .chat.completions.create(ask(), critical)
      .withResponse();
    assert.equal(statuses[0], 503);
    assert.equal(response.headers.get("x-dualgauge-tier"), "exact");
  } finally {
    server.close();
    open.forEach((socket) => socket.destroy());
  }
});
