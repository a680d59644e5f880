/** The SDK: chat and completions, streamed or not, for Sluice and any OpenAI-compatible server. */

import { Answer } from "./answer.js";
import { streamPieces } from "./answer_stream.js";
import { Cursor, checkKey } from "./cursor.js";
import { ProtocolError } from "./errors.js";
import { checkNames } from "./options.js";
import { makePacer } from "./pacer.js";
import { AnswerRecord, isObject } from "./protocol.js";
import { qoeTarget } from "./qoe.js";
import { SocketTransport } from "./socket_transport.js";
import { Transport } from "./transport.js";

const OPTIONS = ["apiKey", "model", "limits", "random", "transport", "WebSocket"];

/**
 * A client of one server, or of several that serve the same; `close` it in the end.
 *
 * An answer whose connection is lost is resumed if the server can (Sluice): the reader sees a pause. Types and options
 * of every method are in index.d.ts.
 */
export class SluiceClient {
  #http;
  #sockets = null;
  #model;

  /**
   * @param baseUrl "http://host:8000"; /v1 is added unless the URL has a path of its own. Of several, the next one is
   *   asked when one cannot be reached or has no capacity.
   * @param options `apiKey`: sent as a bearer token; `model`: default of the methods, else the first one that the
   *   server lists; `limits`: timeouts, sizes and retries; `random`: source of the jitter between retries; `transport`: of
   *   streamed answers, "websocket" (Sluice only) carries several over one connection; `WebSocket`: its constructor.
   * @throws RangeError something of these cannot be.
   */
  constructor(baseUrl, options = {}) {
    checkNames(OPTIONS, options, "SluiceClient");
    const { apiKey = null, model = null, limits = {}, random = Math.random, transport = "http" } = options;
    if (transport !== "http" && transport !== "websocket") {
      throw new RangeError('transport must be "http" or "websocket"');
    }
    this.#http = new Transport(baseUrl, apiKey, limits, random);
    if (transport === "websocket") {
      this.#sockets = new SocketTransport(this.#http, options.WebSocket ?? globalThis.WebSocket);
    }
    this.#model = model;
  }

  /** Close every connection; answers under way lose theirs. */
  async close() {
    this.#http.close();
    this.#sockets?.close();
  }

  /** Stream the answer to a conversation: messages in OpenAI's format, or a string, one message of the user. */
  chat(messages, options = {}) {
    return this.#stream("chat/completions", { messages: asMessages(messages) }, options);
  }

  /** Stream the continuation of a prompt (text or token ids). */
  complete(prompt, options = {}) {
    return this.#stream("completions", { prompt }, options);
  }

  /** The answer to a conversation in one piece, not streamed and not paced; with `n`, all choices. */
  async chatOnce(messages, options = {}) {
    return this.#once("chat/completions", { messages: asMessages(messages) }, options);
  }

  /** The continuation of a prompt in one piece, not streamed and not paced. */
  async completeOnce(prompt, options = {}) {
    return this.#once("completions", { prompt }, options);
  }

  /** Ids of the models that the server lists. */
  async models({ signal } = {}) {
    const [{ data }] = await this.#http.fetchObject("models", { signal });
    if (!Array.isArray(data) || !data.every((model) => isObject(model) && typeof model.id === "string")) {
      throw new ProtocolError("the server's list of models is not in OpenAI's format");
    }
    return data.map((model) => model.id);
  }

  #stream(path, what, { model, pace = "smooth", qoe, idempotencyKey, signal, ...params }) {
    if ((params.n ?? 1) !== 1) {
      throw new RangeError("an Answer streams one choice; send n requests instead of n choices");
    }
    const target = qoe && qoeTarget(qoe);
    const pacer = makePacer(pace, target);
    const body = { stream_options: { include_usage: true }, ...what, ...params, ...asField(target), stream: true };
    const source = this.#sockets ?? this.#http;
    const record = new AnswerRecord();
    const cursor = new Cursor(checkKey(idempotencyKey));
    const controller = new AbortController();
    const pieces = this.#pieces(source, path, body, model, { cursor, record, signal: controller.signal });
    return new Answer(pieces, record, pacer, { controller, signal, tellServer: () => source.cancel(cursor) });
  }

  async *#pieces(source, path, body, model, { cursor, record, signal }) {
    const whole = await this.#withModel(body, model, signal);
    yield* streamPieces(source, path, whole, cursor, record, signal);
  }

  async #once(path, what, { model, qoe, idempotencyKey, signal, ...params }) {
    const fields = { ...what, ...params, ...asField(qoe && qoeTarget(qoe)), stream: false };
    const body = await this.#withModel(fields, model, signal);
    const cursor = new Cursor(checkKey(idempotencyKey));
    const [reply, requestId] = await this.#http.fetchObject(path, { body, cursor, signal });
    const choices = Array.isArray(reply.choices) ? reply.choices.filter(isObject) : [];
    if (choices.length === 0) throw new ProtocolError("the server's answer has no choice");
    choices.sort((a, b) => (a.index ?? 0) - (b.index ?? 0));
    const messages = choices.map((choice) => (isObject(choice.message) ? choice.message : { content: choice.text }));
    return {
      text: messages[0].content || "",
      finishReason: choices[0].finish_reason ?? null,
      usage: reply.usage ?? null,
      requestId: requestId || (reply.id ?? null),
      toolCalls: messages[0].tool_calls || [],
      texts: messages.map(({ content }) => content || ""),
      logprobs: choices[0].logprobs ?? null,
    };
  }

  async #withModel(body, model, signal) {
    let name = model ?? this.#model;
    if (name === null) {
      [name] = await this.models({ signal });
      if (name === undefined) throw new ProtocolError("the server lists no model; name one");
      this.#model = name;
    }
    return { model: name, ...body };
  }
}

function asMessages(messages) {
  return typeof messages === "string" ? [{ role: "user", content: messages }] : [...messages];
}

/** The reader's expectation as the API has it; nothing if there is none. */
function asField(target) {
  return target ? { qoe: { ttft_s: target.ttftS, speed_tokens_per_s: target.speedTokensPerS } } : {};
}
