/** Cuts text into words, code and JSON, by the rules of sluice_client/segment.py. */

/** A longer run without a blank is cut here, in code points. */
export const MAX_UNIT_CODE_POINTS = 24;

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
