import { bar, element, events, model, percent } from "/page/api.js";

const TOP = 5;
const $ = (id) => document.getElementById(id);
const conversation = [];
let running = null;

// One request's tokens as the server sent them, and how to send it again.
class Reply {
  constructor(body) {
    this.body = body;
    this.text = "";
    this.tokens = [];
    this.finish = null;
    this.usage = null;
    this.firstMs = null;
    this.totalMs = null;
  }

  async run(signal, onTokens) {
    const start = performance.now();
    try {
      for await (const event of events("/v1/chat/completions", this.body, signal)) {
        if (event.usage) this.usage = event.usage;
        const choice = event.choices[0];
        if (!choice) continue;
        const content = choice.delta.content ?? "";
        const thought = choice.delta.reasoning_content ?? "";
        this.text += content;
        const tokens = choice.logprobs?.content ?? [];
        if (tokens.length && this.firstMs === null) this.firstMs = performance.now() - start;
        this.tokens.push(...tokens);
        if (content || thought || tokens.length) onTokens(tokens, content, thought);
        if (choice.finish_reason) this.finish = choice.finish_reason;
      }
    } finally {
      this.totalMs = performance.now() - start;
    }
  }
}

// Bytes of several tokens can make one character, so text is decoded across tokens.
class TokenText {
  constructor() {
    this.decoder = new TextDecoder();
  }

  next(token) {
    return this.decoder.decode(new Uint8Array(token.bytes ?? []), { stream: true });
  }
}

function tint(probability) {
  return `p${Math.min(9, Math.floor(probability * 10))}`;
}

function addMessage(role, text) {
  document.querySelector("#messages .hint")?.remove();
  const body = element("div", { className: "body" }, text);
  const message = element("article", { className: `message ${role}` }, element("h3", {}, role === "user" ? "You" : "Model"), body);
  $("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return { message, body };
}

function showTokens(body, decoder, tokens) {
  for (const token of tokens) {
    const probability = Math.exp(token.logprob);
    const span = element("span", { className: `token ${tint(probability)}`, tabIndex: 0 }, decoder.next(token));
    span.setAttribute("aria-label", `${token.token} ${percent(probability)}`);
    span.token = token;
    body.append(span);
  }
}

function request(messages, name) {
  const body = { model: name, messages, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: TOP };
  for (const field of ["temperature", "top_p", "seed", "max_tokens"]) {
    const value = $(field).value;
    if (value !== "") body[field] = Number(value);
  }
  return body;
}

function summary(reply) {
  const generated = reply.tokens.length;
  const seconds = (reply.totalMs - (reply.firstMs ?? 0)) / 1000;
  const parts = [`${generated} tokens`, `finish: ${reply.finish ?? "stopped"}`];
  if (reply.firstMs !== null) parts.push(`first token ${reply.firstMs.toFixed(0)} ms`);
  if (generated > 1 && seconds > 0) parts.push(`${((generated - 1) / seconds).toFixed(1)} tok/s`);
  if (reply.usage) parts.push(`prompt ${reply.usage.prompt_tokens}, ${reply.usage.prompt_tokens_details?.cached_tokens ?? 0} from cache`);
  return parts.join(" · ");
}

// Bytes, logprobs and alternatives, number for number: JSON keeps every bit of a double.
function sameBits(first, second) {
  const shorter = Math.min(first.tokens.length, second.tokens.length);
  for (let i = 0; i < shorter; i++) {
    if (JSON.stringify(first.tokens[i]) !== JSON.stringify(second.tokens[i])) return i;
  }
  return first.tokens.length === second.tokens.length ? -1 : shorter;
}

async function askAgain(reply, button, note) {
  button.disabled = true;
  note.textContent = "asking again…";
  const again = new Reply(reply.body);
  try {
    await again.run(undefined, () => {});
    const differs = sameBits(reply, again);
    note.className = differs < 0 ? "verdict ok" : "verdict bad";
    note.textContent = differs < 0
      ? `same bits: ${again.tokens.length} tokens and all their logprobs are equal`
      : `first difference at token ${differs + 1}`;
  } catch (error) {
    note.className = "verdict bad";
    note.textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  const { message, body } = addMessage("assistant", "");
  const messages = $("system").value ? [{ role: "system", content: $("system").value }, ...conversation] : [...conversation];
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const decoder = new TokenText();
  const foot = element("footer");
  message.append(foot);
  let reply;
  try {
    reply = new Reply(request(messages, await model()));
    await reply.run(running.signal, (tokens) => {
      showTokens(body, decoder, tokens);
      message.scrollIntoView({ block: "end" });
    });
  } catch (error) {
    if (error.name !== "AbortError") foot.append(element("p", { className: "verdict bad" }, error.message));
  } finally {
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
  }
  if (reply?.tokens.length) {
    conversation.push({ role: "assistant", content: reply.text });
    foot.append(element("p", {}, summary(reply)));
  } else {
    conversation.pop();
  }
  if (reply?.finish) {
    const note = element("span", { className: "verdict" });
    const button = element("button", { type: "button" }, "Ask again, compare bits");
    button.addEventListener("click", () => askAgain(reply, button, note));
    foot.append(button, note);
  }
  message.scrollIntoView({ block: "end" });
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value.trim() || $("question").placeholder;
  if (running) return;
  $("question").value = "";
  send(text);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  $("messages").replaceChildren();
});

const tip = $("tip");

function showTip(span) {
  const { token } = span;
  const alternatives = token.top_logprobs ?? [];
  const rows = alternatives.map((entry) => bar(JSON.stringify(entry.token), Math.exp(entry.logprob), entry.token === token.token));
  if (!alternatives.some((entry) => entry.token === token.token)) {
    rows.unshift(bar(JSON.stringify(token.token), Math.exp(token.logprob), true));
  }
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  const left = Math.min(box.left, window.innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + tip.offsetHeight + 8 < window.innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? box.bottom + 4 : box.top - tip.offsetHeight - 4}px`;
}

for (const kind of ["pointerover", "focusin"]) {
  $("messages").addEventListener(kind, (event) => {
    if (event.target.token) showTip(event.target);
  });
}
for (const kind of ["pointerout", "focusout"]) {
  $("messages").addEventListener(kind, () => {
    tip.hidden = true;
  });
}
