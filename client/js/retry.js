/**
 * Whether and when a request that failed is sent again; the rules of sluice_client/retry.py. Pure: time, in seconds,
 * and the source of jitter, a function from nothing to [0, 1), are given. Both languages pass vectors/sdk.json.
 */

export const RETRIED_STATUSES = new Set([429, 503]);

/** Bounds on retries; `RetryPolicy` in index.d.ts says what each means. */
export const RETRY_POLICY = Object.freeze({
  maxRetries: 2,
  firstBackoffS: 0.5,
  maxBackoffS: 8.0,
  maxRetryAfterS: 60.0,
  budgetRatio: 0.1,
  budgetBurst: 10.0,
  budgetPerS: 0.1,
  maxResumes: 20,
  resumeLimitS: 30.0,
});

/** Seconds to wait after failed attempt number `attempt` (from 0), if the server names no time: full jitter. */
function backoffS(policy, attempt, random) {
  return random() * Math.min(policy.firstBackoffS * 2 ** Math.min(attempt, 60), policy.maxBackoffS);
}

/** The same, never shorter than the server's time; null: it asks for too long a wait. */
function delayS(policy, attempt, retryAfterS, random) {
  if (retryAfterS !== null && retryAfterS > policy.maxRetryAfterS) return null;
  return (retryAfterS ?? 0) + backoffS(policy, attempt, random);
}

/**
 * The retries that a client has left, over all of its requests.
 *
 * In any time T with R requests there are at most `budgetBurst + budgetRatio * R + budgetPerS * T` retries.
 */
export class RetryBudget {
  #policy;
  #left;
  #filledS;

  constructor(policy, nowS) {
    this.#policy = policy;
    this.#left = policy.budgetBurst;
    this.#filledS = nowS;
  }

  /** Count a first attempt. */
  noteRequest(nowS) {
    this.#fill(nowS, this.#policy.budgetRatio);
  }

  /** Use one retry; false if none is left. */
  take(nowS) {
    this.#fill(nowS, 0);
    if (this.#left < 1) return false;
    this.#left -= 1;
    return true;
  }

  #fill(nowS, more) {
    const earned = more + Math.max(0, nowS - this.#filledS) * this.#policy.budgetPerS;
    this.#left = Math.min(this.#policy.budgetBurst, this.#left + earned);
    this.#filledS = Math.max(nowS, this.#filledS);
  }
}

/** A failed attempt, and what it says about another one. */
export class Failure {
  /**
   * @param error what is thrown if there is no other attempt.
   * @param says `isUnreachable`: no server took the request, so that trying again costs none anything.
   */
  constructor(error, { mayRetry, retryAfterS = null, isUnreachable = false }) {
    this.error = error;
    this.mayRetry = mayRetry;
    this.retryAfterS = retryAfterS;
    this.isUnreachable = isUnreachable;
  }
}

/** The attempts of one request. */
export class Attempts {
  #policy;
  #budget;
  #random;
  #startedS;
  #isResume;
  #numRetries = 0;
  #numWaits = 0;

  /** @param options `isResume`: of an answer that has begun, for which it is worth waiting for the server. */
  constructor(policy, budget, random, nowS, { isResume = false } = {}) {
    this.#policy = policy;
    this.#budget = budget;
    this.#random = random;
    this.#startedS = nowS;
    this.#isResume = isResume;
    if (!isResume) budget.noteRequest(nowS);
  }

  /**
   * Seconds to wait before the next attempt; null: give up.
   *
   * @param options `hasOtherServer`: another one has not been tried yet, and this one's trouble is its own.
   */
  nextDelayS(failure, nowS, { hasOtherServer = false } = {}) {
    if (!failure.mayRetry) return null;
    if (this.#isResume && failure.isUnreachable) {
      if (nowS - this.#startedS > this.#policy.resumeLimitS) return null;
    } else {
      if (this.#numRetries >= this.#policy.maxRetries || !this.#budget.take(nowS)) return null;
      this.#numRetries += 1;
    }
    if (hasOtherServer) return 0;
    this.#numWaits += 1;
    return delayS(this.#policy, this.#numWaits - 1, failure.retryAfterS, this.#random);
  }
}

/**
 * The connections that one answer has lost after it had begun.
 *
 * Going on costs the server little as long as each connection brings something; one that brings nothing counts as a
 * retry.
 */
export class Resumes {
  #policy;
  #budget;
  #random;
  #numLost = 0;
  #numIdle = 0;

  constructor(policy, budget, random) {
    this.#policy = policy;
    this.#budget = budget;
    this.#random = random;
  }

  /** Seconds to wait before the answer is asked for again; null: give up. */
  nextDelayS(nowS, { hasProgressed }) {
    this.#numLost += 1;
    this.#numIdle = hasProgressed ? 0 : this.#numIdle + 1;
    if (this.#numLost > this.#policy.maxResumes) return null;
    const isRetry = this.#numIdle > 0;
    if (isRetry && (this.#numIdle > this.#policy.maxRetries || !this.#budget.take(nowS))) return null;
    return backoffS(this.#policy, this.#numIdle, this.#random);
  }
}

/** Whether a response with this status invites another try; the server's own word counts most. `headers` has `get`. */
export function mayRetry(status, headers) {
  const ownWord = headers.get("x-should-retry")?.toLowerCase();
  if (ownWord === "true" || ownWord === "false") return ownWord === "true";
  return RETRIED_STATUSES.has(status);
}

/** Seconds to wait by retry-after-ms or Retry-After (seconds or a date); null if absent or not understood. */
export function parseRetryAfter(headers, nowUnixS) {
  const milliseconds = parseNumber(headers.get("retry-after-ms"));
  if (milliseconds !== null) return milliseconds / 1000;
  const value = headers.get("retry-after") ?? "";
  const seconds = parseNumber(value);
  if (seconds !== null || !/^[A-Z][a-z]+, /.test(value)) return seconds; // Date.parse takes nearly anything for a date
  const atS = Date.parse(value) / 1000;
  return Number.isNaN(atS) ? null : Math.max(0, atS - nowUnixS);
}

function parseNumber(value) {
  const number = value?.trim() ? Number(value) : NaN;
  return Number.isFinite(number) && number >= 0 ? number : null;
}
