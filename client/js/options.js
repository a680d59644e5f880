/** Options by name: what is not given has its default, and what does not exist is refused. Pure. */

/**
 * Defaults with some of them replaced.
 *
 * @param what whose options they are, for the error.
 * @throws RangeError an unknown name, or a number that is not finite and 0 or more.
 */
export function filledIn(defaults, some, what) {
  checkNames(Object.keys(defaults), some, what);
  for (const [name, value] of Object.entries(some)) {
    if (!(Number.isFinite(value) && value >= 0)) throw new RangeError(`${name} must be a number, 0 or more`);
  }
  return Object.freeze({ ...defaults, ...some });
}

/** Throws RangeError if an object has other names than these. */
export function checkNames(names, some, what) {
  for (const name of Object.keys(some)) {
    if (!names.includes(name)) throw new RangeError(`${what} has no ${name}; there are ${names.join(", ")}`);
  }
}
