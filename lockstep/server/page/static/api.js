// The public routes as this page uses them.

const KEY = "lockstep-key";
const keyField = document.getElementById("key");
keyField.value = sessionStorage.getItem(KEY) ?? "";
document.getElementById("key-form").addEventListener("submit", (event) => event.preventDefault());
keyField.addEventListener("change", () => sessionStorage.setItem(KEY, keyField.value));

function headers() {
  const result = { "Content-Type": "application/json" };
  if (keyField.value) result.Authorization = `Bearer ${keyField.value}`;
  return result;
}

async function problem(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not this server's own error body: the status line has to do
  }
  if (response.status === 401) message += " (enter an API key at the top right)";
  return new Error(message);
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await problem(response);
  return response.json();
}

export async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw await problem(response);
  return response.json();
}

// Server-sent events of a POST, one parsed object each, until [DONE].
export async function* events(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw await problem(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

let modelName;
export async function model() {
  modelName ??= (await get("/v1/models")).data[0].id;
  return modelName;
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A labelled bar of a probability in [0, 1].
export function bar(label, probability, chosen = false) {
  const meter = element("progress", { max: 1, value: probability });
  meter.setAttribute("aria-label", `${label}: ${percent(probability)}`);
  return element("div", { className: chosen ? "bar chosen" : "bar" }, element("span", { className: "bar-label" }, label), meter, element("span", { className: "bar-value" }, percent(probability)));
}

export function percent(probability) {
  const value = probability * 100;
  if (value > 0 && value < 0.1) return "<0.1%";
  return `${value.toFixed(value >= 99.95 || value === 0 ? 0 : 1)}%`;
}
