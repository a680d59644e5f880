/**
 * The pacer of a mode.
 *
 * Pacers know no clock: times are arguments, in seconds since the request's arrival. The same machine as
 * sluice_client/{qoe,segment,pacer_base,smooth_pacer}.py, where the rules are explained; names are the same in
 * camelCase, and both pass client/vectors/pacer.json.
 */

import { DirectPacer, ReadingPacer } from "./pacer_base.js";
import { qoeTarget } from "./qoe.js";
import { SMOOTH_PACING, SmoothPacer } from "./smooth_pacer.js";

/** The pacer of a mode: "reading", "smooth" or "off". */
export function makePacer(mode, target = qoeTarget(), pacing = SMOOTH_PACING) {
  if (mode === "off") return new DirectPacer(target);
  if (mode === "reading") return new ReadingPacer(target);
  if (mode === "smooth") return new SmoothPacer(target, pacing);
  throw new RangeError(`mode must be "reading", "smooth" or "off", not ${mode}`);
}
