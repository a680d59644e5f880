/** Uses all that sluice-client has: `tsc --strict` takes it, and Node runs it beside a cluster. */

import {
  APIConnectionError, APIResponseError, APIStatusError, APIStreamError, Answer, CLIENT_LIMITS, ConnectionLostError,
  DirectPacer, IncompleteStreamError, MAX_UNIT_CODE_POINTS, MIN_READING_STALL_S, MIN_TIMER_S, PERFECT_DELAY_S,
  PacedStream, ProtocolError, QoeState, RETRY_POLICY, ReadingPacer, SMOOTH_FRAME_S, SMOOTH_PACING, Segmenter,
  SluiceClient, SluiceClientError, SmoothPacer, isPerfect, makePacer, qoeTarget, smoothPacing, wantsPacing,
} from "sluice-client";
import type {
  ChatOptions, ChatStreamOptions, ClientLimits, ClientOptions, Clock, CompletionStreamOptions, Message, Pace, Pacer,
  PacerStats, Piece, QoeTarget, Reply, RetryPolicy, TokenLogprob, ToolCall, Usage,
} from "sluice-client";

const API = "http://127.0.0.1:8000";

function check(holds: boolean, what: string): void {
  if (!holds) throw new Error(what);
}

async function chats(options: ClientOptions): Promise<string> {
  const client = new SluiceClient([API, new URL(API)], options);
  const messages: Message[] = [
    { role: "user", content: [{ type: "text", text: "Tell me a story about a fox." }], name: "me" },
  ];
  const params: ChatStreamOptions = {
    model: (await client.models())[0], pace: "smooth", qoe: { ttftS: 0.5, speedTokensPerS: 10 }, idempotencyKey: "one",
    signal: new AbortController().signal, temperature: 0, top_p: 1, top_k: 0, min_p: 0, presence_penalty: 0,
    frequency_penalty: 0, repetition_penalty: 1, logit_bias: { 1: 0 }, min_tokens: 1, max_tokens: 12, seed: 1, n: 1,
    stop: ["\n\n"], stop_token_ids: [], ignore_eos: false, stream_options: { include_usage: true }, cache_salt: "a",
    service_tier: "default", slo: { ttft_s: 10, tpot_s: 10 }, logprobs: true, top_logprobs: 1, user: "me",
  };
  const answer: Answer = client.chat(messages, params);
  let shown = "";
  for await (const text of answer) shown += text;
  const stats: PacerStats = answer.stats;
  const usage: Usage | null = answer.usage;
  const calls: ToolCall[] = answer.toolCalls;
  const first = answer.logprobs[0] as TokenLogprob;
  const tokens: number | undefined = answer.serverStats.tokens;
  check(shown === answer.text && answer.reasoning === "" && calls.length === 0, "the text");
  check(answer.finishReason === "length" && usage?.completion_tokens === 12 && tokens === 12, "the end");
  check(answer.requestId !== null && answer.model === params.model && first.logprob <= 0, "the names");
  check(answer.qoe === stats.qoe && answer.stallSeconds === stats.stallSeconds && answer.ttftS === stats.ttftS, "QoE");

  const left = client.chat("Tell me a story.");
  left.skip();
  await left.next();
  left.stop();
  await left.close();
  await left.return();
  const told = client.chat("Tell me a story.");
  await told.next();
  await told.cancel();

  const once: ChatOptions = { n: 2, max_completion_tokens: 3, signal: null };
  const reply: Reply = await client.chatOnce("hi", once);
  check(reply.texts.length === 2 && reply.text === reply.texts[0] && reply.logprobs === null, "both choices");
  check(reply.finishReason === "length" && reply.toolCalls.length === 0 && reply.requestId !== null, "the reply");
  const more: CompletionStreamOptions = { max_tokens: 2, echo: false, logprobs: 1, pace: "off" };
  check((await client.complete([1, 2, 3], more).read()) !== "", "a completion");
  check((await client.completeOnce("Once upon", { max_tokens: 2 })).usage?.prompt_tokens !== 0, "its tokens");
  await client.close();
  return shown;
}

async function errors(): Promise<void> {
  const policy: Partial<RetryPolicy> = { ...RETRY_POLICY, maxRetries: 0 };
  const limits: Partial<ClientLimits> = { idleTimeoutS: CLIENT_LIMITS.idleTimeoutS };
  const client = new SluiceClient(API, { limits: { ...limits, retry: policy }, random: () => 0.5, apiKey: "none" });
  try {
    await client.chatOnce("hi", { temperature: 9 });
    check(false, "a refusal");
  } catch (error) {
    check(error instanceof APIStatusError && error.status === 400 && error.retryAfterS === null, "its status");
    check(error instanceof APIResponseError && error.code !== null && error.kind !== null, "its code");
    check(error instanceof SluiceClientError && error instanceof Error, "its bases");
  }
  const others = [APIConnectionError, APIStreamError, ConnectionLostError, IncompleteStreamError, ProtocolError];
  check(others.every((type) => type.prototype instanceof SluiceClientError), "the tree");
}

async function paces(): Promise<void> {
  const target: QoeTarget = qoeTarget({ ttftS: 0.001, speedTokensPerS: 10_000 });
  const mode: Pace = wantsPacing() ? "reading" : "off";
  const pacers: Pacer[] = [
    makePacer(mode, target), new ReadingPacer(target), new DirectPacer(), makePacer("smooth"),
    new SmoothPacer(target, smoothPacing({ ...SMOOTH_PACING, reserveS: 0 })),
  ];
  for (const pacer of pacers) {
    pacer.push(0, "one ", 2, { paced: true });
    pacer.skip(1);
    pacer.finish(1);
    check(pacer.nextDueS() !== null && pacer.bufferedTokens === 2 && pacer.bufferedChars === 4, "what waits");
    check(pacer.pop(1).map(({ text }) => text).join("") === "one " && pacer.stats().qoe === pacer.qoe, "what is shown");
  }
  async function* source(): AsyncGenerator<string | Piece> {
    yield "one ";
    yield { text: "two", numTokens: 1, paced: false };
  }
  const clock: Clock = {
    nowS: () => performance.now() / 1000,
    setTimer: (callback, delayS) => setTimeout(callback, delayS * 1000),
    clearTimer: (timer) => clearTimeout(timer),
  };
  const stream = new PacedStream(source(), makePacer("off"), { clock, startedS: clock.nowS(), maxBufferedChars: 99 });
  let shown = "";
  for await (const text of stream) shown += text;
  check(shown === "one two" && stream.stats.bufferedChars === 0 && stream.pacer.qoe > 0, "a stream");
  const state = new QoeState(target);
  check(state.deliver(0, 2) > 0 && state.final() === 1 && state.isPerfect && isPerfect(state.delayS), "QoE");
  check(state.qoeAt(1, { finished: true }) === 1 && state.numTokens === 2 && state.lagS <= 0 && state.lastS > 0, "lag");
  check(new Segmenter().feed("one two").every(({ startsUnit, paced }) => startsUnit && paced), "words");
  const numbers = [MAX_UNIT_CODE_POINTS, MIN_READING_STALL_S, MIN_TIMER_S, PERFECT_DELAY_S, SMOOTH_FRAME_S];
  check(numbers.every((number) => number > 0), "constants");
}

/** What may not be written; each line has an error, or `tsc` says that it has none. */
export function refused(client: SluiceClient): void {
  // @ts-expect-error fields have the API's names
  client.chat("hi", { maxTokens: 5 });
  // @ts-expect-error
  client.chat("hi", { pace: "fast" });
  // @ts-expect-error
  client.chat("hi", { temperature: "0" });
  // @ts-expect-error
  client.chat("hi", { n: 2 });
  // @ts-expect-error
  client.chat("hi", { qoe: { ttft_s: 1 } });
  // @ts-expect-error
  client.chat([{ role: "user", contents: "hi" }]);
  // @ts-expect-error
  client.chatOnce("hi", { pace: "off" });
  // @ts-expect-error
  new SluiceClient(API, { api_key: "none" });
  // @ts-expect-error
  new SluiceClient(API, { limits: { retry: { retries: 1 } } });
  // @ts-expect-error answers are made by a client
  new Answer();
}

const [overHttp, overSocket] = [await chats({}), await chats({ transport: "websocket", WebSocket, model: null })];
check(overHttp === overSocket, "the same answer both ways");
await errors();
await paces();
console.log(overHttp);
