// The script of fgserve's page against a real server, in Node with a small DOM: node page_in_node.mjs URL KEY
// The server has one model whose answers are long, and asks for the key. Node has no DOM for DOMPurify, so that here the
// HTML that it would get is shown as text.

import assert from "node:assert/strict";
import { resolveObjectURL } from "node:buffer";
import { setTimeout as sleep } from "node:timers/promises";

class Classes extends Set {
  remove(name) {
    this.delete(name);
  }
  toggle(name, on) {
    on ? this.add(name) : this.delete(name);
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
  get lastElementChild() {
    return this.children.findLast((child) => child instanceof Element);
  }
  querySelectorAll(tag) {
    const below = this.children.filter((child) => child instanceof Element);
    return below.flatMap((child) => [...(child.tag === tag ? [child] : []), ...child.querySelectorAll(tag)]);
  }
  append(child) {
    this.children.push(child);
    if (child instanceof Element) child.parent = this;
  }
  replaceChildren(...children) {
    this.children = [];
    children.forEach((child) => this.append(child));
  }
  remove() {
    this.parent.children = this.parent.children.filter((child) => child !== this);
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  focus() {}
  reportValidity() {}
  hidePopover() {}
  showModal() {
    this.open = true;
  }
  close() {
    this.open = false;
  }
  click() {
    if (this.tag === "a") downloads.push(this);
    this.dispatchEvent(new Event("click"));
  }
  requestSubmit() {
    const event = new Event("submit", { cancelable: true });
    this.onsubmit?.(event);
    this.dispatchEvent(event);
    assert(event.defaultPrevented, "the browser would leave the page");
  }
}

class Storage {
  getItem(name) {
    return this[name] ?? null;
  }
  setItem(name, text) {
    if (text.length > 50_000) throw new Error("the quota is exceeded");
    this[name] = text;
  }
  removeItem(name) {
    delete this[name];
  }
}

async function until(condition, what) {
  const deadline = Date.now() + 60_000;
  while (!condition()) {
    assert(Date.now() < deadline, `it never happened: ${what}`);
    await sleep(5);
  }
}


// ----------------------------------------------------------------------------------------------- the browser

const [url, key] = process.argv.slice(2);
const html = await (await fetch(url)).text();
const [marked, purify, temml, ...scripts] = [...html.matchAll(/<script>(.*?)<\/script>/gs)].map(([, code]) => code);
const bodies = [], downloads = [], copied = [], drawn = []; // the last: the answer after each of its pieces
const answers = []; // of no server, given to the next requests
let elements; // by id
globalThis.sessionStorage = new Storage();
globalThis.localStorage = new Storage();
globalThis.document = new Element();
const page = new EventTarget();
globalThis.addEventListener = page.addEventListener.bind(page);
document.getElementById = (id) => elements[id] ?? assert.fail(`there is no element ${id}`);
document.createElement = (tag) => Object.assign(new Element(), { tag });
document.documentElement = { style: {} };
document.compatMode = "CSS1Compat"; // Temml warns of others
document.querySelector = () => null; // no popover is open
globalThis.requestAnimationFrame = (draw) => (draw(), drawn.push(texts().at(-1)), 0); // each piece of an answer is shown by itself
let clock = 0, tick = 1; // milliseconds; each look at the clock takes a tick, so that nothing depends on the machine
Object.defineProperty(globalThis, "performance", { value: { now: () => (clock += tick) } });
globalThis.confirm = () => true;
globalThis.prompt = () => " renamed ";
Object.defineProperty(globalThis, "navigator", { value: { clipboard: { writeText: async (text) => copied.push(text) } } });
const realFetch = fetch;
globalThis.fetch = async (path, options) => {
  if (options?.body) bodies.push(JSON.parse(options.body));
  return options?.body && answers.length ? new Response(answers.shift()) : realFetch(new URL(path, url), options);
};
(0, eval)(purify);
(0, eval)(temml);
assert.equal(DOMPurify.isSupported, false, "there is a DOM for DOMPurify");
DOMPurify.sanitize = (text, { RETURN_DOM_FRAGMENT }) => {
  assert(RETURN_DOM_FRAGMENT);
  return Object.assign(new Element(), { textContent: text });
};

/** Load the page, as a browser does at the start and at a reload. */
function load() {
  const ids = [...html.slice(0, html.indexOf("<script>")).matchAll(/ id="(\S+?)"/g)].map(([, id]) => [id, new Element()]);
  elements = Object.fromEntries(ids);
  assert.equal(ids.length, Object.keys(elements).length, "an id is there twice");
  (0, eval)(marked); // which the scripts change
  (0, eval)(scripts.join("\n")); // scripts of a browser share their constants
}

const articles = () => elements.log.querySelectorAll("article");
const texts = () => articles().map(({ children }) => children[2].textContent);
const chats = () => elements.list.children.map((item) => item.children[0].textContent);
const saved = () => JSON.parse(localStorage.getItem(`fgserve-chat-${sessionStorage.getItem("fgserve-open")}`));
const idle = () => until(() => elements.stop.hidden && !elements.send.hidden, "the answer ends");

function press(parent, name) {
  const found = parent.querySelectorAll("button").filter((button) => (button.title || button.textContent) === name);
  assert.equal(found.length, 1, `there are ${found.length} buttons ${name}`);
  found[0].click();
}

function write(text) {
  elements.prompt.value = text;
  elements.prompt.dispatchEvent(new Event("input"));
  elements.composer.requestSubmit();
}

/** Wait until the answer has begun, then stop it. */
async function cut() {
  await until(() => articles().at(-1)?.children[2].textContent.length > 30, "the answer begins");
  elements.stop.click();
  await idle();
}

/** A stream with these deltas. */
function stream(...deltas) {
  const chunk = (delta) => ({ choices: [{ delta, finish_reason: null }], usage: { completion_tokens: 1 } });
  return deltas.map((delta) => `data: ${JSON.stringify(chunk(delta))}\n\n`).join("") + "data: [DONE]\n\n";
}


// ----------------------------------------------------------------------------------------------- what it does

// The key: a wrong one, then the right one.
load();
for (const given of ["wrong", key]) {
  await until(() => elements["ask-key"].open, "the key is asked for");
  elements.key.value = given;
  elements["key-form"].requestSubmit();
}
await until(() => elements.name.textContent === "· mine", "the model has a name");
assert.match(elements["key-note"].textContent, /does not know this key/);

// An answer comes in pieces, and is stopped.
elements.temperature.value = "1.5";
elements.system.value = "Be brief.";
elements.system.dispatchEvent(new Event("change"));
assert.equal(elements["show-settings"].textContent, "Settings (2)");
write("hello <b>you</b>");
await until(() => !elements.stop.hidden && elements.send.hidden, "the answer begins");
assert.equal(texts()[0], "hello <b>you</b>");
assert(articles()[1].classList.has("busy"));
await until(() => / tokens\/s /.test(articles()[1].textContent), "several pieces came");
elements.stop.click();
await idle();
assert.match(articles()[1].textContent, /\d+ tokens · \d+(\.\d)? tokens\/s · first after \d+\.\d\d s · stopped/);
assert.match(elements.status.textContent, /complete.*stopped/);
const system = { role: "system", content: "Be brief." };
assert.deepEqual(bodies[0].messages, [system, { role: "user", content: "hello <b>you</b>" }]);
assert.equal(bodies[0].temperature, 1.5);

// The stopped answer is a part of the conversation. An error shows, and the message can be sent again.
elements.temperature.value = elements.system.value = "";
const [, stopped] = texts();
write("far too long ".repeat(2000));
await until(() => elements.log.children.at(-1).className === "error", "the error shows");
await idle();
assert.deepEqual(bodies[1].messages.map(({ role }) => role), ["user", "assistant", "user"]);
assert.deepEqual(bodies[1].messages.slice(0, 2), saved().messages.map(({ facts, ...message }) => message));
assert.match(saved().messages[1].facts, /\d tokens\/s .* · stopped$/);
assert(saved().messages[1].content);
assert(!("temperature" in bodies[1] || "top_p" in bodies[1] || "chat_template_kwargs" in bodies[1]));
assert.match(elements.log.children.at(-1).textContent, /maximum context length/);
assert.equal(elements.log.children.at(-1).attributes.role, "alert");
assert(elements.prompt.value.startsWith("far too long"));
assert.deepEqual(texts(), ["hello <b>you</b>", stopped]);

// Another answer to the same message, with a limit: it takes the place of the first one.
Object.assign(elements.max_tokens, { value: "3" });
Object.assign(elements.top_p, { value: "0.5" });
Object.assign(elements.thinking, { value: "off" });
elements.prompt.value = "a draft";
press(articles()[1], "Regenerate");
await idle();
assert.equal(elements.prompt.value, "a draft");
assert.deepEqual(bodies[2].messages, [{ role: "user", content: "hello <b>you</b>" }]);
assert.deepEqual([bodies[2].max_tokens, bodies[2].top_p, bodies[2].chat_template_kwargs], [3, 0.5, { enable_thinking: false }]);
assert.match(articles()[1].textContent, /^ModelThinking.*3 tokens.* · cut off: max tokens, or the context is full/s);

// An edited message: the rest is dropped, but not before it is sent.
elements.max_tokens.value = elements.thinking.value = "";
const [, { children: [, , , { children: [facts] }] }] = articles();
write("more");
await cut();
assert.match(facts.textContent, /^3 tokens/);
assert(articles()[1].children[3].children.includes(facts), "the figures of an earlier answer are gone");
press(articles()[0], "Edit");
assert.equal(elements.prompt.value, "hello <b>you</b>");
assert(!elements.editing.hidden && articles().every(({ classList }) => classList.has("dropped")));
elements.cancel.click();
assert(elements.editing.hidden && !articles().some(({ classList }) => classList.has("dropped")));
press(articles()[2], "Edit");
const [, answered] = texts();
write("less");
await cut();
assert.deepEqual(texts().slice(0, 3), ["hello <b>you</b>", answered, "less"]);
assert.deepEqual(bodies.at(-1).messages.map(({ role }) => role), ["user", "assistant", "user"]);
press(articles()[0], "Edit");
write("far too long ".repeat(2000)); // it fails: all is there still, and the message is edited still
await until(() => elements.log.children.at(-1).className === "error", "the error shows");
await idle();
assert.equal(articles().length, 4);
assert(!elements.editing.hidden);
elements.cancel.click();

// A reload shows how an answer ended.
const told = articles()[1].children[3].children[0].textContent;
assert.match(told, /cut off/);
load();
assert.equal(articles()[1].children[3].children[0].textContent, told);
await until(() => elements.name.textContent === "· mine", "the model has a name");

// A new chat keeps the old one, also the part of an answer that has come.
write("again");
await until(() => articles().length === 6 && texts()[5].length > 30, "the next answer begins");
elements.new.click();
elements.top_p.value = "0.9";
await idle();
assert.deepEqual(elements.log.children, [elements.empty]);
assert.equal(elements.status.textContent, "");
write("<i>second</i>\nchat");
await cut();
assert.equal(bodies.at(-1).messages.length, 1);
assert.deepEqual(chats(), ["<i>second</i>", "hello <b>you</b>"]);
elements.list.children[1].children[0].click();
assert.equal(articles().length, 6);
assert(texts()[5].length > 30);
assert.equal(elements.top_p.value, "0.5");
assert.equal(elements.list.children[1].children[0].attributes["aria-current"], "true");
for (const [wanted, found] of [["  HELLO <b> ", ["hello <b>you</b>"]], ["econd", ["<i>second</i>"]], ["less", ["hello <b>you</b>"]], ["no such", []]]) {
  elements.find.value = wanted;
  elements.find.dispatchEvent(new Event("input"));
  assert.deepEqual(chats(), found);
}
elements.find.value = "";
elements.find.dispatchEvent(new Event("input"));
press(elements.list.children[1], "Rename");
assert.deepEqual(chats(), ["<i>second</i>", "renamed"]);
press(elements.list.children[1], "Delete"); // the open one
assert.deepEqual([chats(), articles().length], [["<i>second</i>"], 0]);
write("third");
await until(() => articles().length === 2 && texts()[1].length > 30, "the answer begins");
press(elements.list.children[0], "Delete"); // the one that is answered
await idle();
assert.deepEqual([chats(), articles().length], [["<i>second</i>"], 0]);

// A model that thinks. Its Markdown comes in pieces of any size, and is shown as if it had come in one.
const markdown = `# One\n\n[ref] **bold**\r\n<img src=x onerror=alert(1)> <your-name>\r\n*a*\r\nb\r\nlast.\r\n\r\n1. a\n\n2. b\n   - [x] c\n
| a | b |\n|---|--:|\n| 1 | 2<br>3 |\n\nTwo\n---\n![p](http://x.example/p.png) [l](javascript:alert(1))\n
\`\`\`py\n<b>\n\n\`\`\`\n> quoted\n\n[ref]: http://x.example/\n\n<script>\nalert(1)\n</script>\n\n\`\`\`\nopen`;
const LINK = '<a href="http://x.example/">ref</a>';
answers.push(stream({ role: "assistant", content: "" }, { reasoning_content: "Let me " }, { reasoning_content: "<see>" },
  ...[...markdown].map((content) => ({ content }))));
write("think");
await idle();
const [thinking, shown] = articles()[1].children.slice(1);
assert.deepEqual([thinking.hidden, thinking.open, thinking.children[1].textContent], [false, false, "Let me <see>"]);
for (const part of ["<h3>One</h3>", LINK, "<br>&lt;img src=x onerror=alert(1)&gt; &lt;your-name&gt;<br><em>a</em><br>b<br>last.</p>", "☑ c", "2<br>3</td>", "<h4>Two</h4>",
  '<a href="http://x.example/p.png">p</a>', '<code class="language-py">&lt;b&gt;', "<p>&lt;script&gt;<br>alert(1)<br>&lt;/script&gt;", "<code>open"])
  assert(shown.textContent.includes(part), `${part} is not in ${shown.textContent}`);
assert(!/<(img|script)/.test(shown.textContent));
press(articles()[1], "Copy");
assert.deepEqual(copied, [markdown]);
assert.equal(drawn.at(-1).replace("[ref]", LINK), shown.textContent); // which is known only at the end
write("go on");
await cut();
assert.equal(texts()[1], shown.textContent);
const thought = { role: "assistant", content: markdown, reasoning_content: "Let me <see>" };
assert.deepEqual(bodies.at(-1).messages.slice(0, 2), [{ role: "user", content: "think" }, thought]);

// Formulas, in the forms that models write; what is none stays a text.
for (const [content, part, number] of [
  ["so $x_1^2$, \\(y\\) and\n\n\\[\n- z\n= 1\n\\]\n\n$$\n\\frac{a}{b}\n$$\nend", '<math display="block"', 2],
  ["so $x_1^2$, \\(y\\) and $$z$$.", "<math", 3],
  ["from $5 to $6, or $ 7 $; `$x$`\n\n```\n$$y$$\n```", "<math", 0],
  ["$\\nonsense{$ and $$\\def\\a{\\a\\a}\\a$$", "<math", 0],
  [`$${"x".repeat(3000)}$`, "<math", 0],
  ["$" + "{".repeat(900) + "}".repeat(900) + "$", "<math", 1],
  ["$x$ ".repeat(1200), "<math", 1200],
]) {
  answers.push(stream({ content }));
  press(articles().at(-1), "Regenerate");
  await idle();
  assert.equal(texts().at(-1).split(part).length - 1, number, `${part} in ${texts().at(-1).slice(0, 500)}`);
}

// An answer that takes long to draw is drawn less often, and completely in the end.
const pieces = Array.from({ length: 50 }, (_, number) => ({ content: `${number} ` }));
tick = 100;
drawn.length = 0;
answers.push(stream(...pieces));
press(articles().at(-1), "Regenerate");
await idle();
tick = 1;
assert(drawn.length >= 1 && drawn.length < 10, `it was drawn ${drawn.length} times`);
assert.match(texts().at(-1), /^<p>0 1 .* 48 49/);

// Whatever an answer is, it is shown, and the next message can be sent.
const count = (text, tag) => text.split(`<${tag}>`).length - 1;
const row = (cell, columns) => `|${cell.repeat(columns)}\n`;
const table = (columns, rows) => row("a|", columns) + row("-|", columns) + "| x\n".repeat(rows);
for (const [content, tag, most] of [
  [">".repeat(4000), "blockquote", 20],
  ["> > > ".repeat(1000) + "x", "blockquote", 20],
  ["1. ".repeat(3000), "ol", 20],
  ["> - ".repeat(2000) + "x", "ul", 20],
  [Array.from({ length: 200 }, (_, depth) => `${"  ".repeat(depth)}- a`).join("\n"), "ul", 20],
  [table(1000, 3000), "td", 10_000],
  [`${"x".repeat(20)}\n\n${table(3000, 4)}`, "td", 10_000],
  [`${table(90, 90)}\n`.repeat(5), "td", 10_000],
  [`> ${table(90, 90).replaceAll("\n", "\n> ")}\n\n`.repeat(5), "td", 10_000],
  ["*a_".repeat(5000), "em", 500],
  ["*a **b ".repeat(400) + "b** a*".repeat(400), "em", 500],
  ["[".repeat(5000) + "a" + "]".repeat(5000) + "(b)", "a", 1],
]) {
  answers.push(stream({ content: content.slice(0, 1000) }, { content: content.slice(1000) }));
  press(articles().at(-1), "Regenerate");
  await idle();
  const html = texts().at(-1);
  assert(html.length > Math.min(content.length, 1000) && html.length < 300_000, `${html.length} for ${content.slice(0, 50)}`);
  assert(count(html, tag) <= most, `${count(html, tag)} ${tag} for ${content.slice(0, 50)}`);
}
for (const [content, tag, number] of [ // the limits spare what people read
  [table(97, 97), "td", 9409],
  ["> ".repeat(15) + "x", "blockquote", 15],
  ["**a** *b*\n".repeat(1000), "strong", 1000], // a long paragraph of short lines
  ["*a* ".repeat(200), "em", 200],
]) {
  answers.push(stream({ content }));
  press(articles().at(-1), "Regenerate");
  await idle();
  assert.equal(count(texts().at(-1), tag), number, `${tag} for ${content.slice(0, 50)}`);
}
const { blockTokens } = globalThis.marked.Lexer.prototype;
let read = 0; // by the lexer
globalThis.marked.Lexer.prototype.blockTokens = function (source, ...rest) {
  read += source.length;
  return blockTokens.call(this, source, ...rest);
};
const stairs = Array.from({ length: 18 }, (_, depth) => `${"> ".repeat(18 - depth)}${depth} a`).join("\n");
for (const content of [stairs, `${"> ".repeat(5000)}\n${"9 a\n".repeat(50)}`]) { // quotes are read again for lines after them
  read = 0;
  answers.push(stream({ content }));
  press(articles().at(-1), "Regenerate");
  await idle();
  assert(read < 200 * content.length, `${read} characters were read`);
  assert(texts().at(-1).includes("9 a"));
}
globalThis.marked.Lexer.prototype.blockTokens = blockTokens;
const { sanitize } = DOMPurify;
DOMPurify.sanitize = (text, options) => (text.includes("boom") ? assert.fail(text) : sanitize(text, options));
answers.push(stream({ content: "# a\n\nb\n\n**b" }, { content: "oom**" }, { content: "\n\nc" }));
press(articles().at(-1), "Regenerate");
await idle();
assert.equal(texts().at(-1), "# a\n\nb\n\n**boom**\n\nc", "what cannot be shown as Markdown is shown as text");
load();
assert.equal(texts().at(-1), "# a\n\nb\n\n**boom**\n\nc");
await until(() => elements.name.textContent === "· mine", "the model has a name");
press(articles().at(-1), "Regenerate");
await cut();

// A stream that ends early: what has come stays, and the error shows. Thinking alone stays open.
answers.push(stream({ reasoning_content: "hm" }).replace("data: [DONE]\n\n", ""));
press(articles().at(-1), "Regenerate");
await idle();
assert.match(elements.log.children.at(-1).textContent, /connection ended before/);
assert.match(articles().at(-1).textContent, /hm.*failed/s);
assert(articles().at(-1).children[1].open);

// The files that the browser saves: a request, and Markdown.
elements.system.value = "Be brief.";
elements["save-json"].click();
elements["save-markdown"].click();
assert.deepEqual(downloads.map(({ download }) => download), ["think.json", "think.md"]);
const [request, text] = await Promise.all(downloads.map(({ href }) => resolveObjectURL(href).text()));
const { messages, ...parameters } = JSON.parse(request);
assert.deepEqual(parameters, { model: "mine", top_p: 0.5 });
assert.deepEqual(messages.slice(0, 3), [system, { role: "user", content: "think" }, thought]);
assert(text.startsWith("# think\n\n## System\n\nBe brief.\n\n## You\n\nthink\n\n## Model\n\n<details>"));

// A reload shows the same; the page is left while an answer comes.
write("last");
await until(() => texts().length === 6 && texts()[5].length > 30, "the answer begins");
page.dispatchEvent(new Event("pagehide"));
assert(saved().messages.at(-1).content.length > 0);
const before = texts(), opened = sessionStorage.getItem("fgserve-open");
document.dispatchEvent(Object.assign(new Event("keydown"), { key: "Escape" }));
await idle();
localStorage.setItem("fgserve-chat-bad", '{ "title": "bad", "messages": [{ "role": "assistant", "content": "a" }] }');
for (const [place, text] of ["{", "5", "null", '"a"', "[]", '{ "title": "bad" }', '{ "title": 5, "messages": [] }',
  '{ "title": "bad", "messages": [null] }', '{ "title": "bad", "messages": [{ "role": "user", "content": 5 }] }',
  '{ "title": "bad", "messages": [{ "role": "user", "content": { "trim": 1 } }] }',
  '{ "title": "bad", "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "a", "reasoning_content": [] }] }',
].entries()) localStorage.setItem(`fgserve-chat-bad-${place}`, text);
for (const settings of ["{", "5", "null", '{ "temperature": { "a": 1 }, "top_p": 3, "system": ["b"], "model": null }']) {
  localStorage.setItem("fgserve-settings", settings);
  const { length } = chats();
  sessionStorage.setItem("fgserve-open", "bad-3");
  load();
  assert.deepEqual([texts(), chats().length], [[], length], "what is no chat is not opened");
  assert.deepEqual([elements.temperature.value, elements.top_p.value, elements.system.value], ["", "", ""]);
}
const odd = { title: "odd", id: 7, settings: { top_p: 0.5, temperature: "0.1" }, changed: "x", messages: [] };
localStorage.setItem("fgserve-chat-odd", JSON.stringify(odd));
sessionStorage.setItem("fgserve-open", "odd");
load();
assert.deepEqual([elements.temperature.value, elements.top_p.value, saved().title], ["0.1", "", "odd"]);
localStorage.removeItem("fgserve-chat-odd");
sessionStorage.setItem("fgserve-open", opened);
load();
assert.deepEqual(texts().slice(0, 5), before.slice(0, 5));
assert(texts()[5].startsWith(before[5].slice(0, 20)));
assert.deepEqual(chats(), ["think", "<i>second</i>"]);
assert.deepEqual([elements.system.value, elements.top_p.value], ["Be brief.", "0.5"]);
await until(() => elements.model.children.length, "the models are known");

// The theme is kept.
assert.equal(document.documentElement.style.colorScheme, "");
elements.theme.click();
elements.theme.click();
load();
assert.equal(document.documentElement.style.colorScheme, "dark");
assert.equal(elements.theme.textContent, "Theme: dark");
elements.theme.click();
assert.equal(document.documentElement.style.colorScheme, "");
await until(() => elements.model.children.length, "the models are known");

// A conversation that the browser cannot keep is an error that shows.
answers.push(stream({ content: "x".repeat(60_000) }));
write("fill it");
await idle();
assert.match(elements.log.textContent, /cannot keep this conversation \(the quota is exceeded\)/);
assert(texts().at(-1).includes("x".repeat(60_000)));

// A browser that refuses its storage keeps nothing, and the page works.
for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(globalThis, name, { get: () => assert.fail("the browser refuses") });
load();
await until(() => elements["ask-key"].open, "the key is asked for");
elements.key.value = key;
elements["key-form"].requestSubmit();
await until(() => elements.name.textContent === "· mine", "the model has a name");
answers.push(stream({ content: "fine" }));
write("hello");
await idle();
assert.deepEqual([texts().at(-1).includes("fine"), chats()], [true, ["hello"]]);
process.exit(); // with the timers of the page
