/**
 * Server-sent events from bytes, as WHATWG HTML section 9.2 defines them.
 *
 * Takes chunks with borders anywhere, inside a line end or a code point too. Deviations: an event that the end of the
 * stream cuts off is dispatched (some servers leave out the last blank line; what is cut inside is not valid JSON and
 * fails there), bytes that are not UTF-8 are an error, and sizes are limited. Both languages pass vectors/sdk.json.
 */

import { ProtocolError } from "./errors.js";

const CR = 13;
const LF = 10;
const BYTE_ORDER_MARK = "\ufeff";

/** Turns chunks of bytes into events `{data, event, id}`. */
export class SseDecoder {
  #maxEventBytes;
  #line = []; // parts of the line that has not ended
  #lineBytes = 0;
  #skipLf = false;
  #isFirstLine = true;
  #data = [];
  #dataBytes = 0;
  #event = "";
  #id = "";

  /** @param maxEventBytes largest line, and largest sum of data lines of one event. */
  constructor(maxEventBytes = 1 << 20) {
    this.#maxEventBytes = maxEventBytes;
  }

  /** The events that a chunk (Uint8Array) completes, in order; to be iterated to its end. Throws ProtocolError. */
  *feed(chunk) {
    let start = 0;
    if (this.#skipLf && chunk.length > 0) {
      start = chunk[0] === LF ? 1 : 0;
      this.#skipLf = false;
    }
    for (let end = lineEnd(chunk, start); end >= 0; end = lineEnd(chunk, start)) {
      this.#keep(chunk.subarray(start, end));
      yield* this.#takeLine();
      start = end + 1;
      if (chunk[end] === CR) {
        this.#skipLf = start === chunk.length;
        if (chunk[start] === LF) start += 1;
      }
    }
    this.#keep(chunk.slice(start)); // a copy: the chunk's memory may be used again
  }

  /** The stream has ended: the event that was under way, if any. */
  *close() {
    if (this.#lineBytes > 0) yield* this.#takeLine();
    yield* this.#dispatch();
  }

  #keep(part) {
    if (part.length === 0) return;
    this.#line.push(part);
    this.#lineBytes += part.length;
    if (this.#lineBytes > this.#maxEventBytes) {
      throw new ProtocolError(`a line of the event stream is longer than ${this.#maxEventBytes} bytes`);
    }
  }

  *#takeLine() {
    const numBytes = this.#lineBytes;
    let line = decode(this.#line, numBytes);
    this.#line = [];
    this.#lineBytes = 0;
    if (this.#isFirstLine && line.startsWith(BYTE_ORDER_MARK)) line = line.slice(1);
    this.#isFirstLine = false;
    if (line === "") {
      yield* this.#dispatch();
      return;
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1);
    this.#setField(name, value.startsWith(" ") ? value.slice(1) : value, numBytes);
  }

  #setField(name, value, numBytes) {
    if (name === "data") {
      this.#data.push(value);
      this.#dataBytes += numBytes;
      if (this.#dataBytes > this.#maxEventBytes) {
        throw new ProtocolError(`an event of the stream is larger than ${this.#maxEventBytes} bytes`);
      }
    } else if (name === "event") {
      this.#event = value;
    } else if (name === "id" && !value.includes("\0")) {
      this.#id = value;
    }
    // a comment (empty name), `retry` (we never reconnect) or an unknown field says nothing
  }

  *#dispatch() {
    const [data, event] = [this.#data, this.#event];
    this.#data = [];
    this.#dataBytes = 0;
    this.#event = "";
    if (data.length > 0) yield { data: data.join("\n"), event: event || "message", id: this.#id };
  }
}

function decode(parts, numBytes) {
  const bytes = parts.length === 1 ? parts[0] : new Uint8Array(numBytes);
  if (parts.length > 1) {
    let at = 0;
    for (const part of parts) {
      bytes.set(part, at);
      at += part.length;
    }
  }
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new ProtocolError("a line of the event stream is not UTF-8");
  }
}

/** Position of the first CR or LF from `start`, -1 if there is none. */
function lineEnd(chunk, start) {
  const lf = chunk.indexOf(LF, start);
  const cr = chunk.subarray(start, lf < 0 ? chunk.length : lf).indexOf(CR);
  return cr < 0 ? lf : start + cr;
}
