// Relative times go on by themselves, in the words that the server used.
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function sayDistance(seconds) {
  const size = Math.abs(seconds);
  if (size < 5) return seconds >= 0 ? "just now" : "in a moment";
  const [length, unit] = UNITS.find(([length]) => size >= length);
  const amount = Math.floor(size / length);
  return seconds >= 0 ? `${amount} ${unit} ago` : `in ${amount} ${unit}`;
}

function sayLength(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const index = UNITS.findIndex(([length]) => seconds >= length);
  const [length, unit] = UNITS[index];
  const [smaller, name] = UNITS[index + 1];
  const rest = Math.floor((seconds % length) / smaller);
  return `${Math.floor(seconds / length)} ${unit}` + (rest ? ` ${rest} ${name}` : "");
}

function since(text) {
  return (Date.now() - Date.parse(text)) / 1000;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function sayTimes() {
  for (const element of document.querySelectorAll("time[data-ago]")) write(element, sayDistance(since(element.dateTime)));
  for (const element of document.querySelectorAll("[data-since]")) write(element, sayLength(Math.max(0, since(element.dataset.since))));
}

export function keepTimes() {
  sayTimes();
  setInterval(() => document.hidden || sayTimes(), 5000);
}
