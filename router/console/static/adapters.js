// Adapters: a page of them, and the one that was chosen. Asked for while the view is shown, or that of prompts.

import { canCall, CallFailed, getApi } from "./calls.js";
import { byId, bytes, count, element, rowOf, setCells, setRows, setText, shortRevision } from "./dom.js";

const PAGE = 25;
const MAX_REVISIONS = 20;
const MODELS_PAGE = 250; // of the 1,000 that one call gives
const RARELY_MS = 5000; // between calls for what costs the router much, or is not the view that is shown
const isManaged = document.body.dataset.managed === "true"; // else /v1/models has to do
const SCOPE = isManaged ? "adapters:read" : "infer";
const UNMANAGED = "router.management is off: there are names and revisions only, and the prefix covers this page only.";

let chosen = null;
let after = null; // the last name of the page before
let last = null; // of this page
let refusal = ""; // why asking again is of no use until something changes
let askedFor = ""; // the view at the last call
let askedAt = 0;

export function prepareAdapters(onChange) {
  byId("adapter-filter").addEventListener("submit", (event) => event.preventDefault());
  byId("prefix").addEventListener("input", () => turn(null, onChange));
  byId("first-adapters").addEventListener("click", () => turn(null, onChange));
  byId("next-adapters").addEventListener("click", () => turn(last, onChange));
  byId("adapter-rows").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) {
      chosen = button.closest("tr").dataset.key;
      for (const each of byId("adapter-rows").querySelectorAll("button")) each.setAttribute("aria-pressed", String(each === button));
      if (isManaged) onChange();
    }
  });
}

function turn(name, onChange) {
  after = name;
  askedFor = "";
  onChange();
}

export function tryAgain() {
  refusal = "";
  askedFor = "";
}

// Nothing that another key has shown stays on the page.
export function forgetAdapters() {
  chosen = after = null;
  showPage({ data: [], has_more: false, last_id: null });
  byId("prefix").value = "";
  setText(byId("adapter-name"), "Choose an adapter");
  for (const id of ["adapter-aliases", "adapter-note", "adapters-note"]) setText(byId(id), "");
  byId("revision-rows").replaceChildren();
}

export async function refreshAdapters(view) {
  if (!canCall()) {
    setText(byId("adapters-note"), `This needs an API key with the scope ${SCOPE}. Give it above.`);
    return;
  }
  if (refusal) return;
  const isOften = isManaged && view === "adapters";
  if (!isOften && view === askedFor && performance.now() - askedAt < RARELY_MS) return;
  askedFor = view;
  askedAt = performance.now();
  try {
    showPage(isManaged ? await managedPage() : await modelsPage());
    setText(byId("adapters-note"), isManaged ? "" : UNMANAGED);
  } catch (error) {
    if (!(error instanceof CallFailed)) throw error;
    if (error.status === 401 || error.status === 403) refusal = error.message;
    setText(byId("adapters-note"), error.message);
    return;
  }
  if (chosen !== null && isOften) await showChosen();
}

async function managedPage() {
  const query = new URLSearchParams({ limit: PAGE });
  if (byId("prefix").value) query.set("prefix", byId("prefix").value);
  if (after !== null) query.set("after", after);
  return getApi(`/v1/adapters?${query}`);
}

async function modelsPage() {
  const page = await getApi(after === null ? "/v1/models" : `/v1/models?${new URLSearchParams({ after })}`);
  const begins = byId("prefix").value;
  const found = page.data.filter((model) => model.parent !== null && model.id.startsWith(begins));
  const data = found
    .slice(0, MODELS_PAGE)
    .map((model) => ({ name: model.id, latest: { number: null, revision: model.root, kinds: [], positions: model.positions, trained_positions: model.trained_positions, bytes: null } }));
  // A page may begin after any name, so the next one begins after the last that is shown.
  return found.length > data.length ? { data, has_more: true, last_id: data.at(-1).name } : { ...page, data };
}

function showPage(page) {
  last = page.last_id;
  byId("next-adapters").disabled = !page.has_more;
  byId("first-adapters").disabled = after === null;
  setRows(byId("adapter-rows"), page.data, (adapter) => adapter.name, makeRow, (row, { name, latest }) => {
    setText(row.firstChild.firstChild, name);
    row.firstChild.firstChild.setAttribute("aria-pressed", String(name === chosen));
    const size = latest.bytes === null ? "" : bytes(latest.bytes);
    const number = latest.number === null ? "" : `r${latest.number}`;
    const trained = latest.trained_positions ? ` (trained for ${latest.trained_positions})` : "";
    [number, shortRevision(latest.revision), latest.kinds.join(", "), latest.positions + trained, size].forEach((text, i) =>
      setText(row.children[i + 1], text),
    );
  });
  const names = byId("adapter-names");
  setRows(names, page.data, (adapter) => adapter.name, () => element("option"), (option, { name }) => (option.value = name));
}

function makeRow() {
  const row = rowOf(6);
  row.firstChild.append(element("button", { type: "button", className: "name" }));
  return row;
}

async function showChosen() {
  const name = chosen;
  let adapter;
  try {
    adapter = await getApi(`/v1/adapters/${name.split("/").map(encodeURIComponent).join("/")}?limit=${MAX_REVISIONS}`);
  } catch (error) {
    if (!(error instanceof CallFailed)) throw error;
    setText(byId("adapter-note"), error.message);
    if (error.status === 404) chosen = null;
    return;
  }
  if (name !== chosen) return;
  setText(byId("adapter-name"), adapter.name);
  const aliases = Object.entries(adapter.aliases);
  setText(byId("adapter-aliases"), aliases.map(([alias, number]) => `@${alias} is r${number}`).join(", "));
  setRows(byId("revision-rows"), adapter.revisions, (each) => `${name} ${each.number}`, () => rowOf(6), (row, each) => {
    const own = aliases.filter(([, number]) => number === each.number).map(([alias]) => `@${alias}`);
    const { host, disk, memory_only: only, num_host: numHost, num_disk: numDisk } = each.workers;
    const inMemory = host.map((worker) => (only.includes(worker) ? `${worker} (nowhere else)` : worker));
    setCells(row, [
      `r${each.number}`,
      shortRevision(each.revision),
      own.join(" ") || "–",
      listed(inMemory, numHost),
      listed(disk, numDisk),
      each.created_at.slice(0, 19).replace("T", " "),
    ]);
  });
  const hidden = adapter.num_revisions - adapter.revisions.length;
  setText(byId("adapter-note"), hidden > 0 ? `${hidden} older revisions are not shown.` : "");
}

function listed(names, number) {
  const more = number > names.length ? ` and ${count(number - names.length)} more` : "";
  return names.join(", ") + more || "–";
}
