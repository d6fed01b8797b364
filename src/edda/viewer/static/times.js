// Updates relative times and durations, in the format of formatting.py.
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function formatRelative(seconds) {
  const size = Math.abs(seconds);
  if (size < 5) return seconds >= 0 ? "just now" : "in a moment";
  const [length, unit] = UNITS.find(([length]) => size >= length);
  const amount = Math.floor(size / length);
  return seconds >= 0 ? `${amount} ${unit} ago` : `in ${amount} ${unit}`;
}

function formatDuration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const index = UNITS.findIndex(([length]) => seconds >= length);
  const [length, unit] = UNITS[index];
  const [smaller, name] = UNITS[index + 1];
  const rest = Math.floor((seconds % length) / smaller);
  return `${Math.floor(seconds / length)} ${unit}` + (rest ? ` ${rest} ${name}` : "");
}

function secondsSince(text) {
  return (Date.now() - Date.parse(text)) / 1000;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function updateTimes() {
  for (const element of document.querySelectorAll("time[data-ago]")) setText(element, formatRelative(secondsSince(element.dateTime)));
  for (const element of document.querySelectorAll("[data-since]")) setText(element, formatDuration(Math.max(0, secondsSince(element.dataset.since))));
}

export function startTimeUpdates() {
  updateTimes();
  setInterval(() => document.hidden || updateTimes(), 5000);
}
