"use strict";

// Shows a model's Markdown on the chat page, whatever it is. page.js uses `show`.

const MAX_DEPTH = 20; // of quotes, lists and emphasis inside each other
const MAX_INLINE = 5000; // characters of a paragraph that are read together: some take quadratic time
const MAX_MARKS = 500; // of emphasis in a paragraph
const MAX_CELLS = 10_000; // of a table; a row has all columns, however short it is

// Three things keep a model's text from becoming more than text: HTML in it is shown as it is written, DOMPurify lets
// through only these elements, and the page's Content-Security-Policy runs no other script and loads nothing.
const PURE = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: ("a blockquote br code del em h3 h4 h5 h6 hr li ol p pre strong " +
    "table tbody td th thead tr ul").split(" "),
  ALLOWED_ATTR: ["href", "title", "align", "start", "class"], // the class of a code block names its language
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
};

/** marked's lexer with limits, so that no answer stops the page. What exceeds them is shown as text. */
class BoundedLexer extends marked.Lexer {
  #depth = 0;
  #mask = null; // the last paragraph in which emphasis was looked for, and whether it has too many marks
  #crowded = false;

  blockTokens(source, tokens = [], ...rest) {
    const read = () => super.blockTokens(source, tokens, ...rest);
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

marked.use({
  breaks: true,
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
    shown.starts = null;
    shown.replaceChildren();
    add(shown, "div", "raw", text);
  }
}

/** Show a text of Markdown. Only the last two blocks are made anew, unless the text is `whole`: a line that has begun may
 * look like a block of its own and then belong to the one before. */
function showMarkdown(shown, text, whole) {
  if (!shown.starts) shown.replaceChildren();
  const starts = (shown.starts ??= []); // of the blocks in the text
  const again = starts.splice(whole ? 0 : -2);
  let end = again[0] ?? 0;
  again.forEach(() => shown.lastElementChild.remove());
  for (const token of new BoundedLexer(marked.defaults).lex(text.slice(end))) {
    if (token.type !== "space") {
      add(shown, "div", "").append(rendered(token));
      starts.push(end);
    }
    end += token.raw.length;
  }
}
