"use strict";

// The page of all routes and their fields, made from openapi.json. Each route can be tried out.

const KEY = "fgserve-key"; // in sessionStorage, shared with the chat page

/** Append an element with a text, which is never read as HTML. */
function add(parent, tag, text = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  parent.append(element);
  return element;
}

const nameIn = (ref) => ref.slice(ref.lastIndexOf("/") + 1);

/** Describe the type of a field in words. */
function kindOf(schema) {
  if (schema.$ref) return nameIn(schema.$ref);
  if (schema.anyOf ?? schema.oneOf) return [...new Set((schema.anyOf ?? schema.oneOf).map(kindOf))].join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return `list of ${kindOf(schema.items ?? {})}`;
  return schema.type ?? "anything";
}

/** Describe the limits and the default of a field. */
function noteOn(schema, required) {
  const range = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]];
  const schemas = [schema, ...(schema.anyOf ?? [])];
  const limits = schemas.flatMap((one) => range.filter(([name]) => name in one).map(([name, sign]) => `${sign} ${one[name]}`));
  const standard = required ? ["required"] : schema.default != null ? [`default ${JSON.stringify(schema.default)}`] : [];
  return [...standard, ...limits, ...(schema.description ? [schema.description] : [])].join("; ");
}

/** Append a table of the fields of an object. */
function addFields(parent, { properties = {}, required = [] }) {
  const table = add(parent, "table");
  for (const [name, field] of Object.entries(properties)) {
    const row = add(table, "tr");
    add(add(row, "td"), "code", name);
    add(row, "td", kindOf(field));
    add(row, "td", noteOn(field, required.includes(name)));
  }
}

/** A body with the required fields of an object. */
function exampleOf({ properties = {}, required = [] }) {
  const values = { string: "", integer: 1, number: 1, boolean: true, array: [], object: {} };
  const known = { prompt: "Hello", input: "Hello", messages: [{ role: "user", content: "Hello" }], max_tokens: 50 };
  const value = (name) => known[name] ?? values[properties[name].type] ?? null;
  return Object.fromEntries(required.map((name) => [name, value(name)]));
}

/** Append a button that sends a request and shows the answer as it arrives. body: a text area, or null. */
function addTrial(parent, method, path, body) {
  const button = add(parent, "button", "Send"), shown = add(parent, "pre");
  button.addEventListener("click", async () => {
    const key = document.getElementById("key").value.trim();
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    sessionStorage.setItem(KEY, key);
    button.disabled = true;
    shown.textContent = "";
    try {
      const response = await fetch(path.slice(1), { method: method.toUpperCase(), headers, body: body?.value });
      shown.textContent = `${response.status} ${response.statusText}\n\n`;
      for await (const text of response.body.pipeThrough(new TextDecoderStream())) shown.append(text);
    } catch (error) {
      shown.append(error.message);
    }
    button.disabled = false;
  });
}

function addRoute(method, path, { requestBody }, schemas) {
  const details = add(document.getElementById("routes"), "details");
  add(details, "summary", `${method.toUpperCase()} ${path}`);
  const given = requestBody?.content["application/json"].schema;
  const names = given ? (given.anyOf ?? [given]).map(({ $ref }) => nameIn($ref)) : [];
  for (const name of names) {
    if (names.length > 1) add(details, "h3", name);
    addFields(details, schemas[name]);
  }
  if (path.includes("{")) return; // the path has a parameter to fill in
  const body = names.length ? add(details, "textarea") : null;
  if (body) {
    body.rows = 8;
    body.setAttribute("aria-label", `Body of ${path}`);
    body.value = JSON.stringify(exampleOf(schemas[names[0]]), null, 2);
  }
  addTrial(details, method, path, body);
}

async function start() {
  document.getElementById("key").value = sessionStorage.getItem(KEY) ?? "";
  const { paths, components } = await (await fetch("openapi.json")).json();
  const bodies = new Set();
  for (const [path, methods] of Object.entries(paths)) {
    for (const method of ["get", "post"]) if (methods[method]) addRoute(method, path, methods[method], components.schemas);
    const schema = methods.post?.requestBody?.content["application/json"].schema ?? {};
    for (const { $ref } of schema.anyOf ?? [schema]) if ($ref) bodies.add(nameIn($ref));
  }
  for (const [name, schema] of Object.entries(components.schemas)) {
    if (bodies.has(name)) continue;
    const details = add(document.getElementById("objects"), "details");
    add(details, "summary", name);
    addFields(details, schema);
  }
}

start().catch((error) => (document.getElementById("error").textContent = error.message));
