/** What people do with `openai` in Node. */

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  BASE, FLAKY, HOT, KEY, LIMIT_MS, MANY_TOKENS, MODEL, NUM_TOKENS, QUESTION, REFUSAL, SCHEMA, SPEAK, THINK, UNSERVED,
  check, checkCancelled, checkOrder, endsSoon, numCancelled, tell, thrown,
} from "./trying.mjs";

const MESSAGES = [{ role: "user", content: QUESTION }];
const Order = z.object({ size: z.enum(["small", "large"]), count: z.number().int().min(0).max(9) });
const TOOLS = [{ type: "function", function: { name: "order", parameters: SCHEMA, strict: true } }];
const FORMAT = { type: "json_schema", json_schema: { name: "order", schema: SCHEMA, strict: true } };
const HALF = { model: MODEL, messages: MESSAGES, temperature: 0, max_tokens: NUM_TOKENS };

const client = (options = {}) => new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0, ...options });
const ask = (fields = {}, options = {}) => client().chat.completions.create({ ...HALF, ...fields }, options);
const said = async (fields = {}) => (await ask(fields)).choices[0].message.content;

async function deltas(fields) {
  const found = [];
  for await (const chunk of await ask({ ...fields, stream: true })) {
    if (chunk.choices.length) found.push(chunk.choices[0].delta);
  }
  return found;
}

async function callOf(fields) {
  const { message } = (await ask({ tools: TOOLS, max_tokens: 100, ...fields })).choices[0];
  check(message.tool_calls?.length === 1 && message.tool_calls[0].function.name === "order", "no call");
  checkOrder(JSON.parse(message.tool_calls[0].function.arguments));
  return message.tool_calls[0];
}

await tell({
  models: async () => {
    const names = [];
    for await (const model of client().models.list()) names.push(model.id);
    check(names.includes(MODEL), "the model is not listed");
  },
  chat: async () => {
    check(await said(), "no text");
    const first = { role: "developer", content: [{ type: "text", text: "Be brief." }] };
    check(await said({ messages: [first, ...MESSAGES] }), "no text after a developer's message");
  },
  stream: async () => {
    const pieces = (await deltas({})).map((delta) => delta.content).filter(Boolean);
    check(pieces.length > 2, "it comes in one piece");
    check(pieces.join("") === await said(), "another text");
  },
  usage: async () => {
    let last;
    for await (last of await ask({ stream: true, stream_options: { include_usage: true } }));
    check(last.usage.completion_tokens === NUM_TOKENS, "another count");
  },
  choices: async () => check((await ask({ n: 2 })).choices.length === 2, "not two choices"),
  logprobs: async () => {
    const { content } = (await ask({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs;
    check(content.length === NUM_TOKENS && content[0].top_logprobs.length === 2, "another count");
  },
  stop: async () => {
    const whole = await said();
    const end = whole.slice(whole.length >> 1).slice(0, 3);
    const [choice] = (await ask({ stop: [end] })).choices;
    const expected = whole.slice(0, whole.indexOf(end));
    check(choice.finish_reason === "stop" && choice.message.content === expected, "another text");
  },
  refusal: async () => {
    const error = await thrown(() => ask({ temperature: HOT }));
    check(error instanceof OpenAI.BadRequestError && error.message.includes(REFUSAL), `another error: ${error}`);
  },
  unserved: async () => {
    const error = await thrown(() => client().embeddings.create({ model: MODEL, input: "fox" }));
    check(error instanceof OpenAI.BadRequestError && error.message.includes(UNSERVED), `another error: ${error}`);
    check(await said(), "no text");
  },
  retry: async () => {
    const answer = await client({ baseURL: FLAKY, maxRetries: 1 }).chat.completions.create({ ...HALF, max_tokens: 2 });
    check(answer.choices.length, "no answer");
  },
  timeout: async () => {
    const slow = { ...HALF, max_tokens: MANY_TOKENS, ignore_eos: true };
    const error = await thrown(() => client({ timeout: LIMIT_MS }).chat.completions.create(slow));
    check(error instanceof OpenAI.APIConnectionTimeoutError, `another error: ${error}`);
  },
  cancel: async () => {
    const before = await numCancelled();
    const chunks = await ask({ stream: true, max_tokens: MANY_TOKENS, ignore_eos: true });
    for await (const chunk of chunks) {
      check(chunk.choices.length, "no chunk");
      break;
    }
    await checkCancelled(before);
  },
  thinking: async () => {
    const { message } = (await ask({ ...THINK, max_tokens: 96 })).choices[0];
    check(message.reasoning_content, "no thought");
  },
  thinking_stream: async () => {
    const found = await deltas({ ...THINK, max_tokens: 96 });
    const thought = found.map((delta) => delta.reasoning_content ?? "").join("");
    const { message } = (await ask({ ...THINK, max_tokens: 96 })).choices[0];
    check(thought && thought === message.reasoning_content, "another thought");
  },
  thinking_off: async () => {
    for (const off of [SPEAK, { reasoning_effort: "none" }]) {
      const { message } = (await ask(off)).choices[0];
      check(message.content && !message.reasoning_content, "it thinks");
    }
  },
  history: async () => {
    const { message } = (await ask({ ...THINK, max_tokens: 96 })).choices[0];
    check(await said({ messages: [...MESSAGES, message, ...MESSAGES], ...SPEAK }), "no text");
  },
  tools_auto: async () => {
    const { message } = (await ask({ tools: TOOLS, tool_choice: "auto" })).choices[0];
    check(message.content || message.tool_calls, "nothing");
  },
  tools_required: () => callOf({ tool_choice: "required" }),
  tools_named: () => callOf({ tool_choice: { type: "function", function: { name: "order" } } }),
  tools_stream: async () => {
    const found = await deltas({ tools: TOOLS, tool_choice: "required", max_tokens: 100 });
    const calls = found.flatMap((delta) => delta.tool_calls ?? []);
    check(calls[0]?.id && calls[0].function.name === "order", "no call");
    checkOrder(JSON.parse(calls.map((call) => call.function.arguments ?? "").join("")));
  },
  tool_loop: async () => {
    const call = await callOf({ tool_choice: "required" });
    const result = { role: "tool", tool_call_id: call.id, content: "done" };
    const messages = [...MESSAGES, { role: "assistant", tool_calls: [call] }, result];
    check((await ask({ messages, tools: TOOLS })).choices[0].message, "no answer");
  },
  json_schema: async () => checkOrder(JSON.parse(await said({ response_format: FORMAT, max_tokens: 100 }))),
  json_object: async () => {
    const text = await said({ response_format: { type: "json_object" }, ...await endsSoon() });
    check(typeof JSON.parse(text) === "object", "no object");
  },
  parse: async () => {
    const fields = { ...HALF, max_tokens: 100 };
    const format = zodResponseFormat(Order, "order");
    const answer = await client().chat.completions.parse({ ...fields, response_format: format });
    checkOrder(answer.choices[0].message.parsed);
    const tools = [zodFunction({ name: "order", parameters: Order })];
    const called = await client().chat.completions.parse({ ...fields, tools, tool_choice: "required" });
    checkOrder(called.choices[0].message.tool_calls[0].function.parsed_arguments);
  },
  stream_helper: async () => {
    const runner = client().chat.completions.stream(HALF);
    let text = "";
    runner.on("content", (delta) => { text += delta; });
    check(await runner.finalContent() === text && text === await said(), "another text");
  },
});
