// The console: asks for the state every three quarters of a second, and shows it.

import { forgetAdapters, prepareAdapters, refreshAdapters, tryAgain } from "./adapters.js";
import { asksForKeys, CallFailed, canAskState, getState, hasKey, KeyChanged, mayTakeKey, setKey } from "./calls.js";
import { Chart, quantile } from "./charts.js";
import { byId, count, seconds, setText } from "./dom.js";
import { showFleet } from "./fleet.js";
import { showRequests } from "./requests.js";
import { forgetAnswers, prepareTry } from "./try.js";

const PERIOD_MS = 750; // so that a change is shown within a second
const LATENCY_POINTS = 40; // first tokens of the last half minute make one number

const tabs = [...document.querySelectorAll("[role=tab]")];
const charts = Object.fromEntries(["tokens", "first", "flight"].map((name) => [name, new Chart(byId(`${name}-chart`))]));
const history = []; // of states' counters, the newest last
let stateRefusal = "";
let timer = null;
let isAsking = false;
let isWanted = false; // to ask again at once

function shown() {
  return tabs.find((tab) => tab.getAttribute("aria-selected") === "true").getAttribute("aria-controls");
}

function show(view, takesFocus = false) {
  for (const tab of tabs) {
    const isIt = tab.getAttribute("aria-controls") === view;
    tab.setAttribute("aria-selected", String(isIt));
    tab.tabIndex = isIt ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isIt;
    if (isIt && takesFocus) tab.focus();
  }
  window.history.replaceState(null, "", `#${view}`);
  askSoon();
}

function prepareTabs() {
  for (const tab of tabs) {
    tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const end = { Home: 0, End: tabs.length - 1 }[event.key];
      if (step === undefined && end === undefined) return;
      event.preventDefault();
      const next = end ?? (tabs.indexOf(tab) + step + tabs.length) % tabs.length;
      show(tabs[next].getAttribute("aria-controls"), true);
    });
  }
  const asked = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === window.location.hash);
  if (asked) show(asked.getAttribute("aria-controls"));
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
  setText(note, "The router asks for keys. adapters:read shows adapters (where router.management is off, infer does), infer tries prompts, admin sees all tenants. The key stays in this page's memory until it is closed.");
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
  byId("key").placeholder = hasKey() ? "a key is in use" : "";
  stateRefusal = "";
  tryAgain();
  askSoon();
}

// Nothing that the key in use has shown stays on the page.
function forget() {
  forgetAdapters();
  forgetAnswers();
  forgetNumbers();
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
    ["adapters", "try"].includes(shown()) ? refreshAdapters(shown()).catch(notConnected) : null,
  ]);
  isAsking = false;
  if (!document.hidden) timer = setTimeout(ask, Math.max(50, isWanted ? 0 : PERIOD_MS - (performance.now() - beganAt)));
}

async function askState() {
  if (!canAskState()) {
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
  setText(byId("first-now"), half === null ? "–" : `${seconds(half)}, 95%: ${seconds(most)}`);
  setText(byId("flight-now"), count(state.num_requests));
  setText(byId("workers-now"), `${count(state.num_placeable)} of ${count(state.num_workers)}`);
  const roles = ["prefill", "decode", "unified"].map((role) => [role, state.workers.filter((each) => each.role === role).length]);
  setText(byId("workers-note"), roles.filter(([, n]) => n).map(([role, n]) => `${n} ${role}`).join(", "));
  charts.tokens.add(tokens);
  charts.first.add(half);
  charts.flight.add(state.num_requests);
}

setText(byId("model"), document.body.dataset.model);
prepareTabs();
prepareAdapters(askSoon);
prepareTry();
prepareKey();
document.addEventListener("visibilitychange", () => document.hidden || askSoon());
ask();
