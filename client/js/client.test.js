import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { test } from "node:test";

import {
  APIConnectionError,
  APIStatusError,
  APIStreamError,
  ConnectionLostError,
  IncompleteStreamError,
  ProtocolError,
  SluiceClient,
  SluiceClientError,
} from "./index.js";

const WORDS = ["Grüße, ", "中文 ", "👩\u200d👩 ", "and ", "the ", "end."];
const FAST = { ttftS: 0.001, speedTokensPerS: 10_000 };
const QUICK = { retry: { firstBackoffS: 0.001, maxBackoffS: 0.004 } };

const chunk = (fields) => ({ id: "chat-1", model: "demo", ...fields });
const delta = (content, more) => chunk({ choices: [{ index: 0, delta: { content }, finish_reason: null }], ...more });
const FINISH = chunk({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] });
const USAGE = chunk({ choices: [], usage: { total_tokens: 9 }, sluice: { qoe: 0.97, ttft_s: 0.2, tokens: 6 } });
const events = (...data) =>
  data.map((item) => `data: ${typeof item === "string" ? item : JSON.stringify(item)}\n\n`).join("");
const WHOLE = events(...WORDS.map((word) => delta(word)), FINISH, USAGE, "[DONE]");

/** A reply of event-stream bytes, then the end, a lost connection, or silence. */
function stream(text, { lose = false, hang = false, size = 1 << 20, headers = {} } = {}) {
  return async (_request, response) => {
    response.writeHead(200, { "content-type": "text/event-stream", ...headers });
    const bytes = Buffer.from(text);
    for (let at = 0; at < bytes.length; at += size) {
      await new Promise((resolve) => response.write(bytes.subarray(at, at + size), resolve));
    }
    if (lose) response.destroy();
    else if (!hang) response.end();
  };
}

const say = (body, status = 200, headers = {}) => (_request, response) => {
  response.writeHead(status, headers);
  response.end(typeof body === "string" ? body : JSON.stringify(body));
};
const refuse = (status, headers) => {
  return say({ error: { message: "no", type: "overloaded", code: "too_many" } }, status, headers);
};

/** Run a test against a server that answers each POST with the next reply, and with the last one again. */
async function serving(replies, work, options = {}) {
  const posts = [];
  const server = createServer(async (request, response) => {
    if (request.method === "GET") {
      say({ data: [{ id: "demo" }, { id: "other" }] })(request, response);
      return;
    }
    let text = "";
    for await (const part of request) text += part;
    const { url: path, headers } = request;
    const post = { path, headers, body: text && JSON.parse(text), closed: once(response, "close") };
    posts.push(post);
    await replies[Math.min(posts.length, replies.length) - 1](request, response, post);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const url = `http://127.0.0.1:${server.address().port}`;
  const client = new SluiceClient(url, { limits: QUICK, random: () => 0.5, ...options });
  try {
    await work(client, posts, url);
  } finally {
    await client.close();
    server.closeAllConnections();
    server.close();
  }
}

async function collect(answer) {
  const seen = [];
  for await (const text of answer) seen.push(text);
  return seen.join("");
}

for (const pace of ["reading", "smooth", "off"]) {
  test(`a chat streams its text and then knows all about it: ${pace}`, async () => {
    await serving([stream(WHOLE, { headers: { "x-request-id": "r-7" } })], async (client, posts) => {
      const answer = client.chat([{ role: "user", content: "hi" }], { pace, qoe: FAST, max_tokens: 9 });
      assert.equal(await collect(answer), WORDS.join(""));
      assert.equal(answer.text, WORDS.join(""));
      assert.equal(answer.finishReason, "stop");
      assert.deepEqual(answer.usage, { total_tokens: 9 });
      assert.deepEqual([answer.requestId, answer.model], ["r-7", "demo"]);
      assert.deepEqual(answer.serverStats, { qoe: 0.97, ttft_s: 0.2, tokens: 6 });
      assert.ok(answer.qoe >= 0 && answer.qoe <= 1 && answer.ttftS > 0 && answer.stallSeconds >= 0);
      assert.equal(answer.stats.bufferedTokens, 0);
      const [{ path, headers, body }] = posts;
      assert.equal(path, "/v1/chat/completions");
      assert.equal(headers.authorization, "Bearer secret");
      assert.match(headers["idempotency-key"], /^[0-9a-f]{32}$/);
      assert.deepEqual(body, {
        model: "demo",
        messages: [{ role: "user", content: "hi" }],
        max_tokens: 9,
        stream: true,
        stream_options: { include_usage: true },
        qoe: { ttft_s: 0.001, speed_tokens_per_s: 10_000 },
      });
    }, { apiKey: "secret", model: "demo" });
  });
}

test("chunks cut anywhere, keep-alives and line ends change nothing", async () => {
  const raw = `: hello\r\n\r\n${WHOLE.replaceAll("\n\n", "\r\n\r\n: keep-alive\r\n\r\n")}`;
  for (const size of [1, 7]) {
    await serving([stream(raw, { size })], async (client) => {
      assert.equal(await client.chat("hi", { model: "demo" }).read(), WORDS.join(""));
    });
  }
});

test("completions stream text and take token ids", async () => {
  const choices = (text, finishReason) => ({ id: "c", choices: [{ index: 0, text, finish_reason: finishReason }] });
  await serving([stream(events(choices("a ", null), choices("b", "length")))], async (client, posts) => {
    const answer = client.complete([1, 2, 3], { model: "demo", pace: "off" });
    assert.equal(await collect(answer), "a b");
    assert.deepEqual([answer.finishReason, answer.requestId, answer.usage], ["length", "c", null]);
    assert.equal(posts[0].path, "/v1/completions");
    assert.deepEqual(posts[0].body.prompt, [1, 2, 3]);
    assert.ok(!("qoe" in posts[0].body));
  });
});

test("tool calls, reasoning and log-probabilities are collected and not displayed", async () => {
  const part = (fields) => chunk({ choices: [{ index: 0, ...fields }] });
  const raw = events(
    part({ delta: { reasoning_content: "hm, " } }),
    { ...part({ delta: { reasoning: "yes" }, logprobs: { content: [{ token: "x" }] } }), sluice: { n: 3 } },
    part({ delta: { tool_calls: [{ index: 0, id: "t1", function: { name: "f", arguments: "" } }] } }),
    { ...part({ delta: { tool_calls: [{ index: 0, function: { arguments: '{"a":1}' } }] } }), sluice: { n: 2 } },
    part({ delta: {}, finish_reason: "tool_calls", logprobs: { tokens: ["y"] } }),
  );
  await serving([stream(raw)], async (client) => {
    const answer = client.chat("hi");
    assert.equal(await answer.read(), "");
    assert.equal(answer.reasoning, "hm, yes");
    assert.equal(answer.stats.receivedS, null);
    assert.deepEqual(answer.toolCalls, [{ id: "t1", type: "function", function: { name: "f", arguments: '{"a":1}' } }]);
    assert.deepEqual(answer.logprobs, [{ token: "x" }, { tokens: ["y"] }]);
  });
});

const CUTS = [
  [events({ error: { message: "lost it", type: "server_error", code: "lost" } }), {}, APIStreamError, /lost it/],
  [events({ error: "plain" }), {}, APIStreamError, /plain/],
  ["", { lose: true }, ConnectionLostError, /broke off/],
  ["", {}, IncompleteStreamError, /finish reason/],
  [events("[DONE]"), {}, IncompleteStreamError, /finish reason/],
  ['data: {"choices": [{"del', {}, ProtocolError, /not JSON/],
  [events("[1, 2]"), {}, ProtocolError, /not an object/],
  [events({ choices: 3 }), {}, ProtocolError, /choices/],
  [events(chunk({ choices: [{ index: 0, delta: { content: 5 } }] })), {}, ProtocolError, /content/],
];
for (const [tail, how, type, pattern] of CUTS) {
  test(`an answer that is cut throws after the text that came: ${type.name}, ${pattern.source}`, async () => {
    for (const pace of ["reading", "smooth", "off"]) {
      await serving([stream(events(delta("so "), delta("far")) + tail, how)], async (client, posts) => {
        const answer = client.chat("hi", { pace, qoe: FAST });
        let seen = "";
        const reading = (async () => {
          for await (const text of answer) seen += text;
        })();
        await assert.rejects(reading, (error) => {
          assert.ok(error instanceof type && error instanceof SluiceClientError && error.name === type.name);
          assert.match(error.message, pattern);
          if (error.code === "lost") assert.deepEqual([error.kind, error.requestId], ["server_error", "chat-1"]);
          return true;
        });
        assert.deepEqual([seen, answer.text, answer.finishReason], ["so far", "so far", null]);
        assert.equal(posts.length, 1, "no retry after the first token");
      });
    }
  });
}

test("a connection lost after the finish reason loses nothing", async () => {
  await serving([stream(events(delta("all"), FINISH), { lose: true })], async (client) => {
    assert.equal(await client.chat("hi").read(), "all");
  });
});

test("a server that repeats the key is asked again with the last event, and no other is", async () => {
  const begun = "id: 1-a\ndata: " + JSON.stringify(delta("so ")) + "\n\n";
  const rest = "id: 2-b\n" + events(delta("far"), FINISH, "[DONE]");
  const repeat = (text, how) => (request, response) => {
    const headers = { "idempotency-key": request.headers["idempotency-key"] };
    return stream(text, { ...how, headers })(request, response);
  };
  for (const how of [{ lose: true }, {}]) {
    await serving([repeat(begun, how), repeat(rest)], async (client, posts) => {
      assert.equal(await client.chat("hi", { idempotencyKey: "mine" }).read(), "so far");
      assert.deepEqual(posts.map(({ headers }) => headers["idempotency-key"]), ["mine", "mine"]);
      assert.deepEqual(posts.map(({ headers }) => headers["last-event-id"]), [undefined, "1-a"]);
      assert.deepEqual(posts[0].body, posts[1].body);
    });
  }
  await serving([stream(begun, { lose: true }), stream(rest)], async (client, posts) => {
    await assert.rejects(client.chat("hi").read(), ConnectionLostError);
    assert.equal(posts.length, 1);
  });
  await serving([repeat(begun, { lose: true }), stream(rest)], async (client) => {
    const answer = client.chat("hi");
    await assert.rejects(answer.read(), /cannot go on with it/);
    assert.equal(answer.text, "so ");
  });
  await serving([repeat(begun, { lose: true }), refuse(409, { "x-should-retry": "false" })], async (client) => {
    await assert.rejects(client.chat("hi").read(), /could not be resumed: no/);
  });
  const draining = begun + events({ error: { message: "draining", code: "draining" } }, "[DONE]");
  await serving([repeat(draining), repeat(rest)], async (client) => {
    assert.equal(await client.chat("hi").read(), "so far");
  });
});

test("silence longer than the limit is a lost connection, and is not asked again before the first token", async () => {
  const options = { limits: { ...QUICK, idleTimeoutS: 1 } };
  await serving([stream(events(delta("so far")), { hang: true })], async (client) => {
    await assert.rejects(client.chat("hi").read(), { name: "ConnectionLostError", message: /for 1 s/ });
  }, options);
  await serving([() => {}], async (client, posts) => {
    await assert.rejects(client.chat("hi").read(), { name: "APIConnectionError", message: /for 1 s/ });
    assert.equal(posts.length, 1);
  }, options);
});

test("an event or a reply larger than the limit is refused", async () => {
  await serving([stream(events(delta("x".repeat(2000)), FINISH))], async (client) => {
    await assert.rejects(client.chat("hi").read(), /1000 bytes/);
    await assert.rejects(client.chatOnce("hi"), /500 bytes/);
  }, { limits: { maxEventBytes: 1000, maxBodyBytes: 500 } });
});

test("overload is retried before the first token, and the server's own error comes in the end", async () => {
  for (const status of [429, 503]) {
    await serving([refuse(status), refuse(status, { "retry-after": "0.01" }), stream(WHOLE)], async (client, posts) => {
      assert.equal(await client.chat("hi").read(), WORDS.join(""));
      assert.equal(posts.length, 3);
      assert.equal(new Set(posts.map(({ headers }) => headers["idempotency-key"])).size, 1);
    });
  }
  await serving([refuse(429, { "retry-after": "0.002", "x-request-id": "r9" })], async (client, posts) => {
    await assert.rejects(client.chat("hi").read(), (error) => {
      const { status, code, kind, requestId, retryAfterS } = error;
      assert.ok(error instanceof APIStatusError);
      assert.deepEqual([status, code, kind, requestId, retryAfterS], [429, "too_many", "overloaded", "r9", 0.002]);
      assert.equal(String(error), "APIStatusError: 429: no");
      return true;
    });
    assert.equal(posts.length, 3);
  });
});

test("other refusals are not retried, and a redirect is not followed", async () => {
  const refusals = [
    [refuse(400), 400], [refuse(500), 500], [refuse(307, { location: "/elsewhere" }), 307],
    [refuse(503, { "x-should-retry": "false" }), 503], [refuse(429, { "retry-after": "3600" }), 429],
  ];
  for (const [reply, status] of refusals) {
    await serving([reply], async (client, posts) => {
      await assert.rejects(client.chat("hi").read(), { name: "APIStatusError", status });
      assert.equal(posts.length, 1);
    });
  }
  await serving([say("<html>bad gateway</html>", 502)], async (client) => {
    await assert.rejects(client.chat("hi").read(), /Bad Gateway/);
  });
});

test("a server that is not there is tried a bounded number of times, and named", async () => {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  const client = new SluiceClient(`http://127.0.0.1:${port}`, { limits: QUICK });
  await assert.rejects(client.chat("hi").read(), (error) => {
    return error instanceof APIConnectionError && error.message.includes(`127.0.0.1:${port}`);
  });
  await serving([stream(WHOLE)], async (_client, posts, url) => {
    const both = new SluiceClient([`http://127.0.0.1:${port}`, url], { limits: QUICK });
    for (let i = 0; i < 20; i += 1) assert.equal(await both.chat("hi", { model: "demo" }).read(), WORDS.join(""));
    assert.equal(posts.length, 20);
    await both.close();
  });
});

test("a connection that closes before the headers is retried", async () => {
  await serving([(request) => request.socket.destroy(), stream(WHOLE)], async (client, posts) => {
    assert.equal(await client.chat("hi").read(), WORDS.join(""));
    assert.equal(posts.length, 2);
  });
});

const LEAVING = {
  break: null,
  close: (answer) => answer.close(),
  return: (answer) => answer.return(),
  stop: (answer) => answer.stop(),
  abort: (_answer, controller) => controller.abort(new Error("enough")),
  client: (_answer, _controller, client) => client.close(),
};
for (const [name, leave] of Object.entries(LEAVING)) {
  test(`an answer left early closes its connection: ${name}`, async () => {
    await serving([stream(events(...WORDS.map((word) => delta(word))), { hang: true })], async (client, posts) => {
      const controller = new AbortController();
      const answer = client.chat("hi", { signal: controller.signal });
      let shown = "";
      const reading = (async () => {
        for await (const text of answer) {
          shown += text;
          if (answer.text !== WORDS.join("")) continue;
          if (name === "break") break;
          await leave(answer, controller, client);
        }
      })();
      if (name === "abort") await assert.rejects(reading, /enough/);
      else if (name === "client") await assert.rejects(reading, ConnectionLostError);
      else await reading;
      await posts[0].closed;
      assert.equal(answer.finishReason, null);
      if (name === "stop" || name === "client") assert.equal(shown, WORDS.join(""));
      assert.equal((await answer.next().catch(() => ({ done: true }))).done, true);
    });
  });
}

test("an answer that is ended while the reader waits ends the wait", async () => {
  for (const leave of [(answer) => answer.stop(), (answer) => answer.close(), (_, controller) => controller.abort()]) {
    await serving([stream("", { hang: true })], async (client, posts) => {
      const controller = new AbortController();
      const answer = client.chat("hi", { model: "demo", signal: controller.signal });
      const waiting = answer.next().catch((error) => error.name);
      while (posts.length === 0) await new Promise((resolve) => setTimeout(resolve, 2));
      leave(answer, controller);
      const result = await waiting;
      assert.ok(result === "AbortError" || result.done);
      await posts[0].closed;
    });
  }
});

test("an answer that is ended before its first use sends nothing", async () => {
  await serving([stream(WHOLE)], async (client, posts) => {
    for (const end of ["close", "stop", "cancel"]) {
      const answer = client.chat("hi", { model: "demo" });
      await answer[end]();
      assert.equal(await collect(answer), "");
    }
    const aborted = client.chat("hi", { model: "demo", signal: AbortSignal.abort() });
    await assert.rejects(collect(aborted), { name: "AbortError" });
    await assert.rejects(client.chatOnce("hi", { model: "demo", signal: AbortSignal.abort() }), { name: "AbortError" });
    assert.equal(posts.length, 0);
  });
});

test("the server is told of a cancellation under the request's id", async () => {
  const replies = [stream(events(delta("so far")), { hang: true }), say({ status: "cancelled" })];
  await serving(replies, async (client, posts) => {
    const answer = client.chat("hi");
    let shown = "";
    for await (const text of answer) {
      shown += text;
      await answer.cancel();
    }
    assert.equal(shown, "so far");
    assert.equal(posts[1].path, `/v1/requests/${posts[0].headers["x-request-id"]}/cancel`);
    assert.equal(posts[1].body, "");
  });
  await serving([replies[0], refuse(404)], async (client) => {
    const answer = client.chat("hi");
    await answer.next();
    await assert.rejects(answer.cancel(), { status: 404 });
    await collect(answer);
    assert.equal(answer.text, "so far");
  });
});

test("a signal that is given to many answers keeps none of them", async () => {
  const signal = new AbortController().signal;
  let numListening = 0;
  for (const [method, step] of [["addEventListener", 1], ["removeEventListener", -1]]) {
    const plain = signal[method].bind(signal);
    signal[method] = (...args) => {
      numListening += step;
      plain(...args);
    };
  }
  await serving([stream(WHOLE)], async (client) => {
    await client.chat("hi", { signal }).read();
    await client.chatOnce("hi", { signal }).catch(() => {});
    for await (const _ of client.chat("hi", { signal })) break;
    assert.equal(numListening, 0);
  });
});

test("replies that are not streamed", async () => {
  const second = { index: 1, message: { content: "b" } };
  const first = { index: 0, message: { content: "a" }, logprobs: { content: [] }, finish_reason: "stop" };
  const replies = [
    say({ id: "c-1", choices: [second, first], usage: { total_tokens: 4 } }),
    say({ id: "c-2", choices: [{ index: 0, text: "yes", finish_reason: "length" }] }),
    say({ choices: [] }),
  ];
  await serving(replies, async (client, posts) => {
    assert.deepEqual(await client.chatOnce("hi", { n: 2, logprobs: true, qoe: FAST }), {
      text: "a", finishReason: "stop", usage: { total_tokens: 4 }, requestId: "c-1", toolCalls: [], texts: ["a", "b"],
      logprobs: { content: [] },
    });
    const { text, texts, finishReason, requestId } = await client.completeOnce("once");
    assert.deepEqual([text, texts, finishReason, requestId], ["yes", ["yes"], "length", "c-2"]);
    await assert.rejects(client.chatOnce("hi"), /no choice/);
    assert.deepEqual(posts.map(({ body }) => [body.stream, body.model]), Array(3).fill([false, "demo"]));
    assert.deepEqual(await client.models(), ["demo", "other"]);
  });
});

test("JSON instead of a stream is refused", async () => {
  await serving([say({ choices: [] }, 200, { "content-type": "application/json" })], async (client) => {
    await assert.rejects(client.chat("hi").read(), /event stream/);
  });
});

test("connections are used again after a whole answer, and one that does not end holds nothing up", async () => {
  const ports = new Set();
  const counted = async (request, response, post) => {
    ports.add(request.socket.remotePort);
    await stream(WHOLE)(request, response, post);
  };
  await serving([counted], async (client) => {
    for (let i = 0; i < 8; i += 1) await client.chat("hi").read();
    assert.ok(ports.size <= 2, `${ports.size} connections`);
  }, { limits: { endTimeoutS: 5 } });
  await serving([stream(WHOLE, { hang: true })], async (client, posts) => {
    assert.equal(await client.chat("hi").read(), WORDS.join(""));
    await posts[0].closed;
  }, { limits: { endTimeoutS: 0.01 } });
});

test("misuse is told at once, and no secret is repeated", () => {
  const url = "http://127.0.0.1:1";
  const client = new SluiceClient(url);
  assert.throws(() => client.chat("hi", { n: 2 }), /one choice/);
  assert.throws(() => client.chat("hi", { pace: "fast" }), /mode/);
  assert.throws(() => client.chat("hi", { qoe: { ttft_s: 1 } }), /ttft_s; there are ttftS/);
  assert.throws(() => client.chat("hi", { idempotencyKey: "a\nhidden" }), (error) => !/hidden/.test(error));
  for (const apiKey of ["a\nhidden", "hidden ü", "", 7]) {
    assert.throws(() => new SluiceClient(url, { apiKey }), (error) => /apiKey/.test(error) && !/hidden/.test(error));
  }
  assert.throws(() => new SluiceClient(url, { api_key: "x" }), /api_key; there are apiKey/);
  assert.throws(() => new SluiceClient(url, { limits: { idle: 1 } }), /limits has no idle/);
  assert.throws(() => new SluiceClient(url, { limits: { retry: { maxRetries: -1 } } }), /maxRetries/);
  assert.throws(() => new SluiceClient(url, { transport: "smoke" }), /transport/);
  assert.throws(() => new SluiceClient("127.0.0.1:8000"), /baseUrl/);
});
