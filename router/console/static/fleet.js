// Workers and pairs.

import { byId, count, element, hideEmptyColumns, rowOf, seconds, setCells, setRows, setText } from "./dom.js";

const MAX_MATRIX = 16; // workers of a role; beyond, pairs are counted

const STATES = {
  placeable: "takes requests",
  blocked: "blocked",
  draining: "draining",
  hung: "hung",
  not_ready: "not ready",
  lost: "lost",
};

export function showFleet(state) {
  setRows(byId("worker-rows"), state.workers, (worker) => worker.name, () => rowOf(9), fillWorker);
  hideEmptyColumns(byId("worker-rows"));
  const more = state.num_workers - state.workers.length;
  setText(byId("more-workers"), more > 0 ? `${count(more)} more workers are not shown.` : "");
  showPairs(state.workers);
}

function fillWorker(row, worker) {
  const reads = worker.role !== "decode";
  const assumed = worker.is_assumed ? ", assumed" : ""; // until the first prompt is measured
  const what = STATES[worker.condition] ?? worker.condition;
  setCells(row, [
    worker.name,
    worker.role,
    worker.reason ? `${what}: ${worker.reason}` : what,
    count(worker.sequences),
    reads ? `${count(worker.queued_prompt_tokens)} tokens, ${seconds(worker.queue_s)}${worker.queue_s ? assumed : ""}` : "–",
    reads ? `${count(worker.prompt_tokens_per_s)} tokens/s${assumed}` : "–",
    worker.kv_used === null ? "–" : `${Math.round(100 * worker.kv_used)}%`,
    worker.role === "decode" ? "–" : `${count(worker.num_in_host_memory)} / ${count(worker.num_on_disk)}`,
    worker.domain || "–",
  ]);
  row.dataset.state = worker.condition === "placeable" ? "good" : "bad";
}

function showPairs(workers) {
  const prefills = workers.filter((worker) => worker.role === "prefill");
  const decodes = workers.filter((worker) => worker.role === "decode");
  byId("pairs").hidden = !prefills.length && !decodes.length;
  const isSmall = prefills.length <= MAX_MATRIX && decodes.length <= MAX_MATRIX;
  const names = isSmall ? decodes.map((each) => each.name) : ["Warm decode workers"];
  const head = byId("pair-head");
  setRows(head, ["Prefill", ...names], (name) => name, () => element("th", { scope: "col" }), setText);
  setRows(byId("pair-rows"), prefills, (each) => `${names.length} ${each.name}`, () => rowOf(names.length + 1), (row, prefill) => {
    const pairs = isSmall
      ? decodes.map((decode) => pairOf(prefill, decode))
      : [{ text: `${count(prefill.num_warm)} of ${count(decodes.length)}`, state: prefill.num_warm ? "good" : "bad" }];
    setCells(row, [prefill.name, ...pairs.map((pair) => pair.text)]);
    pairs.forEach((pair, i) => (row.children[i + 1].dataset.state = pair.state));
  });
  const unified = workers.filter((worker) => worker.role === "unified").length;
  setText(byId("pair-note"), unified ? `${count(unified)} unified workers serve alone and need no pair.` : "");
}

function pairOf(prefill, decode) {
  const absent = [prefill, decode].filter((worker) => worker.condition !== "placeable");
  if (absent.length) {
    const why = absent.map((worker) => `${worker.name}: ${STATES[worker.condition] ?? worker.condition}`);
    return { text: why.join(", "), state: "bad" };
  }
  if (!prefill.warm_with.includes(decode.name)) {
    return prefill.num_warm > prefill.warm_with.length
      ? { text: "not shown", state: "" }
      : { text: "not warm yet", state: "bad" };
  }
  return { text: prefill.domain && prefill.domain === decode.domain ? "warm, same domain" : "warm", state: "good" };
}
