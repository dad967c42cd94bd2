"use strict";

// Shows a model's Markdown on the chat page, whatever it is. page.js uses `show`.

const MAX_DEPTH = 20; // of quotes, lists and emphasis inside each other
const MAX_INLINE = 5000; // characters of a paragraph that are read together: some take quadratic time
const MAX_MARKS = 500; // of emphasis in a paragraph
const MAX_CELLS = 10_000; // of a table, and of all tables of an answer; a row has all columns, however short it is
const MAX_READ = 2 * MAX_DEPTH; // times that a character is read: each quote reads again what is in it, some repeatedly

const MAX_FORMULA = 2000; // characters
const FORMULAS = [ // in TeX: the pattern, and whether the formula is displayed
  [/^\$\$([^$]+)\$\$/, true],
  [/^\\\[([^]+?)\\\]/, true],
  [/^\\\(([^]+?)\\\)/, false],
  [/^\$(?!\s)((?:\\.|[^$\\`\n])+)(?<!\s)\$(?!\d)/, false], // there is none in "from $5 to $6"
];

// Three things keep a model's text from becoming more than text: HTML in it is shown as it is written, DOMPurify lets
// through only these elements, and the page's Content-Security-Policy runs no other script and loads nothing.
const NO_ADDRESSES = ("align start accent accentunder columnalign depth display displaystyle fence form height largeop " +
  "linethickness lspace mathvariant maxsize minsize movablelimits notation rspace scriptlevel separator stretchy " +
  "symmetric voffset width").split(" "); // attributes
const PURE = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: ("a blockquote br code del em h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul " +
    "math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt mstyle " +
    "msub msubsup msup mtable mtd mtext mtr munder munderover").split(" "),
  ALLOWED_ATTR: ["href", "title", "class", ...NO_ADDRESSES], // the class of a code block names its language
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: NO_ADDRESSES,
};

/** marked's lexer with limits, so that no answer stops the page. What exceeds them is shown as text. */
class BoundedLexer extends marked.Lexer {
  #depth = 0;
  #left = 0; // number of characters that may still be read
  #mask = null; // the last paragraph in which emphasis was looked for, and whether it has too many marks
  #crowded = false;

  blockTokens(source, tokens = [], ...rest) {
    if (!this.#depth) this.#left = MAX_READ * source.length;
    this.#left -= source.length;
    const read = () => (this.#left < 0 ? null : super.blockTokens(source, tokens, ...rest));
    return this.#below(read) ?? (tokens.push({ type: "paragraph", raw: source, tokens: asText(source) }), tokens);
  }

  inlineTokens(source, tokens = []) {
    if (source.length <= MAX_INLINE) {
      const read = () => super.inlineTokens(source, tokens);
      if (this.#below(read)) return tokens;
    } else if (source.includes("\n")) { // lines by themselves
      source.split("\n").forEach((line, index) => {
        if (index) tokens.push({ type: "br", raw: "\n" });
        this.inlineTokens(line, tokens);
      });
      return tokens;
    }
    tokens.push(...asText(source));
    return tokens;
  }

  #below(read) {
    if (this.#depth === MAX_DEPTH) return null;
    this.#depth += 1;
    try {
      return read();
    } finally {
      this.#depth -= 1;
    }
  }

  isCrowded(mask) {
    if (mask !== this.#mask) {
      this.#mask = mask;
      this.#crowded = (mask.match(/[*_]+/g)?.length ?? 0) > MAX_MARKS;
    }
    return this.#crowded;
  }
}

/** The tokens of a text without Markdown. */
function asText(source) {
  const lines = source.split("\n").flatMap((text) => [{ type: "br", raw: "\n" }, { type: "text", raw: text, text }]);
  return lines.slice(1);
}

/** Return the formula at the beginning of a text as a token, or undefined. */
function formulaAt(source) {
  for (const [pattern, display] of FORMULAS) {
    const [raw, text] = pattern.exec(source.slice(0, MAX_FORMULA)) ?? [];
    if (raw && !/\n\s*\n/.test(raw)) return { raw, text, display };
  }
}

/** Return a formula as MathML, or as text if it is not valid TeX. */
function renderFormula({ raw, text, display }) {
  try {
    const options = { displayMode: display, throwOnError: true, maxExpand: 100, maxSize: [20, 20] };
    return temml.renderToString(text, options).replace(/ style="[^"]*"/g, ""); // which the page's policy forbids
  } catch {
    return this.parser.parseInline(asText(raw));
  }
}

const formula = {
  name: "formula",
  level: "inline",
  start: (source) => source.match(/\$|\\[[(]/)?.index,
  tokenizer(source) {
    const found = formulaAt(source);
    return found && { type: "formula", ...found };
  },
  renderer: renderFormula,
};
const formulaBlock = { // its lines could look like a list or a heading
  name: "formulaBlock",
  level: "block",
  start: (source) => source.match(/^(?:\$\$|\\\[)/m)?.index,
  tokenizer(source) {
    const found = formulaAt(source), end = found?.display && /^[ \t]*(?:\n|$)/.exec(source.slice(found.raw.length));
    return end ? { type: "formulaBlock", ...found, raw: found.raw + end[0] } : undefined;
  },
  renderer: renderFormula,
};

let cells = 0; // of the tables that are shown of an answer

marked.use({
  breaks: true,
  extensions: [formula, formulaBlock],
  tokenizer: { // undefined: there is none; false: look as usual
    table(source) {
      const [rows] = source.split(/\n[ \t]*\n/, 1);
      const columns = source.split("\n", 1)[0].split("|").length;
      return columns * rows.split("\n").length > MAX_CELLS ? undefined : false;
    },
    emStrong(_, mask) {
      return this.lexer.isCrowded(mask) ? undefined : false;
    },
    html: () => undefined, // no HTML block: its text is a paragraph
    tag(source) {
      const line = /^<br *\/?>/i.exec(source);
      return line ? { type: "br", raw: line[0] } : undefined;
    },
  },
  renderer: {
    heading({ tokens, depth }) { // h1 is the page's, h2 a message's
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    table({ header, rows, raw }) {
      cells += header.length * (rows.length + 1);
      return cells > MAX_CELLS && `<p>${this.parser.parseInline(asText(raw))}</p>`; // false: as usual
    },
    image({ href, text }) { // is not loaded
      const tokens = [{ type: "text", raw: text, text: text || href }];
      return this.link({ href, tokens });
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** The elements of one block of Markdown. */
function rendered(token) {
  const fragment = DOMPurify.sanitize(marked.parser([token]), PURE);
  for (const link of fragment.querySelectorAll("a")) link.target = "_blank", link.rel = "noopener noreferrer";
  for (const table of fragment.querySelectorAll("table")) wrap(table, "wide");
  for (const pre of fragment.querySelectorAll("pre")) {
    const head = document.createElement("div");
    wrap(pre, "block").prepend(head);
    add(head, "span", "", pre.firstChild.className.replace("language-", ""));
    addButton(head, "Copy", (button) => copy(pre.textContent, button)).setAttribute("aria-label", "Copy code");
  }
  return fragment;
}

function wrap(element, kind) {
  const box = document.createElement("div");
  box.className = kind;
  element.replaceWith(box);
  box.append(element);
  return box;
}

/** Show a text of Markdown, or more of one; the text itself where that fails. */
function show(shown, text, whole) {
  try {
    showMarkdown(shown, text.replace(/\r\n?/g, "\n"), whole);
  } catch {
    shown.blocks = null;
    shown.replaceChildren();
    add(shown, "div", "raw", text);
  }
}

/** Show a text of Markdown. Only the last two blocks are made anew, unless the text is `whole`: a line that has begun may
 * look like a block of its own and then belong to the one before. */
function showMarkdown(shown, text, whole) {
  if (!shown.blocks) shown.replaceChildren();
  const blocks = (shown.blocks ??= []); // where each begins in the text, and how many cells are before it
  const again = blocks.splice(whole ? 0 : -2);
  let start = again[0]?.start ?? 0;
  cells = again[0]?.cells ?? 0;
  again.forEach(() => shown.lastElementChild.remove());
  for (const token of new BoundedLexer(marked.defaults).lex(text.slice(start))) {
    if (token.type !== "space") {
      blocks.push({ start, cells });
      add(shown, "div", "").append(rendered(token));
    }
    start += token.raw.length;
  }
}
