// The script of fgserve's page against a real server, in Node with a small DOM: node page_in_node.mjs URL KEY
// The server has one model whose answers are long, and asks for the key.

import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

class Classes extends Set {
  remove(name) {
    this.delete(name);
  }
}

class Element extends EventTarget {
  children = [];
  classList = new Classes();
  attributes = {};
  hidden = false;
  scrollTop = 0;
  open = false;
  #value;

  get options() {
    return this.children;
  }
  get value() {
    return this.#value ?? this.children[0]?.value ?? ""; // a select has the value of its first option
  }
  set value(text) {
    this.#value = text;
  }
  get textContent() {
    return this.children.map((child) => child.textContent ?? child).join("");
  }
  set textContent(text) {
    this.replaceChildren(...[text].filter(Boolean));
  }
  set innerHTML(text) {
    throw new Error(`HTML is written: ${text}`);
  }
  append(child) {
    this.children.push(child);
    if (child instanceof Element) child.parent = this;
  }
  replaceChildren(...children) {
    this.children = children;
  }
  remove() {
    this.parent.children = this.parent.children.filter((child) => child !== this);
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  focus() {}
  showModal() {
    this.open = true;
  }
  close() {
    this.open = false;
  }
  requestSubmit() {
    const event = new Event("submit", { cancelable: true });
    this.onsubmit?.(event);
    this.dispatchEvent(event);
    assert(event.defaultPrevented, "the browser would leave the page");
  }
}

async function until(condition, what) {
  const deadline = Date.now() + 20_000;
  while (!condition()) {
    assert(Date.now() < deadline, `it never happened: ${what}`);
    await sleep(5);
  }
}

const [url, key] = process.argv.slice(2);
const html = await (await fetch(url)).text();
const ids = [...html.matchAll(/ id="(\S+?)"/g)].map(([, id]) => [id, new Element()]);
const elements = Object.fromEntries(ids);
assert.equal(ids.length, Object.keys(elements).length, "an id is there twice");
const kept = new Map();
const bodies = []; // of requests
globalThis.sessionStorage = { getItem: (name) => kept.get(name) ?? null, setItem: (name, text) => kept.set(name, text) };
globalThis.document = new Element();
const page = new EventTarget();
globalThis.addEventListener = page.addEventListener.bind(page);
document.getElementById = (id) => elements[id] ?? assert.fail(`there is no element ${id}`);
document.createElement = (tag) => Object.assign(new Element(), { tag });
const realFetch = fetch;
globalThis.fetch = (path, options) => {
  if (options?.body) bodies.push(JSON.parse(options.body));
  return realFetch(new URL(path, url), options);
};
const script = html.match(/<script>(.*?)<\/script>/s)[1];
(0, eval)(script);

const { log, prompt, send, stop, composer, name, status, temperature } = elements;
const write = (text) => {
  prompt.value = text;
  prompt.dispatchEvent(new Event("input"));
  composer.requestSubmit();
};

// The key: a wrong one, then the right one.
for (const given of ["wrong", key]) {
  await until(() => elements["ask-key"].open, "the key is asked for");
  elements.key.value = given;
  elements["key-form"].requestSubmit();
}
await until(() => name.textContent === "· mine", "the model has a name");
assert.match(elements["key-note"].textContent, /does not know this key/);

// An answer comes in pieces, and is stopped.
temperature.value = "1.5";
write("hello <b>you</b>");
await until(() => !stop.hidden && send.hidden, "the answer begins");
const [question, answer] = log.children;
assert.equal(question.textContent, "Youhello <b>you</b>");
assert(answer.classList.has("busy"));
const text = answer.children[1];
await until(() => text.children[0]?.children.length > 5, "several pieces came");
stop.dispatchEvent(new Event("click"));
await until(() => stop.hidden && !send.hidden, "the answer ends");
assert.match(answer.textContent, /\d+ tokens · \d+(\.\d)? tokens\/s · first after \d+\.\d\d s · stopped$/);
assert.match(status.textContent, /complete.*stopped/);
assert.equal(bodies[0].temperature, 1.5);

// The stopped answer is a part of the conversation. An error shows, and the message can be sent again.
temperature.value = "";
write("far too long ".repeat(2000));
await until(() => log.children.length === 3, "the error shows");
await until(() => stop.hidden, "the request ends");
assert.deepEqual(bodies[1].messages.map(({ role }) => role), ["user", "assistant", "user"]);
assert.equal(bodies[1].messages[1].content, text.textContent);
assert(!("temperature" in bodies[1]));
assert.match(log.children[2].textContent, /maximum context length/);
assert.equal(log.children[2].attributes.role, "alert");
assert(prompt.value.startsWith("far too long"));

// A new chat forgets the old one, also while an answer comes.
write("again");
await until(() => log.children.length === 5 && log.children[4].textContent.length > 30, "the next answer begins");
elements.new.dispatchEvent(new Event("click"));
await until(() => stop.hidden, "the answer ends");
assert.deepEqual(log.children, [elements.empty]);
write("hello");
await until(() => bodies.length === 4, "another request");
assert.equal(bodies[3].messages.length, 1);
await until(() => log.children.at(-1).textContent.length > 30, "its answer begins");
page.dispatchEvent(new Event("pagehide")); // a reload keeps what has come
const { messages: [asked, said], model } = JSON.parse(kept.get("fgserve-conversation"));
assert.deepEqual([asked.content, model], ["hello", "mine"]);
assert(said.content);
document.dispatchEvent(Object.assign(new Event("keydown"), { key: "Escape" }));
await until(() => stop.hidden, "Escape stops");

// The conversation is there after the reload. Code is shown as such, where its marks are complete.
log.replaceChildren();
const messages = [asked, said, { role: "user", content: "run\n```sh\nls\n```\n\n``" }];
kept.set("fgserve-conversation", JSON.stringify({ messages, model: "mine" }));
elements.model.replaceChildren();
(0, eval)(script);
assert.deepEqual(log.children.map(({ textContent }) => textContent), ["Youhello", `Model${said.content}`, "Yourunls``"]);
const blocks = log.children[2].children[1].children.map(({ tag, textContent }) => [tag, textContent]);
assert.deepEqual(blocks, [["span", "run"], ["pre", "ls"], ["span", "``"]]);
await until(() => elements.model.children.length, "the models are known");
assert(elements.model.children[0].selected);
