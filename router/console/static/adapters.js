// Adapters: a page of them, and the one that was chosen. Asked for each second while the view is shown.

import { canCall, CallFailed, getApi } from "./calls.js";
import { byId, bytes, count, element, rowOf, setCells, setRows, setText, shortRevision } from "./dom.js";

const PAGE = 25;
const MAX_REVISIONS = 20;

let chosen = null;
let after = null; // the last name of the page before
let last = null; // of this page
let refusal = ""; // why asking again is of no use until something changes
let isManaged = true; // false: router.management is off, so /v1/models has to do

export function prepareAdapters(onChange) {
  byId("adapter-filter").addEventListener("submit", (event) => event.preventDefault());
  byId("prefix").addEventListener("input", () => turn(null, onChange));
  byId("first-adapters").addEventListener("click", () => turn(null, onChange));
  byId("next-adapters").addEventListener("click", () => turn(last, onChange));
  byId("adapter-rows").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) {
      chosen = button.closest("tr").dataset.key;
      onChange();
    }
  });
}

function turn(name, onChange) {
  after = name;
  onChange();
}

export function tryAgain() {
  refusal = "";
  isManaged = true;
}

export async function refreshAdapters() {
  if (!canCall()) {
    setText(byId("adapters-note"), "This needs an API key with the scope adapters:read. Give it above.");
    return;
  }
  if (refusal) return;
  try {
    showPage(isManaged ? await managedPage() : await modelsPage());
    setText(byId("adapters-note"), isManaged ? "" : "router.management is off: there are names and revisions only.");
  } catch (error) {
    if (!(error instanceof CallFailed)) throw error;
    if (error.code === "management_off") {
      isManaged = false;
      return refreshAdapters();
    }
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
  const page = await getApi("/v1/models");
  const begins = byId("prefix").value;
  const data = page.data
    .filter((model) => model.parent !== null && model.id.startsWith(begins))
    .slice(0, 10 * PAGE)
    .map((model) => ({ name: model.id, latest: { number: null, revision: model.root, kinds: [], positions: "", bytes: null } }));
  return { data, has_more: false, last_id: null };
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
    [number, shortRevision(latest.revision), latest.kinds.join(", "), latest.positions, size].forEach((text, i) =>
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
