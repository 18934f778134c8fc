import { get } from "/page/api.js";
import "/page/chat.js";
import "/page/decide.js";
import { show as showEngine } from "/page/engine.js";

const tabs = [...document.querySelectorAll('[role="tab"]')];

function select(tab, focus = false) {
  for (const other of tabs) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
  }
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  if (focus) tab.focus();
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(tabs.at((index + step) % tabs.length), true);
  });
}
const wanted = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
if (wanted) select(wanted);

const status = document.getElementById("status");
const POLL_MS = 1000;

async function poll() {
  try {
    const stats = await get("/stats");
    status.textContent = `${stats.info.model}: ${stats.state}, ${stats.running} running, ${stats.tokens_per_second.toFixed(0)} tok/s`;
    status.className = stats.state === "ready" ? "status ok" : "status bad";
    showEngine(stats);
  } catch (error) {
    status.textContent = error.message;
    status.className = "status bad";
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}
poll();
