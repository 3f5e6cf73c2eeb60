// Policies in training, of all tenants. Asked for while the view is shown.

import { canAskState, CallFailed, getPolicies } from "./calls.js";
import { byId, count, hideEmptyColumns, rowOf, setCells, setRows, setText } from "./dom.js";

const RARELY_MS = 2000; // between calls, which the router passes on to the trainer

let askedAt = -Infinity;

export const isTrained = document.body.dataset.trained === "true";

export async function refreshTraining() {
  if (!canAskState() || performance.now() - askedAt < RARELY_MS) return;
  askedAt = performance.now();
  try {
    showTraining(await getPolicies());
  } catch (error) {
    if (!(error instanceof CallFailed)) throw error;
    setText(byId("training-note"), error.message);
  }
}

export function showTraining({ policies, num_policies: total }) {
  setRows(byId("policy-rows"), policies, (each) => each.model, () => rowOf(9), (row, each) => {
    const loss = typeof each.loss === "number" ? each.loss.toPrecision(4) : "–";
    setCells(row, [
      each.model, each.tenant, each.state, each.kind, each.rank, count(each.steps), loss, count(each.tokens),
      each.checkpoint?.replace(`tinker://${each.model}/`, "") ?? "–",
    ]);
    row.dataset.state = each.state === "broken" ? "bad" : "good";
  });
  hideEmptyColumns(byId("policy-rows"));
  const more = total - policies.length;
  setText(byId("training-note"), more > 0 ? `${count(more)} older policies are not shown.` : total ? "" : "Nothing is trained now.");
}

export function forgetTraining() {
  askedAt = -Infinity;
  showTraining({ policies: [], num_policies: 0 });
  setText(byId("training-note"), "");
}
