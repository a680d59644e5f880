/**
 * Answers over WebSockets below the SDK: a few connections, each with several answers at a time. Sluice only.
 *
 * Retries, resuming and errors are those of HTTP. What is not a streamed answer goes over HTTP. A script cannot ping:
 * a connection that says nothing for as long as over HTTP, with answers under way, counts as lost.
 */

import { CLOSED, describe } from "./connection.js";
import { APIConnectionError, APIStatusError, ConnectionLostError, ProtocolError } from "./errors.js";
import { isObject, parseError, parseObject } from "./protocol.js";
import { Failure, RETRIED_STATUSES } from "./retry.js";
import { abortable, nowS } from "./waits.js";

/** Answers at a time over one connection; the server takes no more. */
export const MAX_IN_FLIGHT = 16;

/** Messages that wait for the reader of one answer; with more, the answer is given up. */
const MAX_WAITING_MESSAGES = 65_536;
const ENDPOINTS = { "chat/completions": "chat", completions: "completions" };
const KINDS = new Set(["start", "event", "error", "done"]);
const OPEN = 1;

/** Streamed answers over WebSockets. */
export class SocketTransport {
  #http;
  #WebSocket;
  #links = [];
  #opening = Promise.resolve();

  /**
   * @param http the Transport through which everything else goes.
   * @param WebSocket the constructor.
   * @throws RangeError there is none, or the platform's cannot say the client's key.
   */
  constructor(http, WebSocket) {
    if (typeof WebSocket !== "function") {
      throw new RangeError(
        'there is no WebSocket here (Node has one from version 22 on): give one as the option WebSocket, such as ' +
          'that of the package ws, or take transport "http"',
      );
    }
    if (http.authorization.Authorization && WebSocket === globalThis.WebSocket && isPage()) {
      throw new RangeError('a page cannot give a WebSocket a key: where one is asked for, take transport "http"');
    }
    this.#http = http;
    this.#WebSocket = WebSocket;
  }

  /** What may be done for an answer that loses its connections. */
  resumes() {
    return this.#http.resumes();
  }

  /** Nothing: an answer that is closed is cancelled in its connection. */
  async cancel() {}

  /** Close every connection; the Transport is closed already. */
  close() {
    for (const link of this.#links.splice(0)) link.close(CLOSED);
  }

  /**
   * The chunks of a streamed answer over one connection; closing the generator cancels it there.
   *
   * @throws SluiceClientError any of errors.js; every chunk that came before it was yielded.
   */
  async *events(path, body, cursor, record, signal) {
    const attempt = (baseUrl) => {
      cursor.baseUrl = baseUrl;
      return this.#tryStart(baseUrl, path, body, cursor, signal);
    };
    const answer = await this.#http.withRetries(attempt, { isResume: cursor.hasBegun, signal });
    try {
      record.requestId = answer.requestId;
      cursor.isResumable = answer.isResumable;
      for (;;) {
        const message = await answer.next(signal);
        if (message === null) return;
        cursor.lastEventId = message.event_id || cursor.lastEventId;
        yield message.type === "event" ? message.data : { error: message.error };
      }
    } finally {
      answer.close();
    }
  }

  /** Send the request and wait until the server has taken or refused it: a SocketAnswer, or a Failure. */
  async #tryStart(baseUrl, path, body, cursor, signal) {
    const message = {
      type: "request",
      endpoint: ENDPOINTS[path],
      body,
      idempotency_key: cursor.key,
      last_event_id: cursor.lastEventId || null,
    };
    const text = JSON.stringify(message);
    let answer;
    try {
      answer = await this.#ask(baseUrl, text);
    } catch (error) {
      const hint = 'the server is away, or refuses the WebSocket; transport "http" tells which, and may still work';
      const failure = new APIConnectionError(`no WebSocket at ${baseUrl}/ws: ${describe(error)}; ${hint}`);
      return new Failure(failure, { mayRetry: true, isUnreachable: true });
    }
    return started(answer, signal);
  }

  /** Send a request over a connection with room, one after the other, so that no two open one for the same place. */
  #ask(baseUrl, text) {
    const asking = this.#opening.then(async () => (await this.#link(baseUrl)).ask(text));
    this.#opening = asking.then(() => {}, () => {});
    return asking;
  }

  async #link(baseUrl) {
    this.#links = this.#links.filter((link) => !link.isClosed);
    const found = this.#links.find((link) => link.baseUrl === baseUrl && link.numAnswers < MAX_IN_FLIGHT);
    if (found !== undefined) return found;
    const { limits, authorization } = this.#http;
    const url = `${baseUrl.replace(/^http/, "ws")}/ws`;
    const options = authorization.Authorization ? [{ headers: authorization }] : []; // Node, Deno, Bun, ws; no browser
    const socket = new this.#WebSocket(url, ...options);
    await opened(socket, limits.connectTimeoutS);
    const link = new Link(baseUrl, socket, limits);
    if (this.#http.isClosed) link.close(CLOSED);
    else this.#links.push(link);
    return link;
  }
}

/** Whether this is a page of a browser, or a worker of one. */
function isPage() {
  return globalThis.document !== undefined || globalThis.WorkerGlobalScope !== undefined;
}

/** Settles when the socket is open, or will not be. */
async function opened(socket, limitS) {
  let timer;
  try {
    await new Promise((resolve, reject) => {
      socket.addEventListener("open", resolve);
      socket.addEventListener("error", ({ message, error }) => {
        reject(new Error(message || error?.message || "the handshake failed"));
      });
      socket.addEventListener("close", ({ code }) => reject(new Error(`closed with code ${code}`)));
      timer = setTimeout(() => reject(new Error(`not open after ${limitS} s`)), limitS * 1000);
    });
  } catch (error) {
    socket.close();
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

async function started(answer, signal) {
  let message;
  try {
    message = await answer.next(signal);
  } catch (error) {
    answer.close();
    if (!(error instanceof ConnectionLostError)) throw error;
    const failure = new APIConnectionError(`no answer: ${error.message}`, { cause: error });
    return new Failure(failure, { mayRetry: !answer.isSilent }); // a silent server may be at work
  }
  if (message?.type === "start") {
    answer.requestId = message.request_id ?? null;
    answer.isResumable = message.resumable === true;
    return answer;
  }
  answer.close();
  if (message?.type === "error") return refused(message);
  const odd = new ProtocolError("the server's first message is neither 'start' nor 'error'");
  return new Failure(odd, { mayRetry: false });
}

function refused(message) {
  const { message: text, code, kind } = parseError(message);
  const retryAfterS = Number.isInteger(message.retry_after_ms) ? message.retry_after_ms / 1000 : null;
  const status = Number.isInteger(message.status) ? message.status : 500;
  const ownWord = message.should_retry;
  const mayRetry = typeof ownWord === "boolean" ? ownWord : RETRIED_STATUSES.has(status);
  return new Failure(new APIStatusError(text, { status, code, kind, retryAfterS }), { mayRetry, retryAfterS });
}

/** One answer of a connection. */
class SocketAnswer {
  requestId = null;
  isResumable = false;
  #link;
  #name;
  #waiting = [];
  #wake = null;
  #isDone = false;
  #isOverrun = false;

  constructor(link, name) {
    this.#link = link;
    this.#name = name;
  }

  /** Its connection was given up because nothing came. */
  get isSilent() {
    return this.#link.isSilent;
  }

  /** Take a message; null: the connection is lost. */
  put(message) {
    if (this.#waiting.length < MAX_WAITING_MESSAGES) this.#waiting.push(message);
    else this.#isOverrun = true;
    this.#wake?.();
  }

  /** The next message; null after the last one. Throws ConnectionLostError where the connection broke. */
  async next(signal) {
    signal.throwIfAborted();
    if (this.#waiting.length === 0) {
      if (this.#isOverrun) throw new ProtocolError(`more than ${MAX_WAITING_MESSAGES} messages were not read`);
      await abortable(new Promise((resolve) => (this.#wake = resolve)), signal);
    }
    const message = this.#waiting.shift();
    this.#isDone = message === null || message.type === "done" || message.type === "error";
    if (message === null) throw new ConnectionLostError(`the WebSocket broke off: ${this.#link.reason}`);
    return message.type === "done" ? null : message;
  }

  /** Forget the answer; one that goes on is cancelled. */
  close() {
    this.#link.forget(this.#name, { isDone: this.#isDone });
  }
}

/** One WebSocket that is open, and the answers that come over it. */
class Link {
  reason = "closed";
  /** It was given up because nothing came. */
  isSilent = false;
  #socket;
  #limits;
  #answers = new Map();
  #numAsked = 0;
  #isEnded = false;
  #heardS = nowS();
  #watch = null;

  constructor(baseUrl, socket, limits) {
    this.baseUrl = baseUrl;
    this.#socket = socket;
    this.#limits = limits;
    socket.addEventListener("message", ({ data }) => this.#hear(data));
    socket.addEventListener("close", ({ code }) => this.#end(`closed with code ${code}`));
  }

  /** Whether it takes no more requests. */
  get isClosed() {
    return this.#isEnded || this.#socket.readyState !== OPEN;
  }

  /** Answers under way. */
  get numAnswers() {
    return this.#answers.size;
  }

  /** Send a request, a JSON object, under a new name. */
  ask(text) {
    if (this.isClosed) throw new Error(this.reason);
    this.#numAsked += 1;
    const name = String(this.#numAsked);
    const answer = new SocketAnswer(this, name);
    this.#socket.send(`{"id":"${name}",${text.slice(1)}`);
    if (this.#answers.size === 0) this.#heardS = nowS();
    this.#answers.set(name, answer);
    if (this.#watch === null) this.#watchSilence();
    return answer;
  }

  /** Take no more messages of an answer. */
  forget(name, { isDone }) {
    const wasKnown = this.#answers.delete(name);
    if (wasKnown && !isDone && !this.isClosed) this.#socket.send(JSON.stringify({ type: "cancel", id: name }));
    if (this.#answers.size === 0) this.#unwatch();
  }

  /** End the connection; answers under way lose it. */
  close(reason) {
    this.#end(reason);
    this.#socket.close();
  }

  #end(reason) {
    if (this.#isEnded) return;
    this.#isEnded = true;
    this.reason = reason;
    this.#unwatch();
    for (const answer of this.#answers.values()) answer.put(null);
  }

  #hear(data) {
    this.#heardS = nowS();
    try {
      this.#deliver(data);
    } catch (error) {
      this.close(error.message);
    }
  }

  #deliver(data) {
    if (typeof data !== "string") throw new ProtocolError("the server sent a binary message");
    if (data.length > this.#limits.maxEventBytes) {
      throw new ProtocolError(`a message is larger than ${this.#limits.maxEventBytes} bytes`);
    }
    const message = parseObject(data);
    if (!KINDS.has(message.type) || (message.type === "event" && !isObject(message.data))) {
      throw new ProtocolError("the server sent a message that is none");
    }
    this.#answers.get(String(message.id))?.put(message); // one that is not there was cancelled meanwhile
  }

  #watchSilence() {
    const leftS = this.#heardS + this.#limits.idleTimeoutS - nowS();
    this.#watch = setTimeout(() => {
      if (nowS() < this.#heardS + this.#limits.idleTimeoutS) {
        this.#watchSilence();
        return;
      }
      this.isSilent = true;
      this.close(`nothing came for ${this.#limits.idleTimeoutS} s`);
    }, Math.max(leftS, 0.001) * 1000);
  }

  #unwatch() {
    clearTimeout(this.#watch);
    this.#watch = null;
  }
}
