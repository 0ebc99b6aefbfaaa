// The page: asks its own server for a view every two seconds, and draws it. What the view means is in view.py.

import { Chart, make, swatch } from "/charts.js";

const $ = (selector) => document.querySelector(selector);
const colour = (slot) => `var(--c${slot % 8})`;
const OTHERS = "var(--others)";
const NONE = "–";
const ROWS = 12; // of requests
const OPEN_ROWS = 4; // of them that wait or run: of a flood all others do

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const number = (value) => (value === null || value === undefined ? NONE : whole.format(value));
const rate = (value) => (value === null || value === undefined ? NONE : value < 10 ? `${+value.toFixed(1)}` : short.format(value));
const percent = (part) => (part === null || part === undefined ? NONE : `${Math.round(100 * part)} %`);
const seconds = (value) =>
  value === null || value === undefined ? NONE : value < 1 ? `${Math.round(1000 * value)} ms` : value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;

const clock = (time) => new Date(1000 * time).toLocaleTimeString([], { hourCycle: "h23" });

const HEALTH = {
  "no data": "No data yet", "ok": "All well", "trouble": "Needs attention", "router down": "Router down",
  "gateway down": "Gateway down", "denied": "Key refused", "lost": "Connection lost",
};

// ---- asking

/** JSON of this page's server. Throws an Error whose text is for people; `status` is 0 if nobody answered. */
async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, signal: AbortSignal.timeout(20000) });
  } catch {
    throw Object.assign(new Error("The page's own server does not answer."), { status: 0 });
  }
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw Object.assign(new Error(body?.error?.message ?? `HTTP status ${answer.status}`), { status: answer.status });
  return body;
}

// ---- drawing

/** Makes the children of `parent` those for `items`, keeping the nodes of keys that stay, so that focus stays too. */
function keyed(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  items.forEach((item, at) => {
    const name = String(key(item));
    let node = old.get(name);
    if (!node) {
      node = create(item);
      node.dataset.key = name;
    }
    old.delete(name);
    update(node, item);
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
  });
  for (const node of old.values()) node.remove();
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A table's rows. A column: {name, words, text(item)} or {name, fill(cell, item)}. */
function table(node, columns, items, key, describe = () => ({})) {
  const head = make("tr", { role: "row" });
  for (const column of columns)
    head.append(make("th", { role: "columnheader", scope: "col", class: column.words ? "words" : "" }, column.name));
  const header = node.querySelector("thead"), wide = columns.map((column) => column.name).join("\n");
  if (header.dataset.columns !== wide) {
    header.dataset.columns = wide;
    header.replaceChildren(head);
    node.querySelector("tbody").replaceChildren();
  }
  node.hidden = items.length === 0;
  const create = () => {
    const row = make("tr", { role: "row" });
    for (const column of columns)
      row.append(make("td", { role: "cell", class: column.words ? "words" : "", "data-label": column.name }));
    return row;
  };
  keyed(node.querySelector("tbody"), items, key, create, (row, item) => {
    Object.assign(row.dataset, describe(item));
    columns.forEach((column, at) => (column.fill ? column.fill(row.children[at], item) : put(row.children[at], column.text(item))));
  });
}

function named(cell, name, patch) {
  if (cell.dataset.name === name && cell.dataset.patch === patch) return;
  Object.assign(cell.dataset, { name, patch });
  cell.replaceChildren(swatch(patch), make("span", { class: "name", title: name }, name));
}

function badge(cell, state) {
  if (!cell.firstChild) cell.append(make("span", { class: "badge" }));
  cell.firstChild.dataset.state = state;
  put(cell.firstChild, state);
}

const charts = { service: new Chart($("#service")), bound: new Chart($("#bound")) };

function drawHealth(view, health) {
  $("#health").dataset.health = health;
  put($("#health span:last-child"), HEALTH[health]);
  document.title = `${HEALTH[health]} · sglang-fair`;
  const count = view.replicas.length;
  const policies = [...new Set(view.replicas.map((one) => one.policy).filter(Boolean))].join(", ");
  put($("#about"), [`${count} replica${count === 1 ? "" : "s"}`, policies, view.placement].filter(Boolean).join(" · "));
}

function drawNotes(notes) {
  keyed($("#notes"), notes, (note) => `${note.about} ${note.text}`, () => {
    const line = make("li");
    line.append(make("strong"), make("span"));
    return line;
  }, (line, note) => {
    line.dataset.level = note.level;
    put(line.children[0], note.about);
    put(line.children[1], note.text);
  });
}

function drawFigures(view) {
  put($("#rate"), rate(view.rate));
  put($("#running"), number(view.running));
  put($("#waiting"), view.waiting === null ? "no data" : `running, ${number(view.waiting)} waiting`);
  put($("#hits"), percent(view.hit_rate));
  put($("#hits-more"), view.measured_hit_rate === null ? "of prompt tokens"
    : `router foresaw ${percent(view.predicted_hit_rate)}, was ${percent(view.measured_hit_rate)}`);
  put($("#apart"), percent(view.of_bound));
  put($("#seen"), number(view.clients_seen));
}

function drawService(view) {
  const series = view.clients.map((one) => ({ name: one.name, colour: colour(one.slot), values: one.rates }));
  if (view.others) series.push({ name: "others", colour: OTHERS, values: view.others.rates });
  const now = view.clients.map((one) => `${one.name} ${rate(one.rate)}`).join(", ");
  charts.service.show({ times: view.times, series, format: rate, label: `Units of service a second over time. Last minute: ${now || "nothing"}.` });
  keyed($("#legend"), series, (one) => one.name, () => make("li"), (line, one) => named(line, one.name, one.colour));
}

function drawShares(view) {
  const rows = view.clients.filter((one) => one.share !== null);
  const shown = view.others && view.others.share !== null ? [...rows, { ...view.others, name: `${view.others.clients} others`, fair_share: null }] : rows;
  const most = Math.max(0.01, ...shown.flatMap((one) => [one.share, one.fair_share ?? 0]));
  keyed($("#shares"), shown, (one) => one.name, () => {
    const row = make("li"), line = make("div", { class: "line" }), bar = make("div", { class: "bar" });
    line.append(make("span", { class: "name" }), make("span"));
    bar.append(make("div", { class: "fill" }), make("div", { class: "due" }));
    row.append(line, bar);
    return row;
  }, (row, one) => {
    const [line, bar] = row.children, [fill, due] = bar.children;
    put(line.children[0], one.name);
    put(line.children[1], one.fair_share === null ? percent(one.share) : `${percent(one.share)} of ${percent(one.fair_share)}`);
    fill.style.width = `${(100 * one.share) / most}%`;
    fill.style.background = one.slot === undefined ? OTHERS : colour(one.slot);
    due.hidden = one.fair_share === null;
    due.style.left = `${(100 * (one.fair_share ?? 0)) / most}%`;
  });
  if (shown.length === 0) $("#shares").replaceChildren(make("li", { class: "empty" }, "No service in the last minute"));
}

function drawBound(view) {
  const series = view.replicas.map((one, at) => ({ name: one.name, colour: colour(at), values: one.of_bound }));
  charts.bound.show({
    times: view.times, series, format: percent, limit: { value: 1, name: "bound" },
    label: `Difference divided by bound, over time. Now at most ${percent(view.of_bound)}.`,
    none: "No two clients have waited at a time",
  });
  keyed($("#replica-legend"), series, (one) => one.name, () => make("li"), (line, one) => named(line, one.name, one.colour));
}

function drawClients(view) {
  const replicas = view.replicas.filter((one) => one.policy);
  const columns = [
    { name: "client", words: true, fill: (cell, one) => named(cell, one.name, one.slot === undefined ? OTHERS : colour(one.slot)) },
    { name: "weight", fill: weightCell },
    { name: "units/s", text: (one) => rate(one.rate) },
    { name: "share", text: (one) => percent(one.share) },
    { name: "fair share", text: (one) => percent(one.fair_share) },
    { name: "mean wait", text: (one) => (one.wait_is_longer ? `over ${seconds(one.wait_s)}` : seconds(one.wait_s)) },
    { name: "waiting", text: (one) => number(one.waiting) },
    { name: "running", text: (one) => number(one.running) },
    { name: "hits", text: (one) => percent(one.hit_rate) },
    ...replicas.map((replica) => ({
      name: `${/dlpm|drr/.test(replica.policy) ? "deficit" : "counter"} ${replica.name}`,
      fill: (cell, one) => {
        const counter = one.deficits?.[replica.name];
        put(cell, number(counter));
        cell.classList.toggle("below", counter !== null && counter !== undefined && counter <= 0);
      },
    })),
  ];
  const items = view.others ? [...view.clients, { ...view.others, name: `${view.others.clients} others` }] : view.clients;
  table($("#clients"), columns, items, (one) => one.name, (one) => ({
    client: one.name, share: one.share ?? "", fair: one.fair_share ?? "", wait: one.wait_s ?? "", weight: one.weight ?? "",
  }));
  $("#no-clients").hidden = items.length > 0;
  const states = view.replicas.map((one) => one.state);
  put($("#no-clients"), states.length && states.every((one) => one === "no overlay")
    ? "No replica runs the fair scheduler, so nothing is known of the clients."
    : states.some((one) => one === "ok") ? "Nobody has asked yet." : "No data: no replica answers.");
}

function weightCell(cell, one) {
  if (one.weight === undefined) return put(cell, NONE);
  if (!cell.firstChild) {
    cell.append(make("button", { type: "button", class: "edit" }));
    cell.firstChild.addEventListener("click", () => openWeight(cell.dataset.client, cell.dataset.weight));
  }
  Object.assign(cell.dataset, { client: one.name, weight: one.weight });
  put(cell.firstChild, `${+one.weight.toPrecision(6)}`);
  cell.firstChild.setAttribute("aria-label", `Weight of ${one.name}: ${one.weight}. Change it`);
}

function drawReplicas(view) {
  const columns = [
    { name: "replica", words: true, fill: (cell, one) => named(cell, one.name, colour(view.replicas.findIndex((each) => each.name === one.name))) },
    ...(new Set(view.replicas.map((one) => one.model)).size > 1
      ? [{ name: "model", words: true, text: (one) => one.model || NONE }] : []),
    { name: "state", words: true, fill: (cell, one) => badge(cell, one.state) },
    { name: "policy", words: true, text: (one) => one.policy || NONE },
    { name: "units/s", text: (one) => rate(one.rate) },
    { name: "running", text: (one) => number(one.running) },
    { name: "waiting", text: (one) => number(one.waiting) },
    { name: "hits", text: (one) => percent(one.hit_rate) },
    { name: "difference", text: (one) => number(one.difference) },
    { name: "bound", text: (one) => number(one.bound) },
    { name: "refills", text: (one) => number(one.refills) },
  ];
  table($("#replicas"), columns, view.replicas, (one) => one.name, (one) => ({
    replica: one.name, state: one.state, difference: one.difference ?? "", bound: one.bound ?? "",
  }));
  $("#no-replicas").hidden = view.replicas.length > 0;
  put($("#no-replicas"), "No data: no replica is known.");
}

// ---- requests

async function drawRequests() {
  const client = $("#of").value;
  let found = [], said = "No request yet.";
  try {
    const answer = await ask(`/requests${client ? `?client=${encodeURIComponent(client)}` : ""}`);
    found = answer.requests ?? [];
    said = answer.said ?? said;
    $("#last").hidden = answer.kept === false;
  } catch (error) {
    said = `No data: ${error.message}`;
  }
  const isOpen = (one) => one.state === "waiting" || one.state === "running";
  const open = found.filter(isOpen), ended = found.filter((one) => !isOpen(one));
  const rows = [...open.slice(0, Math.max(OPEN_ROWS, ROWS - ended.length)), ...ended].slice(0, ROWS);
  const columns = [
    { name: "request", words: true, fill: requestCell },
    { name: "client", words: true, text: (one) => one.client ?? NONE },
    { name: "came", text: (one) => (one.arrived ? clock(one.arrived) : NONE) },
    { name: "state", words: true, fill: (cell, one) => badge(cell, one.state ?? NONE) },
    { name: "answered after", text: (one) => (one.state === "waiting" ? `over ${seconds(one.waited_s)}` : seconds(one.waited_s)) },
    { name: "replica", words: true, text: (one) => one.replica ?? NONE },
    { name: "prompt", text: (one) => number(one.prompt_tokens) },
    { name: "cached", text: (one) => number(one.cached_tokens) },
    { name: "output", text: (one) => number(one.output_tokens) },
  ];
  table($("#requests"), columns, rows, (one) => one.id, (one) => ({ request: one.id, client: one.client ?? "" }));
  $("#no-requests").hidden = found.length > 0;
  put($("#no-requests"), said);
}

function requestCell(cell, one) {
  if (!cell.firstChild) {
    const button = make("button", { type: "button", class: "link name" });
    button.addEventListener("click", () => openExplanation(button.dataset.id));
    cell.append(button);
  }
  cell.firstChild.dataset.id = one.id;
  put(cell.firstChild, one.id);
}

async function openExplanation(id) {
  const room = $("#explanation");
  room.replaceChildren(make("p", { class: "quiet" }, "Asking…"));
  $("#explain").showModal();
  try {
    const { text } = await ask(`/requests/${encodeURIComponent(id)}`);
    room.replaceChildren(...text.split("\n").map(sentence));
  } catch (error) {
    room.replaceChildren(make("p", { class: "wrong" }, error.message));
  }
}

/** A line of the explanation; the farther it is indented, the closer it looks. */
function sentence(line) {
  const depth = Math.floor(line.search(/\S|$/) / 2);
  return make("p", { class: depth === 0 ? "said" : `told told-${Math.min(depth, 3)}` }, line.trim());
}

// ---- weights

let weights = "live";

function openWeight(client, weight) {
  const dialog = $("#weight");
  dialog.dataset.client = client;
  put($("#weight-title"), `Weight of ${client}`);
  $("#weight-value").value = weight;
  $("#weight-wrong").hidden = true;
  put($("#weight-where"), weights === "file"
    ? "It is written into the tenants' file, and holds for every request that comes after."
    : "There is no tenants' file: the replicas are told, and forget it when they are restarted.");
  dialog.showModal();
}

$("#weight-cancel").addEventListener("click", () => $("#weight").close());
$("#weight-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const dialog = $("#weight");
  try {
    await ask(`/clients/${encodeURIComponent(dialog.dataset.client)}`, {
      method: "PATCH", headers: { "content-type": "application/json" },
      body: JSON.stringify({ weight: Number($("#weight-value").value) }),
    });
    dialog.close();
  } catch (error) {
    put($("#weight-wrong"), error.message);
    $("#weight-wrong").hidden = false;
  }
});

// ---- the page itself

$("#theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
});

let last = null, everyS = 2;

async function look() {
  try {
    const span = document.querySelector("#spans input:checked").value;
    const view = await ask(`/view?span=${encodeURIComponent(span)}`);
    last = view;
    everyS = view.every_s;
    weights = view.weights;
    drawHealth(view, view.health);
    drawNotes(view.notes);
    drawFigures(view);
    drawService(view);
    drawShares(view);
    drawBound(view);
    drawClients(view);
    drawReplicas(view);
    keyed($("#of"), [{ name: "" }, ...view.clients], (one) => one.name, (one) => make("option", { value: one.name }, one.name || "everybody"), () => {});
    put($("#at"), view.at ? `As of ${clock(view.at)}` : "");
  } catch (error) {
    if (error.status === undefined) throw error;
    if (last) drawHealth(last, "lost");
    drawNotes([{ level: "bad", about: "page", text: `${error.message} What is shown is old.` }]);
  }
}

async function forever(work, pause) {
  for (;;) {
    if (!document.hidden) await work();
    await new Promise((done) => setTimeout(done, 1000 * pause()));
  }
}

$("#spans").addEventListener("change", look);
$("#of").addEventListener("change", drawRequests);
document.addEventListener("visibilitychange", () => document.hidden || look());
forever(look, () => everyS);
forever(drawRequests, () => Math.max(everyS, 3));
