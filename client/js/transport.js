/** HTTP below the SDK: bounded retries, errors translated once; as sluice_client/transport.py. */

import { CLOSED, Connection } from "./connection.js";
import { KEY_HEADER, REQUEST_HEADER, Servers } from "./cursor.js";
import { APIConnectionError, APIStatusError, ConnectionLostError, ProtocolError } from "./errors.js";
import { filledIn } from "./options.js";
import { DONE, parseError, parseObject } from "./protocol.js";
import { Attempts, Failure, RETRY_POLICY, Resumes, RetryBudget, mayRetry, parseRetryAfter } from "./retry.js";
import { SseDecoder } from "./sse.js";
import { nowS, sleep } from "./waits.js";

/** Every bound of a client; `ClientLimits` in index.d.ts says what each means. */
export const CLIENT_LIMITS = Object.freeze({
  connectTimeoutS: 5.0,
  idleTimeoutS: 120.0,
  endTimeoutS: 0.1,
  maxEventBytes: 1 << 20,
  maxBodyBytes: 16 << 20,
  retry: RETRY_POLICY,
});

/** Of errors with which Node says that no server was reached. */
const UNREACHABLE_CODES = new Set([
  "EAI_AGAIN", "ECONNREFUSED", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENOTFOUND", "ETIMEDOUT",
  "UND_ERR_CONNECT_TIMEOUT",
]);
/** Of requests that nobody breaks off. */
const NOBODY = new AbortController().signal;

/** Requests to the servers; options as `SluiceClient`'s. */
export class Transport {
  #servers;
  #headers = { "Accept-Encoding": "identity" }; // compression would hold tokens back; a browser keeps its own word
  #random;
  #budget;
  #closing = new AbortController();

  /** @throws RangeError a base URL, a key or a limit that cannot be. */
  constructor(baseUrl, apiKey, { retry = {}, ...limits }, random) {
    const { retry: defaults, ...numbers } = CLIENT_LIMITS;
    this.limits = Object.freeze({
      ...filledIn(numbers, limits, "limits"),
      retry: filledIn(defaults, retry, "limits.retry"),
    });
    this.#servers = new Servers(baseUrl);
    this.authorization = authorizationOf(apiKey);
    this.#random = random;
    this.#budget = new RetryBudget(this.limits.retry, nowS());
  }

  /** Whether it takes no more requests. */
  get isClosed() {
    return this.#closing.signal.aborted;
  }

  /** Break off every request. */
  close() {
    this.#closing.abort();
  }

  /** What may be done for an answer that loses its connections. */
  resumes() {
    return new Resumes(this.limits.retry, this.#budget, this.#random);
  }

  /**
   * The result of the first attempt that is no `Failure`.
   *
   * @param attempt called with the base URL of the server to ask.
   * @param options `isResume`: of an answer that has begun; `signal`: ends the waits between attempts.
   * @throws SluiceClientError the last attempt's, when there may be no other.
   */
  async withRetries(attempt, { isResume = false, signal }) {
    const attempts = new Attempts(this.limits.retry, this.#budget, this.#random, nowS(), { isResume });
    for (let numUntried = this.#servers.urls.length; ; ) {
      if (this.isClosed) throw new APIConnectionError(CLOSED);
      signal.throwIfAborted();
      const url = this.#servers.current;
      const outcome = await attempt(url);
      if (!(outcome instanceof Failure)) return outcome;
      numUntried -= 1;
      const isServersOwn = outcome.mayRetry && [null, 503].includes(outcome.error.status ?? null);
      if (isServersOwn) this.#servers.leave(url);
      const hasOtherServer = isServersOwn && numUntried > 0;
      const delayS = attempts.nextDelayS(outcome, nowS(), { hasOtherServer });
      if (delayS === null) throw outcome.error;
      await sleep(delayS, signal);
    }
  }

  /**
   * The JSON object that answers a request, and the x-request-id.
   *
   * @param path after the base URL.
   * @param options `body`: JSON, sent by POST; `cursor`: of a request that is one, however often it is sent.
   */
  async fetchObject(path, { body = null, cursor = null, signal = null } = {}) {
    const caller = signal ?? NOBODY;
    const payload = body === null ? null : JSON.stringify(body);
    const method = body === null ? "GET" : "POST";
    const attempt = (baseUrl) => this.#tryRequest(`${baseUrl}/${path}`, method, payload, cursor?.headers(), caller);
    const { response, connection } = await this.withRetries(attempt, { signal: caller });
    try {
      const text = await connection.text(response, this.limits.maxBodyBytes);
      return [parseObject(text), response.headers.get(REQUEST_HEADER)];
    } finally {
      connection.close();
    }
  }

  /** Tell the server that has the request to stop it; throws APIConnectionError or APIStatusError if it is not told. */
  async cancel(cursor) {
    if (cursor.baseUrl === "") return;
    const url = `${cursor.baseUrl}/requests/${cursor.requestId}/cancel`;
    const outcome = await this.#tryRequest(url, "POST", null, {}, NOBODY);
    if (outcome instanceof Failure) throw outcome.error;
    outcome.connection.close();
  }

  /**
   * The chunks of a streamed answer over one connection; closing the generator closes it.
   *
   * @throws SluiceClientError any of errors.js; every chunk that came before it was yielded.
   */
  async *events(path, body, cursor, record, signal) {
    const payload = JSON.stringify(body);
    const attempt = (baseUrl) => {
      cursor.baseUrl = baseUrl;
      return this.#tryRequest(`${baseUrl}/${path}`, "POST", payload, cursor.headers(), signal);
    };
    const { response, connection } = await this.withRetries(attempt, { isResume: cursor.hasBegun, signal });
    try {
      record.requestId = response.headers.get(REQUEST_HEADER);
      cursor.requestId = record.requestId ?? cursor.requestId;
      if (response.headers.get("content-type")?.startsWith("application/json")) {
        throw new ProtocolError("the server answered a streamed request with JSON instead of an event stream");
      }
      cursor.isResumable = response.headers.get(KEY_HEADER) === cursor.key;
      if (cursor.hasBegun && !cursor.isResumable) {
        throw new ConnectionLostError("the stream broke off, and the server cannot go on with it");
      }
      yield* this.#chunks(response, connection, cursor);
    } finally {
      connection.close(); // one that was read to its end can serve another request
    }
  }

  /** The data of each event up to [DONE] or the end. */
  async *#chunks(response, connection, cursor) {
    const decoder = new SseDecoder(this.limits.maxEventBytes);
    const parts = connection.parts(response);
    for await (const part of parts) {
      for (const event of decoder.feed(part)) {
        if (event.data === DONE) {
          await this.#awaitEnd(parts, connection);
          return;
        }
        const chunk = parseObject(event.data);
        cursor.lastEventId = event.id || cursor.lastEventId;
        yield chunk;
      }
    }
    for (const event of decoder.close()) {
      if (event.data === DONE) return;
      if (cursor.isResumable) break; // such a server always says [DONE]: what is left here was cut
      yield parseObject(event.data);
    }
    if (cursor.isResumable) throw new ConnectionLostError("the stream ended without [DONE]");
  }

  /** Nothing of the answer follows [DONE]; a connection that does not end soon is closed. */
  async #awaitEnd(parts, connection) {
    const timer = setTimeout(connection.close, this.limits.endTimeoutS * 1000);
    try {
      while (!(await parts.next()).done);
    } catch {
      // closed instead
    } finally {
      clearTimeout(timer);
    }
  }

  /** A response with status 200 and its connection, to be closed; or a Failure. */
  async #tryRequest(url, method, payload, headers, signal) {
    const connection = new Connection(this.limits.idleTimeoutS, signal, this.#closing.signal);
    const options = { method, headers: { ...this.#headers, ...this.authorization, ...headers } };
    if (payload !== null) {
      options.headers["Content-Type"] = "application/json";
      options.body = payload;
    }
    let answered = null;
    try {
      const response = await connection.fetch(url, options);
      if (response.status !== 200) return await statusFailure(response, connection, this.limits.maxBodyBytes);
      answered = { response, connection };
    } catch (error) {
      return unreachable(url, connection.describe(error), error, !connection.isSilent);
    } finally {
      if (answered === null) connection.close();
    }
    return answered;
  }
}

/**
 * The failure of an attempt that got no answer at all.
 *
 * @param mayRetry not of a server that took the request and is silent: it may still be at work.
 */
function unreachable(url, why, error, mayRetry) {
  const code = error.cause?.code;
  const isUnreachable = code === undefined || UNREACHABLE_CODES.has(code); // a browser does not tell
  const isMute = error instanceof TypeError && error.cause === undefined;
  const hint = isMute ? "; a browser does not say why: the server is away, or does not let this page in" : "";
  const failure = new APIConnectionError(`no answer from ${url}: ${why}${hint}`, { cause: error });
  return new Failure(failure, { mayRetry, isUnreachable });
}

async function statusFailure(response, connection, maxBytes) {
  let said;
  try {
    said = parseError(parseObject(await connection.text(response, maxBytes)));
  } catch (error) {
    connection.describe(error); // throws what the caller's signal says
    const isRedirect = response.type === "opaqueredirect";
    said = { message: isRedirect ? "a redirect, which is not followed" : response.statusText || "no reason given" };
  }
  const { message, ...more } = said;
  const retryAfterS = parseRetryAfter(response.headers, Date.now() / 1000);
  const requestId = response.headers.get(REQUEST_HEADER);
  const error = new APIStatusError(message, { status: response.status, requestId, retryAfterS, ...more });
  return new Failure(error, { mayRetry: mayRetry(response.status, response.headers), retryAfterS });
}

function authorizationOf(apiKey) {
  if (apiKey === null) return {};
  if (typeof apiKey !== "string" || !/^[!-~]+$/.test(apiKey)) {
    throw new RangeError("apiKey must have printable ASCII characters only"); // which one is not said: it is a secret
  }
  return { Authorization: `Bearer ${apiKey}` };
}
