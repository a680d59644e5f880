import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import {
  SMOOTH_PACING,
  SmoothPacer,
  PacedStream,
  QoeState,
  Segmenter,
  smoothPacing,
  makePacer,
  qoeTarget,
  wantsPacing,
} from "./index.js";

const vectors = JSON.parse(readFileSync(new URL("../vectors/pacer.json", import.meta.url), "utf8"));

function assertClose(actual, expected, what) {
  const limit = vectors.tolerance * Math.max(1, Math.abs(expected));
  assert.ok(Math.abs(actual - expected) <= limit, `${what}: ${actual} is not ${expected}`);
}

function targetOf(vector) {
  return qoeTarget({ ttftS: vector.target.ttft_s, speedTokensPerS: vector.target.speed_tokens_per_s });
}

function replay(pacer, events) {
  for (const [kind, ...args] of events) {
    if (kind === "push") pacer.push(args[0], args[1], args[2], { paced: args[3] ?? true });
    else if (kind === "finish") pacer.finish(args[0]);
    else if (kind === "skip") pacer.skip(args[0]);
    else throw new Error(`unknown event ${kind}`);
  }
}

test("the vectors cover what they are meant to", () => {
  assert.equal(vectors.qoe.length, 35);
  assert.equal(vectors.thinking.length, 14);
  assert.equal(vectors.pacer.filter((c) => c.mode === "reading").length, 14);
  assert.ok(vectors.pacer.filter((c) => c.mode === "smooth").length >= 30);
});

for (const vector of vectors.qoe) {
  test(vector.name, () => {
    const state = new QoeState(targetOf(vector));
    vector.delivered_s.forEach((tS, i) => assertClose(state.deliver(tS), vector.displayed_s[i], `displayed[${i}]`));
    assertClose(state.delayS, vector.delay_s, "delay");
    assertClose(state.final(), vector.final, "final");
    for (const { t_s: tS, finished, qoe } of vector.at) assertClose(state.qoeAt(tS, { finished }), qoe, `at ${tS}`);
  });
}

for (const vector of vectors.thinking) {
  test(vector.name, () => {
    const pacer = makePacer("reading", targetOf(vector));
    const state = new QoeState(targetOf(vector));
    state.deliver(0);
    pacer.push(0, "", 1);
    for (const tS of vector.thought_s) {
      state.think(tS);
      pacer.push(tS, "", 0, { thinks: true });
    }
    vector.delivered_s.forEach((tS, i) => assertClose(state.deliver(tS), vector.displayed_s[i], `displayed[${i}]`));
    for (const tS of vector.delivered_s) pacer.push(tS, "a ", 1);
    assertClose(state.final(), vector.final, "final");
    for (const { t_s: tS, qoe } of vector.at) assertClose(state.qoeAt(tS), qoe, `at ${tS}`);
    pacer.finish(vector.at[0].t_s);
    assertClose(pacer.qoe, vector.final, "qoe");
    const shown = pacer.pop(Infinity).filter((item) => item.text !== "");
    shown.forEach((item, i) => assertClose(item.atS, vector.displayed_s[i], `instant of piece ${i}`));
  });
}

for (const vector of vectors.pacer) {
  test(vector.name, () => {
    const pacer = makePacer(vector.mode, targetOf(vector));
    replay(pacer, vector.events);
    const shown = pacer.pop(Infinity);
    assert.deepEqual(shown.map((item) => item.text), vector.shown.map(([text]) => text));
    shown.forEach((item, i) => assertClose(item.atS, vector.shown[i][1], `instant of piece ${i}`));
    assertClose(pacer.qoe, vector.qoe, "qoe");
    const { stallSeconds, receivedS, shownS } = pacer.stats();
    assertClose(stallSeconds, vector.stall_seconds, "stall seconds");
    assert.equal(receivedS, vector.events.findLast(([kind, , , numTokens]) => kind === "push" && numTokens > 0)[1]);
    assert.equal(shownS, shown.at(-1).atS);
    assert.equal(pacer.bufferedTokens, 0);
    assert.equal(pacer.bufferedChars, 0);
  });
}

for (const vector of vectors.segments) {
  test(`segments: ${vector.name}`, () => {
    const segmenter = new Segmenter();
    const fragments = vector.pieces.map((piece) => segmenter.feed(piece).map((f) => [f.text, f.startsUnit, f.paced]));
    assert.deepEqual(fragments, vector.fragments);
  });
}

/** A clock that jumps from timer to timer when nothing else runs. */
class FakeClock {
  #timers = new Map();
  #next = 0;
  timeS = 100;

  nowS = () => this.timeS;

  setTimer = (callback, delayS) => {
    this.#next += 1;
    this.#timers.set(this.#next, { atS: this.timeS + delayS, callback });
    return this.#next;
  };

  clearTimer = (timer) => this.#timers.delete(timer);

  sleep = (seconds) => new Promise((resolve) => this.setTimer(resolve, seconds));

  get numTimers() {
    return this.#timers.size;
  }

  /** Run a promise to its end in this clock's time. */
  async run(promise) {
    let done = false;
    const settled = promise.finally(() => (done = true));
    settled.catch(() => {});
    while (!done) {
      await new Promise((resolve) => setImmediate(resolve));
      if (done || this.#timers.size === 0) continue;
      const [timer, { atS, callback }] = [...this.#timers].reduce((a, b) => (b[1].atS < a[1].atS ? b : a));
      this.#timers.delete(timer);
      this.timeS = Math.max(this.timeS, atS);
      callback();
    }
    return settled;
  }
}

async function* pieces(clock, gapS, count, log = {}) {
  try {
    for (let i = 0; i < count; i += 1) {
      await clock.sleep(gapS);
      yield `w${i} `;
    }
  } finally {
    log.closed = true;
  }
}

async function collect(clock, stream) {
  const output = [];
  for await (const text of stream) output.push([clock.timeS, text]);
  return output;
}

test("a reading stream shows each token at its instant, to within the shortest timer", async () => {
  const clock = new FakeClock();
  const target = qoeTarget({ ttftS: 0.5, speedTokensPerS: 10 });
  const stream = new PacedStream(pieces(clock, 0.01, 20), makePacer("reading", target), { clock });
  const output = await clock.run(collect(clock, stream));
  assert.equal(output.length, 20);
  output.forEach(([atS, text], i) => {
    const lateS = atS - 100 - (0.5 + i / 10);
    assert.equal(text, `w${i} `);
    assert.ok(lateS >= -1e-9 && lateS <= 0.0021, `token ${i} was ${lateS} s late`);
  });
});

test("smooth mode draws at most 60 frames per second and keeps all text", async () => {
  const clock = new FakeClock();
  const log = {};
  const stream = new PacedStream(pieces(clock, 0.002, 300, log), makePacer("smooth"), { clock });
  const output = await clock.run(collect(clock, stream));
  assert.equal(output.map(([, text]) => text).join(""), Array.from({ length: 300 }, (_, i) => `w${i} `).join(""));
  for (let i = 1; i < output.length; i += 1) assert.ok(output[i][0] - output[i - 1][0] >= 1 / 60 - 1e-9);
  assert.ok(output.at(-1)[0] - 100 <= 0.6 + SMOOTH_PACING.drainS + 0.02);
  assert.ok(log.closed);
});

test("an error of the source comes after the text before it", async () => {
  const clock = new FakeClock();
  async function* failing() {
    yield "one ";
    yield "two ";
    throw new Error("lost");
  }
  const seen = [];
  const reading = (async () => {
    for await (const text of new PacedStream(failing(), makePacer("smooth"), { clock })) seen.push(text);
  })();
  await assert.rejects(clock.run(reading), /lost/);
  assert.equal(seen.join(""), "one two ");
});

test("leaving the loop early closes the source", async () => {
  const clock = new FakeClock();
  const log = {};
  const reading = (async () => {
    for await (const text of new PacedStream(pieces(clock, 0.1, 1000, log), makePacer("smooth"), { clock })) {
      if (text.includes("w3")) break;
    }
    await clock.sleep(1);
  })();
  await clock.run(reading);
  assert.ok(log.closed);
  assert.equal(clock.numTimers, 0);
});

test("stop shows what had arrived at once and ends", async () => {
  const clock = new FakeClock();
  const stream = new PacedStream(pieces(clock, 0.001, 1000), makePacer("reading"), { clock });
  const reading = (async () => {
    const stopping = clock.sleep(0.0505).then(() => stream.stop());
    const output = await collect(clock, stream);
    await stopping;
    return output;
  })();
  const output = await clock.run(reading);
  assert.deepEqual(output.map(([, text]) => text).join("").split(" ").length - 1, 50);
  assert.ok(output[0][0] - 100 < 0.06);
});

test("the source is not read further than the buffer's limit", async () => {
  const clock = new FakeClock();
  let numRead = 0;
  async function* endless() {
    for (;;) {
      numRead += 1;
      yield "0123456789";
    }
  }
  const stream = new PacedStream(endless(), makePacer("reading"), { clock, maxBufferedChars: 100 });
  const reading = (async () => {
    for await (const text of stream) if (text) break;
  })();
  await clock.run(reading);
  assert.ok(numRead <= 12, `read ${numRead} pieces`);
});

test("parameters out of range are refused by name", () => {
  assert.throws(() => qoeTarget({ ttftS: 0 }), /ttftS/);
  assert.throws(() => qoeTarget({ speedTokensPerS: Infinity }), /speedTokensPerS/);
  assert.throws(() => smoothPacing({ drainS: 0 }), /drainS/);
  assert.throws(() => smoothPacing({ drain: 1 }), /drain/);
  assert.throws(() => makePacer("fast"), /fast/);
  assert.equal(new SmoothPacer(qoeTarget(), { reserveS: 0 }).pacing.reserveS, 0);
});

test("without a browser nobody asks for reduced motion", () => {
  assert.equal(wantsPacing(), true);
});
