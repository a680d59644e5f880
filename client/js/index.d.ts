/**
 * Types of sluice-client. Times are in seconds, from the request's sending unless said otherwise. Fields of requests,
 * and of what servers say, have the names that the API gives them (docs/api.md); everything else is in camelCase.
 */

// ---- requests -------------------------------------------------------------------------------------------------------

/** When the text is shown: at the speed of `qoe`, evenly as fast as it comes, or as it comes. */
export type Pace = "reading" | "smooth" | "off";

/** What the reader expects. Both numbers are above 0; the defaults are 1.0 s and 4.8 tokens/s. */
export interface QoeOptions {
  /** When the first token is due. */
  ttftS?: number;
  speedTokensPerS?: number;
}

export interface TextPart {
  type: "text";
  text: string;
}

export interface Message {
  role: "system" | "developer" | "user" | "assistant" | "tool";
  content?: string | TextPart[] | null;
  name?: string;
  refusal?: string | null;
  /** Of the assistant; each is answered by a message of role "tool" right behind. */
  tool_calls?: ToolCall[];
  /** Of role "tool": whose result it is. */
  tool_call_id?: string;
}

/** What the answer is to be: text, a JSON object, or JSON that a schema allows. */
export type ResponseFormat =
  | { type: "text" | "json_object" }
  | {
      type: "json_schema";
      json_schema: {
        name: string;
        schema: Record<string, unknown>;
        /** False: a `oneOf` whose schemas may overlap is taken as `anyOf`, and the answer says so. */
        strict?: boolean | null;
        description?: string | null;
      };
    };

/** What the answer is held to, as vLLM names it; one of them. */
export interface StructuredOutputs {
  /** A JSON schema, or its text. */
  json?: Record<string, unknown> | string | null;
  json_object?: boolean | null;
  regex?: string | null;
  choice?: string[] | null;
  /** Lark or GBNF. */
  grammar?: string | null;
}

/** A function that the model may call. */
export interface FunctionTool {
  type: "function";
  function: {
    name: string;
    description?: string;
    /** JSON schema of the arguments. */
    parameters?: Record<string, unknown>;
    /** The arguments of a call have to match it. */
    strict?: boolean;
  };
}

export type ToolChoice = "none" | "auto" | "required" | { type: "function"; function: { name: string } };

/** Fields of a request that chat and completions share. What is not here may be given by a name with a `_`. */
export interface RequestParams {
  n?: number;
  best_of?: number;
  max_tokens?: number;
  max_completion_tokens?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  logit_bias?: Record<string, number>;
  min_tokens?: number;
  seed?: number;
  stop?: string | string[];
  stop_token_ids?: number[];
  ignore_eos?: boolean;
  stream_options?: { include_usage?: boolean };
  response_format?: ResponseFormat;
  structured_outputs?: StructuredOutputs;
  cache_salt?: string;
  service_tier?: "auto" | "default" | "scale" | "flex" | "priority" | "fast";
  slo?: { ttft_s?: number; tpot_s?: number };
  user?: string;
  metadata?: Record<string, string>;
  [name: `${string}_${string}`]: unknown;
}

export interface ChatParams extends RequestParams {
  logprobs?: boolean;
  top_logprobs?: number;
  chat_template_kwargs?: Record<string, boolean | number | string | null>;
  thinking_token_budget?: number;
  reasoning_effort?: "none" | "minimal" | "low" | "medium" | "high" | "xhigh" | "max";
  /** The answer goes on with the last message, the assistant's own. */
  continue_final_message?: boolean;
  add_generation_prompt?: boolean;
  tools?: FunctionTool[];
  tool_choice?: ToolChoice;
  /** False: an answer has one call at most. */
  parallel_tool_calls?: boolean;
}

export interface CompletionParams extends RequestParams {
  echo?: boolean;
  logprobs?: number | false;
}

/** What every call takes besides the fields of its request. */
export interface CallOptions {
  /** Default: the client's, else the first one that the server lists. */
  model?: string;
  /** Sent to the server if it is given; only Sluice knows it. */
  qoe?: QoeOptions;
  /** Of requests that are one; default: a new one, so that it is one however often it is sent. */
  idempotencyKey?: string;
  /** Ends the call, and the work of the server, when it is aborted; its reason is thrown. */
  signal?: AbortSignal | null;
}

export interface StreamOptions extends CallOptions {
  /** Default: "smooth". */
  pace?: Pace;
  /** An `Answer` streams one choice. */
  n?: 1;
}

export type ChatStreamOptions = ChatParams & StreamOptions;
export type CompletionStreamOptions = CompletionParams & StreamOptions;
export type ChatOptions = ChatParams & CallOptions;
export type CompletionOptions = CompletionParams & CallOptions;

// ---- answers --------------------------------------------------------------------------------------------------------

/** Token counts, as the server names them. */
export interface Usage {
  prompt_tokens?: number;
  completion_tokens?: number;
  total_tokens?: number;
  prompt_tokens_details?: { cached_tokens?: number };
  completion_tokens_details?: { reasoning_tokens?: number };
}

/** A call of a tool; its `arguments` are JSON, as the model wrote it: check it before it is used. */
export interface ToolCall {
  id: string | null;
  type: "function";
  function: { name: string; arguments: string };
}

/** Log-probability of one token of a chat, or of an alternative to it. */
export interface TokenLogprob {
  token: string;
  logprob: number;
  bytes: number[] | null;
  top_logprobs?: TokenLogprob[];
}

export interface ChatLogprobs {
  content: TokenLogprob[] | null;
}

export interface CompletionLogprobs {
  tokens: string[];
  token_logprobs: (number | null)[];
  text_offset: number[];
  top_logprobs: Record<string, number | null>[] | null;
}

/** An answer that was not streamed. */
export interface Reply {
  text: string;
  finishReason: string | null;
  usage: Usage | null;
  requestId: string | null;
  toolCalls: ToolCall[];
  /** Of all choices (`n`), by index; the first one is `text`. */
  texts: string[];
  /** Of the first choice; null unless they were asked for. */
  logprobs: ChatLogprobs | CompletionLogprobs | null;
}

/**
 * An asynchronous iterable of text, made by `SluiceClient`; iterate once. The request is sent at the first use.
 *
 * An answer without a finish reason always throws, after the text that came (`errors.js` draws the tree of errors).
 */
export class Answer implements AsyncIterableIterator<string> {
  private constructor();
  [Symbol.asyncIterator](): this;
  next(): Promise<IteratorResult<string, undefined>>;
  /** Ends the answer and closes its connection; leaving a `for await` loop calls it. */
  return(value?: unknown): Promise<IteratorResult<string, undefined>>;
  /** Read to the end without pacing; returns the whole text. */
  read(): Promise<string>;
  /** Show what has arrived now, and the rest as it arrives. */
  skip(): void;
  /** Make the server cancel; what had arrived is shown at once, then the iteration ends, without an error. */
  stop(): void;
  /** As `stop`, but the server is told in so many words: also where a proxy keeps its connection open. */
  cancel(): Promise<void>;
  /** End the answer and close its connection. Calling it again changes nothing. */
  close(): Promise<void>;

  /** Everything received so far; the whole answer after the end. */
  readonly text: string;
  /** The model's thinking, if the server sends it apart; never displayed. */
  readonly reasoning: string;
  /** Complete after the end. */
  readonly toolCalls: ToolCall[];
  /** Received so far: chat's entries, or the parts of a completion's. */
  readonly logprobs: (TokenLogprob | CompletionLogprobs)[];
  /** Why the model ended; null while it has not. */
  readonly finishReason: string | null;
  /** If the server sent it. */
  readonly usage: Usage | null;
  /** From the header x-request-id, else the id of the chunks. */
  readonly requestId: string | null;
  /** The model that answers, as the server names it. */
  readonly model: string | null;
  /** What a Sluice server says of the answer after its end; else empty. */
  readonly serverStats: { qoe?: number | null; ttft_s?: number; tokens?: number };
  /** QoE, stalls and buffer, as seen here. */
  readonly stats: PacerStats;
  /** QoE of the answer as it reached this client, in [0, 1]. */
  readonly qoe: number;
  /** For which the reader waited after the first token. */
  readonly stallSeconds: number;
  /** From the sending of the request to the first token; null while there is none. */
  readonly ttftS: number | null;
}

// ---- the client -----------------------------------------------------------------------------------------------------

/** Bounds on retries. */
export interface RetryPolicy {
  /** Attempts after the first one; 0 turns retries off. */
  maxRetries: number;
  /** Longest wait before the first retry; doubles with each. The wait is drawn from 0 to this. */
  firstBackoffS: number;
  /** Longest wait of our own choice. */
  maxBackoffS: number;
  /** A server that asks for a longer wait gets no retry: the error goes to the caller, with the time. */
  maxRetryAfterS: number;
  /** Retries that each request of the client allows, for itself or for others. */
  budgetRatio: number;
  /** Retries that the client may make before it has sent many requests; also the most that can be saved up. */
  budgetBurst: number;
  /** Retries that each second allows besides. */
  budgetPerS: number;
  /** Lost connections after which an answer that has begun is not resumed again; 0 turns resuming off. */
  maxResumes: number;
  /** Longest time in which a server that cannot be reached is tried again for an answer that has begun. */
  resumeLimitS: number;
}

/** Every bound of a client. */
export interface ClientLimits {
  /** Longest wait for a WebSocket to open; over HTTP the platform decides. */
  connectTimeoutS: number;
  /** Longest silence of the server, before its headers or within a stream; a keep-alive comment ends a silence. */
  idleTimeoutS: number;
  /** Longest wait for the end of a response after its [DONE], so that its connection can serve another request. */
  endTimeoutS: number;
  /** Largest event of a stream. */
  maxEventBytes: number;
  /** Largest answer that is not streamed. */
  maxBodyBytes: number;
  /** Of requests that failed before the first token, and of answers that lost their connection. */
  retry: RetryPolicy;
}

export const RETRY_POLICY: Readonly<RetryPolicy>;
export const CLIENT_LIMITS: Readonly<ClientLimits>;

export interface ClientOptions {
  /** Sent as a bearer token. */
  apiKey?: string | null;
  /** Default of the methods; else the first model that the server lists. */
  model?: string | null;
  limits?: Partial<Omit<ClientLimits, "retry">> & { retry?: Partial<RetryPolicy> };
  /** Source of the jitter between retries, in [0, 1); default: `Math.random`. */
  random?: () => number;
  /** Of streamed answers; "websocket" (Sluice only) carries several over one connection. Default: "http". */
  transport?: "http" | "websocket";
  /** Constructor for `transport: "websocket"` where the platform has none (Node before 22), such as that of `ws`. */
  WebSocket?: new (url: string, options?: any) => WebSocketLike;
}

/** What is used of a WebSocket. */
export interface WebSocketLike {
  readonly readyState: number;
  send(text: string): void;
  close(): void;
  addEventListener(type: any, listener: (event: any) => void): void;
}

/** A client of one server, or of several that serve the same; `close` it in the end. */
export class SluiceClient {
  /** `baseUrl`: "http://host:8000"; /v1 is added unless the URL has a path of its own. */
  constructor(baseUrl: string | URL | Iterable<string | URL>, options?: ClientOptions);
  /** Stream the answer to a conversation; a string is one message of the user. */
  chat(messages: string | Iterable<Message>, options?: ChatStreamOptions): Answer;
  /** Stream the continuation of a prompt, text or token ids. */
  complete(prompt: string | readonly number[], options?: CompletionStreamOptions): Answer;
  /** The answer to a conversation in one piece, not paced; with `n`, all choices. */
  chatOnce(messages: string | Iterable<Message>, options?: ChatOptions): Promise<Reply>;
  /** The continuation of a prompt in one piece, not paced. */
  completeOnce(prompt: string | readonly number[], options?: CompletionOptions): Promise<Reply>;
  /** Ids of the models that the server lists. */
  models(options?: { signal?: AbortSignal | null }): Promise<string[]>;
  /** Close every connection; answers under way lose theirs. */
  close(): Promise<void>;
}

// ---- errors ---------------------------------------------------------------------------------------------------------

/** Base of all errors of this package, but for arguments that cannot be (RangeError) and the reasons of signals. */
export class SluiceClientError extends Error {}
/** No response came; the cause is chained. */
export class APIConnectionError extends SluiceClientError {}
/** The server reported an error. */
export class APIResponseError extends SluiceClientError {
  /** OpenAI's short code, such as "context_length_exceeded". */
  readonly code: string | null;
  /** OpenAI's `type`, such as "invalid_request_error". */
  readonly kind: string | null;
  /** For the operator's logs. */
  readonly requestId: string | null;
}
/** The server answered with an HTTP status that says no. */
export class APIStatusError extends APIResponseError {
  readonly status: number;
  /** Seconds to wait before another try, if the server said so. */
  readonly retryAfterS: number | null;
}
/** The server failed in the middle of a stream and said so. */
export class APIStreamError extends APIResponseError {}
/** The connection broke, or nothing came for too long, before the answer was finished. */
export class ConnectionLostError extends SluiceClientError {}
/** The stream ended without a finish reason: the text is a part of the answer. */
export class IncompleteStreamError extends SluiceClientError {}
/** The server sent something that is not OpenAI's protocol. */
export class ProtocolError extends SluiceClientError {}

// ---- pacing ---------------------------------------------------------------------------------------------------------

export interface QoeTarget {
  readonly ttftS: number;
  readonly speedTokensPerS: number;
}

/**
 * Text that arrived: how many tokens it completes (default 1), whether it is to be paced (default true), and whether the
 * model has thought until its arrival (default false), which nobody reads.
 */
export interface Piece {
  text: string;
  numTokens?: number;
  paced?: boolean;
  thinks?: boolean;
}

/** Text that is due, and since when. */
export interface Shown {
  text: string;
  atS: number;
  numTokens: number;
}

export interface PacerStats {
  qoe: number;
  stallSeconds: number;
  numStalls: number;
  bufferedTokens: number;
  /** UTF-16 code units that arrived and are not shown. */
  bufferedChars: number;
  ttftS: number | null;
  /** When the last token came. */
  receivedS: number | null;
  longestGapS: number;
  /** When the last text was shown. */
  shownS: number | null;
}

/** A state machine without a clock: every method takes the time. */
export interface Pacer {
  readonly target: QoeTarget;
  push(nowS: number, text: string, numTokens?: number, options?: { paced?: boolean; thinks?: boolean }): void;
  finish(nowS: number): void;
  skip(nowS: number): void;
  pop(nowS: number): Shown[];
  nextDueS(): number | null;
  readonly bufferedTokens: number;
  readonly bufferedChars: number;
  readonly qoe: number;
  stats(): PacerStats;
}

export class ReadingPacer implements Pacer {
  constructor(target?: QoeTarget);
  readonly target: QoeTarget;
  push(nowS: number, text: string, numTokens?: number, options?: { paced?: boolean; thinks?: boolean }): void;
  finish(nowS: number): void;
  skip(nowS: number): void;
  pop(nowS: number): Shown[];
  nextDueS(): number | null;
  readonly bufferedTokens: number;
  readonly bufferedChars: number;
  readonly qoe: number;
  stats(): PacerStats;
}

export class DirectPacer extends ReadingPacer {}

export class SmoothPacer extends ReadingPacer {
  constructor(target?: QoeTarget, pacing?: Partial<SmoothPacing>);
  readonly pacing: SmoothPacing;
}

/** Parameters of smooth mode; docs/design/client.md says what each means. */
export interface SmoothPacing {
  readonly reserveS: number;
  readonly reserveGrowthRatio: number;
  readonly catchUpRatio: number;
  readonly drainS: number;
  readonly maxBacklogS: number;
  readonly tokensPerWord: number;
  readonly rateMemoryS: number;
  readonly minObservedS: number;
  readonly pauseS: number;
  readonly sameArrivalS: number;
  readonly maxObservedGapS: number;
  readonly minStallS: number;
}

export const SMOOTH_PACING: SmoothPacing;
/** Complete parameters of smooth mode from some. */
export function smoothPacing(some?: Partial<SmoothPacing>): SmoothPacing;
/** What the reader expects, complete. */
export function qoeTarget(some?: QoeOptions): QoeTarget;
/** The pacer of a mode. */
export function makePacer(mode: Pace, target?: QoeTarget, pacing?: Partial<SmoothPacing>): Pacer;

export interface Clock {
  nowS(): number;
  setTimer(callback: () => void, delayS: number): unknown;
  clearTimer(timer: any): void;
}

/** An asynchronous iterable of text as it is to be displayed, made of one of text as it arrives; iterate once. */
export class PacedStream implements AsyncIterableIterator<string> {
  constructor(
    source: AsyncIterable<string | Piece>,
    pacer: Pacer,
    options?: {
      /** The clock's time of the request's arrival; default: the first use. */
      startedS?: number | null;
      /** Least time between two outputs; default: 1/60 in smooth mode, else 0. */
      frameS?: number | null;
      /** The source is not read further while this much waits. */
      maxBufferedChars?: number;
      clock?: Clock;
    },
  );
  readonly pacer: Pacer;
  readonly stats: PacerStats;
  [Symbol.asyncIterator](): this;
  next(): Promise<IteratorResult<string, undefined>>;
  return(value?: unknown): Promise<IteratorResult<string, undefined>>;
  skip(): void;
  stop(): void;
}

/** False if the user's system asks for reduced motion: then show text as it arrives, pace "off". */
export function wantsPacing(): boolean;

/** QoE of one answer in constant time and space per token. */
export class QoeState {
  constructor(target?: QoeTarget);
  readonly target: QoeTarget;
  readonly numTokens: number;
  readonly lagS: number;
  readonly delayS: number;
  readonly lastS: number;
  readonly isPerfect: boolean;
  /** Record that what came until `tS` was thinking: the text begins behind it. */
  think(tS: number): void;
  /** Record that the next `count` tokens came at `tS`; returns when the last of them is displayed. */
  deliver(tS: number, count?: number): number;
  qoeAt(tS: number, options?: { finished?: boolean }): number;
  final(): number;
}

/** Whether a stream with this sum of delays, in token-seconds, counts as perfect. */
export function isPerfect(delayS: number): boolean;

export interface Fragment {
  text: string;
  startsUnit: boolean;
  paced: boolean;
}

/** Cuts one answer, piece by piece, into fragments; joined, they are the text. */
export class Segmenter {
  feed(text: string): Fragment[];
}

export const PERFECT_DELAY_S: number;
export const MAX_UNIT_CODE_POINTS: number;
export const MIN_READING_STALL_S: number;
export const MIN_TIMER_S: number;
export const SMOOTH_FRAME_S: number;
