// Asks the server that it came from, and shows the report of the answer while it grows.
// Text of people and models goes through textContent; the report is markup of the server, whose templates escape it.

import { drawColumns } from "/each.js";

const at = id => document.getElementById(id);
const [status, problem, form, stop, send, report, spoken, asked, save, history] =
  ["status", "problem", "ask", "stop", "send", "report", "spoken", "asked", "save", "history"].map(at);
const sheet = new CSSStyleSheet();
document.adoptedStyleSheets = [sheet];
const templates = window.trustedTypes?.createPolicy("report", { createHTML: html => html });
const answers = [];
const membersOf = new Map();
let running = null, ready = false;

function say(text, kind = "") {
  if (status.textContent !== text) status.textContent = text;
  status.className = kind;
}

function complain(text) {
  problem.textContent = text;
  problem.hidden = !text;
}

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// ── the report ──────────────────────────────────────────────────────────────────────────────────

// The policy of this page takes no styles from markup; set by script, they are allowed. Text has neither in the clear.
function parsed(html) {
  const [element, style] = html.match(/<style>([^]*?)<\/style>/);
  if (sheet.text !== style) sheet.replaceSync(sheet.text = style);
  const markup = html.replace(element, "").replaceAll(' style="', ' data-style="');
  const page = new DOMParser().parseFromString(templates ? templates.createHTML(markup) : markup, "text/html");
  return page.querySelector(".specfuse-report");
}

// Changes what differs and leaves the rest, so that focus, choice and scrolling stay where they are.
function morph(live, fresh) {
  if (live.nodeName !== fresh.nodeName) return live.replaceWith(fresh);
  if (live.nodeType === Node.TEXT_NODE) {
    if (live.data !== fresh.data) live.data = fresh.data;
    return;
  }
  if (live.nodeType !== Node.ELEMENT_NODE) return;
  for (const { name } of [...live.attributes])
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "style") live.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (live.getAttribute(name) !== value) live.setAttribute(name, value);
  const before = [...live.childNodes], after = [...fresh.childNodes];
  after.forEach((node, i) => i < before.length ? morph(before[i], node) : live.append(node));
  before.slice(after.length).forEach(node => node.remove());
}

function draw(html) {
  const fresh = parsed(html);
  if (report.firstElementChild) morph(report.firstElementChild, fresh);
  else report.append(fresh);
  for (const element of report.querySelectorAll("[data-style]"))
    if (element.style.cssText !== element.dataset.style) element.style.cssText = element.dataset.style;
}

function showLastRound() {
  const rounds = report.querySelectorAll(".seg input");
  if (rounds.length && !report.dataset.chosen) rounds[rounds.length - 1].checked = true;
}

function clear(answer) {
  const before = answer.turns.slice(0, -1).filter(turn => turn.role !== "system");
  at("before").replaceChildren(...before.map(turn =>
    Object.assign(document.createElement("li"), { textContent: turn.content, className: turn.role, dir: "auto" })));
  report.replaceChildren();
  drawColumns(at("beside"), answer.columns);
  spoken.replaceChildren();
  delete report.dataset.chosen;
  asked.textContent = answer.question;
  asked.hidden = false;
  save.hidden = true;
  complain("");
}

// ── an answer ───────────────────────────────────────────────────────────────────────────────────

async function* chunks(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line !== "data: [DONE]") yield JSON.parse(line.slice("data: ".length));
  }
}

async function refusal(response) {
  const told = await response.json().catch(() => null);
  if (response.status === 401) at("key-field").hidden = false;
  return new Error(told?.error?.message ?? `the server answers ${response.status}`);
}

// The answer of one model; each chunk goes to `take`.
async function stream(model, turns, specfuse, signal, take) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), signal,
    body: JSON.stringify({
      model, messages: turns, max_tokens: at("tokens").valueAsNumber || null,
      temperature: at("temperature").valueAsNumber || 0, stream: true, specfuse,
    }),
  });
  if (!response.ok) throw await refusal(response);
  for await (const chunk of chunks(response)) take(chunk);
}

// A member's own answer, into its column; its failure is told there, and harms no other answer.
async function askAlone(answer, model, column, signal) {
  try {
    await stream(model, answer.turns, { ledger: "none" }, signal, chunk => {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const { delta } of chunk.choices) column.text += delta.content ?? "";
      if (answer.shown) drawColumns(at("beside"), answer.columns);
    });
  } catch (error) {
    column.problem = signal.aborted ? "Stopped" : `It failed: ${error.message}`;
  }
  column.over = true;
}

function take(chunk, answer) {
  if (chunk.error) throw new Error(chunk.error.message);
  for (const { delta, specfuse } of chunk.choices) {
    if (delta.content) {
      answer.text += delta.content;
      if (answer.columns.length) answer.columns[0].text = answer.text;
      if (answer.shown) drawColumns(at("beside"), answer.columns);
      spoken.append(Object.assign(document.createElement("span"), { textContent: delta.content }));
    }
    if (specfuse?.report) {
      answer.report = specfuse.report;
      answer.document = specfuse.document;
      if (answer.shown) {
        draw(answer.report);
        if (!answer.document) showLastRound();
      }
    }
  }
}

// The turns that the next question follows: those of the answer that is shown.
function conversation() {
  const shown = answers.find(answer => answer.shown && answer.text);
  return shown ? [...shown.turns, { role: "assistant", content: shown.text }] : [];
}

async function ask(question) {
  const turns = at("follow").checked ? conversation() : [];
  if (!turns.length && at("system").value.trim()) turns.push({ role: "system", content: at("system").value });
  turns.push({ role: "user", content: question });
  const model = at("model").value, beside = at("each").checked ? membersOf.get(model) ?? [] : [];
  const columns = (beside.length ? ["together", ...beside] : []).map(name => ({ name, text: "", problem: "", over: false }));
  const answer = { question, turns, columns, text: "", report: "", state: "answering", began: new Date(), shown: true };
  const stopping = running = new AbortController();
  for (const other of answers) other.shown = false;
  answers.unshift(answer);
  clear(answer);
  list();
  control();
  say("The members read the question …", "busy");
  const alone = beside.map((name, i) => askAlone(answer, `${model}/${name}`, columns[i + 1], stopping.signal));
  try {
    await stream(model, turns, { report: true, ledger: "none" }, stopping.signal, chunk => {
      say("The members are writing …", "busy");
      take(chunk, answer);
    });
    if (alone.length) say("Each member writes by itself …", "busy");
    await Promise.all(alone);
    answer.state = answer.document ? "finished" : "cut";
    say("Finished", "ok");
    if (!answer.document) complain("The server went away, or the answer found no room to end: what there is, is shown.");
  } catch (error) {
    answer.state = stopping.signal.aborted ? "stopped" : "failed";
    say(answer.state === "stopped" ? "Stopped: the members compute no more" : "Failed", answer.state === "stopped" ? "ok" : "failed");
    if (answer.state === "failed") complain(`The answer failed: ${error.message}`);
  }
  await Promise.all(alone);
  if (columns.length) columns[0].over = true;
  running = null;
  control();
  if (answer.shown) show(answer);
  list();
}

function show(answer) {
  for (const other of answers) other.shown = other === answer;
  if (answer.report) draw(answer.report);
  drawColumns(at("beside"), answer.columns);
  const fact = report.querySelectorAll(".facts dd");
  if (fact.length && !answer.document && answer.state !== "answering") {
    fact[0].textContent = answer.state;
    fact[1].textContent = "before its end";
  }
  save.hidden = !answer.document;
  if (answer.document) {
    URL.revokeObjectURL(save.href);
    save.href = URL.createObjectURL(new Blob([answer.document], { type: "text/html" }));
  }
}

function list() {
  const items = answers.map(answer => {
    const [item, button, name, about] = ["li", "button", "span", "small"].map(tag => document.createElement(tag));
    button.type = "button";
    name.textContent = answer.question;
    about.textContent = `${answer.state}, ${answer.began.toLocaleTimeString()}`;
    button.append(name, about);
    button.setAttribute("aria-current", String(answer.shown));
    button.addEventListener("click", () => {
      clear(answer);
      show(answer);
      list();
      asked.focus();
    });
    item.append(button);
    return item;
  });
  history.querySelector("ol").replaceChildren(...items);
  history.hidden = !items.length;
  at("follow-field").hidden = !conversation().length;
}

// ── the server ──────────────────────────────────────────────────────────────────────────────────

function control() {
  stop.disabled = !running;
  send.disabled = Boolean(running) || !ready;
}

async function models() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw await refusal(response);
  const { data } = await response.json(), names = new Set(data.map(model => model.id));
  for (const { id, specfuse } of data)
    membersOf.set(id, (specfuse?.members ?? []).filter(member => names.has(`${id}/${member}`)));
  const found = data.map(model => Object.assign(document.createElement("option"), { textContent: model.id, value: model.id }));
  at("model").replaceChildren(...found);
  at("model").disabled = false;
  offerEach();
}

// Only an ensemble has members to ask one by one.
function offerEach() {
  at("each-field").hidden = !membersOf.get(at("model").value)?.length;
}

async function connect() {
  try {
    const { status: state, stage } = await (await fetch("/health")).json();
    if (state === "failed") return say("The models failed: the server's log says why", "failed");
    if (state === "loading") {
      say(stage ? `Loading: ${stage}` : "Loading", "busy");
      return setTimeout(connect, 1000);
    }
    await models();
    ready = true;
    say(state === "degraded" ? `Ready, ${stage ?? "without some members"}` : "Ready", "ok");
    complain("");
  } catch (error) {
    if (!at("key-field").hidden) {
      say("A key is needed", "failed");
      at("key").focus();
    } else {
      say("The server cannot be reached", "failed");
      setTimeout(connect, 3000);
    }
  }
  control();
}

form.addEventListener("submit", event => {
  event.preventDefault();
  const question = at("question").value;
  if (!running && ready && question.trim()) ask(question);
});
stop.addEventListener("click", () => running?.abort());
at("model").addEventListener("change", offerEach);
at("key").addEventListener("change", connect);
at("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
document.addEventListener("keydown", event => event.key === "Escape" && running?.abort());
report.addEventListener("change", () => report.dataset.chosen = "true");
connect();
