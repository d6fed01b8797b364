// Makes one element like another without replacing what is the same: focus, selection, scroll and ticks stay.

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.dataset.key || node.dataset.keep || node.id || null : null;
}

function isSame(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);
}

function isKept(a, b) {
  // A form that somebody may be filling in stays for as long as it is the same form.
  return a.dataset?.keep !== undefined && a.dataset.keep === b.dataset?.keep;
}

function syncAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "hidden") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name === "hidden" && !old.hasAttribute("hidden")) continue; // a script has shown it
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function findMatch(here, next) {
  // Only what has a key is looked for further on: anything else may be like many others.
  if (!here || keyOf(next) === null) return here && isSame(here, next) ? here : null;
  while (here && !isSame(here, next)) here = here.nextSibling;
  return here;
}

function syncChildren(old, fresh) {
  let here = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    const match = findMatch(here, next);
    if (!match) {
      old.insertBefore(document.importNode(next, true), here);
      continue;
    }
    while (here !== match) {
      const gone = here;
      here = here.nextSibling;
      gone.remove();
    }
    here = match.nextSibling;
    morph(match, next);
  }
  while (here) {
    const gone = here;
    here = here.nextSibling;
    gone.remove();
  }
}

export function morph(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (isKept(old, fresh) || old.isEqualNode(fresh)) return;
  syncAttributes(old, fresh);
  syncChildren(old, fresh);
}
