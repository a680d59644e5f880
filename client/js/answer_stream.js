/** One streamed answer over as many connections as it takes: the reader sees a pause, never a gap or a repetition. */

import {
  APIConnectionError,
  APIStatusError,
  APIStreamError,
  ConnectionLostError,
  IncompleteStreamError,
} from "./errors.js";
import { nowS, sleep } from "./waits.js";

/** Errors in a stream that say that this server cannot go on, not that nobody can. */
const RESUMED_CODES = new Set(["draining", "no_capacity", "queue_full"]);
const INCOMPLETE = "the stream ended without a finish reason; the text is not the whole answer";

/**
 * The pieces of a streamed answer; aborting the signal ends it at the server.
 *
 * @param source a way to a server, HTTP or a WebSocket: `resumes()` and `events(path, body, cursor, record, signal)`.
 * @throws SluiceClientError any of errors.js; every piece that came before it was yielded.
 */
export async function* streamPieces(source, path, body, cursor, record, signal) {
  const resumes = source.resumes();
  for (;;) {
    const numEvents = cursor.numEvents;
    let loss;
    try {
      for await (const chunk of source.events(path, body, cursor, record, signal)) {
        const piece = record.takeChunk(chunk);
        cursor.numEvents += 1;
        if (piece !== null) yield piece;
      }
      loss = new IncompleteStreamError(INCOMPLETE);
    } catch (error) {
      loss = lossOf(error, cursor);
    }
    if (record.finishReason !== null && !(loss instanceof APIStreamError)) return;
    let delayS = null;
    if (cursor.isResumable && isResumed(loss)) {
      delayS = resumes.nextDelayS(nowS(), { hasProgressed: cursor.numEvents > numEvents });
    }
    if (delayS === null) throw loss;
    await sleep(delayS, signal);
  }
}

/** The error of a connection after which another one may go on; throws those after which none can. */
function lossOf(error, cursor) {
  if (error instanceof ConnectionLostError || error instanceof APIStreamError) return error;
  if (cursor.hasBegun && (error instanceof APIConnectionError || error instanceof APIStatusError)) {
    const why = `the stream broke off, and could not be resumed: ${error.message}`;
    throw new ConnectionLostError(why, { cause: error });
  }
  throw error;
}

function isResumed(loss) {
  return !(loss instanceof APIStreamError) || RESUMED_CODES.has(loss.code);
}
