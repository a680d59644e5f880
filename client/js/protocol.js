/**
 * What OpenAI's streamed chunks say, and Sluice's additions to them; as sluice_client/protocol.py. Pure: objects in, a
 * record out.
 */

import { APIStreamError, ProtocolError } from "./errors.js";

export const DONE = "[DONE]";

/** A larger `sluice.n` is not believed. */
const MAX_CHUNK_TOKENS = 1_000_000;

/** What one answer has said so far; written by the reader of the stream, read by the `Answer`. */
export class AnswerRecord {
  parts = [];
  reasoningParts = [];
  toolCalls = new Map();
  logprobs = [];
  finishReason = null;
  usage = null;
  requestId = null;
  model = null;
  serverStats = {};
  #thinks = false; // and no text has come since

  /**
   * Take the object of one event; returns the text it brings as `{text, numTokens, thinks}`, or null.
   *
   * @throws APIStreamError it is an error event.
   * @throws ProtocolError it is not a chunk.
   */
  takeChunk(chunk) {
    if ((chunk.error ?? null) !== null) {
      const { message, code, kind } = parseError(chunk);
      throw new APIStreamError(message, { code, kind, requestId: this.requestId });
    }
    this.requestId ||= stringOf(chunk, "id");
    this.model = stringOf(chunk, "model") || this.model;
    if (isObject(chunk.usage)) this.usage = chunk.usage;
    const extension = isObject(chunk.sluice) ? chunk.sluice : {};
    const { n: numTokens, ...stats } = extension;
    this.serverStats = { ...this.serverStats, ...stats };
    const numThoughts = this.reasoningParts.length;
    const text = firstChoice(chunk).map((choice) => this.#takeChoice(choice)).join("");
    const hasThought = this.reasoningParts.slice(numThoughts).some((part) => part !== "");
    const calls = hasCalls(chunk);
    const count = calls && text === "" ? 0 : numTokensOf(numTokens, text); // nobody reads calls word by word
    const thinks = hasThought || (this.#thinks && count > 0 && text === ""); // a tag has no text
    this.#thinks = (this.#thinks || hasThought) && text === "" && !calls;
    if (thinks && text === "") return { text, numTokens: 0, thinks };
    return text !== "" || count > 0 ? { text, numTokens: count, thinks } : null;
  }

  #takeChoice(choice) {
    this.finishReason = stringOf(choice, "finish_reason") || this.finishReason;
    this.#takeLogprobs(choice.logprobs);
    const delta = choice.delta;
    if (!isObject(delta)) return this.#takeText(stringOf(choice, "text")); // /v1/completions
    this.reasoningParts.push(stringOf(delta, "reasoning_content") || stringOf(delta, "reasoning") || "");
    for (const call of delta.tool_calls ?? []) this.#takeToolCall(call);
    return this.#takeText(stringOf(delta, "content"));
  }

  /** Keep chat's entries one by one, and completions' objects as they come. */
  #takeLogprobs(part) {
    if (!isObject(part)) return;
    if ("tokens" in part) this.logprobs.push(part);
    else if (Array.isArray(part.content)) this.logprobs.push(...part.content.filter(isObject));
  }

  #takeText(text) {
    if (text) this.parts.push(text);
    return text ?? "";
  }

  #takeToolCall(part) {
    if (!isObject(part) || !Number.isInteger(part.index ?? 0)) {
      throw new ProtocolError("a tool call of the stream has no shape that OpenAI's protocol knows");
    }
    const index = part.index ?? 0;
    if (!this.toolCalls.has(index)) {
      this.toolCalls.set(index, { id: null, type: "function", function: { name: "", arguments: "" } });
    }
    const call = this.toolCalls.get(index);
    call.id = stringOf(part, "id") || call.id;
    if (!isObject(part.function)) return;
    call.function.name += stringOf(part.function, "name") ?? "";
    call.function.arguments += stringOf(part.function, "arguments") ?? "";
  }
}

/** A JSON object; throws ProtocolError if it is none. */
export function parseObject(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new ProtocolError("the server sent something that is not JSON"); // the parser's own words quote it
  }
  if (!isObject(value)) throw new ProtocolError("the server sent JSON that is not an object");
  return value;
}

/** An error in OpenAI's format, or nearly (`{"error": "text"}`, `{"message": "text"}`), as `{message, code, kind}`. */
export function parseError(body) {
  const error = body.error ?? body;
  if (!isObject(error)) return { message: String(error), code: null, kind: null };
  const message = looseString(error.message) || JSON.stringify(error);
  const code = error.code ?? null;
  return { message, code: code === null ? null : String(code), kind: looseString(error.type) };
}

/** Whether a value of JSON is an object, not an array. */
export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function firstChoice(chunk) {
  const choices = chunk.choices ?? [];
  if (!Array.isArray(choices) || !choices.every(isObject)) {
    throw new ProtocolError("the choices of a chunk are not a list of objects");
  }
  return choices.filter((choice) => (choice.index ?? 0) === 0);
}

function hasCalls(chunk) {
  return firstChoice(chunk).some((choice) => isObject(choice.delta) && (choice.delta.tool_calls ?? []).length > 0);
}

function numTokensOf(value, text) {
  if (Number.isInteger(value) && value >= 0 && value <= MAX_CHUNK_TOKENS) return value;
  return text === "" ? 0 : 1;
}

function stringOf(source, name) {
  const value = source[name] ?? null;
  if (value !== null && typeof value !== "string") {
    throw new ProtocolError(`${name} is not a string but ${Array.isArray(value) ? "an array" : typeof value}`);
  }
  return value;
}

function looseString(value) {
  return typeof value === "string" ? value : null;
}
