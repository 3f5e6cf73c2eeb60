// Elements and texts. Every value of the router becomes text here: nothing is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function setText(node, value) {
  const text = String(value ?? "");
  if (node.textContent !== text) node.textContent = text;
}

// Rows are kept by key, so that focus and selection outlive an update. `fill(row, item)` sets their cells.
export function setRows(body, items, keyOf, make, fill) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let row = known.get(key);
    if (row === undefined) {
      row = make(item);
      row.dataset.key = key;
    }
    known.delete(key);
    fill(row, item);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  for (const row of known.values()) row.remove();
}

export function rowOf(numCells, firstIsHeader = true) {
  const row = element("tr");
  for (let i = 0; i < numCells; i++) {
    row.append(element(i === 0 && firstIsHeader ? "th" : "td", i === 0 && firstIsHeader ? { scope: "row" } : {}));
  }
  return row;
}

export function setCells(row, values) {
  values.forEach((value, index) => setText(row.children[index], value));
}

// Columns without a value take no width.
export function hideEmptyColumns(body) {
  const heads = body.closest("table").querySelectorAll("thead th");
  heads.forEach((head, i) => {
    const cells = [...body.rows].map((row) => row.children[i]);
    const isEmpty = cells.length > 0 && cells.every((cell) => ["", "–"].includes(cell.textContent));
    for (const each of [head, ...cells]) each.hidden = isEmpty;
  });
}

export const seconds = (s) =>
  s === null || s === undefined ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : s < 120 ? `${s.toFixed(1)} s` : `${Math.round(s / 60)} min`;

export const count = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en"));

export const bytes = (n) =>
  n < 1024 ? `${n} B` : n < 1024 ** 2 ? `${(n / 1024).toFixed(0)} KiB` : n < 1024 ** 3 ? `${(n / 1024 ** 2).toFixed(1)} MiB` : `${(n / 1024 ** 3).toFixed(1)} GiB`;

export const shortRevision = (id) => (id ? id.replace("sha256:", "").slice(0, 12) : "");
