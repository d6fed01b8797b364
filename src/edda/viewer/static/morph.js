// Changes an element to match another and keeps the nodes that are equal: focus, selection, scrolling and checkboxes stay.

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.dataset.key || node.dataset.keep || node.id || null : null;
}

function isSame(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);
}

function isKept(a, b) {
  // A form that the user may be filling in is kept as long as its key is the same.
  return a.dataset?.keep !== undefined && a.dataset.keep === b.dataset?.keep;
}

function syncAttributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "hidden") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name === "hidden" && !old.hasAttribute("hidden")) continue; // a script has removed it
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function findMatch(here, next) {
  // Only a node with a key is searched among the later siblings: others may be equal to many.
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
      const removed = here;
      here = here.nextSibling;
      removed.remove();
    }
    here = match.nextSibling;
    morph(match, next);
  }
  while (here) {
    const removed = here;
    here = here.nextSibling;
    removed.remove();
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
