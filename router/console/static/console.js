// The console: asks for the state every three quarters of a second, and shows it.

import { forgetAdapters, prepareAdapters, refreshAdapters, tryAgain } from "./adapters.js";
import { asksForKeys, CallFailed, canAskState, getState, hasKey, KeyChanged, mayTakeKey, setKey } from "./calls.js";
import { Chart, quantile } from "./charts.js";
import { byId, count, seconds, setText } from "./dom.js";
import { showFleet } from "./fleet.js";
import { showRequests } from "./requests.js";
import { forgetTraining, isTrained, refreshTraining } from "./training.js";
import { forgetAnswers, listAgain, prepareTry, refreshChoices } from "./try.js";

const PERIOD_MS = 750; // so that a change is shown within a second
const LATENCY_POINTS = 40; // first tokens of the last half minute make one number

const tabs = [...document.querySelectorAll("[role=tab]")];
const charts = Object.fromEntries(["tokens", "first", "flight"].map((name) => [name, new Chart(byId(`${name}-chart`))]));
const history = []; // of states' counters, the newest last
let stateRefusal = "";
let timer = null;
let isAsking = false;
let isWanted = false; // to ask again at once

const hashOf = (view) => `#/${view}`;

function shown() {
  return tabs.find((tab) => tab.getAttribute("aria-selected") === "true").getAttribute("aria-controls");
}

// The view that the address names: not by its id, to which the browser would scroll and give the focus. At the clients'
// port, people come to try; operators look at the fleet first.
function showNamed() {
  const named = tabs.filter((tab) => !tab.hidden).map((tab) => tab.getAttribute("aria-controls")).find((view) => hashOf(view) === window.location.hash);
  show(named ?? (document.body.dataset.calls ? "fleet" : "try"));
}

function show(view, takesFocus = false) {
  for (const tab of tabs) {
    const isIt = tab.getAttribute("aria-controls") === view;
    tab.setAttribute("aria-selected", String(isIt));
    tab.tabIndex = isIt ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isIt;
    if (isIt && takesFocus) tab.focus();
  }
  askSoon();
}

function prepareTabs() {
  for (const tab of tabs) {
    tab.addEventListener("click", () => (window.location.hash = hashOf(tab.getAttribute("aria-controls"))));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const end = { Home: 0, End: -1 }[event.key];
      if (step === undefined && end === undefined) return;
      event.preventDefault();
      const usable = tabs.filter((each) => !each.hidden);
      const next = end ?? (usable.indexOf(tab) + step + usable.length) % usable.length;
      const view = usable.at(next).getAttribute("aria-controls");
      window.history.replaceState(null, "", hashOf(view));
      show(view, true);
    });
  }
  window.addEventListener("hashchange", showNamed);
  showNamed();
}

// A key that may not see all tenants' requests has what is left.
function showOperatorsViews(isAllowed) {
  for (const id of ["tiles", "tab-fleet", "tab-requests"]) byId(id).hidden = !isAllowed;
  byId("tab-training").hidden = !isAllowed || !isTrained;
  if (!isAllowed && ["fleet", "requests", "training"].includes(shown())) show("try");
}

function prepareKey() {
  if (!asksForKeys) return;
  const note = byId("key-note");
  note.hidden = false;
  if (!mayTakeKey) {
    setText(note, "This page came over plain HTTP from another machine, so it takes no key: everybody on the way could read it. Open it through a tunnel (ssh -L, kubectl port-forward) or over HTTPS.");
    return;
  }
  byId("key-form").hidden = false;
  setText(note, "The router asks for keys. adapters:read shows adapters (where router.management is off, infer does), adapters:write changes them, infer tries prompts, admin sees all tenants. The key stays in this page's memory until it is closed.");
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(byId("key").value);
  });
  byId("forget").addEventListener("click", () => use(""));
  if (!canAskState()) byId("key").focus();
}

function use(value) {
  if (hasKey()) forget();
  setKey(value);
  byId("key").value = "";
  byId("forget").hidden = !hasKey();
  byId("key-note").hidden = hasKey();
  byId("key").placeholder = hasKey() ? "a key is in use" : "";
  stateRefusal = "";
  showOperatorsViews(true);
  tryAgain();
  listAgain();
  askSoon();
}

// Nothing that the key in use has shown stays on the page.
function forget() {
  forgetAdapters();
  forgetAnswers();
  forgetNumbers();
  forgetTraining();
  showFleet({ workers: [], num_workers: 0 });
  showRequests({ requests: [], num_requests: 0 });
  for (const id of ["requests-note", "workers-note"]) setText(byId(id), "");
  for (const id of ["tokens-now", "first-now", "flight-now", "workers-now"]) setText(byId(id), "–");
}

function forgetNumbers() {
  history.length = 0;
  for (const chart of Object.values(charts)) chart.clear();
}

function askSoon() {
  isWanted = true;
  if (isAsking) return;
  clearTimeout(timer);
  timer = setTimeout(ask, 0);
}

async function ask() {
  isAsking = true;
  isWanted = false;
  clearTimeout(timer);
  const beganAt = performance.now();
  await Promise.all([
    askState().catch(notConnected),
    { adapters: refreshAdapters, training: refreshTraining, try: refreshChoices }[shown()]?.().catch(notConnected),
  ]);
  isAsking = false;
  if (!document.hidden) timer = setTimeout(ask, Math.max(50, isWanted ? 0 : PERIOD_MS - (performance.now() - beganAt)));
}

async function askState() {
  if (!canAskState()) {
    byId("tiles").hidden = true;
    setConnection("", "Waits for a key");
    return;
  }
  if (stateRefusal) return;
  const state = await getState();
  setConnection("good", `Live, ${new Date().toLocaleTimeString("en-GB")}`);
  showNumbers(state);
  showFleet(state);
  showRequests(state);
}

function notConnected(error) {
  if (error instanceof KeyChanged) return;
  if (!(error instanceof CallFailed)) reportError(error); // a mistake of this page, for the browser's console
  if (error.status === 401 || error.status === 403) stateRefusal = error.message;
  if (error.status === 403 && hasKey()) {
    showOperatorsViews(false);
    setConnection("good", "The key is in use; fleet and requests need the scope admin");
    return;
  }
  setConnection("bad", error.message);
}

function setConnection(state, text) {
  const where = byId("connection");
  where.dataset.state = state;
  setText(where, text);
}

function showNumbers(state) {
  if (history.length && history[0].router !== state.router) forgetNumbers(); // it has restarted, or is another one
  if (history.length && history[history.length - 1].at >= state.at_s) return; // the same one again, or one kept longer
  history.push({ router: state.router, at: state.at_s, tokens: state.tokens, firstTokens: state.first_tokens });
  if (history.length > LATENCY_POINTS + 1) history.shift();
  const newest = history[history.length - 1];
  const before = history[history.length - 2];
  const tokens = before ? (newest.tokens - before.tokens) / (newest.at - before.at) : null;
  const firstOf = (each, i) => each.firstTokens[i] ?? 0;
  const buckets = state.first_token_le_s.map((_, i) => firstOf(newest, i) - firstOf(history[0], i));
  const [half, most] = [0.5, 0.95].map((share) => quantile(share, state.first_token_le_s, buckets));
  setText(byId("tokens-now"), tokens === null ? "–" : count(tokens));
  setText(byId("first-now"), half === null ? "–" : `${seconds(half)}, p95 ${seconds(most)}`);
  setText(byId("flight-now"), count(state.num_requests));
  setText(byId("workers-now"), `${count(state.num_placeable)} of ${count(state.num_workers)}`);
  const roles = ["prefill", "decode", "unified"].map((role) => [role, state.workers.filter((each) => each.role === role).length]);
  setText(byId("workers-note"), roles.filter(([, n]) => n).map(([role, n]) => `${n} ${role}`).join(", "));
  charts.tokens.add(tokens);
  charts.first.add(half);
  charts.flight.add(state.num_requests);
}

setText(byId("model"), document.body.dataset.model);
byId("tab-training").hidden = !isTrained;
prepareTabs();
prepareAdapters(askSoon);
prepareTry();
prepareKey();
document.addEventListener("visibilitychange", () => document.hidden || askSoon());
ask();
