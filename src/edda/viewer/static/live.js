// When something has changed, the same page is fetched and its live regions are brought up to date in place.
import { morph } from "./morph.js";
import { offerChoices } from "./choices.js";
import { offerCopies } from "./copy.js";
import { sayTimes } from "./times.js";

const PAUSE = 1000;
let due = false;
let busy = false;

function isHeld(region) {
  // New rows would move those under the pointer or below the fold: they wait behind a button.
  if (!("rows" in region.dataset)) return false;
  return scrollY > 40 || region.matches(":hover") || region.querySelector("tbody input:checked") !== null;
}

function keysOf(region) {
  return new Set([...region.querySelectorAll("tr[data-key]")].map((row) => row.dataset.key));
}

function offer(region, count) {
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
  if (added) offer(region, added);
}

function update(region, fresh, force) {
  if (!force && isHeld(region)) updateRows(region, fresh);
  else {
    if (region.previousElementSibling?.matches(".fresh")) region.previousElementSibling.remove();
    morph(region, fresh);
  }
  offerCopies(region);
  offerChoices(region);
}

async function refresh(force = false) {
  const answer = await fetch(location.href, { headers: { "X-Edda-Live": "1" } });
  if (!answer.ok || answer.redirected) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const region of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(region.id);
    if (fresh) update(region, fresh, force);
  }
  sayTimes();
}

async function work() {
  if (busy || document.hidden) return;
  busy = true;
  while (due && !document.hidden) {
    due = false;
    await refresh().catch(() => {});
    await new Promise((resume) => setTimeout(resume, PAUSE));
  }
  busy = false;
}

export function keepLive() {
  const address = document.body.dataset.stream;
  if (!address || !document.querySelector("[data-live]")) return;
  const sign = document.querySelector("[data-live-state]");
  const stream = new EventSource(address);
  stream.addEventListener("open", () => (sign.hidden = false));
  stream.addEventListener("error", () => (sign.hidden = true));
  stream.addEventListener("changed", () => {
    due = true;
    work();
  });
  document.addEventListener("visibilitychange", work);
}
