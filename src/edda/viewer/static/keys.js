import { switchTheme } from "./themes.js";

const PLACES = { o: "/", r: "/runs", e: "/events", w: "/waits" };
let going = false;

function rows() {
  return [...document.querySelectorAll("main [data-row]")];
}

function step(distance) {
  const all = rows();
  const now = all.indexOf(document.activeElement);
  const next = now < 0 ? (distance > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, now + distance));
  all[next]?.focus();
  all[next]?.scrollIntoView({ block: "nearest" });
}

function showHelp() {
  const keys = document.getElementById("keys");
  if (keys.open) keys.close();
  else keys.showModal();
}

function choose() {
  document.activeElement.closest("tr")?.querySelector("input[type=checkbox]")?.click();
}

const DOES = {
  "/": () => document.querySelector("[data-search]")?.focus(),
  j: () => step(1),
  k: () => step(-1),
  x: choose,
  t: switchTheme,
  "?": showHelp,
};

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (going && PLACES[event.key]) location.href = document.body.dataset.base + PLACES[event.key];
  else if (DOES[event.key]) {
    event.preventDefault();
    DOES[event.key]();
  }
  going = event.key === "g";
}

export function listenToKeys() {
  document.addEventListener("keydown", press);
  const help = document.querySelector("[data-help]");
  help.hidden = false;
  help.addEventListener("click", showHelp);
}
