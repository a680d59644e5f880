/** Shows any asynchronous stream of text at a pacer's pace; as sluice_client/paced_stream.py. */

import { SmoothPacer } from "./smooth_pacer.js";

/** The shortest timer, in seconds. */
export const MIN_TIMER_S = 1e-3;

/** Smooth mode draws no more frames per second than this allows. */
export const SMOOTH_FRAME_S = 1 / 60;

const SYSTEM_CLOCK = {
  nowS: () => performance.now() / 1000,
  setTimer: (callback, delayS) => setTimeout(callback, delayS * 1000),
  clearTimer: (timer) => clearTimeout(timer),
};

/**
 * An asynchronous iterable of text as it is to be displayed, made of one of text as it arrives.
 *
 * `source` yields strings (one token each) or `{text, numTokens, paced, thinks}`. An error of the source is thrown
 * after the text before it was shown. Leaving a `for await` loop early closes the source. A timer that fires late (a
 * hidden tab) delays nothing further: the next frame brings everything that is due.
 */
export class PacedStream {
  #source;
  #clock;
  #frameS;
  #startedS;
  #maxBufferedChars;
  #iterator = null;
  #wake = null;
  #makeRoom = null;
  #nextFrameS = -Infinity;
  #ended = false;
  #stopped = false;
  #closed = false;
  #error = null;

  /**
   * @param source asynchronous iterable.
   * @param pacer fresh; owned by the stream.
   * @param options `startedS`: the clock's time of the request's arrival (default: the first use); `frameS`: least time
   *   between two outputs (default 1/60 in smooth mode, else 0); `maxBufferedChars`: the source is not read further
   *   while this much waits; `clock`: `{nowS, setTimer, clearTimer}`.
   */
  constructor(source, pacer, options = {}) {
    const { startedS = null, frameS = null, maxBufferedChars = 1 << 20, clock = SYSTEM_CLOCK } = options;
    this.pacer = pacer;
    this.#source = source;
    this.#clock = clock;
    this.#startedS = startedS;
    this.#maxBufferedChars = maxBufferedChars;
    this.#frameS = frameS ?? (pacer instanceof SmoothPacer ? SMOOTH_FRAME_S : 0);
  }

  get stats() {
    return this.pacer.stats();
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  async next() {
    this.#start();
    while (!this.#closed) {
      const text = this.#takeFrame();
      if (text !== "") return { done: false, value: text };
      const dueS = this.pacer.nextDueS();
      if (dueS === null && this.#ended) {
        this.#closed = true;
        if (this.#error !== null && !this.#stopped) throw this.#error.reason;
        break;
      }
      await this.#wait(dueS);
    }
    return { done: true, value: undefined };
  }

  /** Close the stream and its source; `for await` calls this when the loop is left early. */
  async return(value) {
    this.#closed = true;
    this.#start();
    this.#end();
    this.#closeSource();
    return { done: true, value };
  }

  /** The reader asks for everything: the buffer is shown now, the rest as it arrives. */
  skip() {
    this.#start();
    this.pacer.skip(this.#nowS());
    this.#nextFrameS = -Infinity;
    this.#notify();
  }

  /** End the source now; what had arrived is shown at once, then the iteration ends. */
  stop() {
    this.#start();
    this.#stopped = true;
    this.#end();
    this.skip();
    this.#closeSource();
  }

  #nowS() {
    return this.#clock.nowS() - this.#startedS;
  }

  #start() {
    if (this.#iterator !== null) return;
    this.#startedS ??= this.#clock.nowS();
    this.#iterator = this.#source[Symbol.asyncIterator]();
    if (!this.#closed) this.#read();
  }

  /** Pull pieces until the source ends; never rejects: an error is kept for `next`. */
  async #read() {
    try {
      while (!this.#ended) {
        const { done, value } = await this.#iterator.next();
        if (done || this.#ended) break;
        const { text, numTokens = 1, paced = true, thinks = false } = typeof value === "string" ? { text: value } : value;
        this.pacer.push(this.#nowS(), text, numTokens, { paced, thinks });
        this.#notify();
        while (!this.#ended && this.pacer.bufferedChars >= this.#maxBufferedChars) {
          await new Promise((resolve) => (this.#makeRoom = resolve));
        }
      }
    } catch (reason) {
      if (!this.#ended) this.#error = { reason };
    }
    this.#end();
  }

  #end() {
    this.#ended = true;
    this.pacer.finish(this.#nowS());
    this.#makeRoom?.();
    this.#notify();
  }

  /** Not awaited: a generator that waits closes only when its wait ends, which the source's own signal may do. */
  #closeSource() {
    Promise.resolve(this.#iterator.return?.()).catch(() => {}); // the stream is over; nobody is left to tell
  }

  #notify() {
    this.#wake?.();
  }

  #takeFrame() {
    const nowS = this.#nowS();
    if (nowS < this.#nextFrameS) return "";
    const text = this.pacer.pop(nowS).map((shown) => shown.text).join("");
    this.#makeRoom?.();
    if (text !== "") this.#nextFrameS = nowS + this.#frameS;
    return text;
  }

  async #wait(dueS) {
    let timer = null;
    await new Promise((resolve) => {
      this.#wake = resolve;
      if (dueS !== null) {
        const delayS = Math.max(dueS, this.#nextFrameS) - this.#nowS();
        timer = this.#clock.setTimer(resolve, Math.max(delayS, MIN_TIMER_S));
      }
    });
    this.#wake = null;
    if (timer !== null) this.#clock.clearTimer(timer);
  }
}

/** False if the user's system asks for reduced motion: then show text as it arrives, `makePacer("off")`. */
export function wantsPacing() {
  return !(globalThis.matchMedia?.("(prefers-reduced-motion: reduce)").matches ?? false);
}
