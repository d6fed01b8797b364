// After each event of the stream, the page is fetched again and its live regions are updated in place.
import { morph } from "./morph.js";
import { showControls } from "./controls.js";
import { updateTimes } from "./times.js";

const PAUSE = 1000;
let due = false;
let busy = false;

function isHeld(region) {
  // New rows would move the rows that the user points at or reads: a button shows their number instead.
  if (!("rows" in region.dataset)) return false;
  return scrollY > 40 || region.matches(":hover") || region.querySelector("tbody input:checked") !== null;
}

function keysOf(region) {
  return new Set([...region.querySelectorAll("tr[data-key]")].map((row) => row.dataset.key));
}

function showNewRowsButton(region, count) {
  let button = region.previousElementSibling;
  if (!button?.matches(".fresh")) {
    button = document.createElement("button");
    button.type = "button";
    button.className = "fresh";
    button.addEventListener("click", () => {
      button.remove();
      scrollTo({ top: 0 });
      refresh(true);
    });
    region.before(button);
  }
  button.textContent = `${count} new: show`;
}

function updateRows(region, fresh) {
  for (const row of region.querySelectorAll("tr[data-key]")) {
    const next = fresh.querySelector(`tr[data-key="${CSS.escape(row.dataset.key)}"]`);
    if (next) morph(row, next);
  }
  const before = keysOf(region);
  const added = [...keysOf(fresh)].filter((key) => !before.has(key)).length;
  if (added) showNewRowsButton(region, added);
}

function update(region, fresh, force) {
  if (!force && isHeld(region)) updateRows(region, fresh);
  else {
    if (region.previousElementSibling?.matches(".fresh")) region.previousElementSibling.remove();
    morph(region, fresh);
  }
  showControls(region);
}

async function refresh(force = false) {
  const response = await fetch(location.href, { headers: { "X-Edda-Live": "1" } });
  if (!response.ok || response.redirected) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const region of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(region.id);
    if (fresh) update(region, fresh, force);
  }
  updateTimes();
}

async function refreshWhileDue() {
  if (busy || document.hidden) return;
  busy = true;
  while (due && !document.hidden) {
    due = false;
    await refresh().catch(() => {});
    await new Promise((resume) => setTimeout(resume, PAUSE));
  }
  busy = false;
}

export function startLiveUpdates() {
  const url = document.body.dataset.stream;
  if (!url || !document.querySelector("[data-live]")) return;
  const indicator = document.querySelector("[data-live-state]");
  const stream = new EventSource(url);
  stream.addEventListener("open", () => (indicator.hidden = false));
  stream.addEventListener("error", () => (indicator.hidden = true));
  stream.addEventListener("changed", () => {
    due = true;
    refreshWhileDue();
  });
  document.addEventListener("visibilitychange", refreshWhileDue);
}
