/** Time, and waits that a signal ends. */

/** Any instant's time in seconds, for differences. */
export function nowS() {
  return performance.now() / 1000;
}

/** Settles as the promise does, or rejects with the signal's reason as soon as it is aborted. */
export async function abortable(promise, signal) {
  signal.throwIfAborted();
  let leave;
  const left = new Promise((_resolve, reject) => {
    leave = () => reject(signal.reason);
    signal.addEventListener("abort", leave);
  });
  try {
    return await Promise.race([promise, left]);
  } finally {
    signal.removeEventListener("abort", leave);
  }
}

/** Wait so many seconds, or until the signal is aborted, which throws its reason. */
export async function sleep(delayS, signal) {
  let timer;
  try {
    await abortable(new Promise((resolve) => (timer = setTimeout(resolve, delayS * 1000))), signal);
  } finally {
    clearTimeout(timer);
  }
}
