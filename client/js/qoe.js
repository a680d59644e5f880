/** QoE arithmetic: the reader's schedule and how close an answer came to it; sluice_client/qoe.py explains it. Pure. */

import { checkNames } from "./options.js";

/** Largest S_delay of a stream that still counts as perfect, in token-seconds. */
export const PERFECT_DELAY_S = 1e-3;

const TARGET_NAMES = ["ttftS", "speedTokensPerS"];

/** What the reader expects; throws RangeError for an unknown name, or a number that is not finite and above 0. */
export function qoeTarget(some = {}) {
  checkNames(TARGET_NAMES, some, "the reader's target");
  const { ttftS = 1.0, speedTokensPerS = 4.8 } = some;
  for (const [name, value] of Object.entries({ ttftS, speedTokensPerS })) {
    if (!(Number.isFinite(value) && value > 0)) {
      throw new RangeError(`${name} must be a finite number above 0, not ${value}`);
    }
  }
  return Object.freeze({ ttftS, speedTokensPerS });
}

/** Whether a stream with this S_delay counts as perfect. */
export function isPerfect(delayS) {
  return delayS <= PERFECT_DELAY_S;
}

/** QoE of one answer in constant time and space per token; its Python twin explains the three numbers. */
export class QoeState {
  #ttftS;
  #hasThought = false;
  #numTokens = 0;
  #lagS = 0;
  #delayS = 0;

  constructor(target = qoeTarget()) {
    this.target = target;
    this.#ttftS = target.ttftS;
  }

  get numTokens() {
    return this.#numTokens;
  }

  get lagS() {
    return this.#lagS;
  }

  get delayS() {
    return this.#delayS;
  }

  get lastS() {
    return this.#ttftS + (this.#numTokens - 1) / this.target.speedTokensPerS + this.#lagS;
  }

  get isPerfect() {
    return isPerfect(this.#delayS);
  }

  /** Record that what reached the client until `tS` was thinking: the text begins behind it. */
  think(tS) {
    this.#ttftS = Math.max(this.target.ttftS, tS + 1 / this.target.speedTokensPerS);
    this.#hasThought = true;
    this.#numTokens = this.#lagS = this.#delayS = 0;
  }

  /** Record that the next `count` tokens reached the client at `tS`; returns when the last of them is displayed. */
  deliver(tS, count = 1) {
    if (!(count >= 1)) throw new RangeError("a delivery has at least one token");
    const ideal = this.#ttftS + this.#numTokens / this.target.speedTokensPerS;
    this.#lagS = Math.max(this.#lagS, tS - ideal);
    this.#numTokens += count;
    this.#delayS += count * this.#lagS;
    return this.lastS;
  }

  /** QoE as seen at `tS`, at or after the last delivery, in [0, 1]. */
  qoeAt(tS, { finished = false } = {}) {
    let numExpected = this.#count(tS);
    if (finished) numExpected = Math.min(numExpected, this.#numTokens);
    const expected = this.#area(numExpected, tS);
    if (expected <= 0) return 1;
    const numShown = Math.min(this.#numTokens, this.#count(tS - this.#lagS));
    const shownDelay = this.#delayS - (this.#numTokens - numShown) * this.#lagS;
    return clampUnit((this.#area(numShown, tS) - shownDelay) / expected);
  }

  /** QoE if the answer ends with the last delivered token, in [0, 1]; of none 0, and 1 if there was thinking. */
  final() {
    const n = this.#numTokens;
    if (n === 0) return Number(this.#hasThought);
    const whole = n * this.#lagS + (n * (n - 1)) / (2 * this.target.speedTokensPerS);
    return whole <= 0 ? 1 : clampUnit(1 - this.#delayS / whole);
  }

  #count(tS) {
    return Math.max(0, Math.floor((tS - this.#ttftS) * this.target.speedTokensPerS) + 1);
  }

  #area(count, tS) {
    return count * (tS - this.#ttftS) - (count * (count - 1)) / (2 * this.target.speedTokensPerS);
  }
}

function clampUnit(value) {
  return Math.min(1, Math.max(0, value));
}
