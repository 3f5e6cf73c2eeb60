// Requests in flight.

import { byId, count, hideEmptyColumns, rowOf, seconds, setCells, setRows, setText, shortRevision } from "./dom.js";

const PHASES = {
  admitted: "waits for a worker",
  placed: "placed",
  ensuring_adapter: "adapter is made resident",
  waiting_first_event: "waits for the first token",
  relaying: "streams",
  done: "done",
};

export function showRequests(state) {
  setRows(byId("request-rows"), state.requests, (each) => each.request_id, () => rowOf(6), (row, each) => {
    const parts = each.sequences.map((sequence) => {
      const workers = [...new Set([sequence.prefill, sequence.decode].filter(Boolean))].join(" → ");
      const tries = sequence.attempts > 1 ? `, attempt ${sequence.attempts}` : "";
      return `${PHASES[sequence.phase] ?? sequence.phase}${workers ? ` (${workers}${tries})` : ""}`;
    });
    const more = each.num_sequences - each.sequences.length;
    if (more > 0) parts.push(`and ${count(more)} more sequences`);
    setCells(row, [
      each.request_id.slice(0, 8),
      each.streaming ? `${each.endpoint}, streamed` : each.endpoint,
      each.adapter ?? "base model",
      shortRevision(each.revision),
      seconds(each.age_s),
      parts.join("; ") || "is read",
    ]);
  });
  hideEmptyColumns(byId("request-rows"));
  const more = state.num_requests - state.requests.length;
  const none = state.num_requests ? "" : "No request is in flight.";
  setText(byId("requests-note"), more > 0 ? `${count(more)} younger requests are not shown.` : none);
}
