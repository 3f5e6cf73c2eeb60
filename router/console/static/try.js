// One prompt under two adapters, side by side.

import { CallFailed, canCall, stream } from "./calls.js";
import { byId, element, seconds, setText, shortRevision } from "./dom.js";

const SIDES = ["left", "right"];
const MAX_SHOWN = 200_000; // characters of an answer

let abort = null;

export function prepareTry() {
  for (const side of SIDES) {
    const input = element("input", { id: `${side}-adapter`, autocomplete: "off", spellcheck: false, maxLength: 256 });
    input.setAttribute("list", "adapter-names");
    input.placeholder = "empty: the base model";
    const label = element("label", {}, side === "left" ? "Adapter " : "Other adapter ", input);
    const answer = element("pre", { id: `${side}-answer`, tabIndex: 0 });
    answer.setAttribute("aria-label", `Answer of the ${side} adapter`);
    byId("answers").append(element("div", {}, label, element("p", { className: "small", id: `${side}-facts` }), answer));
  }
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
  for (const side of SIDES) {
    byId(`${side}-answer`).className = "";
    for (const part of ["answer", "facts"]) setText(byId(`${side}-${part}`), "");
    byId(`${side}-adapter`).value = "";
  }
  byId("prompt").value = "";
  setText(byId("try-note"), "");
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
  setText(byId("try-note"), "");
  const ends = await Promise.all(SIDES.map((side) => run(side, abort.signal)));
  const isStopped = abort.signal.aborted;
  abort = null;
  byId("stop").disabled = true;
  byId("send").disabled = false;
  setText(byId("try-note"), isStopped ? "Stopped." : ends.every(Boolean) ? "Both are done." : "Done, with an error.");
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
  const isChat = byId("try-kind").value === "chat";
  const adapter = byId(`${side}-adapter`).value.trim();
  const prompt = byId("prompt").value;
  const body = {
    model: document.body.dataset.model,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(byId("try-tokens").value),
    temperature: Number(byId("try-temperature").value),
    ...(adapter ? { adapter } : {}),
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  const beganAt = performance.now();
  let firstAt = null;
  let numTokens = null;
  let revision = "";
  answer.className = "";
  setText(answer, "");
  setText(facts, "waits");
  const describe = () => {
    const now = performance.now();
    const parts = [revision ? `revision ${revision}` : "base model"];
    if (firstAt !== null) parts.push(`first token after ${seconds((firstAt - beganAt) / 1000)}`);
    if (numTokens !== null) parts.push(`${numTokens} tokens in ${seconds((now - beganAt) / 1000)}`);
    setText(facts, parts.join(", "));
  };
  try {
    await stream(
      isChat ? "/v1/chat/completions" : "/v1/completions",
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
        const text = (isChat ? choice?.delta?.content : choice?.text) ?? "";
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
