/** One answer: text as displayed while it streams, and what is known about it afterwards. */

import { PacedStream } from "./paced_stream.js";

/**
 * An asynchronous iterable of text, made by `SluiceClient.chat` and `.complete`; iterate once.
 *
 * The request is sent at the first use. Leaving the loop early, or `close()`, closes the HTTP connection at once, which
 * makes the server cancel. An error is thrown after the text that came before it; a signal's reason at once.
 */
export class Answer {
  #record;
  #stream;
  #controller;
  #signal;
  #tellServer;
  #isWatching = false;

  /**
   * @param source generator of the pieces.
   * @param record what it writes.
   * @param pacer fresh.
   * @param options `controller`: whose signal ends the source; `tellServer`: has the server cancel; `signal`: from the
   *   user.
   */
  constructor(source, record, pacer, { controller, tellServer, signal }) {
    this.#record = record;
    this.#stream = new PacedStream(source, pacer);
    this.#controller = controller;
    this.#tellServer = tellServer;
    this.#signal = signal;
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  async next() {
    this.#watchSignal();
    let result = { done: true, value: undefined };
    try {
      result = await this.#stream.next();
    } finally {
      if (result.done) this.#unwatchSignal();
    }
    this.#signal?.throwIfAborted();
    return result;
  }

  /** `for await` calls this when the loop is left early. */
  async return(value) {
    this.#unwatchSignal();
    this.#controller.abort();
    return this.#stream.return(value);
  }

  /** Read to the end without pacing; returns the whole text. */
  async read() {
    this.#watchSignal();
    this.#stream.skip();
    while (!(await this.next()).done);
    return this.text;
  }

  /** Show what has arrived now, and the rest as it arrives. */
  skip() {
    this.#watchSignal();
    this.#stream.skip();
  }

  /** Make the server cancel; what had arrived is shown at once, then the iteration ends, without an error. */
  stop = () => {
    this.#controller.abort();
    this.#stream.stop();
  };

  /** As `stop`, but the server is told in so many words; throws SluiceClientError if it could not be told. */
  async cancel() {
    try {
      await this.#tellServer();
    } finally {
      this.stop();
    }
  }

  /** End the answer and close its connection. Calling it again changes nothing. */
  async close() {
    await this.return();
  }

  get text() {
    return this.#record.parts.join("");
  }

  get reasoning() {
    return this.#record.reasoningParts.join("");
  }

  get toolCalls() {
    return [...this.#record.toolCalls].sort(([a], [b]) => a - b).map(([, call]) => call);
  }

  get logprobs() {
    return [...this.#record.logprobs];
  }

  get finishReason() {
    return this.#record.finishReason;
  }

  get usage() {
    return this.#record.usage;
  }

  get requestId() {
    return this.#record.requestId;
  }

  get model() {
    return this.#record.model;
  }

  get serverStats() {
    return this.#record.serverStats;
  }

  get stats() {
    return this.#stream.stats;
  }

  get qoe() {
    return this.stats.qoe;
  }

  get stallSeconds() {
    return this.stats.stallSeconds;
  }

  get ttftS() {
    return this.stats.ttftS;
  }

  /** From the first use on; one signal may be given to many answers, so that none stays with it. */
  #watchSignal() {
    if (this.#isWatching) return;
    this.#isWatching = true;
    if (this.#signal?.aborted) this.stop();
    this.#signal?.addEventListener("abort", this.stop);
  }

  #unwatchSignal() {
    this.#signal?.removeEventListener("abort", this.stop);
  }
}
