/** Streams answers evenly or at reading speed; for browsers and Node 18 or later, without dependencies. */

export { Answer } from "./answer.js";
export { SluiceClient } from "./client.js";
export {
  APIConnectionError,
  APIResponseError,
  APIStatusError,
  APIStreamError,
  ConnectionLostError,
  IncompleteStreamError,
  ProtocolError,
  SluiceClientError,
} from "./errors.js";
export { MIN_TIMER_S, PacedStream, SMOOTH_FRAME_S, wantsPacing } from "./paced_stream.js";
export { makePacer } from "./pacer.js";
export { DirectPacer, MIN_READING_STALL_S, ReadingPacer } from "./pacer_base.js";
export { PERFECT_DELAY_S, QoeState, isPerfect, qoeTarget } from "./qoe.js";
export { RETRY_POLICY } from "./retry.js";
export { MAX_UNIT_CODE_POINTS, Segmenter } from "./segment.js";
export { SMOOTH_PACING, SmoothPacer, smoothPacing } from "./smooth_pacer.js";
export { CLIENT_LIMITS } from "./transport.js";
