// Adapters: a page of them, and the one that was chosen, with its changes. Asked for while the view is shown.

import { canCall, CallFailed, change, getApi, KeyChanged } from "./calls.js";
import { byId, bytes, count, element, hideEmptyColumns, rowOf, setCells, setRows, setText, shortRevision } from "./dom.js";

const PAGE = 25;
const MAX_REVISIONS = 20;
const MODELS_PAGE = 250; // of the 1,000 that one call gives
const RARELY_MS = 5000; // between calls for what costs the router much
const isManaged = document.body.dataset.managed === "true"; // else /v1/models has to do
const SCOPE = isManaged ? "adapters:read" : "infer";
const UNMANAGED = "router.management is off: there are names and revisions only, and the prefix covers this page only.";

let chosen = null;
let after = null; // the last name of the page before
let last = null; // of this page
let refusal = ""; // why asking again is of no use until something changes
let askedAt = -Infinity;
let mayChange = true; // as far as a refusal has told
let aliases = {}; // of the chosen one, as they are shown: numbers by alias, of split ones percents by revision

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
      byId("upload-name").value = chosen;
      showChanges(false);
      if (isManaged) onChange();
    }
  });
  for (const id of ["move-form", "roll-back", "upload-form"]) {
    byId(id).addEventListener(id === "roll-back" ? "click" : "submit", (event) => {
      event.preventDefault();
      make({ "move-form": move, "roll-back": rollBack, "upload-form": upload }[id], onChange);
    });
  }
}

function turn(name, onChange) {
  after = name;
  askedAt = -Infinity;
  onChange();
}

export function tryAgain() {
  refusal = "";
  askedAt = -Infinity;
  mayChange = true;
}

const pathOf = (name) => `/v1/adapters/${name.split("/").map(encodeURIComponent).join("/")}`;

// `isShown`: the chosen adapter is.
function showChanges(isShown) {
  if (!mayChange) byId("upload-form").hidden = true;
  byId("move-form").hidden = !isManaged || !isShown || !mayChange;
}

// Makes a change, which says what it did, and shows it.
async function make(work, onChange) {
  const buttons = document.querySelectorAll("#move-form button, #upload-form button");
  for (const each of buttons) each.disabled = true;
  setText(byId("change-note"), "Working…");
  try {
    setText(byId("change-note"), await work());
  } catch (error) {
    if (error instanceof CallFailed) setText(byId("change-note"), error.message);
    else if (!(error instanceof KeyChanged)) reportError(error);
    if (error.code === "insufficient_scope") mayChange = false; // the key lacks the scope
    showChanges(chosen !== null);
  }
  for (const each of buttons) each.disabled = false;
  onChange();
}

async function move() {
  const alias = byId("move-alias").value.trim();
  // Somebody may have moved it since it was shown.
  const at = Object.hasOwn(aliases, alias) ? aliases[alias] : null;
  const expected = typeof at === "number" ? `r${at}` : at;
  const path = `${pathOf(chosen)}/aliases/${encodeURIComponent(alias)}`;
  return moved(await change("PUT", path, { revision: byId("move-to").value, expected }));
}

async function rollBack() {
  return moved(await change("POST", `${pathOf(chosen)}/rollback`, { alias: byId("move-alias").value.trim() }));
}

// Where an alias points: a number, or the percents of two revisions.
const target = (at) => typeof at === "number" ? `r${at}` : Object.entries(at).map(([each, percent]) => `${each} ${percent}%`).join(", ");

const moved = ({ name, alias, number, weights, from_number: from, from_weights: fromWeights }) =>
  `${name}@${alias} is ${target(weights ?? number)} now${from === null ? "" : `; it was ${target(fromWeights ?? from)}`}.`;

async function upload() {
  const form = new FormData();
  form.append("name", byId("upload-name").value.trim()); // first: rights and quotas are checked when it arrives
  for (const file of byId("upload-files").files) form.append("file", file);
  const { name, number, alias } = await change("POST", "/v1/adapters", form);
  byId("upload-form").reset();
  chosen = name;
  return `${name}@${alias} is r${number} now.`;
}

// Nothing that another key has shown stays on the page.
export function forgetAdapters() {
  chosen = after = null;
  aliases = {};
  mayChange = true;
  showChanges(false);
  byId("upload-form").reset();
  for (const id of ["move-to", "revision-rows"]) byId(id).replaceChildren();
  showPage({ data: [], has_more: false, last_id: null });
  byId("prefix").value = "";
  setText(byId("adapter-name"), "Choose an adapter");
  for (const id of ["adapter-aliases", "adapter-note", "adapters-note", "change-note"]) setText(byId(id), "");
}

export async function refreshAdapters() {
  if (!canCall()) {
    setText(byId("adapters-note"), `This needs an API key with the scope ${SCOPE}. Give it above.`);
    return;
  }
  if (refusal) return;
  if (!isManaged && performance.now() - askedAt < RARELY_MS) return;
  askedAt = performance.now();
  try {
    showPage(isManaged ? await managedPage() : await modelsPage());
    byId("upload-form").hidden = !isManaged || !mayChange;
    setText(byId("adapters-note"), isManaged ? "" : UNMANAGED);
  } catch (error) {
    if (!(error instanceof CallFailed)) throw error;
    if (error.status === 401 || error.status === 403) refusal = error.message;
    setText(byId("adapters-note"), error.message);
    return;
  }
  if (chosen !== null && isManaged) await showChosen();
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
  hideEmptyColumns(byId("adapter-rows"));
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
    adapter = await getApi(`${pathOf(name)}?limit=${MAX_REVISIONS}`);
  } catch (error) {
    if (!(error instanceof CallFailed)) throw error;
    setText(byId("adapter-note"), error.message);
    if (error.status === 404) chosen = null;
    showChanges(false);
    return;
  }
  if (name !== chosen) return;
  setText(byId("adapter-name"), adapter.name);
  aliases = { ...adapter.aliases, ...adapter.splits };
  showChanges(true);
  setRows(byId("move-to"), adapter.revisions, (each) => `r${each.number}`, () => element("option"), (option, { number }) => {
    option.value = `r${number}`;
    setText(option, option.value);
  });
  setText(byId("adapter-aliases"), Object.entries(aliases).map(([alias, at]) => `@${alias} is ${target(at)}`).join("; "));
  setRows(byId("revision-rows"), adapter.revisions, (each) => `${name} ${each.number}`, () => rowOf(6), (row, each) => {
    const isHere = ([, at]) => (typeof at === "number" ? at === each.number : `r${each.number}` in at);
    const own = Object.entries(aliases).filter(isHere).map(([alias]) => `@${alias}`);
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
  hideEmptyColumns(byId("revision-rows"));
  const hidden = adapter.num_revisions - adapter.revisions.length;
  setText(byId("adapter-note"), hidden > 0 ? `${hidden} older revisions are not shown.` : "");
}

function listed(names, number) {
  const more = number > names.length ? ` and ${count(number - names.length)} more` : "";
  return names.join(", ") + more || "–";
}
