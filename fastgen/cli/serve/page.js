"use strict";

class Memory {
  getItem(name) {
    return this[name] ?? null;
  }
  setItem(name, text) {
    this[name] = text;
  }
  removeItem(name) {
    delete this[name];
  }
}

const $ = (id) => document.getElementById(id);
const local = storage("localStorage"), tab = storage("sessionStorage");
const KEY = "fgserve-key", OPEN = "fgserve-open"; // in the storage of the tab: the API key, the id of the open chat
const CHAT = "fgserve-chat-", LATEST = "fgserve-settings"; // in the browser's: one entry per chat, the last settings,
const THEME = "fgserve-theme", THEMES = ["auto", "light", "dark"]; // and the theme
const SETTINGS = ["model", "system", "temperature", "top_p", "max_tokens", "thinking"]; // ids of their fields
const LOADING_MS = 1000; // between two questions whether a model is loaded
const SLOW_MS = 50; // drawing an answer for longer than this makes pauses, in which the page can be used

let chat; // the open conversation: its id, title, time, settings and messages; an answer has the facts shown below it
let editing = null; // index of the user's message that the next one replaces
let running = null; // AbortController of the answer that is being read


/** A storage of the browser or, if the browser refuses it, one that a reload empties. */
function storage(name) {
  try {
    return globalThis[name];
  } catch {
    return new Memory();
  }
}


// ----------------------------------------------------------------------------------------------- the server

/** The response to a request, once the server has taken the key. Throws an Error for any but a good one. */
async function ask(path, options = {}) {
  for (;;) {
    const key = tab.getItem(KEY);
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error("The server does not answer. Is it running?");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw new Error(await reason(response));
    await askKey(key !== null);
  }
}

/** The server's words on what went wrong. */
async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}.`;
  }
}

/** Wait until somebody has entered a key. wrong: the last one was refused. */
function askKey(wrong) {
  if (wrong) $("key-note").textContent = "The server does not know this key. Try another one.";
  $("key").value = "";
  $("ask-key").showModal();
  return new Promise((done) => {
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      tab.setItem(KEY, $("key").value.trim());
      $("ask-key").close();
      done();
    };
  });
}

/** The chunks of a streamed answer. Throws an Error where the server reports one, or the stream has no end. */
async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read().catch(() => ({ done: true }));
    if (done) throw new Error("The connection ended before the answer did.");
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice("data: ".length));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}


// ----------------------------------------------------------------------------------------------- the page

/** Append an element with a text, which is never read as HTML. */
function add(parent, tag, kind, text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

function addButton(parent, text, act, kind = "small") {
  const button = add(parent, "button", kind, text);
  button.type = "button";
  button.addEventListener("click", () => act(button));
  return button;
}

/** Append the message of this index to the conversation, and return its element. */
function addMessage(index) {
  const message = chat.messages[index], mine = message.role === "user";
  const article = add($("log"), "article", message.role);
  add(article, "h2", "unseen", mine ? "You" : "Model");
  const thinking = add(article, "details", "thinking");
  add(thinking, "summary", "", "Thinking");
  add(thinking, "div", "");
  add(article, "div", "text", mine ? message.content : "");
  const tools = add(article, "div", "tools");
  add(tools, "p", "facts", message.facts);
  addButton(tools, "Copy", (button) => copy(message.content, button));
  if (mine) addButton(tools, "Edit", () => edit(index));
  else addButton(tools, "Regenerate", () => answer(index - 1, chat.messages[index - 1].content), "small again");
  showMessage(article, message);
  return article;
}

/** Show a message, or more of it. whole: no more follows. */
function showMessage(article, { role, content, reasoning_content: thoughts }, whole = true) {
  const [, thinking, text] = article.children;
  thinking.hidden = !thoughts;
  if (thoughts) thinking.children[1].textContent = thoughts;
  if (role !== "user" && content) show(text, content, whole);
}

function addError(text) {
  following(() => add($("log"), "div", "error", text).setAttribute("role", "alert"), true);
}

/** Change the page, and scroll to the end if it was in sight or `always`. */
function following(change, always = false) {
  const { scrollTop, clientHeight, scrollHeight } = $("scroll");
  change();
  if (always || scrollHeight - scrollTop - clientHeight < 120) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function showState() {
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("send").disabled = !$("model").value || !$("prompt").value.trim();
  $("log").classList.toggle("running", running !== null);
  $("editing").hidden = editing === null;
  const dropped = editing ?? Infinity;
  const articles = $("log").querySelectorAll("article");
  articles.forEach((article, index) => article.classList.toggle("dropped", index >= dropped));
  const used = SETTINGS.slice(1).filter((name) => $(name).value.trim()).length;
  $("show-settings").textContent = used ? `Settings (${used})` : "Settings";
}

/** Copy a text, and let the button say whether the browser did. */
async function copy(text, button) {
  const copied = navigator.clipboard?.writeText(text).then(() => true, () => false) ?? copySelected(text);
  button.textContent = $("status").textContent = (await copied) ? "Copied" : "The browser refuses";
  button.focus();
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** Copy a text as a selection, since only pages of https and of this machine have a clipboard. Return whether it
 * worked. */
function copySelected(text) {
  const area = add(document.body, "textarea", "unseen", text);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}


// ----------------------------------------------------------------------------------------------- an answer

/** Send the user's message of this index, after which the conversation goes on anew, and show the answer as it comes. A
 * stopped answer stays, and one that failed on its way. Where nothing came, all is as before, to be sent again. */
async function answer(index, question) {
  const mine = chat, before = mine.messages, reply = { role: "assistant", content: "" };
  mine.messages = [...before.slice(0, index), { role: "user", content: question }, reply];
  mine.title ||= question.trim().split("\n")[0].slice(0, 60);
  mine.changed = Date.now();
  running = new AbortController();
  if (editing !== null) edit(null, "");
  keep();
  draw(index);
  const article = $("log").lastElementChild;
  article.classList.add("busy");
  $("status").textContent = "The model answers.";
  const failure = await read(reply, article, asked(mine.messages.slice(0, -1)));
  const error = running.signal.aborted ? "" : failure?.message;
  running = null;
  reply.facts = showEnd(article, failure && (error ? "failed" : "stopped"));
  if (failure && !reply.content && !reply.reasoning_content) mine.messages = before;
  keep(mine);
  if (chat === mine) $("status").textContent = error ? "" : `The answer is complete: ${reply.facts}`;
  if (chat === mine && mine.messages === before) {
    draw(index);
    if (!$("prompt").value && before[index]?.content !== question) edit(before[index] ? index : null, question);
  }
  if (chat === mine && error) addError(error);
  showState();
}

/** Show how an answer ended: `note` says so, unless the model ended it. Return all facts about it. */
function showEnd(article, note) {
  const [facts] = article.children[3].children;
  if (note) facts.append(`${facts.textContent && " · "}${note}`);
  article.classList.remove("busy");
  return facts.textContent;
}

/** Read the answer to these messages into `reply` and show it. Return the error that ended it, if one did. */
async function read(reply, article, messages) {
  const thinking = article.children[1], [facts] = article.children[3].children;
  let waiting = false, ended = false, pause = 0;
  const draw = () => {
    if (ended) return;
    const start = performance.now();
    waiting = false;
    following(() => showMessage(article, reply, false));
    const took = performance.now() - start;
    pause = took > SLOW_MS ? 3 * took : 0;
  };
  try {
    for await (const { content, reasoning_content: thought } of deltas(messages, facts)) {
      if (thought && !reply.reasoning_content) thinking.open = true;
      if (content && !reply.content) thinking.open = false;
      if (thought) reply.reasoning_content = (reply.reasoning_content ?? "") + thought;
      reply.content += content ?? "";
      reply.facts = facts.textContent;
      if (waiting) continue;
      waiting = true;
      if (pause) setTimeout(() => requestAnimationFrame(draw), pause);
      else requestAnimationFrame(draw);
    }
  } catch (error) {
    return error;
  } finally {
    ended = true;
    following(() => showMessage(article, reply));
  }
}

/** The deltas of an answer. facts: where its tokens, their speed and its end are shown. */
async function* deltas(messages, facts) {
  const streamed = { stream: true, stream_options: { continuous_usage_stats: true } };
  const body = JSON.stringify({ ...parameters(), messages, ...streamed });
  const options = { method: "POST", body, signal: running.signal };
  const start = performance.now();
  let first = null; // the tokens of the first chunk that has some, and its time
  for await (const chunk of chunks(await ask("v1/chat/completions", options))) {
    if (!chunk.choices.length) continue; // the last chunk has only the usage
    const tokens = chunk.usage.completion_tokens, now = performance.now();
    if (tokens && !first) first = { tokens, now };
    if (first) {
      const wait = `first after ${((first.now - start) / 1000).toFixed(2)} s`;
      const speed = (tokens - first.tokens) / ((now - first.now) / 1000);
      const rate = tokens > first.tokens && now > first.now ? ` · ${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s` : "";
      facts.textContent = `${tokens} token${tokens === 1 ? "" : "s"}${rate} · ${wait}`;
    }
    yield chunk.choices[0].delta;
    if (chunk.choices[0].finish_reason === "length") facts.append(" · cut off: max tokens, or the context is full");
  }
}

/** The settings as fields of a request. */
function parameters() {
  const body = { model: $("model").value };
  for (const name of ["temperature", "top_p", "max_tokens"]) if ($(name).value) body[name] = Number($(name).value);
  if ($("thinking").value) body.chat_template_kwargs = { enable_thinking: $("thinking").value === "on" };
  return body;
}

function system() {
  const content = $("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** The system prompt and these messages, as the server takes them. */
function asked(messages) {
  return [...system(), ...messages.map(({ facts, ...message }) => message)];
}

function stop() {
  running?.abort();
}

/** Put a text in the place of the next message, which replaces the message `index` and all after it, if it is given. */
function edit(index, text = chat.messages[index].content) {
  editing = index;
  $("prompt").value = text;
  $("prompt").focus();
  showState();
}


// ----------------------------------------------------------------------------------------------- conversations

/** Show the messages of the open conversation, anew from this index on, and no more errors. */
function draw(from = 0) {
  const earlier = [...$("log").querySelectorAll("article")].slice(0, from);
  $("log").replaceChildren($("empty"), ...earlier);
  $("empty").hidden = chat.messages.length > 0;
  following(() => chat.messages.forEach((_, index) => index >= from && addMessage(index)), true);
  showState();
}

/** Keep a conversation in the browser. */
function keep(one = chat) {
  if (one === chat) one.settings = Object.fromEntries(SETTINGS.map((name) => [name, $(name).value]));
  try {
    if (one === chat) local.setItem(LATEST, JSON.stringify(one.settings));
    if (one.deleted || !one.messages.length) local.removeItem(CHAT + one.id);
    else local.setItem(CHAT + one.id, JSON.stringify(one));
  } catch (error) {
    addError(`The browser cannot keep this conversation (${error.message}). Delete others.`);
  }
  listChats();
}

/** The value that the browser keeps under a name, or null where that is no JSON. */
function stored(name) {
  try {
    return JSON.parse(local.getItem(name));
  } catch {
    return null;
  }
}

/** The conversation that the browser keeps under a name, or null where that is none. */
function kept(name) {
  const { title, changed, settings, messages } = stored(name) ?? {};
  const isText = (value) => typeof value === "string";
  const isTurn = (message, index) => message?.role === ["user", "assistant"][index % 2] && isText(message.content) &&
    isText(message.reasoning_content ?? "") && isText(message.facts ?? "");
  if (!isText(title) || !Array.isArray(messages) || !messages.every(isTurn)) return null;
  return { id: name.slice(CHAT.length), title, changed: Number(changed) || 0, settings: settingsIn(settings), messages };
}

/** The texts of the settings in a value that the browser has kept; others are empty. */
function settingsIn(value) {
  return Object.fromEntries(SETTINGS.map((name) => [name, typeof value?.[name] === "string" ? value[name] : ""]));
}

/** Open a conversation, or begin one. */
function open(found) {
  stop();
  chat = found ?? { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: "", messages: [] };
  tab.setItem(OPEN, chat.id);
  chat.settings ??= settingsIn(stored(LATEST));
  for (const name of SETTINGS.slice(1)) $(name).value = chat.settings[name];
  chooseModel(chat.settings.model);
  if (editing !== null) edit(null, "");
  $("chats").hidePopover();
  $("status").textContent = "";
  $("prompt").focus();
  draw();
  listChats();
}

function chooseModel(wanted) {
  if ([...$("model").options].some(({ value }) => value === wanted)) $("model").value = wanted;
}

function listChats() {
  const names = Object.keys(local).filter((name) => name.startsWith(CHAT));
  const wanted = $("find").value.trim().toLowerCase();
  const has = ({ title, messages }) => [title, ...messages.map(({ content }) => content)]
    .some((text) => text.toLowerCase().includes(wanted));
  const chats = names.map(kept).filter((one) => one && has(one)).sort((one, other) => other.changed - one.changed);
  $("list").replaceChildren();
  for (const { id, title } of chats) {
    const item = add($("list"), "li", id === chat.id ? "open" : "");
    const choose = addButton(item, title, () => id === chat.id || open(kept(CHAT + id)), "title");
    if (id === chat.id) choose.setAttribute("aria-current", "true");
    const actions = { "✎ Rename": () => rename(id, title), "✕ Delete": () => forget(id, title) };
    for (const [name, act] of Object.entries(actions)) {
      const button = addButton(item, name[0], act);
      button.title = name.slice(2);
      button.setAttribute("aria-label", `${button.title} ${title}`);
    }
  }
}

function rename(id, title) {
  const renamed = id === chat.id ? chat : kept(CHAT + id);
  renamed.title = prompt("Name of the chat", title)?.trim() || title;
  keep(renamed);
}

function forget(id, title) {
  if (!confirm(`Delete “${title}”?`)) return;
  if (id === chat.id) chat.deleted = true;
  local.removeItem(CHAT + id);
  if (id === chat.id) open(null);
  else listChats();
}

/** Let the browser save the open conversation as a file. */
function save(type, extension, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.${extension}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function asMarkdown() {
  const names = { system: "System", user: "You", assistant: "Model" };
  const parts = asked(chat.messages).map(({ role, content, reasoning_content: thoughts }) => {
    const folded = thoughts ? `<details><summary>Thinking</summary>\n\n${thoughts}\n\n</details>\n\n` : "";
    return `## ${names[role]}\n\n${folded}${content}\n`;
  });
  return [`# ${chat.title}\n`, ...parts].join("\n");
}


// ----------------------------------------------------------------------------------------------- the start

/** Use this theme: the system's, or a light or a dark one. */
function showTheme(theme) {
  document.documentElement.style.colorScheme = theme === "auto" ? "" : theme;
  $("theme").textContent = `Theme: ${theme}`;
}

function theme() {
  return THEMES.find((theme) => theme === local.getItem(THEME)) ?? THEMES[0];
}

/** Fill in the names of the models as they are loaded, until all are. */
async function findModels() {
  for (;;) {
    let trouble = "the model is being loaded …";
    try {
      const { data } = await (await ask("v1/models")).json();
      const known = [...$("model").options].map((option) => option.value);
      for (const { id } of data) {
        if (known.includes(id)) continue;
        add($("model"), "option", "", id).value = id;
        if (id === chat.settings.model) chooseModel(id);
      }
      if ((await fetch("ready")).ok) return showModels("");
    } catch (error) {
      trouble = error.message;
    }
    showModels(trouble);
    await new Promise((done) => setTimeout(done, LOADING_MS));
  }
}

function showModels(trouble) {
  const { length } = $("model").options;
  $("choice").hidden = length < 2;
  $("name").textContent = length > 1 ? "" : `· ${$("model").value || trouble}`;
  showState();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running !== null || $("send").disabled) return;
  const index = editing ?? chat.messages.length, question = $("prompt").value.trim();
  edit(null, "");
  answer(index, question);
});
$("prompt").addEventListener("input", showState);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector(":popover-open")) return; // which Escape closes
  stop();
  if (editing !== null) edit(null, "");
});
for (const name of SETTINGS) {
  $(name).addEventListener("change", () => (keep(), showState(), $(name).reportValidity()));
}
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => (stop(), $("prompt").focus()));
$("cancel").addEventListener("click", () => edit(null, ""));
$("new").addEventListener("click", () => open(null));
$("save-json").addEventListener("click", () => {
  const body = { ...parameters(), messages: asked(chat.messages) };
  save("application/json", "json", JSON.stringify(body, null, 2));
});
$("save-markdown").addEventListener("click", () => save("text/markdown", "md", asMarkdown()));
$("find").addEventListener("input", listChats);
$("theme").addEventListener("click", () => {
  local.setItem(THEME, THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  showTheme(theme());
});
$("ask-key").addEventListener("cancel", (event) => event.preventDefault()); // nothing works without the key
addEventListener("storage", listChats); // another tab has changed it
addEventListener("pagehide", () => running && keep());
showTheme(theme());
open(kept(CHAT + tab.getItem(OPEN)));
findModels();
