/** Where one request stands: its names, the server that has it, and how far its answer has come. Also the servers. */

export const KEY_HEADER = "Idempotency-Key";
export const EVENT_HEADER = "Last-Event-ID";
export const REQUEST_HEADER = "x-request-id";
const MAX_KEY_CHARS = 255;

/** The idempotency key, or a new one; throws RangeError if it cannot be a header. */
export function checkKey(key = null) {
  if (key === null) return randomHex();
  if (typeof key !== "string" || !/^[ -~]+$/.test(key) || key.length > MAX_KEY_CHARS) {
    throw new RangeError(`idempotencyKey must have 1 to ${MAX_KEY_CHARS} printable ASCII characters`);
  }
  return key;
}

/** One request, over all of its connections. */
export class Cursor {
  /** Of the server that has it; empty before there is one. */
  baseUrl = "";
  /** The server said that it can go on after a lost connection. */
  isResumable = false;
  lastEventId = "";
  numEvents = 0;
  /** By which the server's log has it, and by which it can be cancelled. */
  requestId = `req_${randomHex()}`;

  /** @param key the same for every attempt: the server knows them as one request. */
  constructor(key) {
    this.key = key;
  }

  /** Whether a part of the answer is here. */
  get hasBegun() {
    return this.numEvents > 0;
  }

  /** What every attempt says. */
  headers() {
    const headers = { [KEY_HEADER]: this.key, [REQUEST_HEADER]: this.requestId };
    if (this.lastEventId !== "") headers[EVENT_HEADER] = this.lastEventId;
    return headers;
  }
}

/** The base URLs of a client, and which of them is asked next. */
export class Servers {
  #at = 0;

  /**
   * @param baseUrls one, or several that serve the same model; /v1 is added where a URL has no path of its own.
   * @throws RangeError none, or one is not an http(s) URL.
   */
  constructor(baseUrls) {
    const given = typeof baseUrls === "string" || baseUrls instanceof URL ? [baseUrls] : [...(baseUrls ?? [])];
    if (given.length === 0) throw new RangeError("baseUrl must name at least one server");
    this.urls = given.map(withPath);
  }

  /** The server to ask. */
  get current() {
    return this.urls[this.#at];
  }

  /** This server is in trouble: ask the next one, unless others have moved on already. */
  leave(url) {
    if (url === this.current) this.#at = (this.#at + 1) % this.urls.length;
  }
}

function withPath(given) {
  let url = null;
  try {
    url = new URL(given);
  } catch {
    // the sentence below says what is wrong
  }
  if (url?.protocol !== "http:" && url?.protocol !== "https:") {
    throw new RangeError("baseUrl must look like http://host:8000");
  }
  if (url.username !== "" || url.password !== "") throw new RangeError("baseUrl must hold no user and no password");
  return `${url.origin}${url.pathname.replace(/\/+$/, "") || "/v1"}`;
}

/** 32 hexadecimal digits. `crypto` is missing in Node 18, `crypto.randomUUID` in pages that are not from https. */
function randomHex() {
  const bytes = new Uint8Array(16);
  if (globalThis.crypto !== undefined) globalThis.crypto.getRandomValues(bytes);
  else bytes.forEach((_, i) => (bytes[i] = Math.random() * 256));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
