import { switchTheme } from "./themes.js";

const PAGES = { o: "/", r: "/runs", e: "/events", w: "/waits" };
let isGoTo = false; // the last key was g

function rows() {
  return [...document.querySelectorAll("main [data-row]")];
}

function moveFocus(distance) {
  const all = rows();
  const current = all.indexOf(document.activeElement);
  const next = current < 0 ? (distance > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, current + distance));
  all[next]?.focus();
  all[next]?.scrollIntoView({ block: "nearest" });
}

function showHelp() {
  const keys = document.getElementById("keys");
  if (keys.open) keys.close();
  else keys.showModal();
}

function toggleRow() {
  document.activeElement.closest("tr")?.querySelector("input[type=checkbox]")?.click();
}

const ACTIONS = {
  "/": () => document.querySelector("[data-search]")?.focus(),
  j: () => moveFocus(1),
  k: () => moveFocus(-1),
  x: toggleRow,
  t: switchTheme,
  "?": showHelp,
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (isGoTo && PAGES[event.key]) location.href = document.body.dataset.base + PAGES[event.key];
  else if (ACTIONS[event.key]) {
    event.preventDefault();
    ACTIONS[event.key]();
  }
  isGoTo = event.key === "g";
}

export function listenToKeys() {
  document.addEventListener("keydown", onKey);
  const help = document.querySelector("[data-help]");
  help.hidden = false;
  help.addEventListener("click", showHelp);
}
