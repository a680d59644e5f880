import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { Cursor, Servers, checkKey } from "./cursor.js";
import { ProtocolError } from "./errors.js";
import { AnswerRecord, parseObject } from "./protocol.js";
import { Attempts, Failure, RETRY_POLICY, Resumes, RetryBudget, mayRetry, parseRetryAfter } from "./retry.js";
import { SseDecoder } from "./sse.js";

const vectors = JSON.parse(readFileSync(new URL("../vectors/sdk.json", import.meta.url), "utf8"));
const half = () => 0.5;

/** An object of the vectors with the names of this language. */
function camel(source = {}) {
  const rename = (name) => name.replace(/_(\w)/g, (_, letter) => letter.toUpperCase());
  return Object.fromEntries(Object.entries(source).map(([name, value]) => [rename(name), value]));
}

function decode(bytes, size = bytes.length || 1) {
  const decoder = new SseDecoder();
  const events = [];
  for (let at = 0; at < bytes.length; at += size) events.push(...decoder.feed(bytes.slice(at, at + size)));
  return [...events, ...decoder.close()].map(({ data, event, id }) => [data, event, id]);
}

for (const { raw, events } of vectors.sse) {
  test(`events of ${JSON.stringify(raw)}`, () => {
    const bytes = new TextEncoder().encode(raw);
    for (const size of [undefined, 1, 2, 3]) assert.deepEqual(decode(bytes, size), events);
  });
}

test("a chunk's memory may be used again", () => {
  const decoder = new SseDecoder();
  const chunk = new TextEncoder().encode("data: abc");
  assert.deepEqual([...decoder.feed(chunk)], []);
  chunk.fill(0);
  assert.equal([...decoder.feed(new TextEncoder().encode("\n\n"))][0].data, "abc");
});

test("sizes of lines and events are limited, and what is not UTF-8 is an error after the events before it", () => {
  const encode = (text) => new TextEncoder().encode(text);
  assert.throws(() => [...new SseDecoder(100).feed(encode(`data: ${"x".repeat(100)}`))], /longer than 100 bytes/);
  assert.throws(() => [...new SseDecoder(100).feed(encode("data: 12345\n".repeat(20)))], /larger than 100 bytes/);
  assert.equal([...new SseDecoder(100).feed(encode("data: 12345\n\n".repeat(1000)))].length, 1000);
  const seen = [];
  const bytes = new Uint8Array([...encode("data: good\n\ndata: "), 255, 10]);
  const feed = () => {
    for (const event of new SseDecoder().feed(bytes)) seen.push(event.data);
  };
  assert.throws(feed, ProtocolError);
  assert.deepEqual(seen, ["good"]);
});

for (const { status, headers, expected } of vectors.may_retry) {
  test(`whether ${status} with ${JSON.stringify(headers)} invites another try`, () => {
    assert.equal(mayRetry(status, new Headers(headers)), expected);
  });
}

for (const { headers, expected_s: expectedS } of vectors.retry_after) {
  test(`the wait of ${JSON.stringify(headers)}`, () => {
    assert.equal(parseRetryAfter(new Headers(headers), 30), expectedS);
  });
}

for (const { name, policy, is_resume: isResume, steps } of vectors.attempts) {
  test(name, () => {
    const whole = { ...RETRY_POLICY, ...camel(policy) };
    const attempts = new Attempts(whole, new RetryBudget(whole, 0), half, 0, { isResume });
    for (const step of steps) {
      const { nowS = 0, delayS, hasOtherServer = false, ...says } = camel(step);
      const failure = new Failure(new Error(), { mayRetry: true, ...says });
      assert.equal(attempts.nextDelayS(failure, nowS, { hasOtherServer }), delayS, JSON.stringify(step));
    }
  });
}

for (const { name, policy, steps } of vectors.resumes) {
  test(name, () => {
    const whole = { ...RETRY_POLICY, ...camel(policy) };
    const resumes = new Resumes(whole, new RetryBudget(whole, 0), half);
    for (const step of steps) {
      const { hasProgressed, delayS } = camel(step);
      assert.equal(resumes.nextDelayS(0, { hasProgressed }), delayS, JSON.stringify(step));
    }
  });
}

test("all requests of a client share its retries", () => {
  const budget = new RetryBudget(RETRY_POLICY, 0);
  const count = (nowS) => {
    let taken = 0;
    while (budget.take(nowS)) taken += 1;
    return taken;
  };
  assert.equal(count(0), 10);
  for (let i = 0; i < 20; i += 1) budget.noteRequest(0);
  assert.equal(count(0), 2);
  assert.equal(count(50), 5);
});

test("a request says who it is and how far it has come", () => {
  const cursor = new Cursor(checkKey("mine"));
  assert.deepEqual(cursor.headers(), { "Idempotency-Key": "mine", "x-request-id": cursor.requestId });
  cursor.lastEventId = "3-0011aabb";
  assert.equal(cursor.headers()["Last-Event-ID"], "3-0011aabb");
  assert.match(checkKey(), /^[0-9a-f]{32}$/);
  assert.notEqual(checkKey(), checkKey());
  for (const wrong of ["", "ü", "x".repeat(256), "a\nb", 7]) assert.throws(() => checkKey(wrong), /idempotencyKey/);
});

test("servers take turns, and one loss moves on once", () => {
  const servers = new Servers(["http://a", "http://b/", new URL("https://c:81/api/")]);
  assert.deepEqual(servers.urls, ["http://a/v1", "http://b/v1", "https://c:81/api"]);
  const first = servers.current;
  servers.leave(first);
  servers.leave(first); // another request found out as well
  assert.equal(servers.current, servers.urls[1]);
  servers.leave(servers.current);
  servers.leave(servers.current);
  assert.equal(servers.current, first);
});

test("a base URL that cannot be is refused, and no password is repeated", () => {
  for (const wrong of [[], undefined, "h:80", "127.0.0.1:8000", ["http://a", "ftp://b"], "http://"]) {
    assert.throws(() => new Servers(wrong), /baseUrl/);
  }
  assert.throws(() => new Servers("http://me:hidden@host"), (error) => /user/.test(error) && !/hidden/.test(error));
});

test("what is no JSON object is not quoted", () => {
  for (const text of ["secret", '"secret"', '["secret"]', "null", '{"secret": ']) {
    assert.throws(() => parseObject(text), (error) => error instanceof ProtocolError && !/secret/.test(error.stack));
  }
});

test("a record takes the first choice, and believes no odd number of tokens", () => {
  const record = new AnswerRecord();
  const take = (content, more) => record.takeChunk({ choices: [{ index: 0, delta: { content } }], ...more });
  assert.deepEqual(take("ab", { sluice: { n: 3 } }), { text: "ab", numTokens: 3, thinks: false });
  assert.deepEqual(take("c"), { text: "c", numTokens: 1, thinks: false });
  assert.deepEqual(take("", { sluice: { n: 2, qoe: 0.5 } }), { text: "", numTokens: 2, thinks: false });
  for (const n of [-1, 1.5, "2", true, 1e7]) assert.equal(take("d", { sluice: { n } }).numTokens, 1);
  assert.equal(take(""), null);
  assert.equal(record.takeChunk({ choices: [{ index: 1, delta: { content: "of another choice" } }] }), null);
  assert.equal(record.parts.join(""), "abcddddd");
  assert.deepEqual(record.serverStats, { qoe: 0.5 });
});
