// One prompt under an adapter, and side by side under another one or the base model.

import { CallFailed, canCall, curlOf, getApi, stream } from "./calls.js";
import { byId, count, element, seconds, setRows, setText, shortRevision } from "./dom.js";

const SIDES = ["left", "right"];
const PROMPT = "Hello"; // so that a first request is a press of Send
const BASE = ""; // of the adapters that can be chosen. No name has a space.
const OTHER = " other";
const NOTHING = " nothing";
const LABELS = new Map([[BASE, "base model"], [OTHER, "another…"], [NOTHING, "nothing"]]);
const MAX_SHOWN = 200_000; // characters of an answer
const MAX_NAMES = 250; // of the 1,000 that one call gives
const RARELY_MS = 30_000; // between lists of adapters, which cost the router much

let abort = null;
let askedAt = -Infinity; // for the adapters
let isUntouched = true; // nobody has chosen an adapter

export function prepareTry() {
  for (const side of SIDES) {
    const choice = element("select", { id: `${side}-adapter` });
    choice.addEventListener("change", () => {
      isUntouched = false;
      showChoice(side);
    });
    const other = element("input", { id: `${side}-other`, autocomplete: "off", spellcheck: false, maxLength: 256 });
    other.placeholder = "name, name@alias or name@r1";
    other.setAttribute("aria-label", "Name of the adapter");
    const copy = element("button", { type: "button", id: `${side}-copy` }, "Copy as curl");
    copy.addEventListener("click", () => copyCurl(side));
    const answer = element("pre", { id: `${side}-answer`, tabIndex: 0 });
    answer.setAttribute("aria-label", `Answer of the ${side} adapter`);
    const label = element("label", {}, side === "left" ? "Adapter " : "Beside it ", choice);
    const facts = element("p", { className: "small", id: `${side}-facts` });
    const shown = element("div", { id: `${side}-shown` }, facts, answer, copy);
    byId("answers").append(element("div", {}, element("div", { className: "choice" }, label, other), shown));
  }
  byId("prompt").value = PROMPT;
  showNames([]);
  byId("try-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try-form").requestSubmit();
  });
  byId("stop").addEventListener("click", () => abort?.abort());
}

// Nothing of what was asked and answered stays on the page.
export function forgetAnswers() {
  abort?.abort();
  isUntouched = true;
  showNames([]);
  for (const side of SIDES) {
    byId(`${side}-answer`).className = "";
    for (const part of ["answer", "facts"]) setText(byId(`${side}-${part}`), "");
    byId(`${side}-other`).value = "";
  }
  byId("prompt").value = PROMPT;
  for (const id of ["try-note", "curl"]) setText(byId(id), "");
}

export function listAgain() {
  askedAt = -Infinity;
}

// The adapters that the key may use.
export async function refreshChoices() {
  if (!canCall() || performance.now() - askedAt < RARELY_MS) return;
  askedAt = performance.now();
  try {
    const page = await getApi("/v1/models");
    showNames(page.data.filter((model) => model.parent !== null).slice(0, MAX_NAMES).map((model) => model.id));
  } catch (error) {
    if (!(error instanceof CallFailed)) throw error;
    if (error.status === 401 || error.status === 403) askedAt = Infinity; // until there is another key
    setText(byId("try-note"), error.message);
  }
}

function showNames(names) {
  for (const side of SIDES) {
    const choice = byId(`${side}-adapter`);
    const chosen = choice.value;
    const kept = isUntouched || [...LABELS.keys(), ...names].includes(chosen) ? [] : [chosen];
    const items = [...(side === "right" ? [NOTHING] : []), BASE, ...kept, ...names, OTHER];
    setRows(choice, items, (name) => name, () => element("option"), (option, name) => {
      option.value = name;
      setText(option, LABELS.get(name) ?? name);
    });
    if (isUntouched) choice.value = side === "left" ? (names[0] ?? BASE) : names.length ? BASE : NOTHING;
    showChoice(side);
  }
}

function showChoice(side) {
  const { value } = byId(`${side}-adapter`);
  byId(`${side}-other`).hidden = value !== OTHER;
  byId(`${side}-shown`).hidden = value === NOTHING;
}

// The path and body of a side's request.
function requestOf(side) {
  const isChat = byId("try-kind").value === "chat";
  const { value } = byId(`${side}-adapter`);
  const adapter = value === OTHER ? byId(`${side}-other`).value.trim() : value;
  const prompt = byId("prompt").value;
  const body = {
    model: document.body.dataset.model,
    ...(adapter ? { adapter } : {}),
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number(byId("try-tokens").value),
    temperature: Number(byId("try-temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  return [isChat ? "/v1/chat/completions" : "/v1/completions", body];
}

async function copyCurl(side) {
  const command = curlOf(...requestOf(side));
  setText(byId("curl"), command);
  // Over plain HTTP from another machine there is no clipboard.
  const isCopied = await navigator.clipboard?.writeText(command).then(() => true, () => false);
  setText(byId("try-note"), isCopied ? "Copied to the clipboard:" : "The clipboard cannot be written; copy this:");
}

async function send() {
  if (abort !== null) return;
  if (!canCall()) {
    setText(byId("try-note"), "This needs an API key with the scope infer. Give it above.");
    return;
  }
  abort = new AbortController();
  byId("stop").disabled = false;
  byId("send").disabled = true;
  for (const id of ["try-note", "curl"]) setText(byId(id), "");
  const sides = SIDES.filter((side) => byId(`${side}-adapter`).value !== NOTHING);
  const ends = await Promise.all(sides.map((side) => run(side, abort.signal)));
  const isStopped = abort.signal.aborted;
  abort = null;
  byId("stop").disabled = true;
  byId("send").disabled = false;
  const done = sides.length > 1 ? "Both are done." : "Done.";
  setText(byId("try-note"), isStopped ? "Stopped." : ends.every(Boolean) ? done : "Done, with an error.");
}

// What a model thinks before its answer looks different from it.
function show(answer, text, isThought) {
  if (answer.textContent.length >= MAX_SHOWN) return;
  if (!isThought) answer.append(text);
  else if (answer.lastChild?.className === "thought") answer.lastChild.append(text);
  else answer.append(element("span", { className: "thought", title: "reasoning" }, text));
}

// True if the answer is complete.
async function run(side, signal) {
  const answer = byId(`${side}-answer`);
  const facts = byId(`${side}-facts`);
  const [path, body] = requestOf(side);
  const beganAt = performance.now();
  let firstAt = null;
  let numTokens = null;
  let revision = "";
  answer.className = "";
  setText(answer, "");
  setText(facts, "waits");
  const describe = () => {
    const parts = [revision ? `revision ${revision}` : "base model"];
    if (firstAt !== null) parts.push(`TTFT ${seconds((firstAt - beganAt) / 1000)}`);
    if (numTokens !== null) parts.push(`${numTokens} tokens`);
    const decodeMs = performance.now() - firstAt;
    if (numTokens > 1 && firstAt !== null && decodeMs > 0) {
      parts.push(`${count((1000 * (numTokens - 1)) / decodeMs)} tokens/s`);
    }
    setText(facts, parts.join(", "));
  };
  try {
    await stream(
      path,
      body,
      signal,
      (headers) => {
        if (signal.aborted) return;
        revision = shortRevision(headers.get("x-prelude-revision"));
        describe();
      },
      (event) => {
        if (signal.aborted) return; // it was under way, and what it adds to may belong to another key by now
        const choice = event.choices[0];
        const thought = choice?.delta?.reasoning_content ?? "";
        const text = choice?.delta?.content ?? choice?.text ?? "";
        if (thought || text) firstAt ??= performance.now();
        if (thought) show(answer, thought, true);
        if (text) show(answer, text, false);
        numTokens = event.usage?.completion_tokens ?? numTokens;
        describe();
      },
    );
    return true;
  } catch (error) {
    if (!signal.aborted) {
      answer.className = "error";
      answer.append(error instanceof CallFailed ? error.message : "the router did not answer, or the answer broke off");
    }
    return false;
  }
}
