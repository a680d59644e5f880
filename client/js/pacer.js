/**
 * QoE arithmetic, the token pacer, and a wrapper for any asynchronous stream of text.
 *
 * The same machine as sluice_client/{qoe,segment,pacer_base,smooth_pacer,paced_stream}.py, where the rules are explained;
 * names are the same in camelCase, and both pass client/vectors/*.json. For browsers and Node 18 or later; no
 * dependencies. Pacers know no clock: times are arguments, in seconds since the request's arrival.
 */

/** Largest S_delay of a stream that still counts as perfect, in token-seconds. */
export const PERFECT_DELAY_S = 1e-3;

/** A longer run without a blank is cut here, in code points. */
export const MAX_UNIT_CODE_POINTS = 24;

/** A shorter wait adds to the seconds of a reading pacer, not to its number of stalls. */
export const MIN_READING_STALL_S = 1e-3;

/** The shortest timer, in seconds. */
export const MIN_TIMER_S = 1e-3;

/** Smooth mode draws no more frames per second than this allows. */
export const SMOOTH_FRAME_S = 1 / 60;

/** Parameters of smooth mode; `SmoothPacing` in smooth_pacer.py says what each means. */
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

/** What the reader expects; throws RangeError if a number is not finite and above 0. */
export function qoeTarget({ ttftS = 1.0, speedTokensPerS = 4.8 } = {}) {
  for (const [name, value] of Object.entries({ ttftS, speedTokensPerS })) {
    if (!(Number.isFinite(value) && value > 0)) {
      throw new RangeError(`${name} must be a finite number above 0, not ${value}`);
    }
  }
  return Object.freeze({ ttftS, speedTokensPerS });
}

/** Complete parameters of smooth mode from some; throws RangeError for an unknown name or a number out of its range. */
export function smoothPacing(some = {}) {
  for (const [name, value] of Object.entries(some)) {
    if (!(name in SMOOTH_PACING)) throw new RangeError(`smooth mode has no parameter ${name}`);
    if (!(Number.isFinite(value) && (value > 0 || (value === 0 && ZERO_ALLOWED.has(name))))) {
      throw new RangeError(`${name} is out of its range: ${value}`);
    }
  }
  return Object.freeze({ ...SMOOTH_PACING, ...some });
}

/** Whether a stream with this S_delay counts as perfect. */
export function isPerfect(delayS) {
  return delayS <= PERFECT_DELAY_S;
}

/** QoE of one answer in constant time and space per token; `QoeState` in qoe.py explains the three numbers. */
export class QoeState {
  #numTokens = 0;
  #lagS = 0;
  #delayS = 0;

  constructor(target = qoeTarget()) {
    this.target = target;
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
    return this.target.ttftS + (this.#numTokens - 1) / this.target.speedTokensPerS + this.#lagS;
  }

  get isPerfect() {
    return isPerfect(this.#delayS);
  }

  /** Record that the next `count` tokens reached the client at `tS`; returns when the last of them is displayed. */
  deliver(tS, count = 1) {
    if (!(count >= 1)) throw new RangeError("a delivery has at least one token");
    const ideal = this.target.ttftS + this.#numTokens / this.target.speedTokensPerS;
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

  /** QoE of the answer if it ends with the last delivered token, in [0, 1]; 0 when nothing was delivered. */
  final() {
    const n = this.#numTokens;
    if (n === 0) return 0;
    const whole = n * this.#lagS + (n * (n - 1)) / (2 * this.target.speedTokensPerS);
    return whole <= 0 ? 1 : clampUnit(1 - this.#delayS / whole);
  }

  #count(tS) {
    return Math.max(0, Math.floor((tS - this.target.ttftS) * this.target.speedTokensPerS) + 1);
  }

  #area(count, tS) {
    return count * (tS - this.target.ttftS) - (count * (count - 1)) / (2 * this.target.speedTokensPerS);
  }
}

function clampUnit(value) {
  return Math.min(1, Math.max(0, value));
}

// ---- cutting text (segment.py) ----------------------------------------------------------------------------------------

const BLANKS = new Set([
  9, 10, 11, 12, 13, 32, 0x85, 0xa0, 0x1680, 0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
  0x2009, 0x200a, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000,
]);
const ZERO_WIDTH_JOINER = 0x200d;

const CJK_RANGES = [
  [0x2e80, 0x2fdf], [0x3005, 0x3007], [0x3021, 0x3029], [0x3031, 0x303c], [0x3041, 0x3096], [0x309d, 0x309f],
  [0x30a1, 0x30fa], [0x30fd, 0x30ff], [0x3100, 0x312f], [0x31a0, 0x31bf], [0x31f0, 0x31ff], [0x3400, 0x4dbf],
  [0x4e00, 0x9fff], [0xf900, 0xfaff], [0xff66, 0xff6f], [0xff71, 0xff9d], [0x20000, 0x3ffff],
];

const ATTACHED_RANGES = [
  [0x0300, 0x036f], [0x1ab0, 0x1aff], [0x1dc0, 0x1dff], [0x200d, 0x200d], [0x20d0, 0x20ff], [0x3001, 0x3002],
  [0x3009, 0x3009], [0x300b, 0x300b], [0x300d, 0x300d], [0x300f, 0x300f], [0x3011, 0x3011], [0x3099, 0x309c],
  [0x30fc, 0x30fc], [0xfe00, 0xfe0f], [0xfe20, 0xfe2f], [0xff01, 0xff01], [0xff09, 0xff09], [0xff0c, 0xff0c],
  [0xff0e, 0xff0e], [0xff1a, 0xff1b], [0xff1f, 0xff1f], [0xff61, 0xff61], [0xff63, 0xff64], [0xff70, 0xff70],
  [0xff9e, 0xff9f], [0x1f3fb, 0x1f3ff], [0xe0100, 0xe01ef],
];

const BLANK = 0;
const CJK = 1;
const ATTACHED = 2;
const OTHER = 3;

function kindOf(point) {
  if (BLANKS.has(point)) return BLANK;
  if (point < 0x300) return OTHER;
  if (isIn(point, CJK_RANGES)) return CJK;
  return isIn(point, ATTACHED_RANGES) ? ATTACHED : OTHER;
}

function isIn(point, ranges) {
  return ranges.some(([low, high]) => low <= point && point <= high);
}

/** Follows code fences and an answer that is JSON as a whole. */
class Markup {
  #json = null;
  #openedByBracket = false;
  #inFence = false;
  #fenceChar = "";
  #fenceSize = 0;
  #runChar = "";
  #runSize = 0;
  #inRest = false;
  #restIsBlank = true;
  #fenceBroken = false;

  /** Take the next character; true if it is to be paced. */
  feed(char) {
    if (this.#json === null) this.#json = this.#decideJson(char);
    const isProse = !this.#json && !this.#openedByBracket;
    if (char !== "\n") this.#scan(char);
    const paced = isProse && !this.#inFence && !this.#opensFence;
    if (char === "\n") this.#endLine();
    return paced;
  }

  #decideJson(char) {
    if (BLANKS.has(char.codePointAt(0))) return null;
    if (this.#openedByBracket) {
      this.#openedByBracket = false;
      return char === "{" || char === "[" || char === '"';
    }
    if (char === "[") {
      this.#openedByBracket = true;
      return null;
    }
    return char === "{";
  }

  get #opensFence() {
    return !this.#inFence && this.#runSize >= 3 && !this.#fenceBroken;
  }

  #scan(char) {
    if (!this.#inRest) {
      if (this.#runSize === 0 && (char === " " || char === "\t")) return;
      if ((char === "`" || char === "~") && (this.#runChar === "" || this.#runChar === char)) {
        this.#runChar = char;
        this.#runSize += 1;
        return;
      }
      this.#inRest = true;
    }
    this.#restIsBlank = this.#restIsBlank && (char === " " || char === "\t" || char === "\r");
    this.#fenceBroken = this.#fenceBroken || (this.#runChar === "`" && char === "`");
  }

  #endLine() {
    const closes = this.#runChar === this.#fenceChar && this.#runSize >= this.#fenceSize && this.#restIsBlank;
    if (this.#opensFence) {
      this.#inFence = true;
      this.#fenceChar = this.#runChar;
      this.#fenceSize = this.#runSize;
    } else if (this.#inFence && closes) {
      this.#inFence = false;
    }
    this.#runChar = "";
    this.#runSize = 0;
    this.#inRest = false;
    this.#restIsBlank = true;
    this.#fenceBroken = false;
  }
}

/** Cuts one answer, piece by piece, into fragments `{text, startsUnit, paced}`; joined, they are the text. */
export class Segmenter {
  #markup = new Markup();
  #unitSize = 0;
  #unitIsCjk = false;
  #unitIsBlank = true;
  #previousIsBlank = false;
  #previousIsJoiner = false;
  #previousPaced = true;

  feed(text) {
    const fragments = [];
    let start = 0;
    let position = 0;
    let startsUnit = false;
    for (const char of text) {
      const paced = this.#markup.feed(char);
      const begins = this.#beginsUnit(char, paced);
      if (begins || paced !== this.#previousPaced) {
        if (position > start) {
          fragments.push({ text: text.slice(start, position), startsUnit, paced: this.#previousPaced });
        }
        start = position;
        startsUnit = begins;
      }
      this.#previousPaced = paced;
      position += char.length;
    }
    if (start < text.length) fragments.push({ text: text.slice(start), startsUnit, paced: this.#previousPaced });
    return fragments;
  }

  #beginsUnit(char, paced) {
    const kind = kindOf(char.codePointAt(0));
    let begins =
      this.#unitSize === 0 ||
      (kind !== BLANK &&
        kind !== ATTACHED &&
        !this.#previousIsJoiner &&
        !this.#unitIsBlank &&
        (kind === CJK || this.#unitIsCjk || this.#previousIsBlank || this.#unitSize >= MAX_UNIT_CODE_POINTS));
    if (paced !== this.#previousPaced) begins = true;
    else if (!paced) begins = false;
    this.#unitSize = begins ? 1 : this.#unitSize + 1;
    this.#unitIsCjk = kind === CJK || (this.#unitIsCjk && !begins);
    this.#unitIsBlank = kind === BLANK && (this.#unitIsBlank || begins);
    this.#previousIsBlank = kind === BLANK;
    this.#previousIsJoiner = char.codePointAt(0) === ZERO_WIDTH_JOINER;
    return begins;
  }
}

// ---- pacers (pacer_base.py, smooth_pacer.py) -----------------------------------------------------------------------------

/** What all modes share: order, the ready text, the counters. */
class Pacer {
  constructor(target) {
    this.target = target;
    this._state = new QoeState(target);
    this._nowS = -Infinity;
    this._ttftS = null;
    this._receivedS = null;
    this._longestGapS = 0;
    this._shownS = null;
    this._finishS = null;
    this._skipped = false;
    this._ready = [];
    this._bufferedTokens = 0;
    this._bufferedChars = 0;
    this._stallS = 0;
    this._numStalls = 0;
  }

  /** Take a piece that arrived at `nowS` and completes `numTokens` tokens. */
  push(nowS, text, numTokens = 1, { paced = true } = {}) {
    if (!(numTokens >= 0)) throw new RangeError("a piece cannot hold fewer than 0 tokens");
    if (this._finishS !== null) throw new Error("push after finish");
    this._advance(nowS);
    if (numTokens > 0) {
      this._ttftS ??= this._nowS;
      if (this._receivedS !== null) this._longestGapS = Math.max(this._longestGapS, this._nowS - this._receivedS);
      this._receivedS = this._nowS;
    }
    this._bufferedTokens += numTokens;
    this._bufferedChars += text.length;
    this._accept(text, numTokens, paced);
    this._advance(nowS);
  }

  /** The answer has ended; no push follows. */
  finish(nowS) {
    if (this._finishS !== null) return;
    this._advance(nowS);
    this._finishS = this._nowS;
  }

  /** The reader asks for everything: what has arrived is due now, what follows is due as it arrives. */
  skip(nowS) {
    this._advance(nowS);
    this._skipped = true;
    this._advance(nowS);
  }

  /** Take everything that is due at `nowS`, in order: a list of `{text, atS, numTokens}`. */
  pop(nowS) {
    this._advance(nowS);
    const shown = this._ready;
    this._ready = [];
    for (const item of shown) {
      this._bufferedTokens -= item.numTokens;
      this._bufferedChars -= item.text.length;
      this._shownS = item.atS;
    }
    return shown;
  }

  /** The instant from which `pop` returns something; null when nothing is buffered. */
  nextDueS() {
    return this._ready.length > 0 ? this._ready[0].atS : this._nextWaitingS();
  }

  get bufferedTokens() {
    return this._bufferedTokens;
  }

  /** UTF-16 code units that arrived and are not popped. */
  get bufferedChars() {
    return this._bufferedChars;
  }

  get qoe() {
    if (this._finishS !== null) return this._state.final();
    return this._nowS === -Infinity ? 1 : this._state.qoeAt(this._nowS);
  }

  stats() {
    return {
      qoe: this.qoe,
      stallSeconds: this._stallS,
      numStalls: this._numStalls,
      bufferedTokens: this._bufferedTokens,
      bufferedChars: this._bufferedChars,
      ttftS: this._ttftS,
      receivedS: this._receivedS,
      longestGapS: this._longestGapS,
      shownS: this._shownS,
    };
  }

  _advance(nowS) {
    this._nowS = Math.max(this._nowS, nowS);
    for (let dueS = this._nextWaitingS(); dueS !== null && dueS <= this._nowS; dueS = this._nextWaitingS()) {
      this._ready.push(this._show(dueS));
    }
  }

  _countStall(waitS, minCountedS) {
    this._stallS += waitS;
    if (waitS >= minCountedS) this._numStalls += 1;
  }
}

/** Words with the blanks before them, Chinese and Japanese by character. */
const PARTS = /\s*(?:[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]|[^\s\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]+)|\s+/g;

/** A piece in as many parts as it has tokens, or words if those are fewer; `cut_piece` in pacer_base.py says more. */
function* cutPiece(text, numTokens) {
  const parts = numTokens > 1 ? (text.match(PARTS) ?? []) : [];
  const count = Math.min(numTokens, parts.length);
  if (count < 2) {
    yield [text, numTokens];
    return;
  }
  for (let index = 1, first = 0, given = 0; index <= count; index += 1) {
    const end = Math.floor((index * parts.length) / count);
    const until = Math.floor((index * numTokens) / count);
    yield [parts.slice(first, end).join(""), until - given];
    first = end;
    given = until;
  }
}

/** Token i at displayed[i], never early; of a piece of several tokens, each word when the last of its tokens is. */
export class ReadingPacer extends Pacer {
  constructor(target = qoeTarget()) {
    super(target);
    this._waiting = new Queue();
    this._lastDueS = -Infinity;
  }

  _accept(text, numTokens) {
    const hadTokens = this._state.numTokens > 0;
    const lagS = this._state.lagS;
    for (const [part, count] of cutPiece(text, numTokens)) {
      if (count > 0) this._lastDueS = this._state.deliver(this._nowS, count);
      this._waiting.push({ text: part, atS: Math.max(this._lastDueS, this._nowS), numTokens: count });
    }
    if (numTokens > 0 && hadTokens) this._countStall(this._state.lagS - lagS, MIN_READING_STALL_S);
  }

  _nextWaitingS() {
    if (this._waiting.length === 0) return null;
    return this._skipped ? this._nowS : this._waiting.first.atS;
  }

  _show(dueS) {
    return { ...this._waiting.shift(), atS: dueS };
  }
}

/** No pacing: text is due as it arrives. */
export class DirectPacer extends ReadingPacer {
  constructor(target = qoeTarget()) {
    super(target);
    this._skipped = true;
  }
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

/** Shows words at the pace of the generator, behind a reserve; smooth_pacer.py states the rule. */
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

/** The pacer of a mode: "reading", "smooth" or "off". */
export function makePacer(mode, target = qoeTarget(), pacing = SMOOTH_PACING) {
  if (mode === "off") return new DirectPacer(target);
  if (mode === "reading") return new ReadingPacer(target);
  if (mode === "smooth") return new SmoothPacer(target, pacing);
  throw new RangeError(`mode must be "reading", "smooth" or "off", not ${mode}`);
}

/** First in, first out, without moving the rest at each shift. */
class Queue {
  #items = [];
  #head = 0;

  get length() {
    return this.#items.length - this.#head;
  }

  get first() {
    return this.#items[this.#head];
  }

  get last() {
    return this.#items[this.#items.length - 1];
  }

  push(item) {
    this.#items.push(item);
  }

  shift() {
    const item = this.#items[this.#head];
    this.#items[this.#head] = undefined;
    this.#head += 1;
    if (this.#head > 1024 && this.#head * 2 > this.#items.length) {
      this.#items = this.#items.slice(this.#head);
      this.#head = 0;
    }
    return item;
  }
}

// ---- any asynchronous stream (paced_stream.py) --------------------------------------------------------------------------

const SYSTEM_CLOCK = {
  nowS: () => performance.now() / 1000,
  setTimer: (callback, delayS) => setTimeout(callback, delayS * 1000),
  clearTimer: (timer) => clearTimeout(timer),
};

/**
 * An asynchronous iterable of text as it is to be displayed, made of one of text as it arrives.
 *
 * `source` yields strings (one token each) or `{text, numTokens, paced}`. An error of the source is thrown after the text
 * before it was shown. Leaving a `for await` loop early closes the source. A timer that fires late (a hidden tab) delays
 * nothing further: the next frame brings everything that is due.
 */
export class PacedStream {
  #source;
  #clock;
  #frameS;
  #startedS;
  #maxBufferedChars;
  #iterator = null;
  #wake = null;
  #makeRoom = null;
  #nextFrameS = -Infinity;
  #ended = false;
  #stopped = false;
  #closed = false;
  #error = null;

  /**
   * @param source asynchronous iterable.
   * @param pacer fresh; owned by the stream.
   * @param options `startedS`: the clock's time of the request's arrival (default: the first use); `frameS`: least time
   *   between two outputs (default 1/60 in smooth mode, else 0); `maxBufferedChars`: the source is not read further
   *   while this much waits; `clock`: `{nowS, setTimer, clearTimer}`.
   */
  constructor(source, pacer, { startedS = null, frameS = null, maxBufferedChars = 1 << 20, clock = SYSTEM_CLOCK } = {}) {
    this.pacer = pacer;
    this.#source = source;
    this.#clock = clock;
    this.#startedS = startedS;
    this.#maxBufferedChars = maxBufferedChars;
    this.#frameS = frameS ?? (pacer instanceof SmoothPacer ? SMOOTH_FRAME_S : 0);
  }

  get stats() {
    return this.pacer.stats();
  }

  [Symbol.asyncIterator]() {
    return this;
  }

  async next() {
    this.#start();
    while (!this.#closed) {
      const text = this.#takeFrame();
      if (text !== "") return { done: false, value: text };
      const dueS = this.pacer.nextDueS();
      if (dueS === null && this.#ended) {
        this.#closed = true;
        if (this.#error !== null && !this.#stopped) throw this.#error.reason;
        break;
      }
      await this.#wait(dueS);
    }
    return { done: true, value: undefined };
  }

  /** Close the stream and its source; `for await` calls this when the loop is left early. */
  async return(value) {
    this.#start();
    this.#closed = true;
    this.#end();
    this.#closeSource();
    return { done: true, value };
  }

  /** The reader asks for everything: the buffer is shown now, the rest as it arrives. */
  skip() {
    this.#start();
    this.pacer.skip(this.#nowS());
    this.#nextFrameS = -Infinity;
    this.#notify();
  }

  /** End the source now; what had arrived is shown at once, then the iteration ends. */
  stop() {
    this.#start();
    this.#stopped = true;
    this.#end();
    this.skip();
    this.#closeSource();
  }

  #nowS() {
    return this.#clock.nowS() - this.#startedS;
  }

  #start() {
    if (this.#iterator !== null) return;
    this.#startedS ??= this.#clock.nowS();
    this.#iterator = this.#source[Symbol.asyncIterator]();
    this.#read();
  }

  /** Pull pieces until the source ends; never rejects: an error is kept for `next`. */
  async #read() {
    try {
      while (!this.#ended) {
        const { done, value } = await this.#iterator.next();
        if (done || this.#ended) break;
        const { text, numTokens = 1, paced = true } = typeof value === "string" ? { text: value } : value;
        this.pacer.push(this.#nowS(), text, numTokens, { paced });
        this.#notify();
        while (!this.#ended && this.pacer.bufferedChars >= this.#maxBufferedChars) {
          await new Promise((resolve) => (this.#makeRoom = resolve));
        }
      }
    } catch (reason) {
      if (!this.#ended) this.#error = { reason };
    }
    this.#end();
  }

  #end() {
    this.#ended = true;
    this.pacer.finish(this.#nowS());
    this.#makeRoom?.();
    this.#notify();
  }

  /** Not awaited: a generator that waits closes only when its wait ends. To end that too, abort the source's own signal. */
  #closeSource() {
    Promise.resolve(this.#iterator.return?.()).catch(() => {}); // the stream is over; nobody is left to tell
  }

  #notify() {
    this.#wake?.();
  }

  #takeFrame() {
    const nowS = this.#nowS();
    if (nowS < this.#nextFrameS) return "";
    const text = this.pacer.pop(nowS).map((shown) => shown.text).join("");
    this.#makeRoom?.();
    if (text !== "") this.#nextFrameS = nowS + this.#frameS;
    return text;
  }

  async #wait(dueS) {
    let timer = null;
    await new Promise((resolve) => {
      this.#wake = resolve;
      if (dueS !== null) {
        const delayS = Math.max(dueS, this.#nextFrameS) - this.#nowS();
        timer = this.#clock.setTimer(resolve, Math.max(delayS, MIN_TIMER_S));
      }
    });
    this.#wake = null;
    if (timer !== null) this.#clock.clearTimer(timer);
  }
}

/** False if the user's system asks for reduced motion: then show text as it arrives, `makePacer("off")`. */
export function wantsPacing() {
  return !(globalThis.matchMedia?.("(prefers-reduced-motion: reduce)").matches ?? false);
}
