/** What both programs of JavaScript share: where to ask and for what, and how an outcome is told; as `trying.py`. */

export const [BASE, CLUSTER, FLAKY, KEY] = process.argv.slice(2);
export const MODEL = "tiny";
export const QUESTION = "Tell me a story about a fox.";
export const NUM_TOKENS = 64;
export const MANY_TOKENS = 4000;
export const HOT = 9;
export const REFUSAL = "'temperature' must be at most 2.";
export const UNSERVED = "not served";
export const LIMIT_MS = 300;
export const THINK = { chat_template_kwargs: { enable_thinking: true }, thinking_token_budget: 8 };
export const SPEAK = { chat_template_kwargs: { enable_thinking: false } };
export const SCHEMA = {
  type: "object",
  properties: {
    size: { type: "string", enum: ["small", "large"] },
    count: { type: "integer", minimum: 0, maximum: 9 },
  },
  required: ["size", "count"],
  additionalProperties: false,
};

export function check(holds, what) {
  if (!holds) throw new Error(what);
}

export function checkOrder({ size, count }) {
  check(["small", "large"].includes(size) && Number.isInteger(count) && count >= 0 && count <= 9, "no order");
}

/** Return what something throws that must throw. */
export async function thrown(ability) {
  try {
    await ability();
  } catch (error) {
    return error;
  }
  throw new Error("nothing was thrown");
}

/** Return what has a model that knows nothing close an object as soon as it may. */
export async function endsSoon() {
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ prompt: "}" });
  const answer = await fetch(`${CLUSTER}/tokenize`, { method: "POST", headers, body });
  const { tokens: [brace] } = await answer.json();
  return { logit_bias: { [brace]: 100 } };
}

export async function numCancelled() {
  const text = await (await fetch(`${CLUSTER}/metrics`)).text();
  const counts = [...text.matchAll(/^sluice:requests_total\{.*finish="cancelled".*\} (\S+)$/gm)];
  return counts.reduce((sum, [, count]) => sum + Number(count), 0);
}

/** Fail unless one more request is counted as left, soon. */
export async function checkCancelled(before) {
  const endMs = performance.now() + 20_000;
  while (await numCancelled() <= before) {
    check(performance.now() < endMs, "the dispatcher goes on with the answer");
    await new Promise((goOn) => setTimeout(goOn, 50));
  }
}

/** Try each ability, and print its outcome. */
export async function tell(abilities) {
  for (const [name, ability] of Object.entries(abilities)) {
    let outcome = "yes";
    try {
      await ability();
    } catch (error) {
      const [line] = String(error?.message ?? error).split("\n");
      outcome = `no: ${error?.constructor?.name}: ${line}`.slice(0, 160);
    }
    console.log(`outcome ${JSON.stringify([name, outcome])}`);
  }
}
