// Calls of the router. The API key is in this module's memory only: in no URL, cookie or storage, and gone with the page.

const { calls, needsKey, stateNeedsKey } = document.body.dataset;
const TIMEOUT_MS = 8000;
const CHANGE_TIMEOUT_MS = 600_000; // an upload takes as long at most
const MAX_EVENT = 1 << 20; // characters of one event of a stream

let key = "";

export const asksForKeys = needsKey === "true";
// Over plain HTTP from another machine, everybody between could read a key.
export const mayTakeKey = window.isSecureContext;
export const hasKey = () => key !== "";
export const canCall = () => !asksForKeys || hasKey();
export const canAskState = () => stateNeedsKey !== "true" || hasKey();

export function setKey(value) {
  key = value.trim();
}

export class CallFailed extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The answer to a call that was made with another key than the one now in use. Nobody may see it.
export class KeyChanged extends Error {}

export const getState = () => getJson("/console/state");
export const getPolicies = () => getJson("/console/policies");
export const getApi = (path) => getJson(calls + path);

// `body`: a form, or fields of JSON.
export function change(method, path, body) {
  const isForm = body instanceof FormData;
  return getJson(calls + path, {
    method,
    body: isForm ? body : JSON.stringify(body),
    headers: isForm ? headers() : { ...headers(), "content-type": "application/json" },
    signal: AbortSignal.timeout(CHANGE_TIMEOUT_MS),
  });
}

// A command for a shell that makes a call, with a variable in place of the key.
export function curlOf(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  return [
    `curl -N ${quoted(window.location.origin + calls + path)}`,
    ...(asksForKeys ? ['-H "Authorization: Bearer $OPENAI_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d ${quoted(JSON.stringify(body))}`,
  ].join(" \\\n  ");
}

async function getJson(path, options = {}) {
  const used = key;
  let value = null;
  let error = null;
  try {
    const answer = await fetch(path, { headers: headers(), signal: AbortSignal.timeout(TIMEOUT_MS), ...options, ...SAFE });
    if (answer.ok) value = await answer.json();
    else error = await failure(answer);
  } catch {
    error = new CallFailed(0, "no_answer", options.method ? "The router did not answer; see below whether the change was made" : "The router does not answer; it is asked again");
  }
  if (used !== key) throw new KeyChanged();
  if (error !== null) throw error;
  return value;
}

// Calls `onHead(headers)` once, then `onEvent(event)` for each event, until the stream ends.
export async function stream(path, body, signal, onHead, onEvent) {
  const answer = await fetch(calls + path, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
    ...SAFE,
    signal,
  });
  if (!answer.ok) throw await failure(answer);
  onHead(answer.headers);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isComplete = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (rest.length > MAX_EVENT) throw new CallFailed(200, "too_long", "an event of the answer is too long");
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") {
        isComplete = true;
        continue;
      }
      const parsed = JSON.parse(data);
      if (parsed.error) throw new CallFailed(200, parsed.error.code, parsed.error.message);
      onEvent(parsed);
    }
  }
  if (!isComplete) throw new CallFailed(200, "cut_off", "the answer ended early");
}

const SAFE = { cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer" };

function headers() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function failure(answer) {
  try {
    const { error } = await answer.json();
    return new CallFailed(answer.status, error.code, error.message);
  } catch {
    return new CallFailed(answer.status, "unreadable", `the router answered with ${answer.status}`);
  }
}
