/** What all pacers share, and reading mode; as sluice_client/pacer_base.py. */

import { QoeState, qoeTarget } from "./qoe.js";

/** A shorter wait adds to the seconds of a reading pacer, not to its number of stalls. */
export const MIN_READING_STALL_S = 1e-3;

/** What all modes share: order, the ready text, the counters. */
export class Pacer {
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

  /**
   * Take a piece that arrived at `nowS` and completes `numTokens` tokens. `thinks`: until then the model has thought,
   * which nobody reads, and what came before was no text.
   */
  push(nowS, text, numTokens = 1, { paced = true, thinks = false } = {}) {
    if (!(numTokens >= 0)) throw new RangeError("a piece cannot hold fewer than 0 tokens");
    if (this._finishS !== null) throw new Error("push after finish");
    this._advance(nowS);
    if (thinks) this._state.think(this._nowS);
    if (numTokens > 0) {
      this._ttftS ??= this._nowS;
      if (this._receivedS !== null) this._longestGapS = Math.max(this._longestGapS, this._nowS - this._receivedS);
      this._receivedS = this._nowS;
    }
    this._bufferedTokens += numTokens;
    this._bufferedChars += text.length;
    if (text !== "" || numTokens > 0) this._accept(text, numTokens, paced);
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

/** First in, first out, without moving the rest at each shift. */
export class Queue {
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
