/**
 * Everything that the SDK throws on purpose; the same tree as sluice_client/errors.py.
 *
 *     SluiceClientError
 *     ├── APIConnectionError          no answer from the server: refused, unknown host, silent, closed before headers
 *     ├── APIResponseError            the server says that it failed, in OpenAI's format
 *     │   ├── APIStatusError          by an HTTP status other than 200
 *     │   └── APIStreamError          by an error event in the middle of a stream
 *     ├── ConnectionLostError         the stream broke off: reset, or silent for too long
 *     ├── IncompleteStreamError       the stream ended in order, but without a finish reason
 *     └── ProtocolError               what came is not what OpenAI's protocol says (not SSE, not JSON, too large)
 *
 * The last three and APIStreamError leave the text so far in the `Answer`. Arguments that cannot be are a RangeError,
 * at once; an `AbortSignal` throws its own reason. No message holds text of a request, or a key.
 */

export class SluiceClientError extends Error {}

/** No response came; the cause is chained. */
export class APIConnectionError extends SluiceClientError {}

/** The server reported an error: its sentence, OpenAI's `code` and `type` (`kind`), and an id for operators' logs. */
export class APIResponseError extends SluiceClientError {
  constructor(message, { code = null, kind = null, requestId = null } = {}) {
    super(message);
    this.code = code;
    this.kind = kind;
    this.requestId = requestId;
  }
}

/** The server answered with an HTTP status that says no; `retryAfterS` is how long it asks to wait, if it does. */
export class APIStatusError extends APIResponseError {
  constructor(message, { status, retryAfterS = null, ...more }) {
    super(message, more);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }

  toString() {
    return `${this.name}: ${this.status}: ${this.message}`;
  }
}

/** The server failed in the middle of a stream and said so. */
export class APIStreamError extends APIResponseError {}

/** The connection broke, or nothing came for too long, before the answer was finished. */
export class ConnectionLostError extends SluiceClientError {}

/** The stream ended without a finish reason: the text is a part of the answer. */
export class IncompleteStreamError extends SluiceClientError {}

/** The server sent something that is not OpenAI's protocol. */
export class ProtocolError extends SluiceClientError {}

const NAMED = {
  SluiceClientError, APIConnectionError, APIResponseError, APIStatusError, APIStreamError, ConnectionLostError,
  IncompleteStreamError, ProtocolError,
};
// by hand: a minifier may rename the classes
for (const [name, type] of Object.entries(NAMED)) {
  Object.defineProperty(type.prototype, "name", { value: name, configurable: true, writable: true });
}
