/** Smooth mode; sluice_client/smooth_pacer.py states the rule. */

import { checkNames } from "./options.js";
import { Pacer, Queue } from "./pacer_base.js";
import { qoeTarget } from "./qoe.js";
import { Segmenter } from "./segment.js";

/** Parameters of smooth mode; `SmoothPacing` in sluice_client/smooth_pacer.py says what each means. */
export const SMOOTH_PACING = Object.freeze({
  reserveS: 0.25,
  reserveGrowthRatio: 0.25,
  catchUpRatio: 0.25,
  drainS: 0.3,
  maxBacklogS: 1.0,
  tokensPerWord: 1.3,
  rateMemoryS: 1.0,
  minObservedS: 0.05,
  pauseS: 0.25,
  sameArrivalS: 1e-3,
  maxObservedGapS: 1.0,
  minStallS: 0.1,
});

const ZERO_ALLOWED = new Set(["reserveS", "reserveGrowthRatio", "catchUpRatio", "minStallS"]);

/** Complete parameters of smooth mode from some; throws RangeError for an unknown name or a number out of its range. */
export function smoothPacing(some = {}) {
  checkNames(Object.keys(SMOOTH_PACING), some, "smooth mode");
  for (const [name, value] of Object.entries(some)) {
    if (!(Number.isFinite(value) && (value > 0 || (value === 0 && ZERO_ALLOWED.has(name))))) {
      throw new RangeError(`${name} is out of its range: ${value}`);
    }
  }
  return Object.freeze({ ...SMOOTH_PACING, ...some });
}

/** Words per second of the generator: a running mean that forgets with a time constant. */
class GenerationRate {
  #pacing;
  #lastS = null;
  #words = 0;
  #seconds = 0;
  #arrivals = 0;

  constructor(pacing) {
    this.#pacing = pacing;
  }

  /** Count the words that a piece begins; null: it is not prose and says nothing. */
  observe(nowS, numWords) {
    const lastS = this.#lastS;
    this.#lastS = nowS;
    if (lastS === null || numWords === null) return;
    const gapS = Math.min(nowS - lastS, this.#longestGapS());
    const decay = Math.exp(-gapS / this.#pacing.rateMemoryS);
    this.#words = this.#words * decay + numWords;
    this.#seconds = this.#seconds * decay + gapS;
    this.#arrivals = this.#arrivals * decay + (gapS > this.#pacing.sameArrivalS ? 1 : 0);
  }

  #longestGapS() {
    if (this.#arrivals <= 0) return this.#pacing.maxObservedGapS;
    const usualS = this.#seconds / this.#arrivals;
    return Math.min(this.#pacing.maxObservedGapS, Math.max(this.#pacing.pauseS, 4 * usualS));
  }

  wordsPerS(fallback) {
    if (this.#seconds < this.#pacing.minObservedS || this.#words <= 0) return fallback;
    return this.#words / this.#seconds;
  }
}

/** Shows words at the pace of the generator, behind a reserve. */
export class SmoothPacer extends Pacer {
  constructor(target = qoeTarget(), pacing = SMOOTH_PACING) {
    super(target);
    this.pacing = smoothPacing(pacing);
    this._readingPerS = target.speedTokensPerS / this.pacing.tokensPerWord;
    this._segmenter = new Segmenter();
    this._rate = new GenerationRate(this.pacing);
    this._waiting = new Queue();
    this._numPacedWaiting = 0;
    this._numPacedShown = 0;
    this._floors = []; // [up to this paced word, words per second], falling rates
    this._changedS = -Infinity;
    this._lastShownS = null;
    this._readS = null;
  }

  finish(nowS) {
    super.finish(nowS);
    this._changedS = this._nowS;
  }

  _accept(text, numTokens, paced) {
    this._changedS = this._nowS;
    if (numTokens > 0) this._state.deliver(this._nowS, numTokens);
    let numWords = null;
    if (paced) numWords = this._acceptProse(text);
    else if (text !== "") this._append(text, false);
    this._rate.observe(this._nowS, numWords);
    if (numWords) this._raiseFloor();
    this._addTokens(numTokens);
  }

  _acceptProse(text) {
    let numWords = 0;
    let hasProse = false;
    for (const fragment of this._segmenter.feed(text)) {
      hasProse = hasProse || fragment.paced;
      if (fragment.startsUnit) {
        this._append(fragment.text, fragment.paced);
        if (fragment.paced) numWords += 1;
      } else {
        this._continue(fragment.text);
      }
    }
    return hasProse ? numWords : null;
  }

  _append(text, paced) {
    this._waiting.push({ text, numTokens: 0, paced, arrivedS: this._nowS });
    if (paced) this._numPacedWaiting += 1;
  }

  _continue(text) {
    if (this._waiting.length > 0) this._waiting.last.text += text;
    else this._ready.push({ text, atS: this._nowS, numTokens: 0 });
  }

  _addTokens(numTokens) {
    if (this._waiting.length > 0) this._waiting.last.numTokens += numTokens;
    else if (this._ready.at(-1)?.atS === this._nowS) this._ready.at(-1).numTokens += numTokens;
    else if (numTokens > 0) this._ready.push({ text: "", atS: this._nowS, numTokens });
  }

  _raiseFloor() {
    const rate = this._numPacedWaiting / this.pacing.maxBacklogS;
    while (this._floors.length > 0 && this._floors[this._floors.length - 1][1] <= rate) this._floors.pop();
    this._floors.push([this._numPacedShown + this._numPacedWaiting, rate]);
  }

  _nextWaitingS() {
    if (this._waiting.length === 0) return null;
    if (this._skipped) return this._nowS;
    const head = this._waiting.first;
    let earliestS = Math.max(head.arrivedS, this._changedS);
    if (this._lastShownS === null) return earliestS;
    earliestS = Math.max(earliestS, this._lastShownS);
    return head.paced ? Math.max(earliestS, this._pacedDueS(head, this._lastShownS)) : earliestS;
  }

  _pacedDueS(head, lastS) {
    const pacePerS = Math.max(this._readingPerS, this._rate.wordsPerS(this._readingPerS));
    const floorPerS = this._floors.length > 0 ? this._floors[0][1] : 0;
    const fastS = lastS + 1 / Math.max(pacePerS * (1 + this.pacing.catchUpRatio), floorPerS);
    const growthS = lastS + (1 + this.pacing.reserveGrowthRatio) / pacePerS;
    const dueS = Math.max(fastS, Math.min(growthS, head.arrivedS + this.pacing.reserveS));
    return this._finishS === null ? dueS : Math.min(dueS, this._drainDueS(this._finishS, lastS));
  }

  _drainDueS(finishS, lastS) {
    const startS = Math.max(finishS, lastS);
    const leftS = Math.max(0, finishS + this.pacing.drainS - startS);
    return startS + leftS / this._numPacedWaiting;
  }

  _show(dueS) {
    const unit = this._waiting.shift();
    if (unit.paced) {
      this._numPacedWaiting -= 1;
      this._numPacedShown += 1;
      while (this._floors.length > 0 && this._floors[0][0] <= this._numPacedShown) this._floors.shift();
    }
    this._read(dueS, unit.paced);
    this._lastShownS = dueS;
    return { text: unit.text, atS: dueS, numTokens: unit.numTokens };
  }

  _read(dueS, paced) {
    if (this._readS === null) {
      this._readS = dueS;
      return;
    }
    const nextS = paced ? this._readS + 1 / this._readingPerS : this._readS;
    const waitS = dueS - nextS;
    if (paced && waitS >= this.pacing.minStallS) this._countStall(waitS, this.pacing.minStallS);
    this._readS = Math.max(dueS, nextS);
  }
}
