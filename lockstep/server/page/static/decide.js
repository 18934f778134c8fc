import { bar, element, get, model, percent, post } from "/page/api.js";

const list = document.getElementById("questions");
const answers = document.getElementById("answers");

const EXAMPLES = {
  predicate: ["Has the customer paid?", ""],
  choice: ["What should happen next?", "wait\nremind\nescalate"],
  score: ["How annoyed does the customer sound?", "calm\nirritated\nangry"],
};
const NAMES = { predicate: "yes / no", choice: "choice", score: "score" };

// The branches of a model decide, too.
const by = document.querySelector("#decide-by select");

document.getElementById("tab-decide").addEventListener("focus", async () => {
  let models;
  try {
    models = (await get("/v1/models")).data;
  } catch {
    return; // without a key: the first answer says so
  }
  const chosen = by.value;
  by.replaceChildren(...models.map(({ id }) => element("option", { value: id, selected: id === chosen }, id)));
  by.parentElement.hidden = models.length < 2;
});

function add(type) {
  const [instructions, options] = EXAMPLES[type];
  const rows = [element("label", {}, "Question ", element("input", { className: "instructions", value: instructions }))];
  if (type !== "predicate") {
    const label = type === "choice" ? "Options, one a line" : "Levels from low to high, one a line";
    rows.push(element("label", {}, label, element("textarea", { className: "options", rows: 3, value: options })));
  }
  const remove = element("button", { type: "button", className: "remove", title: "Remove this question" }, "×");
  const box = element("fieldset", {}, element("legend", {}, NAMES[type]), ...rows, remove);
  box.dataset.type = type;
  remove.addEventListener("click", () => box.remove());
  list.append(box);
}

function read(box) {
  const question = { type: box.dataset.type, instructions: box.querySelector(".instructions").value };
  const options = (box.querySelector(".options")?.value ?? "").split("\n").map((line) => line.trim()).filter(Boolean);
  if (question.type === "choice") question.choices = options.map((value) => ({ value }));
  if (question.type === "score") question.levels = options.map((label) => ({ label }));
  return question;
}

function describe(question, answer) {
  const box = element("article", { className: "answer" }, element("h3", {}, question.instructions));
  if (answer.type === "predicate") {
    box.append(bar("yes", answer.probability, answer.probability >= 0.5), bar("no", 1 - answer.probability, answer.probability < 0.5));
  } else if (answer.type === "choice") {
    box.append(...answer.probabilities.map((entry) => bar(String(entry.value), entry.probability, entry.value === answer.choice)));
  } else if (answer.type === "score") {
    box.append(...answer.probabilities.map((entry) => bar(entry.label, entry.probability)));
    box.append(element("p", {}, `expected level ${answer.score.toFixed(2)} of 0 to ${answer.probabilities.length - 1}`));
  } else {
    box.append(element("p", { className: "verdict bad" }, answer.type));
  }
  if (answer.confidence !== undefined) box.append(element("p", {}, `confidence ${percent(answer.confidence)}`));
  return box;
}

document.getElementById("decide-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = document.getElementById("decide-send");
  const questions = [...list.children].map(read);
  button.disabled = true;
  const start = performance.now();
  try {
    const body = { model: by.value || (await model()), input: document.getElementById("decide-input").value, questions };
    const reply = await post("/v1/decisions", body);
    const usage = reply.usage;
    const note = `${(performance.now() - start).toFixed(0)} ms · ${usage.input_tokens} input tokens, ${usage.input_tokens_details?.cached_tokens ?? 0} from cache`;
    answers.replaceChildren(...reply.answers.map((answer, index) => describe(questions[index], answer)), element("p", { className: "note" }, note));
  } catch (error) {
    answers.replaceChildren(element("p", { className: "verdict bad" }, error.message));
  } finally {
    button.disabled = false;
  }
});
for (const button of document.querySelectorAll("[data-add]")) {
  button.addEventListener("click", () => add(button.dataset.add));
}
add("predicate");
add("choice");
