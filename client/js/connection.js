/** One HTTP exchange below the SDK, which its caller, the client's end, or silence breaks off. */

import { ConnectionLostError, ProtocolError } from "./errors.js";

export const CLOSED = "the client is closed";

/** Owns what `fetch` is given to break it off; `close` must be called in the end. */
export class Connection {
  #controller = new AbortController();
  #idleS;
  #caller;
  #client;
  /** Nothing came for as long as may be. */
  isSilent = false;

  /**
   * @param idleS longest silence while somebody waits, seconds.
   * @param caller signal of whoever waits; the reason that it gives is thrown.
   * @param client signal of the client's end.
   */
  constructor(idleS, caller, client) {
    this.#idleS = idleS;
    this.#caller = caller;
    this.#client = client;
    for (const signal of [caller, client]) {
      if (signal.aborted) this.#controller.abort();
      else signal.addEventListener("abort", this.close);
    }
  }

  /** The response to a request; options and errors are those of `fetch`. */
  fetch(url, options) {
    return this.#within(() => fetch(url, { ...options, redirect: "manual", signal: this.#controller.signal }));
  }

  /** The parts of a response's body as they come; throws ConnectionLostError where it breaks off. */
  async *parts(response) {
    const reader = response.body?.getReader();
    for (;;) {
      let part = { done: true };
      try {
        if (reader !== undefined) part = await this.#within(() => reader.read());
      } catch (error) {
        throw new ConnectionLostError(`the answer broke off: ${this.describe(error)}`, { cause: error });
      }
      if (part.done) return;
      yield part.value;
    }
  }

  /** The whole body of a response as text; throws ProtocolError where it is too large. */
  async text(response, maxBytes) {
    const decoder = new TextDecoder();
    let text = "";
    let numBytes = 0;
    for await (const part of this.parts(response)) {
      numBytes += part.length;
      if (numBytes > maxBytes) throw new ProtocolError(`the server's answer is larger than ${maxBytes} bytes`);
      text += decoder.decode(part, { stream: true });
    }
    return text + decoder.decode();
  }

  /** Why an exchange failed; throws the caller's reason if it was the caller. */
  describe(error) {
    this.#caller.throwIfAborted();
    if (this.isSilent) return `nothing came for ${this.#idleS} s`;
    return this.#client.aborted ? CLOSED : describe(error);
  }

  /** Break the exchange off if it goes on. */
  close = () => {
    for (const signal of [this.#caller, this.#client]) signal.removeEventListener("abort", this.close);
    this.#controller.abort();
  };

  async #within(work) {
    const timer = setTimeout(() => {
      this.isSilent = true;
      this.#controller.abort();
    }, this.#idleS * 1000);
    try {
      return await work();
    } finally {
      clearTimeout(timer);
    }
  }
}

/** What the platform says of a failure: its cause's own words, a code, or a name. */
export function describe(error) {
  const { message, code } = error.cause ?? {};
  return message || code || error.message || error.name;
}
