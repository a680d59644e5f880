/** What people do with Vercel's AI SDK, by its provider for whoever is compatible with OpenAI. */

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, isStepCount, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  BASE, FLAKY, HOT, KEY, LIMIT_MS, MANY_TOKENS, MODEL, NUM_TOKENS, QUESTION, REFUSAL, SCHEMA, SPEAK, THINK, UNSERVED,
  check, checkCancelled, checkOrder, endsSoon, numCancelled, tell, thrown,
} from "./trying.mjs";

const provider = (options = {}) => createOpenAICompatible({
  name: "sluice", baseURL: BASE, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true, ...options,
});
const settings = (fields = {}, options = {}) => ({
  model: provider(options)(MODEL), prompt: QUESTION, temperature: 0, maxOutputTokens: NUM_TOKENS, maxRetries: 0,
  ...fields,
});
const given = (fields) => ({ providerOptions: { sluice: fields } });
const said = async (fields) => (await generateText(settings(fields))).text;
const order = tool({ description: "Order tea.", inputSchema: jsonSchema(SCHEMA) });
const Order = z.object({ size: z.enum(["small", "large"]), count: z.number().int().min(0).max(9) });
const CALLED = { tools: { order }, maxOutputTokens: 100 };

async function piecesOf(fields) {
  const { textStream } = streamText(settings({ ...fields, onError: () => {} }));
  const pieces = [];
  for await (const piece of textStream) pieces.push(piece);
  return pieces;
}

async function callOf(fields) {
  const { toolCalls } = await generateText(settings({ ...CALLED, ...fields }));
  check(toolCalls.length === 1 && toolCalls[0].toolName === "order", "no call");
  checkOrder(toolCalls[0].input);
}

await tell({
  chat: async () => {
    check(await said(), "no text");
    check(await said({ system: "Be brief." }), "no text after a system message");
  },
  stream: async () => {
    const pieces = await piecesOf();
    check(pieces.length > 2, "it comes in one piece");
    check(pieces.join("") === await said(), "another text");
  },
  usage: async () => {
    const result = streamText(settings());
    check((await result.usage).outputTokens === NUM_TOKENS, "another count");
  },
  stop: async () => {
    const whole = await said();
    const end = whole.slice(whole.length >> 1).slice(0, 3);
    const { text, finishReason } = await generateText(settings({ stopSequences: [end] }));
    check(finishReason === "stop", `it ends by ${finishReason}`);
    check(text === whole.slice(0, whole.indexOf(end)), "another text");
  },
  refusal: async () => {
    const error = await thrown(() => said({ temperature: HOT }));
    check(APICallError.isInstance(error) && error.statusCode === 400, `another error: ${error}`);
    check(error.message.includes(REFUSAL), `another sentence: ${error.message}`);
  },
  unserved: async () => {
    const model = provider().embeddingModel(MODEL);
    const error = await thrown(() => model.doEmbed({ values: ["fox"] }));
    check(APICallError.isInstance(error) && error.message.includes(UNSERVED), `another error: ${error}`);
    check(await said(), "no text");
  },
  retry: async () => {
    const { text } = await generateText(settings({ maxRetries: 1 }, { baseURL: FLAKY }));
    check(text, "no text");
  },
  timeout: async () => {
    const slow = { maxOutputTokens: MANY_TOKENS, abortSignal: AbortSignal.timeout(LIMIT_MS) };
    const error = await thrown(() => said({ ...slow, ...given({ ignore_eos: true }) }));
    check(error.name === "TimeoutError", `another error: ${error}`);
  },
  cancel: async () => {
    const before = await numCancelled();
    const leaving = new AbortController();
    const fields = { maxOutputTokens: MANY_TOKENS, abortSignal: leaving.signal, onError: () => {} };
    const { textStream } = streamText(settings({ ...fields, ...given({ ignore_eos: true }) }));
    for await (const piece of textStream) {
      check(piece, "no piece");
      break;
    }
    leaving.abort();
    await checkCancelled(before);
  },
  thinking: async () => {
    const { reasoningText } = await generateText(settings({ ...given(THINK), maxOutputTokens: 96 }));
    check(reasoningText, "no thought");
  },
  thinking_stream: async () => {
    const fields = { ...given(THINK), maxOutputTokens: 96 };
    let thought = "";
    for await (const part of streamText(settings(fields)).fullStream) {
      if (part.type === "reasoning-delta") thought += part.text;
    }
    check(thought && thought === (await generateText(settings(fields))).reasoningText, "another thought");
  },
  thinking_off: async () => {
    for (const off of [given(SPEAK), given({ reasoningEffort: "none" })]) {
      const { text, reasoningText } = await generateText(settings(off));
      check(text && !reasoningText, "it thinks");
    }
  },
  history: async () => {
    const first = { role: "user", content: QUESTION };
    const { response } = await generateText(settings({ ...given(THINK), maxOutputTokens: 96 }));
    const messages = [first, ...response.messages, first];
    check(await said({ prompt: undefined, messages, ...given(SPEAK) }), "no text");
  },
  tools_auto: async () => {
    const { text, toolCalls } = await generateText(settings({ tools: { order } }));
    check(text || toolCalls.length, "nothing");
  },
  tools_required: () => callOf({ toolChoice: "required" }),
  tools_named: () => callOf({ toolChoice: { type: "tool", toolName: "order" } }),
  tools_stream: async () => {
    const result = streamText(settings({ ...CALLED, toolChoice: "required", onError: () => {} }));
    const [call] = await result.toolCalls;
    checkOrder(call.input);
  },
  tool_loop: async () => {
    const runs = tool({ description: "Order tea.", inputSchema: jsonSchema(SCHEMA), execute: () => "done" });
    const { steps } = await generateText(settings({
      tools: { order: runs }, maxOutputTokens: 100, stopWhen: (isStepCount ?? stepCountIs)(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    }));
    check(steps.length === 2 && steps[0].toolResults.length === 1, "no result");
  },
  json_schema: async () => {
    const { output } = await generateText(settings({
      output: Output.object({ schema: jsonSchema(SCHEMA) }), maxOutputTokens: 100,
    }));
    checkOrder(output);
  },
  json_object: async () => {
    const { output } = await generateText(settings({ output: Output.json(), ...given(await endsSoon()) }));
    check(typeof output === "object", "no object");
  },
  parse: async () => {
    const { output } = await generateText(settings({ output: Output.object({ schema: Order }), maxOutputTokens: 100 }));
    checkOrder(output);
  },
  stream_helper: async () => {
    const result = streamText(settings());
    const kinds = [];
    for await (const part of result.fullStream) kinds.push(part.type);
    check(kinds.includes("text-start") && kinds.at(-1) === "finish", "other events");
  },
});
