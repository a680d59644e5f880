import assert from "node:assert/strict";
import { test } from "node:test";

import { SluiceClient } from "./index.js";

const QUICK = { retry: { firstBackoffS: 0.001, maxBackoffS: 0.004 } };
const delta = (content) => ({ choices: [{ index: 0, delta: { content } }] });
const FINISH = { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] };

/**
 * A client whose WebSockets are scripted, and what was sent over each.
 *
 * @param onMessage called with each message, the number of its socket and the socket, which has `say` and `close`.
 * @param options of the client; `onOpen`: called with a socket in place of opening it.
 */
function scripted(onMessage, { onOpen = (socket) => socket.open(), ...options } = {}) {
  const sockets = [];
  class Socket extends EventTarget {
    readyState = 0;
    sent = [];

    constructor(url) {
      super();
      this.url = url;
      this.number = sockets.push(this) - 1;
      setTimeout(() => onOpen(this), 0);
    }

    open() {
      this.readyState = 1;
      this.dispatchEvent(new Event("open"));
    }

    send(text) {
      const message = JSON.parse(text);
      this.sent.push(message);
      onMessage(message, this);
    }

    say(message) {
      const data = typeof message === "string" ? message : JSON.stringify(message);
      setTimeout(() => this.dispatchEvent(Object.assign(new Event("message"), { data })), 0);
    }

    close(code = 1000) {
      if (this.readyState === 3) return;
      this.readyState = 3;
      this.dispatchEvent(Object.assign(new Event("close"), { code }));
    }
  }
  const client = new SluiceClient("http://there", {
    model: "demo", transport: "websocket", WebSocket: Socket, limits: QUICK, ...options,
  });
  return { client, sockets };
}

/** Begin an answer, if it is asked for, with the event whose id is "1-a". */
function begin({ type, id, last_event_id: lastEventId }, socket) {
  if (type !== "request") return false;
  socket.say({ type: "start", id, request_id: "r", resumable: true });
  if (!lastEventId) socket.say({ type: "event", id, event_id: "1-a", data: delta("so ") });
  return true;
}

function end({ id }, socket) {
  for (const data of [delta("far"), FINISH]) socket.say({ type: "event", id, data });
  socket.say({ type: "done", id });
}

const LOSSES = {
  "a connection that is closed": (_message, socket) => setTimeout(() => socket.close(1006), 5),
  "a message that is none": (_message, socket) => socket.say("hidden"),
  "a message without data": ({ id }, socket) => socket.say({ type: "event", id, data: [] }),
  "a message that is too large": ({ id }, socket) => socket.say({ type: "event", id, data: delta("x".repeat(2000)) }),
  "silence": () => {},
};
for (const [name, lose] of Object.entries(LOSSES)) {
  test(`an answer goes on over another connection after ${name}`, async () => {
    const { client, sockets } = scripted((message, socket) => {
      if (begin(message, socket)) (socket.number === 0 ? lose : end)(message, socket);
    }, { limits: { ...QUICK, maxEventBytes: 1000, idleTimeoutS: 0.1 } });
    const answer = client.chat("hi", { idempotencyKey: "mine" });
    assert.equal(await answer.read(), "so far");
    assert.deepEqual([answer.requestId, answer.finishReason], ["r", "stop"]);
    assert.deepEqual(sockets.map(({ url }) => url), ["ws://there/v1/ws", "ws://there/v1/ws"]);
    const asked = sockets.map(({ sent }) => sent[0]);
    assert.deepEqual(asked.map((message) => message.idempotency_key), ["mine", "mine"]);
    assert.deepEqual(asked.map((message) => message.last_event_id), [null, "1-a"]);
    assert.equal(sockets[0].readyState, 3, "the first one is closed");
    await client.close();
    assert.equal(sockets[1].readyState, 3);
  });
}

test("a connection on which other answers come is not silent", async () => {
  const { client, sockets } = scripted((message, socket) => {
    if (!begin(message, socket) || message.body.messages[0].content !== "talk") return;
    let numLeft = 10;
    const timer = setInterval(() => {
      socket.say({ type: "event", id: message.id, data: delta("x") });
      numLeft -= 1;
      if (numLeft > 0) return;
      clearInterval(timer);
      for (const { id } of socket.sent) end({ id }, socket);
    }, 100);
  }, { limits: { ...QUICK, idleTimeoutS: 0.6 } });
  const texts = await Promise.all(["wait", "talk"].map((what) => client.chat(what).read()));
  assert.deepEqual(texts, ["so far", `so ${"x".repeat(10)}far`]);
  assert.equal(sockets.length, 1);
  await client.close();
});

test("a server that took a request and is silent is not asked again", async () => {
  const { client, sockets } = scripted(() => {}, { limits: { ...QUICK, idleTimeoutS: 0.05 } });
  await assert.rejects(client.chat("hi").read(), { name: "APIConnectionError", message: /nothing came for 0.05 s/ });
  assert.equal(sockets.length, 1);
});

test("a handshake that fails or does not end is tried again, and then told with the way out", async () => {
  const fail = (socket) => {
    socket.dispatchEvent(new Event("error"));
    socket.close(1006);
  };
  for (const [onOpen, pattern] of [[fail, /handshake failed/], [() => {}, /not open after 0.02 s/]]) {
    const { client, sockets } = scripted(() => {}, { onOpen, limits: { ...QUICK, connectTimeoutS: 0.02 } });
    await assert.rejects(client.chat("hi").read(), ({ name, message }) => {
      return name === "APIConnectionError" && pattern.test(message) && /transport "http"/.test(message);
    });
    assert.equal(sockets.length, 3);
    assert.ok(sockets.every(({ readyState }) => readyState === 3));
  }
});

test("refusals are those of HTTP", async () => {
  const refused = (more) => (message, socket) => {
    const error = { message: "no", code: "queue_full", type: "rate_limit_error" };
    socket.say({ type: "error", id: message.id, error, status: 429, ...more });
    socket.say({ type: "done", id: message.id });
  };
  for (const [more, numAsked] of [[{ retry_after_ms: 2 }, 3], [{ should_retry: false }, 1]]) {
    const { client, sockets } = scripted(refused(more));
    await assert.rejects(client.chat("hi").read(), { name: "APIStatusError", status: 429, code: "queue_full" });
    assert.equal(sockets[0].sent.length, numAsked);
  }
  const { client } = scripted(({ id }, socket) => socket.say({ type: "done", id }));
  await assert.rejects(client.chat("hi").read(), { name: "ProtocolError" });
});

test("closing the client ends the answers of its connections", async () => {
  const { client, sockets } = scripted((message, socket) => begin(message, socket));
  const answer = client.chat("hi", { pace: "off" });
  await answer.next();
  await client.close();
  await assert.rejects(answer.next(), { name: "ConnectionLostError", message: /the client is closed/ });
  assert.equal(sockets.length, 1);
  await assert.rejects(client.chat("hi").read(), /the client is closed/);
});
